"""What people see while a script runs: its stages, one live line at the bottom of a terminal, colours, widths.

In a file or a pipe: plain lines, and no live line. Imports nothing heavy: a script says that it is loading before it
does.
"""

import io
import itertools
import os
import re
import statistics
import sys
import textwrap
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TextIO

CLEAR_LINE = "\r\x1b[K"
COLORS = {"red": 31, "yellow": 33, "green": 32, "dim": 2}
USUAL_WIDTH = 80
SPARKS = "▁▂▃▄▅▆▇█"
COLUMNS_OF_TABLE = re.compile(r"\S.*?\s{2,}(?=\S)")


def is_terminal(stream: TextIO) -> bool:
    """Whether somebody watches this stream in a terminal that can rewrite a line."""
    try:
        return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    except ValueError:  # closed
        return False


def width_of(stream: TextIO) -> int | None:
    """Columns of the terminal; None for a file, whose lines have any length."""
    if not is_terminal(stream):
        return None
    if (columns := os.environ.get("COLUMNS", "")).isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or USUAL_WIDTH
    except (OSError, io.UnsupportedOperation):
        return USUAL_WIDTH


def colored(text: str, color: str, stream: TextIO) -> str:
    """The text in a colour where the stream is a terminal and NO_COLOR (no-color.org) is not set."""
    if not is_terminal(stream) or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{COLORS[color]}m{text}\x1b[0m"


def wrapped(text: str, width: int | None) -> str:
    """Lines broken at words; what follows stands below the second column of a table, else two columns in."""
    if width is None:
        return text
    lines = []
    for line in text.splitlines():
        name = COLUMNS_OF_TABLE.match(line)
        indent = len(name[0]) if name and len(name[0]) <= width // 2 else 2
        options = {"break_long_words": False, "break_on_hyphens": False, "drop_whitespace": True}
        whole = len(line) <= width
        lines += [line] if whole else textwrap.wrap(line, width, subsequent_indent=" " * indent, **options)
    return "\n".join(lines)


def printable(text: str) -> str:
    """The text without the control characters by which a terminal would be steered; line ends and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def sparkline(values: list[float], *, width: int = 40) -> str:
    """A curve of block characters: the means of `width` equal stretches of the values."""
    width = min(width, len(values))
    bounds = [round(n * len(values) / width) for n in range(width + 1)]
    means = [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(bounds)]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((mean - low) * scale)] for mean in means)


class LiveLine:
    """The line at the bottom of the terminal, on stderr, rewritten in place.

    While it stands, what this process prints clears it first; the next `show` draws it again. Other processes of a run
    print less often than it is drawn.
    """

    def __init__(self):
        self._lock = threading.RLock()
        self._text = ""
        self._at_line_start = True

    def show(self, text: str) -> None:
        """Draws the text, cut to the width; nothing happens where stderr is no terminal."""
        with self._lock:
            width = width_of(sys.stderr)
            if width is None or not text:
                self.clear()
                return
            for name in ("stdout", "stderr"):
                if not isinstance(stream := getattr(sys, name), AboveLine) and is_terminal(stream):
                    setattr(sys, name, AboveLine(stream, self))
            if self._at_line_start:  # else somebody else's line is unfinished
                self._text = text[: width - 1]
                self._write(CLEAR_LINE + self._text)

    def clear(self) -> None:
        """Takes the line away."""
        with self._lock:
            if self._text:
                self._text = ""
                self._write(CLEAR_LINE)

    @contextmanager
    def hidden(self, text: str) -> Iterator[None]:
        """Around the writing of a text to the terminal."""
        with self._lock:
            self.clear()
            yield
            if text:
                self._at_line_start = text.endswith(("\n", "\r"))

    def _write(self, text: str) -> None:
        stream = sys.stderr
        while isinstance(stream, AboveLine):
            stream = stream.stream
        encoding = stream.encoding or "utf-8"
        stream.write(text.encode(encoding, "replace").decode(encoding))  # no bars in Latin-1
        stream.flush()


class AboveLine:
    """A stream to the terminal, of which every text appears above the live line."""

    def __init__(self, stream: TextIO, line: LiveLine):
        self.stream, self._line = stream, line

    def write(self, text: str) -> int:
        """As of the stream."""
        with self._line.hidden(text):
            return self.stream.write(text)

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


LIVE_LINE = LiveLine()
"""There is one terminal."""


def fitting(parts: Iterable[tuple[int, str]], width: int | None) -> str:
    """The parts (least width, text) for which a terminal is wide enough, in their order; in a file all of them."""
    return " · ".join(text for least, text in parts if text and (width is None or width >= least))


def say_stage(text: str) -> None:
    """Says what a script is busy with from now on: in the live line, or as a line of a log. First process alone."""
    if os.environ.get("RANK", "0") != "0":
        return
    if is_terminal(sys.stderr):
        LIVE_LINE.show(f"{text} ...")
    else:
        print(f"{text} ...", file=sys.stderr, flush=True)


def begin() -> None:
    """Before a script imports what takes seconds: says so, and makes Ctrl-C end it without a traceback."""
    sys.excepthook = _without_traceback_for_interrupts
    say_stage("Loading")


def _without_traceback_for_interrupts(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    LIVE_LINE.clear()
    if issubclass(kind, KeyboardInterrupt):
        if os.environ.get("RANK", "0") == "0":
            print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
