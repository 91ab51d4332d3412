"""Muon must match its formula in fp64 and torch's implementation."""

import math

import pytest
import torch
from torch import nn

from pretrain.config import Optim
from pretrain.optim import muon
from pretrain.optim.matrix_exchange import HiddenMatrix
from pretrain.optim.muon import COEFFICIENTS, Muon, MuonSpec, batches_of_one_shape, iterations, orthogonalized
from pretrain.optim.optimizers import ModelShapes

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


def polynomials(name):
    """Returns the published coefficients: Jordan's for every iteration, or those of Polar Express with their safety
    factor."""
    if name == "jordan":
        return [(3.4445, -4.7750, 2.0315)] * 5
    return [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in muon.POLAR_EXPRESS[:5]]


def orthogonal(matrix, name):
    """Orthogonalizes a matrix in fp64 using its SVD, and applies the shape-dependent scale."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.square().sum().sqrt() / (1.01 if name == "polar_express" else 1)
    for a, b, c in polynomials(name):
        values = a * values + b * values**3 + c * values**5
    return 0.2 * math.sqrt(max(matrix.shape)) * left @ torch.diag(values) @ right


def reference(steps=4, name="jordan", blocks=None):
    """Returns (parameters, momenta) in fp64; `blocks` maps matrix indices to (sizes, dim)."""
    results = []
    for index, matrix in enumerate(matrices()):
        weight, momentum = matrix.detach().double(), torch.zeros(matrix.shape, dtype=torch.float64)
        for step in range(steps):
            gradient, rate = gradients(step)[index].double(), 0.02 * (step + 1)
            momentum = 0.9 * momentum + 0.1 * gradient
            ahead = 0.1 * gradient + 0.9 * momentum
            sizes, dim = (blocks or {}).get(index, (ahead.size(0), 0))
            update = torch.cat([orthogonal(block, name) for block in ahead.split(sizes, dim)], dim)
            weight = weight - rate * 0.3 * weight - rate * update
        results.append((weight, momentum))
    return zip(*results, strict=True)


@pytest.fixture
def in_fp32(monkeypatch):
    monkeypatch.setattr(muon, "missing_bf16", lambda device_type: "this CPU has no bf16 instructions")


@pytest.mark.parametrize("batch_elements", [1, 2 * 144, 2**22], ids=["alone", "pairs", "all"])
@pytest.mark.parametrize("name", COEFFICIENTS)
def test_fp32_matches_the_formula(in_fp32, monkeypatch, batch_elements, name):
    """The formula includes Nesterov momentum, the polynomials, the shape-dependent scale and weight decay."""
    monkeypatch.setattr(muon, "BATCH_ELEMENTS", batch_elements)
    parameters = matrices()
    optimizer = Muon(parameters, lr=1.0, coefficients=name, **SETTINGS)
    weights, momenta = reference(name=name)
    for found, expected in zip(train(optimizer, parameters), weights, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)
    for parameter, expected in zip(parameters, momenta, strict=True):
        assert optimizer.state[parameter].keys() == {"momentum_buffer"}
        torch.testing.assert_close(optimizer.state[parameter]["momentum_buffer"].double(), expected, rtol=0, atol=1e-6)


def test_blocks_are_updated_as_separate_matrices(in_fp32):
    """The blocks are equal rows, unequal rows with different scales, and columns, as in GPT-2."""
    blocks = {0: ([4, 4, 4], 0), 1: ([14, 6], 0), 2: ([10, 10], 1)}
    parameters = matrices()
    cut = {parameters[i]: HiddenMatrix(SHAPES[i], tuple(sizes), dim) for i, (sizes, dim) in blocks.items()}
    found = train(Muon(parameters, lr=1.0, matrices=cut, **SETTINGS), parameters)
    (weights, _), (whole, _) = reference(blocks=blocks), reference()
    for matrix, expected, uncut in zip(found, weights, whole, strict=True):
        torch.testing.assert_close(matrix.double(), expected, rtol=0, atol=2e-5)
        assert torch.equal(expected, uncut) or (expected - uncut).abs().max() > 1e-3


@pytest.mark.parametrize("layout", ["fused", "transposed", "alternating"])
def test_each_expert_and_its_gate_are_separate_matrices(in_fp32, layout):
    """The layouts are (E, 2I, H), and (E, H, 2I) with the gate first or with alternating gate and up columns."""
    experts, inner, hidden = 3, 5, 12
    generator = torch.Generator().manual_seed(5)
    parts = torch.randn(2, experts, 2, inner, hidden, generator=generator)  # weights, gradients; gate, up

    def as_stored(halves):
        if layout == "alternating":
            return halves.permute(0, 3, 2, 1).reshape(experts, hidden, 2 * inner)
        stored = halves.reshape(experts, 2 * inner, hidden)
        return stored.mT.contiguous() if layout == "transposed" else stored

    weight, gradient = map(as_stored, parts)
    shape = {"gate_up_proj": tuple(weight.shape), "down_proj": (experts, hidden, inner)}
    if layout != "fused":
        shape["down_proj"] = (experts, inner, hidden)
    model = ModelShapes(
        shape, frozenset(), stacks={"gate_up_proj": (0 if layout == "fused" else 1, layout == "alternating")}
    )
    matrix = MuonSpec(model).matrix("gate_up_proj", {})
    parameter = nn.Parameter(weight.clone())
    optimizer = Muon([parameter], lr=0.02, matrices={parameter: matrix}, **SETTINGS)
    parameter.grad = gradient.clone()
    optimizer.step()
    weights, gradients_ = parts.double()
    updates = [[orthogonal(0.1 * half + 0.9 * 0.1 * half, "jordan") for half in expert] for expert in gradients_]
    expected = (1 - 0.02 * 0.3) * weights - 0.02 * torch.stack([torch.stack(halves) for halves in updates])
    torch.testing.assert_close(parameter.detach().double(), as_stored(expected), rtol=0, atol=2e-5)


def test_polar_express_is_more_exact_and_converges_to_one():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(16, 48, generator=generator, dtype=torch.float64)
    off = {}
    for name in COEFFICIENTS:
        values = torch.linalg.svdvals(orthogonalized(matrix, iterations(name, 5)))
        off[name] = (values - 1).abs().max().item()
    assert off["polar_express"] < 0.15 < off["jordan"] < 0.35
    values = torch.linalg.svdvals(orthogonalized(matrix, iterations("polar_express", 12)))
    torch.testing.assert_close(values, torch.ones_like(values), rtol=0, atol=1e-7)


def test_a_step_skipped_on_the_device_changes_nothing(in_fp32):
    """As in torch's fused kernels, gradients are divided by grad_scale, and found_inf prevents any change."""
    parameters, plain = matrices(), matrices()
    optimizer, other = Muon(parameters, lr=1.0, **SETTINGS), Muon(plain, lr=1.0, **SETTINGS)
    train(optimizer, parameters, 0, 2), train(other, plain, 0, 2)
    before = [tensor.clone() for p in parameters for tensor in (p.detach(), optimizer.state[p]["momentum_buffer"])]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, math.nan)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(math.inf), torch.tensor(1.0)
    optimizer.step()
    after = [tensor for p in parameters for tensor in (p.detach(), optimizer.state[p]["momentum_buffer"])]
    assert all(map(torch.equal, before, after))
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    for parameter, twin, gradient in zip(parameters, plain, gradients(2), strict=True):
        parameter.grad, twin.grad = 4 * gradient, gradient.clone()
    optimizer.step(), other.step()
    assert all(map(torch.equal, parameters, plain))


