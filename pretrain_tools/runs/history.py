"""Reads metrics.jsonl, or only its end, and drops lines superseded by repeated steps.

A run that resumes from a checkpoint or rolls back repeats steps, and the earlier lines stay in the file. Only the last
attempt describes the model, so curves use only its lines. `start` records the step from which a process resumed, and
`rollback` the step to which it went back.
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

BY_OTHER_PROCESSES = frozenset({"evaluation", "publish"})
"""Events written by other processes, possibly long after the end of the run. They don't count as running time."""
MEASURED = frozenset({"validation", "evaluation"})
"""Events that may repeat a measurement at the same step. The last one counts."""
NO_MEASURES = {
    "event", "step", "tokens", "model", "task", "source", "split", "few_shots", "time", "hours", "samples", "limit",
    "evaluated_tokens",
}  # fmt: skip
"""Keys of an `evaluation` event that aren't scores but describe the measurement."""
FREQUENT = tuple(f'{{"event": "{name}"'.encode() for name in ("train", "sample", "evaluation"))
"""Prefixes of the most frequent lines: `event` is always written first."""


MEASURES = {
    "activation_rms": "RMS of activations",
    "weight_rms": "RMS of weights",
    "gradient_rms": "RMS of gradients, before clipping",
    "update_rms": "RMS of updates",
    "largest_logit": "Largest attention logit",
    "units_off": "Share of inactive units",
}
"""{key of a diagnostics event: its title}. The event has one value per layer."""


@dataclass(frozen=True)
class Score:
    """A single metric in an evaluation."""

    task: str
    """Name of the task, or of the data source for a loss."""
    metric: str
    """Name in the harness, such as acc or exact_match,strict-match. A source has loss, perplexity or bits_per_byte."""
    value: float
    standard_error: float | None = None
    few_shots: int | None = None
    split: str | None = None
    step: int | None = None
    tokens: int | None = None
    is_whole: bool = True
    """True if all the task's documents were scored. A score on a subset (--limit) isn't a result."""

    @property
    def name(self) -> str:
        """'hellaswag (5-shot) · acc', 'docs validation · bits_per_byte'"""
        detail = f" ({self.few_shots}-shot)" if self.few_shots else f" {self.split}" if self.split else ""
        return f"{self.task}{detail} · {self.metric}"


@dataclass(frozen=True)
class History:
    """The events of a whole run. Every event has `hours`: running time so far, without gaps between processes."""

    folder: Path
    events: list[Event] = field(repr=False)
    joules: float | None = None
    """Energy of all logged steps, including repeated ones; None if no energy was logged."""

    @classmethod
    def of_events(cls, folder: Path, logged: list[Event]) -> "History":
        """Adds `hours` to the logged events in place, and drops superseded measurements."""
        count_hours(logged)
        joules = [event["joules"] for event in logged if is_number(event.get("joules"))]
        return cls(folder, current_events(logged), sum(joules) if joules else None)

    def of(self, name: str) -> list[Event]:
        """Returns the events with this name, in order."""
        return [event for event in self.events if event["event"] == name]

    def last(self, name: str) -> Event:
        """Returns the last event with this name, or {}."""
        return next((event for event in reversed(self.events) if event["event"] == name), {})

    def median(self, measure: str) -> float | None:
        """Returns the median of a measure over the logged steps, which ignores restarts and pauses."""
        values = [event[measure] for event in self.of("train") if is_number(event.get(measure))]
        return statistics.median(values) if values else None

    def validation(self) -> dict[str, list[Event]]:
        sources: dict[str, list[Event]] = {}
        for event in self.of("validation"):
            sources.setdefault(str(event.get("source")), []).append(event)
        return sources

    def scores(self) -> dict[str, list[Score]]:
        """Returns the scores of all evaluations during and after the run, by name and sorted by step."""
        scores: dict[str, list[Score]] = {}
        for event in self.of("evaluation"):
            for score in scores_of(event):
                scores.setdefault(score.name, []).append(score)
        return {name: sorted(points, key=lambda score: score.step or 0) for name, points in scores.items()}


