"""Benchmarks to keep out of training data: the items of lm-evaluation-harness tasks, and of files."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from pretrain.errors import InputError, Problems
from pretrain_tools.preparation.cleaning import lm_eval_items

FILE_SUFFIXES = (".jsonl", ".ndjson", ".txt")
TASK_SUFFIXES = (".yaml", ".yml")


class BenchmarkItem(NamedTuple):
    """The texts of one item: a run of words of any of them is contamination."""

    whole: tuple[str, ...]
    """Also when they are shorter than such a run: then as a whole."""
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Benchmark:
    """The items of one task or file, in its order."""

    name: str
    items: tuple[BenchmarkItem, ...]

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.items).encode()).hexdigest()


def read_benchmarks(names: Sequence[str]) -> tuple[Benchmark, ...]:
    """The benchmarks that `--decontaminate` names: tasks, groups and patterns of lm-eval, .yaml files of tasks, .jsonl
    and .txt files of items, folders of either. Each once.

    Raises InputError with every name that nothing is found for, and every benchmark without items.
    """
    problems, found = Problems(), []
    tasks = []
    for name in names:
        files = _files_of(name)
        found += [problems.attempt(_file_benchmark, path) for path in files]
        tasks += [name] * (not files)
    if tasks:
        found += problems.attempt(_task_benchmarks, tasks) or []
    benchmarks = {benchmark.name: benchmark for benchmark in found if benchmark is not None}
    problems += [
        f"--decontaminate {name}: holds no items; give one that does"
        for name, benchmark in benchmarks.items()
        if not benchmark.items
    ]
    problems.stop_if_any()
    return tuple(benchmarks.values())


def _files_of(name: str) -> list[Path]:
    """The files of items that a name stands for; none where it stands for tasks."""
    path = Path(name)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in (*FILE_SUFFIXES, *TASK_SUFFIXES))
        return [] if any(file.suffix in TASK_SUFFIXES for file in files) else files
    return [path] if path.is_file() and path.suffix not in TASK_SUFFIXES else []


def _file_benchmark(path: Path) -> Benchmark:
    """An item per line: of text, or a JSON object or string."""
    if path.suffix not in FILE_SUFFIXES:
        raise InputError(
            f"--decontaminate {path}: must be {', '.join(FILE_SUFFIXES)} with an item per line, or a .yaml of lm-eval"
        )
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise InputError(f"--decontaminate {path}: cannot be read ({error}); give a file of UTF-8 text") from None
    items = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = line if path.suffix == ".txt" else json.loads(line)
        except ValueError as error:
            raise InputError(f"--decontaminate {path}, line {number:,}: broken JSON ({error}); mend it") from None
        whole, parts = lm_eval_items.record_texts(value)
        items.append(BenchmarkItem(tuple(whole), tuple(parts)))
    return Benchmark(path.name, tuple(items))


def _task_benchmarks(names: Sequence[str]) -> list[Benchmark]:
    """Those of lm-eval, loaded in a process of its own. Raises InputError with every task that cannot be loaded."""
    command = [sys.executable, "-P", lm_eval_items.__file__, json.dumps(names)]
    run = subprocess.run(command, capture_output=True, text=True, errors="replace")
    lines = [json.loads(line) for line in run.stdout.splitlines()] if run.returncode == 0 else []
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise InputError(f"--decontaminate {','.join(names)}: lm-eval cannot be run ({last})")
    problems = [
        f"--decontaminate {line['name']}: {line['problem']}; data paths in a task file are relative to the current "
        "folder, other data comes from the Hub"
        for line in lines
        if isinstance(line, dict)
    ]
    if problems:
        raise InputError(*problems)
    items: dict[str, list[BenchmarkItem]] = {}
    for task, whole, parts in lines:
        items.setdefault(task, []).append(BenchmarkItem(tuple(whole), tuple(parts)))
    return [Benchmark(task, tuple(found)) for task, found in items.items()]
