"""Computes the positions of windows from a source's draws, by arithmetic.

A sampler is a function (draws, stream) that returns the first token of each window. `draws` is an int64 array of any
length with the numbers of the windows drawn from the source, starting at 0. The result has the same shape, and its
values are in range(stream.tokens - stream.length). It depends only on the arguments, so that resuming needs no state.
`registry.SAMPLERS` lists the samplers.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


class Permutation:
    """A pseudo-random bijection of range(size) that needs no table. Its cost is constant for every position.

    A Feistel network over the next power of four, iterated until the result is in range (Black and Rogaway 2002,
    "Ciphers with arbitrary finite domains"). Eight rounds of a murmur-style mix.
    """

    ROUNDS = 8

    def __init__(self, size: int, key: int):
        self.size = size
        self._half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        # Never change the digest or the mix, because that would reorder the data of every resumed run.
        digest = hashlib.blake2b(key.to_bytes(16, "little"), digest_size=8 * self.ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8")

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Maps positions, an int64 array of values in range(size), to their images, in the same shape."""
        image = self._encrypt(positions.astype(np.uint64))
        while (outside := image >= self.size).any():
            # Cycle walking: values outside the range are encrypted again, which keeps the map a bijection.
            image[outside] = self._encrypt(image[outside])
        return image.astype(np.int64)

    def _encrypt(self, values: np.ndarray) -> np.ndarray:
        left = values >> self._half
        right = values & self._mask
        for key in self._keys:
            left, right = right, left ^ (mix(right ^ key) & self._mask)
        return (left << self._half) | right


def mix(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))


def key_of(*parts: object) -> int:
    """Returns a 128-bit key for any printable parts, the same on every machine and Python version."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True)
class Stream:
    """The properties of a source that a sampler gets."""

    tokens: int
    length: int
    """Tokens in a window, not counting the last target."""
    windows: int
    """Number of whole windows in an epoch."""
    key: Callable[..., int]
    """Returns a 128-bit key for any printable parts, this run's seed and the source."""
    permutation: Callable[[int], Permutation]
    """Returns the permutation of an epoch's windows."""


def epochs(draws: np.ndarray, stream: Stream) -> np.ndarray:
    """Visits every window once per epoch."""
    epoch, place = np.divmod(draws, stream.windows)
    starts = np.empty_like(draws)
    for turn in np.unique(epoch).tolist():
        here = epoch == turn
        starts[here] = stream.permutation(turn)(place[here]) * stream.length
    return starts


def random_windows(draws: np.ndarray, stream: Stream) -> np.ndarray:
    """Draws windows that begin at any token."""
    key = np.uint64(stream.key("random") & (2**64 - 1))
    return (mix(mix(draws.astype(np.uint64)) ^ key) % (stream.tokens - stream.length)).astype(np.int64)
