"""Prints a script's stages, and a progress line at the bottom of the terminal. Supports colors and line wrapping.

Output to a file or pipe is plain, without the progress line. This module imports nothing slow, so that a script can
print "Loading" before its own slow imports.
"""

import io
import os
import sys
import textwrap
import threading
from types import TracebackType
from typing import TextIO

CLEAR_LINE = "\r\x1b[K"
COLORS = {"red": 31, "yellow": 33, "green": 32, "dim": 2}
"""ANSI color codes (ECMA-48 SGR)."""
USUAL_WIDTH = 80


def is_terminal(stream: TextIO) -> bool:
    """Returns True if the stream is a terminal that supports rewriting a line."""
    try:
        return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    except ValueError:  # closed
        return False


def width_of(stream: TextIO) -> int | None:
    """Returns the terminal's width in columns, or None for other streams, which have no limit."""
    if not is_terminal(stream):
        return None
    if (columns := os.environ.get("COLUMNS", "")).isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or USUAL_WIDTH
    except (OSError, io.UnsupportedOperation):
        return USUAL_WIDTH


def colored(text: str, color: str, stream: TextIO) -> str:
    """Colors the text if the stream is a terminal and NO_COLOR (no-color.org) is not set."""
    if not is_terminal(stream) or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{COLORS[color]}m{text}\x1b[0m"


def wrapped(text: str, width: int | None) -> str:
    """Wraps lines at words. Continuation lines are indented by two spaces."""
    if width is None:
        return text
    lines = []
    for line in text.splitlines():
        whole = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
        lines += [line] if len(line) <= width else textwrap.wrap(line, width, **whole)
    return "\n".join(lines)


def printable(text: str) -> str:
    """Escapes control characters except newlines and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


class LiveLine:
    """A status line at the bottom of the terminal, on stderr, rewritten in place.

    Use `say` to print above it. Output from other libraries overwrites the line. If it is shorter, the rest of the
    line remains visible.
    """

    def __init__(self):
        self._lock = threading.RLock()  # reentrant: `print_above` calls `clear` and `show`
        self.text = ""
        """The line's text, or ''."""

    def show(self, text: str) -> None:
        """Shows the text, truncated to the terminal's width. Does nothing if stderr isn't a terminal."""
        with self._lock:
            width = width_of(sys.stderr)
            if width is None or not text:
                self.clear()
                return
            self.text = text[: width - 1]
            print(f"{CLEAR_LINE}{self.text}\r", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Removes the line."""
        with self._lock:
            if self.text:
                self.text = ""
                print(CLEAR_LINE, end="", file=sys.stderr, flush=True)

    def print_above(self, text: str, stream: TextIO) -> None:
        """Prints the text, and redraws the line below it."""
        with self._lock:
            shown = self.text
            self.clear()
            print(text, file=stream, flush=True)
            self.show(shown)


LIVE_LINE = LiveLine()
"""This process's progress line."""


def say(text: str, stream: TextIO | None = None, color: str | None = None) -> None:
    """Prints text above the progress line, to stdout by default. Wraps and colors it if the stream is a terminal."""
    stream = stream or sys.stdout
    text = wrapped(text, width_of(stream))
    LIVE_LINE.print_above(colored(text, color, stream) if color else text, stream)


def is_first_process() -> bool:
    """Returns True on rank 0, or in a process that wasn't launched with others."""
    return os.environ.get("RANK", "0") == "0"


def say_stage(text: str) -> None:
    """Prints a script's current stage to stderr, on rank 0 only."""
    if is_first_process():
        say(f"{text} ...", sys.stderr, "dim")


def announce_loading() -> None:
    """Prints "Loading ..." before slow imports. After this call, Ctrl-C ends the script without a traceback."""
    sys.excepthook = _without_traceback_for_interrupts
    say_stage("Loading")


def _without_traceback_for_interrupts(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    LIVE_LINE.clear()
    if issubclass(kind, KeyboardInterrupt):
        if is_first_process():
            print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
