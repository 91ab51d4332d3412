"""Tests for plots: all axes, repeated steps, gaps, and visible spikes in long runs."""

import math
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from pretrain_tools.runs.history import History, count_flops, read_history
from pretrain_tools.runs.plots import draw_panel, panels_of, points_of, smoothed, write_png
from support.run_logs import end_line, finished_run, start_line, train_line, validation_line, write_run


def history_of(folder, lines):
    return read_history(write_run(folder, lines))


def panel(runs, title):
    (found,) = [panel for panel in panels_of(runs) if panel.title == title]
    return found


def flops(history):
    count_flops(history)
    return {event["step"]: event.get("flops") for event in history.of("train")}


def test_flops_come_from_the_run_or_else_6_per_parameter(tmp_path):
    assert flops(history_of(tmp_path / "a", [start_line(flops_per_token=7000.0), train_line(1)])) == {1: 2048 * 7000.0}
    assert flops(history_of(tmp_path / "b", [start_line(), train_line(1)])) == {1: 2048 * 6 * 1000.0}
    assert flops(History(Path(), [train_line(1)])) == {1: None}


def test_flops_follow_the_stages_of_a_run(tmp_path):
    """FLOPs match a hand calculation: ten steps at 10 FLOPs per token, then 40, with a rollback in the second
    stage."""
    stages = [
        {"event": "stage", "step": step, "flops_per_token": flops} for step, flops in ((12, 40), (8, 10), (10, 40))
    ]
    lines = [start_line(flops_per_token=10.0), *(train_line(step) for step in range(1, 21)), *stages]
    found = flops(history_of(tmp_path / "a", lines))
    assert (found[5], found[10], found[20]) == (5 * 20480, 10 * 20480, 10 * 20480 + 10 * 81920)


def test_the_loss_by_position_is_drawn_at_the_end_of_each_stage(tmp_path):
    def validation(step, *losses, **more):
        ranges = ("0-127", "128-255", "256-511")
        return validation_line(step, 3.0) | {"loss_by_position": dict(zip(ranges, losses, strict=False)), **more}

    longer = {"stage_sequence_length": 512, "stage_loss": 2.5}
    lines = [start_line(), train_line(1), validation(10, 4.0, 3.9), validation(20, 3.5, 3.4), train_line(21)]
    lines += [validation(30, 3.4, 3.3, None, **longer), validation(40, 3.0, 2.8, 2.6, **longer), train_line(40)]
    runs = {"a": history_of(tmp_path / "a", lines)}
    found = {
        line.label: line.points.tolist()
        for line in panel(runs, "Validation loss by position, at the end of each stage").lines
    }
    assert found == {
        "demo, step 20": [[128, 256], [3.5, 3.4]],
        "demo, step 40": [[128, 256, 512], [3.0, 2.8, 2.6]],
    }
    validations = {line.label: line.points.tolist() for line in panel(runs, "Validation loss").lines}
    assert validations["demo, stage's length"] == [[30, 40], [2.5, 2.5]]
    short = {"b": history_of(tmp_path / "b", [start_line(), train_line(1), validation(10, 4.0)])}
    assert not any(panel.title.startswith("Validation loss by") for panel in panels_of(short)), (
        "a single range must be omitted, because it equals the loss"
    )
    write_png(runs, tmp_path / "plot.png")


