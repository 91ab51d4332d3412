"""The filters of Gopher, C4 and FineWeb, by their published rules and numbers.

Gopher: Rae et al. 2021, https://arxiv.org/abs/2112.11446, A.1.1; C4: Raffel et al. 2020,
https://arxiv.org/abs/1910.10683, 2.2; FineWeb: Penedo et al. 2024, https://arxiv.org/abs/2406.17557, 3.6. Where the
papers leave it open, as datatrove has it, which made FineWeb, but that words are what stands between spaces.

The rules were made for web pages. With `by_form`, the default, each rule judges only texts of the forms that it fits.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from pretrain_tools.preparation.cleaning.stages import TextBatch, Verdicts

if TYPE_CHECKING:
    from pretrain_tools.preparation.cleaning.forms import Lines

BULLETS = (ord("-"), ord("•"))
CITATION = re.compile(rb"\[(?:\d*|edit|citation needed)\]")
ENDINGS = b".?!\"'"
"""Of a line that stays under C4's rule of endings."""
STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")


class NamedFilter:
    """A filter of the registry: its label is its name, and its fields are what the manifest records."""

    name: ClassVar[str]

    @property
    def label(self) -> str:
        return self.name

    def as_plan(self) -> dict[str, Any]:
        values = asdict(self)
        return {"name": self.name, **{name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}}


class Rule(NamedTuple):
    """One rule: what it measures of each document, and the limit, beyond which it removes the document."""

    name: str
    values: np.ndarray
    """(documents,)"""
    limit: float | None
    """None: the rule is off."""
    is_least: bool = False
    """Whether smaller values are removed; else larger ones."""
    fits: np.ndarray | None = None
    """(documents,) bool: those that it is meant for; None for all."""

    @property
    def broken(self) -> np.ndarray:
        """(documents,) bool"""
        if self.limit is None:
            return np.zeros(len(self.values), bool)
        beyond = self.values < self.limit if self.is_least else self.values > self.limit
        return beyond if self.fits is None else beyond & self.fits


def verdicts_of(rules: Sequence[Rule]) -> Verdicts:
    """Each document is removed by the first rule that it breaks."""
    verdicts = Verdicts()
    for rule in reversed(rules):
        for number in np.flatnonzero(rule.broken).tolist():
            verdicts.removed[number] = rule.name
            verdicts.measured[number] = float(rule.values[number]), float(rule.limit)
    return verdicts


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """0 where nothing is a part of nothing."""
    return part / np.maximum(whole, 1)


@dataclass(frozen=True)
class GopherQuality(NamedFilter):
    """Gopher's rules of quality. Shares are of words or lines; None switches a rule off."""

    name: ClassVar[str] = "gopher_quality"
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

    def open(self) -> Callable[[TextBatch], Verdicts]:
        from pretrain_tools.preparation.cleaning.compiled import words
        from pretrain_tools.preparation.cleaning.compiled.text_blocks import joined_texts
        from pretrain_tools.preparation.cleaning.compiled.text_statistics import different_words
        from pretrain_tools.preparation.cleaning.compiled.words import divided_texts
        from pretrain_tools.preparation.cleaning.forms import CODE

        stop_words = divided_texts(*joined_texts([" ".join(self.stop_words).encode()])).hashes

        def judge(batch: TextBatch) -> Verdicts:
            divided, lines = batch.divided, batch.lines
            counted, characters, alphabetic = divided.totals.T
            found = np.zeros(len(batch), np.int64)
            if self.min_stop_words:
                different_words(divided.hashes, divided.word_bounds, stop_words, self.min_stop_words, found)
            bullets = np.isin(lines.column(words.FIRST_CODE), BULLETS)
            prose = batch.forms < CODE if self.by_form else np.ones(len(batch), bool)
            rules = [
                Rule("few_words", counted, self.min_words, is_least=True),
                Rule("many_words", counted, self.max_words),
                Rule("short_words", _share(characters, counted), self.min_word_length, is_least=True),
                Rule("long_words", _share(characters, counted), self.max_word_length),
                Rule("hashes", _share(lines.totals(lines.column(words.HASHES)), counted), self.max_symbols),
                Rule("ellipses", _share(lines.totals(lines.column(words.ELLIPSES)), counted), self.max_symbols),
                Rule("bullet_lines", _share(lines.totals(bullets), lines.counts), self.max_bullet_lines),
                Rule(
                    "ellipsis_lines", _share(lines.totals(lines.ends_in_dots), lines.counts), self.max_ellipsis_lines
                ),
                Rule("few_alphabetic_words", _share(alphabetic, counted), self.min_alphabetic_words, is_least=True),
                Rule("few_stop_words", found, self.min_stop_words, is_least=True),
            ]
            return verdicts_of([rule._replace(fits=prose) for rule in rules])

        judge(TextBatch([b"compiled once, before workers are forked"], [None]))
        return judge


