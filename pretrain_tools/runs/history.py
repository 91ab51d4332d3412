"""Reads metrics.jsonl, or only its end, and drops lines superseded by repeated steps.

A run that resumes from a checkpoint or rolls back repeats steps. The old lines stay in the file, but only the last
attempt produced the model. A `start` event records the step that a process resumed from, and a `rollback` event the
step it went back to.
"""

import json
import math
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path

from pretrain.data.data_record import DATA_FILE
from pretrain.errors import InputError, Problems, did_you_mean
from pretrain.runs.event_log import CURVES, Event, is_cut, last_events, parse_lines, read_metrics
from pretrain.runs.run_folder import METRICS_FILE, output_problem, read_config, read_json, setting
from pretrain.units import energy_text

BY_OTHER_PROCESSES = frozenset({"evaluation", "publish"})
"""Events written by other processes, possibly long after the run has ended. They don't count as running time."""
MEASURED = frozenset({"validation", "evaluation"})
"""Events that can repeat a measurement at the same step. Only the last one is used, preferably one without --limit."""
NO_MEASURES = {"step", "tokens", "few_shots", "time", "hours", "samples", "limit", "evaluated_tokens"}
"""Keys of an `evaluation` event whose numbers aren't scores."""
CONTAMINATION_KEYS = {"benchmark", "items", "sought", "found", "documents", "remove"}
"""Keys of a row in data.json's contamination (see data/data_record.py)."""

MEASURES = {
    "activation_rms": "RMS of activations",
    "weight_rms": "RMS of weights",
    "gradient_rms": "RMS of gradients, before clipping",
    "update_rms": "RMS of updates",
    "largest_logit": "Largest attention logit",
    "units_off": "Fraction of inactive units",
}
"""{key of a diagnostics event: title}. The event contains one value per layer."""


@dataclass(frozen=True)
class Score:
    """A single metric from an evaluation."""

    task: str
    """Task name, or data source for a loss."""
    metric: str
    """lm-eval's name, such as acc or exact_match,strict-match. For a source: loss, perplexity or bits_per_byte."""
    value: float
    standard_error: float | None = None
    few_shots: int | None = None
    split: str | None = None
    step: int | None = None
    is_whole: bool = True
    """True if all documents of the task were scored (no --limit)."""

    @property
    def name(self) -> str:
        """'hellaswag (5-shot) · acc', 'docs validation · bits_per_byte'"""
        detail = f" ({self.few_shots}-shot)" if self.few_shots else f" {self.split}" if self.split else ""
        return f"{self.task}{detail} · {self.metric}"

    @property
    def text(self) -> str:
        """'0.2500 ± 0.0100'"""
        return f"{self.value:.4f}" + ("" if self.standard_error is None else f" ± {self.standard_error:.4f}")


@dataclass(frozen=True)
class History:
    """A run's events. Each event includes `hours`, the running time so far, excluding gaps between processes."""

    folder: Path
    events: list[Event] = field(repr=False)
    joules: float = 0.0
    """Energy of all logged steps, including repeated ones; 0 if not logged."""

    @classmethod
    def of_events(cls, folder: Path, logged: list[Event]) -> "History":
        """Builds a history from logged events. Adds `hours` to them in place."""
        count_hours(logged)
        joules = sum(event["joules"] for event in measured(logged, "joules"))
        return cls(folder, current_events(logged), joules)

    @property
    def energy(self) -> str | None:
        """Energy of all logged steps as text, with the emissions if their intensity is set; None if not logged."""
        if not self.joules:
            return None
        grid = setting(read_config(self.folder), "energy.carbon_grams_per_kwh")
        return energy_text(self.joules, self.last("start").get("energy"), grid)

    def of(self, name: str) -> list[Event]:
        """Returns the events with this name, in order."""
        return [event for event in self.events if event["event"] == name]

    def last(self, name: str) -> Event:
        """Returns the last event with this name, or {}."""
        return next((event for event in reversed(self.events) if event["event"] == name), {})

    def values(self, measure: str) -> list[float]:
        """Returns a metric's values at the logged steps. Skips missing ones."""
        return [event[measure] for event in measured(self.of("train"), measure)]

    def median(self, measure: str) -> float | None:
        """Returns the median of a metric over the logged steps."""
        values = self.values(measure)
        return statistics.median(values) if values else None

    def validation(self) -> dict[str, list[Event]]:
        sources: dict[str, list[Event]] = {}
        for event in self.of("validation"):
            sources.setdefault(str(event.get("source")), []).append(event)
        return sources

    def scores(self) -> dict[str, list[Score]]:
        """Returns {name: scores sorted by step} for all evaluations during and after the run."""
        scores: dict[str, list[Score]] = {}
        for event in self.of("evaluation"):
            for score in scores_of(event):
                scores.setdefault(score.name, []).append(score)
        return {name: sorted(points, key=lambda score: score.step or 0) for name, points in scores.items()}


