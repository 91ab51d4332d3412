"""Writes shards so that prepare_data.py can resume after an interruption."""

import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pretrain.data.manifest import SPLITS, Shard, id_dtype
from pretrain.data.object_store import BLOCKS_SUFFIX, block_digests
from pretrain.errors import InputError
from pretrain.files import sha256_of, sync_folder, write_durably
from pretrain_tools.preparation.documents.document_index import DOCUMENTS_SUFFIX, UNDIVIDED, tokens_of
from pretrain_tools.preparation.encoded_part import EncodedPart
from pretrain_tools.preparation.near_duplicate_search import SIGNATURES_SUFFIX
from pretrain_tools.preparation.text_files import TEXT_FOLDER, TEXT_SUFFIX, compress, text_name

IDS_SUFFIX = ".bin"
PLAIN_TEXT_SUFFIX = ".jsonl"


def _open_to_append(path: Path, size: int = 0) -> BinaryIO:
    """Truncates a file to `size` bytes and opens it for appending."""
    if size and (not path.is_file() or path.stat().st_size < size):
        raise InputError(f"{path}: was truncated after it was written; remove {path.parent} and prepare it again")
    file = path.open("r+b" if size else "w+b")
    file.truncate(size)
    file.seek(size)
    return file


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


@dataclass
class _OpenShard:
    """A shard that isn't full yet. It doesn't have hashes yet."""

    shard: Shard
    files: dict[str, BinaryIO] = field(default_factory=dict)
    """{suffix: open file}: token IDs, document index and, if enabled, signatures and text."""


