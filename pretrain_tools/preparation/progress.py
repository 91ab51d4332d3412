"""Shows progress on stderr: a progress line on a terminal, otherwise a new line every 10 seconds."""

import sys
import time

from tqdm import tqdm

from pretrain.terminal import LIVE_LINE, is_terminal, say

SECONDS_BETWEEN_LINES = 10.0
SECONDS_ON_A_TERMINAL = 0.2


class Progress:
    """Shows how much is done, the rate and the remaining time. total: None if it is unknown."""

    def __init__(self, total: int | None, unit: str, name: str = ""):
        self._shown = {"total": total, "unit": unit, "prefix": name, "unit_scale": True}
        self._first = self._done = -1
        self._started = self._last_line = time.monotonic()
        self._interval = SECONDS_ON_A_TERMINAL if is_terminal(sys.stderr) else SECONDS_BETWEEN_LINES

    def close(self) -> None:
        """Clears the progress line."""
        LIVE_LINE.clear()

    def update(self, done: int, note: str = "") -> None:
        """Shows the total amount done, with a note."""
        now = time.monotonic()
        if self._first < 0 or done < self._done:
            # Measure the rate from here, excluding earlier processes and passes.
            self._first = done
            self._started = now
        self._done = done
        if now - self._last_line < self._interval:
            return
        self._last_line = now
        line = tqdm.format_meter(done, elapsed=now - self._started, initial=self._first, postfix=note, **self._shown)
        if is_terminal(sys.stderr):
            LIVE_LINE.show(line)
        else:
            say(line, sys.stderr)
