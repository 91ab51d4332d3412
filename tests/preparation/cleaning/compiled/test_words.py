"""English words, as spaCy divides them."""

import numpy as np
import pytest

from pretrain.preparation.cleaning.compiled.text_blocks import joined_texts
from pretrain.preparation.cleaning.compiled.words import divided_texts

TEXTS = [
    "Hello, (world): it's 5p.m. in the U.S.A., isn't it? He'd've said \"no\"... Mr. Smith can't, won't -- shan't!",
    "well-known 3-4 A-1 x--y end.Next a.b.c and/or his/her 10km 5$ US$5 400°F. 12:30 e.g. this i.e. that etc.",
    "See http://example.com/a-b?c=d, www.site.org:80/x or write to first.last@mail.example.com. (foo): :) 'em?\" end",
    "[lang/rfcs#59](https://example.com/a/pull/59) git+ssh://a.example.org/x 1.http://b.org x]http://c.org é.a://d.org",
    "naïve façade — “quoted” ‘single’ dog’s dogs’ l’été 漢字かな、テスト。 Ελληνικά русский; العربية، नमस्ते।",
    "- bullet\n• item\n\t# code_like_name = x[1][2] {y} <tag> & #hash @me 50% +1 1+1 a*b 2^3 ~x~ C++ `quote` ''two''",
    "cannot gonna gotta dont cant Im youre theyll id wed I'm I’ve let's lets ma'am o'clock 8) <3 xD 1st 3.14 1,000.5",
    "A.B. Ph.D. J. R. R. Tolkien... Wait!!! What?! ...so *this* _that_ [r] |b| \x1f \u2003 \u00a0 non\u00adbreaking",
]


def words_of(text: str) -> list[str]:
    divided = divided_texts(*joined_texts([text.encode()]))
    return [divided.text[start:end].tobytes().decode() for start, end, _ in divided.words.tolist()]


def test_words_are_divided_at_signs_but_not_within_abbreviations_and_addresses():
    assert words_of("He can't, at 5p.m.; (see http://a.example.com/x-y) it's well-known... in the U.S.") == [
        *["He", "ca", "n't", ",", "at", "5", "p.m.", ";", "(", "see", "http://a.example.com/x-y", ")"],
        *["it", "'s", "well", "-", "known", "...", "in", "the", "U.S."],
    ]


@pytest.fixture(scope="module")
def spacy_words():
    spacy = pytest.importorskip("spacy", reason="requirements-dev.txt")
    english = spacy.blank("en")
    return lambda text: [stripped for word in english(text) if (stripped := word.text.strip())]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_words_are_those_of_spacy(text, spacy_words):
    assert words_of(text) == spacy_words(text)


def test_pieces_of_texts_put_together_at_random_are_divided_alike(spacy_words):
    rng = np.random.default_rng(3)
    pieces = [*"'t.,-Ab9:)(/ é’s$+_@", "don", "...", "km", "U.S."]
    texts = ["".join(rng.choice(pieces, 12)) for _ in range(1000)]
    differing = [text for text in texts if words_of(text) != spacy_words(text)]
    assert len(differing) < 20, differing[:5]


def test_hashes_and_characters_are_of_the_words_and_documents_do_not_mix():
    divided = divided_texts(*joined_texts([b"the caf\xc3\xa9, the", b"", b"the"]))
    assert divided.word_bounds.tolist() == [[0, 4], [4, 4], [4, 5]]
    assert divided.words[:, 2].tolist() == [3, 4, 1, 3, 3]
    assert divided.hashes[0] == divided.hashes[3] == divided.hashes[4] != divided.hashes[1]
    taken = divided.taking([2])
    assert taken.word_bounds.tolist() == [[4, 5]]


def test_a_text_of_signs_has_room():
    assert len(words_of("(" * 50_000)) == 50_000


@pytest.mark.parametrize(("text", "totals"), [("“I", [1, 1, 1]), ("‘I", [2, 2, 1]), ("'dogs’", [1, 4, 1])])
def test_signs_before_a_word_count_as_datatroves_list_of_punctuation_has_them(text, totals):
    """Of an opening ‘ alone it says that it is none."""
    assert divided_texts(*joined_texts([text.encode()])).totals.tolist() == [totals]