def scores_of(event: Event) -> list[Score]:
    """Returns the scores in an `evaluation` event. Skips subtasks whose group has its own score."""
    if event.get("is_part"):
        return []
    about = {key: event.get(key) for key in ("few_shots", "split", "step")}
    about |= {"task": str(event.get("task") or event.get("source")), "is_whole": event.get("limit") is None}
    measures = {key: value for key, value in event.items() if key not in NO_MEASURES and is_number(value)}
    scores = []
    for key, value in measures.items():
        if "_stderr" not in key:
            # lm-eval appends the answer filter after a comma, as in 'acc,none' and 'acc_stderr,none'.
            error = measures.get(re.sub("(?=,|$)", "_stderr", key, count=1))
            scores.append(Score(metric=key.removesuffix(",none"), value=value, standard_error=error, **about))
    return scores


def is_number(value: object) -> bool:
    """Returns True for a finite number."""
    # bool is a subclass of int. Other programs may log NaN, which train.py logs as null.
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def measured(events: Iterable[Event], measure: str) -> list[Event]:
    """Returns the events in which a value is a finite number."""
    return [event for event in events if is_number(event.get(measure))]


def require_run(folder: Path) -> Path:
    """Returns the folder if it is a run. Otherwise raises an InputError that explains why it isn't."""
    if (folder / METRICS_FILE).is_file():
        return folder
    refuse_url(str(folder))
    if folder.is_dir():
        inside = ", ".join(map(str, find_runs(folder)[:8])) or "none"
        raise InputError(
            f"{folder}: is not a run, or has not started: it has no {METRICS_FILE}; runs in this folder: {inside}"
        )
    # Search only siblings, because the parent may be / or a home directory.
    siblings = map(str, find_runs(folder.parent, depth=1))
    raise InputError(f"{folder}: no such run{did_you_mean(str(folder), siblings)}")


def refuse_url(text: str) -> None:
    """Raises InputError if the text is a URL, even if Path has collapsed its double slash."""
    if url := url_in(text):
        raise InputError(
            f"{url}: only local runs are supported; download it with python -m pretrain.checkpoint.mirror_fetch "
            f"{url.partition('@')[0]}, then use runs/NAME"
        )


def require_output(option: str, path: Path, file_name: str | None = None) -> Path:
    """Returns the path of an output folder or, with an example of a file name, of an output file.

    Raises InputError if it can't be written, or is a URL.
    """
    if url := url_in(str(path)):
        raise InputError(f"{option} {url}: must be a local path; write it to this machine and upload it from there")
    if file_name and path.is_dir():
        raise InputError(f"{option} {path}: is a folder; use a path such as {path / file_name}")
    if problem := output_problem(path.parent if file_name else path):
        raise InputError(problem.replace("output", option, 1))
    return path


def url_in(text: str) -> str | None:
    """Returns the URL, or None if the text isn't one. Adds a slash that Path has dropped."""
    scheme, colon, rest = text.partition(":/")
    is_url = colon and scheme.isidentifier() and not Path(text).exists()
    return f"{scheme}://{rest.lstrip('/')}" if is_url else None


def require_runs(folders: Iterable[Path]) -> list[Path]:
    """Returns the folders. Raises InputError listing all folders that aren't runs."""
    problems = Problems()
    runs = [problems.attempt(require_run, folder) for folder in folders]
    problems.stop_if_any()
    return runs


def find_runs(folder: Path, *, depth: int = 3) -> list[Path]:
    """Returns the runs in a folder and its subfolders, sorted by name. Skips runs inside other runs."""
    patterns = ["*/" * level + METRICS_FILE for level in range(depth + 1)]
    found = {(folder / log).parent for pattern in patterns for log in glob(pattern, root_dir=folder)}
    return sorted(run for run in found if found.isdisjoint(run.parents) and (run / METRICS_FILE).is_file())


def read_history(run: Path) -> History:
    """Reads a run's history, at about 100,000 lines per second. Raises InputError if the folder isn't a run."""
    events = read_metrics(require_run(run))
    if not events:
        raise InputError(f"{run / METRICS_FILE}: contains no events yet; wait until the run has started")
    return History.of_events(run, events)


def read_data_record(run: Path) -> dict[str, dict]:
    """Reads a run's data.json. Returns {} if it is missing or damaged."""
    records = read_json(run / DATA_FILE)
    return records if all(map(_is_data_record, records.values())) else {}


def _is_data_record(record: object) -> bool:
    if not isinstance(record, dict) or not isinstance(record.get("preparation") or {}, dict):
        return False
    rows = record.get("contamination") or []
    return isinstance(rows, list) and all(isinstance(row, dict) and row.keys() >= CONTAMINATION_KEYS for row in rows)


