"""Scores of tasks, means of them, and their standard errors."""

import math
import statistics
from dataclasses import dataclass


@dataclass(frozen=True)
class TaskScore:
    """The scores of one task or group."""

    task: str
    measures: dict[str, float | None]
    """By the harness's names: acc and acc_stderr, or exact_match,strict-match and exact_match_stderr,strict-match."""
    few_shots: int | None
    samples: int | None
    version: str | None
    is_part: bool = False
    """One of a group that has a score of its own, and not asked for by name."""


def mean_and_error(name: str, values: list[float]) -> dict[str, float | None]:
    """{name: mean, name_stderr: its standard error}, as the harness names and computes them; None for one value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {name: statistics.fmean(values), f"{name}_stderr": error}


def mean_of_means(name: str, scores: list[TaskScore], measure: str) -> dict[str, float | None]:
    """The mean of tasks, each of the same weight, and its standard error, of tasks without common items."""
    errors = [score.measures[f"{measure}_stderr"] for score in scores]
    known = [error for error in errors if error is not None]
    error = math.hypot(*known) / len(scores) if len(known) == len(scores) else None
    return {name: statistics.fmean(score.measures[measure] for score in scores), f"{name}_stderr": error}
