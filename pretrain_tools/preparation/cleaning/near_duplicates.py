"""Computes MinHash signatures and the Jaccard similarity of documents.

A document is represented by its set of shingles (runs of `shingle_words` folded words). Two documents are near
duplicates if the Jaccard similarity of their sets is at least the threshold.

Signatures use one-permutation hashing (Li et al. 2012) with optimal densification (Shrivastava 2017): each shingle is
hashed into one bin, each bin stores one byte of its minimum hash, and empty bins are filled from other bins. The
fraction of matching bins is an estimate of the similarity.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from pretrain.errors import InputError

DEFAULT_BINS = 128
COMPARED_AT_THRESHOLD = 0.999
"""Minimum probability that two documents with a similarity equal to the threshold are compared."""
EMPTY = np.uint32(0xFFFFFFFF)
DONORS = 8
"""Number of random bins to try for an empty bin before using the next nonempty bin."""


@dataclass(frozen=True)
class NearDuplicates:
    """Settings for the near-duplicate search.

    Two documents are compared only if their signatures are equal in at least one band. For documents with similarity
    s, the probability of this is 1 - (1 - s^rows)^bands.
    """

    threshold: float = 0.8
    bands: int = 25
    rows: int = 5
    shingle_words: int = 5

    @classmethod
    def parse(cls, threshold: str) -> Self:
        """Parses a threshold such as '0.8' and chooses bands and rows. Raises InputError if it is invalid.

        Uses as many rows as COMPARED_AT_THRESHOLD allows, because more rows mean fewer comparisons.
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
        """Returns the manifest entry."""
        return asdict(self) | {"compared_at_threshold": round(self.compared(self.threshold), 4)}

    @property
    def signature_bytes(self) -> int:
        """Signature size in bytes."""
        return self.bands * self.rows

    def compared(self, similarity: float) -> float:
        """Returns the probability that two documents with this similarity are compared."""
        return 1 - (1 - similarity**self.rows) ** self.bands

    def words(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Returns (uint32 hashes of all documents' folded words, end index of each document)."""
        from pretrain_tools.preparation.cleaning.folded_words import folded_texts

        divided = folded_texts(texts, self.shingle_words)
        return (divided.hashes >> np.uint64(32)).astype(np.uint32), divided.word_bounds[:, 1]

    def signatures(self, words: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Returns the signatures, (documents, signature_bytes) uint8, for the result of `words`."""
        bits = (self.signature_bytes - 1).bit_length()
        document = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
        hashes = shingle_hashes(words, self.shingle_words)
        # Drop shingles that extend into the next document.
        is_within = document[: len(hashes)] == document[len(document) - len(hashes) :]
        hashes = hashes[is_within]
        bins = (document[: len(is_within)][is_within] << bits) + (hashes & np.uint32((1 << bits) - 1))
        smallest = np.full((len(ends), 1 << bits), EMPTY)
        np.minimum.at(smallest.reshape(-1), bins, hashes >> np.uint32(bits))
        _fill_empty_bins(smallest)
        return smallest[:, : self.signature_bytes].astype(np.uint8)

    def similarity(self, one: np.ndarray, other: np.ndarray) -> float:
        """Computes the Jaccard similarity of two documents from their words."""
        sets = [np.unique(shingle_hashes(words, self.shingle_words)) for words in (one, other)]
        shared = len(np.intersect1d(*sets, assume_unique=True))
        return shared / (len(sets[0]) + len(sets[1]) - shared)

    def band_keys(self, signatures: np.ndarray, band: int) -> np.ndarray:
        """Hashes one band of each signature. Returns (documents,) uint64, below 2^40."""
        keys = np.zeros(len(signatures), np.uint64)
        for row in range(band * self.rows, (band + 1) * self.rows):
            keys ^= signatures[:, row]
            keys *= np.uint64(0x100000001B3)
        keys ^= keys >> np.uint64(32)
        keys *= np.uint64(0x9E3779B97F4A7C15)
        return keys >> np.uint64(24)


def shingle_hashes(words: np.ndarray, shingle_words: int) -> np.ndarray:
    """Hashes all runs of `shingle_words` words. Returns (words - shingle_words + 1,) uint32."""
    mixed = words * np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(15)
    count = max(0, len(words) - shingle_words + 1)
    return _combined([mixed[place : place + count] for place in range(shingle_words)])


def _combined(columns: list[np.ndarray]) -> np.ndarray:
    """Combines one array of hashes per position into a hash per sequence. The finalizer is lowbias32 (Wellons)."""
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
    """Fills empty bins in (documents, bins) with values from other bins, in place.

    The choice depends only on which bins are empty, so that similar documents get similar signatures.
    """
    bins = values.shape[1]
    empty = values == EMPTY
    rows, columns = np.nonzero(empty)
    for draw in range(DONORS + bins - 1):
        if not len(rows):
            return
        if draw < DONORS:
            donors = _combined([columns.astype(np.uint32), np.full(len(columns), draw, np.uint32)]) % np.uint32(bins)
        else:
            donors = (columns + draw - DONORS + 1) % bins
        found = ~empty[rows, donors]
        values[rows[found], columns[found]] = values[rows[found], donors[found]]
        rows = rows[~found]
        columns = columns[~found]
