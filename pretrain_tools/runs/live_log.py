"""Follows runs while they are written: each refresh reads only what was appended since the previous one.

An incomplete last line is left for the next refresh. A file that was replaced or truncated is read from the start. A
folder that was deleted is dropped.
"""

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

from pretrain.runs.event_log import Event, parse_lines
from pretrain.runs.run_folder import LOCK_FILE, METRICS_FILE, heartbeat_path
from pretrain_tools.runs.history import current_events, find_runs, last_start
from pretrain_tools.runs.status import FIGURES, RunStatus, status_from

KEPT_EVENTS = 200
"""Events kept per run, enough for a status and a sparkline of the loss."""
MANY = tuple(f'{{"event": "{name}"'.encode() for name in ("train", "sample", "evaluation"))
"""Prefixes of the most frequent lines."""
LOOK_BACK_BYTES = 1 << 20
"""Bytes read from the end of a log that is seen for the first time."""
FIND_EVERY_SECONDS = 10.0
"""Interval of the search for new runs; listing folders is slow on network disks."""


class LogFollower:
    """Reads the events of one metrics.jsonl as they are appended.

    last: number of existing lines that the first call reads; before them it reads only the rarer events within
    LOOK_BACK_BYTES. None: the whole file.
    """

    def __init__(self, path: Path, last: int | None = None):
        self._path = path
        self._last = last
        self._inode: int | None = None
        self._offset = 0

    def read(self) -> tuple[list[Event], bool]:
        """Returns (events completed since the last call, True if the file was replaced or truncated since then).

        The first call always returns True. Raises OSError if there is no file.
        """
        with open(self._path, "rb") as file:
            stat = os.fstat(file.fileno())
            is_another = stat.st_ino != self._inode or stat.st_size < self._offset
            if is_another:
                self._inode = stat.st_ino
                self._offset = 0 if self._last is None else max(0, stat.st_size - LOOK_BACK_BYTES)
            begins_within_a_line = is_another and self._offset > 0
            file.seek(self._offset)
            whole, end, _ = file.read().rpartition(b"\n")
        # Everything after the last newline is an incomplete line and is read again.
        self._offset += len(whole) + len(end)
        lines = whole.split(b"\n")[1 if begins_within_a_line else 0 :]
        if is_another and self._last is not None:
            lines = [*(line for line in lines[: -self._last] if not line.startswith(MANY)), *lines[-self._last :]]
        return parse_lines(lines), is_another


class LiveRun:
    """The state of one run at its last `refresh`."""

    def __init__(self, folder: Path, number: int):
        self.folder = folder
        self.number = number
        self.version = 0
        """Version of `LiveRuns` in which this run last changed."""
        self.status: RunStatus | None = None
        self.logged = 0.0
        """Time of the last write to its log, in seconds since 1970."""
        self._log = LogFollower(folder / METRICS_FILE, last=KEPT_EVENTS)
        self._events: list[Event] = []
        self._seen: list[tuple] = []

    def refresh(self) -> bool:
        """Reads new events and returns True if anything changed. Raises OSError if the run's folder is gone."""
        files = (self.folder / METRICS_FILE, self.folder / LOCK_FILE, heartbeat_path(self.folder))
        seen = [file_version(path) for path in files]
        # A running process can die without changing a file, so only runs that have ended may be skipped.
        if self.status is not None and self.status.state != "running" and seen == self._seen:
            return False
        self._seen = seen
        events, is_another = self._log.read()
        if is_another:
            self._events = []
            # The end of a long log may lack the last `start`, which has the number of steps.
            if not any(event["event"] == "start" for event in events):
                events = [*filter(None, [last_start(self.folder)]), *events]
        self._events = newest_events(current_events([*self._events, *events]))
        before = self.status
        self.status = status_from(self.folder, self._events)
        self.logged = time.time() - self.status.age_seconds
        # The age always changes and must not count as a change.
        return before is None or replace(before, age_seconds=0.0) != replace(self.status, age_seconds=0.0)


def file_version(path: Path) -> tuple[int, ...]:
    """Returns inode, size and modification time of a file, one of which changes with it; () if there is no file."""
    try:
        stat = os.stat(path)
    except OSError:
        return ()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def newest_events(events: list[Event]) -> list[Event]:
    """Returns the last KEPT_EVENTS events, and the older ones that a status still needs.

    Those are the newest validation of each source, the newest event with the run's length, and the newest other event
    that is not a measurement.
    """
    older = events[:-KEPT_EVENTS]
    needed = {}
    for number, event in enumerate(older):
        if event["event"] == "validation":
            needed[str(event.get("source"))] = number
        elif event["event"] not in FIGURES:
            needed["other", "total_steps" in event or event["event"] == "start"] = number
    return [*(older[number] for number in sorted(needed.values())), *events[-KEPT_EVENTS:]]


class LiveRuns:
    """The runs in a folder, or the single run that the folder is. Thread-safe."""

    def __init__(self, folder: Path, find_every: float = FIND_EVERY_SECONDS):
        self.folder = folder
        self._find_every = find_every
        self._version = 0
        self._lock = threading.Lock()
        self._runs: dict[Path, LiveRun] = {}
        self._numbers = 0
        self._found = -float("inf")

    def refresh(self) -> list[LiveRun]:
        """Refreshes all runs and returns them: running ones first, then by the time of their last log line."""
        with self._lock:
            if time.monotonic() - self._found >= self._find_every:
                self._find()
            changed = [run for run in list(self._runs.values()) if self._look(run)]
            self._version += bool(changed)
            for run in changed:
                run.version = self._version
            return sorted(self._runs.values(), key=lambda run: (run.status.state != "running", -run.logged))

    def _find(self) -> None:
        is_run = os.path.isfile(self.folder / METRICS_FILE)
        found = [self.folder] if is_run else find_runs(self.folder) if os.path.isdir(self.folder) else []
        for folder in found:
            if folder not in self._runs:
                # Numbers are not reused, so a stale page cannot control a different run.
                self._runs[folder] = LiveRun(folder, self._numbers)
                self._numbers += 1
        self._found = time.monotonic()

    def _look(self, run: LiveRun) -> bool:
        try:
            return run.refresh()
        except OSError:
            del self._runs[run.folder]
            return False

    def name_of(self, run: LiveRun) -> str:
        """Returns its path relative to the watched folder."""
        if run.folder == self.folder:
            return run.folder.resolve().name
        return str(run.folder.relative_to(self.folder))

    def numbered(self, number: int) -> LiveRun | None:
        """Returns the run with this number; None if it is gone."""
        with self._lock:
            return next((run for run in self._runs.values() if run.number == number), None)
