"""Computes the position of each window drawn from a source.

A sampler is a function (draws, stream) that returns the first token of each window. `draws` is an int64 array of draw
indices: 0 is the first window drawn from the source. The result has the same shape, with values in
range(stream.tokens - stream.length). It must depend only on the arguments, so that resuming needs no state. Samplers
are registered in `registry.SAMPLERS`.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


class Permutation:
    """A pseudorandom permutation of range(size), computed without a table.

    Uses a Feistel network over the next power of four, with eight rounds of a murmur-style mix, iterated until the
    result is in range (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
    """

    ROUNDS = 8

    def __init__(self, size: int, key: int):
        self.size = size
        self._half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        # Never change the digest or the mix: this would reorder the data of every resumed run.
        digest = hashlib.blake2b(key.to_bytes(16, "little"), digest_size=8 * self.ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8")

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Permutes positions, an int64 array of values in range(size). Returns an array of the same shape."""
        image = self._encrypt(positions.astype(np.uint64))
        while (outside := image >= self.size).any():
            # Cycle walking: encrypting values outside the range again keeps the mapping bijective.
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
    """Hashes the text of `parts` to 128 bits. The result is the same on every machine and Python version."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True)
class Stream:
    """Properties of a source, passed to a sampler."""

    tokens: int
    length: int
    """Window length in tokens, without the last target."""
    windows: int
    """Number of whole windows per epoch."""
    key: Callable[..., int]
    """Returns a 128-bit key for the given parts, specific to the run's seed and the source."""

    def permutation(self, epoch: int) -> Permutation:
        """Returns the permutation of an epoch's windows."""
        return Permutation(self.windows, self.key("epoch", epoch))


def epochs(draws: np.ndarray, stream: Stream) -> np.ndarray:
    """Visits every window once per epoch."""
    epoch, place = np.divmod(draws, stream.windows)
    starts = np.empty_like(draws)
    for turn in np.unique(epoch).tolist():
        here = epoch == turn
        starts[here] = stream.permutation(turn)(place[here]) * stream.length
    return starts


def random_windows(draws: np.ndarray, stream: Stream) -> np.ndarray:
    """Draws windows at random offsets."""
    key = np.uint64(stream.key("random") & (2**64 - 1))
    return (mix(mix(draws.astype(np.uint64)) ^ key) % (stream.tokens - stream.length)).astype(np.int64)
