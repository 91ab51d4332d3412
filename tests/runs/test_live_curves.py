"""Curves that grow: few points for long runs, spikes kept, only new points sent, repeated steps forgotten."""

import json

import pytest

from pretrain_tools.runs.live_curves import MOST_LIVE_POINTS, POINT, LiveCurves
from support.run_logs import start_line, train_line, validation_line, write_run


def add(run, *lines):
    with open(run / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


class Page:
    """What a page has, by what it is told."""

    def __init__(self, curves):
        self.curves, self.generation = curves, 0
        self.points, self.measured, self.happened = [], [], []

    def look(self) -> int:
        """Points that were sent."""
        self.curves.refresh()
        news = self.curves.news(self.generation, len(self.points), len(self.measured), len(self.happened))
        if news["generation"] != self.generation:
            self.points, self.measured, self.happened = [], [], []
        self.generation = news["generation"]
        self.points[news["keep"] :] = news["points"]
        self.measured += news["measured"]
        self.happened += news["happened"]
        assert (self.points, self.measured, self.happened) == (
            self.curves.points, self.curves.measured, self.curves.happened,
        )  # fmt: skip
        return len(news["points"])

    def column(self, name) -> list:
        return [point[POINT.index(name)] for point in self.points]


def test_a_page_is_sent_what_it_lacks(tmp_path):
    run = write_run(tmp_path / "run", [start_line(), *(train_line(step) for step in range(1, 51))])
    page = Page(LiveCurves(run))
    assert page.look() == 50
    add(run, train_line(51), validation_line(51, 4.0), {"event": "warning", "step": 51, "message": "hot"})
    assert page.look() == 2  # the last of those that it has may have grown
    assert page.column("step")[-1] == 51 and page.measured == [["validation demo", 51, 4.0, None]]
    assert page.happened[-1][:3] == [51, "warning", "step 51 · message hot"]


def test_a_long_run_has_few_points_and_every_spike(tmp_path):
    run = write_run(tmp_path / "run", [])
    page = Page(LiveCurves(run))
    for step in range(1, 20_001, 500):
        add(run, *(train_line(n, loss=99.0 if n == 7777 else 2.0, grad_norm=n) for n in range(step, step + 500)))
        page.look()
    assert MOST_LIVE_POINTS / 2 < len(page.points) <= MOST_LIVE_POINTS
    assert page.column("step")[-1] == 20_000 and page.column("step") == sorted(page.column("step"))
    assert max(page.column("high")) == 99.0 and min(page.column("low")) == 2.0
    assert sum(loss > 2.0 for loss in page.column("loss")) == 1 and max(page.column("grad_norm")) == 20_000
    mean = page.column("loss")[page.column("high").index(99.0)]
    assert mean == pytest.approx(2 + 97 / 32, abs=0.01)  # of the 32 steps of its point


def test_repeated_steps_take_the_place_of_the_first(tmp_path):
    run = write_run(tmp_path / "run", [start_line(), validation_line(0, 9.0), *(train_line(n) for n in range(1, 21))])
    page = Page(LiveCurves(run))
    page.look()
    add(run, validation_line(20, 5.0), {"event": "rollback", "step": 20, "to_step": 10}, train_line(11, 1.0))
    page.look()
    assert page.column("step") == list(range(1, 12)) and page.column("loss")[-1] == 1.0
    assert [row[1] for row in page.measured] == [0]
    add(run, start_line(5), validation_line(0, 8.0), train_line(6))
    page.look()
    assert page.column("step") == list(range(1, 7)) and page.measured == [["validation demo", 0, 8.0, None]]


def test_what_is_no_number_is_a_gap(tmp_path):
    run = write_run(tmp_path / "run", [train_line(1), train_line(2, loss=float("nan")), {"event": "train"}])
    page = Page(LiveCurves(run))
    page.look()
    assert page.column("loss") == [4.99, None]
