"""Turns raw documents into shards, for prepare_data.py.

The same input gives the same bytes for any number of workers and interruptions. The module plan defines everything
that affects them.

    arguments, request: the command line, and the request that it makes
    plan: the request, and its differences from an earlier one
    prepare, progress: the resumable preparation
    validation_split: held-out documents, or the held-out tail of one
    encode: encodes texts to token IDs
    worker: encodes parts
    workers, ray_workers: run jobs in local processes or on a cluster
    encoded_part: results from workers, and counts
    collector, deduplicate, shard_writer, text_files: write encoded parts to shards, and their documents as text
    near_duplicate_search: finds near duplicates in prepared folders, on disk
    text_decoder: decodes token IDs for that search
    slices, upload: preparation on several machines; outputs at URLs
    inspect: shows a prepared folder's content and removed documents
    tokenizer_training, tokenizer_extension: train and extend tokenizers
"""
