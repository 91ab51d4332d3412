"""Gopher, C4 and FineWeb filters, with their published parameters.

Gopher: Rae et al. 2021, https://arxiv.org/abs/2112.11446, A.1.1. C4: Raffel et al. 2020,
https://arxiv.org/abs/1910.10683, 2.2. FineWeb: Penedo et al. 2024, https://arxiv.org/abs/2406.17557, 3.6. Details that
the papers don't specify follow datatrove, except that words are split at spaces.

The rules were designed for web pages. If `by_form` is True, each rule applies only to suitable document types.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from pretrain_tools.preparation.cleaning.document_types import CODE, LINES, PARAGRAPHS, TABLE
from pretrain_tools.preparation.cleaning.stages import CleaningStage, TextBatch, Verdicts

if TYPE_CHECKING:
    from pretrain_tools.preparation.cleaning.forms import Lines

BULLETS = (ord("-"), ord("•"))
CITATION = re.compile(rb"\[(?:\d*|edit|citation needed)\]")
ENDINGS = b".?!\"'"
"""Bytes that lines must end with (C4's rule `endings`)."""
DOTS = (b"...", "…".encode())
STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
POLICIES = (
    b"cookie policy", b"privacy policy", b"terms of use", b"use cookies", b"use of cookies", b"uses cookies",
)  # fmt: skip
PHRASES = (*POLICIES, b"javascript", b"lorem ipsum", b"{")
"""Phrases that the C4 rules search for."""


class Rule(NamedTuple):
    """A rule that limits a measured value."""

    name: str
    values: np.ndarray
    """(documents,)"""
    limit: float | None
    """None turns the rule off."""
    fits: np.ndarray | bool = True
    """(documents,) bool: documents that the rule applies to; True for all."""
    is_least: bool = False
    """True if the limit is a minimum, False if it is a maximum."""

    @property
    def broken(self) -> np.ndarray:
        """(documents,) bool: True for documents that violate the rule."""
        limit = _or_nan(self.limit)
        return (self.values < limit if self.is_least else self.values > limit) & self.fits


def _or_nan(limits: float | list[float | None] | None) -> np.ndarray:
    """Converts limits to an array. None becomes NaN, which nothing exceeds."""
    return np.array(limits, np.float64)


def verdicts_of(rules: Sequence[Rule]) -> Verdicts:
    """Removes all documents that violate a rule, and records the first rule that each violates."""
    verdicts = Verdicts()
    for rule in reversed(rules):
        for number in np.flatnonzero(rule.broken).tolist():
            verdicts.removed[number] = rule.name
            verdicts.measured[number] = float(rule.values[number]), float(rule.limit)
    return verdicts


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Divides elementwise, with 0 / 0 = 0."""
    return part / np.maximum(whole, 1)


class _ByForm(CleaningStage):
    """Base class of the published filters."""

    by_form: bool = True

    def forms(self, batch: TextBatch) -> np.ndarray:
        """Returns (documents,) types. If `by_form` is False, all documents are web pages."""
        return batch.forms if self.by_form else np.full(len(batch), PARAGRAPHS)


@dataclass(frozen=True)
class GopherQuality(_ByForm):
    """Gopher's quality rules. None turns a rule off."""

    label: ClassVar[str] = "gopher_quality"
    min_words: int | None = 50
    max_words: int | None = 100_000
    min_word_length: float | None = 3
    max_word_length: float | None = 10
    max_symbols: float | None = 0.1
    max_bullet_lines: float | None = 0.9
    max_ellipsis_lines: float | None = 0.3
    min_alphabetic_words: float | None = 0.8
    min_stop_words: int | None = 2
    stop_words: tuple[str, ...] = STOP_WORDS
    by_form: bool = True

    def judge(self, batch: TextBatch) -> Verdicts:
        stop_words = TextBatch([" ".join(self.stop_words).encode()], [None]).divided.hashes
        divided = batch.divided
        lines = batch.lines
        words, characters, alphabetic = divided.totals.T
        found = np.zeros(len(batch), np.int64)
        for stop_word in np.unique(stop_words):
            places = np.flatnonzero(divided.hashes == stop_word)
            found[np.unique(np.searchsorted(divided.word_bounds[:, 1], places, "right"))] += 1
        length = _share(characters, words)
        hash_signs = _share(np.array([text.count(b"#") for text in batch.texts]), words)
        ellipses = _share(np.array([sum(map(text.count, DOTS)) for text in batch.texts]), words)
        bullets = _share(lines.totals(np.isin(lines.table["first_code"], BULLETS)), lines.counts)
        dots = _share(lines.totals(lines.ends_in_dots), lines.counts)
        rules = [
            Rule("few_words", words, self.min_words, is_least=True),
            Rule("many_words", words, self.max_words),
            Rule("short_words", length, self.min_word_length, is_least=True),
            Rule("long_words", length, self.max_word_length),
            Rule("hashes", hash_signs, self.max_symbols),
            Rule("ellipses", ellipses, self.max_symbols),
            Rule("bullet_lines", bullets, self.max_bullet_lines),
            Rule("ellipsis_lines", dots, self.max_ellipsis_lines),
            Rule("few_alphabetic_words", _share(alphabetic, words), self.min_alphabetic_words, is_least=True),
            Rule("few_stop_words", found, self.min_stop_words, is_least=True),
        ]
        prose = self.forms(batch) <= LINES
        return verdicts_of([rule._replace(fits=prose) for rule in rules])


@dataclass(frozen=True)
class GopherRepetition(_ByForm):
    """Gopher's repetition rules. Each limit is a maximum share of lines, paragraphs or characters."""

    label: ClassVar[str] = "gopher_repetition"
    duplicate_paragraphs: float | None = 0.3
    duplicate_paragraph_characters: float | None = 0.2
    duplicate_lines: float | None = 0.3
    duplicate_line_characters: float | None = 0.2
    top_2_gram: float | None = 0.2
    top_3_gram: float | None = 0.18
    top_4_gram: float | None = 0.16
    duplicate_5_gram: float | None = 0.15
    duplicate_6_gram: float | None = 0.14
    duplicate_7_gram: float | None = 0.13
    duplicate_8_gram: float | None = 0.12
    duplicate_9_gram: float | None = 0.11
    duplicate_10_gram: float | None = 0.10
    by_form: bool = True

    def judge(self, batch: TextBatch) -> Verdicts:
        from pretrain_tools.preparation.cleaning.compiled import GRAM_RULES, repetitions

        limits = _or_nan([getattr(self, rule) for rule in GRAM_RULES])
        divided = batch.divided
        lines = batch.lines
        blocks = lines.blocks
        forms = self.forms(batch)
        page = forms == PARAGRAPHS
        total = lines.characters + lines.counts - 1
        of_blocks, in_blocks = blocks.repeated
        of_lines, in_lines = lines.repeated
        verdicts = verdicts_of(
            [
                Rule("duplicate_paragraphs", _share(of_blocks, blocks.counts), self.duplicate_paragraphs, page),
                Rule(
                    "duplicate_paragraph_characters",
                    _share(in_blocks, total),
                    self.duplicate_paragraph_characters,
                    forms <= LINES,
                ),
                Rule("duplicate_lines", _share(of_lines, lines.counts), self.duplicate_lines, page),
                Rule(
                    "duplicate_line_characters",
                    _share(in_lines, total),
                    self.duplicate_line_characters,
                    page | (forms == TABLE),
                ),
            ]
        )
        skipped = forms == CODE
        skipped[list(verdicts.removed)] = True
        broken = np.full(len(batch), -1)
        values = np.zeros(len(batch))
        repetitions(divided.lengths, divided.hashes, divided.word_bounds, total, limits, skipped, broken, values)
        for number in np.flatnonzero(broken >= 0).tolist():
            verdicts.removed[number] = GRAM_RULES[broken[number]]
            verdicts.measured[number] = float(values[number]), float(limits[broken[number]])
        return verdicts


@dataclass(frozen=True)
class FineWebQuality(_ByForm):
    """FineWeb's quality rules."""

    label: ClassVar[str] = "fineweb"
    min_ending_lines: float | None = 0.12
    max_short_lines: float | None = 0.67
    short_line_characters: int = 30
    max_duplicate_characters: float | None = 0.01
    max_newlines_per_word: float | None = 0.3
    by_form: bool = True

    def judge(self, batch: TextBatch) -> Verdicts:
        lines = batch.lines
        blocks = lines.blocks
        forms = self.forms(batch)
        page = forms == PARAGRAPHS
        by_line = _share(lines.totals(lines.ends_sentence), lines.counts)
        by_block = _share(blocks.totals(blocks.ends_sentence), blocks.counts)
        ending = np.where(forms == LINES, by_block, by_line)
        short = _share(lines.totals(lines.table["characters"] <= self.short_line_characters), lines.counts)
        duplicate = _share(lines.repeated[1], lines.characters)
        newlines = _share(lines.counts - 1, lines.totals("words"))
        return verdicts_of(
            [
                Rule("empty", lines.counts, 1, is_least=True),
                Rule("few_ending_lines", ending, self.min_ending_lines, forms <= LINES, is_least=True),
                Rule("short_lines", short, self.max_short_lines, page),
                Rule("duplicate_characters", duplicate, self.max_duplicate_characters, page),
                Rule("many_lines", newlines, self.max_newlines_per_word, page),
            ]
        )


@dataclass(frozen=True)
class C4Quality(_ByForm):
    """C4's rules, which remove lines, citation marks such as [1], and whole documents.

    `max_curly_brackets` is the maximum number of opening curly brackets per word.
    """

    label: ClassVar[str] = "c4"
    min_sentences: int | None = 5
    min_words_per_line: int | None = 3
    max_word_characters: int | None = 1000
    endings: bool = True
    citations: bool = True
    placeholders: bool = True
    javascript: bool = True
    max_curly_brackets: float | None = 0
    policies: bool = True
    by_form: bool = True

    def judge(self, batch: TextBatch) -> Verdicts:
        forms = self.forms(batch)
        prose = forms <= LINES
        is_page = forms == PARAGRAPHS
        texts = batch.texts
        if self.citations:
            cited = zip(batch.texts, prose, strict=True)
            texts = [CITATION.sub(b"", text) if is_prose else text for text, is_prose in cited]
        lines = batch.lines if texts == batch.texts else TextBatch(texts, batch.urls).lines
        table = lines.table
        document = table["document"]
        found = phrases_in(lines, prose[document])
        too_long = table["longest_word"] > _or_nan(self.max_word_characters)
        no_end = self.endings & (~np.isin(lines.last_bytes, list(ENDINGS)) | lines.ends_in_dots)
        few_words = table["words"] < _or_nan(self.min_words_per_line)
        page = is_page[document]
        stays = ~(page & (too_long | no_end | few_words))
        # As in C4, count these before the rules `javascript` and `policies`, respectively, remove lines.
        lorem = lines.totals(found[b"lorem ipsum"] * stays)
        stays &= ~(page & self.javascript & (found[b"javascript"] > 0))
        curly = _share(lines.totals(found[b"{"] * stays), lines.totals("words"))
        stays &= ~(page & self.policies & (sum(found[phrase] for phrase in POLICIES) > 0))
        sentences = lines.totals(table["sentences"] * stays)
        verdicts = verdicts_of(
            [
                Rule("lorem_ipsum", lorem, 0 if self.placeholders else None, prose),
                Rule("curly_bracket", curly, self.max_curly_brackets, is_page),
                Rule("few_sentences", sentences, self.min_sentences, prose, is_least=True),
            ]
        )
        joined = lines.joined(stays)
        for number, text in enumerate(batch.texts):
            new = joined[number] if is_page[number] else texts[number]
            if number not in verdicts.removed and new != text:
                verdicts.changed[number] = new
        return verdicts


def phrases_in(lines: "Lines", looked_at: np.ndarray) -> dict[bytes, np.ndarray]:
    """Counts PHRASES per line, ignoring case. Returns {phrase: (lines,)}. looked_at: (lines,) bool, what to search."""
    lower = lines.text.tobytes().lower()
    found = {}
    for phrase in PHRASES:
        places = np.array([match.start() for match in re.finditer(re.escape(phrase), lower)], np.int64)
        line = np.searchsorted(lines.table["start"], places, "right") - 1
        # Ignore matches that extend beyond the line.
        line = line[places + len(phrase) <= lines.table["stop"].take(line, mode="clip")]
        found[phrase] = np.bincount(line, minlength=len(lines.table)) * looked_at
    return found
