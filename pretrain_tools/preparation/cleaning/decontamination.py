"""Benchmark items are kept out of training data: documents that hold one are removed, or the places where they do.

As in GPT-3 (arXiv 2005.14165, appendix C), a document holds an item if 13 consecutive words of it stand there, in any
case and with any punctuation; a shorter item counts as a whole, from LEAST_LETTERS letters on. Spaces do not count
either, and the comparison is exact (item_index). Answers count together with the end of their question; a passage that
is only read for the question does not count (lm_eval_items).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pretrain.data.data_record import DECONTAMINATION
from pretrain.errors import InputError
from pretrain_tools.preparation.cleaning.account import Found
from pretrain_tools.preparation.cleaning.benchmarks import Benchmark, read_benchmarks
from pretrain_tools.preparation.cleaning.stages import TextBatch, Verdicts

if TYPE_CHECKING:
    from pretrain_tools.preparation.cleaning.compiled.item_index import ItemIndex, Run

REMOVALS = ("document", "window")
SHORTEST_RUN_WORDS = 5
# What GPT-3 cut off around a run, the shortest piece that it kept, and the runs from which on a document went whole.
MARGIN_CHARACTERS = 200
SHORTEST_PIECE_CHARACTERS = 200
MOST_WINDOWS = 10
EXCERPT_CHARACTERS = 200
BLANK = re.compile(rb"\s")


@dataclass(frozen=True)
class Decontamination:
    """The stage. words: a run of so many counts; remove: the document, or a window around the run."""

    benchmarks: tuple[Benchmark, ...]
    words: int = 13
    remove: str = "document"

    @property
    def label(self) -> str:
        return DECONTAMINATION

    def as_plan(self) -> dict[str, Any]:
        """The benchmarks by hash; of `items`, `sought` have a text long enough to be found."""
        sought = self._sought()
        return {
            "name": DECONTAMINATION,
            "words": self.words,
            "remove": self.remove,
            "benchmarks": [
                {"name": b.name, "items": len(b.items), "sought": sought[number], "sha256": b.sha256}
                for number, b in enumerate(self.benchmarks)
            ],
        }

    @cached_property
    def _texts(self) -> list[tuple[int, int, bytes, bool]]:
        """(benchmark, item, text, whether it counts as a whole), each text of an item once."""
        return [
            (number, item_number, text.encode(errors="replace"), text in item.whole)
            for number, benchmark in enumerate(self.benchmarks)
            for item_number, item in enumerate(benchmark.items)
            for text in dict.fromkeys((*item.whole, *item.parts))
        ]

    @cached_property
    def _index(self) -> "ItemIndex":
        try:
            from pretrain_tools.preparation.cleaning.compiled.item_index import build_index
        except ImportError:
            raise InputError("--decontaminate: numba is not installed; pip install numba") from None
        return build_index([text[2] for text in self._texts], [text[3] for text in self._texts], self.words)

    def _sought(self) -> list[int]:
        """Items of each benchmark that can be found."""
        found = {text[:2] for text, can in zip(self._texts, self._index.searchable, strict=True) if can}
        return [sum(number == benchmark for benchmark, _ in found) for number in range(len(self.benchmarks))]

    def open(self) -> Callable[[TextBatch], Verdicts]:
        self._index.find([b"compiled before workers are forked"])
        return self._judge

    def _judge(self, batch: TextBatch) -> Verdicts:
        verdicts = Verdicts()
        runs: dict[int, list[Run]] = {}
        for run in self._index.find(batch.texts, batch.joined):
            runs.setdefault(run.document, []).append(run)
        for document, of_document in runs.items():
            text = batch.texts[document]
            verdicts.found[document] = self._found(text, of_document)
            shorter = without_windows(text, of_document) if self.remove == "window" else None
            while shorter and (left := self._index.find([shorter])):  # the cut may have joined what is one run now
                shorter = without_windows(shorter, left)
            if shorter is None:
                verdicts.removed[document] = verdicts.found[document][0].list_name
            else:
                verdicts.changed[document] = shorter
        return verdicts

    def _found(self, text: bytes, runs: Sequence["Run"]) -> list[Found]:
        """The items of a document, each once, in their own order."""
        found: dict[tuple[int, int], Found] = {}
        for run in runs:
            benchmark, item = self._texts[run.text][:2]
            excerpt = text[run.start : run.stop].decode(errors="replace")[:EXCERPT_CHARACTERS].strip()
            found.setdefault((benchmark, item), Found(self.benchmarks[benchmark].name, item, excerpt))
        return [found[key] for key in sorted(found)]


def without_windows(text: bytes, runs: Sequence["Run"]) -> bytes | None:
    """The text without the runs and MARGIN_CHARACTERS on both sides, cut between words; None: too many runs.

    Pieces of fewer than SHORTEST_PIECE_CHARACTERS go as well; the others are paragraphs of one document.
    """
    windows: list[list[int]] = []
    for start, stop in sorted((run.start, run.stop) for run in runs):
        if windows and start <= windows[-1][1]:
            windows[-1][1] = max(windows[-1][1], stop)
        else:
            windows.append([start, stop])
    if len(windows) > MOST_WINDOWS:
        return None
    pieces, begin = [], 0
    for start, stop in windows:
        before = text[begin:start].decode()[:-MARGIN_CHARACTERS].encode()
        # Back to the last blank, so that no word is cut; without one nothing is left.
        pieces.append(before[: max((m.end() for m in BLANK.finditer(before)), default=0)])
        after = stop + len(text[stop:].decode()[:MARGIN_CHARACTERS].encode())
        blank = BLANK.search(text, after)
        begin = max(begin, len(text) if blank is None else blank.end())
    pieces.append(text[begin:])
    kept = [piece.strip() for piece in pieces]
    return b"\n\n".join(piece for piece in kept if len(piece.decode()) >= SHORTEST_PIECE_CHARACTERS)


def read_decontamination(given: Sequence[str], words: int, remove: str) -> Decontamination | None:
    """The stage that the command line asks for, whose names may be joined by commas; None without any."""
    names = [name for text in given for name in text.split(",") if name]
    return Decontamination(read_benchmarks(names), words, remove) if names else None


def contamination_text(row: dict[str, Any]) -> str:
    """One benchmark in words."""
    short = row["items"] - row["sought"]
    left_out = f" ({short:,} too short to be sought)" if short else ""
    return (
        f"{row['benchmark']}: {row['found']:,} of {row['items']:,} items{left_out} in {row['documents']:,} "
        f"documents, {row['remove']}s removed"
    )