class ShardWriter:
    """Writes whole documents to shards of at most `shard_tokens` tokens.

    A longer document gets its own shard.

    Args:
        state: result of `sync` to resume from. Data written after that call is discarded.
        plain_text: temporary folder for the uncompressed text of open shards; None to write no text.
    """

    def __init__(
        self,
        folder: Path,
        dtype: str,
        shard_tokens: int,
        state: dict[str, Any] | None = None,
        plain_text: Path | None = None,
    ):
        self._folder = folder
        self._dtype = id_dtype(dtype)
        self._shard_tokens = shard_tokens
        self._plain_text = plain_text
        self._compressed: list[Path] = []
        """Plain text that has been compressed."""
        if plain_text:
            plain_text.mkdir(exist_ok=True)
        state = state or {"finished": [], "open": []}
        self._finished = [Shard(**shard) for shard in state["finished"]]
        self._open: dict[str, _OpenShard] = {}
        """{split: its open shard}."""
        for fields, sizes in state["open"]:
            shard = Shard(**fields)
            files = {suffix: _open_to_append(self._path(shard, suffix), size) for suffix, size in sizes.items()}
            self._open[shard.split] = _OpenShard(shard, files)
        self._remove_unknown_files()

    def _path(self, shard: Shard, suffix: str) -> Path:
        folder = self._plain_text if suffix == PLAIN_TEXT_SUFFIX else self._folder
        return (folder / shard.file).with_suffix(suffix)

    def _remove_unknown_files(self) -> None:
        """Removes shard files that aren't in the state. Raises InputError if a finished shard has changed."""
        known = {self._folder / name for shard in self._finished for name in (shard.file, *shard.beside)}
        for opened in self._open.values():
            known |= {self._path(opened.shard, suffix) for suffix in opened.files}
        for path in shard_files(self._folder):
            if path not in known:
                path.unlink()
        for shard in self._finished:
            path = self._folder / shard.file
            is_there = all((self._folder / name).is_file() for name in (shard.file, *shard.beside))
            if not is_there or path.stat().st_size != shard.tokens * self._dtype.itemsize:
                raise InputError(
                    f"{path}: has changed since it was written; remove {self._folder} and prepare it again"
                )

    def write(self, split: str, part: EncodedPart) -> None:
        """Appends documents to the shards of a split."""
        documents = part.documents
        ends = documents["end"].astype(np.int64)
        tokens = tokens_of(documents)
        first = first_id = 0
        while first < len(documents):
            opened = self._shard_with_room(split, int(tokens[first]))
            shard = opened.shard
            room = self._shard_tokens - shard.tokens
            stop = max(first + 1, int(np.searchsorted(ends, first_id + room, side="right")))
            stop_id = int(ends[stop - 1])
            entries = documents[first:stop].copy()
            # In the file, ends are relative to the start of the shard.
            entries["end"] = ends[first:stop] - first_id + shard.tokens
            contents = {
                IDS_SUFFIX: np.ascontiguousarray(part.ids[first_id:stop_id], self._dtype).data.cast("B"),
                DOCUMENTS_SUFFIX: entries.tobytes(),
            }
            if part.signatures is not None:
                contents[SIGNATURES_SUFFIX] = part.signatures[first:stop].tobytes()
            if self._plain_text:
                contents[PLAIN_TEXT_SUFFIX] = b"".join(part.lines[first:stop])
            for suffix, content in contents.items():
                if suffix not in opened.files:
                    opened.files[suffix] = _open_to_append(self._path(shard, suffix))
                opened.files[suffix].write(content)
            opened.shard = replace(
                shard,
                tokens=shard.tokens + stop_id - first_id,
                documents=shard.documents + stop - first,
                text_bytes=shard.text_bytes + int(entries["text_bytes"].sum()),
            )
            first = stop
            first_id = stop_id

    def _shard_with_room(self, split: str, tokens: int) -> _OpenShard:
        if split in self._open and self._open[split].shard.tokens + tokens > self._shard_tokens:
            self._finish(split)
        if split not in self._open:
            number = sum(shard.split == split for shard in self._finished)
            self._open[split] = _OpenShard(Shard(f"{split}-{number:05d}{IDS_SUFFIX}", split, 0, 0, 0, ""))
        return self._open[split]

    def _finish(self, split: str) -> None:
        opened = self._open.pop(split)
        for file in opened.files.values():
            _sync(file)
            file.close()
        ids = self._path(opened.shard, IDS_SUFFIX)
        names = [f"{ids.stem}{name}" for name in (DOCUMENTS_SUFFIX, SIGNATURES_SUFFIX) if name in opened.files]
        blocks = ids.with_suffix(BLOCKS_SUFFIX)
        with ids.open("rb") as file:
            write_durably(blocks, block_digests(file))
        names.append(blocks.name)
        if PLAIN_TEXT_SUFFIX in opened.files:
            names.append(text_name(ids.name))
            plain = self._path(opened.shard, PLAIN_TEXT_SUFFIX)
            compress(plain, self._folder / names[-1])
            self._compressed.append(plain)
        beside = {name: sha256_of(self._folder / name) for name in names}
        self._finished.append(replace(opened.shard, sha256=sha256_of(ids), beside=beside))

    def sync(self) -> dict[str, Any]:
        """Flushes all data to disk and returns the state to resume from."""
        for file in self._open_files():
            _sync(file)
        # Also sync the folders. Otherwise a crash could lose the directory entries of new files.
        for folder in (self._folder, self._folder / TEXT_FOLDER, self._plain_text):
            if folder and folder.is_dir():
                sync_folder(folder)
        return {
            "finished": [asdict(shard) for shard in self._finished],
            "open": [
                (asdict(opened.shard), {suffix: file.tell() for suffix, file in opened.files.items()})
                for opened in self._open.values()
            ],
        }

    def remove_compressed(self) -> None:
        """Removes plain text that has been compressed. Call this after recording the result of `sync`."""
        while self._compressed:
            self._compressed.pop().unlink()

    def written(self) -> list[Shard]:
        """Returns all shards written so far. Open shards don't have a hash yet."""
        return [*self._finished, *(opened.shard for opened in self._open.values())]

    def finish(self) -> list[Shard]:
        """Finishes the open shards and returns all shards, with training before validation."""
        for split in list(self._open):
            self._finish(split)
        return sorted(self._finished, key=lambda shard: shard.split)

    def close(self) -> None:
        """Closes all open files without finishing the shards."""
        for file in self._open_files():
            file.close()

    def _open_files(self) -> list[BinaryIO]:
        return [file for opened in self._open.values() for file in opened.files.values()]


def shard_files(folder: Path) -> list[Path]:
    """Lists all files in a folder that belong to shards, including text."""
    suffixes = (IDS_SUFFIX, DOCUMENTS_SUFFIX, SIGNATURES_SUFFIX, BLOCKS_SUFFIX)
    names = [f"{split}-*{suffix}" for split in (*SPLITS, UNDIVIDED) for suffix in suffixes]
    names += [f"{TEXT_FOLDER}/*{TEXT_SUFFIX}"]
    return sorted(path for name in names for path in folder.glob(name))
