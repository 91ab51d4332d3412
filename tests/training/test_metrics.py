"""What is said of a run: speeds that are differences of times, lines that any JSON reader takes, words."""

import json

import pytest

from pretrain.training.metrics import Metrics, Throughput, finite
from pretrain.training.trackers import flatten_for_trackers, tracker_problems
from pretrain.units import count_text, duration_text


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
    figures = throughput.read(tokens=8000, flops_per_token=1e6, peak_flops=1e10, ranks=2)
    assert figures == pytest.approx(
        {"tokens_per_second": 2000, "mfu": 1e6 * 2000 / 2e10, "step_seconds": 2.0, "data_seconds": 0.5}
    )
    now[0] += 4
    throughput.step_done()
    assert throughput.read(4000, 1e6, None, 1)["tokens_per_second"] == pytest.approx(1000), "a new interval"
    assert Throughput().read(1, 1.0, None, 1)["mfu"] is None


def test_lines_are_json_whatever_the_numbers():
    line = finite({"loss": float("nan"), "norm": float("inf"), "step": 3, "lr": 0.1})
    assert json.loads(json.dumps(line, allow_nan=False)) == {"loss": None, "norm": None, "step": 3, "lr": 0.1}


def test_words():
    assert [count_text(n) for n in (999, 1_234_567, 10**10, 2.5e12)] == ["999", "1.23M", "10B", "2.5T"]
    assert [duration_text(s) for s in (5, 65, 3725, 90_000)] == ["5 s", "1 min 05 s", "1 h 02 min", "1 d 01 h"]
    assert flatten_for_trackers({"a": {"b": 1}, "c": [2, {"d": None}]}) == {"a.b": 1, "c.0": 2, "c.1.d": "null"}


def test_a_tracker_that_is_not_installed_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(
        "pretrain.training.trackers.TRACKER_PACKAGES", {"wandb": "wandb", "trackio": "no_such_package"}
    )
    assert tracker_problems(["wandb"]) == []
    assert tracker_problems(["wandb", "trackio"]) == [
        "trackers: trackio is not installed: pip install no_such_package, or leave it out"
    ]


@pytest.mark.parametrize("known", ["told", "from the attempt before", "nothing"])
def test_the_end_always_says_where_the_run_stands(tmp_path, known):
    if known == "from the attempt before":
        (tmp_path / "metrics.jsonl").write_text('{"event": "train", "step": 7, "tokens": 70}\n{"event": "warning"}\n')
    metrics = Metrics(tmp_path, is_main=True)
    if known == "told":
        metrics.stands_at(7, 70)
    metrics.end(18, "preempted")
    end = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (end["event"], end["step"], end["tokens"]) == ("end", *((0, 0) if known == "nothing" else (7, 70)))
