"""Reads token IDs prepared by other tools, without converting them: nanoGPT .bin, Megatron .bin with .idx, and HDF5.

A nanoGPT .bin (karpathy/nanoGPT, data/openwebtext/prepare.py) contains raw uint16 IDs, with the end-of-text ID after
each document. The folder contains train.bin and val.bin.

A Megatron .bin also contains raw IDs. Its .idx contains their type and has the following layout, in little-endian
order (NVIDIA Megatron-LM, megatron/core/datasets/indexed_dataset.py): 9 magic bytes, uint64 version 1, uint8 ID type
code, uint64 number of sequences, uint64 number of documents + 1, int32 length of each sequence in tokens, int64 byte
offset of each sequence, int64 index of each document's first sequence, and finally the number of sequences.

An HDF5 file contains a 1-D dataset of integers. Existing tools call it `tokens` and store int32
(FareedKhan-dev/train-llm-from-scratch, scripts/prepare_pretrain_data.py). Any name works if there is no other dataset.

None of these formats records the tokenizer.
"""

import hashlib
import json
import re
import struct
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pretrain.data.manifest import HDF5_SUFFIXES, TOKENIZER_FOLDER, Manifest, Shard, dtype_for, id_dtype
from pretrain.errors import InputError
from pretrain.files import fingerprint_of

if TYPE_CHECKING:
    import h5py

    from pretrain.data.tokenizer import LoadedTokenizer

NANOGPT_FILES = {"train": "train.bin", "validation": "val.bin"}
VALIDATION_NAME = re.compile(r"(^|[_.-])(val(id|idation)?|dev)([_.-]|$)")
LLM_C_MAGIC = (20240520, 20240801)
"""First int32 of an llm.c .bin, which starts with a 1,024-byte header."""
IDX_SUFFIX = ".idx"
IDX_MAGIC = b"MMIDIDX\x00\x00"
IDX_HEADER = struct.Struct("<9sQBQQ")
# Megatron has no uint32. All IDs are below 2^31, so int32 and uint32 have the same bits.
IDX_DTYPES = {8: "uint16", 4: "uint32"}
USUAL_HDF5_NAME = "tokens"
COUNTED_IDS = 1 << 20
LARGEST_COUNTED_WHOLE = 100 << 20


def foreign_files(path: Path) -> dict[str, Path] | None:
    """Returns {split: file} for a .bin or HDF5 file or a nanoGPT folder, or None."""
    if path.suffix in (".bin", *HDF5_SUFFIXES) and path.is_file():
        return {"validation" if VALIDATION_NAME.search(path.stem) else "train": path}
    found = {split: path / name for split, name in NANOGPT_FILES.items() if (path / name).is_file()}
    return found or None


# Cached, because counting documents reads up to 100M token IDs.
@lru_cache(maxsize=64)
def foreign_manifest(path: Path, tokenizer: str | None) -> Manifest:
    """Builds a manifest for another tool's files.

    Counts documents and text bytes. If a file has more than 100M IDs, estimates both from 64 samples of 1M IDs.

    Raises InputError if the files are damaged or contain IDs outside the vocabulary.

    Args:
        tokenizer: folder or Hub ID. By default, the `tokenizer` folder next to the files.
    """
    from pretrain.data.tokenizer import load_tokenizer

    files = foreign_files(path)
    folder = next(iter(files.values())).parent
    if tokenizer is None and not (folder / TOKENIZER_FOLDER).is_dir():
        raise InputError(
            f"{path}: these token IDs need a tokenizer; set it in the recipe, for example "
            f"{{shards: {path}, tokenizer: gpt2}}, pass --tokenizer gpt2 to evaluate.py, or, for all "
            f"commands, link the tokenizer's folder next to the file: ln -s TOKENIZER_FOLDER "
            f"{folder / TOKENIZER_FOLDER}"
        )
    given = tokenizer or str(folder / TOKENIZER_FOLDER)
    loaded = load_tokenizer(given)
    tokenizer_folder = _tokenizer_folder(given)
    dtypes = {_dtype_of(file, loaded.vocabulary_size) for file in files.values()}
    if len(dtypes) > 1:
        raise InputError(f"{path}: the files contain IDs of different types ({', '.join(sorted(dtypes))})")
    (dtype,) = dtypes
    sizes = _token_bytes(loaded)
    digest = hashlib.sha256(loaded.sha256.encode())
    shards = []
    for split, file in files.items():
        tokens = ids_bytes(file, dtype) // id_dtype(dtype).itemsize
        documents, text_bytes = _counts(file, dtype, sizes, loaded.end_of_document_id)
        shards.append(Shard(file.name, split, tokens, documents, text_bytes, sha256=""))
        with file.open("rb") as content:
            digest.update(bytes.fromhex(fingerprint_of(content, file.stat().st_size)))
    return Manifest(
        folder=folder,
        tokenizer_name=loaded.name,
        tokenizer_sha256=loaded.sha256,
        vocabulary_size=loaded.vocabulary_size,
        end_of_document_id=loaded.end_of_document_id,
        dtype=dtype,
        shards=tuple(shards),
        sha256=digest.hexdigest(),
        tokenizer_path=tokenizer_folder,
    )


