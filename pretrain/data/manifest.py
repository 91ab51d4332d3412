"""Manifest of a folder of prepared shards, and the dtypes of its token IDs."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pretrain.urls import shown

SHARDS_FORMAT = {"format": "groundwork-shards", "version": 1}
MANIFEST_FILE = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
SPLITS = ("train", "validation")
LARGEST_UINT16_VOCABULARY = 65_536
HDF5_SUFFIXES = (".h5", ".hdf5")


@dataclass(frozen=True)
class Shard:
    """One shard file."""

    file: str
    split: str
    tokens: int
    """Token IDs, including end-of-document IDs."""
    documents: int
    text_bytes: int
    """UTF-8 bytes of the documents."""
    sha256: str
    beside: dict[str, str] = field(default_factory=dict)
    """{file: sha256} of the indices that belong to it: its documents, and Megatron's .idx."""


@dataclass(frozen=True)
class Manifest:
    """Contents of a prepared folder. `sha256` is the hash of the manifest file: the identity of the data."""

    folder: Path
    tokenizer_name: str
    tokenizer_sha256: str
    vocabulary_size: int
    end_of_document_id: int
    dtype: str
    shards: tuple[Shard, ...]
    sha256: str
    source_names: tuple[str, ...] = ()
    """Names of the documents' sources, by the numbers in the shards' indices."""
    input_format: str | None = None
    """Format given for all sources; None: by their suffixes."""
    tokenizer_path: Path | None = None
    """Tokenizer of shards whose folder contains none."""
    url: str | None = None
    """Address of shards in an object store; `folder` then holds copies of the small files."""

    @property
    def tokenizer_folder(self) -> Path:
        """Hugging Face tokenizer folder; shards of prepare_data.py contain their own."""
        return self.tokenizer_path or self.folder / TOKENIZER_FOLDER

    @property
    def place(self) -> str:
        """Names the folder or, without secrets, the URL of the shards."""
        return str(self.folder) if self.url is None else shown(self.url).rstrip("/")

    @property
    def bytes_per_id(self) -> int:
        """Bytes of a token ID: 2 for uint16, 4 for uint32."""
        return id_dtype(self.dtype).itemsize

    def of_split(self, split: str) -> tuple[Shard, ...]:
        """Returns the shards of one split in the order of their token stream."""
        return tuple(shard for shard in self.shards if shard.split == split)

    def totals(self, split: str) -> tuple[int, int, int]:
        """Returns (tokens, documents, text_bytes) of one split."""
        return tuple(counts_in(self.shards, split).values())


def counts_in(shards: Iterable[Shard], split: str) -> dict[str, int]:
    """Counts {tokens, documents, text_bytes} of one split; zeros for a split that has no shards."""
    chosen = [shard for shard in shards if shard.split == split]
    return {name: sum(getattr(shard, name) for shard in chosen) for name in ("tokens", "documents", "text_bytes")}


def dtype_for(vocabulary_size: int) -> str:
    """Names the smallest dtype that holds token IDs 0 to vocabulary_size - 1."""
    return "uint16" if vocabulary_size <= LARGEST_UINT16_VOCABULARY else "uint32"


def id_dtype(name: str) -> np.dtype:
    """Returns the little-endian numpy dtype of a manifest's `dtype`, whatever the machine's own byte order."""
    return np.dtype({"uint16": "<u2", "uint32": "<u4"}[name])
