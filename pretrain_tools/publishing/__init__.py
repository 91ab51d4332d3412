"""What goes to the Hub: publish.py.

A card states what the run's files say, and nothing else (docs/runs.md).

    publish, hub_upload: what is published; the upload
    card, card_facts: the model card
    training_content: the summary of training content that EU law asks for
    materials: the bill of materials (CycloneDX)
    provenance: what a published folder was made from, and whether it was changed
    signature: by a key, on request
"""
