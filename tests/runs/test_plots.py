"""Curves and pictures: every axis, thinning that keeps spikes, a page that needs no network."""

import json
import math
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from pretrain_tools.runs.curves import Places, curves_of
from pretrain_tools.runs.history import History
from pretrain_tools.runs.page import PAGE, page_of_plot
from pretrain_tools.runs.plots import PlottedRun, axis_text, draw_panel, picture_panels, smoothed, write_png
from support.run_logs import end_line, finished_run, start_line, train_line, validation_line, write_run

POSITIONS = ("step", "tokens", "hours", "flops")


def plotted(run, name="run"):
    return PlottedRun.read(run, name)


def curves(run):
    return plotted(run).curves


def test_every_group_of_columns_has_every_position(tmp_path):
    run = curves(finished_run(tmp_path / "run"))
    groups = [run.train, *run.validation.values(), *run.scores.values()]
    for group in groups:
        assert set(POSITIONS) <= set(group)
        assert len({len(column) for column in group.values()}) == 1
    assert run.scores["arc_easy · acc"]["value"] == [0.25] and run.scores["arc_easy · acc"]["standard_error"] == [0.01]
    assert run.validation["demo"]["tokens"] == [20 * 2048, 60 * 2048, 100 * 2048]
    assert [event["event"] for event in run.happened] == ["start", "checkpoint", "end"]
    assert set(POSITIONS) < set(run.happened[0])


def test_flops_are_the_runs_own_figure_and_else_6_per_parameter(tmp_path):
    stated = curves(write_run(tmp_path / "a", [start_line(flops_per_token=7000.0), train_line(1)]))
    assert stated.train["flops"] == [2048 * 7000.0] and stated.flops_are_exact
    guessed = curves(write_run(tmp_path / "b", [start_line(), train_line(1)]))
    assert guessed.train["flops"] == [2048 * 6 * 1000.0] and not guessed.flops_are_exact


def test_flops_follow_the_stages_of_a_run(tmp_path):
    """By hand: ten steps at 10 FLOPs a token, then at 40; a rollback comes to the second stage again."""
    stages = [
        {"event": "stage", "step": step, "flops_per_token": flops} for step, flops in ((12, 40), (8, 10), (10, 40))
    ]
    lines = [start_line(flops_per_token=10.0), *(train_line(step) for step in range(1, 21)), *stages]
    flops = dict(zip(*(curves(write_run(tmp_path / "a", lines)).train[key] for key in ("step", "flops")), strict=True))
    assert (flops[5], flops[10], flops[20]) == (5 * 20480, 10 * 20480, 10 * 20480 + 10 * 81920)


def test_the_loss_by_position_is_drawn_at_the_end_of_each_stage(tmp_path):
    def validation(step, *losses, **more):
        ranges = ("0-127", "128-255", "256-511")
        return validation_line(step, 3.0) | {"loss_by_position": dict(zip(ranges, losses, strict=False)), **more}

    longer = {"stage_sequence_length": 512, "stage_loss": 2.5}
    lines = [start_line(), train_line(1), validation(10, 4.0, 3.9), validation(20, 3.5, 3.4), train_line(21)]
    lines += [validation(30, 3.4, 3.3, None, **longer), validation(40, 3.0, 2.8, 2.6, **longer), train_line(40)]
    whole = plotted(write_run(tmp_path / "a", lines))
    run = whole.curves
    assert run.by_position == {
        "demo, step 20": {"position": [128, 256], "loss": [3.5, 3.4]},
        "demo, step 40": {"position": [128, 256, 512], "loss": [3.0, 2.8, 2.6]},
    }
    assert run.validation["demo, stage's length"]["loss"] == [None, None, 2.5, 2.5]
    assert any(panel.title.startswith("Validation loss by position") for panel in picture_panels([whole]))
    short = curves(write_run(tmp_path / "b", [start_line(), train_line(1), validation(10, 4.0)]))
    assert short.by_position == {}, "one range is the loss itself"
    write_png([whole], tmp_path / "plot.png")


def test_places_between_logged_steps_lie_on_straight_lines():
    places = Places(History(Path(), [train_line(10, hours=1.0), train_line(20, hours=2.0)]))
    columns = places.at([15, 0, 25, None])
    assert columns["hours"] == [1.5, 0, 2.0, None] and columns["flops"] == [None] * 4
    assert places.at([5])["tokens"] == [5 * 2048]


def drawn(events):
    return curves_of(History.of_events(Path(), events)).train


def test_a_long_curve_is_thinned_without_losing_a_spike():
    events = [train_line(step, loss=3.0) for step in range(1, 50_001)]
    events[31_415]["loss"], events[27_182]["loss"], events[14_142]["grad_norm"] = 9.0, 1.0, 77.0
    train = drawn(events)
    assert {len(column) for column in train.values()} == {600}
    assert max(train["loss_high"]) == 9.0 and min(train["loss_low"]) == 1.0 and max(train["grad_norm_high"]) == 77.0
    assert train["step"] == sorted(set(train["step"])) and train["step"][-1] == 50_000
    # The smooth line goes through means of all steps of a point, not of its extremes.
    assert max(train["loss"]) == pytest.approx(3 + 6 / 83, abs=0.002)


