"""Finds and reads documents in files, archives and Hub datasets.

To add a file format, write a generator in formats, or in containers if it needs a library (docs/input_formats.md).

    sources: finds files and splits them into parts for workers
    formats, containers, archives: read text formats, formats that need a library, and tar archives
    byte_stream: reads and decompresses files
    records: builds documents from fields
    document_index: index of the documents in a shard
    hub_dataset: reads Hub datasets and presets
"""