def append_events(run: Path, events: Iterable[Event]) -> None:
    """Appends events to metrics.jsonl, even while the run is writing to it. If that fails, prints a warning."""
    text = "".join(json.dumps(event, allow_nan=False) + "\n" for event in events)
    try:
        with open(run / METRICS_FILE, "a+b", buffering=0) as file:
            if is_cut(file):
                text = "\n" + text
            # A single unbuffered write in append mode can't interleave with other processes' lines.
            file.write(text.encode())
    except OSError as error:  # a full disk must not abort a long evaluation or an upload
        print(f"warning: cannot append to {run / METRICS_FILE} ({error})", file=sys.stderr)


def count_hours(events: list[Event]) -> None:
    """Adds `hours` to every event in place. Includes lost work after a crash, but not the time until the restart."""
    elapsed = 0.0
    previous = None
    for event in events:
        now = event.get("time")
        if is_number(now) and event["event"] not in BY_OTHER_PROCESSES:
            # The time before a `start` is a gap between processes. max(), because the clock may have been set back.
            if previous is not None and event["event"] != "start":
                elapsed += max(0.0, now - previous)
            previous = now
        event["hours"] = elapsed / 3600


def count_flops(history: History) -> float | None:
    """Adds `flops`, the training FLOPs so far, to the train events in place. Returns the last one, or None if unknown.

    They are counted as for MFU. If the run didn't record its FLOPs per token, they are estimated as 6 per active
    parameter (Kaplan et al., arXiv 2001.08361).
    """
    start = history.last("start")
    parameters = start.get("active_parameters", start.get("parameters"))
    per_token = start.get("flops_per_token") or (6 * parameters if parameters else None)
    if per_token is None:
        return None
    stages = history.of("stage")
    tokens = 0
    flops = 0.0
    for event in measured(history.of("train"), "tokens"):
        # Stages may change the sequence length, and with it the FLOPs per token.
        rates = [per_token, *(stage["flops_per_token"] for stage in stages if stage["step"] < event["step"])]
        flops += (event["tokens"] - tokens) * rates[-1]
        tokens = event["tokens"]
        event["flops"] = flops
    return flops


def current_events(events: Iterable[Event]) -> list[Event]:
    """Drops measurements superseded by repeated steps or evaluations."""
    current: list[Event] = []
    for event in events:
        if (back_to := repeats_after(event)) is not None:
            # Keep events such as checkpoint or warning; only curves must have one value per step.
            current = [e for e in current if e["event"] not in CURVES or (e.get("step") or 0) <= back_to]
        current.append(event)
    last: dict[tuple, Event] = {}
    for event in current:
        if event["event"] in MEASURED:
            before = last.get(_subject(event), event)
            # A quick test with --limit doesn't replace the scores on the whole task.
            is_whole = event.get("limit") is None or before.get("limit") is not None
            last[_subject(event)] = event if is_whole else before
    return [e for e in current if e["event"] not in MEASURED or last[_subject(e)] is e]


def repeats_after(event: Event) -> int | None:
    """Returns the last step that stays valid after this event, or None if the event doesn't move training back."""
    if event["event"] == "start":
        # -1, because a process that starts from scratch repeats even the validation at step 0.
        return event.get("step") or -1
    return event.get("to_step") if event["event"] == "rollback" else None


def _subject(event: Event) -> tuple:
    return tuple(event.get(key) for key in ("event", "step", "source", "split", "task", "few_shots"))


def read_end(run: Path) -> list[Event]:
    """Reads a run's last events, without superseded ones, in constant time."""
    return current_events(last_events(run))


def end_of(events: Sequence[Event]) -> Event:
    """Returns the `end` event of the newest process, or {} if that process is still training or has crashed."""
    last = next((event for event in reversed(events) if event["event"] in ("end", "start", "train")), {})
    return last if last.get("event") == "end" else {}


def planned_steps(events: Iterable[Event]) -> int | None:
    """Returns a run's last step, as planned by its newest start or changed by a later command, or None."""
    # A final decay (runs.py anneal, budget.minutes) records the new last step in a `control` event.
    planned = [e["total_steps"] for e in measured(events, "total_steps") if e["event"] in ("start", "control")]
    return planned[-1] if planned else None


def last_start(run: Path) -> Event:
    """Returns the last `start` event in the file, or {}."""
    with open(run / METRICS_FILE, "rb") as file:
        events = parse_lines(line for line in file if line.startswith(b'{"event": "start"'))
    return events[-1] if events else {}


def last_good_end(run: Path) -> Event:
    """Returns the last `end` event with exit code 0, written after the export, or {}."""
    newest_first = reversed(read_metrics(run))
    return next((event for event in newest_first if event["event"] == "end" and event.get("code") == 0), {})
