"""Encodes texts to token IDs, with tokenizers (reference path) or gigatoken (fast path), and checks that both agree.

Both paths encode plain text. The text of a special token inside a document never becomes that token. No token is added
before or after a document, and nothing is truncated or padded.
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
# Long texts are encoded in overlapping pieces, because the library needs about 100 bytes per byte: 24 GB for 200 MB of
# text.
PIECE_CHARACTERS = 1 << 20
OVERLAP_CHARACTERS = 1 << 13
# Two pieces are joined at a run of this many equal tokens, far from both cuts.
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
    """Encodes with the tokenizers library, whose token IDs are the reference."""

    def __init__(self, tokenizer: LoadedTokenizer):
        self._tokenizer = tokenizer
        self._backend = backend_of(_with_special_end(tokenizer), tokenizer.name)
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()

    def __reduce__(self) -> tuple[type, tuple[LoadedTokenizer]]:
        return type(self), (self._tokenizer,)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Encodes each UTF-8 text to a uint32 array of token IDs."""
        arrays: list[np.ndarray] = []
        # Encode small batches, because encodings keep offsets and strings, many times the size of the text.
        for first, stop in batches(texts):
            batch = [text.decode() for text in texts[first:stop]]
            if len(texts[first]) > LONG_TEXT_BYTES:
                arrays.append(encode_long_text(self._backend, batch[0]))
            else:
                encodings = self._backend.encode_batch_fast(batch, add_special_tokens=False)
                arrays.extend(np.array(encoding.ids, dtype=np.uint32) for encoding in encodings)
        return arrays


def _with_special_end(tokenizer: LoadedTokenizer) -> bytes:
    """Marks the end-of-document token as special in tokenizer.json, so that text never contains it."""
    fields = json.loads(tokenizer.json)
    for added in fields.get("added_tokens") or []:
        if added.get("content") == tokenizer.end_of_document and not added.get("special"):
            added["special"] = True
            return json.dumps(fields).encode()
    return tokenizer.json


class FastEncoder:
    """Encodes with gigatoken. Texts that contain a special token's text use the reference path."""

    def __init__(self, tokenizer: LoadedTokenizer):
        import gigatoken

        self._tokenizer = tokenizer
        self.reference = ReferenceEncoder(tokenizer)
        self._encode = gigatoken.Tokenizer.from_json(tokenizer.json).backend.encode
        # Searching for a few short prefixes is faster than for hundreds of whole tokens, and misses none.
        self._suspects = sorted({token.encode()[:4] for token in tokenizer.special_tokens})
        self._specials = re.compile(b"|".join(re.escape(token.encode()) for token in tokenizer.special_tokens))

    def __reduce__(self) -> tuple[type, tuple[LoadedTokenizer]]:
        return type(self), (self._tokenizer,)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Encodes each UTF-8 text to a uint32 array of token IDs, equal to the reference's."""
        arrays = [None if self._has_special(text) else self._encode(text) for text in texts]
        suspected = [number for number, ids in enumerate(arrays) if ids is None]
        for number, ids in zip(suspected, self.reference.encode([texts[n] for n in suspected]), strict=True):
            arrays[number] = ids
        return arrays

    def _has_special(self, text: bytes) -> bool:
        return any(suspect in text for suspect in self._suspects) and self._specials.search(text) is not None

    def disagreement(self, texts: Sequence[bytes]) -> str | None:
        """Returns the first text (shortened) whose IDs differ from the reference's; None if all agree."""
        for text, expected in zip(texts, self.reference.encode(texts), strict=True):
            if not self._has_special(text) and not np.array_equal(self._encode(text), expected):
                return repr(text[:60].decode(errors="replace"))
        return None


Encoder = ReferenceEncoder | FastEncoder


def make_encoder(tokenizer: LoadedTokenizer, engine: str) -> tuple[Encoder, str | None]:
    """Returns (encoder for `engine`, reason why auto uses the reference path).

    engine: auto, fast or reference. Raises InputError for `fast` if gigatoken can't load this tokenizer or gives
    different IDs.
    """
    if engine == "reference":
        return ReferenceEncoder(tokenizer), None
    try:
        encoder = FastEncoder(tokenizer)
        disagreement = encoder.disagreement([text.encode() for text in AGREEMENT_TEXTS])
        reason = f"gigatoken gives different IDs than tokenizers for {disagreement}" if disagreement else None
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
    """Encodes a long text to uint32 token IDs, without special tokens. The IDs equal those from a single call.

    If two pieces can't be joined, as inside one endless word, they are encoded together.
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
    """Encodes text[start:stop] to (tokens, 3): token ID, start and end as character positions in `text`."""
    encoding = backend.encode(text[start:stop], add_special_tokens=False)
    spans = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2) + start
    return np.column_stack([np.array(encoding.ids, dtype=np.int64), spans])


def _joint(left: np.ndarray, right: np.ndarray, candidate: int) -> tuple[int, int] | None:
    """Finds the first rows of left (from `candidate` on) and right with equal tokens."""
    while candidate + AGREEING_TOKENS < len(left):
        begin = left[candidate, 1]
        other = int(np.searchsorted(right[:, 1], begin))
        # Several tokens may share one character. Cut only before the first of them.
        is_first = candidate == 0 or left[candidate - 1, 2] <= begin
        tokens = left[candidate : candidate + AGREEING_TOKENS]
        if is_first and np.array_equal(tokens, right[other : other + AGREEING_TOKENS]):
            return candidate, other
        candidate += 1
    return None
