"""Reads prepared tokens, from shards on disk to the windows of a step.

A window is a pure function of (seed, step, micro-step, rank), so any change to batches changes every resumed run. The
on-disk format consists of manifest and shards (docs/shards.md).

    manifest, shards: prepared folders
    object_store: shards at a URL, read ahead of the step
    foreign_shards: shard formats of other projects
    data_record: a run's record of its sources' manifests
    tokenizer: tokenizers, from local files or the Hub
    sampling: positions of windows
    packing: windows without cut documents
    transformations: extensions' changes of training windows
    batches: the windows of each step, and of validation
    dispatch: one rank that reads batches for all
    vocabulary: its size, and the model's
    new_tokens: tokens missing in a pretrained model
"""
