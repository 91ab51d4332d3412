"""Writes shards that can be continued after a kill at any moment: first the data, then the record of its extent."""

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pretrain.data import foreign_shards
from pretrain.data.manifest import SPLITS, Shard, id_dtype
from pretrain.data.shards import VERIFY_BLOCK_BYTES
from pretrain.errors import InputError
from pretrain.files import sha256_of, sync_folder, write_durably
from pretrain_tools.preparation.cleaning.near_duplicate_search import SIGNATURES_SUFFIX
from pretrain_tools.preparation.documents.document_index import DOCUMENT, DOCUMENTS_SUFFIX, index_path, tokens_of
from pretrain_tools.preparation.text_files import TEXT_FOLDER, TEXT_SUFFIX, compress, text_name


class _HashedFile:
    """A file that is appended to, with the hash of all it holds. `size`: what to keep of an earlier content.

    A thread of its own hashes each content, which must stay as it is, while the next one is made.
    """

    def __init__(self, path: Path, size: int = 0):
        self.path = path
        self._sha256, self._thread = hashlib.sha256(), ThreadPoolExecutor(1)
        self._hashing: Future[None] | None = None
        if size and (not path.is_file() or path.stat().st_size < size):
            raise InputError(f"{path}: is shorter than when it was written; remove {path.parent} and prepare it again")
        self._file: BinaryIO = path.open("r+b" if size else "w+b")
        self._file.truncate(size)
        while block := self._file.read(VERIFY_BLOCK_BYTES):
            self._sha256.update(block)

    def append(self, content: bytes | memoryview) -> None:
        if self._hashing is not None:
            self._hashing.result()
        self._hashing = self._thread.submit(self._sha256.update, content)
        self._file.write(content)

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._thread.shutdown()
        self._file.close()

    def finish(self) -> str:
        """Makes the content durable and gives its hash."""
        self.sync()
        self.close()
        return self._sha256.hexdigest()


class _OpenShard:
    """A shard that grows: its ids, beside them the index of its documents and their signatures, if any, their text."""

    def __init__(
        self,
        path: Path,
        dtype: np.dtype,
        signature_bytes: int,
        tokens: int = 0,
        documents: int = 0,
        text_bytes: int = 0,
        line_bytes: int = 0,
        plain_text: Path | None = None,
    ):
        self.tokens, self.documents, self.text_bytes, self.line_bytes = tokens, documents, text_bytes, line_bytes
        self.lines = _HashedFile(plain_text, line_bytes) if plain_text else None
        self.ids = _HashedFile(path, tokens * dtype.itemsize)
        self.beside = [_HashedFile(index_path(path), documents * DOCUMENT.itemsize)]
        if signature_bytes:
            self.beside.append(_HashedFile(path.with_suffix(SIGNATURES_SUFFIX), documents * signature_bytes))

    @property
    def files(self) -> list[_HashedFile]:
        """All that it grows in."""
        return [self.ids, *self.beside, *([self.lines] if self.lines else [])]

    def as_shard(self, split: str, sha256: str = "", beside: dict[str, str] | None = None) -> Shard:
        return Shard(self.ids.path.name, split, self.tokens, self.documents, self.text_bytes, sha256, beside or {})


