"""Removes documents that contain benchmark items.

As in GPT-3 (arXiv 2005.14165, appendix C), a document contains an item if they share 13 consecutive words, ignoring
case, accents and punctuation. Shorter items must match as a whole.
"""

import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pretrain.data.data_record import DECONTAMINATION
from pretrain.errors import InputError, Problems
from pretrain_tools.preparation.cleaning import lm_eval_items
from pretrain_tools.preparation.cleaning.stages import CleaningStage, TextBatch, Verdicts

if TYPE_CHECKING:
    from pretrain_tools.preparation.cleaning.item_index import ItemIndex

FILE_SUFFIXES = (".jsonl", ".ndjson", ".txt")
TASK_SUFFIXES = (".yaml", ".yml")
SHORTEST_RUN_WORDS = 5

ItemTexts = Sequence[list[str]]
"""Strings that identify a benchmark item: (strings that also match as a whole if they are short, strings that match
only in a long run of words)."""


@dataclass(frozen=True)
class Benchmark:
    """Benchmark items from a task or file."""

    name: str
    items: list[ItemTexts]

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.items).encode()).hexdigest()


@dataclass(frozen=True)
class Decontamination(CleaningStage):
    """Stage that removes documents that share `words` consecutive words with a benchmark item."""

    label: ClassVar[str] = DECONTAMINATION
    benchmarks: tuple[Benchmark, ...]
    words: int = 13

    def as_plan(self) -> dict[str, Any]:
        """Returns the manifest entry. `sought` is the number of items that are long enough to search for."""
        found = {text[:2] for text in compress(self._texts, self._index.searchable)}
        sought = Counter(benchmark for benchmark, _ in found)
        return {
            "name": DECONTAMINATION,
            "words": self.words,
            "remove": "document",
            "benchmarks": [
                {"name": b.name, "items": len(b.items), "sought": sought[number], "sha256": b.sha256}
                for number, b in enumerate(self.benchmarks)
            ],
        }

    @cached_property
    def _texts(self) -> list[tuple[int, int, bytes, bool]]:
        """(benchmark index, item index, text, whether it also matches as a whole) for all items."""
        return [
            (number, item, text.encode(errors="replace"), text in whole)
            for number, benchmark in enumerate(self.benchmarks)
            for item, (whole, parts) in enumerate(benchmark.items)
            for text in dict.fromkeys((*whole, *parts))
        ]

    @cached_property
    def _index(self) -> "ItemIndex":
        from pretrain_tools.preparation.cleaning.item_index import build_index

        _, _, texts, whole = zip(*self._texts, strict=True)
        return build_index(texts, whole, self.words)

    def judge(self, batch: TextBatch) -> Verdicts:
        verdicts = Verdicts()
        for document, text in self._index.find(batch.texts):
            benchmark, item, *_ = self._texts[text]
            name = self.benchmarks[benchmark].name
            verdicts.found.setdefault(document, {}).setdefault(name, set()).add(item)
            verdicts.removed.setdefault(document, name)
        return verdicts


def read_decontamination(given: Sequence[str], words: int) -> Decontamination | None:
    """Creates the stage for --decontaminate, or None if there are no names. Names may be separated by commas."""
    names = [name for text in given for name in text.split(",") if name]
    if given and not names:
        raise InputError("--decontaminate: must be lm-eval tasks or item files, got an empty text")
    return Decontamination(read_benchmarks(names), words) if names else None


def contamination_text(row: dict[str, Any]) -> str:
    """Formats the number of a benchmark's items that were found."""
    short = row["items"] - row["sought"]
    left_out = f" ({short:,} too short to search for)" if short else ""
    return (
        f"{row['benchmark']}: found {row['found']:,} of {row['items']:,} items{left_out} in {row['documents']:,} "
        f"documents; removed the {row['remove']}s"
    )


def read_benchmarks(names: Sequence[str]) -> tuple[Benchmark, ...]:
    """Reads the benchmarks for --decontaminate. Raises InputError listing all problems.

    Args:
        names: lm-eval tasks, groups or patterns, .yaml task files, .jsonl or .txt files with items, or folders.
    """
    problems = Problems()
    files = {name: _files_of(name) for name in names}
    found = [problems.attempt(_file_benchmark, path, name) for path, name in _named(files.values())]
    if tasks := [name for name, paths in files.items() if not paths]:
        found += problems.attempt(_task_benchmarks, tasks) or []
    benchmarks = {benchmark.name: benchmark for benchmark in found if benchmark}
    empty = [name for name, benchmark in benchmarks.items() if not any(map(any, benchmark.items))]
    problems += [f"--decontaminate {name}: contains no items with text; omit it" for name in empty]
    problems.stop_if_any()
    return tuple(benchmarks.values())


def _files_of(name: str) -> list[Path]:
    """Lists the item files at a path; [] for an lm-eval task."""
    path = Path(name)
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    if any(file.suffix in TASK_SUFFIXES for file in files):
        return []
    return [file for file in files if path.is_file() or file.suffix in FILE_SUFFIXES]


def _named(files: Iterable[list[Path]]) -> list[tuple[Path, str]]:
    """Returns (file, unique name) pairs. Files with the same name are named by their path below the common folder."""
    paths = {path.resolve(): path for path in itertools.chain.from_iterable(files)}
    counts = Counter(path.name for path in paths.values())
    common = os.path.commonpath([path.parent for path in paths]) if paths else ""
    return [
        (path, path.name if counts[path.name] == 1 else real.relative_to(common).as_posix())
        for real, path in paths.items()
    ]


def _file_benchmark(path: Path, name: str) -> Benchmark:
    """Reads a file with one item per line, as plain text or JSON."""
    if path.suffix not in FILE_SUFFIXES:
        raise InputError(
            f"--decontaminate {path}: must be a {', '.join(FILE_SUFFIXES)} file with one item per line, or an lm-eval "
            ".yaml file"
        )
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise InputError(f"--decontaminate {path}: cannot be read ({error}); it must be a UTF-8 text file") from None
    items = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                items.append(lm_eval_items.record_texts(line if path.suffix == ".txt" else json.loads(line)))
        except ValueError as error:
            raise InputError(f"--decontaminate {path}, line {number:,}: invalid JSON ({error})") from None
    return Benchmark(name, items)


def _task_benchmarks(names: Sequence[str]) -> list[Benchmark]:
    """Loads lm-eval tasks in a separate process. Raises InputError listing all tasks that can't be loaded."""
    command = [sys.executable, "-P", lm_eval_items.__file__, json.dumps(names)]
    run = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise InputError(f"--decontaminate {','.join(names)}: lm-eval failed ({last})")
    printed = json.loads(run.stdout)
    if printed["problems"]:
        advice = "data paths in a task file are relative to the current folder, and other data is loaded from the Hub"
        raise InputError(*(f"--decontaminate {problem}; {advice}" for problem in printed["problems"]))
    return [Benchmark(task, items) for task, items in printed["items"].items()]
