"""Speeds must exclude pauses, log lines must be valid JSON, and console lines must fit the terminal."""

import json
import math
from types import SimpleNamespace

import pytest

from pretrain.runs.event_log import read_metrics
from pretrain.training.between_steps import seconds_left, show_progress
from pretrain.training.metrics import Metrics, Throughput, finite
from pretrain.units import count_text, duration_text, parse_count
from support.terminals import watched


def test_speed_is_tokens_over_the_time_that_was_not_paused(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("pretrain.training.metrics.time.perf_counter", lambda: now[0])
    throughput = Throughput()
    for _ in range(2):
        with throughput.loading_data():
            now[0] += 0.5
        now[0] += 1.5
        throughput.step_done()
    with throughput.paused():
        now[0] += 60
    figures = throughput.read(tokens=8000, flops=8e9, peak_flops=1e10, ranks=2)
    assert figures == pytest.approx(
        {"tokens_per_second": 2000, "mfu": 1e6 * 2000 / 2e10, "step_seconds": 2.0, "data_seconds": 0.5}
    )
    now[0] += 4
    throughput.step_done()
    assert throughput.read(4000, 1e6, None, 1)["tokens_per_second"] == pytest.approx(1000), (
        "each read starts a new interval"
    )
    assert Throughput().read(1, 1.0, None, 1)["mfu"] is None


def test_lines_are_valid_json_for_any_number():
    line = finite({"loss": float("nan"), "norm": float("inf"), "step": 3, "lr": 0.1})
    assert json.loads(json.dumps(line, allow_nan=False)) == {"loss": None, "norm": None, "step": 3, "lr": 0.1}


def test_diagnostics_of_a_non_finite_gradient_do_not_stop_the_run(metrics, tmp_path):
    metrics.write("diagnostics", step=3, gradient_rms=[float("nan"), 0.5, float("inf")])
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["gradient_rms"] == [None, 0.5, None]


def test_a_line_after_a_truncated_one_is_whole(metrics, tmp_path):
    """A disk that becomes full accepts a part of a line."""
    whole = metrics._lines._file
    metrics._lines._file = SimpleNamespace(write=lambda content: whole.write(content[: len(content) // 2]))
    metrics.write("mirror", step=1)
    metrics._lines._file = whole
    metrics.write("mirror", step=2)
    metrics.write("mirror", step=3)
    assert [event["step"] for event in read_metrics(tmp_path)] == [2, 3]


def test_numbers_are_formatted_as_text():
    assert [count_text(n) for n in (999, 1_234_567, 10**10, 2.5e12)] == ["999", "1.23M", "10B", "2.5T"]
    assert [count_text(n) for n in (0, 999_936_000, 999_499)] == ["0", "1B", "999k"]
    assert [duration_text(s) for s in (5, 65, 3725, 90_000)] == ["5 s", "1 min 05 s", "1 h 02 min", "1 d 01 h"]


def test_counts_are_exact_and_fractions_stay_text():
    counts = {"2.01k": 2010, "1.005M": 1_005_000, "1e9": 10**9, "1.0005k": "1.0005k", "2.5": "2.5", "1e400": "1e400"}
    assert {text: parse_count(text) for text in counts} == counts


@pytest.mark.parametrize("known", ["told", "from the previous attempt", "nothing"])
def test_the_end_event_always_has_the_position(tmp_path, known):
    if known == "from the previous attempt":
        (tmp_path / "metrics.jsonl").write_text('{"event": "train", "step": 7, "tokens": 70}\n{"event": "warning"}\n')
    metrics = Metrics(tmp_path, is_main=True)
    if known == "told":
        metrics.set_position(7, 70)
    metrics.end(18, "preempted")
    end = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (end["event"], end["step"], end["tokens"]) == ("end", *((0, 0) if known == "nothing" else (7, 70)))


TRAIN = {
    "step": 500, "loss": 2.813, "perplexity": 16.66, "learning_rate": 1.5e-3, "grad_norm": 0.502,
    "tokens_per_second": 8224.0, "mfu": 0.396, "tokens": 1_020_000, "step_seconds": 0.25,
}  # fmt: skip
FULL = (
    "step 500/586 · loss 2.8130 · perplexity 16.66 · lr 1.50e-03 · norm 0.502 · 8,224 tok/s · MFU 39.6% · 1.02M tokens"
    " · 22 s left"
)  # fmt: skip


@pytest.fixture
def metrics(tmp_path):
    metrics = Metrics(tmp_path, is_main=True)
    metrics.total_steps = 586
    metrics.seconds_left = 21.5
    return metrics


def test_step_lines_are_wrapped_on_the_terminal_and_the_log_is_complete(metrics, tmp_path, monkeypatch):
    screen = watched(monkeypatch, 80)
    metrics.write("train", **TRAIN)
    monkeypatch.setenv("COLUMNS", "160")
    metrics.write("train", **TRAIN)
    lines = screen.getvalue().splitlines()
    assert " ".join(line.strip() for line in lines[:-1]) == lines[-1] == FULL
    assert max(map(len, lines[:-1])) <= 80
    assert [line[20:] for line in (tmp_path / "train.log").read_text().splitlines()] == [FULL, FULL]


def test_piped_step_lines_are_complete(metrics, capsys):
    metrics.write("train", **TRAIN)
    metrics.write("warning", message="w")
    assert capsys.readouterr().out == f"{FULL}\nwarning: w\n"


def test_loss_terms_and_scores_are_printed_by_name(metrics, capsys):
    metrics.write("train", **TRAIN, loss_mine=0.12345, loss_other=2e-6)
    metrics.say_scores(500, "arc_easy", {"acc": 0.43, "acc_stderr": 0.01, "acc_norm": None, "samples": 9})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 500/586 · loss 2.8130 · loss_mine 0.1235 · loss_other 2e-06 · perplexity")
    assert lines[1] == "step 500 · arc_easy · acc 0.4300"


def test_warnings_and_failures_have_colors_only_on_a_terminal(metrics, tmp_path, monkeypatch):
    screen = watched(monkeypatch, 80)
    metrics.write("warning", message="w")
    metrics.write("end", reason="r", code=16, step=1, tokens=2, seconds=3.0)
    assert screen.getvalue().startswith("\x1b[33mwarning: w\x1b[0m\n\x1b[31mr: 1 steps")
    assert "\x1b" not in (tmp_path / "train.log").read_text()


def test_samples_are_text(metrics, capsys):
    metrics.write("sample", step=3, prompt="def", text="def f():\n    return 'é'\x1b[2J")
    assert capsys.readouterr().out == "step 3 · sample:\n  def f():\n      return 'é'\\x1b[2J\n"


def begin(metrics):
    metrics.begin(SimpleNamespace(output=None, trackers=[]))


def test_the_live_line_stays_below_the_log_lines(metrics, monkeypatch):
    screen = watched(monkeypatch, 80)
    now = [0.0]
    monkeypatch.setattr("pretrain.training.metrics.time.perf_counter", lambda: now[0])
    begin(metrics)
    metrics.expect("First step")
    for step in range(1, 11):
        now[0] += 0.06  # shown every other time, because the limit is ten times per second
        metrics.show(f"step {step}/586")
    drawn = [line.removesuffix("\r") for line in screen.getvalue().split("\r\x1b[K")]
    assert drawn[1] == "First step ..." and len(drawn) == 1 + 1 + 5
    assert drawn[-1] == "step 10/586"
    metrics.write("warning", message="w")
    assert screen.getvalue().endswith(f"\r\x1b[K\x1b[33mwarning: w\x1b[0m\n\r\x1b[K{drawn[-1]}\r")
    with metrics.doing("validation"):
        assert screen.getvalue().endswith("step 0 · validation ...\r")
    assert screen.getvalue().endswith(f"{drawn[-1]}\r"), "the previous line must be shown again"
    metrics.end(0, "done")
    assert screen.getvalue().endswith("exit status 0\n"), "the last line must report the end"


def test_the_live_line_has_the_time_left_and_mfu():
    said = []
    run = SimpleNamespace(
        state=SimpleNamespace(step=100, tokens=0),
        plan=SimpleNamespace(total_steps=586, tokens_in=lambda step: 4112),
        stage=SimpleNamespace(flops_per_token=1e6),
        throughput=SimpleNamespace(pace=0.5),
        clock=SimpleNamespace(left=math.inf),
        strategy=SimpleNamespace(ranks=SimpleNamespace(count=2)),
        log=SimpleNamespace(draws=True, show=said.append, set_position=lambda step, tokens: None),
        peak_flops=1e10,
    )
    show_progress(run, [SimpleNamespace(loss=2.5)])
    run.clock.left = 60.0  # budget.minutes ends the run earlier
    run.peak_flops = None
    show_progress(run, [])
    assert said == [
        "step 100/586 · loss 2.5000 · 8,224 tok/s · 4 min 03 s left · MFU 41.1%",
        "step 100/586 · 8,224 tok/s · 1 min 00 s left",
    ]


def test_a_file_gets_no_live_line(metrics, capsys):
    begin(metrics)
    metrics.show("step 1")
    with metrics.doing("validation"):
        pass
    assert not metrics.is_live and capsys.readouterr() == ("", "")


def test_the_live_speed_excludes_pauses_and_the_first_step(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("pretrain.training.metrics.time.perf_counter", lambda: now[0])
    throughput = Throughput()
    for seconds in (60.0, 2.0, 2.0):  # the first step includes compilation
        now[0] += seconds
        throughput.step_done()
    assert throughput.recent_step_seconds == 2.0
    with throughput.paused():
        now[0] += 100
    assert throughput.recent_step_seconds is None and throughput.pace == 2.0
    throughput.expect_compiling()  # a new stage
    now[0] += 50
    throughput.step_done()
    throughput.read(1, 1.0, None, 1)
    assert throughput.pace == 2.0


@pytest.mark.parametrize("pauses", [False, True])
def test_the_remaining_time_excludes_the_compiling_step(metrics, capsys, monkeypatch, pauses):
    """The estimate must not depend on pauses between steps."""
    now = [0.0]
    monkeypatch.setattr("pretrain.training.metrics.time.perf_counter", lambda: now[0])
    throughput = Throughput()
    run = SimpleNamespace(throughput=throughput, state=SimpleNamespace(), clock=SimpleNamespace(left=math.inf))
    run.plan = SimpleNamespace(total_steps=586)
    said = []
    for step, seconds in enumerate((60.0, 2.0, 2.0), start=1):
        now[0] += seconds
        throughput.step_done()
        figures = throughput.read(100, 1.0, None, 1)
        run.state.step = step
        metrics.seconds_left = seconds_left(run)
        metrics.write("train", **TRAIN | figures | {"step": step})
        said.append(capsys.readouterr().out.strip().rpartition(" · ")[2])
        if pauses:
            with throughput.paused():
                now[0] += 30
    assert "left" not in said[0] and said[1:] == ["19 min 28 s left", "19 min 26 s left"]
