"""Tests for language detection, using function words if they are conclusive, otherwise lingua."""

import pytest

from pretrain_tools.preparation.cleaning.filters import parse_filter
from pretrain_tools.preparation.cleaning.language import _lingua_detector, certain_language
from pretrain_tools.preparation.cleaning.stages import TextBatch

ENGLISH = "The ship was to leave for the north at noon, and all of the men that were on it had said their farewells. "
GERMAN = "Das Schiff sollte am Mittag nach Norden fahren, und alle Männer, die auf ihm waren, hatten sich von den "
FRENCH = "Le bateau devait partir vers le nord à midi, et tous les hommes qui étaient sur le pont avaient dit adieu. "
FINNISH = "Laivan piti lähteä keskipäivällä kohti pohjoista, ja kaikki miehet olivat jo hyvästelleet omaisensa. "


@pytest.mark.parametrize(("text", "language"), [(ENGLISH, "en"), (GERMAN + GERMAN, "de"), (FRENCH, "fr")])
def test_function_words_decide_clear_cases(text, language):
    assert certain_language(text.encode()) == language


@pytest.mark.parametrize("text", [FINNISH, ENGLISH[:40], ENGLISH + FRENCH, "Cat photo gallery " * 30, "漢字" * 90])
def test_function_words_do_not_decide_unclear_cases(text):
    assert certain_language(text.encode()) is None


def test_a_table_in_the_middle_hides_no_language():
    table = "| V3*C5 | 35,584 | " * 100
    assert certain_language((ENGLISH * 12 + table + ENGLISH * 12).encode()) == "en"
    assert certain_language((ENGLISH + table * 12 + FRENCH).encode()) is None


CHINESE = "这艘船中午要开往北方，船上所有的人都已经向家人告别了。天气很好，海面上没有风浪。"
INDONESIAN = "Semua orang dilahirkan merdeka dan mempunyai martabat dan hak-hak yang sama. Mereka dikaruniai akal. "


def languages_of(texts, given="language(en)"):
    batch = TextBatch([text.encode() for text in texts], [None] * len(texts))
    return parse_filter(given).judge(batch).values["language"]


@pytest.mark.parametrize(("most", "language"), [(CHINESE, "zh"), (FINNISH, "fi"), (GERMAN, "de"), (ENGLISH, "en")])
def test_the_language_is_that_of_most_of_the_text(most, language):
    other = (FRENCH if most is ENGLISH else ENGLISH) * 7
    half = most * (1 + 2 * len(other) // len(most))
    assert languages_of([half + other + half, other + half + half, half + half + other]) == [language] * 3


def test_lingua_does_not_separate_indonesian_and_malay():
    batch = TextBatch([INDONESIAN.encode()], [None])
    for wanted in ("id", "ms", "en+id"):
        verdicts = parse_filter(f"language({wanted})").judge(batch)
        assert (verdicts.values["language"], verdicts.removed) == (["id/ms"], {})
    assert parse_filter("language(en)").judge(batch).removed == {0: "id/ms"}


def test_other_languages_and_doubtful_texts_are_removed_and_counted():
    texts = [ENGLISH, GERMAN, FINNISH, "12345 67890", ENGLISH[:45], "漢字かな交じり文です。" * 5]
    batch = TextBatch([text.encode() for text in texts], [None] * len(texts))
    verdicts = parse_filter("language(en+de)").judge(batch)
    assert verdicts.values["language"] == ["en", "de", "fi", "unknown", "en", "ja"]
    assert verdicts.removed == {2: "fi", 3: "unknown", 5: "ja"}
    strict = parse_filter("language(en, minimum=1.01)").judge(batch)
    assert strict.removed[0] == "uncertain"


def test_the_models_are_loaded_before_workers_are_forked():
    _lingua_detector.cache_clear()
    parse_filter("language(en)").compile()
    assert _lingua_detector.cache_info().currsize == 1, "each worker would load its own copy"
