"""Stores evaluation results, and writes them as a table, as JSON and to the run's metrics.jsonl."""

import json
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pretrain.errors import InputError
from pretrain.files import write_durably
from pretrain.training.metrics import finite
from pretrain.training.run_records import RECORDED_PACKAGES, commit, package_versions
from pretrain.units import count_text, table
from pretrain_tools.runs.addresses import ModelAddress
from pretrain_tools.runs.history import require_output, scores_of


@dataclass(frozen=True)
class TaskScore:
    """Scores for a task or group."""

    task: str
    measures: dict[str, float | None]
    """{harness metric name: value}, such as acc and acc_stderr."""
    few_shots: int | None
    samples: int | None
    version: str | None
    is_part: bool = False
    """True for a task in a scored group, unless the task was requested by name."""
    uses_limit: bool = True
    """False for a task from an extension, which ignores --limit."""


def mean_of_means(name: str, scores: list[TaskScore], measure: str) -> dict[str, float | None]:
    """Computes the unweighted mean over tasks and its standard error, assuming independent tasks."""
    errors = [score.measures[f"{measure}_stderr"] for score in scores]
    error = None if None in errors else math.hypot(*errors) / len(scores)
    return {name: statistics.fmean(score.measures[measure] for score in scores), f"{name}_stderr": error}


@dataclass
class ModelResults:
    """All results for one model."""

    address: ModelAddress
    parameters: int
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    """{source: {loss, perplexity, bits_per_byte, tokens, loss_by_position, tokens_by_position}}"""
    source_settings: dict[str, Any] | None = None
    tasks: list[TaskScore] = field(default_factory=list)
    limit: float | None = None
    """--limit: number of documents per task, or a fraction below 1; None for all."""
    sample: str | None = None
    seconds: float = 0.0

    def lines(self) -> list[dict[str, Any]]:
        """Returns one event per source and task for metrics.jsonl."""
        address = self.address
        about = {"event": "evaluation", "step": address.step, "tokens": address.tokens, "model": address.name}
        about["time"] = round(time.time(), 3)
        settings = self.source_settings or {}
        part = {"split": settings.get("split"), "limit": settings.get("sequences")}
        lines = []
        for source, measures in self.sources.items():
            measured = {("evaluated_tokens" if name == "tokens" else name): value for name, value in measures.items()}
            lines.append({**about, "source": source, **part, **measured})
        for score in self.tasks:
            how = {name: getattr(score, name) for name in ("few_shots", "samples", "is_part")}
            limit = self.limit if score.uses_limit else None
            lines.append({**about, "task": score.task, **score.measures, **how, "limit": limit})
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Returns this model's entry in the JSON file."""
        tasks = {}
        for score in self.tasks:
            about = {key: getattr(score, key) for key in ("few_shots", "samples", "version", "is_part")}
            tasks[score.task] = score.measures | about
        contents = {
            **asdict(self.address),
            "parameters": self.parameters,
            "sources": self.sources,
            "source_settings": self.source_settings,
            "tasks": tasks,
            "sample": self.sample,
            "seconds": round(self.seconds, 1),
        }
        return finite(contents)


def require_writable(path: Path) -> None:
    """Raises InputError if the results can't be written to this path."""
    require_output("--output", path, "results.json")
    if not path.parent.is_dir():
        raise InputError(f"--output {path}: {path.parent} is not a folder; create it, or use another path")


def write_results(path: Path, evaluations: list[ModelResults], settings: dict[str, Any]) -> None:
    """Writes all results so far to a JSON file."""
    contents = {
        "format": "groundwork-evaluation",
        "version": 1,
        "settings": settings,
        "versions": {**package_versions([*RECORDED_PACKAGES, "lm_eval"]), "commit": commit()},
        "models": [evaluation.as_dict() for evaluation in evaluations],
    }
    text = json.dumps(contents, indent=1, ensure_ascii=False, allow_nan=False, default=str)  # str for paths
    write_durably(path, text + "\n")


def print_table(evaluations: list[ModelResults]) -> None:
    """Prints a list of the models, and a table with one row per metric and one column per model.

    Omits tasks in groups.
    """
    for number, evaluation in enumerate(evaluations, 1):
        print(f"model {number}: {_heading(evaluation)}")
    columns = [_cells(evaluation) for evaluation in evaluations]
    rows = [["source or task", "measure", *(f"model {number}" for number in range(1, len(columns) + 1))]]
    for name, measure in dict.fromkeys(row for column in columns for row in column):
        rows.append([name, measure, *(column.get((name, measure), "") for column in columns)])
    print(table(rows, right=set(range(2, len(rows[0])))))
    if parts := sum(score.is_part for score in evaluations[0].tasks):
        print(f"{parts} tasks in groups are not shown; use --output FILE.json to save all scores.")
    sys.stdout.flush()


def _heading(evaluation: ModelResults) -> str:
    address = evaluation.address
    step = "" if address.step is None else f", step {address.step:,}"
    tokens = "" if address.tokens is None else f", {count_text(address.tokens)} tokens"
    return f"{address.name}, {count_text(evaluation.parameters)} parameters{step}{tokens}"


def _cells(evaluation: ModelResults) -> dict[tuple[str, str], str]:
    """Formats the table cells of a model: {(source or task, metric): value ± standard error}."""
    cells = {}
    for line in evaluation.lines():
        for score in scores_of(line):
            shots = f" ({score.few_shots}-shot)" if score.few_shots else ""
            cells[score.task + shots, score.metric] = score.text
    return cells
