"""Tests for choosing model size and tokens: they grow with text and budget, and epochs stay bounded."""

import itertools
import math

import pytest

from pretrain_tools.planning.sizing import (
    LADDER,
    MOST_EPOCHS,
    MOST_TIMES_LARGER,
    OF_THE_DEMO,
    Shape,
    choose_sizing,
    expected_loss,
    parameters_per_token,
    vocabulary_for,
    with_repetition,
)

BUDGETS = [10.0**power for power in range(11, 22)]
TEXTS = [10**power for power in range(4, 11)]


def flops_of(chosen):
    return chosen.tokens * chosen.shape.flops_per_token


def sizing(flops, tokens, vocabulary=1024, **limits):
    return choose_sizing(lambda shape: flops, tokens, vocabulary, **limits)


@pytest.mark.parametrize("tokens", TEXTS)
def test_more_computation_makes_the_model_larger_or_the_run_longer(tokens):
    chosen = [sizing(flops, tokens) for flops in BUDGETS]
    for less, more in itertools.pairwise(chosen):
        assert more.shape.parameters >= less.shape.parameters
        assert more.shape.parameters > less.shape.parameters or more.tokens >= less.tokens
    assert chosen[-1].tokens > chosen[0].tokens


@pytest.mark.parametrize("flops", BUDGETS)
def test_more_text_makes_the_model_no_smaller(flops):
    chosen = [sizing(flops, tokens) for tokens in TEXTS]
    sizes = [found.shape.parameters for found in chosen]
    if flops >= 1e18:
        # Less text may get a larger model, so that the budget is used.
        assert all(more * MOST_TIMES_LARGER >= less for less, more in itertools.pairwise(sizes))
        assert sizes[-1] > 10 * sizes[0]
    assert chosen[-1].epochs <= chosen[0].epochs * 1.05  # rounded to whole steps


@pytest.mark.parametrize("tokens", TEXTS)
@pytest.mark.parametrize("flops", BUDGETS)
def test_epochs_budget_and_steps_stay_in_bounds(flops, tokens):
    chosen = sizing(flops, tokens)
    rounding = 1 + 2 / chosen.steps
    assert chosen.epochs <= MOST_EPOCHS * rounding
    smallest = Shape(*LADDER[0], 1024)
    assert flops_of(chosen) <= flops * rounding or (chosen.shape == smallest and chosen.steps == 4)
    assert chosen.steps % 4 == 0
    assert math.log2(chosen.tokens_per_step).is_integer()
    assert chosen.tokens_per_step >= chosen.shape.sequence_length
    if chosen.tokens > 5e5:
        assert chosen.steps >= 300, "a run must have hundreds of steps"


def test_a_small_text_gets_a_small_model_for_any_time():
    assert sizing(1e20, 300_000).shape.parameters < 5e6
    assert sizing(1e20, 10**10).shape.parameters > 1e8


def test_time_that_a_small_model_leaves_over_goes_to_a_larger_one_for_fewer_epochs():
    small = sizing(1e13, 700_000)
    larger = sizing(3e13, 700_000)
    assert larger.shape.parameters > 1.5 * small.shape.parameters
    assert flops_of(larger) >= 0.85 * 3e13
    assert larger.epochs <= 1.01 * MOST_EPOCHS < 3e13 / small.shape.flops_per_token / 700_000


def test_a_run_may_go_on_if_the_machine_is_faster_than_it_was():
    chosen = sizing(1e13, 10**8)
    assert chosen.most_steps == pytest.approx(2 * chosen.steps, rel=0.02)
    assert sizing(1e20, 300_000).most_steps * sizing(1e20, 300_000).tokens_per_step <= 1.01 * MOST_EPOCHS * 300_000


def test_what_does_not_fit_is_not_chosen():
    assert sizing(1e20, 10**10, most_parameters=2e7).shape.parameters <= 2e7
    assert sizing(1e20, 10**10, most_parameters=1).shape == Shape(*LADDER[0], 1024)


def test_the_choice_uses_a_shape_dependent_speed():
    """If small models train slowly, a larger one is chosen."""

    def flops(shape):
        return 1e15 * (shape.layer_parameters / 1e8)

    slow = choose_sizing(flops, 10**9, 1024)
    assert flops_of(slow) <= flops(slow.shape) * 1.01
    assert slow.shape.parameters > sizing(flops(slow.shape) / 100, 10**9).shape.parameters


def test_the_law_is_that_of_the_papers():
    assert 1 / parameters_per_token() == pytest.approx(19.6, abs=0.1)  # 20 tokens per parameter (Hoffmann et al.)
    # Muennighoff et al., section 6: four epochs are almost as good as new text, 16 much worse, and 40 hardly help.
    assert with_repetition(4.0, 1.0, 15.39) == pytest.approx(3.73, abs=0.01)
    assert with_repetition(16.0, 1.0, 15.39) == pytest.approx(10.58, abs=0.01)
    assert with_repetition(1e9, 1.0, 15.39) == pytest.approx(16.39)
    assert with_repetition(1.0, 1.0, 15.39) == 1.0
    # their Chinchilla-optimal model: 2.8B parameters, 55B tokens
    assert expected_loss(2.8e9, 55e9, 55e9) == pytest.approx(2.35, abs=0.05)
    assert expected_loss(2.8e9, 55e9, 55e9 / 4) > expected_loss(2.8e9, 55e9, 55e9)


def test_the_vocabulary_grows_with_the_text_and_not_beyond_the_model():
    assert [vocabulary_for(10**power, 1e22) for power in (5, 6, 7, 8, 11)] == [512, 1024, 4096, 8192, 32_768]
    for flops in BUDGETS:
        sizes = [vocabulary_for(10**power, flops) for power in range(4, 12)]
        assert sizes == sorted(sizes)
    assert vocabulary_for(10**9, 1e13) <= 1024 < vocabulary_for(10**9, 1e17)


def test_flops_are_those_that_a_run_counts():
    from transformers import LlamaConfig

    from pretrain.model.build import flops_per_token

    shape = OF_THE_DEMO
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, tie_word_embeddings=True,
    )  # fmt: skip
    assert shape.flops_per_token == pytest.approx(flops_per_token(config, shape.sequence_length), rel=0.01)
