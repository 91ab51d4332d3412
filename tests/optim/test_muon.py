"""Muon against its formula in fp64, and against torch's own."""

import math

import pytest
import torch
from torch import nn

from pretrain.optim import muon
from pretrain.optim.muon import Muon, batches_of_one_shape, orthogonalized

SHAPES = [(12, 12), (20, 8), (8, 20), (12, 12), (6, 20)]
SETTINGS = {"weight_decay": 0.3, "momentum": 0.9}


def matrices(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(step):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def train(optimizer, parameters, first=0, last=4):
    for step in range(first, last):
        optimizer.param_groups[0]["lr"] = 0.02 * (step + 1)
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def reference(steps=4):
    """(parameters, momenta) in fp64, one matrix at a time, by singular values instead of products."""
    a, b, c = muon.COEFFICIENTS
    results = []
    for index, matrix in enumerate(matrices()):
        weight, momentum = matrix.detach().double(), torch.zeros(matrix.shape, dtype=torch.float64)
        for step in range(steps):
            gradient, rate = gradients(step)[index].double(), 0.02 * (step + 1)
            momentum = 0.9 * momentum + 0.1 * gradient
            ahead = 0.1 * gradient + 0.9 * momentum
            left, values, right = torch.linalg.svd(ahead, full_matrices=False)
            values = values / values.square().sum().sqrt()
            for _ in range(5):
                values = a * values + b * values**3 + c * values**5
            update = left @ torch.diag(values) @ right
            weight = weight - rate * 0.3 * weight - rate * 0.2 * math.sqrt(max(weight.shape)) * update
        results.append((weight, momentum))
    return zip(*results, strict=True)


@pytest.fixture
def in_fp32(monkeypatch):
    monkeypatch.setattr(muon, "missing_bf16", lambda device_type: "this CPU has no bf16 instructions")


@pytest.mark.parametrize("batch_elements", [1, 2 * 144, 2**22], ids=["alone", "pairs", "all"])
def test_fp32_is_the_formula(in_fp32, monkeypatch, batch_elements):
    """Momentum, the look ahead, the polynomial, the scale by shape, and decay by the rate of the step."""
    monkeypatch.setattr(muon, "BATCH_ELEMENTS", batch_elements)
    parameters = matrices()
    optimizer = Muon(parameters, lr=1.0, **SETTINGS)
    weights, momenta = reference()
    for found, expected in zip(train(optimizer, parameters), weights, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)
    for parameter, expected in zip(parameters, momenta, strict=True):
        assert optimizer.state[parameter].keys() == {"momentum_buffer"}
        torch.testing.assert_close(optimizer.state[parameter]["momentum_buffer"].double(), expected, rtol=0, atol=1e-6)


def test_bf16_is_what_torch_computes(monkeypatch):
    monkeypatch.setattr(muon, "missing_bf16", lambda device_type: None)
    ours, theirs = matrices(), matrices()
    train(Muon(ours, lr=1.0, **SETTINGS), ours)
    train(torch.optim.Muon(theirs, lr=1.0, adjust_lr_fn="match_rms_adamw", **SETTINGS), theirs)
    weights, _ = reference()
    for mine, other, exact in zip(ours, theirs, weights, strict=True):
        # Four updates of 0.2 lr, in sum 0.04, whose directions bf16 knows to two or three digits.
        assert (mine - other).abs().max() < 0.01 and (mine.double() - exact).abs().max() < 0.02


def test_a_state_of_torchs_muon_goes_on(in_fp32):
    saved = matrices()
    before = torch.optim.Muon(saved, lr=1.0, adjust_lr_fn="match_rms_adamw", **SETTINGS)
    train(before, saved, 0, 2)
    parameters = [nn.Parameter(parameter.detach().clone()) for parameter in saved]
    after = Muon(parameters, lr=1.0, **SETTINGS)
    for parameter, earlier in zip(parameters, saved, strict=True):
        after.state[parameter]["momentum_buffer"] = before.state[earlier]["momentum_buffer"].clone()
    _, momenta = reference(3)
    train(after, parameters, 2, 3)
    for parameter, expected in zip(parameters, momenta, strict=True):
        torch.testing.assert_close(after.state[parameter]["momentum_buffer"].double(), expected, rtol=0, atol=1e-6)


def test_matrices_and_their_transposes_go_together_in_bounded_batches(monkeypatch):
    parameters = [nn.Parameter(torch.empty(shape)) for shape in [(4, 8), (3, 3), (8, 4), (4, 8)]]
    assert [len(batch) for batch in batches_of_one_shape(parameters)] == [3, 1]
    monkeypatch.setattr(muon, "BATCH_ELEMENTS", 64)
    assert [len(batch) for batch in batches_of_one_shape(parameters)] == [2, 1, 1]


def test_a_parameter_without_a_gradient_stays_as_it_is():
    parameters = matrices()
    before = [parameter.detach().clone() for parameter in parameters]
    parameters[0].grad = torch.ones_like(parameters[0])
    Muon(parameters, lr=0.1).step()
    assert [torch.equal(a, b) for a, b in zip(before, parameters, strict=True)] == [False] + [True] * 4


def test_a_gradient_of_zeros_gives_no_update():
    assert torch.equal(orthogonalized(torch.zeros(2, 3, 5), 5), torch.zeros(2, 3, 5))


def test_what_is_no_matrix_is_refused():
    with pytest.raises(ValueError, match=r"matrices, not parameters of shape \(4, 2, 3\)"):
        Muon([nn.Parameter(torch.empty(4, 2, 3))], lr=0.1)
