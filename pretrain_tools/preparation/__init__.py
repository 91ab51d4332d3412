"""prepare_data.py: raw documents to shards.

The same input gives the same bytes, whatever the workers and interruptions; plan defines what decides them.

    arguments, request: the command line, and what it asks for
    plan: the request, and how it differs from what a folder was made from
    prepare, progress: the resumable preparation
    validation_split: documents held out, or the tail of one
    encode, long_text: texts to ids
    worker, ray_workers: a worker's part of the input; workers on other machines
    collector, deduplicate, shard_writer, text_files: encoded parts to shards; their documents as text
    duplicate_work: who performs the tasks of the search for near duplicates
    slices, upload: a preparation over several machines; outputs that are URLs
    inspect, dry_run: contents of a prepared folder; a report on a few documents before a long preparation
    tokenizer_training: tokenizers from text
"""
