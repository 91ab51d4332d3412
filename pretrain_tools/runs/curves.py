"""Turns a run's history into curves: columns of numbers, every point with its step, tokens, hours and FLOPs."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pretrain.runs.event_log import Event
from pretrain_tools.runs.history import History, is_number
from pretrain_tools.runs.status import FIGURES, facts_text, time_text

LOGGED = ("step", "tokens", "hours", "learning_rate")
"""Columns for which a point takes the value of its last step; all others are averaged over the point's steps."""
MEASURES = ("loss", "grad_norm", "tokens_per_second", "mfu", "peak_memory_bytes")
EXTREMES = ("loss", "grad_norm")
"""Measures that also get a minimum and maximum per point (loss_low, loss_high), so that no spike is lost."""
VALIDATION_LOSSES = {"": "loss", ", average": "average_loss", ", stage's length": "stage_loss"}
"""{what follows the source in a curve's name: key of the validation event}"""
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


def curves_of(history: History, most_steps: int = MOST_STEPS) -> RunCurves:
    """Returns the curves of a run, reduced to INTERVALS points if there are more than `most_steps` steps."""
    places = Places(history)
    train = thinned([event for event in history.of("train") if is_number(event.get("step"))], most_steps)
    validation = {}
    for source, events in history.validation().items():
        for suffix, key in VALIDATION_LOSSES.items():
            losses = [rounded(event.get(key)) for event in events]
            if any(loss is not None for loss in losses) or not suffix:
                validation[source + suffix] = {**places.at([event.get("step") for event in events]), "loss": losses}
    scores = {
        name: {
            **places.at([score.step for score in found]),
            "value": [rounded(score.value) for score in found],
            "standard_error": [rounded(score.standard_error) for score in found],
        }
        for name, found in history.scores().items()
    }
    return RunCurves(
        # `train` comes last: logged tokens and hours replace interpolated ones.
        train={**places.at(train["step"]), **train},
        validation=validation,
        scores=scores,
        by_position=losses_by_position(history.validation()),
        happened=[
            {"event": event["event"], "text": facts_text(event), "time": time_text(event), **places.of(event)}
            for event in newest_of_each_kind([event for event in history.events if event["event"] not in FIGURES])
        ],
        flops_are_exact=places.flops_are_exact,
    )


class Places:
    """Maps steps to tokens, hours and FLOPs: linear between logged steps, constant after the last one."""

    def __init__(self, history: History):
        per_token, self.flops_are_exact = flops_per_token_of(history)
        known = [e for e in history.of("train") if all(is_number(e.get(key)) for key in ("step", "tokens", "hours"))]
        steps = [0, *(event["step"] for event in known)]
        # Curriculum stages may change the FLOPs per token, because attention's share grows with the sequence length.
        rates = {0: per_token or math.nan}
        for stage in history.of("stage") if per_token else ():
            # After a rollback, a run can enter the same stage again: drop what it had from there on.
            rates = {step: rate for step, rate in rates.items() if step < stage["step"]}
            rates[stage["step"]] = stage["flops_per_token"]
        self._steps = np.unique([*steps, *rates])
        tokens, hours = (
            np.interp(self._steps, steps, [0.0, *(event[key] for event in known)]) for key in ("tokens", "hours")
        )
        rate_since = np.searchsorted(list(rates), self._steps[:-1], side="right") - 1
        flops = np.cumsum(np.diff(tokens) * np.array(list(rates.values()))[rate_since])
        self._columns = {"tokens": tokens, "hours": hours, "flops": np.append(0.0 if per_token else math.nan, flops)}

    def at(self, steps: Sequence[float | None]) -> Columns:
        """Returns the columns step, tokens, hours and flops; None for a step that is None, and for unknown FLOPs."""
        known = np.array(steps, dtype=float)  # None becomes NaN, which stays NaN
        columns = {
            name: [rounded(value) for value in np.interp(known, self._steps, values).tolist()]
            for name, values in self._columns.items()
        }
        return {"step": list(steps), **columns}

    def of(self, event: Event) -> dict[str, float | None]:
        """Returns step, tokens, hours and flops of one event."""
        return {name: values[0] for name, values in self.at([event.get("step")]).items()}


def flops_per_token_of(history: History) -> tuple[float | None, bool]:
    """Returns (FLOPs per token, True if the run recorded them).

    Falls back to 6 N for N active parameters (Kaplan et al., arXiv 2001.08361), and to None if N is unknown too.
    """
    start = history.last("start")
    stated = start.get("flops_per_token")
    if is_number(stated):
        return float(stated), True
    parameters = start.get("active_parameters", start.get("parameters"))
    return (6.0 * parameters, False) if is_number(parameters) else (None, False)


def thinned(train: Sequence[Event], most_steps: int) -> Columns:
    """Reduces more than `most_steps` events to INTERVALS points; what is no finite number becomes None.

    A point stands for an interval of steps: it has the position of the last step and the mean of each measure, plus
    the minimum and maximum of EXTREMES.
    """
    values = {
        name: np.array([event[name] if is_number(event.get(name)) else math.nan for event in train])
        for name in (*LOGGED, *MEASURES)
    }
    count = len(train)
    # Intervals of equal numbers of steps, so that all means are equally noisy.
    first = np.arange(count) if count <= most_steps else np.arange(INTERVALS) * count // INTERVALS
    last = np.append(first, count)[1:] - 1
    columns = {name: values[name][last] for name in LOGGED}
    for name in MEASURES:
        known = np.isfinite(values[name])
        counts = np.add.reduceat(known, first, dtype=float)
        sums = np.add.reduceat(np.where(known, values[name], 0.0), first)
        columns[name] = np.divide(sums, counts, out=np.full(len(first), np.nan), where=counts > 0)
    for name in EXTREMES:
        # fmin and fmax ignore NaN; minimum and maximum would propagate it.
        columns[f"{name}_low"] = np.fmin.reduceat(values[name], first)
        columns[f"{name}_high"] = np.fmax.reduceat(values[name], first)
    return {name: [rounded(value) for value in points.tolist()] for name, points in columns.items()}


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


def newest_of_each_kind(events: Sequence[Event]) -> list[Event]:
    """Returns the last MOST_HAPPENED events of each kind, in log order."""
    kept = []
    counts = Counter()
    for event in reversed(events):
        counts[event["event"]] += 1
        if counts[event["event"]] <= MOST_HAPPENED:
            kept.append(event)
    return kept[::-1]


def rounded(value: Any) -> float | None:
    """Rounds to six significant digits, to keep the page small; None for anything but a finite number."""
    if not is_number(value) or not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() and abs(value) < 1e15 else float(f"{value:.6g}")
