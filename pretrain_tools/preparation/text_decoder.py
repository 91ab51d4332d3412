"""Decodes token IDs to text, in most cases faster than the tokenizers library."""

import json
import re
from collections.abc import Callable

import numpy as np

from pretrain.data.tokenizer import LoadedTokenizer, backend_of


def text_decoder(tokenizer: LoadedTokenizer) -> Callable[[np.ndarray], bytes]:
    """Returns a function that decodes a document's token IDs to UTF-8. Spaces may differ from the original text.

    Uses a lookup table for byte-level and Metaspace tokenizers, which is much faster than the tokenizers library.
    """
    backend = backend_of(tokenizer.json, tokenizer.name)
    decoder = json.dumps(json.loads(tokenizer.json).get("decoder"))
    if '"ByteLevel"' in decoder:
        bytes_of = _bytes_of_byte_level
    elif '"Metaspace"' in decoder or '"ByteFallback"' in decoder:
        bytes_of = _bytes_of_metaspace
    else:
        return lambda ids: backend.decode(ids.tolist(), skip_special_tokens=False).encode()
    added = {number: token.content.encode() for number, token in backend.get_added_tokens_decoder().items()}
    table = [b""] * tokenizer.vocabulary_size
    for token, number in backend.get_vocab(with_added_tokens=True).items():
        table[number] = added[number] if number in added else bytes_of(token)
    return lambda ids: b"".join(map(table.__getitem__, ids.tolist()))


def _bytes_of_byte_level(token: str) -> bytes:
    """Decodes a byte-level BPE token. Bytes that aren't printable in Latin-1 are stored as U+0100, U+0101, ..."""
    hidden = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
    if any(ord(letter) >= 256 + len(hidden) for letter in token):  # a token stored as plain text
        return token.encode()
    return bytes(hidden[ord(letter) - 256] if ord(letter) > 255 else ord(letter) for letter in token)


def _bytes_of_metaspace(token: str) -> bytes:
    byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ").encode()
