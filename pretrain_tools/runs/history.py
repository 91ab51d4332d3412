"""Reads the history in metrics.jsonl: all of it, with every curve single-valued, or only its end.

A run that resumes from a checkpoint or rolls back repeats steps, and the earlier lines stay in the file. Only the last
ones describe the model, so only they belong to a curve. `start` says from which step a process resumed, `rollback` to
which step it went back.
"""

import json
import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pretrain.errors import InputError, Problems, did_you_mean
from pretrain.runs.event_log import CURVES, Event, parse_lines, read_metrics
from pretrain.runs.run_folder import METRICS_FILE

BESIDE = frozenset({"evaluation", "publish"})
"""Events that other processes write, also long after the run's own has ended."""
MEASURED = frozenset({"validation", "evaluation"})
"""Events of which several at the same step may measure the same thing."""
NO_MEASURES = {
    "event", "step", "tokens", "model", "task", "source", "split", "few_shots", "time", "hours", "samples", "limit",
    "evaluated_tokens",
}  # fmt: skip
"""Keys of an `evaluation` event that say what was measured, and how."""
MOST_SOURCES = 20


@dataclass(frozen=True)
class Score:
    """One number of an evaluation."""

    task: str
    """Or the source, of a loss."""
    metric: str
    """acc, or exact_match,strict-match as the harness names it; loss, perplexity or bits_per_byte of a source."""
    value: float
    standard_error: float | None = None
    few_shots: int | None = None
    split: str | None = None
    step: int | None = None
    tokens: int | None = None
    is_whole: bool = True
    """Over all documents of the task: a score over a few of them is not a result."""

    @property
    def name(self) -> str:
        """'hellaswag (5-shot) · acc', 'docs validation · bits_per_byte'"""
        detail = f" ({self.few_shots}-shot)" if self.few_shots else f" {self.split}" if self.split else ""
        return f"{self.task}{detail} · {self.metric}"


@dataclass(frozen=True)
class History:
    """A whole run. Every event has `hours`: running time up to it, without the gaps between processes."""

    folder: Path
    events: list[Event] = field(repr=False)
    joules: float | None = None
    """Of all steps, repeated ones too, as far as they were logged; None if nothing was."""

    def of(self, name: str) -> list[Event]:
        """Returns the events of one name, in order."""
        return [event for event in self.events if event["event"] == name]

    def last(self, name: str) -> Event:
        """Returns the last event of that name; empty if there is none."""
        return next((event for event in reversed(self.events) if event["event"] == name), {})

    def median(self, measure: str) -> float | None:
        """Over the logged steps, so that restarts and pauses do not count."""
        values = [event[measure] for event in self.of("train") if is_number(event.get(measure))]
        return statistics.median(values) if values else None

    def validation(self) -> dict[str, list[Event]]:
        """Returns {source: validation events}"""
        sources: dict[str, list[Event]] = {}
        for event in self.of("validation"):
            sources.setdefault(str(event.get("source")), []).append(event)
        return sources

    def scores(self) -> dict[str, list[Score]]:
        """Returns {name: its scores by step}, of all evaluations during and after the run."""
        scores: dict[str, list[Score]] = {}
        for event in self.of("evaluation"):
            for score in scores_of(event):
                scores.setdefault(score.name, []).append(score)
        return {name: sorted(points, key=lambda score: score.step or 0) for name, points in scores.items()}


def scores_of(event: Event) -> list[Score]:
    """Returns the numbers of an `evaluation` event: of a task, with standard errors, or losses on a source.

    None for the parts of a group that has scores of its own: sixty curves would hide the one.
    """
    if event.get("is_part"):
        return []
    about = {key: event.get(key) for key in ("few_shots", "split", "step", "tokens")}
    about |= {"task": str(event.get("task") or event.get("source")), "is_whole": event.get("limit") is None}
    measures = {key: value for key, value in event.items() if key not in NO_MEASURES and is_number(value)}
    # lm-eval names the filter of the answers after a comma; "none" is no filter.
    return [
        Score(metric=key.removesuffix(",none"), value=value, standard_error=measures.get(_stderr_of(key)), **about)
        for key, value in measures.items()
        if "_stderr" not in key
    ]


def _stderr_of(metric: str) -> str:
    name, comma, answers = metric.partition(",")
    return f"{name}_stderr{comma}{answers}"


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_run(folder: Path) -> Path:
    """Returns the folder, if it holds a run's metrics. Raises InputError saying what it is instead."""
    if (folder / METRICS_FILE).is_file():
        return folder
    if folder.is_file():
        raise InputError(f"{folder}: is a file; give the folder of a run, such as runs/demo")
    if not folder.is_dir():
        parent = folder.parent
        # Beside it and no deeper: the parent may be /, or a home.
        names = [str(path) for path in find_runs(parent, depth=1)] if parent.is_dir() else []
        hint = did_you_mean(str(folder), names) if names else f"; {parent} holds no runs"
        raise InputError(f"{folder}: no such run{hint}")
    inside = find_runs(folder)
    if inside:
        raise InputError(
            f"{folder}: is not a run but holds {len(inside)}: "
            f"{', '.join(str(path) for path in inside[:8])}{' ...' if len(inside) > 8 else ''}; give one of them"
        )
    owner = next((parent for parent in folder.parents if (parent / METRICS_FILE).is_file()), None)
    if owner is not None:
        raise InputError(f"{folder}: is a folder within the run {owner}; give {owner}")
    if (folder / "config.yaml").is_file():
        raise InputError(f"{folder}: the run has not begun: there is no {METRICS_FILE} yet; see its console")
    raise InputError(f"{folder}: is not a run: it has no {METRICS_FILE}; give a folder that train.py made")


