"""The guard must detect problems in synthetic losses, and a restart must not change its decisions."""

import json
import math
import random

import pytest

from pretrain import config
from pretrain.training.guard import MIN_LOSSES_FOR_DEVIATION, MIN_LOSSES_FOR_MEAN, SpeedGuard, StepGuard
from pretrain.training.step_reports import Request, StepReport


def report(step, loss=2.0, grad_norm=1.0, skipped=False) -> StepReport:
    return StepReport(step, loss, grad_norm, skipped, Request.NONE)


def judge_all(guard, losses, first=1):
    return [finding for step, loss in enumerate(losses, first) for finding in guard.judge(report(step, loss))]


@pytest.mark.parametrize(
    ("loss", "events"),
    [(3.9, []), (4.1, ["spike"]), (5.9, ["spike"]), (6.1, ["spike"]), (math.nan, []), (math.inf, [])],
)
def test_one_bad_step_is_at_most_reported(loss, events):
    """Early in a run, a loss of twice the mean must be reported, and a loss of three times the mean must count as one
    of three bad steps."""
    guard = StepGuard(config.Guard())
    findings = judge_all(guard, [2.0] * MIN_LOSSES_FOR_MEAN + [loss, 2.0, 2.0])
    assert [finding.event for finding in findings] == events
    assert not any(finding.roll_back for finding in findings)


@pytest.mark.parametrize("loss", [6.1, math.nan, math.inf])
def test_three_bad_steps_roll_back_before_the_first(loss):
    findings = judge_all(StepGuard(config.Guard()), [2.0] * 10 + [loss] * 3)
    assert findings[-1].roll_back == (11, 13) and not any(finding.roll_back for finding in findings[:-1])
    interrupted = judge_all(StepGuard(config.Guard()), [2.0] * 10 + [loss, loss, 2.0, loss, loss, 2.0])
    assert not any(finding.roll_back for finding in interrupted)


@pytest.mark.parametrize(
    ("scales_loss", "losses", "rollback"),
    [
        (False, [2.0] * 3, (1, 3)),
        (True, [2.0] * 32, None),  # fp16 adjusts its scale
        (True, [2.0] * 33, (1, 33)),
        (True, [math.nan] * 3, (1, 3)),
        (True, [2.0, 2.0, math.nan], None),
    ],
)
def test_skipped_steps_roll_back_after_more_steps_in_fp16(scales_loss, losses, rollback):
    guard = StepGuard(config.Guard(), scales_loss=scales_loss)
    for step, loss in enumerate(losses, 1):
        found = guard.judge(report(step, loss, grad_norm=math.inf, skipped=True))
        is_last = step == len(losses)
        assert [finding.roll_back for finding in found] == ([rollback] if rollback and is_last else [])


def test_deviations_need_enough_losses_and_a_minimum_increase():
    chance = random.Random(0)
    noisy = [2.0 + chance.gauss(0, 0.05) for _ in range(MIN_LOSSES_FOR_DEVIATION)]
    guard = StepGuard(config.Guard())
    assert judge_all(guard, noisy) == []
    assert judge_all(guard, [2.15], 100) == [], "three standard deviations are not a spike"
    assert judge_all(guard, [2.6] * 3, 101)[-1].roll_back == (101, 103), "twelve standard deviations are a spike"
    even = StepGuard(config.Guard())
    assert judge_all(even, [2.0] * 100 + [2.15] * 5) == [], (
        "with a standard deviation of 0, not every step may be a spike"
    )


def test_spikes_do_not_become_the_new_mean():
    guard = StepGuard(config.Guard(patience=100))
    assert len([f for f in judge_all(guard, [2.0] * 20 + [7.0] * 50) if f.event == "spike"]) == 50


def test_divergence_is_reported_once_and_stops_if_configured():
    losses = [2.0] * 300 + [2.0 + 0.05 * step for step in range(60)]
    for action, stops in (("warn", False), ("stop", True)):
        guard = StepGuard(config.Guard(on_divergence=action, spike_sigma=1e9))
        (finding,) = [f for f in judge_all(guard, losses) if f.event == "divergence"]
        assert finding.stop is stops and "over recent steps" in finding.message
    assert judge_all(StepGuard(config.Guard()), [2.0 - 0.001 * step for step in range(500)]) == []


def test_gradient_explosion_is_reported():
    (finding,) = StepGuard(config.Guard()).judge(report(1, grad_norm=101.0))
    assert finding.event == "explosion" and "above 100" in finding.message


def test_a_restart_does_not_change_decisions():
    """After every step, the state is converted to JSON and back, as in a checkpoint."""
    chance = random.Random(1)
    losses = [chance.choice([2.0, 2.1, 2.05, 2.02, 4.5, 7.0, math.nan]) for _ in range(400)]
    unbroken, resumed = StepGuard(config.Guard()), StepGuard(config.Guard())
    for step, loss in enumerate(losses, 1):
        expected = unbroken.judge(report(step, loss))
        resumed = StepGuard(config.Guard(), json.loads(json.dumps(resumed.state())))
        assert str(resumed.judge(report(step, loss))) == str(expected)  # compared as strings, because NaN != NaN


def test_a_drop_in_speed_is_reported_once():
    guard = SpeedGuard(0.3)
    said = [guard.judge(speed) is not None for speed in [100.0] * 10 + [60.0] * 3 + [100.0] * 3 + [50.0]]
    assert said == [False] * 10 + [True, False, False] + [False] * 3 + [True]
