"""Builds the HTML page of runs: a plot, a snapshot of all runs, or a live page served to this machine.

Anyone who can open the served page can control the runs, so every request needs the token in the printed address.
Other users of the machine do not have it, nor do other sites open in the same browser.
"""

import hmac
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pretrain.errors import InputError
from pretrain.files import write_durably
from pretrain.runs.control import COMMANDS
from pretrain.runs.run_folder import METRICS_FILE
from pretrain_tools.runs.commands import send, wait_for_answer
from pretrain_tools.runs.comparison import (
    names_of,
    recorded_settings,
    require_writable,
    results_of,
    setting_differences,
)
from pretrain_tools.runs.curves import INTERVALS, Curves, RunCurves, rounded
from pretrain_tools.runs.history import count_hours, read_history, require_runs
from pretrain_tools.runs.live_log import LiveRun, LiveRuns, LogFollower
from pretrain_tools.runs.plots import MARKS, PlottedRun, write_png
from pretrain_tools.runs.status import RunStatus, last_event_text, read_status, state_text

PAGE, LIVE_SCRIPT = (Path(__file__).with_name(name) for name in ("page.html", "page_live.js"))
LOCAL_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
"""Accepted values of a request's Host header; any other name is a DNS rebinding attempt."""
SECURITY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
MOST_REQUEST_BYTES = 4096
ANSWER_SECONDS = 120.0
MOST_CURVES_IN_FILE = 24
REFRESHED_SECONDS = 0.5
"""Minimum time between two refreshes of the runs, however many pages poll."""
SHARE_OF_TIME = 0.1
"""Maximum share of time spent redrawing the curves of one run, so that long runs are redrawn less often."""


def page_text(title: str, data: dict[str, Any], *, is_served: bool = False) -> str:
    """Returns the HTML page with its data embedded as JSON."""
    marks = {kind: {"color": color, "label": label} for kind, (_, color, label) in MARKS.items()}
    text = json.dumps({"title": title, "marks": marks, **data}, ensure_ascii=False, allow_nan=False)
    page = PAGE.read_text(encoding="utf-8").replace("{{LIVE}}", LIVE_SCRIPT.read_text("utf-8") if is_served else "", 1)
    page = page.replace("{{TITLE}}", title.replace("&", "&amp;").replace("<", "&lt;"), 1)
    # Run names and messages are untrusted: an unescaped "</script>" in them would end the script element.
    return page.replace("{{DATA}}", text.replace("<", "\\u003c"), 1)


def plot_runs(folders: Sequence[Path], output: Path | None) -> list[Path]:
    """Writes the page and the PNG, by default into the nearest common folder of the runs; returns their paths.

    Raises InputError if a folder is not a run, no run has logged a step, or the path is not writable.
    """
    runs = require_runs(folders)
    folder = runs[0] if len(runs) == 1 else Path(os.path.commonpath([run.resolve().parent for run in runs]))
    folder = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    base = output or folder / "plot"
    base = base.with_suffix("") if base.suffix in (".png", ".html") else base
    require_writable(base)
    histories = [read_history(run) for run in runs]
    if not any(history.of("train") for history in histories):
        raise InputError(f"{', '.join(map(str, runs))}: no steps logged yet, nothing to plot")
    names = names_of(histories)
    plotted = [PlottedRun.of(name, h, read_status(h.folder)) for name, h in zip(names, histories, strict=True)]
    page, picture = (base.with_name(base.name + ending) for ending in (".html", ".png"))
    write_durably(page, page_of_plot(plotted))
    write_png(plotted, picture)
    return [page, picture]


def page_of_plot(runs: Sequence[PlottedRun]) -> str:
    """Returns an interactive page with the runs' curves, results and differing settings."""
    differences = setting_differences([recorded_settings(run.history.folder) for run in runs])
    now = time.time()
    records = [
        run_record(number, run.name, run.status, now - run.status.age_seconds) for number, run in enumerate(runs)
    ]
    data = {
        "all": True,
        "now": now,
        "order": list(range(len(runs))),
        "runs": records,
        "curves": {number: curves_record(run.curves) for number, run in enumerate(runs)},
        "results": [results_of(run.history, run.status) for run in runs],
        # The output folder always differs, and is the run's name already.
        "differences": {
            name: ["-" if value is None else str(value) for value in values]
            for name, values in differences.items()
            if name != "output"
        },
    }
    return page_text(", ".join(run.name for run in runs), data)


