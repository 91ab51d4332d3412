"""The index of a shard: where each document ends, and the file and line that it came from; documents in input order.

train-00000.documents holds one record of 24 bytes per document, in the order of the shard, without a header, so that
`np.memmap(file, DOCUMENT)` opens it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.manifest import SPLITS, Manifest, Shard, id_dtype
from pretrain.errors import InputError

MOST_OPEN_FILES = 4096
NO_DOCUMENT = np.iinfo(np.int64).max

DOCUMENTS_SUFFIX = ".documents"
DOCUMENT = np.dtype([("end", "<u8"), ("place", "<u8"), ("text_bytes", "<u4"), ("source", "<u4")])
"""end: tokens of the shard through the document's end id. place: line, row or number in its source, from 1.
text_bytes: UTF-8 bytes of its text. source: number in the manifest's list of sources, from 0."""


def index_path(shard: Path) -> Path:
    """Returns the index file that belongs to a shard file."""
    return shard.with_suffix(DOCUMENTS_SUFFIX)


def document_table(
    document_tokens: np.ndarray, text_bytes: np.ndarray, sources: np.ndarray, places: np.ndarray
) -> np.ndarray:
    """Makes records of documents end to end; one element per document in each array, ends counted from 0."""
    table = np.empty(len(document_tokens), DOCUMENT)
    table["end"] = np.cumsum(document_tokens)
    table["text_bytes"] = text_bytes
    table["source"] = sources
    table["place"] = places
    return table


def tokens_of(documents: np.ndarray) -> np.ndarray:
    """Returns (documents,) tokens of each document with its end id, from the ends of documents that begin at 0."""
    return np.diff(documents["end"].astype(np.int64), prepend=0)