def _tokenizer_folder(name_or_path: str) -> Path:
    """Returns the folder with the tokenizer's files, for copying them to checkpoints."""
    from pretrain.data.tokenizer import download_tokenizer

    folder = Path(name_or_path)
    if folder.is_file():
        folder = folder.parent
    elif not folder.is_dir():
        folder = download_tokenizer(name_or_path)
    if not (folder / "tokenizer.json").is_file():
        raise InputError(f"{name_or_path}: has no tokenizer.json; use a tokenizer that has one")
    return folder


def _dtype_of(file: Path, vocabulary_size: int) -> str:
    if file.suffix in HDF5_SUFFIXES:
        # The dtype of the batches. HDF5 converts IDs when reading.
        return "uint16" if hdf5_ids(file).dtype.itemsize <= 2 else "uint32"
    index = file.with_suffix(IDX_SUFFIX)
    dtype = dtype_for(vocabulary_size)
    tokens = None
    if index.is_file():
        dtype, tokens = read_idx(index)
    with file.open("rb") as content:
        first = int.from_bytes(content.read(4), "little")
    if first in LLM_C_MAGIC:
        raise InputError(f"{file}: starts with llm.c's 1,024-byte header; remove it with tail -c +1025")
    size = file.stat().st_size
    item = id_dtype(dtype).itemsize
    if size % item or (tokens is not None and size != tokens * item):
        expected = f"{tokens * item:,} bytes according to its .idx" if tokens is not None else f"{dtype} IDs"
        raise InputError(f"{file}: has {size:,} bytes, must contain {expected}; restore it, or set its tokenizer")
    return dtype


def _token_bytes(tokenizer: "LoadedTokenizer") -> np.ndarray:
    """Returns (vocabulary,) number of UTF-8 bytes per token ID."""
    # Byte-level tokenizers represent each byte as one character. Others represent a space as U+2581.
    is_byte_level = '"ByteLevel"' in json.dumps(json.loads(tokenizer.json).get("decoder"))
    sizes = np.zeros(tokenizer.vocabulary_size, np.int64)
    for token, number in tokenizer.backend.get_vocab().items():
        sizes[number] = len(token) if is_byte_level else len(token.replace("\u2581", " ").encode())
    sizes[tokenizer.end_of_document_id] = 0
    return sizes


