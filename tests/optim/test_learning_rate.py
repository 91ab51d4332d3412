import math
from itertools import pairwise
from typing import get_args

import pytest

from pretrain import config
from pretrain.errors import InputError
from pretrain.optim.batch_ramp import BatchRamp, batch_ramp
from pretrain.optim.learning_rate import (
    DECAY_SHAPES,
    SCHEDULES,
    Schedule,
    cooldown_steps_of_infinite,
    learning_rate_for_batch,
)
from pretrain.optim.scaling_laws import scaling_law_learning_rate
from pretrain.recipe import read_run_config
from pretrain.training.auto_settings import resolve_auto
from pretrain.training.run_plan import derive


def nanogpt_cosine(step, peak, floor, warmup, total):
    if step < warmup:
        return peak * (step + 1) / warmup
    return floor + 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) * (peak - floor)


@pytest.mark.parametrize("step", [0, 9, 10, 11, 55, 99])
def test_cosine_matches_nanogpt(step):
    schedule = Schedule("cosine", total_steps=100, warmup_steps=10)
    assert schedule.learning_rate(step, 6e-4) == pytest.approx(nanogpt_cosine(step, 6e-4, 6e-5, 10, 100), rel=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_warms_up_peaks_and_stays_within_its_bounds(name):
    schedule = Schedule(name, total_steps=200, warmup_steps=20)
    factors = [schedule.factor(step) for step in range(300)]
    assert factors[0] == 1 / 20 and factors[19] == 1.0 and factors[20] == 1.0
    assert factors[:20] == sorted(factors[:20])
    assert factors[20:] == sorted(factors[20:], reverse=True), "no schedule may rise after the warmup"
    assert min(factors[20:]) >= 0.1


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_the_minimum_is_reached_at_total_steps_and_kept(name):
    schedule = Schedule(name, total_steps=50, warmup_steps=5, final_ratio=0.02)
    assert schedule.factor(50) == pytest.approx(0.02) and schedule.factor(80) == pytest.approx(0.02)
    assert schedule.factor(49) > 0.02


def test_linear_by_hand():
    schedule = Schedule("linear", total_steps=110, warmup_steps=10, final_ratio=0.0)
    assert schedule.factor(60) == pytest.approx(0.5) and schedule.factor(109) == pytest.approx(0.01)


def test_a_recipe_can_name_every_decay_shape_and_no_other():
    settings = config.Optim.model_fields
    assert set(get_args(settings["decay_type"].annotation)) == set(DECAY_SHAPES)


def test_warmup_stable_decay_by_hand():
    schedule = Schedule("wsd", total_steps=100, warmup_steps=10, decay_steps=40, final_ratio=0.0)
    assert schedule.factor(59) == 1.0 and schedule.factor(60) == 1.0
    assert schedule.factor(80) == pytest.approx(0.5)
    sqrt = Schedule("wsd", total_steps=100, warmup_steps=10, decay_steps=40, final_ratio=0.0, decay_shape="sqrt")
    assert sqrt.factor(70) == pytest.approx(1 - math.sqrt(0.25))
    assert Schedule("wsd", total_steps=100).factor(79) == 1.0 > Schedule("wsd", total_steps=100).factor(81)


def test_infinite_phases_by_hand():
    schedule = Schedule("infinite", total_steps=1000, warmup_steps=100, cooldown_steps=400, anneal_steps=200)
    plateau = 7.5 / 14
    assert schedule.factor(300) == pytest.approx((1 + plateau) / 2), "halfway down the cooldown"
    assert schedule.factor(500) == pytest.approx(plateau) == schedule.factor(799)
    assert schedule.factor(900) == pytest.approx(math.sqrt(plateau * 0.1)), "halfway through the exponential annealing"
    assert schedule.factor(1000) == pytest.approx(0.1)


def test_an_infinite_run_shorter_than_its_cooldown_stays_near_the_peak():
    schedule = Schedule("infinite", total_steps=45_000, warmup_steps=500, cooldown_steps=1_220_000)
    assert schedule.factor(44_999) > 0.996
    annealed = Schedule("infinite", 45_000, warmup_steps=500, cooldown_steps=1_220_000, anneal_steps=1000)
    assert annealed.factor(44_000) == pytest.approx(schedule.factor(44_000))
    assert annealed.factor(45_000) == pytest.approx(0.1)


def test_extending_an_infinite_run_keeps_earlier_learning_rates():
    short = Schedule("infinite", total_steps=1000, warmup_steps=10, cooldown_steps=500)
    longer = Schedule("infinite", total_steps=5000, warmup_steps=10, cooldown_steps=500)
    assert [short.factor(s) for s in range(1000)] == [longer.factor(s) for s in range(1000)]


def test_cooldown_is_the_larger_of_tokens_and_fraction():
    # Runs of 50B and 300B tokens with 81,920 tokens per step.
    assert cooldown_steps_of_infinite(610_000, 81_920, 100_000_000_000) == 1_220_704
    assert cooldown_steps_of_infinite(3_662_109, 81_920, 100_000_000_000) == round(0.7 * 3_662_109)


def test_square_root_scaling_by_hand():
    assert learning_rate_for_batch(1.4e-5, 16) == pytest.approx(5.6e-5)


def test_the_learning_rate_follows_the_batch_or_the_model_size(recipe):
    """learning_rate_per_sequence scales with the square root of the batch size; auto uses the scaling law."""
    scaled = derive(
        read_run_config(recipe, [("optim.learning_rate_per_sequence", "1e-3"), ("batch.tokens_per_step", "1024")]), 1
    )
    assert scaled.peak_learning_rate == pytest.approx(4e-3) and scaled.learning_rate(1) == pytest.approx(4e-3)
    assert scaled.learning_rate(0) == pytest.approx(2e-3), "two steps of warmup"
    config = resolve_auto(read_run_config(recipe, [("optim.learning_rate", "auto")]))
    parameters = derive(config, 1).parameters
    assert derive(config, 1).peak_learning_rate == pytest.approx(
        scaling_law_learning_rate(parameters, 256, 1.0), rel=1e-2
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_steps": 101}, "warmup_steps 101 is longer than the run (100 steps)"),
        ({"name": "wsd", "warmup_steps": 60, "decay_steps": 50}, "warmup_steps 60 + decay_steps 50 is longer"),
        ({"name": "infinite", "warmup_steps": 60, "anneal_steps": 50}, "anneal_steps 50 is longer than the run"),
        ({"total_steps": 0}, "total_steps must be at least 1, got 0"),
        (
            {"name": "infinite", "anneal_steps": 5, "final_ratio": 0.0},
            "final_ratio: exponential annealing can't reach 0",
        ),
    ],
)
def test_impossible_schedules_are_rejected_by_name(settings, message):
    with pytest.raises(InputError) as error:
        Schedule(**{"name": "cosine", "total_steps": 100, **settings})
    assert message in str(error.value)


