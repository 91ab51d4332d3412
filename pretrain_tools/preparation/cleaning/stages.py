"""Runs cleaning stages one after another over the texts of a part.

A stage is a frozen, picklable dataclass whose fields are its parameters. `open` does the costly work once in the main
process, and forked workers share the result. On Ray, each worker calls `open` itself.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pretrain_tools.preparation.cleaning.account import KEPT, CleaningAccount, Found, add_numbers

if TYPE_CHECKING:
    import numpy as np

    from pretrain_tools.preparation.cleaning.compiled import DividedTexts
    from pretrain_tools.preparation.cleaning.forms import Lines

BATCH_BYTES = 1 << 20
"""Bytes per batch, so that intermediate arrays stay in the CPU cache."""


@dataclass
class TextBatch:
    """Documents that no stage has removed yet. Results that stages share are computed once."""

    texts: list[bytes]
    urls: list[str | None]
    """URLs; None without --url_field."""

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def divided(self) -> "DividedTexts":
        """The documents' words and lines."""
        from pretrain_tools.preparation.cleaning.compiled import divided_texts

        return divided_texts(self.texts)

    @cached_property
    def lines(self) -> "Lines":
        """The nonblank lines."""
        from pretrain_tools.preparation.cleaning.forms import Lines

        return Lines(self.divided.text, self.divided.lines, len(self))

    @cached_property
    def forms(self) -> "np.ndarray":
        """(documents,) form of each text, before any stage changed it."""
        from pretrain_tools.preparation.cleaning.forms import forms_of

        return forms_of(self.divided, self.lines)

    def after(self, stay: list[int], verdicts: "Verdicts") -> "TextBatch":
        """Returns the kept documents with their new texts."""
        texts = [verdicts.changed.get(number, self.texts[number]) for number in stay]
        after = TextBatch(texts, [self.urls[number] for number in stay])
        if "forms" in self.__dict__:
            after.forms = self.forms[stay]
        return after


@dataclass
class Verdicts:
    """A stage's decisions on a batch, by document number in the batch. All other documents stay unchanged."""

    removed: dict[int, str] = field(default_factory=dict)
    """{document: rule that removes it, without the stage's name; '' if the stage has only one rule}."""
    measured: dict[int, tuple[float, float]] = field(default_factory=dict)
    """{document: measured value and limit}, for rules with a limit."""
    changed: dict[int, bytes] = field(default_factory=dict)
    """{document: new text}. The rule `nothing_left` removes empty ones."""
    counts: Counter[str] = field(default_factory=Counter)
    """Other counters in the stage, such as replaced e-mail addresses."""
    values: dict[str, Sequence[str]] = field(default_factory=dict)
    """{measure: value for each document}, such as the language, for a histogram. Use few distinct values."""
    found: dict[int, list[Found]] = field(default_factory=dict)
    """{document: list entries found in it, each once}."""


Judge = Callable[[TextBatch], Verdicts]


class CleaningStage(Protocol):
    """One step of cleaning."""

    is_compiled: bool
    """True if it calls kernels, which must be compiled before workers are forked."""

    @property
    def label(self) -> str:
        """The stage's unique name in rules, changes and counts."""

    def as_plan(self) -> dict[str, Any]:
        """Returns the manifest's record: the name and everything that affects verdicts. Files by hash, no paths."""

    def open(self) -> Judge:
        """Returns a function that judges batches. A verdict must depend only on the document."""


class Cleaned(NamedTuple):
    """The kept texts, their numbers in the input, and the account of all texts."""

    kept: list[int]
    texts: list[bytes]
    account: CleaningAccount


@dataclass(frozen=True)
class Cleaning:
    """Stages in order. Each stage gets the documents left by the previous ones."""

    stages: tuple[CleaningStage, ...]

    def as_plan(self) -> list[dict[str, Any]]:
        """Returns the manifest's record, with all parameters."""
        return [stage.as_plan() for stage in self.stages]

    @cached_property
    def opened(self) -> list[tuple[str, Judge]]:
        """(label, judge) for each stage, compiled."""
        opened = [(stage.label, stage.open()) for stage in self.stages]
        for stage, (_, judge) in zip(self.stages, opened, strict=True):
            if stage.is_compiled:
                judge(TextBatch([b"compiled once, before workers are forked"], [None]))
        return opened

    def __getstate__(self) -> dict[str, Any]:
        return {"stages": self.stages}

    def clean(
        self, texts: Sequence[bytes], urls: Sequence[str | None], sources: Sequence[str], places: Sequence[int]
    ) -> Cleaned:
        """Runs all stages over documents. sources, places: each document's origin, for the account."""
        account = CleaningAccount()
        kept = []
        left = []
        for first, stop in batches(texts):
            batch = TextBatch(list(texts[first:stop]), list(urls[first:stop]))
            stay, batch = self._clean(batch, sources[first:stop], places[first:stop], account)
            kept += [first + number for number in stay]
            left += batch.texts
        return Cleaned(kept, left, account)

    def _clean(
        self, batch: TextBatch, sources: Sequence[str], places: Sequence[int], account: CleaningAccount
    ) -> tuple[list[int], TextBatch]:
        """Returns (numbers of the kept documents, batch of their new texts)."""
        texts = batch.texts
        kept = list(range(len(batch)))
        for label, judge in self.opened:
            if not kept:
                break
            verdicts = judge(batch)
            add_numbers(account.counts, {f"{label}.{name}": number for name, number in verdicts.counts.items()})
            add_numbers(account.histograms, {name: Counter(values) for name, values in verdicts.values.items()})
            for number, found in verdicts.found.items():
                account.add_found(found, sources[kept[number]], places[kept[number]])
            removed = {number: f"{label}.{rule}" if rule else label for number, rule in verdicts.removed.items()}
            for number, text in verdicts.changed.items():
                if number not in removed:
                    fewer = len(batch.texts[number]) - len(text)
                    add_numbers(account.changed, {label: {"documents": 1, "fewer_bytes": fewer}})
                    if not text:
                        removed[number] = f"{label}.nothing_left"
            for number, rule in removed.items():
                place = kept[number]
                account.add_document(rule, sources[place], places[place], texts[place], verdicts.measured.get(number))
            if removed or verdicts.changed:
                stay = [number for number in range(len(batch)) if number not in removed]
                batch = batch.after(stay, verdicts)
                kept = [kept[number] for number in stay]
        for place in kept:
            account.add_document(KEPT, sources[place], places[place], texts[place])
        account.add_domains(batch.texts, batch.urls)
        return kept, batch


def batches(texts: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """Yields (first, stop) of batches with up to BATCH_BYTES, or with one larger document."""
    first = size = 0
    for number, text in enumerate(texts):
        if number > first and size + len(text) > BATCH_BYTES:
            yield first, number
            first = number
            size = 0
        size += len(text)
    if first < len(texts):
        yield first, len(texts)
