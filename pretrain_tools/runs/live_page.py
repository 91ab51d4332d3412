"""All runs on a page that moves with them: served to this machine alone, or written as one file without a server.

Who may open the page may control the runs, so every request needs the token of the address that was printed: another
user of the machine has none, nor has another site that sends requests from the same browser.
"""

import hmac
import json
import secrets
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pretrain.errors import InputError
from pretrain.files import write_durably
from pretrain.runs.control import COMMANDS
from pretrain.runs.history import read_history
from pretrain_tools.runs.commands import send, wait_for_answer
from pretrain_tools.runs.curves import curves_of
from pretrain_tools.runs.live_curves import LiveCurves, finite_number
from pretrain_tools.runs.live_log import LiveRun, LiveRuns
from pretrain_tools.runs.live_table import last_event_text
from pretrain_tools.runs.plots import page_text
from pretrain_tools.runs.status import read_status, state_text

LIVE_PAGE = Path(__file__).with_name("live_page.html")
LOCAL_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
"""Hosts that a request may name: another is a site whose name leads here (DNS rebinding)."""
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
"""However many pages ask: what is younger counts as new."""


class LiveData:
    """What a page knows of the runs, and what it does not know yet; for several threads."""

    def __init__(self, runs: LiveRuns, fresh_seconds: float = REFRESHED_SECONDS):
        self.runs = runs
        self._fresh_seconds, self._looked = fresh_seconds, -float("inf")
        self._found: list[LiveRun] = []
        self._curves: dict[int, LiveCurves] = {}
        self._lock = threading.Lock()

    def news(self, since: int, shown: list[list[int]]) -> dict[str, Any]:
        """Runs that changed after version `since`, and new points of those shown.

        shown: [number, generation, points, measured, happened] of each run whose curves the page has.
        """
        with self._lock:
            if time.monotonic() - self._looked >= self._fresh_seconds:
                self._found, self._looked = self.runs.refresh(), time.monotonic()
            version = max((run.version for run in self._found), default=0)
            numbers = {run.number for run in self._found}
            curves = {number: self._curves_of(number, *has) for number, *has in shown if number in numbers}
            return {
                "now": time.time(),
                "version": version,
                "order": [run.number for run in self._found],
                "runs": [run_record(self.runs.name_of(run), run) for run in self._found if run.version > since],
                "curves": {number: news for number, news in curves.items() if news is not None},
            }

    def everything(self) -> dict[str, Any]:
        """All runs, with the curves of those that come first."""
        numbers = [run.number for run in self.runs.refresh()[:MOST_CURVES_IN_FILE]]
        return self.news(-1, [[number, 0, 0, 0, 0] for number in numbers])

    def _curves_of(self, number: int, *has: int) -> dict[str, Any] | None:
        run = self.runs.numbered(number)
        if run is None:
            return None
        curves = self._curves.setdefault(number, LiveCurves(run.folder))
        try:
            curves.refresh()
        except OSError:
            return None
        return curves.news(*has)


def run_record(name: str, run: LiveRun) -> dict[str, Any]:
    """What the page shows of a run in its line."""
    status = run.status
    return {
        "number": run.number,
        "name": name,
        "state": status.state,
        "said": state_text(status),
        "where": status.where,
        "step": status.step,
        "total": status.total_steps,
        "tokens": status.tokens,
        "loss": finite_number(status.loss),
        "validation": finite_number(status.validation_loss),
        "speed": finite_number(status.tokens_per_second),
        "mfu": finite_number(status.mfu),
        "left": finite_number(status.seconds_left),
        "silent": finite_number(status.silent_seconds),
        "logged": run.logged,
        "last": last_event_text(status),
        "mirror": status.mirror,
    }


def filled_page(title: str, data: dict[str, Any]) -> str:
    """The page with its data in it."""
    # In a script element nothing may look like the end of one, whatever a run's names and messages say.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    title = title.replace("&", "&amp;").replace("<", "&lt;")
    return LIVE_PAGE.read_text(encoding="utf-8").replace("{{TITLE}}", title, 1).replace("{{DATA}}", text, 1)


