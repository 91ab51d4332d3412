"""Tests for training steps on a simulated GPU: all kernel inputs are on the GPU, and the host never waits for it."""

import pytest

from support.fake_cuda import outcomes_of
from support.steps_on_fake_cuda import KERNELS, LOSSES, MIXES, RUNS, SCORES, STEPS, WAITS


@pytest.fixture(scope="module")
def outcomes():
    return outcomes_of("support.steps_on_fake_cuda")


def test_fake_cuda_rejects_mixed_devices_and_synchronization(outcomes):
    errors = {name: outcome.error for name, outcome in outcomes.items() if ": " in name}
    assert {name for name in WAITS if not (errors[f"waits: {name}"] or "").startswith("Waits")} == set()
    assert {name for name in MIXES if "same device" not in (errors[f"mixes: {name}"] or "")} == set()
    assert {name: error for name in RUNS if (error := errors[f"runs: {name}"])} == {}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_runs_on_cuda_without_synchronization(outcomes, name):
    """Tests every pair of choices for attention, loss, precision, activation_checkpointing, optimizer and
    document_mask. CUDA=all tests all combinations."""
    assert outcomes[name].error is None, outcomes[name].error


def test_full_attention_scores_are_never_allocated(outcomes):
    """Only eager attention allocates (T, T) scores, regardless of precision, document_mask and dropout."""
    errors = {name: outcomes[f"scores: {name}"].error for name in SCORES}
    spelt_out = {name for name in SCORES if name.startswith("eager")}
    assert {name: error for name, error in errors.items() if error and name not in spelt_out} == {}
    assert len(SCORES) > len(spelt_out) and all("whole scores" in errors[name] for name in spelt_out)


CUDNN = ["scaled_dot_product_cudnn_attention", "scaled_dot_product_cudnn_attention_backward"]
FLASH = ["scaled_dot_product_flash_attention", "scaled_dot_product_flash_attention_backward"]
EFFICIENT = ["scaled_dot_product_efficient_attention", "scaled_dot_product_efficient_attention_backward"]
VARLEN = ["varlen_attn", "varlen_attn_backward"]


@pytest.mark.parametrize("name", KERNELS)
def test_auto_uses_torchs_kernel_for_an_h100(outcomes, name):
    precision, document_mask, width = KERNELS[name]
    in_half = VARLEN if document_mask else CUDNN if width <= 128 else FLASH
    outcome = outcomes[f"kernels: {name}"]
    assert outcome.error is None, outcome.error
    assert outcome.result == (in_half if precision == "bf16" else EFFICIENT)


def test_the_work_between_steps_does_not_synchronize(outcomes):
    """Prefetching batches, exchanging reports, copying weights for a checkpoint and compiled layers don't
    synchronize."""
    assert outcomes["four steps"].error is None, outcomes["four steps"].error


@pytest.mark.parametrize("name", LOSSES)
def test_the_chunked_loss_does_not_synchronize_and_accumulates_the_head_gradient_in_its_matmul(outcomes, name):
    assert outcomes[name].error is None, outcomes[name].error
