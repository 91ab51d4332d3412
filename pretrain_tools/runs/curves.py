"""Turns a run's events into curves: columns of numbers, every point with its step, tokens, hours and FLOPs.

`Curves` accepts events in log order, either all at once for a plot or incrementally from a live run.
"""

import itertools
import math
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrain.runs.event_log import Event
from pretrain_tools.runs.history import History, Score, is_number, repeats_after, scores_of
from pretrain_tools.runs.status import FIGURES, facts_text

LOGGED = ("step", "tokens", "hours", "learning_rate")
"""Columns for which a point takes the value of its last step; all others are averaged over the point's steps."""
MEASURES = ("loss", "grad_norm", "tokens_per_second", "mfu", "peak_memory_bytes")
EXTREMES = ("loss", "grad_norm")
"""Measures that also get a minimum and maximum per point (loss_low, loss_high), so that no spike is lost."""
MOST_STEPS = 2400
"""Logged steps up to which every step is a point."""
INTERVALS = 600
"""Points of a longer run, one per equal interval of logged steps."""
MOST_HAPPENED = 400
"""Maximum number of events kept per kind; the newest win."""

Columns = dict[str, list[float | None]]


@dataclass(frozen=True)
class RunCurves:
    """The curves of a run, ready to draw. All groups of columns except by_position have step, tokens, hours and flops.

    hours: running time, without gaps between processes. flops: forward and backward, counted as for MFU.
    """

    train: Columns
    validation: dict[str, Columns]
    """Columns with `loss`, by source. 'SOURCE, average' has the loss of the averaged weights; "SOURCE, stage's length"
    the loss at the stage's sequence length, if that differs from the final one."""
    scores: dict[str, Columns]
    """Columns with `value` and `standard_error`, by name of the score."""
    by_position: dict[str, Columns]
    """Columns `position` (end of each range, in tokens) and `loss`, by 'SOURCE, step N'; N is a stage's last
    validation."""
    happened: list[dict[str, Any]]
    """Events other than measurements: event, text, time as text, and step, tokens, hours and flops."""
    flops_are_exact: bool
    """False if the run did not record its FLOPs per token, so that they are estimated as 6 per parameter."""


@dataclass
class Curves:
    """The curves of one run, built event by event; if steps were repeated, only the last attempt counts."""

    train: dict[str, array] = field(default_factory=lambda: {name: array("d") for name in (*LOGGED, *MEASURES)})
    validation: dict[str, dict[int, Event]] = field(default_factory=dict)
    """Validation events by source and step."""
    scores: dict[str, dict[int, Score]] = field(default_factory=dict)
    """Scores by name and step."""
    happened: list[Event] = field(default_factory=list)
    start: Event = field(default_factory=dict)
    """The last `start` event."""

    def add(self, events: Iterable[Event]) -> None:
        """Appends events; each must have `hours`, as added by `count_hours`."""
        for event in events:
            back_to = repeats_after(event)
            if back_to is not None:
                self._go_back(back_to)
            if event["event"] == "train":
                if is_number(event.get("step")):
                    for name, values in self.train.items():
                        values.append(event[name] if is_number(event.get(name)) else math.nan)
            elif event["event"] == "validation":
                if is_number(event.get("step")):
                    self.validation.setdefault(str(event.get("source")), {})[event["step"]] = event
            elif event["event"] == "evaluation":
                for score in scores_of(event):
                    self.scores.setdefault(score.name, {})[score.step or 0] = score
            elif event["event"] not in FIGURES:
                self.happened.append(event)
                self.start = event if event["event"] == "start" else self.start

    def _go_back(self, step: int) -> None:
        # Later steps are trained again, so measurements taken at them no longer describe the model.
        # searchsorted works because steps ascend: whatever a repeat superseded is already deleted.
        kept = int(np.searchsorted(np.array(self.train["step"]), step, "right"))
        for values in self.train.values():
            del values[kept:]
        for measured in itertools.chain(self.validation.values(), self.scores.values()):
            for later in [at for at in measured if at > step]:
                del measured[later]

    def drawn(self, most_steps: int = MOST_STEPS) -> RunCurves:
        """Returns the curves, reduced to INTERVALS points if there are more than `most_steps` steps."""
        train = thinned({name: np.array(values) for name, values in self.train.items()}, most_steps)
        points = [dict(zip(train, row, strict=True)) for row in zip(*train.values(), strict=True)]
        flops_per_token, is_exact = flops_per_token_of_start(self.start)
        places = Places(points, flops_per_token, [event for event in self.happened if event["event"] == "stage"])
        validation = {source: list(by_step.values()) for source, by_step in self.validation.items()}
        kinds = (("", "loss"), (", average", "average_loss"), (", stage's length", "stage_loss"))
        happened = newest_of_each_kind(self.happened)
        scores = {name: [at[step] for step in sorted(at)] for name, at in self.scores.items() if at}
        return RunCurves(
            # `train` comes last: logged tokens and hours replace interpolated ones.
            train={**places.of([{"event": "train", **point} for point in points]), **train},
            validation={
                source + of: {**places.of(events), "loss": [rounded(e.get(key)) for e in events]}
                for source, events in validation.items()
                for of, key in kinds
                if any(is_number(e.get(key)) for e in events) or (events and not of)
            },
            scores={
                name: {
                    **places.of([{"step": score.step, "tokens": score.tokens} for score in found]),
                    "value": [rounded(score.value) for score in found],
                    "standard_error": [rounded(score.standard_error) for score in found],
                }
                for name, found in scores.items()
            },
            by_position=losses_by_position(validation),
            happened=[
                {"event": event["event"], "text": facts_text(event), "time": time_text(event), **place}
                for event, place in zip(happened, rows_of(places.of(happened)), strict=True)
            ],
            flops_are_exact=is_exact,
        )


