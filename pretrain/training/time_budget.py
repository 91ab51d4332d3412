"""Clock for `budget.minutes`, which starts the final decay early enough for the run to finish in time."""

import math
import time
from collections import deque

SHARE_FOR_THE_END = 0.02
"""Fraction of the time reserved for the last checkpoint, the export and its check."""
SECONDS_FOR_THE_END = 4.0
"""Seconds reserved in addition to SHARE_FOR_THE_END."""
MAX_SHARE_FOR_THE_END = 0.2
"""Maximum fraction of the time reserved in total, excluding validation."""
RECENT_STEPS = 2
"""Number of steps over which the pace is measured during the decay."""
LATE = 0.03
"""Maximum expected overrun, as a fraction of the time, before the decay is shortened."""


class TimeBudget:
    """Clock for a run, including resumed sessions. Used on the main rank.

    Args:
        minutes: time limit; None for no limit.
        spent: seconds used before the checkpoint.
        began: time.perf_counter() at the start of this session.
    """

    def __init__(self, minutes: float | None, spent: float, began: float):
        self.is_limited = minutes is not None
        self._given = 60 * minutes if self.is_limited else math.inf
        self._spent = spent
        self._began = began
        self._first: float | None = None
        self._steps = 0
        self._has_asked = False
        self.validation_seconds = 0.0
        """Duration of the last validation, which is repeated after the last step."""
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS + 1)

    @property
    def seconds(self) -> float:
        """Seconds used so far, including earlier sessions."""
        return self._spent + time.perf_counter() - self._began

    @property
    def left(self) -> float:
        """Seconds left; inf without a limit."""
        return max(0.0, self._given - self.seconds)

    def step_taken(self) -> None:
        """Counts a step, except the first, which may compile."""
        self._recent.append(time.perf_counter())
        if self._first is None:
            self._first = time.perf_counter()
        else:
            self._steps += 1

    @property
    def _end(self) -> float:
        """Seconds reserved for work after the last step."""
        rest = min(SECONDS_FOR_THE_END + SHARE_FOR_THE_END * self._given, MAX_SHARE_FOR_THE_END * self._given)
        return rest + self.validation_seconds

    def asks_to_shorten(self, steps_left: int) -> bool:
        """Returns True if a decay with this many steps left would finish too late."""
        if steps_left < 2 or len(self._recent) <= RECENT_STEPS:
            return False
        pace = (self._recent[-1] - self._recent[0]) / RECENT_STEPS
        is_late = self.seconds + steps_left * pace + self._end > (1 + LATE) * self._given
        if is_late:
            self._recent.clear()
        return is_late

    def asks_for_decay(self, decay_steps: float) -> bool:
        """Returns True once, when a decay of this many steps must start for the run to finish in time."""
        if not self.is_limited or self._has_asked or not self._steps:
            return False
        # Includes validation and checkpoints, which also take time during the decay.
        pace = (time.perf_counter() - self._first) / self._steps
        self._has_asked = self.seconds + decay_steps * pace + self._end >= self._given
        return self._has_asked
