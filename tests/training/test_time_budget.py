"""With budget.minutes, the decay must start when the time is almost up, and not earlier."""

import pytest

from pretrain.training import time_budget
from pretrain.training.time_budget import TimeBudget


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(time_budget.time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def end_of(budget, clock, seconds_of, decay=0.2, most=100_000):
    """Simulates a run whose step s takes seconds_of(s). Returns (first step of the decay, seconds at its end)."""
    for step in range(1, most):
        clock.now += seconds_of(step)
        budget.step_taken()
        if budget.asks_for_decay(decay * step):
            end = sum(seconds_of(s) for s in range(step + 1, step + 1 + round(decay * step)))
            return step, budget.seconds + end
    return None, None


@pytest.mark.parametrize(
    "seconds_of",
    [
        lambda step: 0.1,
        lambda step: 30.0 if step == 1 else 0.1,  # the first step includes compilation
        lambda step: 0.1 + 3.0 * (step % 400 == 0),  # validation and checkpoints in between
        lambda step: 0.1 if step < 300 else 0.2,  # another process starts
        lambda step: 6.0,  # few steps
        lambda step: 0.05 + 0.4 * (step * 7919 % 10 == 0) + 0.2 * (step % 200 < 60),  # a shared machine
    ],
)
def test_a_run_ends_within_its_minutes(clock, seconds_of):
    budget = TimeBudget(3.0, spent=0.0, began=clock.now)
    _, seconds = end_of(budget, clock, seconds_of)
    # Work at the end of the run isn't included.
    assert 0.88 * 180 <= seconds <= 1.02 * 180


@pytest.mark.parametrize("slower", [2, 8])
def test_a_decay_that_would_end_too_late_is_shortened(clock, slower):
    budget = TimeBudget(3.0, spent=0.0, began=clock.now)
    step = 0
    while not budget.asks_for_decay(0.2 * step):
        step, clock.now = step + 1, clock.now + 0.1
        budget.step_taken()
    left, shortened = round(0.2 * step), 0
    while left > 0:
        left, clock.now = left - 1, clock.now + 0.1 * slower
        budget.step_taken()
        if budget.asks_to_shorten(left):
            left, shortened = left // 2, shortened + 1
    assert shortened > 0 and budget.seconds <= 1.08 * 180


def test_the_last_validation_is_included(clock):
    ends = []
    for seconds in (0.0, 20.0):
        budget = TimeBudget(3.0, spent=0.0, began=clock.now)
        budget.validation_seconds = seconds
        ends.append(end_of(budget, clock, lambda step: 0.1)[1])
    assert 15 < ends[0] - ends[1] < 25


def test_a_decay_that_ends_in_time_is_not_shortened(clock):
    budget = TimeBudget(3.0, spent=60.0, began=clock.now)
    for left in range(50, 0, -1):
        clock.now += 2.0
        budget.step_taken()
        assert not budget.asks_to_shorten(left)


def test_the_time_of_earlier_starts_counts(clock):
    budget = TimeBudget(3.0, spent=120.0, began=clock.now)
    step, seconds = end_of(budget, clock, lambda step: 0.1)
    assert seconds <= 180 and step < 600
    assert TimeBudget(3.0, spent=170.0, began=clock.now).left == pytest.approx(10)


def test_a_decay_is_requested_once_and_never_without_a_limit(clock):
    budget = TimeBudget(0.01, spent=9.0, began=clock.now)
    budget.step_taken()
    assert not budget.asks_for_decay(1), "the first step can't be used to estimate the speed"
    budget.step_taken()
    assert budget.asks_for_decay(1)
    assert not budget.asks_for_decay(1)
    unlimited = TimeBudget(None, spent=0.0, began=clock.now)
    assert end_of(unlimited, clock, lambda step: 1e6, most=50) == (None, None)
    assert unlimited.left == float("inf")
