"""Reads and checks the on-disk token format: a manifest, a tokenizer, and shard files of raw token IDs.

    folder/manifest.json  tokenizer/  train-00000.bin ...  validation-00000.bin ...

A shard is a headerless, little-endian array of uint16 (vocabularies up to 65,536) or uint32 token IDs, which
`np.memmap(file, dtype)` can open. Each document is followed by the end-of-document ID.
"""

import bisect
import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pretrain.config import DataCache, Shards
from pretrain.data.manifest import HDF5_SUFFIXES, MANIFEST_FILE, Manifest, Shard, id_dtype, parse_manifest
from pretrain.errors import InputError
from pretrain.files import is_url

if TYPE_CHECKING:
    import h5py

    from pretrain.data.object_store import RemoteIds

MOST_OPEN_MAPS = 256
"""Maximum number of memory maps per process. Each holds a file descriptor, and the usual limit is 1,024."""
_open_maps: "deque[tuple[weakref.ref[ShardReader], int]]" = deque()
"""(reader, shard number) of each map, oldest first."""


@dataclass(frozen=True)
class FoundShards:
    """The first rank's check results for a folder that this rank may not be able to read (data/dispatch.py)."""

    problems: list[str]
    manifest: Manifest | None = None
    """Manifest, or None if it is unreadable (see `problems`)."""
    damage: dict[str, list[str]] = field(default_factory=dict)
    """{split: problems with its files}."""


def manifest_of(source: Shards) -> Manifest:
    """Returns the manifest of a recipe's source. Uses the first rank's if that rank reads for all ranks."""
    found: FoundShards | None = source._found
    if found is None:
        return read_manifest(source.shards, source.tokenizer)
    if found.manifest is None:
        raise InputError(*found.problems)
    return found.manifest


def read_manifest(folder: str | Path, tokenizer: str | None = None) -> Manifest:
    """Reads and checks folder/manifest.json, or builds a manifest for other tools' files (data/foreign_shards.py).

    Raises InputError listing all problems, such as a missing or unfinished folder, invalid JSON, an unsupported format
    version, or missing keys.

    Args:
        folder: path or URL (data/object_store.py).
        tokenizer: tokenizer for other tools' files. Folders made by prepare_data.py contain their own.
    """
    # Imported lazily, because most runs need neither object stores nor other formats.
    if is_url(folder):
        from pretrain.data.object_store import remote_manifest

        return remote_manifest(str(folder))
    folder = Path(folder)
    path = folder / MANIFEST_FILE
    if path.is_file():
        return parse_manifest(folder, str(path), path.read_bytes())
    from pretrain.data.foreign_shards import foreign_files, foreign_manifest

    if foreign_files(folder):
        return foreign_manifest(folder, tokenizer)
    if folder.is_dir():
        raise InputError(
            f"{folder}: has no {MANIFEST_FILE}, so it is not a finished folder of shards; "
            f"run its prepare_data.py command (if it was interrupted, it continues where it stopped)"
        )
    raise InputError(
        f"{folder}: no such folder of prepared shards; prepare it with the commands at the top of the recipe, or "
        f"with python prepare_data.py --input 'FILES' --tokenizer TOKENIZER --output {folder}"
    )