def write_live_page(data: LiveData, path: Path, refresh_seconds: float | None) -> None:
    """Writes the page as one file, of which a browser reads the next version every so many seconds; None: the last."""
    contents = data.everything() | {"folder": str(data.runs.folder), "refresh": refresh_seconds}
    write_durably(path, filled_page(f"Runs in {data.runs.folder}", contents))


class PageServer(ThreadingHTTPServer):
    """The page and its news, at a port of this machine. Raises InputError where the port cannot be had."""

    daemon_threads = True

    def __init__(self, data: LiveData, port: int, interval: float):
        self.data, self.interval, self.token = data, interval, secrets.token_urlsafe(24)
        try:
            super().__init__(("127.0.0.1", port), PageRequest)
        except OSError as error:
            raise InputError(
                f"--port {port}: cannot be used ({error.strerror}); give another, or 0 for any that is free"
            ) from None

    @property
    def address(self) -> str:
        """Where a browser of this machine finds the page."""
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A page that was closed in the middle of an answer is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class PageRequest(BaseHTTPRequestHandler):
    """One request of a browser."""

    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        """The page, its news, or the curves of one run."""
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if not self._is_allowed(self.headers.get("X-Token") or query.get("token", [""])[0]):
            return
        if url.path == "/":
            folder = str(self.server.data.runs.folder)
            about = {"folder": folder, "poll": self.server.interval, "commands": COMMANDS}
            self._answer_html(filled_page(f"Runs in {folder}", about))
        elif url.path == "/news":
            self._answer_news(query)
        elif url.path == "/plot":
            self._answer_plot(query)
        else:
            self._answer_json(HTTPStatus.NOT_FOUND, {"problem": f"{url.path}: nothing is there"})

    def do_POST(self) -> None:
        """A command to a run: {run: its number, command}, answered when the run has answered."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_REQUEST_BYTES:
            self.close_connection = True  # its body stays unread
            return self._answer_json(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"problem": "no request of this page"})
        body = self.rfile.read(int(length))
        origin = self.headers.get("Origin")
        # A form of another site can send neither this type nor the header without being allowed to.
        is_ours = self.headers.get_content_type() == "application/json"
        is_ours &= origin in (None, f"http://{self.headers.get('Host')}")
        if not self._is_allowed(self.headers.get("X-Token", "") if is_ours else ""):
            return None
        try:
            asked = json.loads(body)
            run, command = self.server.data.runs.numbered(asked["run"]), asked["command"]
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
        if host in LOCAL_NAMES and hmac.compare_digest(token.encode(), self.server.token.encode()):
            return True
        said = "not allowed: open the address, with its token, that runs.py watch has printed"
        self._answer_json(HTTPStatus.FORBIDDEN, {"problem": said})
        return False

    def _answer_news(self, query: dict[str, list[str]]) -> None:
        try:
            since = int(query.get("since", ["-1"])[0])
            shown = [[int(part) for part in text.split(".")] for text in query.get("shown", [])]
            if any(len(has) != 5 for has in shown):
                raise ValueError
        except ValueError:
            return self._answer_json(HTTPStatus.BAD_REQUEST, {"problem": "no request of this page"})
        return self._answer_json(HTTPStatus.OK, self.server.data.news(since, shown))

    def _answer_plot(self, query: dict[str, list[str]]) -> None:
        """The page of `runs.py plot`."""
        number = query.get("run", [""])[0]
        run = self.server.data.runs.numbered(int(number)) if number.isdecimal() else None
        if run is None:
            return self._answer_json(HTTPStatus.NOT_FOUND, {"problem": "no such run"})
        try:
            history = read_history(run.folder)
        except InputError as error:
            return self._answer_json(HTTPStatus.CONFLICT, {"problem": str(error)})
        name = self.server.data.runs.name_of(run)
        return self._answer_html(page_text([curves_of(name, history, read_status(run.folder))]))

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
        """Nothing: the terminal shows the runs."""
