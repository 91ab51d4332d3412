"""Searches documents for runs of consecutive words from a list of texts, ignoring case, accents and punctuation.

The 64-bit hash of a run is the sum of its word hashes, each multiplied by a random factor for its position. For a
trillion words and a million runs, the probability of any false match is 5%.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pretrain_tools.preparation.cleaning.folded_words import folded_texts

LEAST_LETTERS = 20
"""Minimum number of letters in a run. Runs with fewer letters are extended, or ignored if that isn't possible."""


def _hashes(words: np.ndarray, places: np.ndarray | slice, factors: np.ndarray) -> np.ndarray:
    """Hashes the run of len(factors) words that starts at each of `places`. Returns (places,) uint64."""
    return np.lib.stride_tricks.sliding_window_view(words, len(factors))[places] @ factors


@dataclass(frozen=True)
class ItemIndex:
    """Index of the texts to search for, built by `build_index`."""

    searchable: np.ndarray
    """(texts,) bool: True if the text is long enough to search for."""
    runs: dict[int, tuple[np.ndarray, np.ndarray]]
    """{number of words: (sorted hashes of the runs with that many words, indices of their texts)}."""
    factors: np.ndarray
    """(number of words in the longest run,) uint64, the factors for `_hashes`."""
    seed_words: int
    """Number of words in the shortest run."""
    seeds: np.ndarray
    """Sorted hashes of the first `seed_words` words in each run, which rule out most positions in documents."""

    def find(self, documents: Sequence[bytes]) -> list[tuple[int, int]]:
        """Finds documents that contain a run of words from a text. Returns sorted (document, text) pairs."""
        divided = folded_texts(documents)
        # Padding for runs that would extend beyond the last word.
        words = np.append(divided.hashes, np.zeros_like(self.factors))
        ends = divided.word_bounds[:, 1]
        ours = _hashes(words, slice(len(divided.hashes)), self.factors[: self.seed_words])
        seeds = self.seeds.take(np.searchsorted(self.seeds, ours), mode="clip")
        candidates = np.flatnonzero(seeds == ours)
        # A run must not extend into the next document.
        document_of = np.searchsorted(ends, candidates, "right")
        left = ends[document_of] - candidates
        found = set()
        for length, (hashes, texts) in self.runs.items():
            fits = left >= length
            places = candidates[fits]
            ours = _hashes(words, places, self.factors[:length])
            first, stop = (np.searchsorted(hashes, ours, side) for side in ("left", "right"))
            for number in np.flatnonzero(first < stop).tolist():
                document = int(document_of[fits][number])
                found.update((document, text) for text in texts[first[number] : stop[number]].tolist())
        return sorted(found)


def build_index(texts: Sequence[bytes], whole: Sequence[bool], words: int) -> ItemIndex:
    """Builds an index of all runs of `words` consecutive words in the texts.

    whole: True for each text that also matches as a whole if it has fewer than `words` words.
    """
    divided = folded_texts(texts)
    own = divided.hashes
    letters = np.append(0, np.cumsum(divided.lengths))
    ends = divided.word_bounds[:, 1]
    sizes = np.diff(ends, prepend=0)
    text_of = np.repeat(np.arange(len(texts)), sizes)
    least = np.where(whole, np.minimum(sizes, words), words)
    # Extend runs with too few letters, such as lists of numbers.
    starts = np.arange(len(own))
    stops = np.maximum(starts + least[text_of], np.searchsorted(letters, letters[:-1] + LEAST_LETTERS))
    starts = np.flatnonzero(stops <= ends[text_of])
    lengths = stops[starts] - starts
    text_of = text_of[starts]
    factors = np.random.default_rng(0).integers(1 << 64, size=max(lengths, default=1), dtype=np.uint64)
    runs = {}
    for length in np.unique(lengths).tolist():
        of_length = np.flatnonzero(lengths == length)
        hashes = _hashes(own, starts[of_length], factors[:length])
        order = np.argsort(hashes)
        runs[length] = hashes[order], text_of[of_length[order]]
    seed_words = min(runs, default=1)
    seeds = np.unique(_hashes(own, starts, factors[:seed_words])) if runs else np.zeros(1, np.uint64)
    return ItemIndex(np.bincount(text_of, minlength=len(texts)) > 0, runs, factors, seed_words, seeds)