class ShardReader:
    """Token IDs of one split, as a single stream across its shard files. Each file is opened on first use.

    Doesn't check that IDs are within the vocabulary. Do so before copying them to a GPU.
    """

    def __init__(self, manifest: Manifest, split: str, cache: DataCache | None = None):
        self.manifest = manifest
        self.split = split
        self._shards = [shard for shard in manifest.of_split(split) if shard.tokens]
        self._ends = list(itertools.accumulate(shard.tokens for shard in self._shards))
        self._cache = cache
        self._maps: list[np.ndarray | h5py.Dataset | RemoteIds | None] = [None] * len(self._shards)
        self.tokens = self._ends[-1] if self._shards else 0

    def _ids(self, number: int) -> "np.ndarray | h5py.Dataset | RemoteIds":
        # There may be thousands of shards, and a step needs only a few.
        ids = self._maps[number]
        if ids is None:
            path = self.manifest.folder / self._shards[number].file
            if self.manifest.url is not None:
                from pretrain.data.object_store import RemoteIds, block_reader

                ids = RemoteIds(self.manifest, self._shards[number], block_reader(self._cache))
            elif path.suffix in HDF5_SUFFIXES:
                from pretrain.data.foreign_shards import hdf5_ids

                ids = hdf5_ids(path)
            else:
                # A plain array, because slicing an np.memmap is several times slower.
                ids = np.memmap(path, id_dtype(self.manifest.dtype), mode="r").view(np.ndarray)
                _open_maps.append((weakref.ref(self), number))
                if len(_open_maps) > MOST_OPEN_MAPS:
                    owner, oldest = _open_maps.popleft()
                    if (reader := owner()) is not None:
                        reader._maps[oldest] = None
            if len(ids) != self._shards[number].tokens:
                raise InputError(*shard_size_problems(self.manifest, [self._shards[number]]))
            self._maps[number] = ids
        return ids

    def read(self, start: int, out: np.ndarray) -> None:
        """Copies len(out) token IDs, starting at position `start`, into the 1-D integer array `out`.

        Raises IndexError if the range isn't within [0, tokens].
        """
        filled = 0
        for ids, first, stop in self._pieces(start, len(out)):
            out[filled : filled + stop - first] = ids[first:stop]
            filled += stop - first

    def expect(self, start: int, count: int) -> None:
        """Starts prefetching `count` IDs from position `start`. Does nothing for local files."""
        if self.manifest.url is not None:
            for ids, first, stop in self._pieces(start, count):
                ids.expect(first, stop)

    def _pieces(self, start: int, count: int) -> Iterator[tuple["np.ndarray | h5py.Dataset | RemoteIds", int, int]]:
        """Yields (a shard's IDs, first, stop) for each shard in this range of the stream."""
        end = start + count
        if start < 0 or end > self.tokens:
            raise IndexError(f"tokens {start} to {end} requested, but {self.split} has 0 to {self.tokens}")
        # For a single value, np.searchsorted takes ten times as long as bisect.
        number = bisect.bisect_right(self._ends, start)
        while start < end:
            ids = self._ids(number)
            first = start - (self._ends[number] - len(ids))
            stop = min(first + end - start, len(ids))
            yield ids, first, stop
            start += stop - first
            number += 1


def shard_size_problems(manifest: Manifest, shards: Iterable[Shard]) -> list[str]:
    """Lists files that are missing or have the wrong size."""
    remedy = f"restore the file, or remove {manifest.folder} and run prepare_data.py again"
    if manifest.url is not None:
        remedy = "upload it again"
    problems = []
    for shard in shards:
        expected = shard.tokens * manifest.bytes_per_id
        size = _size_of(manifest, shard)
        if size not in (expected, None):
            given = "is missing" if size < 0 else f"has {size:,} bytes"
            problems.append(
                f"{manifest.place}/{shard.file}: {given}, must have {expected:,} bytes ({shard.tokens:,} "
                f"{manifest.dtype} IDs); {remedy}"
            )
    return problems


def _size_of(manifest: Manifest, shard: Shard) -> int | None:
    """Returns a shard's size in bytes. -1: the file is missing. None: the server doesn't report the size."""
    if manifest.url is not None:
        from pretrain.data.object_store import remote_sizes

        return remote_sizes(manifest.url).get(shard.file, -1)
    path = manifest.folder / shard.file
    if not path.is_file():
        return -1
    if path.suffix in HDF5_SUFFIXES:
        from pretrain.data.foreign_shards import ids_bytes

        return ids_bytes(path, manifest.dtype)
    return path.stat().st_size


def open_shards(folder: str | Path, split: str, tokenizer: str | None = None) -> ShardReader:
    """Opens one split after checking the size of each of its files.

    Raises InputError listing all bad shards, or listing the existing splits if this one is empty.
    """
    return open_source(Shards(shards=folder, tokenizer=tokenizer), split)


def open_source(source: Shards, split: str, cache: DataCache | None = None) -> ShardReader:
    """Opens a split of a recipe's source like `open_shards`, or relies on the first rank's checks if there are any.

    cache: disk cache for blocks from an object store.
    """
    folder = source.shards
    manifest = manifest_of(source)
    if manifest.totals(split)[0] == 0:
        existing = [name for name in dict.fromkeys(s.split for s in manifest.shards) if manifest.totals(name)[0]]
        raise InputError(
            f"{folder}: has no tokens in split {split!r} (existing splits: {', '.join(existing) or 'none'}); "
            f"prepare it with a larger --validation_fraction or more documents, or use another split"
        )
    found: FoundShards | None = source._found
    if problems := found.damage[split] if found else shard_size_problems(manifest, manifest.of_split(split)):
        raise InputError(*problems)
    return ShardReader(manifest, split, cache)
