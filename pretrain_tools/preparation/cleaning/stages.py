"""The stages of a cleaning, one after another, over the texts of a part.

A stage is a frozen, picklable dataclass whose fields are its numbers. `open` does what is costly once, in the main
process, before workers are forked, which share it; on Ray each worker opens its own.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pretrain_tools.preparation.cleaning.account import KEPT, CleaningAccount, Found

if TYPE_CHECKING:
    import numpy as np

    from pretrain_tools.preparation.cleaning.compiled.words import DividedTexts
    from pretrain_tools.preparation.cleaning.forms import Lines

BATCH_BYTES = 1 << 20
"""What stages see at once: what they make of it stays in the processor's cache, at little work for Python."""


@dataclass
class TextBatch:
    """Documents that no stage has removed yet. `urls`: None where --url_field is not given."""

    texts: list[bytes]
    urls: list[str | None]
    _joined: "tuple[np.ndarray, np.ndarray] | None" = None
    _divided: "DividedTexts | None" = None
    _forms: "np.ndarray | None" = None
    _lines: "Lines | None" = None

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def joined(self) -> "tuple[np.ndarray, np.ndarray]":
        """(text, bounds) as of text_blocks.joined_texts, once for all stages."""
        if self._joined is None:
            from pretrain_tools.preparation.cleaning.compiled.text_blocks import joined_texts

            self._joined = joined_texts(self.texts)
        return self._joined

    @property
    def divided(self) -> "DividedTexts":
        """The documents' words and lines, divided once for all stages that count them."""
        if self._divided is None:
            from pretrain_tools.preparation.cleaning.compiled.words import divided_texts

            self._divided = divided_texts(*self.joined)
        return self._divided

    @property
    def lines(self) -> "Lines":
        """The lines that are not blank."""
        if self._lines is None:
            from pretrain_tools.preparation.cleaning.forms import Lines

            self._lines = Lines.of(self.divided)
        return self._lines

    @property
    def forms(self) -> "np.ndarray":
        """(documents,): the form of each text, as it was before any stage changed it."""
        if self._forms is None:
            from pretrain_tools.preparation.cleaning.forms import forms_of

            self._forms = forms_of(self.divided, self.lines)
        return self._forms

    def after(
        self, removed: Container[int], changed: Mapping[int, bytes], left: "tuple[Lines, np.ndarray] | None" = None
    ) -> "TextBatch":
        """What stays when a stage has removed and changed documents by number. left: of Verdicts."""
        stay = [number for number in range(len(self)) if number not in removed]
        after = TextBatch([changed.get(number, self.texts[number]) for number in stay], [self.urls[n] for n in stay])
        if not changed:
            after._joined = self._joined and (self._joined[0], self._joined[1][stay])
            if self._divided is not None:
                after._divided, after._lines = self._divided.words_of(stay), self.lines.staying(None, stay)
        if self._forms is not None:
            after._forms = self._forms[stay]
        if left is not None:
            after._lines = left[0].staying(left[1], stay)
        return after


@dataclass
class Verdicts:
    """What a stage says of a batch, by the number of a document in it; of documents not named, that they stay."""

    removed: dict[int, str] = field(default_factory=dict)
    """{document: the rule that removes it, without the stage's name; '' where the stage has one rule only}."""
    measured: dict[int, tuple[float, float]] = field(default_factory=dict)
    """{document: the value that its rule measured, and the limit}, where the rule has one."""
    changed: dict[int, bytes] = field(default_factory=dict)
    """{document: its new text}; an empty one is removed by the rule `nothing_left`."""
    left: "tuple[Lines, np.ndarray] | None" = None
    """The lines of the texts and which of them stay, (lines,) bool, where a stage changes texts by nothing else."""
    counts: Counter[str] = field(default_factory=Counter)
    """Anything else to add up, under the stage's name, such as e-mail addresses replaced."""
    values: dict[str, Sequence[str]] = field(default_factory=dict)
    """{measure: its value for each document}, such as its language, for a histogram: few different ones."""
    found: dict[int, list[Found]] = field(default_factory=dict)
    """{document: what it holds of lists that the stage looks for, each once}."""


