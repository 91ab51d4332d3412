"""runs.py watch in a terminal and in a pipe, and what it refuses."""

import io
import json
import os
import signal

import pytest
from rich.console import Console

from pretrain.processes import folder_lock
from pretrain_tools.runs.live_runs import LiveRuns
from pretrain_tools.runs.watch import LIVE_COLUMNS, live_table
from support.project import ROOT, run_script
from support.run_logs import finished_run, start_line, train_line, validation_line, write_run
from support.terminals import CONTROL_C, InTerminal


def table(folder, width, height=None) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    runs = LiveRuns(folder)
    console.print(live_table(runs.refresh(), width, height))
    return console.file.getvalue().splitlines()


@pytest.fixture
def folder(tmp_path):
    lines = [
        start_line(total_steps=100_000),
        *(train_line(n) for n in range(99_000, 99_200)),
        validation_line(99_100, 4),
    ]
    write_run(tmp_path / "a_name_longer_than_there_is_room_for_in_a_narrow_terminal", lines)
    finished_run(tmp_path / "[red]done\x1b[2J")
    return tmp_path


@pytest.mark.parametrize("width", [60, 80, 110, 160])
def test_the_table_fits_every_width(folder, width):
    lines = table(folder, width)
    assert max(map(len, lines)) <= width and "\x1b" not in "".join(lines)
    for name, least in LIVE_COLUMNS.items():
        assert (name in lines[0]) == (width >= least), name
    if width >= 80:
        assert "99,199/100,000" in "".join(lines) and "4.0000" in "".join(lines)
    assert width < 80 or any("[red]done" in line for line in lines)


def test_a_low_terminal_shows_what_runs(tmp_path):
    for number in range(30):
        finished_run(tmp_path / f"{number}")
    live = write_run(tmp_path / "live", [start_line(), train_line(1)])
    with folder_lock(live / ".lock"):
        lines = table(tmp_path, 100, 12)
    assert len(lines) <= 12 and lines[1].startswith("live") and "22 not shown" in "".join(lines)


@pytest.mark.parametrize("ends", [signal.SIGINT, signal.SIGTERM])
def test_in_a_terminal_it_moves_until_it_is_ended(tmp_path, ends):
    run = write_run(tmp_path / "run", [start_line(), train_line(1)])
    with InTerminal("runs.py", "watch", tmp_path, "--interval", "0.05") as terminal:
        terminal.read_until("1/100")
        with open(run / "metrics.jsonl", "a") as file:
            file.write(json.dumps(train_line(77)) + "\n")
        terminal.read_until("77/100")
        if ends == signal.SIGINT:
            terminal.press(CONTROL_C)
        else:
            os.kill(terminal.process.pid, signal.SIGTERM)
        assert terminal.finish() == 0 and "Traceback" not in terminal.output
        assert terminal.output.rindex("\x1b[?1049l") > terminal.output.index("\x1b[?1049h"), "the other screen is left"


def test_in_a_pipe_it_is_the_list(tmp_path):
    finished_run(tmp_path / "done")
    shown = run_script("runs.py", "watch", tmp_path).stdout
    assert "done  finished  100/100  100%" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere: no such folder"),
        (["."], ".: contains no runs"),
        ([".", "--interval", "0"], "0 is not above 0"),
    ],
)
def test_what_cannot_be_watched_is_refused(tmp_path, arguments, words):
    result = run_script(ROOT / "runs.py", "watch", *arguments, cwd=tmp_path, check=False)
    assert result.returncode == 2 and words in result.stderr and "Traceback" not in result.stderr
