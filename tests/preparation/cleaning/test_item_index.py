"""Tests for the index of benchmark items, which must find the same word runs as a string search."""

import unicodedata

import numpy as np
import pytest

from pretrain_tools.preparation.cleaning.item_index import LEAST_LETTERS, build_index

WORDS = 4


def words_of(text):
    """Returns the folded words of a text without hyphens, apostrophes and ideograms, computed without the module's
    table."""
    kept = (c for c in unicodedata.normalize("NFKD", text.casefold()) if unicodedata.category(c) != "Mn")
    return "".join(c if c.isalnum() else " " for c in kept).split()


def holds(document, item, words):
    """Returns True if the document contains a run of the item's words, or all of a shorter item."""
    found = f" {' '.join(words_of(document))} "
    of_item = words_of(item)
    for first in range(len(of_item)):
        for stop in range(first + min(words, len(of_item)), len(of_item) + 1):
            if len("".join(of_item[first:stop])) >= LEAST_LETTERS:
                if f" {' '.join(of_item[first:stop])} " in found:
                    return True
                break  # longer runs contain this one
    return False


def found_in(documents, items, words=WORDS):
    index = build_index([item.encode() for item in items], [True] * len(items), words)
    return set(index.find([document.encode() for document in documents]))


@pytest.mark.parametrize("seed", range(3))
def test_the_index_finds_the_same_runs_as_a_string_search(seed):
    """Uses only a few distinct words, so that many runs match."""
    rng = np.random.default_rng(seed)
    vocabulary = ["a", "Élan", "ΜΕΘΟΔΟΣ", "Gänse", "reason", "mentions"]

    def text(most):
        words = rng.choice(vocabulary, int(rng.integers(1, most)))
        ends = rng.choice([" ", " ", " ", ", ", "\n\n", "… ", " — "], len(words))
        return "".join(word + end for word, end in zip(words, ends, strict=True))

    items = [text(14) for _ in range(60)]
    documents = [text(200) + (items[n][: int(rng.integers(5, 80))] if n % 3 else "") for n in range(60)]
    expected = {
        (d, i) for d, document in enumerate(documents) for i, item in enumerate(items) if holds(document, item, WORDS)
    }
    assert 200 < len(expected) < 2000
    assert found_in(documents, items) == expected


ITEM = "The o'clock struck thirteen; Winston's chin, nuzzled into his breast — in an effort to escape the vile wind."


@pytest.mark.parametrize(
    "copy",
    [
        ITEM,
        ITEM.upper(),
        ITEM.lower().replace("'", "’"),
        ITEM.replace("'", "").replace(",", " ").replace("—", "-"),
        ITEM.replace(" ", "\n"),
        ITEM.replace("e", "é").replace("f", "ｆ"),
        '"' + "_".join(ITEM.split()) + '"',
    ],
)
def test_case_punctuation_spaces_and_accents_make_no_difference(copy):
    assert found_in([f"Before it. {copy} After it.", "Nothing."], [ITEM], words=13) == {(0, 0)}


def test_a_run_has_at_least_thirteen_words():
    words = ITEM.split()
    for count in (11, 12, 13, 14):
        for first in range(len(words) - count):
            document = "Some words. " + " ".join(words[first : first + count]) + " And others."
            # "—" isn't a word.
            is_run = sum(any(c.isalnum() for c in word) for word in words[first : first + count]) >= 13
            assert bool(found_in([document], [ITEM], words=13)) == is_run


def test_short_items_count_as_a_whole_and_items_of_few_letters_never():
    items = ["Who wrote the Iliad, and when?", "The end.", "Some turtles alarm Kim."]
    documents = [
        "who wrote the iliad and when",
        "who wrote the iliad",
        "the end",
        "Some turtles alarm kim",
        "Some turtles",
    ]
    assert found_in(documents, items, words=13) == {(0, 0)}
    assert len("".join(words_of(items[2]))) == LEAST_LETTERS - 1
    index = build_index([b"Who wrote the Iliad, and when?"] * 2, [True, False], 13)
    assert index.searchable.tolist() == [True, False]


def test_runs_of_few_letters_are_extended():
    item = "春眠不觉晓处处闻啼鸟夜来风雨声花落知多少床前明月光疑是地上霜"
    assert found_in([f"诗曰：{item[1:21]}。", item[1:20]], [item], words=13) == {(0, 0)}
    numbers = "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15"
    assert found_in([f"x {numbers} y", numbers[:-3]], [numbers], words=13) == {(0, 0)}


def test_many_copies_empty_texts_and_document_boundaries():
    index = build_index([ITEM.encode(), b"", ITEM.encode()], [True, True, True], 13)
    assert index.find([]) == [] and index.find([b"", b"..."]) == []
    assert index.find([b"x", (ITEM * 2000).encode()]) == [(1, 0), (1, 2)]
    half = len(ITEM) // 2
    assert index.find([ITEM[:half].encode(), ITEM[half:].encode()]) == [], "a run must not span two documents"
    assert build_index([], [], 13).find([b"something", b"of several words"]) == []
