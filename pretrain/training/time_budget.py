"""Clock for `budget.minutes`. It starts the final decay early enough for the run to end in time."""

import math
import time
from collections import deque

SHARE_FOR_THE_END = 0.02
"""Share of the time reserved for the last checkpoint, the export and its check. Validation is added."""
SECONDS_FOR_THE_END = 4.0
"""Seconds reserved on top of this share."""
MAX_SHARE_FOR_THE_END = 0.2
"""Maximum of the share and these seconds together, as a share of the time."""
RECENT_STEPS = 2
"""Number of steps used to measure the pace before a decay is shortened."""
LATE = 0.03
"""Expected delay, as a share of the time, above which a decay is shortened."""


class TimeBudget:
    """Clock for a run over all its starts. Only the main rank uses it.

    Args:
        minutes: maximum duration of the run; None for no limit.
        spent: seconds that earlier starts took, from the checkpoint.
        began: time.perf_counter() at this start.
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
        """Duration of the last validation. Another validation follows the last step."""
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS + 1)

    @property
    def seconds(self) -> float:
        """Seconds used so far, over all starts."""
        return self._spent + time.perf_counter() - self._began

    @property
    def left(self) -> float:
        """Seconds left, at least 0; inf without a limit."""
        return max(0.0, self._given - self.seconds)

    def step_taken(self) -> None:
        """Counts a step. The first one doesn't count, because it may compile."""
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
        """Returns True if the decay that this clock started would end too late, at the pace of the last steps."""
        if steps_left < 2 or len(self._recent) <= RECENT_STEPS:
            return False
        pace = (self._recent[-1] - self._recent[0]) / RECENT_STEPS
        is_late = self.seconds + steps_left * pace + self._end > (1 + LATE) * self._given
        if is_late:
            self._recent.clear()
        return is_late

    def asks_for_decay(self, decay_steps: float) -> bool:
        """Returns True, only once, when a decay of this many steps must begin for the run to end in time."""
        if not self.is_limited or self._has_asked or not self._steps:
            return False
        # The pace includes validation and checkpoints between steps, because they also happen during the decay.
        pace = (time.perf_counter() - self._first) / self._steps
        self._has_asked = self.seconds + decay_steps * pace + self._end >= self._given
        return self._has_asked
