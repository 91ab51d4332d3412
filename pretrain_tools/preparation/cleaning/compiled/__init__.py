"""What is measured of texts and searched in them, compiled by numba.

These modules import numba, so they are imported where they are used.

    kept: machine code and tables on disk, for these sources only
    text_blocks: a text 64 bytes at a time, by the processor's vectors; characters and hashes of bytes
    characters, words: classes of characters; the division into words and lines
    text_statistics: repeated runs of words, phrases, kinds of characters, features of a classifier
    function_words: those of each language in samples of texts
    piece_hashes: lines and paragraphs with their hashes
    folded_words: of documents that are compared, as hashes
    smallest_hashes: of the shingles of documents
    item_index: where the items of benchmarks stand in documents
"""