def run_record(number: int, name: str, status: RunStatus, logged: float) -> dict[str, Any]:
    """Returns the values of a run's row in the page's table."""
    return {
        "number": number,
        "name": name,
        "folder": str(status.folder),
        "state": status.state,
        "said": state_text(status),
        "where": status.where,
        "step": status.step,
        "total": status.total_steps,
        "tokens": status.tokens,
        "loss": rounded(status.loss),
        "validation": rounded(status.validation_loss),
        "speed": rounded(status.tokens_per_second),
        "mfu": rounded(status.mfu),
        "left": rounded(status.seconds_left),
        "silent": rounded(status.silent_seconds),
        "logged": logged,
        "last": last_event_text(status),
        "mirror": status.mirror,
    }


def curves_record(curves: RunCurves) -> dict[str, Any]:
    """Returns the curves as the page's script reads them; the page has no panel of loss by position."""
    return {name: value for name, value in vars(curves).items() if name != "by_position"}


class FollowedCurves:
    """The curves of a live run."""

    def __init__(self, run: Path):
        self._log = LogFollower(run / METRICS_FILE)
        self._curves = Curves()
        self._hours: tuple[float, float | None] = (0.0, None)
        self._due = 0.0
        self.record: dict[str, Any] = {}
        """The result of `curves_record`, with the version."""
        self.version = -1
        """Version of the run when the curves were drawn."""

    def refresh(self, version: int) -> None:
        """Reads new events and redraws, unless that was done too recently. Raises OSError if the run is gone."""
        begin = time.monotonic()
        # A version that is skipped here is not lost: it still differs from self.version at the next call.
        if version == self.version or begin < self._due:
            return
        events, is_another = self._log.read()
        # The log was replaced or truncated, so the events read before belong to another run.
        if is_another:
            self._curves = Curves()
            self._hours = (0.0, None)
        self._hours = count_hours(events, self._hours)
        self._curves.add(events)
        self.version = version
        self.record = {**curves_record(self._curves.drawn(most_steps=INTERVALS)), "version": version}
        self._due = begin + (time.monotonic() - begin) / SHARE_OF_TIME


class LiveData:
    """The data that pages poll. Thread-safe."""

    def __init__(self, runs: LiveRuns, fresh_seconds: float = REFRESHED_SECONDS):
        self.runs = runs
        self._fresh_seconds = fresh_seconds
        self._looked = -float("inf")
        self._found: list[LiveRun] = []
        self._curves: dict[int, FollowedCurves] = {}
        self._lock = threading.Lock()

    def news(self, since: int, shown: dict[int, int]) -> dict[str, Any]:
        """Returns the runs and the curves that changed after version `since`.

        shown: {number of a run: version of its curves that the page has, -1 for none}, for each run whose curves it
        shows.
        """
        with self._lock:
            if time.monotonic() - self._looked >= self._fresh_seconds:
                self._found = self.runs.refresh()
                self._looked = time.monotonic()
            curves = {run.number: self._curves_of(run) for run in self._found if run.number in shown}
            return {
                "now": time.time(),
                "version": max((run.version for run in self._found), default=0),
                "order": [run.number for run in self._found],
                "runs": [
                    run_record(run.number, self.runs.name_of(run), run.status, run.logged)
                    for run in self._found
                    if run.version > since
                ],
                "curves": {
                    number: found.record
                    for number, found in curves.items()
                    if found is not None and found.version > shown[number]
                },
            }

    def everything(self) -> dict[str, Any]:
        """Returns all runs, with the curves of the first MOST_CURVES_IN_FILE."""
        return self.news(-1, {run.number: -1 for run in self.runs.refresh()[:MOST_CURVES_IN_FILE]})

    def _curves_of(self, run: LiveRun) -> FollowedCurves | None:
        curves = self._curves.setdefault(run.number, FollowedCurves(run.folder))
        try:
            curves.refresh(run.version)
        except OSError:
            return None
        return curves


def write_live_page(data: LiveData, path: Path, refresh_seconds: float | None) -> None:
    """Writes the page as one file that reloads itself every `refresh_seconds`; None: it does not reload."""
    write_durably(path, page_text(f"Runs in {data.runs.folder}", {**data.everything(), "refresh": refresh_seconds}))


