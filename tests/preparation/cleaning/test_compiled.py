"""Tests for the compiled word and line statistics."""

import numpy as np
import pytest

from pretrain_tools.preparation.cleaning.compiled import LOWER, SENTENCE_END, divided_texts
from pretrain_tools.preparation.cleaning.forms import SIGNS, Lines
from pretrain_tools.preparation.cleaning.published import PHRASES, phrases_in

TEXTS = [
    "Hello, (world): it's 5p.m. in the U.S.A., isn't it?  He'd've said \"no\"... \t Mr. Smith -- shan't!",
    "naïve façade — “quoted” ‘single’ dog’s\u00a0l’été\u2003漢字かな、\u3000テスト。 Ελληνικά; العربية،\x1f नमस्ते।",
    "\n\n a\r\nb\rc\x0bd\x0ce\x85f\u2028g\u2029h \n",
    "",
    "   ",
    "𝒜𝒷 🙂 end",
]


def lines_of(texts):
    divided = divided_texts([text.encode() for text in texts])
    return Lines(divided.text, divided.lines, len(texts))


def columns_of(text, *columns):
    lines = divided_texts([text.encode()]).lines
    return [lines[column].tolist() for column in columns]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_words_and_lines_match_python(text):
    divided = divided_texts([b"before", text.encode(), b"after"])
    first, last = divided.word_bounds[1]
    assert divided.lengths[first:last].tolist() == [len(word) for word in text.split()]
    lines = divided.lines[divided.lines["document"] == 1]
    bounds = zip(lines["start"].tolist(), lines["stop"].tolist(), strict=True)
    found = [divided.text[a:b].tobytes().decode() for a, b in bounds]
    assert found == [line.strip() for line in text.splitlines() if line.strip()]
    assert lines["characters"].tolist() == [len(line) for line in found]
    assert lines["words"].tolist() == [len(line.split()) for line in found]


def test_blank_lines_and_documents_separate_blocks():
    divided = divided_texts([b"\na\nb\n\n \nc\n", b"d\r\ne\r\n\r\nf"])
    blocks = divided.lines["block"].tolist()
    documents = divided.lines["document"].tolist()
    assert documents == [0, 0, 0, 1, 1, 1]
    assert [blocks.index(block) for block in blocks] == [0, 0, 2, 3, 3, 5]


def test_lines_are_joined_by_one_line_end():
    lines = lines_of(["  é a \n\n b\x0bc", "", "d\n", "e\nf"])
    stays = np.array([True, False, True, True, False, False])
    assert lines.joined(stays) == ["é a\nc".encode(), b"", b"d", b""]


def test_words_of_random_texts_match_python():
    rng = np.random.default_rng(3)
    texts = ["".join(rng.choice([*"ab.Zé漢 \n\t\r\u2003,-"], 40)) for _ in range(300)]
    divided = divided_texts([text.encode() for text in texts])
    found = [divided.lengths[first:last].tolist() for first, last in divided.word_bounds]
    assert found == [list(map(len, text.split())) for text in texts]


def test_equal_words_have_equal_hashes_and_documents_do_not_mix():
    divided = divided_texts([b"the caf\xc3\xa9, the", b"", b"the"])
    assert divided.word_bounds.tolist() == [[0, 3], [3, 3], [3, 4]]
    assert divided.hashes[0] == divided.hashes[2] == divided.hashes[3] != divided.hashes[1]


def test_words_of_only_punctuation_do_not_count():
    divided = divided_texts(["-- well , 1.5 “…” + § then".encode()])
    assert divided.totals[0].tolist() == [4, 4 + 3 + 1 + 4, 2]


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three?", 3),
        ('"One." (Two?) three', 3),
        ("no end", 1),
        ("3.5 million... of them", 2),
        ("これは本。面白い。また", 3),
        ("これは本。」面白い。", 2),
    ],
)
def test_sentences_end_before_spaces_and_wide_punctuation_ends_them_anywhere(text, sentences):
    assert columns_of(text, "sentences") == [[sentences]]


def test_closing_quotes_and_brackets_do_not_hide_the_end_of_a_sentence():
    (kinds,) = columns_of("“Yes.”\n(No!)\n*Well?*\nand so,\n12.", "last_kind")
    assert [bool(kind & SENTENCE_END) for kind in kinds] == [True, True, True, False, True]
    (kinds,) = columns_of("he\nHe\n“he", "first_kind")
    assert [bool(kind & LOWER) for kind in kinds] == [True, False, False]


def test_signs_are_counted_by_line():
    lines = ["a  b   c, d", "\t1\t2\t3\t", "x | y", "f(a[0]) = {b};"]
    expected = [[sum(line.strip().encode().count(sign) for sign in signs) for signs in SIGNS] for line in lines]
    assert lines_of(["\n \t\n".join(lines)]).signs.tolist() == expected
    assert columns_of("a  b   c, d\nx y", "gaps") == [[2, 0]]
    assert columns_of("a1 b 2 c", "numbers") == [[2]]


def test_texts_of_single_letters_or_line_ends_fit_the_arrays():
    assert len(divided_texts([b"a " * 50_000, b"b"]).lengths) == 50_001
    assert divided_texts([b"a\n" * 50_000]).lines.shape == (50_000,)


def test_phrases_are_counted_per_line_ignoring_case():
    rng = np.random.default_rng(5)
    phrases = [phrase.decode() for phrase in PHRASES]
    pieces = [*phrases, *(phrase[:-1] for phrase in phrases), *map(str.upper, phrases), "s", "é", " uses ", "[", "u"]
    lines = ["".join(rng.choice(pieces, rng.integers(0, 40))) for _ in range(300)]
    lines = [line for line in lines if line.strip()]
    # Each line is a document, so that phrases don't span two lines.
    table = phrases_in(lines_of(lines), np.ones(len(lines), bool))
    found = np.array([table[phrase.encode()] for phrase in phrases]).T
    assert found.tolist() == [[line.lower().count(phrase) for phrase in phrases] for line in lines]
    assert found.sum(axis=0).min() > 100


def test_a_line_counts_as_repeated_within_its_document():
    rng = np.random.default_rng(7)
    texts = ["\n".join(f"line {number}" for number in rng.integers(0, 40, rng.integers(0, 60))) for _ in range(30)]
    counts, _ = lines_of(texts).repeated
    assert counts.tolist() == [len(text.splitlines()) - len(set(text.splitlines())) for text in texts]