def test_a_short_curve_stays_whole_and_an_empty_one_empty():
    train = drawn([train_line(step) for step in range(1, 200)])
    assert train["loss"] == train["loss_low"] == train["loss_high"] == [round(5 - n / 100, 6) for n in range(1, 200)]
    assert set(map(len, drawn([]).values())) == {0} and drawn([]).keys() == train.keys()


def test_the_smooth_line_neither_lags_nor_invents():
    falling = [10.0 - n / 100 for n in range(1000)]
    middle = slice(50, 950)
    assert smoothed(falling)[middle] == pytest.approx(falling[middle], abs=1e-9)  # a lagging mean lies above
    assert smoothed([2.0] * 30) == pytest.approx([2.0] * 30)
    noisy = smoothed([math.sin(n * 2.4) for n in range(1000)])
    assert max(map(abs, noisy[100:])) < 0.1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1500, "1.5k"),
        (2e9, "2B"),
        (3.2e18, "3.2e18"),
        (0.00175, "0.00175"),
        (2e-6, "2e-6"),
        (6.125, "6.125"),
    ],
)
def test_numbers_on_axes_are_short(value, text):
    assert axis_text(value) == text


def page_data(text):
    return text, json.loads(re.search(r'type="application/json">(.*?)</script>', text, re.DOTALL)[1])


def test_the_page_holds_everything_and_asks_for_nothing(tmp_path):
    runs = [plotted(finished_run(tmp_path / name, seed=seed), name) for name, seed in (("a", 1), ("b", 2))]
    text, data = page_data(page_of_plot(runs))
    assert [run["name"] for run in data["runs"]] == ["a", "b"] and data["results"][0]["state"] == "finished"
    assert data["curves"]["0"]["train"]["loss"][:2] == [4.99, 4.98]
    assert data["differences"] == {"seed": ["1", "2"]}
    loads = r"""\b(src|href)\s*=|@import|url\(\s*['"]?(http|//)|fetch\(|XMLHttpRequest|import\s*\("""
    assert not re.search(loads, text)
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address


def test_no_text_of_a_run_breaks_out_of_the_page(tmp_path):
    evil = "</script><script>alert(1)</script>"
    lines = [start_line(), train_line(1), {"event": "warning", "step": 1, "message": evil}]
    text, data = page_data(page_of_plot([plotted(write_run(tmp_path / "run", lines), evil)]))
    assert text.count("</script>") == PAGE.read_text().count("</script>") and "alert(1)</script>" not in text
    assert data["runs"][0]["name"] == evil and evil in data["curves"]["0"]["happened"][1]["text"]


def test_a_loss_that_is_not_finite_is_a_gap(tmp_path):
    lines = [start_line(), train_line(1), {**train_line(2), "loss": None}, train_line(3), end_line(3, 16, "diverged")]
    run = plotted(write_run(tmp_path / "run", lines))
    assert run.curves.train["loss"] == [4.99, None, 4.97] and run.status.state == "stopped"
    assert "null" in page_of_plot([run])
    write_png([run], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_a_panel_for_everything(tmp_path):
    lines = [start_line(), *(train_line(step) for step in range(1, 60))]
    lines += [{"event": kind, "step": 30} for kind in ("spike", "skip", "rollback", "resume", "control", "warning")]
    lines += [validation_line(50, 4.0, "web"), validation_line(50, 3.0, "code")]
    busy = plotted(write_run(tmp_path / "busy", lines), "busy")
    path = tmp_path / "plot.png"
    plain = [plotted(finished_run(tmp_path / name), name) for name in ("plain", "other")]
    write_png([busy, *plain], path)
    header = path.read_bytes()[:24]
    width, height = int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")
    # Four losses, validation, learning rate, norm, speed and one evaluation: three rows of three panels.
    assert width == 1760 and height == round((3 * 4.1 + 0.9) * 110)
    titles = [panel.title for panel in picture_panels([busy, *plain])]
    assert len(titles) == 9 and titles[-1] == "Evaluation: arc_easy · acc"
    assert len(picture_panels([busy, plain[0]])) == 8  # a single number is no picture
    alone = [panel.title for panel in picture_panels([busy])]
    assert len(alone) == 6 and alone[-1] == "Training loss by hours of running"  # two rows, no curve drawn twice


def test_a_single_logged_step_is_seen_and_every_loss_of_a_short_run(tmp_path):
    """Steps 10 and 20 of 20: each alone would be a line without length, and the first be left out of the range."""
    lines = [start_line(), validation_line(0, 6.2), train_line(10, loss=9.0), end_line(10)]
    one = plotted(write_run(tmp_path / "one", lines))
    two = plotted(write_run(tmp_path / "two", [*lines, train_line(2000, loss=3.0)]))
    for run in (one, two):
        for panel in picture_panels([run]):
            axis = Figure().subplots()
            draw_panel(axis, panel)
            assert axis.lines and all(line.get_marker() == "o" for line in axis.lines), panel.title
            low, high = axis.get_ylim()
            assert all(low <= y <= high for line in axis.lines for y in line.get_ydata()), panel.title


def test_settings_that_differ_are_found_whichever_run_has_them(tmp_path):
    runs = [finished_run(tmp_path / str(rate), learning_rate=rate) for rate in (1e-3, 2e-3)]
    (tmp_path / "0.002" / "strategy.json").unlink()
    found = page_data(page_of_plot([plotted(run) for run in runs]))[1]["differences"]
    assert found["optim.learning_rate"] == ["0.001", "0.002"] and found["strategy.ranks"] == ["2", "-"]
    assert "seed" not in found
