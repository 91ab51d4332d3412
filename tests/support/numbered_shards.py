"""Shards whose token IDs encode their positions."""

import json

import numpy as np


def write_shards(folder, tokens, *, files=1, vocabulary=50_000, validation=0, tokenizer="t", first=0, end=0):
    """Writes a shards folder in which the token ID at position i is first + i (mod vocabulary)."""
    folder.mkdir(parents=True)
    shards = []
    for split, total in (("train", tokens), ("validation", validation)):
        for number, part in enumerate(np.array_split((first + np.arange(total)) % vocabulary, files) if total else []):
            name = f"{split}-{number:05d}.bin"
            part.astype("<u2").tofile(folder / name)
            shards.append(
                {
                    "file": name,
                    "split": split,
                    "tokens": len(part),
                    "documents": 1,
                    "text_bytes": 4 * len(part),
                    "sha256": "0" * 64,
                }
            )
    manifest = {
        "format": "groundwork-shards",
        "version": 1,
        "tokenizer": {"name": tokenizer, "sha256": tokenizer * 64},
        "vocabulary_size": vocabulary,
        "end_of_document_id": end,
        "dtype": "uint16",
        "shards": shards,
        "totals": {},
        "options": {},
        "sources": [],
        "skipped": {},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder
