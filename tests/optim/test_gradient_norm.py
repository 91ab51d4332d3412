"""The norm of a gradient and what it is clipped by."""

import math

import pytest
import torch

from pretrain.optim.gradient_norm import MOST_ADDED_UP, clipping, total_norm


@pytest.mark.parametrize("rows", [64, 4 * MOST_ADDED_UP])
def test_the_norm_is_that_of_fp64(rows):
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(rows, 16, generator=generator), torch.randn(16, generator=generator)]
    exact = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
    assert total_norm(gradients).item() == pytest.approx(exact, rel=5e-7)
    assert total_norm([]).item() == 0.0


@pytest.mark.parametrize("norm", [0.3, 1.0, 7.3, 1e-20, 1e30])
@pytest.mark.parametrize("most", [1.0, 0.25, None])
def test_gradients_are_divided_as_torch_clips_them(norm, most):
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.full((1,), norm)
    divisor, skipped = clipping(parameter.grad[0], most)
    assert skipped.item() == 0
    if most is None:
        assert divisor is None
        return
    assert divisor.dtype == torch.float32
    torch.nn.utils.clip_grad_norm_([parameter], most)
    assert norm / divisor.item() == pytest.approx(parameter.grad.item(), rel=1e-6)


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_skips_the_step(norm):
    assert clipping(torch.tensor(norm), 1.0)[1].item() == 1
