"""Tokenizes text with the tokenizers library (reference) or with gigatoken (fast), and checks that both agree.

Documents are plain text: special tokens in them are tokenized as ordinary text. Nothing is added, truncated or padded.
"""

import json
import re
from collections.abc import Sequence

import numpy as np

from pretrain.data.tokenizer import LoadedTokenizer, backend_of
from pretrain.errors import InputError, one_line
from pretrain_tools.preparation.cleaning.stages import batches

AGREEMENT_TEXTS = (
    "The quick brown fox jumps over the lazy dog. It's 1,234,567.89 o'clock, isn't it? WE'LL SEE; they'd've gone.",
    "  leading and trailing   \t\tspaces \n\n\r\n  and\u00a0odd\u2003ones\u200b\ufeff \x00\x01\x1f\x7f end \n",
    "def f(x):\n    return {'a': [1, 22, 333, 4444, 55555]}  # ünïcödé, naïve façade, ｗｉｄｔｈ, ﬁ ligature\n",
    "Ελληνικά, русский, עברית, العربية، हिन्दी, বাংলা, ไทย, 中文字符，日本語テキスト、한국어, አማርኛ, ქართული",
    "e\u0301 vs é, \U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7 \U0001f44d\U0001f3fd 𝒳𝔸",
    "\U0010ffff, ½ ² ① ٣ Ⅷ, “q” — …",
    "a" * 300 + " " * 70 + "\n" * 40 + "!" * 50 + "x\ty" * 20,
)


class DisagreementError(InputError):
    """Raised if gigatoken returns different token IDs than the tokenizers library."""


class ReferenceEncoder:
    """Tokenizes with the tokenizers library, which needs about 100 bytes of memory per byte of a document."""

    def __init__(self, tokenizer: LoadedTokenizer):
        self._tokenizer = tokenizer
        self._backend = backend_of(_with_special_end(tokenizer), tokenizer.name)
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()

    def __reduce__(self) -> tuple[type, tuple[LoadedTokenizer]]:
        return type(self), (self._tokenizer,)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Tokenizes UTF-8 documents. Returns one uint32 array of token IDs per document."""
        arrays: list[np.ndarray] = []
        # Use small batches, because Encoding objects also store offsets and strings.
        for first, stop in batches(texts):
            batch = [text.decode() for text in texts[first:stop]]
            encodings = self._backend.encode_batch_fast(batch, add_special_tokens=False)
            arrays.extend(np.array(encoding.ids, dtype=np.uint32) for encoding in encodings)
        return arrays


def _with_special_end(tokenizer: LoadedTokenizer) -> bytes:
    """Returns tokenizer.json with the end-of-document token marked as special, so that text never encodes to it."""
    fields = json.loads(tokenizer.json)
    for added in fields.get("added_tokens") or []:
        if added.get("content") == tokenizer.end_of_document and not added.get("special"):
            added["special"] = True
            return json.dumps(fields).encode()
    return tokenizer.json


class FastEncoder(ReferenceEncoder):
    """Tokenizes with gigatoken, or with the reference for documents that contain special and some other tokens."""

    def __init__(self, tokenizer: LoadedTokenizer):
        import gigatoken

        super().__init__(tokenizer)
        self._encode = gigatoken.Tokenizer.from_json(tokenizer.json).backend.encode
        added = tokenizer.backend.get_added_tokens_decoder().values()
        # gigatoken ignores `single_word`, and follows `rstrip` only in part.
        flagged = {token.content for token in added if token.single_word or token.rstrip}
        tokens = [token.encode() for token in flagged.union(tokenizer.special_tokens)]
        # Search for a few short prefixes first, which is faster than searching for hundreds of tokens.
        self._suspects = sorted({token[:4] for token in tokens})
        self._specials = re.compile(b"|".join(map(re.escape, tokens)))

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Tokenizes UTF-8 documents. Returns one uint32 array of token IDs per document."""
        by_reference = super().encode
        return [by_reference([text])[0] if self._has_special(text) else self._encode(text) for text in texts]

    def _has_special(self, text: bytes) -> bool:
        return any(suspect in text for suspect in self._suspects) and self._specials.search(text) is not None

    def compare(self, texts: Sequence[bytes]) -> None:
        """Raises DisagreementError if a document's token IDs differ from the reference."""
        for text, ids, expected in zip(texts, self.encode(texts), super().encode(texts), strict=True):
            if not np.array_equal(ids, expected):
                shown = repr(text[:60].decode(errors="replace"))
                raise DisagreementError(f"gigatoken and tokenizers return different token IDs for {shown}")


def make_encoder(tokenizer: LoadedTokenizer, engine: str) -> tuple[ReferenceEncoder, str | None]:
    """Returns (encoder, reason why `auto` doesn't use gigatoken, or None). engine: auto or reference."""
    if engine == "reference":
        return ReferenceEncoder(tokenizer), None
    try:
        encoder = FastEncoder(tokenizer)
        encoder.compare([text.encode() for text in AGREEMENT_TEXTS])
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust code is a BaseException
        return ReferenceEncoder(tokenizer), f"gigatoken cannot be used ({one_line(error)})"
    return encoder, None
