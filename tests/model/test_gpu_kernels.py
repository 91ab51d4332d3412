"""Tests for torch.compile's GPU kernels, compiled for each architecture without a GPU."""

import importlib.util

import pytest

from support.fake_cuda import outcomes_of

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
ARCHITECTURES = {"80", "90", "100"}


@pytest.fixture(scope="module")
def kernels_of():
    def kernels(name):
        outcome = outcomes_of("support.kernels_on_fake_cuda")[name]
        assert outcome.error is None, outcome.error
        assert all(min(kernel["bytes"].values()) > 0 for kernel in outcome.result)
        return outcome.result

    return kernels


@pytest.mark.parametrize("name", ["softmax of the loss", "softmax of capped logits"])
def test_the_loss_kernel_reads_a_chunk_twice(kernels_of, name):
    """One pass computes the maximum and the sum, and the other writes the gradient. Traffic is 6 bytes per logit in
    bf16."""
    (kernel,) = kernels_of(name)
    assert kernel["loops"] == 2 and set(kernel["bytes"]) == ARCHITECTURES


@pytest.mark.parametrize(("name", "fused"), [("layer in bf16", "rsqrt"), ("layer in fp32", "searchsorted")])
def test_a_layers_norms_and_masks_are_fused_and_compile_for_every_gpu(kernels_of, name, fused):
    found = [kernel for kernel in kernels_of(name) if fused in kernel["kernel"]]
    assert found and all(set(kernel["bytes"]) == ARCHITECTURES for kernel in found)
