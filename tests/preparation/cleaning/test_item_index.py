"""Runs of words of benchmark items in documents, against a search of strings in plain Python."""

import unicodedata

import numpy as np
import pytest

from pretrain_tools.preparation.cleaning.item_index import (
    LEAST_LETTERS,
    SEED_LETTERS,
    build_index,
    folding_table,
)

WORDS = 4


def letters_of(text):
    """The letters that count, without the module's table: for text of a single case and decomposition each."""
    kept = (c for c in unicodedata.normalize("NFKD", text) if unicodedata.category(c) != "Mn")
    # Each alone: a last sigma is another one, and ß stays one letter.
    return "".join(c.upper().lower() if len(c.upper()) == 1 else c.lower() for c in kept if c.isalnum())


def words_of(text):
    """Words of text without apostrophes and ideograms."""
    return "".join(c if c.isalnum() else " " for c in text).split()


def holds(document, item, words):
    """Whether a run of the item's words, or all of a shorter item, stands in the document."""
    found, of_item = letters_of(document), words_of(item)
    runs = (letters_of("".join(of_item[k : k + words])) for k in range(max(1, len(of_item) - words + 1)))
    return any(len(run) >= LEAST_LETTERS and run in found for run in runs)


def found_in(documents, items, words=WORDS):
    index = build_index([item.encode() for item in items], [True] * len(items), words)
    return {(run.document, run.text) for run in index.find([document.encode() for document in documents])}


@pytest.mark.parametrize("seed", range(3))
def test_the_runs_found_are_those_of_a_search_by_strings(seed):
    """Over an alphabet of few words, so that runs begin, break and repeat everywhere."""
    rng = np.random.default_rng(seed)
    vocabulary = ["a", "Élan", "ΜΕΘΟΔΟΣ", "Straße", "reason", "mentions"]

    def text(most):
        words = rng.choice(vocabulary, int(rng.integers(1, most)))
        ends = rng.choice([" ", " ", " ", ", ", "-", "\n\n", "… ", " — "], len(words))
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
        ITEM.replace(" ", "").replace(";", ""),
        ITEM.replace("e", "é").replace("f", "ｆ"),
        '"' + "_".join(ITEM.split()) + '"',
    ],
)
def test_case_punctuation_spaces_and_accents_make_no_difference(copy):
    assert found_in([f"Before it. {copy} After it.", "Nothing."], [ITEM], words=13) == {(0, 0)}


def test_a_run_is_thirteen_words_and_no_less():
    words = ITEM.split()
    for count in (11, 12, 13, 14):
        for first in range(len(words) - count):
            document = "Some words. " + " ".join(words[first : first + count]) + " And others."
            # "—" is no word.
            is_run = sum(any(c.isalnum() for c in word) for word in words[first : first + count]) >= 13
            assert bool(found_in([document], [ITEM], words=13)) == is_run


def test_short_items_count_whole_and_few_letters_not_at_all():
    items = ["Who wrote the Iliad, and when?", "The end.", "Some turtles alarm Kim."]
    documents = [
        "who wrote the iliad and when",
        "who wrote the iliad",
        "the end",
        "Some turtles alarm kim",
        "Some turtles",
    ]
    assert found_in(documents, items, words=13) == {(0, 0)}
    assert len(letters_of(items[2])) == LEAST_LETTERS - 1
    index = build_index([b"Who wrote the Iliad, and when?"] * 2, [True, False], 13)
    assert index.searchable.tolist() == [True, False]


def test_text_without_spaces_is_counted_by_two_characters():
    item = "春眠不觉晓处处闻啼鸟夜来风雨声花落知多少床前明月光疑是地上霜"
    assert found_in([f"诗曰：{item[1:28]}。", item[1:26]], [item], words=13) == {(0, 0)}


def test_where_a_run_stands_is_told_in_bytes():
    index = build_index([ITEM.encode()], [True], 13)
    before = "Änderungen über “Größe” 漢字 😀: "
    text = f"{before}{ITEM} Nachher.".encode()
    runs = index.find([b"x", text])  # one for each seed, which overlap
    assert {run[:2] for run in runs} == {(1, 0)}
    assert min(run.start for run in runs) == len(before.encode())
    assert text[len(before.encode()) : max(run.stop for run in runs)].decode().strip() == ITEM


def test_many_copies_long_texts_and_no_text():
    index = build_index([ITEM.encode(), b""], [True, True], 13)
    assert index.find([]) == [] and index.find([b"", b"..."]) == []
    runs = index.find([(ITEM * 2000).encode()])
    assert len(runs) >= 2000 and runs[-1].stop == len((ITEM * 2000).encode())
    assert len(build_index([], [], 13).find([b"something"])) == 0
    assert SEED_LETTERS < LEAST_LETTERS


def test_every_letter_of_the_basic_plane_counts_as_itself_in_any_case():
    table = folding_table()
    for number in range(1 << 16):
        character = chr(number)
        changed = {character.upper(), character.lower()}
        if character.isalpha() and all(len(c) == 1 and ord(c) < 1 << 16 for c in changed):
            assert {int(table[ord(c)]) for c in changed} == {int(table[number])} != {0}, character
    assert not any(table[ord(c)] for c in " \t\n.,;:!?'’-–—_()[]{}«»„“”、。…")
