"""What removes or changes documents before they are encoded, and the account of it; and near duplicates.

Stages depend on a document alone, so workers, slices and interruptions change nothing.

    stages: the interface of a stage, and the run of all stages over the texts of a part
    filters, user_function: filters by name; a function of the user's
    published: the rules of Gopher, C4 and FineWeb
    forms: the lines of documents; whether a text is prose, set in lines, code or a table
    language, lists: by language, words, addresses, length and characters; personal data replaced
    quality_classifier: a linear model of quality, trained here
    compiled/: what is measured of texts and searched in them
    decontamination: benchmarks kept out
    benchmarks, lm_eval_items: the items of benchmarks; those of lm-eval's tasks
    account: what was removed by which rule, in counts and in samples
    repeated_text: lines and paragraphs that many documents have
    near_duplicates: signatures of documents, and how alike two are
    near_duplicate_search: the search for near duplicates in prepared folders, on disk
    report: the account as a page, with what else a prepared folder records
"""
