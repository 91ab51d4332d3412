"""The curves of a run, ready to be drawn: every point with its step, tokens, hours and FLOPs."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pretrain.runs.history import Event, History, is_number
from pretrain_tools.runs.comparison import recorded_settings, results_of, setting_differences
from pretrain_tools.runs.status import RunStatus, event_text

POSITIONS = ("step", "tokens", "hours", "flops")
"""The x-axes. hours: of running; flops: of forward and backward, as MFU counts."""
MEASURES = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu", "peak_memory_bytes")
MOST_BUCKETS = 600
MOST_MARKS_OF_A_KIND = 400
MARKS = {
    "resume": (">", "#009e73", "resumed"),
    "checkpoint": ("|", "#666666", "checkpoint"),
    "spike": ("^", "#d62728", "loss spike"),
    "skip": ("x", "#d62728", "step skipped"),
    "rollback": ("<", "#d62728", "rolled back"),
    "control": ("D", "#9467bd", "control command"),
    "divergence": ("P", "#d62728", "diverges"),
    "explosion": ("*", "#d62728", "gradient exploded"),
    "warning": ("v", "#e69f00", "warning"),
    "end": ("s", "#000000", "ended"),
}
"""{event worth a mark beside the curves: (matplotlib marker, colour, what the legend calls it)}"""

Columns = dict[str, list[float | None]]


@dataclass(frozen=True)
class RunCurves:
    """One run as columns of numbers; every group of columns has `step`, `tokens`, `hours` and `flops`."""

    name: str
    folder: str
    state: str
    results: dict[str, str]
    settings: dict[str, str]
    flops_are_exact: bool
    """False: 6 FLOPs per parameter and token, if the run does not record its own figure."""
    train: Columns
    train_means: Columns
    """What a smooth line is drawn through: each point's value or, where points were left out, the mean around it."""
    validation: dict[str, Columns]
    """{source, 'source, average' of averaged weights, 'source, stage's length' where that differs: columns, with
    loss}"""
    by_position: dict[str, Columns]
    """{'source, step N' of the last validation in each stage: {position: the end of each range, loss}}"""
    scores: dict[str, Columns]
    """{evaluation: columns, with value and standard_error}"""
    marks: list[dict[str, Any]] = field(repr=False)
    """event, text and the four positions."""


def curves_of(name: str, history: History, status: RunStatus) -> RunCurves:
    """The curves of one run; long ones thinned out so that every spike stays."""
    flops_per_token, exact = flops_per_token_of(history)
    place = Places(history.of("train"), flops_per_token, history.of("stage"))
    train, means = thin(history.of("train"))
    return RunCurves(
        name=name,
        folder=str(history.folder),
        state=status.state,
        results=results_of(history, status),
        settings={key: str(value) for key, value in recorded_settings(history.folder).items()},
        flops_are_exact=exact,
        train={**place.of(train), **{key: [_number(e.get(key)) for e in train] for key in MEASURES}},
        train_means=means,
        validation={
            source + of: {**place.of(events), "loss": [_number(e.get(key)) for e in events]}
            for source, events in history.validation().items()
            for of, key in (("", "loss"), (", average", "average_loss"), (", stage's length", "stage_loss"))
            if of == "" or any(is_number(e.get(key)) for e in events)
        },
        by_position=_by_position(history.validation()),
        scores={
            score: {
                **place.of([{"step": point.step, "tokens": point.tokens} for point in points]),
                "value": [_number(point.value) for point in points],
                "standard_error": [_number(point.standard_error) for point in points],
            }
            for score, points in history.scores().items()
        },
        marks=_marks(history, place),
    )


def flops_per_token_of(history: History) -> tuple[float | None, bool]:
    """(FLOPs per token, whether the run recorded it); 6N if it did not, None if not even N is known."""
    stated = history.last("start").get("flops_per_token")
    if is_number(stated):
        return float(stated), True
    start = history.last("start")
    parameters = start.get("active_parameters", start.get("parameters"))
    return (6.0 * parameters, False) if is_number(parameters) else (None, False)


