"""Reads shards from disk and builds training windows from them.

A window is a pure function of (seed, step, micro-step, rank), computed in `batches`. Changing that function changes
the data of every resumed run. docs/shards.md describes the on-disk format.

    manifest, shards: prepared folders
    object_store: shards at a URL, with prefetching
    foreign_shards: other projects' shard formats
    data_record: summaries of manifests for a run's record
    tokenizer: tokenizers from local files or the Hub
    sampling: window positions
    packing: windows of whole documents
    transformations: user-defined changes to training windows
    batches: windows for training and validation
    dispatch: batches that one rank reads for all ranks
    vocabulary: vocabulary sizes of the data and the model
    new_tokens: tokens missing from a pretrained model
"""
