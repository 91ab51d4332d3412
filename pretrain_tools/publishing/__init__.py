"""Publishes models on the Hub: publish.py.

A card only states facts from the run's files (docs/publish.md).

    publish, staging, hub_upload: the command; the files of a revision; the upload
    facts: facts about a model from the run's files
    card: the model card, from templates/
    training_content: the summary of training content required by EU law, from templates/
    materials: the bill of materials (CycloneDX)
    provenance: the origin of a published folder; detects changes
    gguf_file, gguf_comparison: the model as one file for llama.cpp; a comparison of the two
    signature: an optional signature with a key
"""
