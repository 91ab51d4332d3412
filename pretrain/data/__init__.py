"""Prepared tokens: from shards on disk to the windows of a step.

Which window is read is a pure function of (seed, step, micro-step, rank): whoever touches batches changes every
run that continues. The on-disk format is manifest and shards (docs/data.md).

    manifest, shards: prepared folders
    foreign_shards: the formats of others
    data_record: what a run keeps of their manifests
    tokenizer: tokenizers, read from wherever they are
    batches: which windows a step takes, and validation
    dispatch: one process that reads them for all
    vocabulary: its size, and the model sized by it
"""
