"""Run state without tensors, requests to a run, and rollbacks.json."""

import json
import math
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from pretrain.errors import CRASHED, EXIT_NUMERIC, InputError
from pretrain.files import write_durably

ROLLBACKS = "rollbacks.json"


class Request(IntEnum):
    """Request to a run from a signal or a user. The largest one takes precedence."""

    NONE = 0
    SAVE = 1
    """Save a checkpoint and continue."""
    SHORTEN = 2
    """Halve the remaining steps of a requested final decay, because the time budget is running out."""
    ANNEAL = 3
    """Start the final decay of the learning rate."""
    PREEMPT = 4
    """Save and exit, because of SIGTERM or a scheduler's time limit."""
    INTERRUPT = 5
    """Save and exit, because of Ctrl-C."""
    PAUSE = 6
    """Save and exit, because of `checkpoint.stop_at_step`."""
    STOP = 7
    """Save and exit, because of `runs.py stop`."""
    ABORT = 8
    """Exit without saving."""


@dataclass
class RunState:
    """Contents of `state` in trainer_state.json."""

    step: int = 0
    """Number of optimizer steps taken."""
    tokens: int = 0
    """Number of training tokens seen."""
    skipped_steps: int = 0
    """Number of steps skipped because of a non-finite gradient."""
    validation_loss: float | None = None
    """Mean validation loss over all sources, if it was measured at this step."""
    expert_counts: list[list[int]] | None = None
    """Number of tokens routed to each expert in this step, per layer (MoE only).

    Set when a checkpoint is saved, because the next step's balancing loss needs it.
    """
    average: dict[str, Any] | None = None
    """Metadata of the averaged weights, if any: kind, first_step, count."""
    rollbacks: list[dict[str, Any]] = field(default_factory=list)
    """All rollbacks. Keys: to_step; first_step and last_step of the bad steps; samples (first, count) to skip;
    learning_rate_factor; reason; anneal_from and anneal_steps, if a decay had been requested.
    """
    anneal_from: int | None = None
    """First step of a requested final decay."""
    anneal_steps: int | None = None
    """Number of steps in that decay."""
    seconds: float = 0.0
    """Wall-clock time of all sessions, recorded only with `budget.minutes`."""
    lineage: list[dict[str, Any]] = field(default_factory=list)
    """Checkpoints that this run branched from, oldest first. Keys: run, step, tokens."""

    @property
    def left_out(self) -> list[tuple[int, int]]:
        """(first sample, number of samples) for each range of samples that training skips."""
        return [tuple(rollback["samples"]) for rollback in self.rollbacks if rollback["samples"]]

    def after_rollbacks(self, recorded: list[dict[str, Any]]) -> "RunState":
        """Returns this state, updated with newer rollbacks from rollbacks.json and the decay recorded with them."""
        if len(recorded) <= len(self.rollbacks):
            return self
        decay = {name: recorded[-1].get(name) for name in ("anneal_from", "anneal_steps")}
        return replace(self, rollbacks=recorded, **(decay if self.anneal_from is None else {}))

    @property
    def learning_rate_factor(self) -> float:
        """Product of all rollbacks' learning-rate factors."""
        return math.prod(rollback["learning_rate_factor"] for rollback in self.rollbacks)


def record_rollbacks(run: Path, rollbacks: list[dict[str, Any]]) -> None:
    """Writes rollbacks.json, so that the run still skips the bad data if it crashes before the next checkpoint."""
    write_durably(run / ROLLBACKS, json.dumps(rollbacks, indent=1))


def recorded_rollbacks(run: Path) -> list[dict[str, Any]]:
    """Reads rollbacks.json. Returns [] if it doesn't exist. Raises InputError if it is damaged."""
    path = run / ROLLBACKS
    try:
        return parse_rollbacks(path.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} is damaged ({error}); it lists the data that the run skips after rollbacks. Restore it from a "
            "copy, such as the mirror's, or remove it to use only the rollbacks in the newest checkpoint. Data "
            "skipped by later rollbacks will then be used again"
        ) from None


def parse_rollbacks(content: bytes) -> list[dict[str, Any]]:
    """Parses the content of rollbacks.json. Raises ValueError if it is invalid."""
    rollbacks = json.loads(content)
    used = {"samples", "learning_rate_factor"}
    if not isinstance(rollbacks, list) or not all(isinstance(one, dict) and used <= one.keys() for one in rollbacks):
        raise ValueError("not a list of rollbacks")
    return rollbacks


class RunStoppedError(Exception):
    """Raised on all ranks to end a run. The message explains why."""

    exit_code = CRASHED


class NumericStopError(RunStoppedError):
    """Raised if training has diverged and can't recover."""

    exit_code = EXIT_NUMERIC
