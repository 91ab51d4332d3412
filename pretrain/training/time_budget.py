"""The clock of `budget.minutes`: tells when the final decay must begin for a run to end in time."""

import math
import time

SHARE_FOR_THE_END, SECONDS_FOR_THE_END, MOST_FOR_THE_END = 0.02, 4.0, 0.2
"""What the last checkpoint, the export and its check take, beside what validation takes between steps anyway."""


class TimeBudget:
    """Counts the seconds of a run over all its starts. The main rank asks it; the others follow.

    Args:
        minutes: that the run may take; None: as long as its steps take.
        spent: seconds of earlier starts, as the checkpoint says.
        began: time.perf_counter() at this start.
    """

    def __init__(self, minutes: float | None, spent: float, began: float):
        self.is_limited = minutes is not None
        self._given = 60 * minutes if self.is_limited else math.inf
        self._spent, self._began = spent, began
        self._first: float | None = None
        self._steps = 0
        self._has_asked = False

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self._spent + time.perf_counter() - self._began

    @property
    def left(self) -> float:
        """Seconds left, at least 0; inf without a limit."""
        return max(0.0, self._given - self.seconds)

    def step_taken(self) -> None:
        """Counts a step. The first doesn't count, since it may compile."""
        if self._first is None:
            self._first = time.perf_counter()
        else:
            self._steps += 1

    def asks_for_decay(self, decay_steps: float) -> bool:
        """Tells, once, that a decay of so many steps must begin now to end in time, with all that follows it."""
        if not self.is_limited or self._has_asked or not self._steps:
            return False
        # Validation and checkpoints between the steps count: the decay will have its share of them.
        pace = (time.perf_counter() - self._first) / self._steps
        end = min(SECONDS_FOR_THE_END + SHARE_FOR_THE_END * self._given, MOST_FOR_THE_END * self._given)
        self._has_asked = self.seconds + decay_steps * pace + end >= self._given
        return self._has_asked