def require_runs(folders: Iterable[Path]) -> list[Path]:
    """Returns the folders as runs. Raises InputError with every folder that is not a run."""
    problems = Problems()
    runs = [problems.attempt(require_run, folder) for folder in folders]
    problems.stop_if_any()
    return runs


def find_runs(folder: Path, *, depth: int = 3) -> list[Path]:
    """Returns the runs in a folder and its subfolders, by name, without runs inside runs."""
    found = []
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except PermissionError:
        return []  # somebody else's folder beside the runs
    for entry in entries:
        if entry.name.startswith(".") or not entry.is_dir():
            continue
        path = Path(entry.path)
        if os.path.isfile(path / METRICS_FILE):  # unlike Path.is_file, False where it may not be seen
            found.append(path)
        elif depth > 1:
            found += find_runs(path, depth=depth - 1)
    return found


def read_history(run: Path) -> History:
    """Reads a whole run: about a second for 100,000 lines. Raises InputError if the folder is no run."""
    events = read_metrics(require_run(run))
    if not events:
        raise InputError(f"{run / METRICS_FILE}: holds no events yet; wait until the run has begun")
    count_hours(events)
    return History(run, current_events(events), joules_of(events))


def joules_of(events: Iterable[Event]) -> float | None:
    """Returns the energy in all these events; None if there is none."""
    found = [event["joules"] for event in events if is_number(event.get("joules"))]
    return sum(found) if found else None


def append_events(run: Path, events: Iterable[Event]) -> None:
    """Adds lines to the run's metrics.jsonl, to which the run itself may be writing too. Raises OSError."""
    text = "".join(json.dumps(event, allow_nan=False) + "\n" for event in events)
    descriptor = os.open(run / METRICS_FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            text = "\n" + text  # a crash cut the last line short
        # One write in append mode: no line of the other process can come in between.
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def count_hours(events: list[Event], since: tuple[float, float | None] = (0.0, None)) -> tuple[float, float | None]:
    """Adds `hours` to every event in place. A crash's lost work counts, the time until the restart does not.

    since: what the call for the events before these has returned: (seconds of running, time of the last event).
    """
    elapsed, previous = since
    for event in events:
        now = event.get("time")
        if is_number(now) and event["event"] not in BESIDE:
            if previous is not None and event["event"] != "start":
                elapsed += max(0.0, now - previous)
            previous = now
        event["hours"] = elapsed / 3600
    return elapsed, previous


def current_events(events: Iterable[Event]) -> list[Event]:
    """Returns the events without those lines of curves that were superseded when steps were repeated."""
    current: list[Event] = []
    for event in events:
        back_to = repeats_after(event)
        if back_to is not None:
            _drop_after(current, back_to)
        current.append(event)
    return _last_of_each(current)


def repeats_after(event: Event) -> int | None:
    """Returns the last step that stays valid after this event, if training continues from an earlier step."""
    if event["event"] == "start":
        # Step 0 itself is measured again by a process that starts from scratch.
        return event.get("step") or -1
    return event.get("to_step") if event["event"] == "rollback" else None


def _drop_after(current: list[Event], step: int) -> None:
    first = len(current)
    while first and not (current[first - 1]["event"] == "train" and (current[first - 1].get("step") or 0) <= step):
        first -= 1
    current[first:] = [e for e in current[first:] if e["event"] not in CURVES or (e.get("step") or 0) <= step]


def _last_of_each(events: list[Event]) -> list[Event]:
    """Only the last of several measurements of the same thing at the same step."""
    last = {_subject(event): number for number, event in enumerate(events) if event["event"] in MEASURED}
    return [e for n, e in enumerate(events) if e["event"] not in MEASURED or last[_subject(e)] == n]


def _subject(event: Event) -> tuple:
    return tuple(event.get(key) for key in ("event", "step", "source", "split", "task", "few_shots"))


def read_end(run: Path, *, lines: int = 2000, look_back_bytes: int = 1 << 22) -> list[Event]:
    """Returns the last events of a run, without superseded ones, read from the end of the file, whatever its length.

    lines: how many of the last lines to read; before them, only validations within `look_back_bytes`.
    """
    with open(run / METRICS_FILE, "rb") as file:
        begin = max(0, file.seek(0, os.SEEK_END) - look_back_bytes)
        file.seek(begin)
        # Unless it is the whole file, what is read begins in the middle of a line.
        all_lines = file.read().split(b"\n")[1 if begin else 0 :]
    validations = [line for line in all_lines[:-lines] if line.startswith(b'{"event": "validation"')]
    return current_events(parse_lines([*validations[-MOST_SOURCES:], *all_lines[-lines:]]))


def last_start(run: Path) -> Event:
    """Returns the newest `start` event, wherever it is in the file; empty if there is none."""
    with open(run / METRICS_FILE, "rb") as file:
        events = parse_lines(line for line in file if line.startswith(b'{"event": "start"'))
    return events[-1] if events else {}


def last_good_end(run: Path) -> Event:
    """Returns the event that closed a run after its export; empty if there is none."""
    ends = [event for event in read_metrics(run) if event["event"] == "end" and event.get("code") == 0]
    return ends[-1] if ends else {}
