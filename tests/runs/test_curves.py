"""Curves that grow: repeated steps forgotten, gaps kept, long runs drawn again less often."""

import json
from pathlib import Path

import pytest

from pretrain_tools.runs.curves import curves_of
from pretrain_tools.runs.history import History
from pretrain_tools.runs.page import FollowedCurves
from support.run_logs import start_line, train_line, validation_line, write_run


def add(run, *lines):
    with open(run / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


class Follower:
    """What a page shows of a run."""

    def __init__(self, run):
        self.followed = FollowedCurves(run)

    def look(self) -> dict:
        self.followed._due = 0.0
        self.followed.refresh()
        return self.followed.record


def test_what_is_appended_is_drawn(tmp_path):
    run = write_run(tmp_path / "run", [start_line(), *(train_line(step, time=step) for step in range(1, 51))])
    page = Follower(run)
    assert len(page.look()["train"]["loss"]) == 50
    add(run, train_line(51, time=3600), validation_line(51, 4.0), {"event": "warning", "step": 51, "message": "hot"})
    curves = page.look()
    assert curves["train"]["step"][-1] == 51 and curves["train"]["hours"][-1] == pytest.approx(1.0, abs=0.001)
    assert curves["validation"]["demo"]["loss"] == [4.0] and curves["validation"]["demo"]["step"] == [51]
    happened = curves["happened"][-1]
    assert (happened["event"], happened["text"]) == ("warning", "step 51 · message hot")
    write_run(tmp_path / "run", [start_line(), train_line(7)])
    assert page.look()["train"]["step"] == [7], "another run in the place of the first"


def test_curves_of_a_run_are_drawn_less_often_the_longer_it_takes(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", [train_line(1)])
    clock = iter([100.0, 103.0, 249.0, 251.0, 251.0])
    monkeypatch.setattr("pretrain_tools.runs.page.time.monotonic", lambda: next(clock))
    followed = FollowedCurves(run)
    followed.refresh()  # takes 3 seconds
    add(run, train_line(2))
    followed.refresh()
    assert followed.version == 1
    followed.refresh()
    assert followed.version == 2


def test_a_long_run_has_few_points_and_every_spike(tmp_path):
    run = write_run(tmp_path / "run", [])
    page = Follower(run)
    for step in range(1, 20_001, 2000):
        add(run, *(train_line(n, loss=99.0 if n == 7777 else 2.0, grad_norm=n) for n in range(step, step + 2000)))
        train = page.look()["train"]
    assert len(train["step"]) == 600 and train["step"][-1] == 20_000
    assert max(train["loss_high"]) == 99.0 and min(train["loss_low"]) == 2.0
    assert sum(loss > 2.0 for loss in train["loss"]) == 1 and max(train["grad_norm_high"]) == 20_000


def test_repeated_steps_take_the_place_of_the_first(tmp_path):
    run = write_run(tmp_path / "run", [start_line(), validation_line(0, 9.0), *(train_line(n) for n in range(1, 21))])
    page = Follower(run)
    page.look()
    add(run, validation_line(20, 5.0), {"event": "rollback", "step": 20, "to_step": 10}, train_line(11, 1.0))
    curves = page.look()
    assert curves["train"]["step"] == list(range(1, 12)) and curves["train"]["loss"][-1] == 1.0
    assert curves["validation"]["demo"]["step"] == [0]
    add(run, start_line(5), validation_line(0, 8.0), train_line(6))
    curves = page.look()
    assert curves["train"]["step"] == list(range(1, 7)) and curves["validation"]["demo"]["loss"] == [8.0]


def test_what_is_no_number_is_a_gap():
    events = [train_line(1), train_line(2, loss=float("nan")), {"event": "train"}]
    assert curves_of(History.of_events(Path(), events)).train["loss"] == [4.99, None]
