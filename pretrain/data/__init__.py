"""Prepared tokens: from shards on disk to the windows of a step.

The window that is read is a pure function of (seed, step, micro-step, rank): any change to batches changes every run
that is resumed. The on-disk format is manifest and shards (docs/shards.md).

    manifest, shards: prepared folders
    object_store: shards at a URL, read ahead of the step
    foreign_shards: shard formats of other projects
    data_record: what a run records of its sources' manifests
    tokenizer: tokenizers, from local files or the Hub
    sampling: where windows begin
    packing: windows without cut documents
    transformations: changes of training windows by extensions
    batches: which windows a step reads, and validation
    dispatch: one rank that reads batches for all
    vocabulary: its size, and the model sized by it
    new_tokens: tokens that a pretrained model does not have yet
"""