class Places:
    """Tokens and hours at any step of a run: between logged steps by straight lines, after the last as there."""

    def __init__(self, train: list[Event], flops_per_token: float | None, stages: Sequence[Event] = ()):
        known = [e for e in train if is_number(e.get("tokens")) and is_number(e.get("hours"))]
        self._steps = np.array([0, *(e["step"] for e in known)])
        self._columns = {key: np.array([0.0, *(e[key] for e in known)]) for key in ("tokens", "hours")}
        self._rates = [(0.0, flops_per_token)] if flops_per_token else []
        """(tokens, FLOPs of each from there on)."""
        for stage in stages if self._rates else ():
            begin = float(np.interp(stage["step"], self._steps, self._columns["tokens"]))
            # After a rollback a run comes to a stage again.
            self._rates = [rate for rate in self._rates if rate[0] < begin] + [(begin, stage["flops_per_token"])]

    def of(self, events: list[Event]) -> Columns:
        """{step, tokens, hours, flops} of the events; None where an event belongs to no step."""
        columns: Columns = {"step": [e.get("step") for e in events]}
        for key in ("tokens", "hours"):
            at = np.interp([step or 0 for step in columns["step"]], self._steps, self._columns[key])
            columns[key] = [
                None if e.get("step") is None else _number(e[key] if _is_logged(e, key) else float(value))
                for e, value in zip(events, at, strict=True)
            ]
        columns["flops"] = [
            _number(self._flops(tokens)) if is_number(tokens) and self._rates else None for tokens in columns["tokens"]
        ]
        return columns

    def _flops(self, tokens: float) -> float:
        ends = [*(begin for begin, _ in self._rates[1:]), math.inf]
        parts = zip(self._rates, ends, strict=True)
        return sum(max(0.0, min(tokens, end) - begin) * rate for (begin, rate), end in parts)


def _by_position(validation: dict[str, list[Event]]) -> dict[str, Columns]:
    """See `RunCurves`; nothing for windows of a single range."""
    found = {}
    for source, events in validation.items():
        measured = [event for event in events if len(event.get("loss_by_position") or {}) > 1]
        for _, of_stage in itertools.groupby(measured, key=lambda event: event.get("stage_sequence_length")):
            last = list(of_stage)[-1]
            ends = [int(name.partition("-")[2]) + 1 for name in last["loss_by_position"]]
            losses = [_number(loss) for loss in last["loss_by_position"].values()]
            found[f"{source}, step {last['step']:,}"] = {"position": ends, "loss": losses}
    return found


def _is_logged(event: Event, key: str) -> bool:
    return event.get("event") == "train" and is_number(event.get(key))


def _number(value: Any) -> float | None:
    """Six digits are more than a screen shows, and keep the page small."""
    return (value if isinstance(value, int) else float(f"{value:.6g}")) if is_number(value) else None


def thin(events: list[Event]) -> tuple[list[Event], Columns]:
    """At most four events of each of MOST_BUCKETS equal stretches: its first, and its extremes of loss and norm.

    Also returns, for every measure and event that is kept, the mean over the whole stretch, for smooth lines: the mean
    of the extremes would lie.
    """
    count = len(events) if len(events) <= 4 * MOST_BUCKETS else MOST_BUCKETS
    bounds = [round(n * len(events) / count) for n in range(count + 1)] if events else [0]
    kept: list[Event] = []
    means: Columns = {key: [] for key in MEASURES}
    for first, end in itertools.pairwise(bounds):
        numbers = {first, end - 1} if end == len(events) else {first}
        for key, extreme in (("loss", max), ("loss", min), ("grad_norm", max)):
            known = [n for n in range(first, end) if is_number(events[n].get(key))]
            if known:
                numbers.add(extreme(known, key=lambda n, key=key: events[n][key]))
        kept += [events[n] for n in sorted(numbers)]
        for key, column in means.items():
            values = [event[key] for event in events[first:end] if is_number(event.get(key))]
            column += [_number(statistics.fmean(values)) if values else None] * len(numbers)
    return kept, means


def _marks(history: History, place: Places) -> list[dict[str, Any]]:
    marks = []
    for kind in MARKS:
        events = [event for event in history.of(kind) if is_number(event.get("step"))][-MOST_MARKS_OF_A_KIND:]
        columns = place.of(events)
        marks += [
            {"event": kind, "text": event_text(event), **{key: columns[key][number] for key in POSITIONS}}
            for number, event in enumerate(events)
        ]
    return marks


def differing_settings(runs: list[RunCurves]) -> dict[str, list[str]]:
    """{setting: its value in each run}, of those that differ; where a run writes is its name."""
    rows = setting_differences([run.settings for run in runs])
    return {name: ["-" if value is None else value for value in row] for name, row in rows.items() if name != "output"}
