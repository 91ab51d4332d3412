"""Index of a shard's documents: each document's end, source and location.

A .documents file contains one 24-byte record per document, without a header. Open it with `np.memmap(file, DOCUMENT)`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.manifest import Manifest, id_dtype
from pretrain.errors import InputError

UNDIVIDED = "documents"
"""Replaces the split name in slices, and before near duplicates are removed. Shards then contain both splits."""
HELD_OUT = np.uint64(1 << 63)
"""Flag added to `place` for validation documents, until documents are divided into splits."""
DOCUMENTS_SUFFIX = ".documents"
DOCUMENT = np.dtype([("end", "<u8"), ("place", "<u8"), ("text_bytes", "<u4"), ("source", "<u4")])
"""end: token offset in the shard, after the end-of-document ID. place: line, row or number in the source, starting at
1. text_bytes: size of the text in UTF-8. source: index in the manifest's list of sources."""


def index_path(shard: Path) -> Path:
    return shard.with_suffix(DOCUMENTS_SUFFIX)


def document_table(
    document_tokens: np.ndarray, text_bytes: np.ndarray, sources: np.ndarray, places: np.ndarray
) -> np.ndarray:
    """Builds the records for concatenated documents. Each array has one element per document."""
    table = np.empty(len(document_tokens), DOCUMENT)
    table["end"] = np.cumsum(document_tokens)
    table["text_bytes"] = text_bytes
    table["source"] = sources
    table["place"] = places
    return table


def tokens_of(documents: np.ndarray) -> np.ndarray:
    """Returns (documents,) number of tokens per document, including the end-of-document ID."""
    return np.diff(documents["end"].astype(np.int64), prepend=0)


def read_index(shard: Path, documents: int) -> np.ndarray | None:
    """Memory-maps a shard's index. Returns None if there is none. Raises InputError if its size is wrong."""
    path = index_path(shard)
    if not path.is_file():
        return None
    if path.stat().st_size != documents * DOCUMENT.itemsize:
        raise InputError(
            f"{path}: must be {documents * DOCUMENT.itemsize:,} bytes for {documents:,} documents, got "
            f"{path.stat().st_size:,}; restore the file, or prepare the folder again"
        )
    return np.memmap(path, DOCUMENT, mode="r").view(np.ndarray) if documents else np.empty(0, DOCUMENT)


class InputOrder:
    """Reads documents from undivided folders by their index in input order, across all folders."""

    def __init__(self, manifests: Sequence[Manifest]):
        self._dtype = id_dtype(manifests[0].dtype)
        self._maps: dict[Path, np.ndarray] = {}
        shards = [(m.folder.absolute() / shard.file, shard.documents) for m in manifests for shard in m.shards]
        self._shards = [path for path, _ in shards]
        self._ends = np.cumsum([documents for _, documents in shards], dtype=np.int64)
        self.documents = int(self._ends[-1]) if shards else 0

    def __getstate__(self) -> dict[str, Any]:
        # Each process maps the files itself.
        return self.__dict__ | {"_maps": {}}

    def _mapped(self, path: Path, dtype: np.dtype) -> np.ndarray:
        if path not in self._maps:
            try:
                self._maps[path] = np.memmap(path, dtype, mode="r").view(np.ndarray)
            except (OSError, ValueError) as error:
                raise InputError(f"{path}: cannot be read ({error}); remove its folder and prepare it again") from None
        return self._maps[path]

    def _by_shard(self, numbers: np.ndarray) -> Iterator[tuple[Path, np.ndarray]]:
        """Yields (shard, rows) pairs for ascending document indices."""
        shards = np.searchsorted(self._ends, numbers, side="right")
        for shard in np.unique(shards).tolist():
            begin = int(self._ends[shard - 1]) if shard else 0
            yield self._shards[shard], numbers[shards == shard] - begin

    def table(self, first: int, stop: int) -> np.ndarray:
        """Returns the DOCUMENT records of documents first to stop - 1, with lengths instead of ends."""
        pieces = []
        for path, rows in self._by_shard(np.arange(first, stop)):
            index = self._mapped(index_path(path), DOCUMENT)
            piece = index[rows]
            piece["end"] -= np.where(rows > 0, index["end"][rows - 1], 0)
            pieces.append(piece)
        return np.concatenate(pieces)

    def side_records(self, numbers: np.ndarray, suffix: str, record_bytes: int) -> np.ndarray:
        """Reads records from files next to the shards: (documents, record_bytes) uint8. numbers: ascending indices."""
        pieces = [np.empty((0, record_bytes), np.uint8)]
        for path, rows in self._by_shard(numbers):
            records = self._mapped(path.with_suffix(suffix), np.dtype(np.uint8)).reshape(-1, record_bytes)
            pieces.append(records[rows])
        return np.concatenate(pieces)

    def ids(self, number: int) -> np.ndarray:
        """Returns a document's token IDs, without the end-of-document ID."""
        ((path, (row,)),) = self._by_shard(np.array([number]))
        ends = self._mapped(index_path(path), DOCUMENT)["end"]
        start = int(ends[row - 1]) if row else 0
        return self._mapped(path, self._dtype)[start : int(ends[row]) - 1]
