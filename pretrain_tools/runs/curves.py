"""The curves of a run as columns of numbers: every point with its step, tokens, hours and FLOPs.

`Curves` takes events in the order of the log: all at once for a plot, or as a live run writes them.
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
"""Columns of a step that are kept as they are; of the others a point has the mean of its steps."""
MEASURES = ("loss", "grad_norm", "tokens_per_second", "mfu", "peak_memory_bytes")
EXTREMES = ("loss", "grad_norm")
"""Measures of which a point also has the least and the largest, as loss_low and loss_high: no spike is lost."""
MOST_STEPS = 2400
INTERVALS = 600
"""Longer runs are divided into equal intervals, a point for each."""
MOST_HAPPENED = 400
"""Events of a kind, the last ones."""

Columns = dict[str, list[float | None]]


@dataclass(frozen=True)
class RunCurves:
    """The drawn curves of a run; each group of columns but by_position has step, tokens, hours and flops.

    hours: of running; flops: of forward and backward, as MFU counts.
    """

    train: Columns
    validation: dict[str, Columns]
    """{source, 'source, average' of averaged weights, 'source, stage's length' where that differs: columns with
    loss}"""
    scores: dict[str, Columns]
    """{evaluation: columns with value and standard_error}"""
    by_position: dict[str, Columns]
    """{'source, step N' of the last validation in each stage: {position: the end of each range, loss}}"""
    happened: list[dict[str, Any]]
    """Events that are no figures: event, text, time as text, and the four positions."""
    flops_are_exact: bool
    """False: 6 FLOPs per parameter and token, where the run does not record its own figure."""


@dataclass
class Curves:
    """The current events of one run: steps that were repeated count as they were the last time."""

    train: dict[str, array] = field(default_factory=lambda: {name: array("d") for name in (*LOGGED, *MEASURES)})
    validation: dict[str, dict[int, Event]] = field(default_factory=dict)
    """{source: {step: event}}"""
    scores: dict[str, dict[int, Score]] = field(default_factory=dict)
    """{name: {step: score}}"""
    happened: list[Event] = field(default_factory=list)
    start: Event = field(default_factory=dict)
    """The last one."""

    def add(self, events: Iterable[Event]) -> None:
        """Takes further events, which have `hours`."""
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
        # Steps after this one are trained again, and what was measured at them belongs to no curve.
        kept = int(np.searchsorted(np.array(self.train["step"]), step, "right"))
        for values in self.train.values():
            del values[kept:]
        for measured in itertools.chain(self.validation.values(), self.scores.values()):
            for later in [at for at in measured if at > step]:
                del measured[later]

    def drawn(self, most_steps: int = MOST_STEPS) -> RunCurves:
        """The curves; of more steps than `most_steps`, INTERVALS points."""
        train = thinned({name: np.array(values) for name, values in self.train.items()}, most_steps)
        points = [dict(zip(train, row, strict=True)) for row in zip(*train.values(), strict=True)]
        flops_per_token, is_exact = flops_per_token_of_start(self.start)
        places = Places(points, flops_per_token, [event for event in self.happened if event["event"] == "stage"])
        validation = {source: list(by_step.values()) for source, by_step in self.validation.items()}
        kinds = (("", "loss"), (", average", "average_loss"), (", stage's length", "stage_loss"))
        happened = newest_of_each_kind(self.happened)
        scores = {name: [at[step] for step in sorted(at)] for name, at in self.scores.items() if at}
        return RunCurves(
            # Last, so that what was logged replaces what was interpolated.
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
    """The last MOST_HAPPENED events of each kind, in their order."""
    kept = []
    counts = Counter()
    for event in reversed(events):
        counts[event["event"]] += 1
        if counts[event["event"]] <= MOST_HAPPENED:
            kept.append(event)
    return kept[::-1]


def curves_of(history: History) -> RunCurves:
    """The curves of a whole run."""
    curves = Curves()
    curves.add(history.events)
    return curves.drawn()


def thinned(train: dict[str, NDArray], most_steps: int) -> Columns:
    """Columns of at most `most_steps` or INTERVALS points, with NaN as None.

    A point stands for an interval of steps: it has the last step's place, and of each measure the mean; a mean of the
    extremes alone would mislead.
    """
    count = len(train["step"])
    if count == 0:
        return {name: [] for name in (*train, *(f"{name}_{end}" for name in EXTREMES for end in ("low", "high")))}
    # Equal numbers of steps, so that every mean is over as many.
    first = np.arange(count) if count <= most_steps else np.arange(INTERVALS) * count // INTERVALS
    last = np.append(first[1:], count) - 1
    columns = {name: train[name][last] for name in LOGGED}
    for name in MEASURES:
        known = np.isfinite(train[name])
        counts = np.add.reduceat(known, first, dtype=float)
        sums = np.add.reduceat(np.where(known, train[name], 0.0), first)
        columns[name] = np.divide(sums, counts, out=np.full(len(first), np.nan), where=counts > 0)
    for name in EXTREMES:
        # fmin and fmax leave NaN out, unlike minimum and maximum.
        columns[f"{name}_low"] = np.fmin.reduceat(train[name], first)
        columns[f"{name}_high"] = np.fmax.reduceat(train[name], first)
    return {name: [rounded(value) for value in values.tolist()] for name, values in columns.items()}


def flops_per_token_of(history: History) -> tuple[float | None, bool]:
    """(FLOPs per token, whether the run recorded it); 6N if it did not, None if not even N is known."""
    return flops_per_token_of_start(history.last("start"))


def flops_per_token_of_start(start: Event) -> tuple[float | None, bool]:
    """See `flops_per_token_of`."""
    stated = start.get("flops_per_token")
    if is_number(stated):
        return float(stated), True
    parameters = start.get("active_parameters", start.get("parameters"))
    return (6.0 * parameters, False) if is_number(parameters) else (None, False)


class Places:
    """Tokens and hours at any step of a run: between logged steps by straight lines, after the last as there."""

    def __init__(self, train: Sequence[Event], flops_per_token: float | None, stages: Sequence[Event] = ()):
        known = [e for e in train if is_number(e.get("tokens")) and is_number(e.get("hours"))]
        self._steps = np.array([0, *(e["step"] for e in known)])
        self._columns = {key: np.array([0.0, *(e[key] for e in known)]) for key in ("tokens", "hours")}
        self._rates = [(0.0, flops_per_token)] if flops_per_token else []
        """(tokens, FLOPs of each from there on)."""
        for stage in stages if self._rates else ():
            begin = float(np.interp(stage["step"], self._steps, self._columns["tokens"]))
            # After a rollback a run comes to a stage again.
            self._rates = [rate for rate in self._rates if rate[0] < begin] + [(begin, stage["flops_per_token"])]

    def of(self, events: Sequence[Event]) -> Columns:
        """{step, tokens, hours, flops} of the events; None where an event belongs to no step."""
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
    """[{name: value}] of the points."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def losses_by_position(validation: dict[str, list[Event]]) -> dict[str, Columns]:
    """See `RunCurves`; empty for windows of a single range."""
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
    """'2026-01-31 12:00:00', in local time; '' of an event without a time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"])) if is_number(event.get("time")) else ""


def rounded(value: Any) -> float | None:
    """A number to six digits, which is more than a screen shows and keeps the page small; None for any other."""
    if not is_number(value) or not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() and abs(value) < 1e15 else float(f"{value:.6g}")
