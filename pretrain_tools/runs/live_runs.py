"""Follows all runs of a folder while they are written; runs that have ended and did not change are not read again."""

import os
import time
from pathlib import Path

from pretrain.runs.run_folder import LOCK_FILE, METRICS_FILE, heartbeat_path
from pretrain_tools.runs.history import find_runs, read_end
from pretrain_tools.runs.status import RunStatus, status_from

READ_LINES = 200
"""Last lines of a log that are read, enough for a status and a sparkline of the loss."""
LOOK_BACK_BYTES = 1 << 20
FIND_EVERY_SECONDS = 10.0
"""Interval of the search for new runs; listing folders is slow on network disks."""


class LiveRun:
    """One run, and its status at the last `refresh`."""

    def __init__(self, folder: Path, name: str):
        self.folder = folder
        self.name = name
        """Its path relative to the watched folder."""
        self.status: RunStatus | None = None
        """A new object whenever anything changed, and only then."""
        self._seen: list[tuple] = []

    def refresh(self) -> None:
        """Updates the status. Raises OSError if the run's folder is gone."""
        files = (self.folder / METRICS_FILE, self.folder / LOCK_FILE, heartbeat_path(self.folder))
        seen = [file_version(path) for path in files]
        # A running process can die without changing a file, so only runs that have ended may be skipped.
        if self.status is not None and self.status.state != "running" and seen == self._seen:
            return
        if self.status is not None and seen[0] == self._seen[0]:
            events = self.status.events
        else:
            events = read_end(self.folder, lines=READ_LINES, look_back_bytes=LOOK_BACK_BYTES)
        status = status_from(self.folder, events)
        if status != self.status:
            self.status = status
        self._seen = seen


def file_version(path: Path) -> tuple[int, ...]:
    """Returns inode, size and modification time of a file, one of which changes with it; () if there is no file."""
    try:
        stat = os.stat(path)
    except OSError:
        return ()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


class LiveRuns:
    """The runs in a folder, or the single run that the folder is."""

    def __init__(self, folder: Path, find_every: float = FIND_EVERY_SECONDS):
        self.folder = folder
        self._find_every = find_every
        self._runs: dict[Path, LiveRun] = {}
        self._found = -float("inf")

    def refresh(self) -> list[LiveRun]:
        """Refreshes all runs and returns them: running ones first, then by the time of their last log line."""
        if time.monotonic() - self._found >= self._find_every:
            self._find()
        for run in list(self._runs.values()):
            try:
                run.refresh()
            except OSError:
                del self._runs[run.folder]
        return sorted(self._runs.values(), key=lambda run: (run.status.state != "running", -run.status.logged))

    def _find(self) -> None:
        if os.path.isfile(self.folder / METRICS_FILE):
            found = {self.folder: self.folder.resolve().name}
        elif os.path.isdir(self.folder):
            found = {folder: str(folder.relative_to(self.folder)) for folder in find_runs(self.folder)}
        else:
            found = {}
        for folder, name in found.items():
            self._runs.setdefault(folder, LiveRun(folder, name))
        self._found = time.monotonic()
