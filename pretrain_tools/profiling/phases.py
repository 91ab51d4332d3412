"""Marks the parts of a step in the trace, from the verbs that the loop calls.

The marks lie on the objects only while a profile is taken; before and after it the loop calls what it always calls.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.profiler import record_function

from pretrain.training.prefetch import ReadAhead
from pretrain.training.run import Run
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

    def __init__(self, run: Run, read_ahead: ReadAhead):
        strategy = run.strategy
        self.phase = BETWEEN_STEPS
        """Open now."""
        self._step: record_function | None = None
        self._open: record_function | None = None
        self._marked: list[tuple[Any, str]] = []
        self._mark(read_ahead, "micro_batch", WAITING_FOR_DATA, FORWARD)
        self._mark(strategy, "backward", BACKWARD, BETWEEN_STEPS)
        self._mark(strategy, "update", UPDATE, BETWEEN_STEPS)
        self._mark(run.log, "write", "logging", None)
        self._mark_pauses(run)

    def _mark(self, owner: Any, verb: str, during: str, after: str | None) -> None:
        """Lets a method enter a phase, and another one when it returns; None: the one before."""
        call = getattr(owner, verb)

        def marked(*arguments: Any, **named: Any) -> Any:
            before = self.phase
            self._enter(during)
            result = call(*arguments, **named)
            self._enter(after or before)
            return result

        setattr(owner, verb, marked)
        self._marked.append((owner, verb))

    def _mark_pauses(self, run: Run) -> None:
        """Makes a phase of each work between steps that the run names."""
        pausing = run.pausing

        @contextmanager
        def marked(work: str) -> Iterator[None]:
            with pausing(work):
                in_step = self._step is not None
                if in_step:
                    self._enter(work)
                yield
                if in_step:
                    self._enter(BETWEEN_STEPS)

        run.pausing = marked
        self._marked.append((run, "pausing"))

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
        self._step = None

    def align(self) -> None:
        """Called by all ranks at the same moment, as far as a barrier makes one."""
        with record_function(ALIGNED):
            pass

    def remove(self) -> None:
        for owner, verb in self._marked:
            delattr(owner, verb)