def newest_of_each_kind(events: Sequence[Event]) -> list[Event]:
    """Returns the last MOST_HAPPENED events of each kind, in log order."""
    kept = []
    counts = Counter()
    for event in reversed(events):
        counts[event["event"]] += 1
        if counts[event["event"]] <= MOST_HAPPENED:
            kept.append(event)
    return kept[::-1]


def curves_of(history: History) -> RunCurves:
    """Returns the curves of a whole run."""
    curves = Curves()
    curves.add(history.events)
    return curves.drawn()


def thinned(train: dict[str, NDArray], most_steps: int) -> Columns:
    """Reduces columns of more than `most_steps` steps to INTERVALS points; NaN becomes None.

    A point stands for an interval of steps: it has the position of the last step and the mean of each measure, plus
    the minimum and maximum of EXTREMES.
    """
    count = len(train["step"])
    if count == 0:
        return {name: [] for name in (*train, *(f"{name}_{end}" for name in EXTREMES for end in ("low", "high")))}
    # Intervals of equal numbers of steps, so that all means are equally noisy.
    first = np.arange(count) if count <= most_steps else np.arange(INTERVALS) * count // INTERVALS
    last = np.append(first[1:], count) - 1
    columns = {name: train[name][last] for name in LOGGED}
    for name in MEASURES:
        known = np.isfinite(train[name])
        counts = np.add.reduceat(known, first, dtype=float)
        sums = np.add.reduceat(np.where(known, train[name], 0.0), first)
        columns[name] = np.divide(sums, counts, out=np.full(len(first), np.nan), where=counts > 0)
    for name in EXTREMES:
        # fmin and fmax ignore NaN; minimum and maximum would propagate it.
        columns[f"{name}_low"] = np.fmin.reduceat(train[name], first)
        columns[f"{name}_high"] = np.fmax.reduceat(train[name], first)
    return {name: [rounded(value) for value in values.tolist()] for name, values in columns.items()}


def flops_per_token_of(history: History) -> tuple[float | None, bool]:
    """Returns (FLOPs per token, True if the run recorded them).

    Falls back to 6 N for N active parameters (Kaplan et al., arXiv 2001.08361), and to None if N is unknown too.
    """
    return flops_per_token_of_start(history.last("start"))


def flops_per_token_of_start(start: Event) -> tuple[float | None, bool]:
    """Does what `flops_per_token_of` does, given the `start` event."""
    stated = start.get("flops_per_token")
    if is_number(stated):
        return float(stated), True
    parameters = start.get("active_parameters", start.get("parameters"))
    return (6.0 * parameters, False) if is_number(parameters) else (None, False)


class Places:
    """Maps steps to tokens, hours and FLOPs: linear between logged steps, constant after the last one.

    Curriculum stages may change the FLOPs per token, because attention's share grows with the sequence length.
    """

    def __init__(self, train: Sequence[Event], flops_per_token: float | None, stages: Sequence[Event] = ()):
        known = [e for e in train if is_number(e.get("tokens")) and is_number(e.get("hours"))]
        self._steps = np.array([0, *(e["step"] for e in known)])
        self._columns = {key: np.array([0.0, *(e[key] for e in known)]) for key in ("tokens", "hours")}
        self._rates = [(0.0, flops_per_token)] if flops_per_token else []
        """Pairs (tokens, FLOPs per token from there on)."""
        for stage in stages if self._rates else ():
            begin = float(np.interp(stage["step"], self._steps, self._columns["tokens"]))
            # After a rollback, a run can enter the same stage again: drop the earlier entry.
            self._rates = [rate for rate in self._rates if rate[0] < begin] + [(begin, stage["flops_per_token"])]

    def of(self, events: Sequence[Event]) -> Columns:
        """Returns columns step, tokens, hours and flops for the events; None for an event without a step."""
        steps = [event.get("step") for event in events]
        columns: Columns = {"step": steps}
        for key, values in self._columns.items():
            at = np.interp([step or 0 for step in steps], self._steps, values).tolist()
            columns[key] = [None if step is None else rounded(v) for step, v in zip(steps, at, strict=True)]
        columns["flops"] = [
            None if tokens is None or not self._rates else rounded(self._flops(tokens)) for tokens in columns["tokens"]
        ]
        return columns

    def _flops(self, tokens: float) -> float:
        ends = [*(begin for begin, _ in self._rates[1:]), math.inf]
        parts = zip(self._rates, ends, strict=True)
        return sum(max(0.0, min(tokens, end) - begin) * rate for (begin, rate), end in parts)


def rows_of(columns: Columns) -> list[dict[str, float | None]]:
    """Converts columns to one dict per point."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def losses_by_position(validation: dict[str, list[Event]]) -> dict[str, Columns]:
    """Collects `RunCurves.by_position`; empty if all positions are in a single range."""
    found = {}
    for source, events in validation.items():
        measured = [event for event in events if len(event.get("loss_by_position") or {}) > 1]
        for _, of_stage in itertools.groupby(measured, key=lambda event: event.get("stage_sequence_length")):
            last = list(of_stage)[-1]
            ends = [int(name.partition("-")[2]) + 1 for name in last["loss_by_position"]]
            losses = [rounded(loss) for loss in last["loss_by_position"].values()]
            found[f"{source}, step {last['step']:,}"] = {"position": ends, "loss": losses}
    return found


def time_text(event: Event) -> str:
    """Formats an event's local time as '2026-01-31 12:00:00'; '' if it has none."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"])) if is_number(event.get("time")) else ""


def rounded(value: Any) -> float | None:
    """Rounds to six significant digits, to keep the page small; None for anything but a finite number."""
    if not is_number(value) or not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() and abs(value) < 1e15 else float(f"{value:.6g}")