def scores_of(event: Event) -> list[Score]:
    """Returns the scores of an `evaluation` event: a task's metrics with standard errors, or losses on a source.

    Skips subtasks if their group has its own score: MMLU's 57 subtasks would crowd out its curve.
    """
    if event.get("is_part"):
        return []
    about = {key: event.get(key) for key in ("few_shots", "split", "step", "tokens")}
    about |= {"task": str(event.get("task") or event.get("source")), "is_whole": event.get("limit") is None}
    measures = {key: value for key, value in event.items() if key not in NO_MEASURES and is_number(value)}
    # lm-eval appends the answer filter after a comma; "none" means no filter.
    return [
        Score(metric=key.removesuffix(",none"), value=value, standard_error=measures.get(_stderr_of(key)), **about)
        for key, value in measures.items()
        if "_stderr" not in key
    ]


def _stderr_of(metric: str) -> str:
    name, comma, answers = metric.partition(",")
    return f"{name}_stderr{comma}{answers}"


def is_number(value: object) -> bool:
    # bool is a subclass of int.
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_run(folder: Path) -> Path:
    """Returns the folder if it is a run. Otherwise raises an InputError that explains what the folder is."""
    if (folder / METRICS_FILE).is_file():
        return folder
    refuse_url(str(folder))
    if folder.is_file():
        raise InputError(f"{folder}: is a file; give the folder of a run, such as runs/demo")
    if not folder.is_dir():
        parent = folder.parent
        # Search only siblings. The parent may be / or a home directory, where a deep search takes too long.
        names = [str(path) for path in find_runs(parent, depth=1)] if parent.is_dir() else []
        hint = did_you_mean(str(folder), names) if names else f"; {parent} contains no runs"
        raise InputError(f"{folder}: no such run{hint}")
    inside = find_runs(folder)
    if inside:
        raise InputError(
            f"{folder}: is not a run but contains {len(inside)}: "
            f"{', '.join(str(path) for path in inside[:8])}{' ...' if len(inside) > 8 else ''}; give one of them"
        )
    owner = next((parent for parent in folder.parents if (parent / METRICS_FILE).is_file()), None)
    if owner is not None:
        raise InputError(f"{folder}: is a folder inside the run {owner}; give {owner}")
    if (folder / "config.yaml").is_file():
        raise InputError(f"{folder}: the run has not started: it has no {METRICS_FILE} yet; see its console")
    raise InputError(f"{folder}: is not a run: it has no {METRICS_FILE}; give a folder that train.py made")


def refuse_url(text: str) -> None:
    """Raises InputError for a run's URL, even if Path has collapsed its two slashes into one."""
    scheme, colon, rest = text.partition(":/")
    if colon and scheme.isidentifier() and not Path(text).exists():
        url = f"{scheme}://{rest.lstrip('/')}"
        raise InputError(
            f"{url}: only a local copy can be read; make one with python -m pretrain.checkpoint.mirror_fetch "
            f"{url.partition('@')[0]}, then give runs/NAME"
        )


def require_runs(folders: Iterable[Path]) -> list[Path]:
    """Returns the folders. Raises InputError listing all folders that aren't runs."""
    problems = Problems()
    runs = [problems.attempt(require_run, folder) for folder in folders]
    problems.stop_if_any()
    return runs


def find_runs(folder: Path, *, depth: int = 3) -> list[Path]:
    """Returns the runs in a folder and its subfolders, sorted by name. Skips runs inside runs."""
    found = []
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except PermissionError:
        return []  # another user's folder next to the runs
    for entry in entries:
        if entry.name.startswith(".") or not entry.is_dir():
            continue
        path = Path(entry.path)
        if os.path.isfile(path / METRICS_FILE):  # False without permission, unlike Path.is_file
            found.append(path)
        elif depth > 1:
            found += find_runs(path, depth=depth - 1)
    return found


