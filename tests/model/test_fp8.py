"""Tests for fp8 training: which layers are converted, parameter names, and results compared with bf16."""

import importlib.util

import pytest
import torch
from transformers import AutoConfig

from pretrain.model.build import InitialWeights, build_meta_model, build_model
from pretrain.model.fp8 import fp8_problem, use_fp8
from pretrain.model.loss import LanguageModelLoss
from support.tiny_models import TINY_LLAMA

# torchao isn't in the test requirements, because accelerate would then import it in every process.
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="pip install torchao")
CONFIG = AutoConfig.for_model(**TINY_LLAMA)


def loss_and_gradients(causal_lm):
    ids = torch.randint(0, 512, (4, 65), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = LanguageModelLoss(causal_lm)(ids[:, :-1], ids[:, 1:])
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in causal_lm.named_parameters()}


@needs_torchao
def test_only_the_blocks_linear_layers_under_the_same_names():
    model = build_meta_model(CONFIG)
    names = [name for name, _ in model.named_parameters()]
    assert use_fp8(model, emulate=True) == 7 * TINY_LLAMA["num_hidden_layers"]
    assert [name for name, _ in model.named_parameters()] == names
    assert type(model.lm_head) is torch.nn.Linear


@needs_torchao
def test_the_initial_weights_are_those_of_every_precision():
    model = build_meta_model(CONFIG)
    use_fp8(model, emulate=True)
    InitialWeights(seed=3, pretrained=None, dtype=torch.float32).fill(model, "")
    model.tie_weights()
    expected = build_model(CONFIG, seed=3).state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in model.state_dict().items())


@needs_torchao
def test_loss_and_gradients_match_bf16_within_fp8_rounding():
    """e4m3 has 3 mantissa bits, so products have errors of up to 2^-4, and gradients of a few percent."""
    plain = build_model(CONFIG, seed=3)
    expected, expected_gradients = loss_and_gradients(plain)
    model = build_model(CONFIG, seed=3)
    use_fp8(model, emulate=True)
    loss, gradients = loss_and_gradients(model)
    assert loss != expected, "fp8 must have been used"
    assert abs(loss - expected) < 0.01 * expected
    for name, gradient in gradients.items():
        assert (gradient - expected_gradients[name]).norm() < 0.15 * expected_gradients[name].norm(), name


def test_machines_without_fp8_are_rejected(monkeypatch):
    capability = [(8, 6)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability[-1])
    for device_type in ("cpu", "cuda"):
        problem = fp8_problem(device_type)
        assert "needs a GPU with fp8 tensor cores" in problem and "use bf16" in problem
    capability.append((8, 9))
    assert "needs a GPU" in fp8_problem("cpu"), "fp8 on the CPU must be rejected even if a GPU supports it"
    assert fp8_problem("cuda") is None or "torchao" in fp8_problem("cuda")
