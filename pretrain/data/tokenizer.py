"""Loads tokenizers from a folder, a file or the Hub."""

import hashlib
import json
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.data.manifest import TOKENIZER_FILES
from pretrain.errors import InputError, one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

USUAL_END_OF_DOCUMENT = "<|endoftext|>"


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer: the content of its tokenizer.json, and its other `files`, which are copied with the shards."""

    name: str
    json: bytes
    vocabulary_size: int
    end_of_document: str
    end_of_document_id: int
    special_tokens: tuple[str, ...]
    files: dict[str, bytes] = field(repr=False)

    @property
    def sha256(self) -> str:
        """Hash of tokenizer.json."""
        return hashlib.sha256(self.json).hexdigest()

    @property
    def backend(self) -> "Tokenizer":
        """The tokenizer, for encoding and decoding."""
        return backend_of(self.json, self.name)

    def save(self, folder: Path) -> None:
        """Writes a folder that `AutoTokenizer.from_pretrained` can load."""
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads(self.files.get("tokenizer_config.json", b"{}"))
        files = dict(self.files)
        # Otherwise AutoTokenizer would load it without an end-of-document token.
        if not _content(config.get("eos_token")):
            config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
            config["eos_token"] = self.end_of_document
            files["tokenizer_config.json"] = (json.dumps(config, ensure_ascii=False, indent=2) + "\n").encode()
        for name, content in {"tokenizer.json": self.json, **files}.items():
            (folder / name).write_bytes(content)


def load_tokenizer(name_or_path: str | Path, end_of_document: str | None = None) -> LoadedTokenizer:
    """Loads a tokenizer from a folder, a tokenizer.json file or a Hub repository.

    If `end_of_document` is None, the end-of-document token is the tokenizer's eos_token, or <|endoftext|>. Raises
    InputError if the tokenizer doesn't exist, can't be loaded, or has no such token.
    """
    try:
        name, content, files = _read(str(name_or_path))
    except OSError as error:
        raise InputError(
            f"{name_or_path}: cannot be read: {error.strerror}; make it readable, or use another tokenizer"
        ) from None
    backend = backend_of(content, str(name_or_path))
    vocabulary = backend.get_vocab()
    token = end_of_document or _eos_token(files) or USUAL_END_OF_DOCUMENT
    specials = {added.content for added in backend.get_added_tokens_decoder().values() if added.special}
    if token not in vocabulary:
        raise InputError(
            f"{name_or_path}: the tokenizer has no token {token!r}; set the end-of-document token with "
            f"--end_of_document TOKEN (its special tokens: {', '.join(sorted(specials)[:20]) or 'none'})"
        )
    return LoadedTokenizer(
        name=name,
        json=content,
        vocabulary_size=max(vocabulary.values()) + 1,
        end_of_document=token,
        end_of_document_id=vocabulary[token],
        special_tokens=tuple(sorted(specials | {token})),
        files=files,
    )


def load_decoder(folder: Path) -> "Tokenizer":
    """Loads the tokenizer in a folder for decoding token IDs. Raises InputError if it is unreadable."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise InputError(f"{path}: cannot be read ({error}); restore it or prepare the folder again") from None


def _read(name_or_path: str) -> tuple[str, bytes, dict[str, bytes]]:
    """Reads a tokenizer's files. Returns (name, content of tokenizer.json, other files)."""
    path = Path(name_or_path)
    if path.is_file():
        name = path.parent.resolve().name if path.name == "tokenizer.json" else path.stem
        return name, path.read_bytes(), {}
    if path.is_dir():
        return path.resolve().name, *_read_folder(path, name_or_path)
    return name_or_path, *_read_folder(download_tokenizer(name_or_path), name_or_path)


def _read_folder(folder: Path, given: str) -> tuple[bytes, dict[str, bytes]]:
    if (folder / "tokenizer.json").is_file():
        files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
        return (folder / "tokenizer.json").read_bytes(), files
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise InputError(f"{given}: contains no tokenizer files, such as tokenizer.json; use a tokenizer folder")
    return _convert(folder, given)


def _convert(folder: Path, given: str) -> tuple[bytes, dict[str, bytes]]:
    """Converts a tokenizer without tokenizer.json, such as vocab.json with merges.txt, or a SentencePiece model."""
    import tempfile

    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise InputError(f"{given}: transformers cannot load this tokenizer: {one_line(error)}") from None
    with tempfile.TemporaryDirectory() as temporary:
        tokenizer.save_pretrained(temporary)
        if not (Path(temporary) / "tokenizer.json").is_file():
            raise InputError(f"{given}: has no fast version (tokenizer.json); use a tokenizer that has one")
        return _read_folder(Path(temporary), given)


def download_tokenizer(hub_id: str) -> Path:
    """Downloads a Hub repository's tokenizer files and returns their folder. Raises InputError if this fails."""
    missing = f"{hub_id}: no such tokenizer folder or file"
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", hub_id) or hub_id.startswith("."):
        raise InputError(f"{missing}; use a tokenizer folder, a tokenizer.json, or a Hub ID (name or owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=["tokenizer.json", *TOKENIZER_FILES]))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise InputError(f"{missing}, and downloading it from the Hub failed: {one_line(error)}") from None


def _content(token: object) -> str | None:
    """Returns a token's text. tokenizer_config.json contains either the text or {"content": text, ...}."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) and value else None


def _eos_token(files: dict[str, bytes]) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            token = _content(json.loads(files.get(name, b"{}")).get("eos_token"))
        except ValueError as error:
            raise InputError(f"the tokenizer's {name} is not valid JSON ({error}); restore it") from None
        if token:
            return token
    return None


def backend_of(content: bytes, given: str) -> "Tokenizer":
    try:
        return _parsed(content)
    except Exception as error:  # tokenizers raises plain Exception for any parser error
        raise InputError(f"{given}: the tokenizers library cannot load this tokenizer: {one_line(error)}") from None


@lru_cache(maxsize=2)
def _parsed(content: bytes) -> "Tokenizer":
    """Parses a tokenizer. The cached object is shared, so only the reference encoder may change its settings."""
    from tokenizers import Tokenizer

    return Tokenizer.from_buffer(content)
