"""prepare_data.py: raw documents to shards.

The same input gives the same bytes, whatever the workers and the interruptions: plan says what decides them.

    arguments, plan: what is asked for; how that differs from what a folder was made from
    prepare, progress: the run that continues
    encode, long_text: texts to ids
    worker, ray_workers: a worker's part of the input; workers on other machines
    collector, deduplicate, shard_writer: what becomes of a part
    slices, upload: a preparation over several machines; outputs that are URLs
    inspect: a look into a folder
    tokenizer_training: tokenizers from text
"""
