"""Words are what stands between spaces; lines with what rules ask of them."""

import numpy as np
import pytest

from pretrain_tools.preparation.cleaning.compiled import words
from pretrain_tools.preparation.cleaning.compiled.characters import LOWER, SENTENCE_END
from pretrain_tools.preparation.cleaning.compiled.text_blocks import joined_texts
from pretrain_tools.preparation.cleaning.compiled.words import divided_texts
from pretrain_tools.preparation.cleaning.forms import Lines

TEXTS = [
    "Hello, (world): it's 5p.m. in the U.S.A., isn't it?  He'd've said \"no\"... \t Mr. Smith -- shan't!",
    "naïve façade — “quoted” ‘single’ dog’s\u00a0l’été\u2003漢字かな、\u3000テスト。 Ελληνικά; العربية،\x1f नमस्ते।",
    "\n\n a\r\nb\rc\x0bd\x0ce\x85f\u2028g\u2029h \n",
    "",
    "   ",
    "𝒜𝒷 🙂 end",
]


def columns_of(text, *columns):
    return divided_texts(*joined_texts([text.encode()])).lines[list(columns)].tolist()


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_words_and_lines_are_those_of_python(text):
    divided = divided_texts(*joined_texts([b"before", text.encode(), b"after"]))
    first, last = divided.word_bounds[1]
    assert divided.lengths[first:last].tolist() == [len(word) for word in text.split()]
    first, last = divided.line_bounds[1]
    lines = divided.lines[:, first:last]
    found = [divided.text[a:b].tobytes().decode() for a, b in lines[[words.START, words.STOP]].T.tolist()]
    assert found == [line.strip() for line in text.splitlines() if line.strip()]
    assert lines[words.CHARACTERS].tolist() == [len(line) for line in found]
    assert lines[words.WORDS].tolist() == [len(line.split()) for line in found]
    assert divided.places[1, first:last].tolist() == [1] * len(found)


def test_blank_lines_and_documents_divide_blocks():
    divided = divided_texts(*joined_texts([b"\na\nb\n\n \nc\n", b"d\r\ne\r\n\r\nf"]))
    blocks, documents = divided.places.tolist()
    assert documents == [0, 0, 0, 1, 1, 1]
    assert [blocks.index(block) for block in blocks] == [0, 0, 2, 3, 3, 5]


def test_lines_are_joined_by_one_line_end():
    lines = Lines.of(divided_texts(*joined_texts(["  é a \n\n b\x0bc".encode(), b"", b"d\n", b"e\nf"])))
    stays = np.array([True, False, True, True, False, False])
    assert lines.joined(stays) == ["é a\nc".encode(), b"", b"d", b""]
    rest = lines.staying(stays, [0, 2, 3])
    assert rest.joined(np.array([False, True, True])) == [b"c", b"d", b""]


def test_words_of_random_texts_are_those_of_python():
    rng = np.random.default_rng(3)
    texts = ["".join(rng.choice([*"ab.Zé漢 \n\t\r\u2003,-"], 40)) for _ in range(300)]
    divided = divided_texts(*joined_texts([text.encode() for text in texts]))
    found = [divided.lengths[first:last].tolist() for first, last in divided.word_bounds]
    assert found == [list(map(len, text.split())) for text in texts]


def test_equal_words_have_equal_hashes_and_documents_do_not_mix():
    divided = divided_texts(*joined_texts([b"the caf\xc3\xa9, the", b"", b"the"]))
    assert divided.word_bounds.tolist() == [[0, 3], [3, 3], [3, 4]]
    assert divided.hashes[0] == divided.hashes[2] == divided.hashes[3] != divided.hashes[1]
    assert divided.words_of([2]).word_bounds.tolist() == [[3, 4]]


def test_words_of_punctuation_alone_do_not_count():
    divided = divided_texts(*joined_texts(["-- well , 1.5 “…” + § then".encode()]))
    assert dict(zip(words.TOTALS, divided.totals[0].tolist(), strict=True)) == {
        "words": 4, "word_characters": 4 + 3 + 1 + 4, "alphabetic_words": 2
    }  # fmt: skip


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
def test_sentences_end_before_spaces_and_with_wide_signs_anywhere(text, sentences):
    assert columns_of(text, words.SENTENCES) == [[sentences]]


def test_closing_quotes_and_brackets_do_not_hide_the_end_of_a_sentence():
    (kinds,) = columns_of("“Yes.”\n(No!)\n*Well?*\nand so,\n12.", words.LAST_KIND)
    assert [bool(kind & SENTENCE_END) for kind in kinds] == [True, True, True, False, True]
    (kinds,) = columns_of("he\nHe\n“he", words.FIRST_KIND)
    assert [bool(kind & LOWER) for kind in kinds] == [True, False, False]


def test_signs_are_counted_by_line():
    counted = (words.GAPS, words.TABS, words.PIPES, words.COMMAS, words.OPENING, words.CLOSED, words.SIGNS)
    text = "a  b   c, d\n1\t2\t3\nx | y\nf(a[0]) = {b};"
    assert list(map(list, zip(*columns_of(text, *counted), strict=True))) == [
        [2, 0, 0, 1, 0, 0, 0], [0, 2, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 3, 3, 4]
    ]  # fmt: skip
    text = "# one ## ...\na.. ...... b… .\n.\n..."
    assert columns_of(text, words.HASHES, words.ELLIPSES) == [[3, 0, 0, 0], [1, 3, 0, 1]]
    assert columns_of("a1 b 2 c", words.NUMBERS) == [[2]]


def test_a_text_of_single_letters_and_one_of_line_ends_have_room():
    assert len(divided_texts(*joined_texts([b"a " * 50_000, b"b"])).lengths) == 50_001
    assert divided_texts(*joined_texts([b"a\n" * 50_000])).lines.shape[1] == 50_000
