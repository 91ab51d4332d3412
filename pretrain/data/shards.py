"""On-disk token format: a manifest, a tokenizer, and raw little-endian IDs in shard files; its readers and checks.

    folder/manifest.json  tokenizer/  train-00000.bin ...  validation-00000.bin ...

A shard is a plain array of uint16 (vocabulary up to 65,536) or uint32 token IDs without a header, every document
followed by the end-of-document ID, so `np.memmap(file, dtype)` opens it.
"""

import bisect
import hashlib
import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pretrain.config import Shards
from pretrain.data.manifest import HDF5_SUFFIXES, MANIFEST_FILE, SHARDS_FORMAT, Manifest, Shard, id_dtype
from pretrain.errors import InputError
from pretrain.files import sha256_of

if TYPE_CHECKING:
    import h5py

VERIFY_BLOCK_BYTES = 1 << 24
SHARD_FIELDS = {"file": str, "split": str, "tokens": int, "documents": int, "text_bytes": int, "sha256": str}


@dataclass(frozen=True)
class FoundShards:
    """Findings of a run's first rank in a folder that this rank need not be able to read (data/dispatch.py)."""

    problems: list[str]
    manifest: Manifest | None = None
    """Manifest; None: it cannot be read, and `problems` say why."""
    damage: dict[str, list[str]] = field(default_factory=dict)
    """{split: problems of its files}."""


def manifest_of(source: Shards) -> Manifest:
    """Returns the manifest of a recipe's source: the first rank's findings if it reads for all, else as read."""
    found: FoundShards | None = source._found
    if found is None:
        return read_manifest(source.shards, source.tokenizer)
    if found.manifest is None:
        raise InputError(*found.problems)
    return found.manifest


def read_manifest(folder: str | Path, tokenizer: str | None = None) -> Manifest:
    """Reads and checks folder/manifest.json; builds one for files from other tools (data/foreign_shards.py).

    tokenizer: tokenizer of such files; a folder of prepare_data.py has its own. Raises InputError with all problems: a
    missing, unfinished or foreign folder, broken JSON, another format version, missing or mistyped keys.
    """
    folder = Path(folder)
    # Most runs have a manifest and never import the code for other formats.
    if not (folder / MANIFEST_FILE).is_file():
        from pretrain.data.foreign_shards import foreign_files, foreign_manifest

        if foreign_files(folder):
            return foreign_manifest(folder, tokenizer)
    if not folder.is_dir():
        raise InputError(
            f"{folder}: no such folder of prepared shards; prepare it with the commands at the head of the recipe, or "
            f"with python prepare_data.py --input 'FILES' --tokenizer TOKENIZER --output {folder}"
        )
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise InputError(
            f"{folder}: has no {MANIFEST_FILE}, so it is not a finished folder of shards; "
            f"run its prepare_data.py command (again): an unfinished preparation continues"
        )
    content = path.read_bytes()
    try:
        fields = json.loads(content)
    except ValueError as error:
        raise InputError(f"{path}: is not valid JSON ({error}); restore it or prepare the folder again") from None
    return _manifest_from(folder, path, fields, hashlib.sha256(content).hexdigest())