@dataclass(frozen=True)
class GopherRepetition(NamedFilter):
    """Gopher's rules of repetition: the largest share of lines, or of characters, that may be repeated."""

    name: ClassVar[str] = "gopher_repetition"
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

    def open(self) -> Callable[[TextBatch], Verdicts]:
        from pretrain_tools.preparation.cleaning.compiled.text_statistics import GRAM_RULES, Scratch, repetitions
        from pretrain_tools.preparation.cleaning.forms import CODE, PARAGRAPHS, TABLE

        given = (getattr(self, rule) for rule in GRAM_RULES)
        limits = np.array([np.inf if limit is None else limit for limit in given], np.float64)
        scratch = Scratch()

        def judge(batch: TextBatch) -> Verdicts:
            divided, lines, blocks = batch.divided, batch.lines, batch.lines.blocks
            forms = batch.forms if self.by_form else np.zeros(len(batch), np.int64)
            total, prose = lines.characters + lines.counts - 1, forms < CODE
            (block_count, block_characters), (line_count, line_characters) = blocks.repeated, lines.repeated
            verdicts = verdicts_of([
                Rule("duplicate_paragraphs", _share(block_count, blocks.counts), self.duplicate_paragraphs,
                     fits=forms == PARAGRAPHS),
                Rule("duplicate_paragraph_characters", _share(block_characters, total),
                     self.duplicate_paragraph_characters, fits=prose),
                Rule("duplicate_lines", _share(line_count, lines.counts), self.duplicate_lines,
                     fits=forms == PARAGRAPHS),
                Rule("duplicate_line_characters", _share(line_characters, total), self.duplicate_line_characters,
                     fits=(forms == PARAGRAPHS) | (forms == TABLE)),
            ])  # fmt: skip
            broken, values = np.full(len(batch), -1), np.zeros(len(batch))
            skipped = forms == CODE
            skipped[list(verdicts.removed)] = True
            repetitions(divided.lengths, divided.hashes, divided.word_bounds, total, limits, skipped,
                        scratch.tables(divided.word_bounds), broken, values)  # fmt: skip
            for number in np.flatnonzero(broken >= 0).tolist():
                verdicts.removed[number] = GRAM_RULES[broken[number]]
                verdicts.measured[number] = float(values[number]), float(limits[broken[number]])
            return verdicts

        judge(TextBatch([b"compiled once, before workers are forked"], [None]))
        return judge


@dataclass(frozen=True)
class FineWebQuality(NamedFilter):
    """FineWeb's rules of quality. Shares are of lines that are not blank, or of characters."""

    name: ClassVar[str] = "fineweb"
    min_ending_lines: float | None = 0.12
    max_short_lines: float | None = 0.67
    short_line_characters: int = 30
    max_duplicate_characters: float | None = 0.01
    max_newlines_per_word: float | None = 0.3

    by_form: bool = True

    def open(self) -> Callable[[TextBatch], Verdicts]:
        from pretrain_tools.preparation.cleaning.compiled import words
        from pretrain_tools.preparation.cleaning.forms import CODE, LINES, PARAGRAPHS

        def judge(batch: TextBatch) -> Verdicts:
            lines, blocks = batch.lines, batch.lines.blocks
            forms = batch.forms if self.by_form else np.zeros(len(batch), np.int64)
            is_set, is_page, prose = forms == LINES, forms == PARAGRAPHS, forms < CODE
            count = np.where(is_set, blocks.counts, lines.counts)
            ending = np.where(is_set, blocks.totals(blocks.ends_sentence), lines.totals(lines.ends_sentence))
            short = lines.totals(lines.column(words.CHARACTERS) <= self.short_line_characters)
            newlines = _share(lines.counts - 1, lines.totals(lines.column(words.WORDS)))
            return verdicts_of([
                Rule("empty", lines.counts, 1, is_least=True),
                Rule("few_ending_lines", _share(ending, count), self.min_ending_lines, is_least=True, fits=prose),
                Rule("short_lines", _share(short, lines.counts), self.max_short_lines, fits=is_page),
                Rule("duplicate_characters", _share(lines.repeated[1], lines.characters),
                     self.max_duplicate_characters, fits=is_page),
                Rule("many_lines", newlines, self.max_newlines_per_word, fits=is_page),
            ])  # fmt: skip

        judge(TextBatch([b"compiled once, before workers are forked"], [None]))
        return judge


