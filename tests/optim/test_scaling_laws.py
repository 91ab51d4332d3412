"""`auto` settings must match published values and the sweeps in bench/auto_rates.py."""

import math

import pytest

from bench.auto_rates import SIZES, auto_learning_rate, best_of, loss_at, read_points, sweep_of
from pretrain.config import Batch, Ramp
from pretrain.optim.scaling_laws import (
    scaling_law_batch,
    scaling_law_learning_rate,
    scaling_law_warmup,
    scaling_law_weight_decay,
    tokens_of_steps,
)
from pretrain.recipe import read_run_config
from pretrain.training.auto_settings import auto_batch, resolve_auto
from support.project import ROOT

RECIPE = ROOT / "recipes" / "demo.yaml"
SWEPT = ("1M", "3M", "10M", "30M")
AUTO = [(f"optim.{name}", "auto") for name in ("learning_rate", "weight_decay", "warmup_steps")]


def step_law(parameters: float, tokens: float) -> float:
    """Returns the peak learning rate of Li et al., arXiv 2503.04715."""
    return 1.79 * parameters**-0.713 * tokens**0.307


def deepseek_law(parameters: float, tokens: float) -> float:
    """Returns the peak learning rate of DeepSeek LLM, arXiv 2401.02954."""
    return 0.3118 * (6 * parameters * tokens) ** -0.125


@pytest.mark.parametrize("parameters", [30e6, 124e6, 1e9, 7e9, 13e9])
def test_the_learning_rate_is_close_to_other_scaling_laws(parameters):
    tokens = 20 * parameters
    rate = scaling_law_learning_rate(parameters, 160 * 2048 * (parameters / 108e6) ** (2 / 3))
    for law in (step_law, deepseek_law):
        assert 1 / 1.6 < rate / law(parameters, tokens) < 1.6


def test_the_learning_rate_matches_olmos_ladder_and_scales_with_the_batch():
    assert scaling_law_learning_rate(108e6, 160 * 2048) == pytest.approx(0.00235)
    assert scaling_law_learning_rate(8 * 108e6, 4 * 160 * 2048) == pytest.approx(0.00235 / 2)
    assert scaling_law_learning_rate(108e6, 2 * 160 * 2048) == pytest.approx(0.00235 * math.sqrt(2))
    assert scaling_law_learning_rate(108e6, 1e9, relative=2.0) == pytest.approx(2 * 2 * 0.00235)


def test_the_batch_depends_on_the_tokens():
    assert scaling_law_batch(100e9) == pytest.approx(1.11e6, rel=0.01)  # step-law.github.io
    assert scaling_law_batch(tokens_of_steps(2000)) * 2000 == pytest.approx(tokens_of_steps(2000))


def test_weight_decay_keeps_the_averaging_timescale():
    decay = scaling_law_weight_decay(124e6, 20 * 124e6, 2**17, 2e-3)
    assert 2**17 / (2e-3 * decay * 20 * 124e6) == pytest.approx(1.084 * 20**-0.527)
    assert 0.08 < decay < 0.2  # near the usual 0.1


def test_warmup_is_one_token_per_parameter_or_5_percent():
    assert scaling_law_warmup(1e9, 100e9, 1e6) == 1000
    assert scaling_law_warmup(1e9, 1e9, 1e6) == 50
    assert scaling_law_warmup(1e6, 1e3, 1e6) == 1


def test_auto_depends_on_the_recipe_and_not_on_the_processes():
    alone, many = (resolve_auto(with_auto_batch(budget=1_200_000), processes) for processes in (1, 8))
    assert alone.batch.tokens_per_step == many.batch.tokens_per_step == 2048
    assert alone.optim == many.optim
    assert (alone.batch.sequences_per_micro_batch, many.batch.sequences_per_micro_batch) == (4, 1)
    assert "auto" not in (alone.optim.learning_rate, alone.optim.weight_decay, alone.optim.warmup_steps)
    assert alone.optim.warmup_steps == round(1_200_000 / 20 / 2048)


def test_the_automatic_batch_is_divisible_by_a_ramp():
    config = with_auto_batch(budget=1_000_000_000)
    ramped = config.model_copy(update={"batch": Batch(tokens_per_step="auto", ramp=Ramp(**{"from": 1 / 3}))})
    sequences = auto_batch(ramped, 1e9, 1).tokens_per_step // config.data.sequence_length
    assert sequences % 3 == 0 and abs(math.log2(sequences * 256 / scaling_law_batch(1e9))) < 0.6


def with_auto_batch(budget: int):
    return read_run_config(RECIPE, [("budget.tokens", str(budget)), ("batch.tokens_per_step", "auto"), *AUTO])


@pytest.mark.parametrize("size", SWEPT)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_auto_is_within_one_percent_of_the_best_loss(size, optimizer):
    swept = sweep_of(size, optimizer, read_points())
    at_auto = loss_at(swept, auto_learning_rate(SIZES[size], optimizer))
    assert at_auto is not None and at_auto <= 1.01 * best_of(swept)[1]


def test_muon_needs_at_most_60_percent_of_the_steps():
    for size in SWEPT:
        assert sweep_of(size, "muon", read_points(), 0.6)[0].loss <= best_of(sweep_of(size, "adamw", read_points()))[1]
