"""Converts a run's history to curves: columns of values, with step, tokens, hours and FLOPs for each point."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrain.runs.event_log import Event
from pretrain_tools.runs.history import MEASURES, History, is_number
from pretrain_tools.runs.status import FIGURES

LOGGED = ("step", "tokens", "hours", "learning_rate", "loss", "grad_norm", "tokens_per_second")
VALIDATION_LOSSES = {"": "loss", ", average": "average_loss", ", stage's length": "stage_loss"}
"""{suffix of a curve's name: key in the validation event}"""

Columns = dict[str, NDArray]
"""Arrays of equal length, with NaN for missing values."""


@dataclass(frozen=True)
class RunCurves:
    """A run's curves. All columns except by_position include step, tokens, hours and flops.

    hours: running time, excluding gaps between processes. flops: forward and backward pass, counted as for MFU.
    """

    train: Columns
    validation: dict[str, Columns]
    """{source: columns with `loss`}. 'SOURCE, average' is the loss of the averaged weights. "SOURCE, stage's length"
    is the loss at the stage's sequence length, if it differs from the final one."""
    scores: dict[str, Columns]
    """{score name: columns with `value` and `standard_error`}"""
    by_position: dict[str, Columns]
    """{'SOURCE, step N': columns with `position` (end of each range, in tokens) and `loss`}. N is the last validation
    step of a stage."""
    diagnostics: dict[str, Columns]
    """{layer: columns of MEASURES}, in model order."""
    happened: dict[str, Columns]
    """{event name: columns}, without measurement events."""


def curves_of(history: History) -> RunCurves:
    places = Places(history)
    train = [event for event in history.of("train") if is_number(event.get("step"))]
    logged = {name: numbers(event.get(name) for event in train) for name in LOGGED}
    validation = {}
    for source, events in history.validation().items():
        for suffix, key in VALIDATION_LOSSES.items():
            losses = numbers(event.get(key) for event in events)
            if np.isfinite(losses).any() or not suffix:
                validation[source + suffix] = {**places.of(events), "loss": losses}
    scores = {
        name: places.at([score.step for score in found])
        | {key: numbers(getattr(score, key) for score in found) for key in ("value", "standard_error")}
        for name, found in history.scores().items()
    }
    measured = history.of("diagnostics")
    layers = dict.fromkeys(layer for event in measured for layer in event["layers"])
    diagnostics = {
        layer: places.of(measured)
        | {name: numbers(of_layer(event, name, layer) for event in measured) for name in MEASURES}
        for layer in layers
    }
    names = dict.fromkeys(event["event"] for event in history.events if event["event"] not in FIGURES)
    return RunCurves(
        # Logged tokens and hours override interpolated ones.
        train={**places.at(logged["step"]), **logged},
        validation=validation,
        scores=scores,
        by_position=losses_by_position(history.validation()),
        diagnostics=diagnostics,
        happened={name: places.of(history.of(name)) for name in names},
    )


def of_layer(event: Event, measure: str, layer: str) -> float | None:
    """Returns a layer's value from a diagnostics event."""
    return dict(zip(event["layers"], event[measure], strict=True)).get(layer)


def numbers(values: Iterable[Any]) -> NDArray:
    """Converts values to floats, with NaN for anything that isn't a number."""
    return np.array([value if is_number(value) else math.nan for value in values], dtype=float)


class Places:
    """Maps steps to tokens, hours and FLOPs, interpolating linearly between logged steps."""

    def __init__(self, history: History):
        start = history.last("start")
        per_token = start.get("flops_per_token")
        self.flops_are_exact = is_number(per_token)
        """False if the run didn't record its FLOPs per token, which are then estimated as 6 per active parameter
        (Kaplan et al., arXiv 2001.08361)."""
        if not self.flops_are_exact:
            parameters = start.get("active_parameters", start.get("parameters"))
            per_token = 6.0 * parameters if is_number(parameters) else None
        known = [e for e in history.of("train") if all(is_number(e.get(key)) for key in ("step", "tokens", "hours"))]
        steps = [0, *(event["step"] for event in known)]
        # Stages may change the sequence length, and with it the FLOPs per token.
        rates = {0: per_token or math.nan}
        for stage in history.of("stage") if per_token else ():
            # A run can enter a stage twice because of a rollback.
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
        """Returns the columns step, tokens, hours and flops at these steps. Unknown steps (None) and FLOPs are NaN."""
        known = np.array(steps, dtype=float)  # None becomes NaN and stays NaN
        columns = {name: np.interp(known, self._steps, values) for name, values in self._columns.items()}
        return {"step": known, **columns}

    def of(self, events: Sequence[Event]) -> Columns:
        """Returns the same columns at these events' steps."""
        return self.at([event.get("step") for event in events])


def losses_by_position(validation: dict[str, list[Event]]) -> dict[str, Columns]:
    """Computes `RunCurves.by_position`. Returns {} if there is only one position range."""
    found = {}
    for source, events in validation.items():
        measured = [event for event in events if len(event.get("loss_by_position") or {}) > 1]
        for _, of_stage in itertools.groupby(measured, key=lambda event: event.get("stage_sequence_length")):
            last = list(of_stage)[-1]
            losses = last["loss_by_position"]
            ends = numbers(int(name.partition("-")[2]) + 1 for name in losses)
            found[f"{source}, step {last['step']:,}"] = {"position": ends, "loss": numbers(losses.values())}
    return found
