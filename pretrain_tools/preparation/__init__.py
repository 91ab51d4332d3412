"""Converts raw documents to token shards (prepare_data.py).

The output is deterministic: it doesn't depend on the number of workers or on interruptions.

    arguments, request: parse the command line
    plan: defines the preparation request, and checks that it matches an existing folder
    prepare, progress: run and resume a preparation, and show its progress
    validation_split: assigns documents to the training or validation split
    encode: tokenizes text
    worker: reads, cleans and tokenizes one part of the input
    workers: runs jobs in local processes or on a Ray cluster
    encoded_part: results and counts returned by workers
    collector, shard_writer, text_files: remove exact duplicates and write shards and text
    near_duplicate_search: finds near duplicates in prepared folders
    slices, upload: split work across machines, and upload outputs to URLs
    inspect, verification: describe a prepared folder, and verify its hashes
    tokenizer_training, tokenizer_extension: train and extend tokenizers
"""