def test_bf16_matches_torch(monkeypatch):
    monkeypatch.setattr(muon, "missing_bf16", lambda device_type: None)
    ours, theirs = matrices(), matrices()
    train(Muon(ours, lr=1.0, **SETTINGS), ours)
    train(torch.optim.Muon(theirs, lr=1.0, adjust_lr_fn="match_rms_adamw", **SETTINGS), theirs)
    weights, _ = reference()
    for mine, other, exact in zip(ours, theirs, weights, strict=True):
        # Four updates of 0.2 lr add up to 0.04, and bf16 is accurate to two or three digits.
        assert (mine - other).abs().max() < 0.01 and (mine.double() - exact).abs().max() < 0.02


def test_a_state_of_torchs_muon_can_be_continued(in_fp32):
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


def test_matrices_and_their_transposes_are_batched_within_limits(monkeypatch):
    parameters = [nn.Parameter(torch.empty(shape)) for shape in [(4, 8), (3, 3), (8, 4), (4, 8)]]
    assert list(batches_of_one_shape(parameters)) == [[0, 2, 3], [1]]
    monkeypatch.setattr(muon, "BATCH_ELEMENTS", 64)
    assert list(batches_of_one_shape(parameters)) == [[0, 2], [3], [1]]


def test_a_parameter_without_a_gradient_does_not_change():
    parameters = matrices()
    before = [parameter.detach().clone() for parameter in parameters]
    parameters[0].grad = torch.ones_like(parameters[0])
    Muon(parameters, lr=0.1).step()
    assert [torch.equal(a, b) for a, b in zip(before, parameters, strict=True)] == [False] + [True] * 4


def test_a_gradient_of_zeros_gives_no_update():
    assert torch.equal(orthogonalized(torch.zeros(2, 3, 5), iterations("jordan", 5)), torch.zeros(2, 3, 5))


def test_parameters_that_are_not_matrices_are_rejected():
    with pytest.raises(ValueError, match=r"only matrices, got parameters of shape \(4, 2, 3\)"):
        Muon([nn.Parameter(torch.empty(4, 2, 3))], lr=0.1)


def test_a_pipeline_stage_may_have_only_matrices():
    """As in the middle of OLMo, whose norms have no weights."""
    spec = MuonSpec(ModelShapes({"matrix": (8, 8)}, frozenset()))
    parameter = nn.Parameter(torch.eye(8))
    optimizer = spec.make([("matrix", parameter)], Optim(name="muon", learning_rate=0.1), 0.1, 0, "cpu")
    parameter.grad = torch.ones(8, 8)
    optimizer.step()
    assert not torch.equal(parameter, torch.eye(8)) and optimizer._step_supports_amp_scaling
