"""Writes shards that can be continued after a kill at any moment: data first, then the note of how far it is sound."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pretrain.data import megatron
from pretrain.data.document_index import DOCUMENT, DOCUMENTS_SUFFIX, index_path, tokens_of
from pretrain.data.manifest import SPLITS, Shard, id_dtype
from pretrain.data.shards import VERIFY_BLOCK_BYTES, sha256_of
from pretrain.errors import InputError
from pretrain.files import sync_folder, write_durably


@dataclass
class _OpenShard:
    number: int
    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0
    ids: "_HashedFile | None" = None
    index: "_HashedFile | None" = None


class _HashedFile:
    """A file that is appended to, with the hash of all it holds. `size`: what to keep of an earlier content."""

    def __init__(self, path: Path, size: int = 0):
        self.path = path
        self._sha256 = hashlib.sha256()
        if size and (not path.is_file() or path.stat().st_size < size):
            raise InputError(f"{path}: is shorter than it was left; remove {path.parent} and prepare it again")
        self._file: BinaryIO = path.open("r+b" if size else "w+b")
        self._file.truncate(size)
        while block := self._file.read(VERIFY_BLOCK_BYTES):
            self._sha256.update(block)

    def append(self, content: bytes | memoryview) -> None:
        self._file.write(content)
        self._sha256.update(content)

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def finish(self) -> str:
        """Makes the content durable and gives its hash."""
        self.sync()
        self.close()
        return self._sha256.hexdigest()


class ShardWriter:
    """Appends whole documents to the shards of each split; a new shard begins before `shard_tokens` would be passed.

    Only a single document longer than `shard_tokens` makes a longer shard. `state` (from `sync`) continues earlier
    work: whatever was written after it is cut off.
    """

    def __init__(
        self,
        folder: Path,
        dtype: str,
        shard_tokens: int,
        state: dict[str, Any] | None = None,
        with_megatron_index: bool = False,
    ):
        self._folder = folder
        self._dtype_name, self._dtype = dtype, id_dtype(dtype)
        self._shard_tokens = shard_tokens
        self._with_megatron_index = with_megatron_index
        self._finished: list[Shard] = []
        self._open: dict[str, _OpenShard | None] = dict.fromkeys(SPLITS)
        self._counts = dict.fromkeys(SPLITS, 0)
        if state is not None:
            self._finished = [Shard(**shard) for shard in state["finished"]]
            self._counts = dict(state["counts"])
        self._remove_unknown_files(state)
        for split, fields in (state["open"] if state is not None else {}).items():
            self._open[split] = self._opened_files(split, _OpenShard(**fields))

    def _remove_unknown_files(self, state: dict[str, Any] | None) -> None:
        known = {name for shard in self._finished for name in (shard.file, *shard.beside)}
        for split, fields in (state or {}).get("open", {}).items():
            path = self._folder / _file_name(split, fields["number"])
            known |= {path.name, index_path(path).name}
        for path in shard_files(self._folder):
            if path.name not in known:
                path.unlink()
        for shard in self._finished:
            path = self._folder / shard.file
            size = shard.tokens * self._dtype.itemsize
            lost = [name for name in shard.beside if not (self._folder / name).is_file()]
            if lost or not path.is_file() or path.stat().st_size != size:
                raise InputError(f"{path}: is not as it was left; remove {self._folder} and prepare it again")

    def _opened_files(self, split: str, shard: _OpenShard) -> _OpenShard:
        path = self._folder / _file_name(split, shard.number)
        shard.ids = _HashedFile(path, shard.tokens * self._dtype.itemsize)
        shard.index = _HashedFile(index_path(path), shard.documents * DOCUMENT.itemsize)
        return shard

    def write(self, split: str, ids: np.ndarray, documents: np.ndarray) -> None:
        """Appends documents: their ids end to end, and their records of type DOCUMENT with ends counted in `ids`."""
        ends = documents["end"].astype(np.int64)
        tokens = tokens_of(documents)
        first, first_id = 0, 0
        while first < len(documents):
            shard = self._shard_with_room(split, int(tokens[first]))
            room = self._shard_tokens - shard.tokens
            stop = max(first + 1, int(np.searchsorted(ends, first_id + room, side="right")))
            stop_id = int(ends[stop - 1])
            shard.ids.append(np.ascontiguousarray(ids[first_id:stop_id], self._dtype).data.cast("B"))
            entries = documents[first:stop].copy()
            # Ends count from the start of the shard file.
            entries["end"] = ends[first:stop] - first_id + shard.tokens
            shard.index.append(entries.tobytes())
            shard.tokens += stop_id - first_id
            shard.documents += stop - first
            shard.text_bytes += int(entries["text_bytes"].sum())
            first, first_id = stop, stop_id

    def _shard_with_room(self, split: str, tokens: int) -> _OpenShard:
        shard = self._open[split]
        if shard is not None and shard.tokens and shard.tokens + tokens > self._shard_tokens:
            self._finish(split)
            shard = None
        if shard is None:
            shard = self._open[split] = self._opened_files(split, _OpenShard(number=self._counts[split]))
            self._counts[split] += 1
        return shard

    def _finish(self, split: str) -> None:
        shard = self._open[split]
        if shard is None:
            return
        sha256 = shard.ids.finish()
        beside = {shard.index.path.name: shard.index.finish()}
        if self._with_megatron_index:
            path = shard.ids.path.with_suffix(megatron.IDX_SUFFIX)
            tokens = tokens_of(np.fromfile(shard.index.path, DOCUMENT))
            write_durably(path, megatron.index_bytes(tokens, self._dtype_name))
            beside[path.name] = sha256_of(path)
        name = shard.ids.path.name
        self._finished.append(Shard(name, split, shard.tokens, shard.documents, shard.text_bytes, sha256, beside))
        self._open[split] = None

    def sync(self) -> dict[str, Any]:
        """Makes everything written so far durable and returns the state that continues from here."""
        opened = {}
        for split, shard in self._opened():
            shard.ids.sync()
            shard.index.sync()
            names = ("number", "tokens", "documents", "text_bytes")
            opened[split] = {name: getattr(shard, name) for name in names}
        sync_folder(self._folder)
        return {"finished": [asdict(shard) for shard in self._finished], "open": opened, "counts": self._counts}

    def written(self) -> list[Shard]:
        """What is in the files so far, as shards; those still open have no hash yet."""
        opened = [
            Shard(shard.ids.path.name, split, shard.tokens, shard.documents, shard.text_bytes, sha256="")
            for split, shard in self._opened()
        ]
        return [*self._finished, *opened]

    def finish(self) -> list[Shard]:
        """Closes the last shards; all shards, train before validation."""
        for split in SPLITS:
            self._finish(split)
        return sorted(self._finished, key=lambda shard: SPLITS.index(shard.split))

    def close(self) -> None:
        """Closes the files without finishing anything."""
        for _, shard in self._opened():
            shard.ids.close()
            shard.index.close()

    def _opened(self) -> Iterator[tuple[str, _OpenShard]]:
        return ((split, shard) for split, shard in self._open.items() if shard is not None)


def _file_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin"


def shard_files(folder: Path) -> list[Path]:
    """Every file of a shard in a folder: ids and what stands beside them."""
    names = [f"{split}-*{suffix}" for split in SPLITS for suffix in (".bin", DOCUMENTS_SUFFIX, megatron.IDX_SUFFIX)]
    return sorted(path for name in names for path in folder.glob(name))
