"""Manifest of a folder of prepared shards, and the dtypes of token IDs."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import StrictInt, TypeAdapter, ValidationError

from pretrain.errors import InputError
from pretrain.files import shown

SHARDS_FORMAT = {"format": "groundwork-shards", "version": 1}
MANIFEST_FILE = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
TOKENIZER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
)
"""A tokenizer's files, besides tokenizer.json."""
SPLITS = ("train", "validation")
LARGEST_UINT16_VOCABULARY = 65_536
HDF5_SUFFIXES = (".h5", ".hdf5")


@dataclass(frozen=True)
class Shard:
    """One shard file."""

    file: str
    split: str
    tokens: StrictInt
    """Number of token IDs, including end-of-document IDs."""
    documents: StrictInt
    text_bytes: StrictInt
    """Size of the documents in bytes, as UTF-8."""
    sha256: str
    beside: dict[str, str] = field(default_factory=dict)
    """{file: sha256} of the files next to it, such as the document index and Megatron's .idx."""


@dataclass(frozen=True)
class Manifest:
    """Contents of a prepared folder. `sha256` is the manifest file's hash and identifies the data."""

    folder: Path
    tokenizer_name: str
    tokenizer_sha256: str
    vocabulary_size: int
    end_of_document_id: int
    dtype: str
    shards: tuple[Shard, ...]
    sha256: str
    source_names: tuple[str, ...] = ()
    """Names of the documents' sources. The document indices refer to them by position."""
    input_format: str | None = None
    """Input format of all sources; None if it was inferred from their suffixes."""
    tokenizer_path: Path | None = None
    """Tokenizer folder, if the shards' folder has none."""
    url: str | None = None
    """URL of shards in an object store. In that case, `folder` contains copies of the small files."""

    @property
    def tokenizer_folder(self) -> Path:
        """Hugging Face tokenizer folder. Folders made by prepare_data.py contain one."""
        return self.tokenizer_path or self.folder / TOKENIZER_FOLDER

    @property
    def place(self) -> str:
        """Folder of the shards, or their URL without secrets."""
        return str(self.folder) if self.url is None else shown(self.url).rstrip("/")

    @property
    def bytes_per_id(self) -> int:
        """Size of a token ID in bytes: 2 for uint16, 4 for uint32."""
        return id_dtype(self.dtype).itemsize

    def of_split(self, split: str) -> tuple[Shard, ...]:
        """Returns a split's shards in the order of the token stream."""
        return tuple(shard for shard in self.shards if shard.split == split)

    def totals(self, split: str) -> tuple[int, int, int]:
        """Returns (tokens, documents, text_bytes) of a split."""
        return tuple(counts_in(self.shards, split).values())


@dataclass(frozen=True)
class _Tokenizer:
    name: str
    sha256: str


@dataclass(frozen=True)
class _Contents:
    """The part of manifest.json that training needs."""

    tokenizer: _Tokenizer
    vocabulary_size: StrictInt
    end_of_document_id: StrictInt
    dtype: Literal["uint16", "uint32"]
    shards: tuple[Shard, ...]


def parse_manifest(folder: Path, path: str, content: bytes) -> Manifest:
    """Parses a manifest. Raises InputError listing all problems. `path` is used in error messages."""
    try:
        fields = json.loads(content)
    except ValueError as error:
        raise InputError(f"{path}: is not valid JSON ({error}); restore it or prepare the folder again") from None
    given = {key: fields.get(key) for key in SHARDS_FORMAT} if isinstance(fields, dict) else type(fields).__name__
    if given != SHARDS_FORMAT:
        raise InputError(
            f"{path}: contains {given}, must contain {SHARDS_FORMAT}; use a folder made by this version's "
            "prepare_data.py, or prepare it again"
        )
    try:
        found = TypeAdapter(_Contents).validate_python(fields)
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            where = ".".join(map(str, problem["loc"]))
            given = "" if problem["type"] == "missing" else f" (got {problem['input']!r})"
            problems.append(f"{path}: {where}: {problem['msg']}{given}; restore it or prepare it again")
        raise InputError(*problems) from None
    contents = vars(found)
    tokenizer = contents.pop("tokenizer")
    return Manifest(
        **contents,
        folder=folder,
        tokenizer_name=tokenizer.name,
        tokenizer_sha256=tokenizer.sha256,
        sha256=hashlib.sha256(content).hexdigest(),
        source_names=tuple(str(source.get("path")) for source in fields.get("sources") or [] if source),
        input_format=(fields.get("options") or {}).get("format"),
    )


def counts_in(shards: Iterable[Shard], split: str) -> dict[str, int]:
    """Returns {tokens, documents, text_bytes} of a split, all 0 if it has no shards."""
    chosen = [shard for shard in shards if shard.split == split]
    return {name: sum(getattr(shard, name) for shard in chosen) for name in ("tokens", "documents", "text_bytes")}


def dtype_for(vocabulary_size: int) -> str:
    """Returns the name of the smallest dtype for token IDs 0 to vocabulary_size - 1."""
    return "uint16" if vocabulary_size <= LARGEST_UINT16_VOCABULARY else "uint32"


def id_dtype(name: str) -> np.dtype:
    """Returns the numpy dtype for a manifest's `dtype`, always little-endian."""
    return np.dtype({"uint16": "<u2", "uint32": "<u4"}[name])
