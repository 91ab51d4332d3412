"""Progress of a preparation on standard error: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from typing import Any

from pretrain_tools.preparation.collector import Tally

SECONDS_BETWEEN_LINES = 10.0


class DocumentProgress:
    """Shows bytes of input read, MB/s, Mtok/s and the time left."""

    def __init__(self, total_bytes: int | None):
        self._total_bytes = total_bytes
        self._bar: Any = None
        self._first: tuple[float, int, int] | None = None
        self._last_line = time.monotonic()
        self._last_bytes = 0

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()

    def say(self, line: str) -> None:
        """Prints a line without disturbing the bar."""
        if self._bar is not None:
            self._bar.clear()
        print(line, file=sys.stderr, flush=True)

    def update(self, tally: Tally) -> None:
        """Shows how far the preparation is."""
        now = time.monotonic()
        if self._first is None or tally.input_bytes < self._last_bytes:
            # What an earlier process or pass did says nothing of this one's speed.
            self._first = (now, tally.input_bytes, tally.tokens)
        self._last_bytes = tally.input_bytes
        seconds = max(now - self._first[0], 1e-9)
        read_bytes = tally.input_bytes - self._first[1]
        token_rate = (tally.tokens - self._first[2]) / seconds / 1e6
        if sys.stderr.isatty():
            self._update_bar(tally, f"{token_rate:.2f} Mtok/s")
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self.say(self._line(tally, read_bytes / seconds, token_rate))

    def _update_bar(self, tally: Tally, rate: str) -> None:
        if self._bar is None:
            from tqdm import tqdm

            # No monitor thread: worker processes are forked from this one.
            tqdm.monitor_interval = 0
            self._bar = tqdm(
                desc="preparing", total=self._total_bytes, unit="B", unit_scale=True, initial=tally.input_bytes
            )
        self._bar.set_postfix_str(f"{tally.tokens / 1e6:,.1f} Mtok, {rate}", refresh=False)
        self._bar.update(tally.input_bytes - self._bar.n)

    def _line(self, tally: Tally, byte_rate: float, token_rate: float) -> str:
        done = f"{tally.input_bytes / 1e6:,.0f} MB"
        left = ""
        if self._total_bytes:
            done = f"{tally.input_bytes / self._total_bytes:.0%} of {self._total_bytes / 1e6:,.0f} MB"
            remaining = self._total_bytes - tally.input_bytes
            left = f", {remaining / byte_rate:,.0f} s left" if byte_rate > 0 else ""
        return (
            f"{done}, {tally.documents:,} documents, {tally.tokens / 1e6:,.1f} Mtok, "
            f"{byte_rate / 1e6:.1f} MB/s, {token_rate:.2f} Mtok/s{left}"
        )
