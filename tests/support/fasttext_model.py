"""A model file as fastText writes them (version 12 of its format), with weights that are given instead of trained."""

import struct
from pathlib import Path

import numpy as np

MAGIC, VERSION = 793712314, 12
SOFTMAX, SUPERVISED, WORD, LABEL = 3, 3, 0, 1


def write_fasttext_model(path: Path, words_of: dict[str, str]) -> Path:
    """A classifier that knows these words: {label: its words}. Each word speaks for its label."""
    labels = list(words_of)
    known = [(word, label) for label, words in words_of.items() for word in words.split()]
    hidden_WD = np.array([[label == other for other in labels] for _, label in known], "<f4")
    output_LD = 20 * np.eye(len(labels), dtype="<f4")
    # dim, ws, epoch, minCount, neg, wordNgrams, loss, model, bucket, minn, maxn, lrUpdateRate, t
    settings = struct.pack("<12id", len(labels), 5, 5, 1, 5, 1, SOFTMAX, SUPERVISED, 0, 0, 0, 100, 1e-4)
    entries = [(word, WORD) for word, _ in known] + [(f"__label__{label}", LABEL) for label in labels]
    sizes = struct.pack("<3i2q", len(entries), len(known), len(labels), len(entries), -1)
    dictionary = sizes + b"".join(word.encode() + b"\0" + struct.pack("<qb", 1, kind) for word, kind in entries)
    matrices = (struct.pack("<?2q", False, *matrix.shape) + matrix.tobytes() for matrix in (hidden_WD, output_LD))
    path.write_bytes(struct.pack("<2i", MAGIC, VERSION) + settings + dictionary + b"".join(matrices))
    return path
