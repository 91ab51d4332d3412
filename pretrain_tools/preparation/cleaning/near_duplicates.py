"""Computes MinHash signatures of documents, and the exact similarity of two documents.

A document is the set of its shingles: all runs of `shingle_words` folded words. A shorter document is a single
shingle. Two documents are near duplicates if the Jaccard similarity of their sets (shared shingles / all shingles) is
at least the threshold.

A signature has one byte per bin. Each shingle's hash falls into one bin, and each bin keeps its smallest hash
(one-permutation hashing, Li et al. 2012). An empty bin copies another bin, drawn by its number (optimal densification,
Shrivastava 2017). The share of bins in which two signatures agree then estimates the similarity, and each shingle is
hashed once, not once per bin.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from pretrain.errors import InputError

DEFAULT_BINS = 128
COMPARED_AT_THRESHOLD = 0.999
"""Minimum share of pairs at the threshold that the chosen bands must compare."""
EMPTY = np.uint32(0xFFFFFFFF)
DONORS = 8
"""Number of bins to draw for an empty bin before it copies the next nonempty one."""


@dataclass(frozen=True)
class NearDuplicates:
    """Settings of the search for near duplicates.

    Only pairs that agree in a whole band are compared. With similarity s, this has probability 1 - (1 - s^rows)^bands.
    """

    threshold: float = 0.8
    bands: int = 25
    rows: int = 5
    shingle_words: int = 5

    @classmethod
    def parse(cls, threshold: str) -> Self:
        """Parses a threshold such as '0.8'. Raises InputError if it isn't a similarity.

        Chooses the largest number of rows that still finds pairs at the threshold, because more rows compare fewer
        other pairs.
        """
        try:
            similarity = float(threshold)
        except ValueError:
            similarity = 0.0
        if not 0.3 <= similarity <= 1.0:
            raise InputError(f"--near_duplicates {threshold}: must be a Jaccard similarity from 0.3 to 1, such as 0.8")
        choices = [cls(similarity, DEFAULT_BINS // rows, rows) for rows in range(DEFAULT_BINS, 0, -1)]
        return next(choice for choice in choices if choice.compared(similarity) >= COMPARED_AT_THRESHOLD)

    def as_plan(self) -> dict[str, Any]:
        """Returns the manifest's record."""
        return asdict(self) | {"compared_at_threshold": round(self.compared(self.threshold), 4)}

    @property
    def signature_bytes(self) -> int:
        """Size of a document's signature in bytes."""
        return self.bands * self.rows

    def compared(self, similarity: float) -> float:
        """Returns the share of pairs with this similarity that are compared."""
        return 1 - (1 - similarity**self.rows) ** self.bands

    def words(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Returns documents' (words, ends), like folded_words."""
        from pretrain_tools.preparation.cleaning.folded_words import folded_words

        return folded_words(texts, self.shingle_words)

    def signatures(self, words: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Computes (documents, signature_bytes) uint8 from the result of `words`."""
        bits = (self.signature_bytes - 1).bit_length()
        document = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
        hashes = shingle_hashes(words, self.shingle_words)
        # Documents are concatenated, so drop shingles that cross into the next one.
        is_within = document[: len(hashes)] == document[len(document) - len(hashes) :]
        hashes = hashes[is_within]
        bins = (document[: len(is_within)][is_within] << bits) + (hashes & np.uint32((1 << bits) - 1))
        smallest = np.full((len(ends), 1 << bits), EMPTY)
        np.minimum.at(smallest.reshape(-1), bins, hashes >> np.uint32(bits))
        _fill_empty_bins(smallest)
        return smallest[:, : self.signature_bytes].astype(np.uint8)

    def similarity(self, one: np.ndarray, other: np.ndarray) -> float:
        """Computes the Jaccard similarity of two documents from their words."""
        sets = [_sorted_set(shingle_hashes(words, self.shingle_words)) for words in (one, other)]
        either = _sorted_set(np.concatenate(sets))
        return (len(sets[0]) + len(sets[1]) - len(either)) / len(either)

    def band_keys(self, signatures: np.ndarray, band: int) -> np.ndarray:
        """Computes (documents,) uint64 keys below 2^40. Two keys are equal if their signatures agree in the band."""
        keys = np.zeros(len(signatures), np.uint64)
        for row in range(band * self.rows, (band + 1) * self.rows):
            keys ^= signatures[:, row]
            keys *= np.uint64(0x100000001B3)
        keys ^= keys >> np.uint64(32)
        keys *= np.uint64(0x9E3779B97F4A7C15)
        return keys >> np.uint64(24)


def shingle_hashes(words: np.ndarray, shingle_words: int) -> np.ndarray:
    """Hashes the run of words at each place: (words - shingle_words + 1,) uint32."""
    mixed = _mixed(words.copy())
    count = max(0, len(words) - shingle_words + 1)
    return _combined([mixed[place : place + count] for place in range(shingle_words)])


def _sorted_set(hashes: np.ndarray) -> np.ndarray:
    """Sorts hashes in place and returns each once, ten times as fast as np.unique."""
    hashes.sort()
    return hashes[np.append(True, hashes[1:] != hashes[:-1])]


def _mixed(words: np.ndarray) -> np.ndarray:
    """Mixes uint32 words in place, so that neighbors differ in all bits."""
    words *= np.uint32(0x85EBCA6B)
    words ^= words >> np.uint32(15)
    return words


def _combined(columns: list[np.ndarray] | np.ndarray) -> np.ndarray:
    """Hashes sequences, given as one column per position. The last steps are lowbias32 (Wellons)."""
    hashes = columns[0].copy()
    for column in columns[1:]:
        hashes *= np.uint32(0x9E3779B1)
        hashes += column
    hashes ^= hashes >> np.uint32(16)
    hashes *= np.uint32(0x7FEB352D)
    hashes ^= hashes >> np.uint32(15)
    hashes *= np.uint32(0x846CA68B)
    hashes ^= hashes >> np.uint32(16)
    return hashes


def _fill_empty_bins(values: np.ndarray) -> None:
    """Fills empty bins of (documents, bins) with other bins' values, in place. Equal patterns draw the same bins."""
    bins = values.shape[1]
    empty = values == EMPTY
    rows, columns = np.nonzero(empty)
    for draw in range(DONORS):
        if not len(rows):
            return
        donors = _combined([columns.astype(np.uint32), np.full(len(columns), draw, np.uint32)]) % np.uint32(bins)
        found = ~empty[rows, donors]
        values[rows[found], columns[found]] = values[rows[found], donors[found]]
        rows = rows[~found]
        columns = columns[~found]
    if len(rows):
        which, inverse = np.unique(rows, return_inverse=True)
        places = np.where(empty[which], 2 * bins, np.arange(bins))
        places = np.concatenate([places, places + bins], axis=1)
        following = np.minimum.accumulate(places[:, ::-1], axis=1)[:, ::-1] % bins
        values[rows, columns] = values[rows, following[inverse, columns]]