class PageServer(ThreadingHTTPServer):
    """Serves the page and its data on a local port. Raises InputError if the port is not available."""

    daemon_threads = True

    def __init__(self, data: LiveData, port: int, interval: float):
        self.data = data
        self.interval = interval
        self.token = secrets.token_urlsafe(24)
        try:
            # Bound to the loopback interface: reachable from other machines only through ssh -L.
            super().__init__(("127.0.0.1", port), PageRequest)
        except OSError as error:
            raise InputError(
                f"--port {port}: cannot be used ({error.strerror}); give another, or 0 for any that is free"
            ) from None

    @property
    def address(self) -> str:
        """URL of the page, with its token, for a browser on this machine."""
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Reports errors, except when a page was closed during a response."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class PageRequest(BaseHTTPRequestHandler):
    """Handles one request of a browser."""

    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        """Responds with the page, its updates, or the plot of one run."""
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if not self._is_allowed(self.headers.get("X-Token") or query.get("token", [""])[0]):
            return
        if url.path == "/":
            about = {"poll": self.server.interval, "commands": COMMANDS}
            self._answer_html(page_text(f"Runs in {self.server.data.runs.folder}", about, is_served=True))
        elif url.path == "/news":
            self._answer_news(query)
        elif url.path == "/plot":
            self._answer_plot(query)
        else:
            self._answer_json(HTTPStatus.NOT_FOUND, {"problem": f"{url.path}: nothing is there"})

    def do_POST(self) -> None:
        """Sends a command to a run and responds with its answer. Body: JSON with `run` (number) and `command`."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_REQUEST_BYTES:
            self.close_connection = True  # the body stays unread, and would be taken for the next request
            return self._answer_json(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"problem": "no request of this page"})
        body = self.rfile.read(int(length))
        # Against CSRF: another site's form cannot set this content type or X-Token without a CORS preflight.
        is_json = self.headers.get_content_type() == "application/json"
        is_ours = is_json and self.headers.get("Origin") in (None, f"http://{self.headers.get('Host')}")
        if not self._is_allowed(self.headers.get("X-Token", "") if is_ours else ""):
            return None
        try:
            asked = json.loads(body)
            run = self.server.data.runs.numbered(asked["run"])
            command = asked["command"]
        except (ValueError, TypeError, KeyError):
            run = command = None
        if urlsplit(self.path).path != "/control" or run is None or command not in COMMANDS:
            return self._answer_json(HTTPStatus.NOT_FOUND, {"problem": "no such run or command"})
        try:
            request = send(run.folder, command)
            said = wait_for_answer(run.folder, request, timeout_seconds=ANSWER_SECONDS, show=lambda _: None)
        except InputError as error:
            return self._answer_json(HTTPStatus.CONFLICT, {"problem": str(error)})
        return self._answer_json(HTTPStatus.OK, {"answer": said})

    def _is_allowed(self, token: str) -> bool:
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError:
            host = None
        # compare_digest takes constant time, so response times do not leak the token.
        if host in LOCAL_NAMES and hmac.compare_digest(token.encode(), self.server.token.encode()):
            return True
        said = "not allowed: open the address, with its token, that runs.py watch has printed"
        self._answer_json(HTTPStatus.FORBIDDEN, {"problem": said})
        return False

    def _answer_news(self, query: dict[str, list[str]]) -> None:
        try:
            since = int(query.get("since", ["-1"])[0])
            pairs = [text.split(".") for text in query.get("shown", [])]
            shown = {int(number): int(version) for number, version in pairs}
        except ValueError:
            return self._answer_json(HTTPStatus.BAD_REQUEST, {"problem": "no request of this page"})
        return self._answer_json(HTTPStatus.OK, self.server.data.news(since, shown))

    def _answer_plot(self, query: dict[str, list[str]]) -> None:
        """Responds with the page that `runs.py plot` writes."""
        number = query.get("run", [""])[0]
        run = self.server.data.runs.numbered(int(number)) if number.isdecimal() else None
        if run is None:
            return self._answer_json(HTTPStatus.NOT_FOUND, {"problem": "no such run"})
        try:
            history = read_history(run.folder)
        except InputError as error:
            return self._answer_json(HTTPStatus.CONFLICT, {"problem": str(error)})
        plotted = PlottedRun.of(self.server.data.runs.name_of(run), history, read_status(run.folder))
        return self._answer_html(page_of_plot([plotted]))

    def _answer_html(self, text: str) -> None:
        self._answer(HTTPStatus.OK, "text/html; charset=utf-8", text)

    def _answer_json(self, status: HTTPStatus, values: dict[str, Any]) -> None:
        self._answer(status, "application/json", json.dumps(values, allow_nan=False))

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **SECURITY}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *values: Any) -> None:
        """Prints nothing, because the terminal shows the table of runs."""
