"""Runs the cleaning stages on documents."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from pretrain_tools.preparation.cleaning.account import KEPT, CleaningAccount, add_numbers

# These modules import numpy and numba, which are slow.
if TYPE_CHECKING:
    import numpy as np

    from pretrain_tools.preparation.cleaning.compiled import DividedTexts
    from pretrain_tools.preparation.cleaning.forms import Lines
    from pretrain_tools.preparation.documents.records import Record

BATCH_BYTES = 1 << 20
"""Batch size in bytes. Intermediate arrays of this size fit in the CPU cache."""


@dataclass
class TextBatch:
    """A batch of documents. Intermediate results are cached, because several stages use them."""

    texts: list[bytes]
    urls: list[str | None]
    """Document URLs; None without --url_field."""

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def divided(self) -> "DividedTexts":
        """The documents' words and lines."""
        from pretrain_tools.preparation.cleaning.compiled import divided_texts

        return divided_texts(self.texts)

    @cached_property
    def lines(self) -> "Lines":
        """The documents' nonblank lines."""
        from pretrain_tools.preparation.cleaning.forms import Lines

        return Lines(self.divided.text, self.divided.lines, len(self))

    @cached_property
    def forms(self) -> "np.ndarray":
        """(documents,) type of each document, detected before any changes: PARAGRAPHS, LINES, CODE or TABLE."""
        from pretrain_tools.preparation.cleaning.forms import forms_of

        return forms_of(self.divided, self.lines)

    def after(self, stay: list[int], verdicts: "Verdicts") -> "TextBatch":
        """Returns a batch of the kept documents with their new text. stay: their indices in this batch."""
        texts = [verdicts.changed.get(number, self.texts[number]) for number in stay]
        after = TextBatch(texts, [self.urls[number] for number in stay])
        if "forms" in self.__dict__:
            after.forms = self.forms[stay]
        return after


@dataclass
class Verdicts:
    """A stage's decisions for a batch. Keys are document indices. Documents without an entry are kept unchanged."""

    removed: dict[int, str] = field(default_factory=dict)
    """{document: name of the rule that removes it; '' if the stage has only one rule}."""
    measured: dict[int, tuple[float, float]] = field(default_factory=dict)
    """{removed document: measured value and limit}, for rules with a limit."""
    changed: dict[int, bytes] = field(default_factory=dict)
    """{document: new text}. If it is empty, the document is removed by the rule `nothing_left`."""
    values: dict[str, Sequence[str]] = field(default_factory=dict)
    """{histogram: value of each document}, such as its language. Use few distinct values."""
    found: dict[int, dict[str, set[int]]] = field(default_factory=dict)
    """{document: {list, such as a benchmark: indices of the entries found in the document}}."""


class CleaningStage:
    """Base class of the stages, which are frozen, picklable dataclasses. Their fields are their parameters."""

    label: ClassVar[str]
    """Unique name of the stage in the manifest."""

    def as_plan(self) -> dict[str, Any]:
        """Returns the manifest entry: the name and all parameters that affect decisions (file hashes, not paths)."""
        return {"name": self.label, **asdict(self)}

    def judge(self, batch: TextBatch) -> Verdicts:
        """Decides about a batch. Each decision must depend only on the document itself."""
        raise NotImplementedError

    def compile(self) -> None:
        """Compiles kernels and loads models. Called before workers are forked, so that they share these."""
        self.judge(TextBatch([b"compiled once, before workers are forked"], [None]))


@dataclass(frozen=True)
class Cleaning:
    """A sequence of cleaning stages. Each stage processes the documents kept by the previous one."""

    stages: tuple[CleaningStage, ...]

    def as_plan(self) -> list[dict[str, Any]]:
        """Returns the manifest entry."""
        return [stage.as_plan() for stage in self.stages]

    def clean(self, records: "Sequence[Record]") -> "tuple[list[Record], CleaningAccount]":
        """Runs all stages. Returns (kept documents with their new text, statistics for all documents)."""
        account = CleaningAccount()
        cleaned = []
        for first, stop in batches([record.text for record in records]):
            cleaned += self._clean(records[first:stop], account)
        return cleaned, account

    def _clean(self, kept: "Sequence[Record]", account: CleaningAccount) -> "list[Record]":
        """Runs all stages on a batch. Returns the kept documents with their new text."""
        batch = TextBatch([record.text for record in kept], [record.url for record in kept])
        for stage in self.stages:
            if not kept:
                break
            label = stage.label
            verdicts = stage.judge(batch)
            add_numbers(account.histograms, {name: Counter(values) for name, values in verdicts.values.items()})
            for found in verdicts.found.values():
                for name, entries in found.items():
                    account.add_found(name, 1, entries)
            removed = {number: f"{label}.{rule}" if rule else label for number, rule in verdicts.removed.items()}
            for number, text in verdicts.changed.items():
                if number not in removed:
                    fewer = len(batch.texts[number]) - len(text)
                    add_numbers(account.changed, {label: {"documents": 1, "fewer_bytes": fewer}})
                    if not text:
                        removed[number] = f"{label}.nothing_left"
            for number, rule in removed.items():
                account.add_document(rule, kept[number], verdicts.measured.get(number))
            if removed or verdicts.changed:
                stay = [number for number in range(len(batch)) if number not in removed]
                batch = batch.after(stay, verdicts)
                kept = [kept[number] for number in stay]
        for record in kept:
            account.add_document(KEPT, record)
        account.add_domains(batch.texts, batch.urls)
        return [record._replace(text=text) for record, text in zip(kept, batch.texts, strict=True)]


def batches(texts: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """Splits documents into batches of at most BATCH_BYTES, or of one larger document. Yields (first, stop)."""
    first = size = 0
    for number, text in enumerate(texts):
        if number > first and size + len(text) > BATCH_BYTES:
            yield first, number
            first = number
            size = 0
        size += len(text)
    if first < len(texts):
        yield first, len(texts)
