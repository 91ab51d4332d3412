"""The page over real HTTP: news, commands, what is refused; and in a real browser, where there is one."""

import http.client
import json
import re
import shutil
import subprocess
import threading
import time

import pytest

from pretrain.errors import InputError
from pretrain.processes import folder_lock
from pretrain.runs.control import COMMANDS, Control
from pretrain_tools.runs.live_runs import LiveRuns
from pretrain_tools.runs.page import LiveData, PageServer, page_of_plot, write_live_page
from pretrain_tools.runs.plots import PlottedRun
from support.run_logs import end_line, finished_run, start_line, train_line, validation_line, write_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = "</script><script>document.title='taken'</script>"


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A server of a folder with a live and a finished run."""
    monkeypatch.setattr("pretrain_tools.runs.page.ANSWER_SECONDS", 30.0)
    lines = [start_line(start_id="s1"), *(train_line(step) for step in range(1, 41)), validation_line(40, 4.5)]
    live = write_run(tmp_path / "runs/live", [*lines, {"event": "warning", "step": 40, "message": HOSTILE}])
    finished_run(tmp_path / "runs/done")
    runs = LiveRuns(tmp_path / "runs")
    with folder_lock(live / ".lock"), PageServer(LiveData(runs), 0, 0.2) as server:
        runs.refresh()
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def ask(server, method, path, body=None, **headers) -> tuple[int, str]:
    """(status, text) of a request with this page's headers; None takes one away."""
    host = f"127.0.0.1:{server.server_port}"
    usual = {"Host": host, "X-Token": server.token, "Origin": f"http://{host}", "Content-Type": "application/json"}
    given = usual | {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest(method, path, skip_host=True)
    content = b"" if body is None else json.dumps(body).encode()
    for name, value in ({"Content-Length": str(len(content))} | given).items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(content)
    answer = connection.getresponse()
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def number_of(server, name) -> int:
    news = json.loads(ask(server, "GET", "/news")[1])
    return next(run["number"] for run in news["runs"] if run["name"] == name)


def test_news_are_what_a_page_lacks(served, tmp_path):
    status, text = ask(served, "GET", "/news")
    news = json.loads(text)
    assert status == 200 and [run["name"] for run in news["runs"]] == ["live", "done"]
    live, done = news["runs"]
    assert (live["state"], live["step"], live["total_steps"], live["validation_loss"]) == ("running", 40, 100, 4.5)
    assert (done["state"], done["step"]) == ("finished", 100) and news["curves"] == {}
    with open(tmp_path / "runs/live/metrics.jsonl", "a") as file:
        file.write(json.dumps(train_line(41, 1.5)) + '\n{"event": "train", "st')
    number = live["number"]
    news = json.loads(ask(served, "GET", f"/news?shown={number}.-1")[1])
    assert [run["loss"] for run in news["runs"]] == [1.5, done["loss"]]
    curves = news["curves"][str(number)]
    assert curves["train"]["loss"][-2:] == [4.6, 1.5] and curves["validation"]["demo"]["loss"] == [4.5]
    news = json.loads(ask(served, "GET", f"/news?shown={number}.{curves['version']}")[1])
    assert news["curves"] == {}, "the page has them"
    assert ask(served, "GET", f"/news?shown={number}")[0] == 400


@pytest.mark.parametrize("command", ["save", "stop", "anneal", "abort"])
def test_a_command_reaches_the_run_and_its_answer_the_page(served, tmp_path, command):
    control, obeyed = Control(tmp_path / "runs/live", "s1"), []

    def train():
        while not obeyed:
            obeyed.extend(filter(None, [control.poll()]))
            time.sleep(0.01)
        control.acknowledge(41)

    trainer = threading.Thread(target=train, daemon=True)
    trainer.start()
    status, text = ask(served, "POST", "/control", {"run": number_of(served, "live"), "command": command})
    trainer.join(30)
    assert status == 200 and re.search("(at|from) step 41", text)
    assert obeyed == [command]


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"X_Token": None}, {}, 403),
        ({"X_Token": "x" * 32}, {}, 403),
        ({"Host": "evil.example"}, {}, 403),
        ({"Host": None}, {}, 403),
        ({"Origin": "http://evil.example"}, {}, 403),
        ({"Origin": "null"}, {}, 403),
        ({"Content_Type": "text/plain"}, {}, 403),
        ({"Content_Length": "9999999"}, {}, 413),
        ({"Content_Length": None}, None, 413),
        ({}, {"command": "rm"}, 404),
        ({}, {"run": 99}, 404),
        ({}, {"run": "../live"}, 404),
        ({}, [], 404),
    ],
)
def test_requests_that_are_not_the_pages_are_refused(served, tmp_path, headers, body, status):
    usual = {"run": number_of(served, "live"), "command": "stop"}
    asked = {**usual, **body} if isinstance(body, dict) else body
    assert ask(served, "POST", "/control", asked, **headers)[0] == status
    assert not (tmp_path / "runs/live/control").exists()