class CleaningStage(Protocol):
    """One step of a cleaning."""

    @property
    def label(self) -> str:
        """The name that the rules, changes and counts go by; no other stage of the cleaning has it."""

    def as_plan(self) -> dict[str, Any]:
        """Its name and all that decides its verdicts, for the manifest; files by hash, no absolute paths."""

    def open(self) -> Callable[[TextBatch], Verdicts]:
        """What judges batches. A verdict depends on the document alone."""


class Cleaned(NamedTuple):
    """The texts that stay, by number in what was given, and the account of all."""

    kept: list[int]
    texts: list[bytes]
    account: CleaningAccount


@dataclass(frozen=True)
class Cleaning:
    """The stages in order; each sees what those before it left."""

    stages: tuple[CleaningStage, ...]

    def as_plan(self) -> list[dict[str, Any]]:
        """What the manifest records, with all numbers written out."""
        return [stage.as_plan() for stage in self.stages]

    def preload(self) -> None:
        """Does what a stage can do before it is opened, in a thread beside other work of the start."""
        for stage in self.stages:
            if hasattr(stage, "preload"):
                stage.preload()

    @cached_property
    def opened(self) -> list[tuple[str, Callable[[TextBatch], Verdicts]]]:
        """(label, what judges) of each stage."""
        return [(stage.label, stage.open()) for stage in self.stages]

    def __getstate__(self) -> dict[str, Any]:
        return {"stages": self.stages}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)

    def clean(
        self, texts: Sequence[bytes], urls: Sequence[str | None], sources: Sequence[str], places: Sequence[int]
    ) -> Cleaned:
        """Runs all stages over documents. sources, places: where each comes from, for the account."""
        account, kept, left = CleaningAccount(), [], []
        for first, stop in _batches(texts):
            batch = TextBatch(list(texts[first:stop]), list(urls[first:stop]))
            stay, batch = self._clean(batch, sources[first:stop], places[first:stop], account)
            kept += [first + number for number in stay]
            left += batch.texts
        return Cleaned(kept, left, account)

    def _clean(
        self, batch: TextBatch, sources: Sequence[str], places: Sequence[int], account: CleaningAccount
    ) -> tuple[list[int], TextBatch]:
        """(numbers of the documents that stay, what is left of these)."""
        texts, kept = batch.texts, list(range(len(batch)))
        for label, judge in self.opened:
            if not kept:
                break
            verdicts = judge(batch)
            account.add_to_counts({f"{label}.{name}": number for name, number in verdicts.counts.items()})
            for measure, values in verdicts.values.items():
                account.add_values(measure, values)
            for number, found in verdicts.found.items():
                account.add_found(found, sources[kept[number]], places[kept[number]])
            removed = {number: f"{label}.{rule}" if rule else label for number, rule in verdicts.removed.items()}
            for number, text in verdicts.changed.items():
                if number in removed:
                    continue
                account.add_change(label, len(batch.texts[number]) - len(text))
                if not text:
                    removed[number] = f"{label}.nothing_left"
            by_rule: dict[str, list[int]] = {}
            for number, rule in removed.items():
                by_rule.setdefault(rule, []).append(number)
            for rule, numbers in by_rule.items():
                originals = [kept[number] for number in numbers]
                of_rule = ([values[n] for n in originals] for values in (sources, places, texts))
                account.add_documents(rule, *of_rule, [verdicts.measured.get(number) for number in numbers])
            if removed or verdicts.changed:
                batch = batch.after(removed, verdicts.changed, verdicts.left)
                kept = [original for number, original in enumerate(kept) if number not in removed]
        if kept:
            account.add_documents(KEPT, *([values[number] for number in kept] for values in (sources, places, texts)))
        account.add_domains(batch.texts, batch.urls)
        return kept, batch


def _batches(texts: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """(first, stop) of documents of BATCH_BYTES together, or one that is larger."""
    first = size = 0
    for number, text in enumerate(texts):
        if size and size + len(text) > BATCH_BYTES:
            yield first, number
            first, size = number, 0
        size += len(text)
    if first < len(texts):
        yield first, len(texts)
