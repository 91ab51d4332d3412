"""Tests for fp8 training: which layers are converted, parameter names, and results compared with bf16."""

import importlib.util

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig

from pretrain.model.build import InitialWeights, build_meta_model, build_model
from pretrain.model.fp8 import forward_with_parameters, fp8_problem, use_fp8
from pretrain.model.loss import LanguageModelLoss
from pretrain.parallel.tensor_parallel import split_linear
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
    assert len(use_fp8(model, emulate=True)) == 7 * TINY_LLAMA["num_hidden_layers"]
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


@needs_torchao
def test_only_layers_whose_slices_the_kernels_support():
    """With tp = 4, the 32 x 64 key and value matrices have slices with 8 rows."""
    model = build_meta_model(CONFIG)
    assert model.model.layers[0].self_attn.k_proj.weight.shape == (32, 64)
    converted = set(use_fp8(model, tp=4, emulate=True))
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if module in converted}
    assert names == {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def fp8_matrix(weight, bias=None) -> torch.nn.Linear:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    parent = torch.nn.Sequential(torch.nn.Linear(*reversed(weight.shape), bias=bias is not None))
    parent[0].weight = torch.nn.Parameter(weight.clone())
    if bias is not None:
        parent[0].bias = torch.nn.Parameter(bias.clone())
    return convert_to_float8_training(parent, config=Float8LinearConfig(emulate=True))[0]


@pytest.fixture
def mesh_of_two():
    """A fake group of two ranks, in which collectives return immediately."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


@needs_torchao
@pytest.mark.parametrize("style", ["colwise", "rowwise"])
def test_each_tp_rank_multiplies_by_its_slice_with_its_own_scale(style, mesh_of_two):
    """The other rank's slice is so large that a scale for the whole matrix would round all values here to zero."""
    weight, bias, x = torch.randn(64, 64), torch.randn(64), torch.randn(16, 64)
    rows, columns = (slice(32), slice(64)) if style == "colwise" else (slice(64), slice(32))
    mine = weight[rows, columns].clone()
    weight *= 1e6
    weight[rows, columns] = mine
    split, small = fp8_matrix(weight, bias), fp8_matrix(mine, bias[rows])
    split_linear(split, style, mesh_of_two)
    inputs = [x[:, columns].clone().requires_grad_() for _ in range(2)]
    outputs = [matrix(given) for matrix, given in zip((split, small), inputs, strict=True)]
    for out in outputs:
        out.square().sum().backward()
    assert torch.equal(*outputs) and torch.equal(*(given.grad for given in inputs))
    assert torch.equal(split.weight.grad.to_local(), small.weight.grad)
    assert torch.equal(split.bias.grad.to_local(), small.bias.grad)
    assert not torch.equal(outputs[0], torch.nn.functional.linear(inputs[0], mine, bias[rows]))


@needs_torchao
def test_zero_can_free_weights_between_the_passes():
    """The backward pass must refer to the parameter. A view would keep the memory that ZeRO-3 wants to free."""
    plain, saving = (fp8_matrix(torch.eye(32), torch.ones(32)) for _ in range(2))
    x = torch.randn(16, 32)
    expected = plain(x)
    expected.square().sum().backward()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda given: saved.append(given) or given, lambda given: given):
        out = forward_with_parameters(saving, x)
    memory = saving.weight.untyped_storage().data_ptr()
    assert [tensor is saving.weight for tensor in saved if tensor.untyped_storage().data_ptr() == memory] == [True]
    out.square().sum().backward()
    assert torch.equal(out, expected)
    assert torch.equal(saving.weight.grad, plain.weight.grad) and torch.equal(saving.bias.grad, plain.bias.grad)


def test_machines_without_fp8_are_rejected(monkeypatch):
    capability = [(8, 6)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability[-1])
    for device_type in ("cpu", "cuda"):
        problem = fp8_problem(device_type)
        assert "needs a GPU with fp8 tensor cores" in problem and "use bf16" in problem
    capability.append((8, 9))
    assert "needs a GPU" in fp8_problem("cpu"), "fp8 on the CPU must be rejected even if a GPU supports it"
    assert fp8_problem("cuda") is None or "torchao" in fp8_problem("cuda")
