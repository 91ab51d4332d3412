"""Publishes models on the Hub (publish.py).

All statements about a model are based on the run's files (docs/publish.md).

    publish, staging, hub_upload: command line of publish.py, staging of files, and uploads
    facts: facts about a model, read from the run's files
    card: model card, rendered from templates/
    training_content: summary of training content required by EU law, rendered from templates/
    materials: bill of materials in CycloneDX format, rendered from templates/
    provenance: file hashes and origin of a published folder
    gguf_file, gguf_comparison: conversion to GGUF for llama.cpp, and comparison of the outputs
    signature: optional signature of a published folder
"""
