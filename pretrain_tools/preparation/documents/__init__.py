"""Raw documents: where they are, in which format, one by one.

A new format is one generator in formats, or in containers when it needs a library (docs/input_formats.md).

    sources: files here and behind URLs, divided into parts for workers
    formats, containers, byte_stream: formats; those that need a library; bytes of a file
    archives: tar
    records: texts made of fields
    document_index: which documents are in a shard, and where each came from
    hub_dataset: datasets of the Hub, and presets
"""
