"""Removes or edits documents before tokenization, and finds near duplicates.

Except for near duplicates, each decision depends on a single document.

    stages: defines the stage interface and runs all stages
    filters: parses --filter, and loads user-defined functions
    published: Gopher, C4 and FineWeb filters
    compiled: numba kernels for words, lines and repetitions
    document_types: the types of documents that forms detects
    forms: splits documents into lines, and detects hard-wrapped text, code and tables
    language, personal_data: filter by language, and replace personal data
    quality_classifier: trains and applies a linear quality classifier
    decontamination, item_index: remove documents that contain benchmark items
    lm_eval_items: extracts the items from lm-eval tasks
    account: collects statistics and samples of removed documents
    near_duplicates, folded_words: compute MinHash signatures and similarities
"""