def _manifest_from(folder: Path, path: Path, fields: object, sha256: str) -> Manifest:
    if not isinstance(fields, dict) or fields.get("format") != SHARDS_FORMAT["format"]:
        given = fields.get("format") if isinstance(fields, dict) else type(fields).__name__
        raise InputError(
            f"{path}: format is {given!r}, must be {SHARDS_FORMAT['format']!r}; give a folder made by prepare_data.py"
        )
    if fields.get("version") != SHARDS_FORMAT["version"]:
        raise InputError(
            f"{path}: format version {fields.get('version')!r}, this program reads version "
            f"{SHARDS_FORMAT['version']}; prepare the folder again with this program's prepare_data.py"
        )
    problems: list[str] = []

    def take(mapping: object, key: str, kind: type, where: str = "") -> object:
        value = mapping.get(key) if isinstance(mapping, dict) else None
        # In Python true is an int, but it is not a count.
        if not isinstance(value, kind) or isinstance(value, bool):
            shown = "is missing" if value is None else f"is {value!r}"
            problems.append(f"{path}: {where}{key} {shown}, must be {kind.__name__}; restore it or prepare it again")
            return kind()
        return value

    tokenizer = take(fields, "tokenizer", dict)
    shards = []
    for number, entry in enumerate(take(fields, "shards", list)):
        where = f"shards[{number}]."
        values = [take(entry, name, kind, where) for name, kind in SHARD_FIELDS.items()]
        # Folders of earlier versions have no files beside their shards.
        shards.append(Shard(*values, take({"beside": {}} | dict(entry or {}), "beside", dict, where)))
    manifest = Manifest(
        folder=folder,
        tokenizer_name=take(tokenizer, "name", str, "tokenizer."),
        tokenizer_sha256=take(tokenizer, "sha256", str, "tokenizer."),
        vocabulary_size=take(fields, "vocabulary_size", int),
        end_of_document_id=take(fields, "end_of_document_id", int),
        dtype=take(fields, "dtype", str),
        shards=tuple(shards),
        sha256=sha256,
        source_names=tuple(str(source.get("path")) for source in fields.get("sources") or [] if source),
        input_format=(fields.get("options") or {}).get("format"),
    )
    if manifest.dtype not in ("uint16", "uint32", ""):
        problems.append(f"{path}: dtype is {manifest.dtype!r}, must be uint16 or uint32; restore it")
    if problems:
        raise InputError(*problems)
    return manifest


class ShardReader:
    """Token IDs of one split as a single stream over its shard files, memory-mapped when first read.

    IDs are not checked against the vocabulary: `verify_shards` does that, and so must any code that feeds a device.
    """

    def __init__(self, manifest: Manifest, split: str):
        self.manifest = manifest
        self.split = split
        self._shards = [shard for shard in manifest.of_split(split) if shard.tokens]
        self._ends = list(itertools.accumulate(shard.tokens for shard in self._shards))
        self._maps: list[np.ndarray | h5py.Dataset | None] = [None] * len(self._shards)
        self.tokens = self._ends[-1] if self._shards else 0

    def _ids(self, number: int) -> "np.ndarray | h5py.Dataset":
        # Opened on first use: one of thousands of shards may serve many steps.
        ids = self._maps[number]
        if ids is None:
            path = self.manifest.folder / self._shards[number].file
            if path.suffix in HDF5_SUFFIXES:
                from pretrain.data.foreign_shards import hdf5_ids

                ids = hdf5_ids(path)
            else:
                # Viewed as a plain array: slicing an np.memmap costs several times more per read.
                ids = np.memmap(path, id_dtype(self.manifest.dtype), mode="r").view(np.ndarray)
            if len(ids) != self._shards[number].tokens:
                raise InputError(*shard_size_problems(self.manifest, [self._shards[number]]))
            self._maps[number] = ids
        return ids

    def read(self, start: int, out: np.ndarray) -> None:
        """Copies len(out) token IDs from position `start` of the stream into the 1-d integer array `out`.

        Raises IndexError outside of [0, tokens].
        """
        stop = start + len(out)
        if start < 0 or stop > self.tokens:
            raise IndexError(f"tokens {start} to {stop} asked, {self.split} has 0 to {self.tokens}")
        # bisect on a list: np.searchsorted takes ten times as long for a single number.
        number = bisect.bisect_right(self._ends, start)
        filled = 0
        while filled < len(out):
            ids = self._ids(number)
            offset = start + filled - (self._ends[number] - len(ids))
            taken = min(len(out) - filled, len(ids) - offset)
            out[filled : filled + taken] = ids[offset : offset + taken]
            filled += taken
            number += 1