def test_all_problems_of_a_schedule_are_reported_at_once():
    with pytest.raises(InputError) as error:
        Schedule("infinite", total_steps=10, warmup_steps=20, anneal_steps=1, final_ratio=0)
    assert len(error.value.problems) == 2


def brute_force_before(ramp: BatchRamp, step: int) -> int:
    return sum(ramp.sequences_at(s) for s in range(step))


@pytest.mark.parametrize("ramp_from", [1.0, 0.5, 0.333, 0.25, 0.125])
def test_ramp_arithmetic_equals_counting(ramp_from):
    ramp = batch_ramp(48, total_sequences=20_011, ramp_from=ramp_from, ramp_over=0.3)
    for step in (*range(150), ramp.total_steps, ramp.total_steps + 3):
        assert ramp.sequences_before(step) == brute_force_before(ramp, step)
    assert ramp.sequences_before(ramp.total_steps - 1) < 20_011 <= ramp.total_sequences
    for sequences in (0, 1, 11, 12, 13, 5000, 20_011):
        steps = ramp.steps_to_reach(sequences)
        assert brute_force_before(ramp, steps) >= sequences
        assert steps == 0 or brute_force_before(ramp, steps - 1) < sequences


def test_ramp_from_a_quarter_over_five_percent():
    ramp = batch_ramp(512, total_sequences=1_000_000, ramp_from=0.25, ramp_over=0.05)
    assert ramp.sequences_per_level == (128, 256, 384, 512)
    full_from = ramp.sequences_before(ramp.first_steps[-1])
    assert 50_000 <= full_from < 50_000 + 384, "the ramp ends at 5 % of the sequences, rounded up to a step"
    shares = [ramp.sequences_before(b) - ramp.sequences_before(a) for a, b in pairwise(ramp.first_steps)]
    assert max(shares) - min(shares) <= 2 * 384, "each level must have the same number of sequences, up to one step"
    assert ramp.sequences_at(0) == 128 and ramp.sequences_at(ramp.total_steps) == 512


def test_without_a_ramp_the_batch_is_constant():
    batch = batch_ramp(64, total_sequences=6_401)
    assert batch.total_steps == 101 and batch.sequences_at(0) == batch.sequences_at(100) == 64
    assert batch.sequences_before(77) == 77 * 64


@pytest.mark.parametrize(("ramp_from", "ramp_over"), [(1.0, 0.0), (0.25, 0.05), (0.5, 0.9)])
def test_a_budget_in_steps_is_exact(ramp_from, ramp_over):
    ramp = batch_ramp(64, total_steps=5000, ramp_from=ramp_from, ramp_over=ramp_over)
    assert ramp.total_steps == 5000
    assert ramp.sequences_before(ramp.first_steps[-1]) == pytest.approx(ramp_over * ramp.total_sequences, abs=128)


def test_a_ramp_that_never_ends_is_rejected():
    with pytest.raises(InputError, match=r"batch\.ramp\.over: 1\.0 leaves no steps for the full batch"):
        batch_ramp(64, total_sequences=10_000, ramp_from=0.5, ramp_over=1.0)


@pytest.mark.parametrize(("sequences", "nearest"), [(98, "96 or 100"), (3, "4 sequences$")])
def test_a_batch_that_is_not_a_multiple_of_the_levels_is_rejected(sequences, nearest):
    with pytest.raises(
        InputError,
        match=f"batch.tokens_per_step: {sequences} seq.* is not a multiple of 4 ramp levels; nearest: {nearest}",
    ):
        batch_ramp(sequences, total_sequences=10_000, ramp_from=0.25, ramp_over=0.1)
