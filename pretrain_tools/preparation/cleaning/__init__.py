"""Cleaning, which removes or changes documents before they are encoded, and the account of it; near duplicates.

Stages depend on a document alone, so workers, slices and interruptions change nothing.

    stages: the interface of a stage, and the run of all stages over the texts of a part
    filters: filters by name, and functions of the user's
    published: the rules of Gopher, C4 and FineWeb
    compiled: kernels: words, lines and repetitions
    forms: the lines of documents; prose, text set in lines, code or a table
    language, personal_data: by language; personal data replaced
    quality_classifier: a linear model of quality, trained here
    decontamination, item_index: benchmarks kept out; the index of their items
    lm_eval_items: the items of lm-eval's tasks
    account: what was removed by which rule, in counts and in samples
    near_duplicates, folded_words: signatures of documents, and their similarity; their words
"""
