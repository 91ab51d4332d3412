"""Tests that near-duplicate detection ignores case, accents, width, line endings and invisible characters."""

import unicodedata

import numpy as np
import pytest

from pretrain_tools.preparation.cleaning.near_duplicates import NearDuplicates


def folded_words(texts, least_words):
    return NearDuplicates(shingle_words=least_words).words(list(texts))


def words(text, least=1):
    return folded_words([text.encode()], least)[0].tolist()


TEXT = "The quick brown fox isn't lazy: a well-known example, of naïve ﬁne Straße No 12."
SAME = {
    "case": TEXT.upper(),
    "line ends": TEXT.replace(" ", "\r\n"),
    "quoted": TEXT.replace(" ", "\n> > "),
    "double spaces": TEXT.replace(" ", "  "),
    "tabs": TEXT.replace(" ", "\t"),
    "no-break spaces": TEXT.replace(" ", "\u00a0"),
    "narrow and ideographic spaces": TEXT.replace(" ", "\u202f\u3000"),
    "byte-order mark": "\ufeff" + TEXT,
    "zero width": TEXT.replace("o", "o\u200b").replace("r", "\u2060r\u200d"),
    "soft hyphens": TEXT.replace("xa", "x\u00ada"),
    "divided at the end of a line": TEXT.replace("example", "exam-\nple").replace("quick", "qu-\r\n> ick"),
    "hyphen at the end of a line": TEXT.replace("well-known", "well-\nknown"),
    "other hyphens": TEXT.replace("-", "\u2011"),
    "curly": TEXT.replace("'", "\u2019"),
    "without apostrophes": TEXT.replace("'", ""),
    "punctuation": TEXT.replace(" ", " -- ").replace(",", " \u2014 \u201c"),
    "markup": TEXT.replace(" ", " **").replace("e ", "e_ "),
    "decomposed": unicodedata.normalize("NFD", TEXT),
    "compatible": unicodedata.normalize("NFKC", TEXT),
    "accents": TEXT.replace("ï", "i"),
    "full width": "".join(chr(ord(c) + 0xFEE0) if c.isascii() and c.isalnum() else c for c in TEXT),
}


@pytest.mark.parametrize("disguise", SAME)
def test_a_disguise_changes_no_word(disguise):
    assert SAME[disguise] != TEXT and len(words(TEXT)) == 15
    assert words(SAME[disguise]) == words(TEXT)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("one two", 2), ("a1 b_2", 3), ("漢字テスト。日本", 7), ("สวัสดี", 4), ("한국어 말", 2), ("x漢y", 3),
        ("pre- and post-war", 3), ("word--word", 2), ("- item\n- item", 2), ("a-\n- b", 2), ("2026-11-23", 1),
        ("𠀋 𰀀 🙂", 2), ("ａｂ ㎏ ½", 2),
    ],
)  # fmt: skip
def test_words_are_counted_as_a_reader_counts(text, count):
    assert len(words(text)) == count


def test_different_words_differ():
    rng, letters = np.random.default_rng(0), np.array(list("abcdefghijklmnopqrstuvwxyz0123456789éßж漢"))
    texts = {"".join(rng.choice(letters[:38], rng.integers(1, 12))) for _ in range(20_000)}
    folded = {unicodedata.normalize("NFD", text).replace("\u0301", "").casefold() for text in texts}
    found, ends = folded_words([text.encode() for text in texts], 1)
    assert len(ends) == len(found) == len(texts) and len(np.unique(found)) >= len(folded) - 1
    assert words("naive") != words("native") and words("漢") != words("字") and words("12") != words("21")


def test_composed_or_not_and_in_either_case_a_letter_is_the_same():
    """Case and Unicode normalization make no difference for letters in the BMP, with three exceptions: dotless ı
    becomes I, and the other two become two words."""
    letters = [chr(code) for code in range(0x10000) if unicodedata.category(chr(code))[0] in "LN"]
    changes = (lambda letter: unicodedata.normalize("NFD", letter)), str.casefold, str.upper
    for change, different in zip(changes, ("ဦ", "ŉ", "ıŉ"), strict=True):
        others = [letter for letter in letters if change(letter) != letter and letter not in different]
        one, other = (
            folded_words([f"x {c} x".encode() for c in chosen], 1) for chosen in (others, map(change, others))
        )
        assert len(others) > 1000 and np.array_equal(one[0], other[0])
        assert np.array_equal(one[1], other[1])


def test_neighboring_documents_make_no_difference():
    given = (TEXT, "", "!!!", "???", "two words", "  ", "é" * 50, "漢字", "ends in é-")
    texts = [text.encode() for text in given]
    together, ends = folded_words(texts, 5)
    for number, (text, end) in enumerate(zip(texts, ends, strict=True)):
        alone = folded_words([text], 5)[0]
        assert np.array_equal(alone, together[ends[number - 1] if number else 0 : end])
    short = [folded_words([text], 5)[0].tolist() for text in texts[1:6]]
    assert all(len(found) == 5 and len(set(found)) == 1 for found in short), (
        "documents shorter than a shingle must have a single hash"
    )
    assert words("!!!", 5) != words("???", 5) and words("two words", 5) != words("word two", 5)
    assert words("Two  WORDS.", 5) == words("two words", 5) and words(" ! ! !", 5) == words("!!!", 5)
