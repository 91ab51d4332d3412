"""Ids prepared by other tools, read in place: nanoGPT's .bin, Megatron's .bin with .idx, and HDF5 (data/hdf5.py).

A nanoGPT .bin (karpathy/nanoGPT, data/openwebtext/prepare.py) is raw uint16 ids, each document followed by the
end-of-text id; its folder holds train.bin and val.bin. A Megatron .bin is raw ids too, of the type named in its .idx.
Neither says which tokenizer made it.
"""

import hashlib
import json
import re
from functools import lru_cache
from pathlib import Path

import numpy as np

from pretrain.data import megatron
from pretrain.data.hdf5 import HDF5_SUFFIXES, hdf5_ids, ids_bytes, open_ids
from pretrain.data.manifest import TOKENIZER_FOLDER, Manifest, Shard, dtype_for, id_dtype
from pretrain.errors import InputError
from pretrain.files import fingerprint_of

NANOGPT_FILES = {"train": "train.bin", "validation": "val.bin"}
VALIDATION_NAME = re.compile(r"(^|[_.-])(val(id|idation)?|dev)([_.-]|$)")
LLM_C_MAGIC = (20240520, 20240801)
"""First int32 of a llm.c .bin, which has a header of 1,024 bytes."""
COUNTED_IDS = 1 << 20
LARGEST_COUNTED_WHOLE = 100 << 20


def foreign_files(path: Path) -> dict[str, Path] | None:
    """{split: file} of a .bin or HDF5 file, a Megatron prefix (no suffix), or nanoGPT's folder; None for others."""
    if path.suffix in (".bin", *HDF5_SUFFIXES) and path.is_file():
        return {_split_of(path): path}
    beside = path.parent / f"{path.name}.bin"
    if beside.is_file() and beside.with_suffix(megatron.IDX_SUFFIX).is_file():
        return {_split_of(beside): beside}
    found = {split: path / name for split, name in NANOGPT_FILES.items() if (path / name).is_file()}
    return found or None


def _split_of(path: Path) -> str:
    return "validation" if VALIDATION_NAME.search(path.stem) else "train"


@lru_cache(maxsize=64)
def foreign_manifest(path: Path, tokenizer: str | None) -> Manifest:
    """The manifest that such files would have. Raises InputError for damaged files and ids of a larger vocabulary.

    tokenizer: folder or Hub id; None takes the folder `tokenizer` beside the files. Documents and bytes of text are
    counted, or in files of more than 100M ids estimated from 64 pieces of 1M.
    """
    from pretrain.data.tokenizer import load_tokenizer

    files = foreign_files(path)
    folder = next(iter(files.values())).parent
    if tokenizer is None and not (folder / TOKENIZER_FOLDER).is_dir():
        raise InputError(
            f"{path}: no tokenizer named for these ids; name it in the recipe, such as "
            f"{{shards: {path}, tokenizer: gpt2}}, give evaluate.py --tokenizer gpt2, or for every command put or "
            f"link its folder beside the file: ln -s TOKENIZER_FOLDER {folder / TOKENIZER_FOLDER}"
        )
    given = tokenizer or str(folder / TOKENIZER_FOLDER)
    loaded, tokenizer_folder = load_tokenizer(given), _tokenizer_folder(given)
    dtypes = {_dtype_of(file, loaded.vocabulary_size) for file in files.values()}
    if len(dtypes) > 1:
        raise InputError(f"{path}: its files hold ids of different types ({', '.join(sorted(dtypes))})")
    (dtype,) = dtypes
    sizes = _token_bytes(loaded.json, loaded.vocabulary_size, loaded.end_of_document_id)
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
    """The folder of the tokenizer's files, which are copied into checkpoints."""
    from pretrain.data.tokenizer import download_tokenizer

    folder = Path(name_or_path)
    if folder.is_file():
        folder = folder.parent
    elif not folder.is_dir():
        folder = download_tokenizer(name_or_path)
    if not (folder / "tokenizer.json").is_file():
        raise InputError(f"{name_or_path}: has no tokenizer.json; give the tokenizer in that form")
    return folder


def _dtype_of(file: Path, vocabulary_size: int) -> str:
    if file.suffix in HDF5_SUFFIXES:
        return "uint16" if hdf5_ids(file).dtype.itemsize <= 2 else "uint32"
    index = file.with_suffix(megatron.IDX_SUFFIX)
    dtype, tokens = dtype_for(vocabulary_size), None
    if index.is_file():
        dtype, tokens, _ = megatron.read_idx(index)
    with file.open("rb") as content:
        first = int.from_bytes(content.read(4), "little")
    if first in LLM_C_MAGIC:
        raise InputError(f"{file}: begins with llm.c's header of 1,024 bytes; give the ids without it: tail -c +1025")
    size, item = file.stat().st_size, id_dtype(dtype).itemsize
    if size % item or (tokens is not None and size != tokens * item):
        expected = f"{tokens * item:,} bytes, as its .idx says" if tokens is not None else f"{dtype} ids"
        raise InputError(f"{file}: has {size:,} bytes, must hold {expected}; restore the file or name its tokenizer")
    return dtype


def _token_bytes(tokenizer_json: bytes, vocabulary_size: int, end: int) -> np.ndarray:
    """(vocabulary,) UTF-8 bytes that each id stands for."""
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_buffer(tokenizer_json).get_vocab(with_added_tokens=True)
    # Byte-level tokenizers write each byte as one character; others mark spaces with U+2581.
    is_byte_level = '"ByteLevel"' in json.dumps(json.loads(tokenizer_json).get("decoder"))
    sizes = np.zeros(vocabulary_size, np.int64)
    for token, number in vocabulary.items():
        sizes[number] = len(token) if is_byte_level else len(token.replace("\u2581", " ").encode())
    sizes[end] = 0
    return sizes


def _counts(file: Path, dtype: str, sizes: np.ndarray, end: int) -> tuple[int, int]:
    """(documents, bytes of text) of a file. Raises InputError for ids beyond the vocabulary."""
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
                f"{file}: holds id {wrong[-1]:,}, the tokenizer has 0 to {len(sizes) - 1:,}; name the one that made it"
            )
        documents += int(np.count_nonzero(piece == end))
        text_bytes += int(sizes[piece].sum())
        counted += len(piece)
    return round(documents * len(ids) / counted), round(text_bytes * len(ids) / counted)
