"""Tests for published filters: each rule alone, good and bad documents of each type, and agreement with datatrove."""

import re
from functools import cache

import numpy as np
import pytest

from pretrain_tools.preparation.cleaning.published import C4Quality, FineWebQuality, GopherQuality, GopherRepetition
from pretrain_tools.preparation.cleaning.stages import TextBatch
from support.prepared import PROSE

SENTENCES = [
    "The committee decided to publish all of its records, and that was a relief to everyone.",
    '"You have to be careful with knives," she said; nobody answered.',
    "In 1987, about 3.5 million people lived there, of whom 12% were farmers.",
    "It isn't clear whether they'd agree, but we'll see what the court has to say.",
    "Read more at https://www.example.org/about-us?id=7 or write to us!",
    "Our cookie policy explains how the site uses cookies to improve your visit.",
    "Please enable JavaScript to see the comments.",
    "He waited [1] for the train [citation needed] in the cold...",
    "- a point of the list",
    "• another point of it …",
    "SHARE THIS POST",
    "Click here",
    "Die Straße führt über den Fluß, und der Zug fährt um 5 Uhr ab.",
    "その本は図書館にあります。とても面白いです。",
    "Lorem ipsum dolor sit amet, consectetur adipiscing elit.",
    "function f(x) { return x; }",
    "Is this it? Yes! Really?! (Of course.)",
    "# # # ##",
]


@cache
def web_texts() -> list[str]:
    """Returns prose, lists, repetitions and fragments, with different line endings."""
    rng = np.random.default_rng(5)
    texts = [PROSE]
    for number in range(240):
        lines = list(rng.choice(SENTENCES[: 6 if number % 3 else 18], int(rng.integers(1, 14))))
        lines += [" ".join(rng.permutation(PROSE.split())[: int(rng.integers(1, 70))])] * int(rng.integers(0, 4))
        if number % 4 == 0:
            lines += PROSE.split(". ")
        if number % 7 == 0:
            lines *= 2
        separator = ["\n", " ", "\n\n", "\r\n", "\n \n", "\u2028", "  "][int(rng.integers(7))]
        texts.append(separator.join(rng.permutation(lines)) + ["", "\n", " "][number % 3])
    return texts


def judged(stage, texts):
    verdicts = stage.judge(TextBatch([text.encode() for text in texts], [None] * len(texts)))
    return verdicts.removed, {number: text.decode() for number, text in verdicts.changed.items()}


@cache
def datatrove_filters() -> dict[str, object]:
    """Returns {our filter's name: datatrove's filter}."""
    pytest.importorskip("datatrove", reason="requirements-dev.txt")
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )

    return {
        "gopher_quality": GopherQualityFilter(),
        "gopher_repetition": GopherRepetitionFilter(),
        "c4": C4QualityFilter(),
        "c4 of FineWeb": C4QualityFilter(filter_no_terminal_punct=False),
        "fineweb": FineWebQualityFilter(),
    }


RULES = {
    "gopher_short_doc": "few_words",
    "gopher_below_avg_threshold": "short_words",
    "gopher_above_avg_threshold": "long_words",
    "gopher_too_many_hashes": "hashes",
    "gopher_too_many_ellipsis": "ellipses",
    "gopher_too_many_bullets": "bullet_lines",
    "gopher_too_many_end_ellipsis": "ellipsis_lines",
    "gopher_below_alpha_threshold": "few_alphabetic_words",
    "gopher_enough_stop_words": "few_stop_words",
    "dup_para_frac": "duplicate_paragraphs",
    "dup_para_char_frac": "duplicate_paragraph_characters",
    "dup_line_frac": "duplicate_lines",
    "dup_line_char_frac": "duplicate_line_characters",
    "lorem_ipsum": "lorem_ipsum",
    "curly_bracket": "curly_bracket",
    "too_few_sentences": "few_sentences",
    "line_punct_ratio": "few_ending_lines",
    "short_line_ratio": "short_lines",
    "char_dup_ratio": "duplicate_characters",
    "list_ratio": "many_lines",
    **{f"top_{n}_gram": f"top_{n}_gram" for n in (2, 3, 4)},
    **{f"duplicated_{n}_n_grams": f"duplicate_{n}_gram" for n in range(5, 11)},
}
"""{datatrove's rule name: ours}"""