class ShardWriter:
    """Appends whole documents to the shards of each split; a new shard begins before `shard_tokens` would be exceeded.

    Only a single document longer than `shard_tokens` makes a longer shard. `state` (from `sync`) continues earlier
    work: whatever was written after it is cut off. plain_text: the folder for the text of shards that grow, None where
    none is written; what is in it is needed until the manifest is written.
    """

    def __init__(
        self,
        folder: Path,
        dtype: str,
        shard_tokens: int,
        state: dict[str, Any] | None = None,
        with_megatron_index: bool = False,
        signature_bytes: int = 0,
        plain_text: Path | None = None,
    ):
        self._folder, self._plain_text = folder, plain_text
        self._compressed: list[Path] = []
        self._to_remove: list[Path] = []
        if plain_text:
            plain_text.mkdir(exist_ok=True)
        self._dtype_name, self._dtype = dtype, id_dtype(dtype)
        self._shard_tokens = shard_tokens
        self._with_megatron_index, self._signature_bytes = with_megatron_index, signature_bytes
        state = state or {"finished": [], "open": {}, "counts": dict.fromkeys(SPLITS, 0)}
        self._finished = [Shard(**shard) for shard in state["finished"]]
        self._counts = dict(state["counts"])
        self._remove_unknown_files(state["open"])
        self._open = {split: self._opened(split, **fields) for split, fields in state["open"].items()}

    def _opened(self, split: str, number: int, **counts: int) -> _OpenShard:
        path = self._folder / _file_name(split, number)
        plain_text = self._plain_text and self._plain_text / f"{path.stem}.jsonl"
        return _OpenShard(path, self._dtype, self._signature_bytes, **counts, plain_text=plain_text)

    def _remove_unknown_files(self, opened: dict[str, dict[str, int]]) -> None:
        known = {name for shard in self._finished for name in (shard.file, *shard.beside)}
        for split, fields in opened.items():
            path = self._folder / _file_name(split, fields["number"])
            known |= {path.name, index_path(path).name, path.with_suffix(SIGNATURES_SUFFIX).name}
        for path in shard_files(self._folder):
            if str(path.relative_to(self._folder)) not in known:
                path.unlink()
        for shard in self._finished:
            path = self._folder / shard.file
            size = shard.tokens * self._dtype.itemsize
            lost = [name for name in shard.beside if not (self._folder / name).is_file()]
            if lost or not path.is_file() or path.stat().st_size != size:
                raise InputError(
                    f"{path}: has changed since it was written; remove {self._folder} and prepare it again"
                )

    def write(
        self,
        split: str,
        ids: np.ndarray,
        documents: np.ndarray,
        signatures: np.ndarray | None = None,
        lines: list[bytes] | None = None,
    ) -> None:
        """Appends documents: their ids end to end, and their records of type DOCUMENT with ends counted in `ids`.

        signatures: (documents, signature_bytes) uint8, where the writer was made with signature_bytes. lines: of
        text_files.document_line, where it was made with plain_text.
        """
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
            shard.beside[0].append(entries.tobytes())
            if signatures is not None:
                shard.beside[1].append(signatures[first:stop].tobytes())
            if shard.lines is not None:
                content = b"".join(lines[first:stop])
                shard.lines.append(content)
                shard.line_bytes += len(content)
            shard.tokens += stop_id - first_id
            shard.documents += stop - first
            shard.text_bytes += int(entries["text_bytes"].sum())
            first, first_id = stop, stop_id

    def _shard_with_room(self, split: str, tokens: int) -> _OpenShard:
        shard = self._open.get(split)
        if shard is not None and shard.tokens and shard.tokens + tokens > self._shard_tokens:
            self._finish(split)
        if split not in self._open:
            self._open[split] = self._opened(split, self._counts[split])
            self._counts[split] += 1
        return self._open[split]

    def _finish(self, split: str) -> None:
        shard = self._open.pop(split, None)
        if shard is None:
            return
        sha256 = shard.ids.finish()
        beside = {file.path.name: file.finish() for file in shard.beside}
        if self._with_megatron_index:
            path = shard.ids.path.with_suffix(foreign_shards.IDX_SUFFIX)
            tokens = tokens_of(np.fromfile(index_path(path), DOCUMENT))
            write_durably(path, foreign_shards.index_bytes(tokens, self._dtype_name))
            beside[path.name] = sha256_of(path)
        if shard.lines is not None:
            shard.lines.finish()
            name = text_name(shard.ids.path.name)
            compress(shard.lines.path, self._folder / name)
            beside[name] = sha256_of(self._folder / name)
            self._compressed.append(shard.lines.path)
        self._finished.append(shard.as_shard(split, sha256, beside))

    def sync(self) -> dict[str, Any]:
        """Makes everything written so far durable and returns the state that continues from here."""
        opened = {}
        # The state before this one has been recorded, so nobody continues from where these were plain.
        for path in self._to_remove:
            path.unlink(missing_ok=True)
        self._to_remove, self._compressed = self._compressed, []
        for split, shard in self._open.items():
            for file in shard.files:
                file.sync()
            # The open shard of a split is the last one that was begun.
            opened[split] = {"number": self._counts[split] - 1, "tokens": shard.tokens}
            opened[split] |= {"documents": shard.documents, "text_bytes": shard.text_bytes}
            if shard.lines is not None:
                opened[split]["line_bytes"] = shard.line_bytes
        for folder in (self._folder, self._folder / TEXT_FOLDER, self._plain_text):
            if folder and folder.is_dir():
                sync_folder(folder)
        return {"finished": [asdict(shard) for shard in self._finished], "open": opened, "counts": self._counts}

    def written(self) -> list[Shard]:
        """What is in the files so far, as shards; those still open have no hash yet."""
        return [*self._finished, *(shard.as_shard(split) for split, shard in self._open.items())]

    def finish(self) -> list[Shard]:
        """Closes the last shards; all shards, train before validation."""
        for split in SPLITS:
            self._finish(split)
        return sorted(self._finished, key=lambda shard: SPLITS.index(shard.split))

    def close(self) -> None:
        """Closes the files without finishing anything."""
        for shard in self._open.values():
            for file in shard.files:
                file.close()


def _file_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin"


def shard_files(folder: Path) -> list[Path]:
    """Every file of a shard in a folder: ids, what stands beside them, and text."""
    suffixes = (".bin", DOCUMENTS_SUFFIX, foreign_shards.IDX_SUFFIX, SIGNATURES_SUFFIX)
    names = [f"{split}-*{suffix}" for split in SPLITS for suffix in suffixes]
    names += [f"{TEXT_FOLDER}/{split}-*{TEXT_SUFFIX}" for split in SPLITS]
    return sorted(path for name in names for path in folder.glob(name))
