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
    """Set of document hashes. Needs 8 bytes of memory per document, and up to 16 during a merge.

    The probability of any hash collision among a billion documents is 3%.
    """

    def __init__(self) -> None:
        # Sorted arrays, each at least twice as long as the next, so that adding a hash takes logarithmic time.
        self._arrays: list[np.ndarray] = []

    def __len__(self) -> int:
        return sum(map(len, self._arrays))

    def add(self, hashes: np.ndarray) -> np.ndarray:
        """Adds hashes. Returns (documents,) bool: True for the first occurrence of each new hash."""
        new = np.zeros(len(hashes), bool)
        distinct, first = np.unique(hashes, return_index=True)
        unseen = ~np.logical_or.reduce([_contains(array, distinct) for array in self._arrays], initial=False)
        unseen = np.broadcast_to(unseen, distinct.shape)
        new[first[unseen]] = True
        self._insert(distinct[unseen])
        return new

    def _insert(self, hashes: np.ndarray) -> None:
        if not len(hashes):
            return
        self._arrays.append(hashes)
        while len(self._arrays) > 1 and len(self._arrays[-2]) < 2 * len(self._arrays[-1]):
            merged = np.concatenate([self._arrays.pop(), self._arrays.pop()])
            merged.sort(kind="stable")
            self._arrays.append(merged)


def _contains(array: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    found = np.searchsorted(array, wanted)
    return array[np.minimum(found, len(array) - 1)] == wanted


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