def test_dollar_signs_in_names_are_not_formulas(tmp_path):
    lines = [start_line(), train_line(1), validation_line(1, 3.0) | {"source": "$y_$"}, train_line(2)]
    write_png({"lr$x^$": history_of(tmp_path / "a", lines)}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").is_file()


def test_a_spike_of_a_long_run_is_drawn(tmp_path):
    events = [train_line(step, loss=9.0 if step == 31_415 else 3.0) for step in range(1, 50_001)]
    runs = {"run": history_of(tmp_path / "run", [start_line(), *events])}
    axis = Figure().subplots()
    draw_panel(axis, panel(runs, "Training loss (bold: smoothed)"))
    assert max(max(line.get_ydata()) for line in axis.lines) == 9.0 < axis.get_ylim()[1]


def test_missing_numbers_are_gaps_and_no_steps_give_no_points():
    events = [train_line(1), train_line(2, loss=float("nan")), {**train_line(3), "loss": None}, {"event": "train"}]
    assert points_of(events, "step", "loss").tolist() == [[1], [4.99]]
    assert points_of([], "step", "loss").shape == (2, 0)


def test_repeated_steps_replace_the_first_ones():
    rolled_back = [*map(train_line, range(1, 21)), {"event": "rollback", "step": 20, "to_step": 10}]
    history = History.of_events(Path(), [start_line(), *rolled_back, train_line(11, 1.0)])
    steps, losses = points_of(history.of("train"), "step", "loss")
    assert steps.tolist() == list(range(1, 12)) and losses[-1] == 1.0


def test_the_smoothed_line_neither_lags_nor_overshoots():
    falling = [10.0 - n / 100 for n in range(1000)]
    middle = slice(50, 950)
    assert smoothed(falling)[middle] == pytest.approx(falling[middle], abs=1e-9)  # a trailing mean would be higher
    assert smoothed([2.0] * 30) == pytest.approx([2.0] * 30)
    noisy = smoothed([math.sin(n * 2.4) for n in range(1000)])
    assert max(map(abs, noisy[100:900])) < 0.1


def test_the_picture_has_a_panel_for_everything(tmp_path):
    lines = [start_line(), *(train_line(step) for step in range(1, 60))]
    lines += [{"event": kind, "step": 30} for kind in ("spike", "skip", "rollback", "resume", "control", "warning")]
    lines += [validation_line(50, 4.0, "web"), validation_line(50, 3.0, "code"), end_line(59, 16, "diverged")]
    busy = history_of(tmp_path / "busy", lines)
    plain = {name: read_history(finished_run(tmp_path / name)) for name in ("plain", "other")}
    runs = {"busy": busy, **plain}
    path = tmp_path / "plot.png"
    write_png(runs, path)
    header = path.read_bytes()[:24]
    width = int.from_bytes(header[16:20], "big")
    height = int.from_bytes(header[20:24], "big")
    # Four losses, validation, learning rate, norm, speed and one evaluation: three rows of three panels
    assert width == 1760 and height == round((3 * 4.1 + 0.9) * 110)
    titles = [panel.title for panel in panels_of(runs)]
    assert len(titles) == 9 and titles[-1] == "Evaluation: arc_easy · acc"
    assert len(panels_of({"busy": busy, "plain": plain["plain"]})) == 8  # a single value isn't plotted
    scores = panel(runs, "Evaluation: arc_easy · acc").lines
    assert [line.points.tolist() for line in scores] == [[[100], [0.25], [0.01]]] * 2
    assert len(panels_of({"busy": busy})) == 5


def test_every_layer_has_a_line(tmp_path):
    event = {"event": "diagnostics", "layers": ["embedding", "0", "1"], "activation_rms": [1.0, 2.0, 3.0]}
    event |= {name: [None, 0.5, 0.5] for name in ("weight_rms", "gradient_rms", "update_rms", "largest_logit")}
    event["units_off"] = [None] * 3
    lines = [start_line(), train_line(1), *({**event, "step": step} for step in (10, 20))]
    runs = {"run": history_of(tmp_path / "run", lines)}
    activations = panel(runs, "RMS of activations, per layer").lines
    assert [line.label for line in activations] == ["embedding", None, "1"]
    assert activations[2].points.tolist() == [[10, 20], [3.0, 3.0]]
    assert len(panel(runs, "Largest attention logit, per layer").lines) == 2
    assert not any(panel.title.startswith("Fraction of inactive units") for panel in panels_of(runs))


def test_a_single_step_and_every_loss_of_a_short_run_are_visible(tmp_path):
    """Single points have a marker, because a line would be invisible, and the first loss is within the plotted
    range."""
    lines = [start_line(), validation_line(0, 6.2), train_line(10, loss=9.0), end_line(10)]
    one = history_of(tmp_path / "one", lines)
    two = history_of(tmp_path / "two", [*lines, train_line(2000, loss=3.0)])
    for run in (one, two):
        for each in panels_of({"run": run}):
            axis = Figure().subplots()
            draw_panel(axis, each)
            assert axis.lines and all(line.get_marker() == "o" for line in axis.lines), each.title
            low, high = axis.get_ylim()
            assert all(low <= y <= high for line in axis.lines for y in line.get_ydata()), each.title
