"""Tests for training steps on a simulated GPU: all kernel inputs are on the GPU, and the host never waits for it."""

import pytest

from pretrain.model.attention import head_widths
from pretrain.model.model_config import load_model_config
from support.fake_cuda import outcomes_of
from support.project import ROOT
from support.steps_on_fake_cuda import KERNELS, LOSSES, MIXES, RUNS, SCORES, STEPS, VARIES, WAITS


@pytest.fixture(scope="module")
def outcomes():
    return outcomes_of("support.steps_on_fake_cuda")


def test_fake_cuda_rejects_mixed_devices_synchronization_and_varying_results(outcomes):
    errors = {name: outcome.error for name, outcome in outcomes.items() if ": " in name}
    assert {name for name in WAITS if not (errors[f"waits: {name}"] or "").startswith("Waits")} == set()
    assert {name for name in VARIES if not (errors[f"varies: {name}"] or "").startswith("NotDeterm")} == set()
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


NAMES = {"varlen": "varlen_attn"} | {
    kernel: f"scaled_dot_product_{kernel}_attention" for kernel in ("cudnn", "flash", "efficient")
}


@pytest.mark.parametrize("rule", KERNELS)
def test_auto_uses_torchs_kernel_for_an_h100(outcomes, rule):
    kernel, cases = KERNELS[rule]
    found = {given: outcomes[f"kernels: {given}"] for given in cases}
    assert {given: outcome.error for given, outcome in found.items() if outcome.error} == {}
    expected = [NAMES[kernel], f"{NAMES[kernel]}_backward"]
    assert {given: outcome.result for given, outcome in found.items()} == dict.fromkeys(cases, expected)


def test_the_kernel_is_known_for_the_head_sizes_of_every_shipped_model():
    """A shipped model with another head size needs a row in KERNELS."""
    known = {sizes for _, cases in KERNELS.values() for precision, _, sizes, _ in cases if precision == "bf16"}
    paths = (ROOT / "model_configs").glob("*.json")
    shipped = {path.name: head_widths(load_model_config(str(path))) for path in paths}
    assert shipped and {name: sizes for name, sizes in shipped.items() if sizes not in known} == {}


def test_the_work_between_steps_does_not_synchronize(outcomes):
    """Prefetching batches, exchanging reports, copying weights for a checkpoint and compiled layers don't
    synchronize."""
    assert outcomes["four steps"].error is None, outcomes["four steps"].error


@pytest.mark.parametrize("name", LOSSES)
def test_the_chunked_loss_does_not_synchronize_and_accumulates_the_head_gradient_in_its_matmul(outcomes, name):
    assert outcomes[name].error is None, outcomes[name].error