def shard_size_problems(manifest: Manifest, shards: Iterable[Shard]) -> list[str]:
    """Lists files that are missing or have another size than the manifest says."""
    problems = []
    for shard in shards:
        path = manifest.folder / shard.file
        expected = shard.tokens * manifest.bytes_per_id
        size = path.stat().st_size if path.is_file() else None
        if size is not None and path.suffix in HDF5_SUFFIXES:
            from pretrain.data.foreign_shards import ids_bytes

            size = ids_bytes(path, manifest.dtype)
        if size != expected:
            given = "is missing" if size is None else f"has {size:,} bytes"
            problems.append(
                f"{path}: {given}, must have {expected:,} bytes ({shard.tokens:,} {manifest.dtype} ids); restore the "
                f"file, or remove {manifest.folder} and run prepare_data.py again"
            )
    return problems


def open_shards(folder: str | Path, split: str, tokenizer: str | None = None) -> ShardReader:
    """Opens a reader of one split whose files all exist in full size.

    Raises InputError naming each bad shard, or the splits that exist if this one is empty.
    """
    return open_source(Shards(shards=folder, tokenizer=tokenizer), split)


def open_source(source: Shards, split: str) -> ShardReader:
    """Opens a split of a recipe's source, as `open_shards` does; the first rank's findings replace the checks."""
    folder = source.shards
    manifest = manifest_of(source)
    if manifest.totals(split)[0] == 0:
        existing = [name for name in dict.fromkeys(s.split for s in manifest.shards) if manifest.totals(name)[0]]
        raise InputError(
            f"{folder}: has no tokens in split {split!r}; splits that exist: {', '.join(existing) or 'none'}; "
            f"prepare it with a larger --validation_fraction or more documents, or use another split"
        )
    found: FoundShards | None = source._found
    if problems := found.damage[split] if found else shard_size_problems(manifest, manifest.of_split(split)):
        raise InputError(*problems)
    return ShardReader(manifest, split)


def verify_shards(folder: str | Path) -> list[str]:
    """Lists everything wrong with a prepared folder; empty if nothing is.

    Rereads and rehashes every file; checks IDs against the vocabulary, and end-of-document IDs against documents.
    """
    try:
        manifest = read_manifest(folder)
    except InputError as error:
        return error.problems
    problems = shard_size_problems(manifest, manifest.shards)
    problems += _hash_problems(manifest.tokenizer_folder / "tokenizer.json", manifest.tokenizer_sha256)
    for shard in manifest.shards:
        if (manifest.folder / shard.file).is_file():
            problems += _content_problems(manifest, shard)
        for name, sha256 in shard.beside.items():
            problems += _hash_problems(manifest.folder / name, sha256)
    return problems


def _hash_problems(path: Path, sha256: str, actual: str | None = None) -> list[str]:
    """Lists the file's problem if its hash differs. actual: the hash of the file, if it is already known."""
    if actual is None and not path.is_file():
        return [f"{path}: is missing; restore it, or remove the folder and prepare it again"]
    if (actual or sha256_of(path)) != sha256:
        return [f"{path}: its content has changed (sha256 differs from the manifest's); restore it"]
    return []


def _content_problems(manifest: Manifest, shard: Shard) -> list[str]:
    path = manifest.folder / shard.file
    sha256 = hashlib.sha256()
    largest_id = 0
    ends = 0
    with path.open("rb") as file:
        while block := file.read(VERIFY_BLOCK_BYTES):
            sha256.update(block)
            whole = len(block) // manifest.bytes_per_id
            ids = np.frombuffer(block, id_dtype(manifest.dtype), count=whole)
            largest_id = max(largest_id, int(ids.max(initial=0)))
            ends += int(np.count_nonzero(ids == manifest.end_of_document_id))
    problems = _hash_problems(path, shard.sha256, sha256.hexdigest())
    if largest_id >= manifest.vocabulary_size:
        problems.append(f"{path}: holds id {largest_id}, the vocabulary has 0 to {manifest.vocabulary_size - 1}")
    if ends != shard.documents:
        problems.append(f"{path}: holds {ends:,} end-of-document ids, the manifest says {shard.documents:,} documents")
    return problems
