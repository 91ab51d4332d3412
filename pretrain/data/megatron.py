"""Megatron's indexed dataset: reads and writes the .idx of a .bin of ids.

Layout (NVIDIA Megatron-LM, megatron/core/datasets/indexed_dataset.py), all little-endian: 9 bytes of magic, uint64
version 1, uint8 code of the id type, uint64 sequences, uint64 documents + 1, int32 tokens of each sequence, int64 byte
offset of each sequence, int64 number of the first sequence of each document and, last, of sequences.
"""

import struct
from pathlib import Path

import numpy as np

from pretrain.errors import InputError

IDX_SUFFIX = ".idx"
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
# Megatron has no uint32: the ids of any vocabulary are below 2^31, where int32 is the same bytes.
CODES = {"uint16": 8, "uint32": 4}
IDX_DTYPES = {8: "uint16", 4: "uint32"}


def index_bytes(document_tokens: np.ndarray, dtype: str) -> bytes:
    """The .idx of a .bin in which each document is one sequence of so many ids."""
    count = len(document_tokens)
    item = 2 if dtype == "uint16" else 4
    lengths = document_tokens.astype("<i4")
    pointers = np.zeros(count, "<i8")
    np.cumsum(document_tokens[:-1] * item, out=pointers[1:])
    first_sequences = np.arange(count + 1, dtype="<i8")
    header = HEADER.pack(MAGIC, 1, CODES[dtype], count, count + 1)
    return header + lengths.tobytes() + pointers.tobytes() + first_sequences.tobytes()


def read_idx(path: Path) -> tuple[str, int, int]:
    """(id type, tokens, documents) of the .bin that an .idx belongs to.

    Raises InputError for other files, damaged ones, other id types, and sequences that are not end to end.
    """
    content = path.read_bytes()
    if len(content) < HEADER.size or not content.startswith(MAGIC):
        raise InputError(f"{path}: is not an .idx of Megatron's indexed dataset; give the one of the .bin")
    _, version, code, sequences, boundaries = HEADER.unpack_from(content)
    if version != 1 or code not in IDX_DTYPES:
        raise InputError(
            f"{path}: version {version}, id type {code}; version 1 with type 8 (uint16) or 4 (int32) can be read"
        )
    # A multimodal dataset has one more byte per sequence.
    expected = HEADER.size + 12 * sequences + 8 * boundaries
    if len(content) not in (expected, expected + sequences):
        raise InputError(f"{path}: has {len(content):,} bytes, must have {expected:,}; restore the file")
    lengths = np.frombuffer(content, "<i4", sequences, HEADER.size).astype(np.int64)
    pointers = np.frombuffer(content, "<i8", sequences, HEADER.size + 4 * sequences)
    item = 2 if IDX_DTYPES[code] == "uint16" else 4
    if not np.array_equal(pointers, (np.cumsum(lengths) - lengths) * item):
        raise InputError(f"{path}: its sequences are not end to end; write it again with Megatron's tools")
    return IDX_DTYPES[code], int(lengths.sum()), max(0, boundaries - 1)
