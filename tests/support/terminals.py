"""Terminals for running scripts in tests and pressing keys such as Ctrl-C."""

import fcntl
import io
import os
import pty
import select
import struct
import sys
import termios
import time

from support.project import ROOT
from support.warm_python import PopenInTerminal

CONTROL_C = b"\x03"
SOON = 300
"""Timeout in seconds for operations that usually take ten."""


class Screen(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self):
        return True


def watched(monkeypatch, columns: int) -> Screen:
    """Redirects stdout and stderr to a fake terminal. Don't call it in a fixture: pytest replaces both afterwards."""
    screen = Screen()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr("sys.stderr", screen)
    return screen


class InTerminal:
    """A Python script that runs in a terminal, and its output so far."""

    def __init__(self, *arguments, columns=80, **environment):
        self.output = ""
        self._terminal, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        own = {"TERM": "xterm", "HF_HUB_OFFLINE": "1", **environment}
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
        self.process = PopenInTerminal(
            [sys.executable, *map(str, arguments)],
            cwd=ROOT,
            env={**inherited, **own},
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
        )
        os.close(inside)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)

    def read_until(self, text: str) -> None:
        """Waits until the text appears in output that arrives after this call."""
        begin, deadline = len(self.output), time.monotonic() + SOON
        while text not in self.output[begin:]:
            assert time.monotonic() < deadline and self._read(), f"{text!r} is not in the output:\n{self.output}"

    def press(self, keys: bytes) -> None:
        os.write(self._terminal, keys)

    def finish(self) -> int:
        """Waits for the script to exit and returns its exit status. `output` then contains all its output."""
        while self.process.poll() is None:
            self._read(seconds=0.1)
        while select.select([self._terminal], [], [], 0)[0] and self._read():
            pass
        return self.process.returncode

    def _read(self, seconds: float = 10.0) -> bool:
        """Reads output. Returns False at the end of the output."""
        if not select.select([self._terminal], [], [], seconds)[0]:
            return True
        try:
            found = os.read(self._terminal, 65536)
        except OSError:  # the terminal was closed
            return False
        self.output += found.decode(errors="replace")
        return bool(found)

    @property
    def screen(self) -> list[str]:
        return lines_that_remain(self.output)


def lines_that_remain(output: str) -> list[str]:
    """Returns the lines visible on the terminal, without colors."""
    lines = []
    for line in output.replace("\r\n", "\n").split("\n"):
        shown = line.split("\x1b[K")[-1].split("\r")[-1]
        for code in ("\x1b[0m", "\x1b[31m", "\x1b[32m", "\x1b[33m", "\x1b[1m"):
            shown = shown.replace(code, "")
        lines.append(shown)
    return lines
