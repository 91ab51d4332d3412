"""Publishes models on the Hub (publish.py).

All statements about a model are based on the run's files (docs/publish.md).

    publish, staging, hub_upload: implement publish.py, stage the files, and upload them
    facts: facts about a model, read from the run's files
    card: model card, rendered from templates/
    training_content: summary of training content required by EU law, rendered from templates/
    materials: bill of materials (CycloneDX)
    provenance: file hashes and origin of a published folder
    gguf_file, gguf_comparison: convert a model to GGUF for llama.cpp, and compare the outputs
    signature: optional signature
"""
