"""Tokenizes text with the tokenizers library (reference) or with gigatoken (fast), and checks that both agree.

Documents are plain text: special tokens in them are tokenized as ordinary text. Nothing is added, truncated or padded.
"""

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pretrain.data.tokenizer import LoadedTokenizer, backend_of
from pretrain.errors import InputError, one_line
from pretrain_tools.preparation.cleaning.stages import batches

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ENGINES = ("auto", "fast", "reference")
LONG_TEXT_BYTES = 1 << 22
# Long documents are tokenized in overlapping pieces, because the tokenizers library needs about 100 bytes of memory
# per byte of text.
PIECE_CHARACTERS = 1 << 20
OVERLAP_CHARACTERS = 1 << 13
# Number of consecutive equal tokens required to join two overlapping pieces.
AGREEING_TOKENS = 64
AGREEMENT_TEXTS = (
    "The quick brown fox jumps over the lazy dog. It's 1,234,567.89 o'clock, isn't it? WE'LL SEE; they'd've gone.",
    "  leading and trailing   \t\tspaces \n\n\r\n  and\u00a0odd\u2003ones\u200b\ufeff \x00\x01\x1f\x7f end \n",
    "def f(x):\n    return {'a': [1, 22, 333, 4444, 55555]}  # ünïcödé, naïve façade, ｗｉｄｔｈ, ﬁ ligature\n",
    "Ελληνικά, русский, עברית, العربية، हिन्दी, বাংলা, ไทย, 中文字符，日本語テキスト、한국어, አማርኛ, ქართული",
    "e\u0301 vs é, \U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7 \U0001f44d\U0001f3fd 𝒳𝔸",
    "\U0010ffff, ½ ² ① ٣ Ⅷ, “q” — …",
    "a" * 300 + " " * 70 + "\n" * 40 + "!" * 50 + "x\ty" * 20,
)


class ReferenceEncoder:
    """Tokenizes with the tokenizers library."""

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
        # Use small batches, because Encoding objects also store offsets and strings and need a lot of memory.
        for first, stop in batches(texts):
            batch = [text.decode() for text in texts[first:stop]]
            if len(texts[first]) > LONG_TEXT_BYTES:
                arrays.append(encode_long_text(self._backend, batch[0]))
            else:
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


class FastEncoder:
    """Tokenizes with gigatoken. Falls back to the reference for documents that contain special tokens as text."""

    def __init__(self, tokenizer: LoadedTokenizer):
        import gigatoken

        self._tokenizer = tokenizer
        self.reference = ReferenceEncoder(tokenizer)
        self._encode = gigatoken.Tokenizer.from_json(tokenizer.json).backend.encode
        # Search for a few short prefixes first, which is faster than searching for hundreds of tokens.
        self._suspects = sorted({token.encode()[:4] for token in tokenizer.special_tokens})
        self._specials = re.compile(b"|".join(re.escape(token.encode()) for token in tokenizer.special_tokens))

    def __reduce__(self) -> tuple[type, tuple[LoadedTokenizer]]:
        return type(self), (self._tokenizer,)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Tokenizes UTF-8 documents. Returns one uint32 array of token IDs per document."""
        arrays = [None if self._has_special(text) else self._encode(text) for text in texts]
        suspected = [number for number, ids in enumerate(arrays) if ids is None]
        for number, ids in zip(suspected, self.reference.encode([texts[n] for n in suspected]), strict=True):
            arrays[number] = ids
        return arrays

    def _has_special(self, text: bytes) -> bool:
        return any(suspect in text for suspect in self._suspects) and self._specials.search(text) is not None

    def disagreement(self, texts: Sequence[bytes]) -> str | None:
        """Returns the beginning of the first document whose token IDs differ from the reference; None if all agree."""
        for text, expected in zip(texts, self.reference.encode(texts), strict=True):
            if not self._has_special(text) and not np.array_equal(self._encode(text), expected):
                return repr(text[:60].decode(errors="replace"))
        return None


Encoder = ReferenceEncoder | FastEncoder


def make_encoder(tokenizer: LoadedTokenizer, engine: str) -> tuple[Encoder, str | None]:
    """Returns (encoder, reason why `auto` doesn't use gigatoken, or None).

    engine: auto, fast or reference. Raises InputError if `fast` doesn't work with this tokenizer.
    """
    if engine == "reference":
        return ReferenceEncoder(tokenizer), None
    try:
        encoder = FastEncoder(tokenizer)
        disagreement = encoder.disagreement([text.encode() for text in AGREEMENT_TEXTS])
        reason = f"gigatoken and tokenizers return different token IDs for {disagreement}" if disagreement else None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust code is a BaseException
        reason = f"gigatoken cannot load this tokenizer ({one_line(error)})"
    if reason is None:
        return encoder, None
    if engine == "fast":
        raise InputError(f"--engine fast: {reason}; use --engine auto or --engine reference")
    return ReferenceEncoder(tokenizer), reason


def encode_long_text(backend: "Tokenizer", text: str) -> np.ndarray:
    """Tokenizes a long document in overlapping pieces. Returns the same uint32 token IDs as a single call.

    Pieces that can't be joined, such as parts of one very long word, are tokenized together.
    """
    kept: list[np.ndarray] = []
    start = 0
    stop = PIECE_CHARACTERS
    left = _token_rows(backend, text, start, stop)
    first = 0
    while stop < len(text):
        right_start = max(start, stop - OVERLAP_CHARACTERS)
        right_stop = right_start + PIECE_CHARACTERS
        right = _token_rows(backend, text, right_start, right_stop)
        joint = _joint(left, right, max(first, int(np.searchsorted(left[:, 1], (right_start + stop) // 2))))
        if joint is None:
            stop += PIECE_CHARACTERS
            left = _token_rows(backend, text, start, stop)
            continue
        kept.append(left[first : joint[0], 0])
        first = joint[1]
        left = right
        start = right_start
        stop = right_stop
    kept.append(left[first:, 0])
    return np.concatenate(kept).astype(np.uint32)


def _token_rows(backend: "Tokenizer", text: str, start: int, stop: int) -> np.ndarray:
    """Tokenizes text[start:stop]. Returns (tokens, 3): token ID, and start and end character offsets in `text`."""
    encoding = backend.encode(text[start:stop], add_special_tokens=False)
    spans = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2) + start
    return np.column_stack([np.array(encoding.ids, dtype=np.int64), spans])


def _joint(left: np.ndarray, right: np.ndarray, candidate: int) -> tuple[int, int] | None:
    """Finds where to join two overlapping pieces: (row in `left`, row in `right`), or None.

    candidate: first row in `left` to try.
    """
    while candidate + AGREEING_TOKENS < len(left):
        begin = left[candidate, 1]
        other = int(np.searchsorted(right[:, 1], begin))
        # If several tokens share a character, join only before the first of them.
        is_first = candidate == 0 or left[candidate - 1, 2] <= begin
        tokens = left[candidate : candidate + AGREEING_TOKENS]
        if is_first and np.array_equal(tokens, right[other : other + AGREEING_TOKENS]):
            return candidate, other
        candidate += 1
    return None
