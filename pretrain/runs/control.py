"""Controls a live run through two small files in its folder: a request and the trainer's answer.

    RUN/control/request.json   {id, command, start_id}   written by runs.py save, stop, abort ...
    RUN/control/answer.json    {id, command, step}                        written by the trainer when it is done

There is no server and no port. Anyone who can write to the folder can control the run, from any machine that shares
the disk. A request contains the ID of the run's current start, so the trainer ignores requests from before a restart.
"""

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

from pretrain.files import write_durably
from pretrain.runs.run_folder import read_json

COMMANDS = ("save", "stop", "abort", "anneal")
REQUEST_FILE = "control/request.json"
ANSWER_FILE = "control/answer.json"


class Control:
    """The trainer's side of the control files. Used only on the main rank, which informs the others.

    Args:
        start_id: ID of this start, as in its `start` event. Requests for other starts are ignored.
        warn: called with a message if a request is invalid.
    """

    def __init__(self, run_folder: Path, start_id: str, warn: Callable[[str], None] = warnings.warn):
        self._request = run_folder / REQUEST_FILE
        self._answer = run_folder / ANSWER_FILE
        self._start_id = start_id
        self._warn = warn
        self._seen: tuple[int, int] | None = None
        self.asked: dict = {}
        """Last request returned by `poll`, until it is answered."""

    def poll(self) -> str | None:
        """Returns the command if there is a new request, otherwise None. Takes one os.stat (2 microseconds)."""
        try:
            stat = os.stat(self._request)
        except OSError:
            return None
        if self._seen == (stat.st_ino, stat.st_mtime_ns):
            return None
        self._seen = stat.st_ino, stat.st_mtime_ns
        return self._read()

    def _read(self) -> str | None:
        request = read_json(self._request)
        if not isinstance(request.get("id"), str) or request.get("command") not in COMMANDS:
            self._warn(f"{self._request}: ignored an unknown request; use runs.py to send {', '.join(COMMANDS)}")
            return None
        if request.get("start_id") != self._start_id or request["id"] == read_json(self._answer).get("id"):
            return None
        self.asked = request
        return request["command"]

    def acknowledge(self, step: int) -> None:
        """Answers the last command returned by `poll`, if any. step: the step at which the run executed it."""
        if self.asked:
            answer = {"id": self.asked["id"], "command": self.asked["command"], "step": step}
            write_durably(self._answer, json.dumps(answer))
            self.asked = {}
