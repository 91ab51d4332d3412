"""State of a run apart from its tensors, and records that must survive a crash between two checkpoints."""

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
    """Request to a run from a signal or a user. If there are several, the largest one counts."""

    NONE = 0
    SAVE = 1
    """Save a checkpoint and continue."""
    SHORTEN = 2
    """Halve the rest of a requested final decay, because the run's time budget is running out."""
    ANNEAL = 3
    """Start the final decay of the learning rate."""
    PREEMPT = 4
    """Save and exit, to be resumed: SIGTERM, or a scheduler's time limit."""
    INTERRUPT = 5
    """Save and exit: Ctrl-C."""
    PAUSE = 6
    """Save and exit: `checkpoint.stop_at_step`."""
    STOP = 7
    """Save and exit: `runs.py stop`."""
    ABORT = 8
    """Exit without saving."""


@dataclass
class RunState:
    """Contents of `state` in trainer_state.json."""

    step: int = 0
    """Optimizer steps taken."""
    tokens: int = 0
    """Training tokens seen."""
    skipped_steps: int = 0
    """Steps skipped because their gradient wasn't finite."""
    validation_loss: float | None = None
    """Mean over the sources, if it was measured at exactly this step."""
    expert_counts: list[list[int]] | None = None
    """For MoE models, the tokens routed to each expert in the checkpoint's step, by layer.

    Set when a checkpoint is saved. The next step's balancing loss needs them.
    """
    average: dict[str, Any] | None = None
    """Metadata of the averaged weights, if there are any: kind, first_step, count."""
    rollbacks: list[dict[str, Any]] = field(default_factory=list)
    """All rollbacks, each with these entries: to_step; first_step and last_step of the bad range; samples (first,
    count) skipped since; learning_rate_factor; reason; anneal_from and anneal_steps of a decay requested earlier.
    """
    anneal_from: int | None = None
    """Step at which a requested final decay begins, instead of the schedule's own step."""
    anneal_steps: int | None = None
    """Length of that decay in steps."""
    seconds: float = 0.0
    """Wall-clock time of all starts, if `budget.minutes` limits it."""
    lineage: list[dict[str, Any]] = field(default_factory=list)
    """Checkpoints of other runs that this run started from, oldest first: run, step, tokens."""

    @property
    def left_out(self) -> list[tuple[int, int]]:
        """(first sample, number of samples) of each range that training skips, in the order of the rollbacks."""
        return [tuple(rollback["samples"]) for rollback in self.rollbacks if rollback["samples"]]

    def after_rollbacks(self, recorded: list[dict[str, Any]]) -> "RunState":
        """Returns this state with the recorded rollbacks, if they are more, and with a decay requested before them."""
        if len(recorded) <= len(self.rollbacks):
            return self
        decay = {name: recorded[-1].get(name) for name in ("anneal_from", "anneal_steps")}
        return replace(self, rollbacks=recorded, **(decay if self.anneal_from is None else {}))

    @property
    def learning_rate_factor(self) -> float:
        """Product of the learning-rate factors of all rollbacks."""
        return math.prod(rollback["learning_rate_factor"] for rollback in self.rollbacks)


def record_rollbacks(run: Path, rollbacks: list[dict[str, Any]]) -> None:
    """Records the rollbacks now, so that a crash before the next checkpoint doesn't bring back the bad data."""
    write_durably(run / ROLLBACKS, json.dumps(rollbacks, indent=1))


def recorded_rollbacks(run: Path) -> list[dict[str, Any]]:
    """Reads the file written by `record_rollbacks`; [] if there is none. Raises InputError if it is damaged."""
    path = run / ROLLBACKS
    try:
        return parse_rollbacks(path.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} is damaged ({error}); it lists the data that the run's rollbacks skip. Restore it from a copy, "
            "such as the mirror's, or remove it to continue with the rollbacks that the newest checkpoint records: a "
            "later one then happens again if its cause recurs"
        ) from None


def parse_rollbacks(content: bytes) -> list[dict[str, Any]]:
    """Parses the content of rollbacks.json. Raises ValueError for anything else."""
    rollbacks = json.loads(content)
    used = {"samples", "learning_rate_factor"}
    if not isinstance(rollbacks, list) or not all(isinstance(one, dict) and used <= one.keys() for one in rollbacks):
        raise ValueError("not a list of rollbacks")
    return rollbacks


class RunStoppedError(Exception):
    """Raised on all ranks to end a run, with the reason."""

    exit_code = CRASHED


class NumericStopError(RunStoppedError):
    """Raised if training diverged and cannot recover."""

    exit_code = EXIT_NUMERIC
