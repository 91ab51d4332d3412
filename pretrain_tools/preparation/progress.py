"""Shows progress on stderr: a progress line on a terminal, otherwise a new line every 10 seconds."""

import sys
import time

from pretrain.terminal import LIVE_LINE, is_terminal, say
from pretrain_tools.preparation.encoded_part import Tally

SECONDS_BETWEEN_LINES = 10.0
SECONDS_ON_A_TERMINAL = 0.2


class DocumentProgress:
    """Shows how much input has been read, the throughput and the remaining time."""

    def __init__(self, total_bytes: int | None):
        self._total_bytes = total_bytes
        self._is_terminal = is_terminal(sys.stderr)
        self._first: tuple[float, int] | None = None
        self._last_line = time.monotonic()
        self._last_bytes = 0

    def say(self, line: str) -> None:
        """Prints a line above the progress line."""
        say(line, sys.stderr)

    def close(self) -> None:
        """Clears the progress line."""
        LIVE_LINE.clear()

    def update(self, tally: Tally) -> None:
        now = time.monotonic()
        is_new = self._first is None or tally.input_bytes < self._last_bytes
        self._last_bytes = tally.input_bytes
        if is_new:
            # Measure throughput from here, excluding earlier processes and passes.
            self._first = (now, tally.input_bytes)
        if is_new or now - self._last_line < (SECONDS_ON_A_TERMINAL if self._is_terminal else SECONDS_BETWEEN_LINES):
            return
        self._last_line = now
        first, first_bytes = self._first
        rate = (tally.input_bytes - first_bytes) / max(now - first, 1e-9)
        line = f"{tally.input_bytes / 1e6:,.0f} MB"
        if self._total_bytes:
            line += f" of {self._total_bytes / 1e6:,.0f} MB"
        line += f", {tally.documents:,} documents, {tally.tokens / 1e6:,.1f} Mtok, {rate / 1e6:.1f} MB/s"
        if self._total_bytes:
            line += f", {(self._total_bytes - tally.input_bytes) / max(rate, 1):,.0f} s left"
        if self._is_terminal:
            LIVE_LINE.show(line)
        else:
            self.say(line)
