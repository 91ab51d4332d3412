"""Reads prepared tokens, from shards on disk to a step's windows.

A window is a pure function of (seed, step, micro-step, rank), so any change in `batches` changes every resumed run.
The on-disk format consists of manifest and shards (docs/shards.md).

    manifest, shards: prepared folders
    object_store: shards at a URL, read ahead of the step
    foreign_shards: other projects' shard formats
    data_record: a run's record of its sources' manifests
    tokenizer: tokenizers, from local files or the Hub
    sampling: positions of windows
    packing: windows without cut documents
    transformations: changes to training windows by extensions
    batches: the windows of each step, and of validation
    dispatch: one rank reads the batches for all
    vocabulary: its size, and the model's
    new_tokens: tokens that a pretrained model lacks
"""
