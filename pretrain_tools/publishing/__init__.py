"""Publishes models on the Hub (publish.py).

Everything stated about a model comes from the run's files (docs/publish.md).

    publish, staging, hub_upload: command line; files of a revision; upload
    facts: facts about a model, read from the run's files
    card: model card, rendered from templates/
    training_content: summary of training content required by EU law, rendered from templates/
    materials: bill of materials (CycloneDX)
    provenance: file hashes and origin of a published folder
    gguf_file, gguf_comparison: converts the model to GGUF for llama.cpp, and compares their outputs
    signature: optional signature
"""