def read_history(run: Path) -> History:
    """Reads a whole run, in about a second per 100,000 lines. Raises InputError if the folder isn't a run."""
    events = read_metrics(require_run(run))
    if not events:
        raise InputError(f"{run / METRICS_FILE}: contains no events yet; wait until the run has started")
    return History.of_events(run, events)


def append_events(run: Path, events: Iterable[Event]) -> None:
    """Appends events to the run's metrics.jsonl, which the run may be writing at the same time. Raises OSError."""
    text = "".join(json.dumps(event, allow_nan=False) + "\n" for event in events)
    with open(run / METRICS_FILE, "a+b", buffering=0) as file:
        size = file.tell()
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            text = "\n" + text  # a crash cut the last line short
        # A single unbuffered write in append mode cannot interleave with lines of another process.
        file.write(text.encode())


def count_hours(events: list[Event]) -> None:
    """Adds `hours` to every event in place. Work lost in a crash counts, but not the time until the restart."""
    elapsed = 0.0
    previous = None
    for event in events:
        now = event.get("time")
        if is_number(now) and event["event"] not in BY_OTHER_PROCESSES:
            # The time before a `start` is a gap between two processes. max, because the clock may have been set back.
            if previous is not None and event["event"] != "start":
                elapsed += max(0.0, now - previous)
            previous = now
        event["hours"] = elapsed / 3600


def current_events(events: Iterable[Event]) -> list[Event]:
    """Drops measurements superseded by repeated steps or repeated evaluations."""
    current: list[Event] = []
    for event in events:
        if (back_to := repeats_after(event)) is not None:
            # Events such as checkpoint or warning stay, because they did happen. Only curves must be single-valued.
            current = [e for e in current if e["event"] not in CURVES or (e.get("step") or 0) <= back_to]
        current.append(event)
    last = {_subject(event): event for event in current if event["event"] in MEASURED}
    return [e for e in current if e["event"] not in MEASURED or last[_subject(e)] is e]


def repeats_after(event: Event) -> int | None:
    """Returns the last step that stays valid after this event; None if the event doesn't move training back."""
    if event["event"] == "start":
        # -1: a process that starts from scratch also repeats the validation at step 0.
        return event.get("step") or -1
    return event.get("to_step") if event["event"] == "rollback" else None


def _subject(event: Event) -> tuple:
    return tuple(event.get(key) for key in ("event", "step", "source", "split", "task", "few_shots"))


def read_end(run: Path, *, lines: int = 2000, look_back_bytes: int = 1 << 22) -> list[Event]:
    """Reads a run's last events, without superseded ones. The time doesn't grow with the file.

    lines: number of last lines to read. Also reads rare events in the `look_back_bytes` before the end.
    """
    with open(run / METRICS_FILE, "rb") as file:
        begin = max(0, file.seek(0, os.SEEK_END) - look_back_bytes)
        file.seek(begin)
        # A read that doesn't start at byte 0 usually starts in the middle of a line, so drop that line.
        all_lines = file.read().split(b"\n")[1 if begin else 0 :]
    # Compare prefixes, because parsing 4 MB of JSON is slow.
    rare = [line for line in all_lines[:-lines] if not line.startswith(FREQUENT)]
    return current_events(parse_lines([*rare, *all_lines[-lines:]]))


def last_start(run: Path) -> Event:
    """Returns the newest `start` event anywhere in the file, or {}."""
    with open(run / METRICS_FILE, "rb") as file:
        events = parse_lines(line for line in file if line.startswith(b'{"event": "start"'))
    return events[-1] if events else {}


def last_good_end(run: Path) -> Event:
    """Returns the last `end` event with exit code 0, or {}. A run writes it after the export."""
    ends = [event for event in read_metrics(run) if event["event"] == "end" and event.get("code") == 0]
    return ends[-1] if ends else {}
