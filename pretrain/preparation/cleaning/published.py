"""The filters of Gopher, C4 and FineWeb, by their published rules and numbers.

Gopher: Rae et al. 2021, https://arxiv.org/abs/2112.11446, A.1.1; C4: Raffel et al. 2020,
https://arxiv.org/abs/1910.10683, 2.2; FineWeb: Penedo et al. 2024, https://arxiv.org/abs/2406.17557, 3.6. Where the
papers leave it open, as datatrove has it, which made FineWeb.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from pretrain.preparation.cleaning.stages import TextBatch, Verdicts

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


def first_rules(rules: dict[str, np.ndarray]) -> dict[int, str]:
    """{document: the first rule that it breaks} of {rule: (documents,) bool}, in the order of the rules."""
    removed: dict[int, str] = {}
    for rule, broken in reversed(rules.items()):
        removed |= dict.fromkeys(np.flatnonzero(broken).tolist(), rule)
    return removed


def _exceeds(part: np.ndarray, whole: np.ndarray, most: float | None) -> np.ndarray:
    """Whether part / whole > most, as it is where nothing is a part of nothing: not."""
    if most is None:
        return np.zeros(len(part), bool)
    return part / np.maximum(whole, 1) > most


def _below(values: np.ndarray, least: float | None) -> np.ndarray:
    return np.zeros(len(values), bool) if least is None else values < least


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

    def open(self) -> Callable[[TextBatch], Verdicts]:
        from pretrain.preparation.cleaning.compiled.chunks import hash_of_bytes, word_tables
        from pretrain.preparation.cleaning.compiled.text_statistics import QUALITY, quality_statistics

        classes = word_tables().classes
        # A stop word has a letter.
        words = [word.encode() for word in dict.fromkeys(self.stop_words) if any(map(str.isalpha, word))]
        stop_words = np.array(list(map(hash_of_bytes, words)), np.uint64)

        def judge(batch: TextBatch) -> Verdicts:
            statistics = np.zeros((len(batch), len(QUALITY)), np.int64)
            text, bounds, _, *of_words = batch.divided
            quality_statistics(text, bounds, *of_words, classes, stop_words, self.min_stop_words or 0, statistics)
            return Verdicts(removed=first_rules(self._broken(dict(zip(QUALITY, statistics.T, strict=True)))))

        judge(TextBatch([b"compiled once, before workers are forked"], [None]))
        return judge

    def _broken(self, of: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Whether each rule is broken. of: (documents,) by measure."""
        words, length = of["words"], of["counted_characters"] / np.maximum(of["counted_words"], 1)
        return {
            "few_words": _below(of["counted_words"], self.min_words),
            "many_words": _exceeds(of["counted_words"], np.ones(1), self.max_words),
            "short_words": _below(length, self.min_word_length),
            "long_words": _exceeds(length, np.ones(1), self.max_word_length),
            "hashes": _exceeds(of["hashes"], words, self.max_symbols),
            "ellipses": _exceeds(of["ellipses"], words, self.max_symbols),
            "bullet_lines": _exceeds(of["bullet_lines"], of["lines"], self.max_bullet_lines),
            "ellipsis_lines": _exceeds(of["ellipsis_lines"], of["lines"], self.max_ellipsis_lines),
            "few_alphabetic_words": _below(of["alphabetic_words"] / np.maximum(words, 1), self.min_alphabetic_words),
            "few_stop_words": _below(of["stop_words"], self.min_stop_words),
        }


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

    def open(self) -> Callable[[TextBatch], Verdicts]:
        from pretrain.preparation.cleaning.compiled.chunks import word_tables
        from pretrain.preparation.cleaning.compiled.text_statistics import REPETITION_RULES, Scratch, repetitions

        classes = word_tables().classes
        given = (getattr(self, rule) for rule in REPETITION_RULES)
        limits = np.array([np.inf if limit is None else limit for limit in given], np.float64)
        scratch = Scratch()

        def judge(batch: TextBatch) -> Verdicts:
            divided, rules = batch.divided, np.zeros(len(batch), np.int64)
            words = int((divided.word_bounds[:, 1] - divided.word_bounds[:, 0]).max())
            repetitions(*divided[:5], classes, limits, scratch.tables(*batch.joined, words), rules)
            return Verdicts(removed={n: REPETITION_RULES[rule] for n, rule in enumerate(rules.tolist()) if rule >= 0})

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

    def open(self) -> Callable[[TextBatch], Verdicts]:
        from pretrain.preparation.cleaning.compiled.chunks import word_tables
        from pretrain.preparation.cleaning.compiled.text_statistics import LINE_MEASURES, Scratch, line_statistics
        from pretrain.preparation.cleaning.compiled.words import divided_texts

        classes, scratch = word_tables().classes, Scratch()

        def judge(batch: TextBatch) -> Verdicts:
            statistics = np.zeros((len(batch), len(LINE_MEASURES)), np.int64)
            tables = scratch.tables(*batch.joined)
            line_statistics(*batch.joined, classes, self.short_line_characters, tables, statistics)
            of = dict(zip(LINE_MEASURES, statistics.T, strict=True))
            # A chunk between spaces is a word at least: few documents must be divided to know that they have enough.
            words = of["chunks"].copy()
            doubtful = np.flatnonzero(_exceeds(of["newlines"], words, self.max_newlines_per_word))
            if len(doubtful):
                text, bounds = batch.joined
                bounds = divided_texts(text, bounds[doubtful]).word_bounds
                words[doubtful] = bounds[:, 1] - bounds[:, 0]
            rules = {
                "empty": of["lines"] == 0,
                "few_ending_lines": _below(of["ending_lines"] / np.maximum(of["lines"], 1), self.min_ending_lines),
                "short_lines": _exceeds(of["short_lines"], of["lines"], self.max_short_lines),
                "duplicate_characters": _exceeds(
                    of["duplicate_characters"], of["characters"], self.max_duplicate_characters
                ),
                "many_lines": _exceeds(of["newlines"], words, self.max_newlines_per_word),
            }
            return Verdicts(removed=first_rules(rules))

        judge(TextBatch([b"compiled once, before workers are forked"], [None]))
        return judge