@dataclass(frozen=True)
class C4Quality(NamedFilter):
    """C4's rules: lines without an end of a sentence, with few words, about policies; documents with few sentences.

    `citations`, `endings`, `placeholders` (lorem ipsum), `javascript` and `policies` are on or off;
    `max_curly_brackets` is a share of the words.
    """

    name: ClassVar[str] = "c4"
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

    def open(self) -> Callable[[TextBatch], Verdicts]:
        from pretrain_tools.preparation.cleaning.compiled import words
        from pretrain_tools.preparation.cleaning.compiled.text_statistics import mark_brackets
        from pretrain_tools.preparation.cleaning.forms import CODE, PARAGRAPHS

        def judge(batch: TextBatch) -> Verdicts:
            forms = batch.forms if self.by_form else np.zeros(len(batch), np.int64)
            is_page, prose = forms == PARAGRAPHS, forms < CODE
            cited: dict[int, bytes] = {}
            if self.citations:
                marks = np.zeros(len(batch), bool)
                mark_brackets(*batch.joined, marks)
                for number in np.flatnonzero(prose & marks).tolist():
                    without = CITATION.sub(b"", batch.texts[number])
                    if without != batch.texts[number]:
                        cited[number] = without
            lines = batch.lines
            if cited:
                lines = lines.replaced(list(cited), TextBatch(list(cited.values()), []).lines)
            dropped, lorem, brackets = self._lines(lines)
            stays, before, counts = np.ones(len(lines.document), bool), {}, {}
            for rule, goes in dropped.items():
                before[rule] = stays.copy()
                goes &= stays & is_page[lines.document]
                stays &= ~goes
                counts[f"lines.{rule}"] = int(np.count_nonzero(goes))
            lorem, brackets = lines.totals(lorem * before["javascript"]), lines.totals(brackets * before["policy"])
            sentences = lines.totals(lines.column(words.SENTENCES) * stays)
            share = _share(brackets, lines.totals(lines.column(words.WORDS)))
            verdicts = verdicts_of([
                Rule("lorem_ipsum", lorem, 0 if self.placeholders else None, fits=prose),
                Rule("curly_bracket", share, self.max_curly_brackets, fits=is_page),
                Rule("few_sentences", sentences, self.min_sentences, is_least=True, fits=prose),
            ])  # fmt: skip
            verdicts.left = lines, stays
            verdicts.counts.update({rule: count for rule, count in counts.items() if count})
            joined = lines.joined(stays)
            for number, before in enumerate(batch.texts):
                text = joined[number] if is_page[number] else cited.get(number, before)
                if number not in verdicts.removed and text != before:
                    verdicts.changed[number] = text
            return verdicts

        judge(TextBatch([b"compiled once, before workers are forked"], [None]))
        return judge

    def _lines(self, lines: "Lines") -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
        """({rule: lines that it drops}, how often "lorem ipsum" and curly brackets stand in each); all (lines,)."""
        from pretrain_tools.preparation.cleaning.compiled import words
        from pretrain_tools.preparation.cleaning.compiled.text_statistics import PHRASE_TABLE, PHRASES, count_phrases

        found = np.zeros((len(lines.document), len(PHRASES)), np.int64)
        count_phrases(lines.text, lines.column(words.START), lines.column(words.STOP), *PHRASE_TABLE, found)
        javascript, policy, lorem, brackets = found.T
        most = np.inf if self.max_word_characters is None else self.max_word_characters
        none = np.zeros(len(lines.document), bool)
        dropped = {
            "long_word": lines.column(words.LONGEST_WORD) > most,
            "no_end": ~np.isin(lines.last_bytes, list(ENDINGS)) | lines.ends_in_dots if self.endings else none.copy(),
            "few_words": lines.column(words.WORDS) < (self.min_words_per_line or 0),
            "javascript": self.javascript & (javascript > 0),
            "policy": self.policies & (policy > 0),
        }
        return dropped, lorem, brackets
