"""Builds the HTML page of runs: a plot, a snapshot of all runs, or a live page served to this machine.

Anyone who can open the served page can control the runs, so every request needs the token in the printed address.
Other users of the machine do not have it, nor do other sites open in the same browser.
"""

import hmac
import json
import os
import secrets
import sys
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
from pretrain.runs.event_log import read_metrics
from pretrain.runs.run_folder import METRICS_FILE
from pretrain_tools.runs.commands import send, wait_for_answer
from pretrain_tools.runs.comparison import (
    names_of,
    recorded_settings,
    require_writable,
    results_of,
    setting_differences,
)
from pretrain_tools.runs.curves import INTERVALS, curves_of, rounded
from pretrain_tools.runs.history import History, require_runs
from pretrain_tools.runs.live_runs import LiveRuns, file_version
from pretrain_tools.runs.plots import MARKS, PlottedRun, write_png
from pretrain_tools.runs.status import RunStatus, last_event_text, state_text

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
SHARE_OF_TIME = 0.02
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
    plotted = [PlottedRun.read(run, name) for run, name in zip(runs, names_of(runs), strict=True)]
    if not any(run.history.of("train") for run in plotted):
        raise InputError(f"{', '.join(map(str, runs))}: no steps logged yet, nothing to plot")
    page, picture = (base.with_name(base.name + ending) for ending in (".html", ".png"))
    write_durably(page, page_of_plot(plotted))
    write_png(plotted, picture)
    return [page, picture]


def page_of_plot(runs: Sequence[PlottedRun]) -> str:
    """Returns an interactive page with the runs' curves, results and differing settings."""
    differences = setting_differences([recorded_settings(run.history.folder) for run in runs])
    data = {
        "all": True,
        "now": time.time(),
        "runs": [run_record(number, run.name, run.status) for number, run in enumerate(runs)],
        "curves": {number: vars(run.curves) for number, run in enumerate(runs)},
        "results": [results_of(run.history, run.status) for run in runs],
        # The output folder always differs, and is the run's name already.
        "differences": {
            name: ["-" if value is None else str(value) for value in values]
            for name, values in differences.items()
            if name != "output"
        },
    }
    return page_text(", ".join(run.name for run in runs), data)


def run_record(number: int, name: str, status: RunStatus) -> dict[str, Any]:
    """Returns what the page's list shows of a run: its status in JSON, with texts."""
    # JSON has no NaN, which a diverged run may log.
    shown = {key: rounded(value) if isinstance(value, float) else value for key, value in vars(status).items()}
    del shown["events"]
    return shown | {
        "number": number,
        "name": name,
        "folder": str(status.folder),
        "logged": status.logged,
        "said": state_text(status),
        "last": last_event_text(status),
    }


class FollowedCurves:
    """The curves of a live run, as a page's script reads them."""

    def __init__(self, run: Path):
        self.run = run
        self.version = 0
        """Counts how often they were drawn."""
        self.record: dict[str, Any] = {}
        """The curves, with the version."""
        self._seen: tuple | None = None
        self._due = 0.0

    def refresh(self) -> None:
        """Reads the log and draws again if it has changed, unless that was done too recently."""
        begin = time.monotonic()
        seen = file_version(self.run / METRICS_FILE)
        # A change that is skipped here is not lost: it still differs from self._seen at the next call.
        if seen == self._seen or begin < self._due:
            return
        try:
            history = History.of_events(self.run, read_metrics(self.run))
        except OSError:
            return  # a shared disk may be unavailable for a while
        self._seen = seen
        self.version += 1
        self.record = {**vars(curves_of(history, most_steps=INTERVALS)), "version": self.version}
        self._due = begin + (time.monotonic() - begin) / SHARE_OF_TIME


class LiveData:
    """The data that pages poll. Thread-safe."""

    def __init__(self, runs: LiveRuns):
        self.runs = runs
        self._curves: dict[int, FollowedCurves] = {}

    def news(self, shown: dict[int, int]) -> dict[str, Any]:
        """Returns all runs, and the curves that the page shows and that have changed.

        shown: {number of a run: version of its curves that the page has, -1 for none}.
        """
        # Held while logs are read, too: two pages that ask at once would both read a changed log.
        with self.runs.lock:
            found = self.runs.refresh()
            curves = {}
            for run in found:
                if run.number in shown:
                    followed = self._curves.setdefault(run.number, FollowedCurves(run.folder))
                    followed.refresh()
                    if followed.record and followed.version != shown[run.number]:
                        curves[run.number] = followed.record
            records = [run_record(run.number, run.name, run.status) for run in found]
            return {"now": time.time(), "runs": records, "curves": curves}

    def everything(self) -> dict[str, Any]:
        """Returns all runs, with the curves of the first MOST_CURVES_IN_FILE."""
        return self.news({run.number: -1 for run in self.runs.refresh()[:MOST_CURVES_IN_FILE]})


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
            pairs = [text.split(".") for text in query.get("shown", [])]
            shown = {int(number): int(version) for number, version in pairs}
        except ValueError:
            return self._answer_json(HTTPStatus.BAD_REQUEST, {"problem": "no request of this page"})
        return self._answer_json(HTTPStatus.OK, self.server.data.news(shown))

    def _answer_plot(self, query: dict[str, list[str]]) -> None:
        """Responds with the page that `runs.py plot` writes."""
        number = query.get("run", [""])[0]
        run = self.server.data.runs.numbered(int(number)) if number.isdecimal() else None
        if run is None:
            return self._answer_json(HTTPStatus.NOT_FOUND, {"problem": "no such run"})
        try:
            plotted = PlottedRun.read(run.folder, run.name)
        except InputError as error:
            return self._answer_json(HTTPStatus.CONFLICT, {"problem": str(error)})
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