def _counts(file: Path, dtype: str, sizes: np.ndarray, end: int) -> tuple[int, int]:
    """Counts documents and text bytes in a file. Raises InputError if IDs are outside the vocabulary."""
    if not ids_bytes(file, dtype):
        return 0, 0
    ids = open_ids(file, dtype)
    pieces = range(0, len(ids), COUNTED_IDS)
    if len(ids) > LARGEST_COUNTED_WHOLE:
        pieces = range(0, len(ids) - COUNTED_IDS, (len(ids) - COUNTED_IDS) // 64)
    documents = text_bytes = counted = 0
    for first in pieces:
        piece = ids[first : first + COUNTED_IDS]
        if wrong := [number for number in (int(piece.min()), int(piece.max())) if not 0 <= number < len(sizes)]:
            raise InputError(
                f"{file}: contains token ID {wrong[-1]:,}, but the tokenizer's IDs are 0 to "
                f"{len(sizes) - 1:,}; set the tokenizer that the file was made with"
            )
        documents += int(np.count_nonzero(piece == end))
        text_bytes += int(sizes[piece].sum())
        counted += len(piece)
    return round(documents * len(ids) / counted), round(text_bytes * len(ids) / counted)


def open_ids(path: Path, dtype: str) -> "np.ndarray | h5py.Dataset":
    """Opens a file's IDs as a 1-D array that is read lazily. `dtype` only applies to raw files."""
    return hdf5_ids(path) if path.suffix in HDF5_SUFFIXES else np.memmap(path, id_dtype(dtype), mode="r")


def ids_bytes(path: Path, dtype: str) -> int:
    """Returns the size in bytes of a file's IDs when stored as `dtype`."""
    return len(hdf5_ids(path)) * id_dtype(dtype).itemsize if path.suffix in HDF5_SUFFIXES else path.stat().st_size


def hdf5_ids(path: Path) -> "h5py.Dataset":
    """Opens an HDF5 file's dataset of token IDs: its only dataset, or the one named `tokens`. Raises InputError."""
    import h5py

    try:
        # Many network file systems don't support HDF5's file lock.
        file = h5py.File(path, "r", locking=False)
    except OSError as error:
        raise InputError(f"{path}: cannot be read as HDF5 ({error}); restore the file") from None
    found: dict[str, h5py.Dataset] = {}
    file.visititems(lambda name, item: found.update({name: item}) if isinstance(item, h5py.Dataset) else None)
    ids = found.get(USUAL_HDF5_NAME) if len(found) != 1 else next(iter(found.values()))
    if ids is None:
        raise InputError(
            f"{path}: contains {', '.join(sorted(found)[:8]) or 'no datasets'}; the token IDs must be its only "
            f"dataset or be named {USUAL_HDF5_NAME}"
        )
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputError(
            f"{path}: dataset {ids.name!r} has type {ids.dtype} and shape {ids.shape}, must be a 1-D integer array; "
            "to tokenize text, use prepare_data.py"
        )
    return ids


def read_idx(path: Path) -> tuple[str, int]:
    """Returns (ID type, number of tokens) of the .bin that an .idx describes.

    Raises InputError if the file isn't a Megatron .idx, is damaged, or has an unsupported ID type, or if the sequences
    aren't contiguous.
    """
    content = path.read_bytes()
    if len(content) < IDX_HEADER.size or not content.startswith(IDX_MAGIC):
        raise InputError(f"{path}: is not the .idx file of a Megatron dataset; use the one that belongs to the .bin")
    _, version, code, sequences, boundaries = IDX_HEADER.unpack_from(content)
    if version != 1 or code not in IDX_DTYPES:
        raise InputError(
            f"{path}: has version {version} and ID type {code}; only version 1 with type 8 (uint16) or 4 (int32) is "
            "supported"
        )
    # A multimodal dataset has an extra byte per sequence.
    expected = IDX_HEADER.size + 12 * sequences + 8 * boundaries
    if len(content) not in (expected, expected + sequences):
        raise InputError(f"{path}: has {len(content):,} bytes, must have {expected:,}; restore the file")
    lengths = np.frombuffer(content, "<i4", sequences, IDX_HEADER.size).astype(np.int64)
    pointers = np.frombuffer(content, "<i8", sequences, IDX_HEADER.size + 4 * sequences)
    item = id_dtype(IDX_DTYPES[code]).itemsize
    if not np.array_equal(pointers, (np.cumsum(lengths) - lengths) * item):
        raise InputError(f"{path}: its sequences are not contiguous; rebuild it with Megatron's tools")
    return IDX_DTYPES[code], int(lengths.sum())
