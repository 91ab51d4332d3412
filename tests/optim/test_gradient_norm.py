"""The gradient norm must be as accurate as fp32 allows, however large the gradient is."""

import math

import pytest
import torch

from pretrain.optim.optimizers import MAX_SERIAL_SUM, total_norm


@pytest.mark.parametrize("rows", [64, MAX_SERIAL_SUM // 16, 4 * MAX_SERIAL_SUM])
def test_the_norm_matches_fp64(rows):
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(rows, 16, generator=generator), torch.randn(16, generator=generator)]
    exact = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
    assert total_norm(gradients).item() == pytest.approx(exact, rel=5e-7)
    assert total_norm([]).item() == 0.0
