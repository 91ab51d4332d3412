"""Tests for budgets: the fastest setup that fits, the model size from the scaling law, and rejected budgets."""

from dataclasses import replace

import pytest

from pretrain.config import MemoryBudget
from pretrain.errors import InputError
from pretrain.gpus import GIB
from pretrain_tools.planning.budget import (
    COMPARED,
    RunBudget,
    choose_run,
    size,
    unusual_ratio,
)
from pretrain_tools.planning.candidates import micro_batches, strategy_problems
from pretrain_tools.planning.families import FAMILIES, Shape
from pretrain_tools.planning.layouts import layout
from pretrain_tools.planning.plan_options import find_gpu
from pretrain_tools.planning.sizing import MOST_EPOCHS
from pretrain_tools.planning.step_time import Hardware
from support.quick_traces import use_quick_traces


@pytest.fixture
def quick_traces(monkeypatch):
    use_quick_traces(monkeypatch)


def budget(gpu="h100", gpus=8, family="llama", vocabulary=32_000, **given) -> RunBudget:
    gpu = find_gpu(gpu) if isinstance(gpu, str) else gpu
    given = given if "flops" in given else {"hours": 2.0} | given
    return RunBudget(Hardware(gpu, gpus, -(-gpus // 8)), FAMILIES[family], vocabulary, **given)


def test_more_hours_buy_a_larger_model_and_no_more_than_is_given(quick_traces):
    chosen = [choose_run(budget(hours=hours)) for hours in (0.5, 2.0, 8.0)]
    sizes = [run.shape.parameters for run in chosen]
    assert sizes == sorted(set(sizes))
    for run in chosen:
        assert 10 < run.tokens / run.shape.parameters < 32, (
            "the ratio must be as close to 20 as the available sizes allow"
        )
        assert 0.97 * run.budget.hours < run.billed_hours <= run.budget.hours
        assert run.batch % (8 * run.shape.sequence_length) == 0


def test_a_flops_budget_does_not_depend_on_the_gpus(quick_traces):
    for gpus in (1, 8):
        run = choose_run(budget(gpus=gpus, flops=1e19))
        assert run.tokens * run.work.flops_per_token == pytest.approx(1e19, rel=0.01)


@pytest.mark.parametrize("given", [{"flops": 1e30}, {"hours": 1e15}])
def test_a_budget_for_more_tokens_than_a_recipe_allows_is_rejected(given, quick_traces):
    with pytest.raises(InputError, match=r"allows [\d.e+]+ tokens, but the maximum is 1e\+18; use a smaller budget"):
        choose_run(budget(**given))


def test_tokens_per_parameter_are_those_asked_for(quick_traces):
    default = choose_run(budget(flops=1e19))
    longer = choose_run(budget(flops=1e19, tokens_per_parameter=200.0))
    assert longer.shape.parameters < default.shape.parameters / 2
    assert longer.tokens / longer.shape.parameters == pytest.approx(200, rel=0.3)


def test_repeated_data_ends_a_run_early(quick_traces):
    run = choose_run(budget(flops=1e19, unique_tokens=1e8))
    assert run.tokens <= MOST_EPOCHS * 1e8
    assert run.shape.parameters < choose_run(budget(flops=1e19)).shape.parameters


@pytest.mark.parametrize("memory", [80 * GIB, 24 * GIB, 12 * GIB])
def test_no_combination_that_fits_is_much_faster(memory, quick_traces):
    """The chosen setup is within 5% of the fastest among all strategies, checkpointing modes and micro-batch sizes."""
    given = budget(find_gpu("h100", memory_bytes=memory))
    sized = size(given, Shape(24, 2048, 32_000))
    best, usable = sized.best, given.hardware.usable_bytes
    assert sized.best.planned_memory.total <= usable
    seconds = []
    for checkpointing in ("none", "full", MemoryBudget(memory_budget=0.5)):
        case = sized.case.changed(activation_checkpointing=checkpointing)
        for name in COMPARED:
            divided = layout(name, 8, 1)
            if strategy_problems(case.run, divided):
                continue
            for sequences in micro_batches(case.run.config, divided.micro_batches):
                if case.memory(divided, sequences).total <= usable:
                    seconds.append(case.step(divided, sequences).seconds)
    assert min(seconds) <= best.step_seconds <= 1.05 * min(seconds)
    if memory == 12 * GIB:
        assert best.name != "ddp", "ddp must not be chosen: model and optimizer states alone need 19 GB"


@pytest.mark.parametrize(("memory", "setting"), [(40, "none"), (24, "{memory_budget: 0.5}"), (20, "full")])
def test_activations_are_recomputed_as_little_as_memory_allows(memory, setting, quick_traces):
    given = budget(find_gpu("h100", memory_bytes=memory * GIB), gpus=1)
    sized = size(given, Shape(24, 2048, 32_000))
    assert str(sized.config.activation_checkpointing) == setting
    assert sized.best.planned_memory.total <= given.hardware.usable_bytes


def test_a_model_that_does_not_fit_is_not_chosen(quick_traces):
    small = find_gpu("h100", memory_bytes=6 * GIB)
    run = choose_run(budget(small, gpus=1, flops=1e21))
    assert run.best.planned_memory.total <= run.budget.hardware.usable_bytes
    larger = choose_run(budget(gpus=1, flops=1e21))
    assert run.shape.parameters < larger.shape.parameters and unusual_ratio(larger) is None
    assert "because larger models don't fit in memory; use more GPUs" in unusual_ratio(run)
    with pytest.raises(InputError, match=r"no llama model fits on 1 x h100, not even the smallest \(8\.62M "):
        choose_run(budget(find_gpu("h100", memory_bytes=1.1 * GIB), gpus=1, vocabulary=64_000, flops=1e17))


def test_budgets_that_fit_no_model_are_refused(quick_traces):
    with pytest.raises(InputError, match="startup alone takes about 60 s"):
        choose_run(budget(hours=1 / 3600))
    with pytest.raises(InputError, match=r"allows only \d+ steps of .* fewer than 100"):
        choose_run(budget(flops=1e12))


def test_budgets_far_beyond_the_family_are_reported(quick_traces):
    run = choose_run(budget(gpus=64, hours=2000))
    assert run.shape.parameters > 1e10 and run.tokens > 100 * run.shape.parameters
    assert "far more than 20, because this is the largest llama model; use a smaller budget" in unusual_ratio(run)
    wanted = replace(run.budget, tokens_per_parameter=run.tokens / run.shape.active)
    assert unusual_ratio(replace(run, budget=wanted)) is None
    run = choose_run(budget(gpus=1, flops=1e14))
    assert "far fewer than 20, because this is the smallest llama model" in unusual_ratio(run)
