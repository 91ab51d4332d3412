"""Finds exact duplicates of earlier documents by hashing their token IDs."""

import hashlib
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np

from pretrain.data.manifest import Shard, id_dtype
from pretrain_tools.preparation.documents.document_index import read_index

HASH_BYTES = 8


def document_hashes(ids: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Hashes each document with 8-byte BLAKE2b. Returns (documents,) uint64. ends: end offsets in `ids`."""
    content = memoryview(np.ascontiguousarray(ids)).cast("B")
    bounds = [0, *(ends * ids.itemsize).tolist()]
    digests = b"".join(
        hashlib.blake2b(content[start:stop], digest_size=HASH_BYTES).digest() for start, stop in pairwise(bounds)
    )
    return np.frombuffer(digests, "<u8")


class SeenDocuments:
    """Set of document hashes. Needs about 100 bytes of memory per document.

    The probability of any hash collision among a billion documents is 3%.
    """

    def __init__(self) -> None:
        self._hashes: set[int] = set()

    def add(self, hashes: np.ndarray) -> np.ndarray:
        """Adds hashes. Returns (documents,) bool: True for the first occurrence of each new hash."""
        new = np.zeros(len(hashes), bool)
        for number, found in enumerate(hashes.tolist()):
            new[number] = found not in self._hashes
            self._hashes.add(found)
        return new


def seen_in_shards(folder: Path, shards: Iterable[Shard], dtype: str) -> SeenDocuments:
    """Returns the hashes of all documents in existing shards."""
    seen = SeenDocuments()
    for shard in shards:
        path = folder / shard.file
        index = read_index(path, shard.documents)
        if index is not None and shard.documents:
            ids = np.memmap(path, id_dtype(dtype), mode="r").view(np.ndarray)
            seen.add(document_hashes(ids, index["end"]))
    return seen