def chosen_ids(ids: np.ndarray, tokens: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Copies the ids of some documents of those end to end in `ids`. tokens, chosen: (documents,), chosen bool."""
    edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False))
    if 100 * len(edges) > len(ids):
        return ids[np.repeat(chosen, tokens)]
    # Few long runs are copied ten times faster than single ids.
    runs = np.concatenate([[0], np.cumsum(tokens)])[edges].reshape(-1, 2)
    return np.concatenate([ids[:0], *(ids[start:stop] for start, stop in runs.tolist())])


def read_index(shard: Path, documents: int) -> np.ndarray | None:
    """Maps the records of a shard; None without an index. Raises InputError unless they are `documents` many."""
    path = index_path(shard)
    if not path.is_file():
        return None
    if path.stat().st_size != documents * DOCUMENT.itemsize:
        raise InputError(
            f"{path}: has {path.stat().st_size:,} bytes, must have {documents * DOCUMENT.itemsize:,} "
            f"({documents:,} documents); restore the file, or prepare the folder again"
        )
    return np.memmap(path, DOCUMENT, mode="r").view(np.ndarray) if documents else np.empty(0, DOCUMENT)


class InputOrder:
    """Numbers the documents from 0: those of the first folder in the order of its input, then those of the next.

    Files are memory-mapped; in memory are 8 bytes per validation document.
    """

    def __init__(self, manifests: Sequence[Manifest]):
        self._dtype = id_dtype(manifests[0].dtype)
        self._shards: dict[str, list[Path]] = {split: [] for split in SPLITS}
        self._maps: dict[Path, np.ndarray] = {}
        self.documents = 0
        self.first_of_folder = []
        held = []
        counts: dict[str, list[int]] = {split: [] for split in SPLITS}
        for manifest in manifests:
            self.first_of_folder.append(self.documents)
            held.append(self.documents + self._held_out(manifest))
            for split in SPLITS:
                shards = _shards_of(manifest, split)
                self._shards[split] += [manifest.folder.absolute() / shard.file for shard in shards]
                counts[split] += [shard.documents for shard in shards]
                self.documents += sum(shard.documents for shard in shards)
        self._held = np.concatenate([*held, [NO_DOCUMENT]])
        """The numbers of the validation documents, and one that none has."""
        self._ends = {split: np.cumsum(counts[split], dtype=np.int64) for split in SPLITS}

    def __getstate__(self) -> dict[str, Any]:
        # A process maps the files itself.
        return self.__dict__ | {"_maps": {}}

    def _held_out(self, manifest: Manifest) -> np.ndarray:
        """Places a folder's validation documents among all of its documents: both splits are in input order."""
        paths = {split: [manifest.folder / s.file for s in _shards_of(manifest, split)] for split in SPLITS}
        held = np.concatenate([np.empty(0, np.uint64), *(_input_keys(self._index(p)) for p in paths["validation"])])
        before = np.empty(len(held), np.int64)
        first = 0
        trained = 0
        # One shard's keys in memory at a time; each validation document is sought in one shard only.
        for path in paths["train"]:
            keys = _input_keys(self._index(path))
            stop = int(np.searchsorted(held, keys[-1], side="left"))
            before[first:stop] = trained + np.searchsorted(keys, held[first:stop], side="right")
            first = max(first, stop)
            trained += len(keys)
        before[first:] = trained
        return before + np.arange(len(held))

    def _index(self, path: Path) -> np.ndarray:
        return self._mapped(path.with_suffix(DOCUMENTS_SUFFIX), DOCUMENT)

    def _mapped(self, path: Path, dtype: np.dtype) -> np.ndarray:
        if path not in self._maps:
            if len(self._maps) >= MOST_OPEN_FILES:
                self._maps.clear()
            try:
                self._maps[path] = np.memmap(path, dtype, mode="r").view(np.ndarray)
            except (OSError, ValueError) as error:
                raise InputError(f"{path}: cannot be read ({error}); remove its folder and prepare it again") from None
        return self._maps[path]

    def _positions(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (is_validation, row in the split over all folders) of documents."""
        held_before = np.searchsorted(self._held, numbers)
        is_validation = self._held[held_before] == numbers
        return is_validation, np.where(is_validation, held_before, numbers - held_before)

    def _by_shard(self, split: str, rows: np.ndarray) -> Iterator[tuple[Path, np.ndarray]]:
        """Yields (shard, rows within it) for ascending rows of a split."""
        shards = np.searchsorted(self._ends[split], rows, side="right")
        for shard in np.unique(shards).tolist():
            begin = int(self._ends[split][shard - 1]) if shard else 0
            yield self._shards[split][shard], rows[shards == shard] - begin

    def table(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (records of DOCUMENT with tokens instead of ends, is_validation) of documents first to stop - 1."""
        together = np.empty(stop - first, DOCUMENT)
        is_validation, rows = self._positions(np.arange(first, stop))
        for split, chosen in zip(SPLITS, (~is_validation, is_validation), strict=True):
            pieces = [np.empty(0, DOCUMENT)]
            for path, rows_of_shard in self._by_shard(split, rows[chosen]):
                index = self._index(path)
                # All documents of the split between two of them are among them: a run of rows.
                left = int(rows_of_shard[0])
                right = int(rows_of_shard[-1]) + 1
                piece = index[left:right].copy()
                piece["end"] = (
                    tokens_of(index[:right])[left:] if left == 0 else np.diff(index["end"][left - 1 : right])
                )
                pieces.append(piece)
            together[chosen] = np.concatenate(pieces)
        return together, is_validation

    def beside(self, numbers: np.ndarray, suffix: str, record_bytes: int) -> np.ndarray:
        """Returns (documents, record_bytes) uint8: records in a file beside each shard. numbers: ascending."""
        out = np.empty((len(numbers), record_bytes), np.uint8)
        is_validation, rows = self._positions(numbers)
        for split, chosen in zip(SPLITS, (~is_validation, is_validation), strict=True):
            pieces = [out[:0]]
            for path, rows_of_shard in self._by_shard(split, rows[chosen]):
                records = self._mapped(path.with_suffix(suffix), np.dtype(np.uint8)).reshape(-1, record_bytes)
                pieces.append(records[rows_of_shard])
            out[chosen] = np.concatenate(pieces)
        return out

    def ids(self, number: int) -> np.ndarray:
        """Returns the ids of one document, without its end id, as they lie in the file."""
        path, row = self._place(number)
        ends = self._index(path)["end"]
        start = int(ends[row - 1]) if row else 0
        return self._mapped(path, self._dtype)[start : int(ends[row]) - 1]

    def record(self, number: int) -> np.void:
        """Returns the record of type DOCUMENT of one document, as it lies in the file."""
        path, row = self._place(number)
        return self._index(path)[row]

    def _place(self, number: int) -> tuple[Path, int]:
        """Returns (shard, row within it) of one document."""
        is_validation, rows = self._positions(np.array([number]))
        ((path, of_shard),) = self._by_shard(SPLITS[int(is_validation[0])], rows)
        return path, int(of_shard[0])


def _shards_of(manifest: Manifest, split: str) -> list[Shard]:
    # An empty file cannot be mapped.
    return [shard for shard in manifest.of_split(split) if shard.documents]


def _input_keys(index: np.ndarray) -> np.ndarray:
    """Makes uint64 keys that order documents as the input does: source, then place in it."""
    if len(index) and (int(index["source"].max()) >= 1 << 24 or int(index["place"].max()) >= 1 << 40):
        raise InputError("more than 16 million sources, or 10^12 documents in one of them, cannot be put in order")
    return (index["source"].astype(np.uint64) << np.uint64(40)) | index["place"]
