"""Followed runs: only what was appended is read, whatever state the files are in."""

import json
import os
import shutil
import socket

import pytest

from pretrain.processes import folder_lock
from pretrain_tools.runs.live_runs import LiveRuns
from pretrain_tools.runs.status import last_event_text
from support.run_logs import end_line, finished_run, start_line, train_line, validation_line, write_run


def add(run, *lines, end="\n"):
    with open(run / "metrics.jsonl", "a") as file:
        file.write("\n".join(json.dumps(line) for line in lines) + end)


def look(runs) -> int | None:
    """The step of the only run, as it is seen now."""
    (run,) = runs.refresh()
    return run.status.step


def test_each_look_sees_the_lines_that_were_completed_since_the_last(tmp_path):
    run = write_run(tmp_path / "run", [train_line(1), train_line(2)])
    runs = LiveRuns(tmp_path)
    assert look(runs) == 2 and look(runs) == 2
    add(run, train_line(3), {"event": "trai"}, end="")
    assert look(runs) == 3
    with open(run / "metrics.jsonl", "r+b") as file:
        file.truncate(os.path.getsize(run / "metrics.jsonl") - 2)  # a half of the line that is being written
    assert look(runs) == 3
    with open(run / "metrics.jsonl", "a") as file:
        file.write('n", "step": 4}\n{"event": "train", "step": 5}\nno JSON\n')
    assert look(runs) == 5


def test_only_the_end_is_read(tmp_path):
    run = write_run(tmp_path / "run", [train_line(step) for step in range(1, 9000)])
    assert (run / "metrics.jsonl").stat().st_size > 1 << 20
    (live,) = LiveRuns(tmp_path).refresh()
    assert [event["step"] for event in live.status.events] == list(range(8801, 9000))


def test_a_file_that_was_replaced_or_cut_short_is_read_anew(tmp_path):
    run = write_run(tmp_path / "runs/run", [train_line(1), train_line(2), train_line(3)])
    runs = LiveRuns(tmp_path / "runs")
    assert look(runs) == 3
    write_run(tmp_path / "runs/run", [train_line(2)])
    assert look(runs) == 2
    os.replace(write_run(tmp_path / "other", [train_line(n) for n in range(1, 9)]) / "metrics.jsonl",
               run / "metrics.jsonl")  # fmt: skip
    assert look(runs) == 8


def test_a_run_is_followed_from_running_to_its_end(tmp_path):
    run = write_run(tmp_path / "a/run", [start_line(), train_line(1), validation_line(1, 4.5)])
    runs = LiveRuns(tmp_path)
    with folder_lock(run / ".lock"):
        (live,) = runs.refresh()
        assert (live.status.state, live.status.step, live.status.total_steps) == ("running", 1, 100)
        before = live.status
        add(run, train_line(2, loss=3.0))
        (live,) = runs.refresh()
        assert (live.status.step, live.status.loss, live.status.validation_loss) == (2, 3.0, 4.5)
        assert live.status is not before and live.name == "a/run"
    (run / ".lock").write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))  # which nobody holds
    assert runs.refresh()[0].status.state == "crashed"
    add(run, end_line(2))
    assert runs.refresh()[0].status.state == "finished"


def test_the_length_and_the_validations_of_a_long_run_are_not_forgotten(tmp_path):
    lines = [start_line(total_steps=5000), validation_line(0, 9.0), {"event": "warning", "step": 1, "message": "hot"}]
    lines += (train_line(n, 2.0) for n in range(1, 1000))
    run = write_run(tmp_path / "run", lines)
    runs = LiveRuns(tmp_path)
    for step in range(1000, 3000, 500):
        add(run, *(train_line(n, 2.0) for n in range(step, step + 500)))
        (live,) = runs.refresh()
        assert (live.status.total_steps, live.status.validation_loss) == (5000, 9.0)
        assert len(live.status.events) < 300 and "hot" in last_event_text(live.status)


def test_an_ended_run_that_nobody_writes_costs_no_reading(tmp_path, monkeypatch):
    for number in range(200):
        finished_run(tmp_path / f"{number}")
    runs = LiveRuns(tmp_path)
    before = [run.status for run in runs.refresh()]
    monkeypatch.setattr("builtins.open", lambda *_, **__: pytest.fail("opened a file"))
    assert len(before) == 200 and all(run.status is was for run, was in zip(runs.refresh(), before, strict=True))


def test_runs_come_and_go(tmp_path):
    first = finished_run(tmp_path / "first")
    runs = LiveRuns(tmp_path, find_every=0)
    assert [run.name for run in runs.refresh()] == ["first"]
    finished_run(tmp_path / "second")
    shutil.rmtree(first)
    assert [run.name for run in runs.refresh()] == ["second"]
    shutil.rmtree(tmp_path / "second")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/metrics.jsonl").touch()
    (live,) = runs.refresh()
    assert live.name == "empty" and live.status.step is None
