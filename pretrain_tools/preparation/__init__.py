"""prepare_data.py: raw documents to shards.

The same input gives the same bytes, whatever the workers and interruptions; plan defines what decides them.

    arguments, request: the command line, and the request that it makes
    plan: the request, and its differences from the one that a folder was made from
    prepare, progress: the resumable preparation
    validation_split: documents held out, or the tail of one
    encode: texts to ids
    worker: the encoding of parts
    workers, ray_workers: processes of this machine, or of a cluster, that perform jobs
    encoded_part: what workers return, and the counts
    collector, deduplicate, shard_writer, text_files: encoded parts to shards; their documents as text
    near_duplicate_search: near duplicates in prepared folders, on disk
    text_decoder: token ids to text, for that search
    slices, upload: a preparation over several machines; outputs that are URLs
    inspect: the contents of a prepared folder, and what was removed from it
    tokenizer_training, tokenizer_extension: tokenizers from text
"""
