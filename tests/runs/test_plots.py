"""Tests for curves and plots: all axes, repeated steps, gaps, and visible spikes in long runs."""

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from pretrain_tools.runs.curves import Places, curves_of
from pretrain_tools.runs.history import History
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
    assert run.validation["demo"]["tokens"].tolist() == [20 * 2048, 60 * 2048, 100 * 2048]
    assert list(run.happened) == ["start", "checkpoint", "end"]
    assert set(POSITIONS) == set(run.happened["end"]) and run.happened["end"]["step"] == [100]


def test_flops_come_from_the_run_or_else_6_per_parameter(tmp_path):
    stated = curves(write_run(tmp_path / "a", [start_line(flops_per_token=7000.0), train_line(1)]))
    assert stated.train["flops"] == [2048 * 7000.0]
    guessed = curves(write_run(tmp_path / "b", [start_line(), train_line(1)]))
    assert guessed.train["flops"] == [2048 * 6 * 1000.0]


def test_flops_follow_the_stages_of_a_run(tmp_path):
    """FLOPs match a hand calculation: ten steps at 10 FLOPs per token, then 40, with a rollback in the second
    stage."""
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
    found = {
        name: {key: column.tolist() for key, column in columns.items()} for name, columns in run.by_position.items()
    }
    assert found == {
        "demo, step 20": {"position": [128, 256], "loss": [3.5, 3.4]},
        "demo, step 40": {"position": [128, 256, 512], "loss": [3.0, 2.8, 2.6]},
    }
    assert run.validation["demo, stage's length"]["loss"] == pytest.approx([np.nan, np.nan, 2.5, 2.5], nan_ok=True)
    assert any(panel.title.startswith("Validation loss by position") for panel in picture_panels([whole]))
    short = curves(write_run(tmp_path / "b", [start_line(), train_line(1), validation(10, 4.0)]))
    assert short.by_position == {}, "a single range must be omitted, because it equals the loss"
    write_png([whole], tmp_path / "plot.png")


def test_positions_between_logged_steps_are_linear():
    places = Places(History(Path(), [train_line(10, hours=1.0), train_line(20, hours=2.0)]))
    columns = places.at([15, 0, 25, None])
    assert columns["hours"] == pytest.approx([1.5, 0, 2.0, np.nan], nan_ok=True) and np.isnan(columns["flops"]).all()
    assert places.at([5])["tokens"] == [5 * 2048]


def drawn(events):
    return curves_of(History.of_events(Path(), events)).train


def test_a_spike_of_a_long_run_is_drawn(tmp_path):
    events = [train_line(step, loss=9.0 if step == 31_415 else 3.0) for step in range(1, 50_001)]
    panel = picture_panels([plotted(write_run(tmp_path / "run", [start_line(), *events]))])[0]
    axis = Figure().subplots()
    draw_panel(axis, panel)
    assert max(max(line.get_ydata()) for line in axis.lines) == 9.0 < axis.get_ylim()[1]


def test_missing_numbers_are_gaps_and_no_steps_give_no_points():
    losses = drawn([train_line(1), train_line(2, loss=float("nan")), {"event": "train"}])["loss"]
    assert losses == pytest.approx([4.99, np.nan], nan_ok=True)
    assert set(map(len, drawn([]).values())) == {0}


def test_repeated_steps_replace_the_first_ones():
    rolled_back = [*map(train_line, range(1, 21)), {"event": "rollback", "step": 20, "to_step": 10}]
    train = drawn([start_line(), *rolled_back, train_line(11, 1.0)])
    assert train["step"].tolist() == list(range(1, 12)) and train["loss"][-1] == 1.0


def test_the_smoothed_line_neither_lags_nor_overshoots():
    falling = [10.0 - n / 100 for n in range(1000)]
    middle = slice(50, 950)
    assert smoothed(falling)[middle] == pytest.approx(falling[middle], abs=1e-9)  # a trailing mean would be higher
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


def test_a_loss_that_is_not_finite_is_a_gap(tmp_path):
    lines = [start_line(), train_line(1), {**train_line(2), "loss": None}, train_line(3), end_line(3, 16, "diverged")]
    run = plotted(write_run(tmp_path / "run", lines))
    assert run.curves.train["loss"] == pytest.approx([4.99, np.nan, 4.97], nan_ok=True)
    assert run.state == "stopped"
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
    width = int.from_bytes(header[16:20], "big")
    height = int.from_bytes(header[20:24], "big")
    # Four losses, validation, learning rate, norm, speed and one evaluation: three rows of three panels
    assert width == 1760 and height == round((3 * 4.1 + 0.9) * 110)
    titles = [panel.title for panel in picture_panels([busy, *plain])]
    assert len(titles) == 9 and titles[-1] == "Evaluation: arc_easy · acc"
    assert len(picture_panels([busy, plain[0]])) == 8  # a single value isn't plotted
    alone = [panel.title for panel in picture_panels([busy])]
    assert len(alone) == 6 and alone[-1] == "Training loss against running hours"  # two rows, no duplicate curves


def test_a_single_step_and_every_loss_of_a_short_run_are_visible(tmp_path):
    """Single points have a marker, because a line would be invisible, and the first loss is within the plotted
    range."""
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
