"""Writes shards so that prepare_data.py can resume after an interruption."""

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.manifest import SPLITS, Shard, id_dtype
from pretrain.data.object_store import BLOCKS_SUFFIX, block_digests
from pretrain.errors import InputError
from pretrain.files import seal, sync_folder, write_durably
from pretrain_tools.preparation.documents.document_index import DOCUMENTS_SUFFIX, UNDIVIDED, tokens_of
from pretrain_tools.preparation.encoded_part import EncodedPart
from pretrain_tools.preparation.near_duplicate_search import SIGNATURES_SUFFIX
from pretrain_tools.preparation.text_files import TEXT_FOLDER, TEXT_SUFFIX, compress, text_name

IDS_SUFFIX = ".bin"
PLAIN_TEXT_SUFFIX = ".jsonl"


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
        self._open: dict[str, Shard] = {}
        """{split: its shard that isn't full yet}. It doesn't have hashes yet."""
        known = {folder / name for shard in self._finished for name in (shard.file, *shard.beside)}
        for fields, sizes in state["open"]:
            shard = self._open[fields["split"]] = Shard(**fields)
            for suffix, size in sizes.items():
                path = self._path(shard, suffix)
                if not path.is_file() or path.stat().st_size < size:
                    raise InputError(
                        f"{path}: was truncated after it was written; remove {folder} and prepare it again"
                    )
                os.truncate(path, size)
                known.add(path)
        for path in [*shard_files(folder), *(plain_text.iterdir() if plain_text else ())]:
            if path not in known:
                path.unlink()
        for shard in self._finished:
            path = folder / shard.file
            all_exist = all((folder / name).is_file() for name in (shard.file, *shard.beside))
            if not all_exist or path.stat().st_size != shard.tokens * self._dtype.itemsize:
                raise InputError(f"{path}: has changed since it was written; remove {folder} and prepare it again")

    def _path(self, shard: Shard, suffix: str) -> Path:
        folder = self._plain_text if suffix == PLAIN_TEXT_SUFFIX else self._folder
        return (folder / shard.file).with_suffix(suffix)

    def _files(self, shard: Shard) -> dict[str, Path]:
        """Returns {suffix: file} for the files of a shard that isn't full yet."""
        folders = [folder for folder in (self._folder, self._plain_text) if folder]
        return {path.suffix: path for folder in folders for path in folder.glob(f"{Path(shard.file).stem}.*")}

    def write(self, split: str, part: EncodedPart) -> None:
        """Appends documents to the shards of a split."""
        documents = part.documents
        ends = documents["end"].astype(np.int64)
        tokens = tokens_of(documents)
        first = first_id = 0
        while first < len(documents):
            shard = self._shard_with_room(split, int(tokens[first]))
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
                with self._path(shard, suffix).open("ab") as file:
                    file.write(content)
            self._open[split] = replace(
                shard,
                tokens=shard.tokens + stop_id - first_id,
                documents=shard.documents + stop - first,
                text_bytes=shard.text_bytes + int(entries["text_bytes"].sum()),
            )
            first = stop
            first_id = stop_id

    def _shard_with_room(self, split: str, tokens: int) -> Shard:
        if split in self._open and self._open[split].tokens + tokens > self._shard_tokens:
            self._finish(split)
        number = sum(shard.split == split for shard in self._finished)
        return self._open.setdefault(split, Shard(f"{split}-{number:05d}{IDS_SUFFIX}", split, 0, 0, 0, ""))

    def _finish(self, split: str) -> None:
        shard = self._open.pop(split)
        files = self._files(shard)
        names = [files[suffix].name for suffix in (DOCUMENTS_SUFFIX, SIGNATURES_SUFFIX) if suffix in files]
        blocks = files[IDS_SUFFIX].with_suffix(BLOCKS_SUFFIX)
        with files[IDS_SUFFIX].open("rb") as file:
            write_durably(blocks, block_digests(file))
        names.append(blocks.name)
        if plain := files.get(PLAIN_TEXT_SUFFIX):
            names.append(text_name(shard.file))
            compress(plain, self._folder / names[-1])
            self._compressed.append(plain)
        beside = {name: seal(self._folder / name)["sha256"] for name in names}
        self._finished.append(replace(shard, sha256=seal(files[IDS_SUFFIX])["sha256"], beside=beside))

    def sync(self) -> dict[str, Any]:
        """Flushes all data to disk and returns the state to resume from."""
        unfinished = []
        for shard in self._open.values():
            files = self._files(shard)
            for path in files.values():
                sync_folder(path)
            unfinished.append((asdict(shard), {suffix: path.stat().st_size for suffix, path in files.items()}))
        # Also sync the folders. Otherwise a crash could lose the directory entries of new files.
        for folder in (self._folder, self._folder / TEXT_FOLDER, self._plain_text):
            if folder and folder.is_dir():
                sync_folder(folder)
        return {"finished": [asdict(shard) for shard in self._finished], "open": unfinished}

    def remove_compressed(self) -> None:
        """Removes plain text that has been compressed. Call this after recording the result of `sync`."""
        while self._compressed:
            self._compressed.pop().unlink()

    def written(self) -> list[Shard]:
        """Returns all shards written so far. Open shards don't have a hash yet."""
        return [*self._finished, *self._open.values()]

    def finish(self) -> list[Shard]:
        """Finishes the open shards and returns all shards, with training before validation."""
        for split in list(self._open):
            self._finish(split)
        return sorted(self._finished, key=lambda shard: shard.split)


def shard_files(folder: Path) -> list[Path]:
    """Lists all files in a folder that belong to shards, including text."""
    suffixes = (IDS_SUFFIX, DOCUMENTS_SUFFIX, SIGNATURES_SUFFIX, BLOCKS_SUFFIX)
    names = [f"{split}-*{suffix}" for split in (*SPLITS, UNDIVIDED) for suffix in suffixes]
    names += [f"{TEXT_FOLDER}/*{TEXT_SUFFIX}"]
    return sorted(path for name in names for path in folder.glob(name))