@pytest.mark.parametrize(
    ("name", "stage", "known"),
    [
        ("gopher_quality", GopherQuality(by_form=False), []),
        # Lines are compared without trailing spaces and count for both line rules.
        ("gopher_repetition", GopherRepetition(by_form=False),
         [("duplicate_line_characters", "duplicate_lines"), ("top_4_gram", "top_3_gram")]),
        ("c4", C4Quality(by_form=False), []),
        ("c4 of FineWeb", C4Quality(endings=False, by_form=False), []),
        # Our rule ignores closing quotes and brackets after the end of a sentence.
        ("fineweb", FineWebQuality(by_form=False), [("few_ending_lines", None)]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_verdicts_match_datatrove_with_words_split_at_spaces(name, stage, known, monkeypatch):
    theirs = datatrove_filters()[name]
    from datatrove.data import Document
    from datatrove.pipeline import filters

    for module in (filters.gopher_quality_filter, filters.gopher_repetition_filter, filters.fineweb_quality_filter):
        monkeypatch.setattr(module, "split_into_words", lambda text, language: text.split())
    ends = re.compile(r"(?<=[.!?])[\"')]*\s+")
    monkeypatch.setattr(filters.c4_filters, "split_into_sentences", lambda text, language: ends.split(text))
    # In datatrove, lines with only spaces count as repeated, and some rules only support one kind of line ending.
    texts = [text for text in web_texts() if not re.search("\n \n|\r|\u2028", text)]
    removed, changed = judged(stage, texts)
    expected_changed, differing = {}, []
    for number, text in enumerate(texts):
        document = Document(text=text, id=str(number))
        answer = theirs.filter(document)
        rule = None if answer is True else RULES[answer[1]]
        if rule != removed.get(number):
            differing.append((rule, removed.get(number)))
        elif rule is None and document.text != text:
            expected_changed[number] = document.text
    assert set(differing) <= set(known) and len(differing) < len(texts) / 5
    assert changed == expected_changed
    assert 10 < len(removed) < len(texts) - 10


def test_a_verdict_has_the_value_and_the_limit():
    verdicts = GopherQuality(min_words=1).judge(TextBatch([(STOPS + "a b c d e f g " * 10).encode()], [None]))
    assert verdicts.removed == {0: "short_words"}
    assert verdicts.measured == {0: ((3 + 2 + 3 + 2 + 70) / 74, 3.0)}
    verdicts = C4Quality().judge(TextBatch([b"One sentence is here. And two."], [None]))
    assert verdicts.measured == {0: (2.0, 5.0)}
    verdicts = GopherRepetition().judge(TextBatch([b"a rose is " * 100], [None]))
    assert verdicts.removed == {0: "top_2_gram"} and verdicts.measured[0][0] > verdicts.measured[0][1] == 0.2


def text_of(words: int, word: str = "words{0}") -> str:
    return " ".join(word.format(number) for number in range(words))


STOPS = "the of and to "


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("few_words", PROSE[:100]),
        ("short_words", STOPS + "a b c d e f g " * 10),
        ("long_words", STOPS + "incomprehensibilities " * 60),
        ("hashes", PROSE + " #" * 30),
        ("ellipses", PROSE + " ..." * 30),
        ("bullet_lines", "\n".join("- " + PROSE for _ in range(3))),
        ("ellipsis_lines", "\n".join([PROSE, PROSE + "...", PROSE + "…"])),
        ("few_alphabetic_words", STOPS + text_of(60, "100{0}") + " words" * 9),
        ("few_stop_words", text_of(60, "words")),
    ],
)
def test_each_rule_of_gopher_quality_can_be_broken_and_turned_off(rule, text):
    assert judged(GopherQuality(), [text, PROSE])[0] == {0: rule}
    parameter = {
        "few_words": "min_words", "short_words": "min_word_length", "long_words": "max_word_length",
        "hashes": "max_symbols", "ellipses": "max_symbols", "bullet_lines": "max_bullet_lines",
        "ellipsis_lines": "max_ellipsis_lines", "few_alphabetic_words": "min_alphabetic_words",
        "few_stop_words": "min_stop_words",
    }[rule]  # fmt: skip
    assert judged(GopherQuality(**{parameter: None}), [text])[0].get(0) != rule


def test_repetition_limits_can_be_changed_and_turned_off():
    twice = PROSE + "\n" + PROSE
    assert judged(GopherRepetition(), [twice, PROSE])[0] == {0: "duplicate_lines"}
    off = {"duplicate_lines": None, "duplicate_line_characters": None}
    assert judged(GopherRepetition(**off), [twice])[0] == {0: "duplicate_5_gram"}
    grams = {f"duplicate_{n}_gram": None for n in range(5, 10)}
    assert judged(GopherRepetition(**off, **grams), [twice])[0] == {0: "duplicate_10_gram"}
    assert judged(GopherRepetition(**off, **grams, duplicate_10_gram=0.6), [twice])[0] == {}


def test_c4_drops_lines_by_rule():
    good = [f"Sentence number {n} is here." for n in range(5)]
    bad = [
        "no end",
        "Enable JavaScript now please.",
        "See our privacy policy now.",
        "two words.",
        "x" * 1001 + " a b.",
    ]
    verdicts = C4Quality().judge(TextBatch(["\n".join(good + bad).encode()], [None]))
    assert verdicts.changed == {0: "\n".join(good).encode()}


def test_a_batch_gives_the_same_verdicts_as_single_documents():
    texts = web_texts()[:60]
    for stage in (GopherQuality(), GopherRepetition(), C4Quality(), FineWebQuality()):
        removed, changed = judged(stage, texts)
        alone = [judged(stage, [text]) for text in texts]
        assert removed == {n: verdict[0] for n, (verdict, _) in enumerate(alone) if verdict}
        assert changed == {n: change[0] for n, (_, change) in enumerate(alone) if change}
