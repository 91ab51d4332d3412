"""Cleans documents before encoding: removes or changes them, and reports what it did. Finds near duplicates.

Each decision depends on one document, so workers, slices and interruptions change nothing.

    stages: the interface of a stage; runs all stages over a part's texts
    filters: filters by name, and user functions
    published: the rules of Gopher, C4 and FineWeb
    compiled: kernels for words, lines and repetitions
    forms: lines in documents; detects prose, line-broken text, code and tables
    language, personal_data: filters by language; replaces personal data
    quality_classifier: a linear quality model, trained here
    decontamination, item_index: removes benchmark items; their index
    lm_eval_items: the items in lm-eval tasks
    account: counts and samples of removed documents by rule
    near_duplicates, folded_words: documents' signatures and similarity; their words
"""
