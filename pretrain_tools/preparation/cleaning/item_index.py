"""An index of texts that finds their runs of words in documents, whatever the case, accents and punctuation.

Words are those of folded_words. The hash of a run is the sum of its words, each times a power of BASE by its place, in
64 bits: that of any run of a document is the difference of two sums. Among a trillion words and a million runs, the
chance of one wrong match is 5 %.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pretrain_tools.preparation.cleaning.folded_words import folded_words

LEAST_LETTERS = 20
"""A run of fewer letters is no evidence, however many words it has: it is continued, or not sought."""
BASE = 0x9E3779B97F4A7C15
INVERSE = pow(BASE, -1, 1 << 64)
ENTRIES_PER_SEED = 16
FEWEST_BITS = 16


def _powers(base: int, count: int) -> np.ndarray:
    """Returns (count,) uint64: base^0, base^1 ... modulo 2^64."""
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.cumprod(powers)


def _sums(words: np.ndarray) -> np.ndarray:
    """Returns (words + 1,) uint64: the sums of all words before each place."""
    # Times BASE once more: the first word of 32 bits would not reach the highest bits of a hash.
    return np.append(np.uint64(0), np.cumsum(words * np.uint64(BASE) * _powers(BASE, len(words))))


@dataclass(frozen=True)
class ItemIndex:
    """Texts to look for in documents. Build it with `build_index`."""

    searchable: np.ndarray
    """(texts,) bool: whether a text is long enough to be found."""
    runs: dict[int, tuple[np.ndarray, np.ndarray]]
    """{words: ascending hashes of runs of so many, and the text of each}"""
    seed_words: int
    """Words that every run has."""
    seeds: np.ndarray
    """Ascending hashes of the first words of all runs."""
    entries: np.ndarray
    """(2^n,) bool by the highest bits of a seed; most words of documents need no more."""
    shift: np.uint64

    def find(self, documents: Sequence[bytes]) -> list[tuple[int, int]]:
        """Finds (document, text) of every text with a run in a document, in order."""
        words, ends = folded_words(documents, 0)
        sums = _sums(words)
        inverses = _powers(INVERSE, len(sums))
        ours = (sums[self.seed_words :] - sums[: -self.seed_words]) * inverses[: -self.seed_words]
        candidates = np.flatnonzero(self.entries[ours >> self.shift])
        candidates = candidates[_is_among(ours[candidates], self.seeds)]
        # All documents are one row of words: a run may not begin in one and end in the next.
        document_of = np.searchsorted(ends, candidates, "right")
        left = ends[document_of] - candidates
        found = set()
        for length, (hashes, texts) in self.runs.items():
            fits = left >= length
            places = candidates[fits]
            ours = (sums[places + length] - sums[places]) * inverses[places]
            first, stop = (np.searchsorted(hashes, ours, side) for side in ("left", "right"))
            for number in np.flatnonzero(first < stop).tolist():
                document = int(document_of[fits][number])
                found.update((document, text) for text in texts[first[number] : stop[number]].tolist())
        return sorted(found)


def _is_among(hashes: np.ndarray, ascending: np.ndarray) -> np.ndarray:
    """Tells which hashes are among some, (hashes,) bool."""
    places = np.searchsorted(ascending, hashes)
    return ascending.take(places, mode="clip") == hashes


def build_index(texts: Sequence[bytes], whole: Sequence[bool], words: int) -> ItemIndex:
    """Builds an index of UTF-8 texts that finds runs of `words` of their words.

    whole: whether a text of fewer words is found, as a whole.
    """
    pieces = [text.split() for text in texts]
    flat = list(itertools.chain.from_iterable(pieces))
    own, ends = folded_words(flat, 0)
    counts = np.diff(ends, prepend=0)
    letters = np.array([sum(map(str.isalnum, piece.decode(errors="replace"))) for piece in flat])
    letters = np.append(0, np.cumsum(np.repeat(letters / np.maximum(counts, 1), counts)))
    bounds = np.append(0, ends)[np.append(0, np.cumsum([len(of_text) for of_text in pieces], dtype=np.int64))]
    sizes = np.diff(bounds)
    text_of = np.repeat(np.arange(len(texts)), sizes)
    least = np.where(whole, np.minimum(sizes, words), words)
    # So many words, and more where these have too few letters, as numbers and ideograms do.
    starts = np.arange(len(own))
    stops = np.maximum(starts + least[text_of], np.searchsorted(letters, letters[:-1] + LEAST_LETTERS - 1e-6))
    starts = np.flatnonzero(stops <= bounds[1:][text_of])
    lengths = stops[starts] - starts
    text_of = text_of[starts]
    sums = _sums(own)
    inverses = _powers(INVERSE, len(sums))[starts]
    hashes = (sums[starts + lengths] - sums[starts]) * inverses
    runs = {}
    for length in np.unique(lengths).tolist():
        places = np.flatnonzero(lengths == length)
        places = places[np.argsort(hashes[places])]
        runs[length] = hashes[places], text_of[places]
    seed_words = min(runs, default=1)
    seeds = np.unique((sums[starts + seed_words] - sums[starts]) * inverses)
    bits = max(FEWEST_BITS, (ENTRIES_PER_SEED * len(seeds)).bit_length())
    shift = np.uint64(64 - bits)
    entries = np.zeros(1 << bits, bool)
    entries[seeds >> shift] = True
    return ItemIndex(np.bincount(text_of, minlength=len(texts)) > 0, runs, seed_words, seeds, entries, shift)
