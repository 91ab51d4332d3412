"""Publishes models on the Hub: publish.py.

A card states what the run's files say, and nothing else (docs/publish.md).

    publish, staging, hub_upload: the command; the files of a revision; the upload
    facts: what a run's files say of a model
    card: the model card, from templates/
    training_content: the summary of training content that EU law asks for, from templates/
    materials: the bill of materials (CycloneDX)
    provenance: what a published folder was made from, and whether it was changed
    gguf_file, gguf_comparison: the model as one file for llama.cpp; the two compared
    signature: by a key, on request
"""
