"""What is found 64 bytes at a time is what a plain search finds."""

import re

import numpy as np

from pretrain_tools.preparation.cleaning.compiled.text_blocks import joined_texts
from pretrain_tools.preparation.cleaning.compiled.text_statistics import (
    PHRASE_TABLE,
    PHRASES,
    count_phrases,
    mark_brackets,
    mark_repeated,
)


def random_texts(pieces, seed):
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(pieces, rng.integers(0, 40))) for _ in range(300)]


def test_phrases_are_counted_within_their_line_in_any_case():
    phrases = [phrase for several in PHRASES.values() for phrase in several]
    cut = [phrase[:-1] for phrase in phrases]
    lines = random_texts([*phrases, *cut, *map(str.upper, phrases), "s", "é", " uses ", "[", "k", "ja"], seed=5)
    text, bounds = joined_texts([line.encode() for line in lines])
    found = np.zeros((len(lines), len(PHRASES)), np.int64)
    count_phrases(text, *np.ascontiguousarray(bounds.T.astype(np.int32)), *PHRASE_TABLE, found)
    expected = [[sum(line.lower().count(phrase) for phrase in of) for of in PHRASES.values()] for line in lines]
    assert found.tolist() == expected
    assert found.sum(axis=0).min() > 100


def test_brackets_that_may_begin_a_citation_are_marked():
    texts = random_texts(["[", "1", "]", "c", "e", "a" * 50, "é"], seed=6)
    # Where a text ends in a bracket, the next one is looked at, too.
    texts = [text + "." for text in texts]
    text, bounds = joined_texts([text.encode() for text in texts])
    marks = np.zeros(len(texts), bool)
    mark_brackets(text, bounds, marks)
    expected = [re.search(r"\[[0-9\]ce]", text) is not None for text in texts]
    assert marks.tolist() == expected
    assert 0 < sum(expected) < len(texts)


def test_a_line_is_repeated_when_its_document_has_it_before():
    rng = np.random.default_rng(7)
    document = np.sort(rng.integers(0, 30, 2000))
    # Hashes that share a slot, too.
    hashes = rng.integers(0, 40, 2000).astype(np.uint64) << np.uint64(60) | rng.integers(0, 4, 2000).astype(np.uint64)
    repeated = np.empty(2000, bool)
    mark_repeated(hashes, document, np.empty(4096, np.uint64), np.zeros(4096, np.int64), repeated)
    seen = set()
    for pair, is_repeated in zip(zip(document.tolist(), hashes.tolist(), strict=True), repeated, strict=True):
        assert is_repeated == (pair in seen)
        seen.add(pair)