@dataclass(frozen=True)
class C4Quality(NamedFilter):
    """C4's rules: lines without an end of a sentence, with few words, about policies; documents with few sentences.

    `citations`, `endings`, `placeholders` (lorem ipsum), `javascript`, `curly_brackets` and `policies` are on or off.
    """

    name: ClassVar[str] = "c4"
    min_sentences: int | None = 5
    min_words_per_line: int | None = 3
    max_word_characters: int | None = 1000
    endings: bool = True
    citations: bool = True
    placeholders: bool = True
    javascript: bool = True
    curly_brackets: bool = True
    policies: bool = True

    def open(self) -> Callable[[TextBatch], Verdicts]:
        from pretrain.preparation.cleaning.compiled.c4 import DOCUMENT_RULES, LINE_RULES, clean_lines
        from pretrain.preparation.cleaning.compiled.chunks import word_tables
        from pretrain.preparation.cleaning.compiled.text_blocks import PADDING

        largest = np.iinfo(np.int64).max
        numbers = np.array(
            [
                self.min_sentences or 0,
                self.min_words_per_line or 0,
                largest if self.max_word_characters is None else self.max_word_characters,
            ],
            np.int64,
        )
        named = (self.endings, self.citations, self.placeholders, self.javascript, self.curly_brackets, self.policies)
        switches = np.array(named)
        tables = word_tables()

        def judge(batch: TextBatch) -> Verdicts:
            text, bounds = batch.joined
            left, rules = np.empty(len(text) + len(batch), np.uint8), np.zeros(len(batch), np.int64)
            longest = max(map(len, batch.texts)) + PADDING
            scratch = np.empty((longest, 3), np.int32), np.empty(longest, np.uint64), np.empty(3, np.int64)
            left_bounds, counts = np.zeros_like(bounds), np.zeros(len(LINE_RULES), np.int64)
            clean_lines(text, bounds, tables, numbers, switches, left, left_bounds, scratch, rules, counts)
            verdicts = Verdicts(removed={n: DOCUMENT_RULES[rule] for n, rule in enumerate(rules.tolist()) if rule})
            for number, (start, end) in enumerate(left_bounds.tolist()):
                if not rules[number] and (changed := left[start:end].tobytes()) != batch.texts[number]:
                    verdicts.changed[number] = changed
            for rule, count in zip(LINE_RULES, counts.tolist(), strict=True):
                verdicts.counts[f"lines.{rule}"] += count
            return verdicts

        judge(TextBatch([b"compiled once, before workers are forked"], [None]))
        return judge
