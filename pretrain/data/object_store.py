"""Reads shards from an object store (s3://, gs://, hf://, any fsspec URL) with range requests and prefetching.

A shard is read in blocks of 64 KiB. Next to train-00000.bin, train-00000.blocks contains a hash of each block (8 bytes
of BLAKE2b). The manifest contains the hash of the .blocks file. Blocks stay in memory until the step that uses them.
They can also be cached on disk, up to a maximum size.
"""

import functools
import hashlib
import os
import re
import tempfile
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pretrain.config import DataCache
from pretrain.data.manifest import MANIFEST_FILE, TOKENIZER_FOLDER, Manifest, Shard, id_dtype, parse_manifest
from pretrain.errors import InputError
from pretrain.files import sha256_of
from pretrain.urls import remote_folder

BLOCK_BYTES = 1 << 16
DIGEST_BYTES = 8
BLOCKS_SUFFIX = ".blocks"
TRIES_IF_DAMAGED = 2
"""Number of attempts if a hash doesn't match, because data may be corrupted in transit."""
THREADS = 16
"""Concurrent requests per process."""
BLOCKS_AHEAD = 512
"""Number of blocks to prefetch: 32 MiB per process."""
BLOCKS_KEPT = 2 * BLOCKS_AHEAD


def block_digests(file: BinaryIO) -> bytes:
    """Returns the content of a .blocks file: the hashes of a file's blocks, concatenated."""
    digests = bytearray()
    while block := file.read(BLOCK_BYTES):
        digests += _digest(block)
    return bytes(digests)


def _digest(block: bytes) -> bytes:
    return hashlib.blake2b(block, digest_size=DIGEST_BYTES).digest()


@functools.cache
def remote_sizes(url: str) -> dict[str, int | None]:
    """Returns {file: size in bytes, or None if unknown} for a folder. Cached per process."""
    return remote_folder(url).sizes()


@functools.cache
def remote_manifest(url: str) -> Manifest:
    """Reads the manifest at a URL, and stores it and the tokenizer in ~/.cache/groundwork. Raises InputError.

    Cached, so that all readers in a process use the same manifest.
    """
    folder = remote_folder(url)
    where = f"{folder.shown}/{MANIFEST_FILE}"
    try:
        content = folder.read(MANIFEST_FILE)
    except InputError as error:
        if not isinstance(error.__context__, FileNotFoundError):  # such as a refusal
            raise
        advice = f"unfinished folders have no {MANIFEST_FILE}; other tools' shards can only be read from a local disk"
        raise InputError(*error.problems, f"{folder.shown}: {advice}") from None
    sha256 = hashlib.sha256(content).hexdigest()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    local = home / "groundwork" / "shards" / sha256
    manifest = replace(parse_manifest(local, where, content), url=url)
    tokenizer = local / TOKENIZER_FOLDER / "tokenizer.json"

    def is_copied() -> bool:
        return tokenizer.is_file() and sha256_of(tokenizer) == manifest.tokenizer_sha256

    if not is_copied():
        _store(local / MANIFEST_FILE, content)
        names = [name for name in remote_sizes(url) if re.fullmatch(f"{TOKENIZER_FOLDER}/[^/]+", name)]
        # tokenizer.json comes last, because it shows that the copy is complete.
        for name in sorted(names, key=lambda name: name.endswith("/tokenizer.json")):
            _store(local / name, folder.read(name))
    if not is_copied():
        raise InputError(
            f"{folder.shown}/{TOKENIZER_FOLDER}/tokenizer.json: is missing or does not match the manifest; upload it "
            "again"
        )
    return manifest


