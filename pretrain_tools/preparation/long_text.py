"""Ids of a very long text in bounded memory: overlapping pieces, joined where both have agreed for a while.

The tokenizers library keeps about a hundred bytes for each byte of a text, 24 GB for a document of 200 MB.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIECE_CHARACTERS = 1 << 20
OVERLAP_CHARACTERS = 1 << 13
# Two pieces are joined where this many tokens in a row are the same on both sides, far from either piece's cut.
AGREEING_TOKENS = 64


class _Piece(NamedTuple):
    """Ids of text[start:stop] with the character at which each begins and ends in the whole text."""

    start: int
    stop: int
    ids: np.ndarray
    begins: np.ndarray
    ends: np.ndarray


def encode_long_text(backend: "Tokenizer", text: str) -> np.ndarray:
    """uint32 ids of `text`, as the backend gives them for the whole without special tokens.

    Pieces that cannot be joined, as within one endless word, are encoded as one.
    """
    kept: list[np.ndarray] = []
    left, first = _encode(backend, text, 0, PIECE_CHARACTERS), 0
    while left.stop < len(text):
        right_start = max(left.start, left.stop - OVERLAP_CHARACTERS)
        right = _encode(backend, text, right_start, right_start + PIECE_CHARACTERS)
        joint = _joint(left, right, first)
        if joint is None:
            left = _encode(backend, text, left.start, left.stop + PIECE_CHARACTERS)
            continue
        kept.append(left.ids[first : joint[0]])
        left, first = right, joint[1]
    kept.append(left.ids[first:])
    return np.concatenate(kept)


def _encode(backend: "Tokenizer", text: str, start: int, stop: int) -> _Piece:
    stop = min(stop, len(text))
    encoding = backend.encode(text[start:stop], add_special_tokens=False)
    spans = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2) + start
    return _Piece(start, stop, np.array(encoding.ids, dtype=np.uint32), spans[:, 0], spans[:, 1])


def _joint(left: _Piece, right: _Piece, first: int) -> tuple[int, int] | None:
    """Positions in left and right from which the tokens are the same, in the middle of their overlap."""
    middle = (left.stop + right.start) // 2
    candidate = max(first, int(np.searchsorted(left.begins, middle)))
    while candidate + AGREEING_TOKENS < len(left.ids):
        other = int(np.searchsorted(right.begins, left.begins[candidate]))
        # Several tokens may share one character; only the first of them is a place to cut.
        is_first = candidate == 0 or left.ends[candidate - 1] <= left.begins[candidate]
        if is_first and _agree(left, candidate, right, other):
            return candidate, other
        candidate += 1
    return None


def _agree(left: _Piece, i: int, right: _Piece, j: int) -> bool:
    a, b = slice(i, i + AGREEING_TOKENS), slice(j, j + AGREEING_TOKENS)
    return all(np.array_equal(getattr(left, name)[a], getattr(right, name)[b]) for name in ("ids", "begins", "ends"))
