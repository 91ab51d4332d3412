"""Writes shards that can be continued after a kill at any moment: data first, then the note of how far it is sound."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pretrain.problems import InputError
from pretrain.shards import SPLITS, VERIFY_BLOCK_BYTES, Shard, id_dtype


def write_durably(path: Path, content: bytes) -> None:
    """Replaces a file by rename, so that at every moment the old or the new content is there, also after a crash."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes creations, renames and removals in a folder durable (or, given a file, its content)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_files(folder: Path) -> None:
    """Makes the files of a folder durable, and the folder itself."""
    for path in folder.iterdir():
        sync_folder(path)
    sync_folder(folder)


def as_json(fields: Any) -> bytes:
    """The one way in which this project's files of record are written: the same fields, the same bytes."""
    return (json.dumps(fields, ensure_ascii=False, indent=1) + "\n").encode()


@dataclass
class _OpenShard:
    number: int
    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0
    sha256: Any = field(default_factory=hashlib.sha256)
    file: BinaryIO | None = None


class ShardWriter:
    """Appends whole documents to the shards of each split; a new shard begins before `shard_tokens` would be passed.

    Only a single document longer than `shard_tokens` makes a longer shard. `state` (from `sync`) continues earlier
    work: whatever was written after it is cut off.
    """

    def __init__(self, folder: Path, dtype: str, shard_tokens: int, state: dict[str, Any] | None = None):
        self._folder = folder
        self._dtype = id_dtype(dtype)
        self._shard_tokens = shard_tokens
        self._finished: list[Shard] = []
        self._open: dict[str, _OpenShard | None] = dict.fromkeys(SPLITS)
        self._counts = dict.fromkeys(SPLITS, 0)
        if state is not None:
            self._finished = [Shard(**shard) for shard in state["finished"]]
            self._counts = dict(state["counts"])
        self._remove_unknown_files({shard.file for shard in self._finished}, state)
        for split, fields in (state["open"] if state is not None else {}).items():
            self._open[split] = self._reopen(split, _OpenShard(**fields))

    def _remove_unknown_files(self, known: set[str], state: dict[str, Any] | None) -> None:
        opened = (state or {}).get("open", {})
        known = known | {_file_name(split, fields["number"]) for split, fields in opened.items()}
        for split in SPLITS:
            for path in self._folder.glob(f"{split}-*.bin"):
                if path.name not in known:
                    path.unlink()
        for shard in self._finished:
            path = self._folder / shard.file
            if not path.is_file() or path.stat().st_size != shard.tokens * self._dtype.itemsize:
                raise InputError(f"{path}: is not as it was left; remove {self._folder} and prepare it again")

    def _reopen(self, split: str, shard: _OpenShard) -> _OpenShard:
        path = self._folder / _file_name(split, shard.number)
        size = shard.tokens * self._dtype.itemsize
        if not path.is_file() or path.stat().st_size < size:
            raise InputError(f"{path}: is shorter than it was left; remove {self._folder} and prepare it again")
        os.truncate(path, size)
        shard.file = path.open("r+b")
        while block := shard.file.read(VERIFY_BLOCK_BYTES):
            shard.sha256.update(block)
        return shard

    def write(self, split: str, ids: np.ndarray, document_tokens: np.ndarray, document_bytes: np.ndarray) -> None:
        """Appends documents: their ids end to end, and per document its number of ids and of UTF-8 bytes."""
        ends = np.cumsum(document_tokens)
        first, first_id = 0, 0
        while first < len(document_tokens):
            shard = self._shard_with_room(split, int(document_tokens[first]))
            room = self._shard_tokens - shard.tokens
            stop = max(first + 1, int(np.searchsorted(ends, first_id + room, side="right")))
            content = ids[first_id : int(ends[stop - 1])].astype(self._dtype).tobytes()
            shard.file.write(content)
            shard.sha256.update(content)
            shard.tokens += int(ends[stop - 1]) - first_id
            shard.documents += stop - first
            shard.text_bytes += int(document_bytes[first:stop].sum())
            first, first_id = stop, int(ends[stop - 1])

    def _shard_with_room(self, split: str, tokens: int) -> _OpenShard:
        shard = self._open[split]
        if shard is not None and shard.tokens and shard.tokens + tokens > self._shard_tokens:
            self._finish(split)
            shard = None
        if shard is None:
            shard = _OpenShard(number=self._counts[split])
            shard.file = (self._folder / _file_name(split, shard.number)).open("wb")
            self._counts[split] += 1
            self._open[split] = shard
        return shard

    def _finish(self, split: str) -> None:
        shard = self._open[split]
        if shard is None:
            return
        _sync(shard.file)
        shard.file.close()
        name = _file_name(split, shard.number)
        sha256 = shard.sha256.hexdigest()
        self._finished.append(Shard(name, split, shard.tokens, shard.documents, shard.text_bytes, sha256))
        self._open[split] = None

    def sync(self) -> dict[str, Any]:
        """Makes everything written so far durable and returns the state that continues from here."""
        opened = {}
        for split, shard in self._opened():
            _sync(shard.file)
            names = ("number", "tokens", "documents", "text_bytes")
            opened[split] = {name: getattr(shard, name) for name in names}
        sync_folder(self._folder)
        return {"finished": [asdict(shard) for shard in self._finished], "open": opened, "counts": self._counts}

    def finish(self) -> list[Shard]:
        """Closes the last shards; all shards, train before validation."""
        for split in SPLITS:
            self._finish(split)
        return sorted(self._finished, key=lambda shard: SPLITS.index(shard.split))

    def close(self) -> None:
        """Closes the files without finishing anything."""
        for _, shard in self._opened():
            shard.file.close()

    def _opened(self) -> Iterator[tuple[str, _OpenShard]]:
        return ((split, shard) for split, shard in self._open.items() if shard is not None)


def _file_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin"


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