def _store(path: Path, content: bytes) -> None:
    """Writes a file atomically, because other ranks may do the same, even on other machines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".copying-") as place:
        fresh = Path(place) / path.name
        fresh.write_bytes(content)  # unlike a temporary file, readable for other users who share the cache
        fresh.replace(path)


class RemoteIds:
    """Token IDs of a shard in an object store. Slices, which may not be empty, are read-only arrays."""

    def __init__(self, manifest: Manifest, shard: Shard, blocks: "BlockReader"):
        self.folder = remote_folder(manifest.url)
        self.file = shard.file
        self.key = f"{manifest.sha256}/{shard.file}"
        self._blocks = blocks
        self._tokens = shard.tokens
        self._dtype = id_dtype(manifest.dtype)
        self._hashes_sha256 = shard.beside.get(self.hashes_file)
        self._hashes: Future[bytes] | None = None

    def __len__(self) -> int:
        return self._tokens

    @property
    def hashes_file(self) -> str:
        """Name of the file with the block hashes."""
        return str(Path(self.file).with_suffix(BLOCKS_SUFFIX))

    def __getitem__(self, where: slice) -> np.ndarray:
        start, stop, _ = where.indices(self._tokens)
        numbers = self._numbers(start, stop)
        content = b"".join([self._blocks.block(self, number) for number in numbers])
        first = numbers[0] * BLOCK_BYTES // self._dtype.itemsize
        return np.frombuffer(content, self._dtype)[start - first : stop - first]

    def expect(self, start: int, stop: int) -> None:
        """Starts prefetching the blocks that contain these IDs."""
        for number in self._numbers(start, stop):
            self._blocks.expect(self, number)

    def _numbers(self, start: int, stop: int) -> range:
        size = self._dtype.itemsize
        return range(start * size // BLOCK_BYTES, (stop * size - 1) // BLOCK_BYTES + 1)

    def span(self, number: int) -> tuple[int, int]:
        """Returns a block's byte range, (start, end)."""
        start = number * BLOCK_BYTES
        return start, min(start + BLOCK_BYTES, self._tokens * self._dtype.itemsize)

    def begin_hashes(self, pool: ThreadPoolExecutor) -> None:
        """Starts fetching the hashes, which are needed to verify the first block."""
        if self._hashes is None and self._hashes_sha256 is not None:
            self._hashes = pool.submit(self._read_hashes)

    def _read_hashes(self) -> bytes:
        blocks = -(-self._tokens * self._dtype.itemsize // BLOCK_BYTES)
        for _ in range(TRIES_IF_DAMAGED):
            content = self.folder.read(self.hashes_file, 0, blocks * DIGEST_BYTES)
            if hashlib.sha256(content).hexdigest() == self._hashes_sha256:
                return content
        raise InputError(
            f"{self.folder.shown}/{self.hashes_file}: its content has changed (sha256 differs from the manifest's); "
            "upload it again"
        )

    def fetch(self, number: int) -> bytes:
        """Reads a block and checks its hash. Raises InputError on a mismatch, or the errors of `RemoteFolder`."""
        start, end = self.span(number)
        for _ in range(TRIES_IF_DAMAGED):
            content = self.folder.read(self.file, start, end)
            if self._hashes is None:  # shards from an earlier version
                return content
            if _digest(content) == self._hashes.result()[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]:
                return content
        raise InputError(
            f"{self.folder.shown}/{self.file}: bytes {start:,} to {end:,} are damaged (their hash differs from "
            f"{self.hashes_file}); upload the object again"
        )


class BlockReader:
    """Fetches a process's blocks in threads and keeps the last BLOCKS_KEPT in memory.

    disk: on-disk cache, reused after a restart and shared with the machine's other processes.
    """

    def __init__(self, disk: "DiskCache | None"):
        self._disk = disk
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="object_store")
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[str, int], Future[bytes]] = OrderedDict()
        self._kept = BLOCKS_KEPT
        self.fetched_bytes = 0

    def keep(self, blocks: int) -> None:
        """Keeps at least this many blocks in memory, so that none is evicted before it is read."""
        self._kept = max(self._kept, blocks)

    def expect(self, ids: RemoteIds, number: int) -> Future[bytes]:
        """Starts fetching a block, unless it is already in memory."""
        key = (ids.key, number)
        with self._lock:
            found = self._blocks.get(key)
            if found is None:
                ids.begin_hashes(self._pool)
                found = self._blocks[key] = self._pool.submit(self._fetched, ids, number)
                while len(self._blocks) > self._kept:
                    self._blocks.popitem(last=False)
            else:
                self._blocks.move_to_end(key)
        return found

    def block(self, ids: RemoteIds, number: int) -> bytes:
        """Waits for a block and returns its content. Raises the errors of `RemoteIds.fetch`."""
        try:
            return self.expect(ids, number).result()
        except Exception:
            with self._lock:
                self._blocks.pop((ids.key, number), None)
            raise

    def _fetched(self, ids: RemoteIds, number: int) -> bytes:
        start, end = ids.span(number)
        key = f"{ids.key}/{number}".encode()
        content = self._disk.get(key, end - start) if self._disk else None
        if content is None:
            content = ids.fetch(number)
            with self._lock:
                self.fetched_bytes += len(content)
            if self._disk:
                self._disk.put(key, content)
        return content