@pytest.mark.parametrize("path", ["/", "/news", "/plot?run=0"])
def test_nothing_is_shown_without_the_token(served, path):
    assert ask(served, "GET", path, X_Token=None)[0] == 403
    join = "&" if "?" in path else "?"
    assert ask(served, "GET", f"{path}{join}token={served.token}", X_Token=None)[0] == 200
    assert ask(served, "GET", f"{path}{join}token={served.token}", X_Token=None, Host="evil.example")[0] == 403


def test_a_command_to_a_run_that_has_ended_is_refused_with_the_reason(served):
    status, text = ask(served, "POST", "/control", {"run": number_of(served, "done"), "command": "save"})
    assert status == 409 and "the run is not active (finished at step 100)" in text


def test_bad_queries_are_answered(served):
    for path, status in {"/news?shown=x.1": 400, "/news?shown=1.2.3": 400, "/plot?run=x": 404, "/../etc": 404}.items():
        assert ask(served, "GET", path)[0] == status, path


def seen_in_browser(address, tmp_path) -> str:
    """The page as it stands in a browser after some virtual seconds."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=6000", "--window-size=1200,900", "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_a_browser_shows_runs_and_curves_and_what_came_after_the_page(served, tmp_path, monkeypatch):
    news, asked = LiveData.news, []

    def and_then_the_run_goes_on(self, shown):
        answer = news(self, shown)
        asked.append(shown)
        if len(asked) == 3:
            with open(tmp_path / "runs/live/metrics.jsonl", "a") as file:
                file.writelines(json.dumps(train_line(step)) + "\n" for step in range(41, 78))
        return answer

    monkeypatch.setattr(LiveData, "news", and_then_the_run_goes_on)
    page = seen_in_browser(served.address, tmp_path)
    assert len(asked) > 3, "the page did not refresh"
    assert ">live</span>" in page and ">done</span>" in page and "77 of 100" in page
    (curve,) = re.findall(r'<path d="(M[^"]+)" class="curve" data-run="live"', page)[:1]
    assert curve.count("L") == 76
    assert "Validation loss</h3>" in page and "<title>1 running · Runs in" in page  # the hostile name has run nothing
    assert len(re.findall("<button", page)) == len(COMMANDS) and '<div id="alarm" hidden="">' in page


def test_the_file_needs_no_server(tmp_path):
    write_run(
        tmp_path / "runs/live", [start_line(), *(train_line(n) for n in range(1, 30)), end_line(30, 75, HOSTILE)]
    )
    path = tmp_path / "watch.html"
    write_live_page(LiveData(LiveRuns(tmp_path / "runs")), path, None)
    text = path.read_text()
    assert not re.search(r'(src|href)="?http', text) and text.count("</script>") == 2
    page = seen_in_browser(path.as_uri(), tmp_path)
    assert 'class="curve" data-run="live"' in page and "29 of 100" in page and "<button" not in page


def test_a_single_logged_step_is_seen(tmp_path):
    run = write_run(tmp_path / "runs/short", [start_line(), validation_line(0, 6.2), train_line(10), end_line(10)])
    write_live_page(LiveData(LiveRuns(tmp_path / "runs")), tmp_path / "watch.html", None)
    (tmp_path / "plot.html").write_text(page_of_plot([PlottedRun.read(run, "short")]))
    for name in ("watch.html", "plot.html"):
        page = seen_in_browser((tmp_path / name).as_uri(), tmp_path)
        panels = re.findall(r'class="panel.*?</svg>', page, re.DOTALL)
        assert len(panels) >= 6 and all("<circle" in panel for panel in panels), name


def test_the_port_may_be_taken(served):
    with pytest.raises(InputError, match=f"--port {served.server_port}: .*Address already in use.*give another"):
        PageServer(served.data, served.server_port, 1)
