"""Finds raw documents, detects their format and reads them one by one.

To add a format, write a generator in formats, or in containers if it needs a library (docs/input_formats.md).

    sources: local files and URLs, split into parts for workers
    formats, containers, byte_stream: formats; formats that need a library; bytes of a file
    archives: tar
    records: texts from fields
    document_index: a shard's documents, and the origin of each
    hub_dataset: Hub datasets and presets
"""