@functools.cache
def block_reader(cache: DataCache | None) -> BlockReader:
    """Returns the process's block reader, which all sources share."""
    return BlockReader(DiskCache(cache.folder, cache.size) if cache else None)


class DiskCache:
    """Block cache in a single fixed-size file, which all of a machine's processes read and write without locking.

    The cache is set-associative: a block can be stored in any of the WAYS slots that its key determines. In the slot,
    the block is preceded by a hash of its key and a hash of its key and content. A mismatch reveals a half-written
    slot, left by a killed process or by concurrent writes.
    """

    WAYS = 8
    HASH_BYTES = 16
    PLACE_BYTES = 2 * HASH_BYTES + BLOCK_BYTES

    def __init__(self, folder: Path, size: int):
        self._sets = size // (self.WAYS * self.PLACE_BYTES)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(folder / "blocks", os.O_RDWR | os.O_CREAT, 0o600)
            # Allocated now, because the run would fail if the disk filled up later.
            os.posix_fallocate(self._file, 0, self._sets * self.WAYS * self.PLACE_BYTES)
        except OSError as error:
            raise InputError(
                f"data.cache: {folder}: cannot create a file of {size:,} bytes: {error.strerror}; use another folder "
                "or a smaller size"
            ) from None

    def get(self, key: bytes, size: int) -> bytes | None:
        """Returns a cached block of `size` bytes, or None."""
        name, places = self._places(key)
        for place in places:
            if os.pread(self._file, self.HASH_BYTES, place) == name:
                stored = os.pread(self._file, self.HASH_BYTES + size, place + self.HASH_BYTES)
                content = stored[self.HASH_BYTES :]
                if stored[: self.HASH_BYTES] == self._hash(key, content):
                    return content
        return None

    def put(self, key: bytes, content: bytes) -> None:
        """Stores a block."""
        name, places = self._places(key)
        held = [os.pread(self._file, self.HASH_BYTES, place) for place in places]
        free = [place for place, found in zip(places, held, strict=True) if found in (name, bytes(self.HASH_BYTES))]
        content_hash = self._hash(key, content)
        place = free[0] if free else places[content_hash[0] % self.WAYS]
        os.pwrite(self._file, name + content_hash + content, place)

    def _places(self, key: bytes) -> tuple[bytes, list[int]]:
        name = self._hash(key)
        first = int.from_bytes(name[:8], "little") % self._sets * self.WAYS
        return name, [number * self.PLACE_BYTES for number in range(first, first + self.WAYS)]

    def _hash(self, *parts: bytes) -> bytes:
        return hashlib.blake2b(b"".join(parts), digest_size=self.HASH_BYTES).digest()


def copied_file(manifest: Manifest, name: str) -> Path:
    """Returns a local copy of a file stored next to the shards, made on first use. Raises InputError."""
    path = manifest.folder / name
    if not path.is_file():
        _store(path, remote_folder(manifest.url).read(name))
    return path
