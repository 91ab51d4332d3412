"""The index of a shard: where each document ends, and the file and line that it came from; documents in input order.

train-00000.documents holds one record of 24 bytes per document, in the order of the shard, without a header, so that
`np.memmap(file, DOCUMENT)` opens it.
"""

from collections.abc import Sequence
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
    """The index file that belongs to a shard file."""
    return shard.with_suffix(DOCUMENTS_SUFFIX)


def document_table(
    document_tokens: np.ndarray, text_bytes: np.ndarray, sources: np.ndarray, places: np.ndarray
) -> np.ndarray:
    """Records of documents end to end; one element per document in each array, ends counted from 0."""
    table = np.empty(len(document_tokens), DOCUMENT)
    table["end"] = np.cumsum(document_tokens)
    table["text_bytes"], table["source"], table["place"] = text_bytes, sources, places
    return table


def tokens_of(documents: np.ndarray) -> np.ndarray:
    """(documents,) tokens of each document with its end id, from the ends of documents that begin at 0."""
    return np.diff(documents["end"].astype(np.int64), prepend=0)


def chosen_ids(ids: np.ndarray, tokens: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The ids of those documents, of all that stand end to end in `ids`. tokens, chosen: (documents,), chosen bool."""
    edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False))
    if 100 * len(edges) > len(ids):
        return ids[np.repeat(chosen, tokens)]
    # Few long runs are copied ten times faster than single ids.
    runs = np.concatenate([[0], np.cumsum(tokens)])[edges].reshape(-1, 2)
    return np.concatenate([ids[:0], *(ids[start:stop] for start, stop in runs.tolist())])


def read_index(shard: Path, documents: int) -> np.ndarray | None:
    """The records of a shard, memory-mapped; None without an index. InputError when they are not `documents` many."""
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
        self._shards: dict[str, list[tuple[Path, Shard, np.dtype]]] = {split: [] for split in SPLITS}
        self._maps: dict[Path, np.ndarray] = {}
        held = [np.empty(0, np.int64)]
        self.documents, self.first_of_folder = 0, []
        for manifest in manifests:
            self.first_of_folder.append(self.documents)
            held.append(self.documents + self._held_out(manifest))
            dtype = id_dtype(manifest.dtype)
            for split in SPLITS:
                shards = manifest.of_split(split)
                self._shards[split] += [(manifest.folder.absolute() / shard.file, shard, dtype) for shard in shards]
                self.documents += sum(shard.documents for shard in shards)
        self._held = np.concatenate([*held, [NO_DOCUMENT]])
        """The numbers of the validation documents, and one that none has."""
        self._ends = {
            split: np.cumsum([shard.documents for _, shard, _ in shards], dtype=np.int64)
            for split, shards in self._shards.items()
        }

    def __getstate__(self) -> dict[str, Any]:
        # A process maps the files itself.
        return self.__dict__ | {"_maps": {}}

    def _held_out(self, manifest: Manifest) -> np.ndarray:
        """The places of a folder's validation documents among all of its documents: both splits are in input order."""
        paths = {
            split: [manifest.folder / s.file for s in manifest.of_split(split) if s.documents] for split in SPLITS
        }
        held = np.concatenate([np.empty(0, np.uint64), *(_input_keys(self._index(p)) for p in paths["validation"])])
        before = np.empty(len(held), np.int64)
        first = trained = 0
        for path in paths["train"]:
            keys = _input_keys(self._index(path))
            stop = int(np.searchsorted(held, keys[-1], side="left"))
            before[first:stop] = trained + np.searchsorted(keys, held[first:stop], side="right")
            first, trained = max(first, stop), trained + len(keys)
        before[first:] = trained
        return before + np.arange(len(held))

    def _index(self, path: Path) -> np.ndarray:
        return self._mapped(path.with_suffix(DOCUMENTS_SUFFIX), DOCUMENT)

    def _mapped(self, path: Path, dtype: np.dtype, columns: int = 0) -> np.ndarray:
        mapped = self._maps.get(path)
        if mapped is None:
            if len(self._maps) >= MOST_OPEN_FILES:
                self._maps.clear()
            try:
                mapped = np.memmap(path, dtype, mode="r").view(np.ndarray)
            except (OSError, ValueError) as error:
                raise InputError(f"{path}: cannot be read ({error}); remove its folder and prepare it again") from None
            self._maps[path] = mapped = mapped.reshape(-1, columns) if columns else mapped
        return mapped

    def positions(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(is_validation, row in the split over all folders) of documents."""
        held_before = np.searchsorted(self._held, numbers)
        is_validation = self._held[held_before] == numbers
        return is_validation, np.where(is_validation, held_before, numbers - held_before)

    def table(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """(records of type DOCUMENT with tokens instead of ends, is_validation) of the documents first to stop - 1."""
        parts = {split: np.empty(0, DOCUMENT) for split in SPLITS}
        is_validation, rows = self.positions(np.arange(first, stop))
        for split, chosen in zip(SPLITS, (~is_validation, is_validation), strict=True):
            pieces = [parts[split]]
            for shard, rows_of_shard in self._by_shard(split, rows[chosen]):
                path, known, _ = self._shards[split][shard]
                index = read_index(path, known.documents)
                if index is None:
                    raise InputError(f"{path}: its index is missing; prepare the slice again")
                left, right = int(rows_of_shard[0]), int(rows_of_shard[-1]) + 1
                piece = index[left:right].copy()
                piece["end"] = tokens_of(index[max(0, left - 1) : right])[min(left, 1) :]
                pieces.append(piece)
            parts[split] = np.concatenate(pieces)
        together = np.empty(stop - first, DOCUMENT)
        together[~is_validation], together[is_validation] = parts["train"], parts["validation"]
        return together, is_validation

    def _by_shard(self, split: str, rows: np.ndarray):
        """(shard, rows within it) for ascending rows of a split."""
        ends = self._ends[split]
        shards = np.searchsorted(ends, rows, side="right")
        for shard in np.unique(shards).tolist():
            begin = int(ends[shard - 1]) if shard else 0
            yield shard, rows[shards == shard] - begin

    def beside(self, numbers: np.ndarray, suffix: str, record_bytes: int) -> np.ndarray:
        """(documents, record_bytes) uint8: the records of documents in a file beside each shard."""
        out = np.empty((len(numbers), record_bytes), np.uint8)
        is_validation, rows = self.positions(numbers)
        for split, chosen in zip(SPLITS, (~is_validation, is_validation), strict=True):
            wanted = np.flatnonzero(chosen)
            wanted = wanted[np.argsort(rows[wanted], kind="stable")]
            taken = 0
            for shard, rows_of_shard in self._by_shard(split, rows[wanted]):
                records = self._mapped(self._shards[split][shard][0].with_suffix(suffix), np.uint8, record_bytes)
                out[wanted[taken : taken + len(rows_of_shard)]] = records[rows_of_shard]
                taken += len(rows_of_shard)
        return out

    def ids(self, number: int) -> np.ndarray:
        """The ids of one document, without its end id, as they lie in the file."""
        shard, row, split = self._place(number)
        path, _, dtype = self._shards[split][shard]
        index = self._index(path)
        start = int(index["end"][row - 1]) if row else 0
        return self._mapped(path, dtype)[start : int(index["end"][row]) - 1]

    def record(self, number: int) -> np.void:
        """The record of type DOCUMENT of one document, as it lies in the file."""
        shard, row, split = self._place(number)
        return self._index(self._shards[split][shard][0])[row]

    def _place(self, number: int) -> tuple[int, int, str]:
        held_before = int(np.searchsorted(self._held, number))
        is_validation = int(self._held[held_before]) == number
        split, row = SPLITS[is_validation], held_before if is_validation else number - held_before
        shard = int(np.searchsorted(self._ends[split], row, side="right"))
        return shard, row - (int(self._ends[split][shard - 1]) if shard else 0), split


def _input_keys(index: np.ndarray) -> np.ndarray:
    """uint64 keys that order documents as the input does: source, then place in it."""
    if len(index) and (int(index["source"].max()) >= 1 << 24 or int(index["place"].max()) >= 1 << 40):
        raise InputError("more than 16 million sources, or 10^12 documents in one of them, cannot be put in order")
    return (index["source"].astype(np.uint64) << np.uint64(40)) | index["place"]
