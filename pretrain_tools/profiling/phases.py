"""Marks the parts of a step in the trace, from the verbs that the loop calls.

The marks lie on the objects only while a profile is taken; before and after it the loop calls what it always calls.
"""

from collections.abc import Callable
from typing import Any

from torch.profiler import record_function

from pretrain.training.housekeeping import Housekeeping
from pretrain.training.prefetch import ReadAhead
from pretrain_tools.profiling.trace_events import (
    ALIGNED,
    BACKWARD,
    BETWEEN_STEPS,
    FORWARD,
    MARK,
    STEP,
    UPDATE,
    WAITING_FOR_DATA,
)


class PhaseMarks:
    """One phase is open at any moment of a step, so that they add up to it."""

    def __init__(self, housekeeping: Housekeeping, read_ahead: ReadAhead):
        strategy = housekeeping.strategy
        self._verbs = [
            (read_ahead, "micro_batch", WAITING_FOR_DATA, FORWARD),
            (strategy, "backward", BACKWARD, BETWEEN_STEPS),
            (strategy, "update", UPDATE, BETWEEN_STEPS),
            *(
                (housekeeping, verb, name, BETWEEN_STEPS)
                for verb, name in {"log": "logging", "measure": "validation"}.items()
            ),
            *(
                (housekeeping, verb, name, BETWEEN_STEPS)
                for verb, name in {"save": "saving", "sample": "samples"}.items()
            ),
            (housekeeping, "evaluate", "evaluation", BETWEEN_STEPS),
        ]
        self.phase = BETWEEN_STEPS
        """Open now."""
        self._step: record_function | None = None
        self._open: record_function | None = None
        for owner, verb, during, after in self._verbs:
            setattr(owner, verb, self._marked(getattr(owner, verb), during, after))

    def _marked(self, call: Callable, during: str, after: str) -> Callable:
        def marked(*arguments: Any, **named: Any) -> Any:
            self._enter(during)
            result = call(*arguments, **named)
            self._enter(after)
            return result

        return marked

    def _enter(self, phase: str) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self.phase, self._open = phase, record_function(MARK + phase)
        self._open.__enter__()

    def begin_step(self, step: int) -> None:
        """step: as it will be logged."""
        self._step = record_function(f"{STEP}{step}")
        self._step.__enter__()
        self._enter(BETWEEN_STEPS)

    def end_step(self) -> None:
        for mark in (self._open, self._step):
            mark.__exit__(None, None, None)
        self._open = None

    def align(self) -> None:
        """Called by all ranks at the same moment, as far as a barrier makes one."""
        with record_function(ALIGNED):
            pass

    def remove(self) -> None:
        for owner, verb, *_ in self._verbs:
            delattr(owner, verb)
