"""Tests for weight decay groups, optimizer updates, and optimizer state that is restored bit for bit."""

import importlib.util
import math
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, PreTrainedModel, RwkvConfig
from transformers.pytorch_utils import Conv1D

from pretrain.config import Optim
from pretrain.errors import InputError
from pretrain.model.build import build_meta_model
from pretrain.optim.adafactor import round_stochastically
from pretrain.optim.matrix_exchange import HiddenMatrix
from pretrain.optim.optimizers import (
    OPTIMIZERS,
    ModelShapes,
    OptimizerSpec,
    describe_optimizer,
    load_optimizer_state,
    optimizer_builder,
    optimizer_problems,
    optimizer_state_by_name,
)
from pretrain.parallel.strategy import Strategy
from pretrain.parallel.zero import Zero
from pretrain_tools.planning.memory import optimizer_elements


def tiny_model(dtype=torch.float32):
    torch.manual_seed(0)
    modules = {
        "embed": nn.Embedding(12, 8),
        "norm": nn.LayerNorm(8),
        "up": nn.Linear(8, 16),
        "lm_head": nn.Linear(16, 12),
    }
    return nn.ModuleDict(modules).to(dtype)


def builder(model, name="adamw", learning_rate=0.01, **settings):
    if not isinstance(model, PreTrainedModel):
        model.get_output_embeddings = lambda: model._modules.get("lm_head")
    settings = Optim(**{"learning_rate": learning_rate, "name": "adamw", **settings}).model_copy(update={"name": name})
    return optimizer_builder(settings, model, learning_rate, seed=1, device_type="cpu")


def build(model, name="adamw", **settings):
    return builder(model, name, **settings)(list(model.named_parameters()))


def load_state(optimizer, model, saved, name="adamw"):
    load_optimizer_state(optimizer, builder(model, name).spec, names_of(model), saved)


def parameters_in_module(shapes):
    """Returns a module with parameters of these shapes, all ones, under dotted names."""
    root = nn.Module()
    for name, shape in shapes.items():
        module, _, key = name.rpartition(".")
        if module not in root._modules:
            is_embedding = module == "embed"
            root.add_module(module, nn.Embedding(1, 1) if is_embedding else nn.Module())
        root._modules[module].register_parameter(key, nn.Parameter(torch.ones(shape)))
    return root


def small_llama():
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, head_dim=16
    )
    return build_meta_model(config)


def rates_by_name(name: str, **settings) -> dict[str, tuple[float, float]]:
    """Returns {parameter: (relative learning rate, weight decay)} for a Llama model."""
    model = small_llama()
    optimizer, names = build(model, name, **settings), {p: name for name, p in model.named_parameters()}
    groups = optimizer.param_groups
    return {
        names[p]: (group.get("learning_rate_scale", 1.0), group["weight_decay"])
        for group in groups
        for p in group["params"]
    }


@pytest.mark.parametrize(("name", "hidden"), [("adamw", 1 / 4), ("adafactor", 1 / 4), ("muon", 1 / 2)])
def test_mup_scales_learning_rates_and_keeps_the_decay_per_step(name, hidden):
    found = rates_by_name(name, parametrization="mup", mup_base_width=16, weight_decay=0.1)
    assert found.pop("lm_head.weight") == (1 / 4, 0.4)
    for parameter, (scale, decay) in found.items():
        is_hidden = "proj" in parameter
        assert scale == pytest.approx(hidden if is_hidden else 1), parameter
        assert scale * decay == pytest.approx(0.1 if is_hidden else 0.0), parameter


def test_without_mup_or_at_the_base_width_there_is_one_learning_rate():
    assert {scale for scale, _ in rates_by_name("muon").values()} == {1.0}
    assert {scale for scale, _ in rates_by_name("adamw", parametrization="mup", mup_base_width=64).values()} == {1.0}


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_group_learning_rates_combine_with_mup(name):
    rates = {"embedding": 0.02, "head": 0.005, "matrices": 0.04, "scalars": 0.001}
    plain = rates_by_name(name, parametrization="mup", mup_base_width=16)
    found = rates_by_name(name, parametrization="mup", mup_base_width=16, group_learning_rates=rates)
    wanted = {"model.embed_tokens.weight": 2, "lm_head.weight": 0.5, "model.norm.weight": 0.1}
    wanted |= dict.fromkeys([parameter for parameter in plain if "proj" in parameter], 4)
    for parameter, share in wanted.items():
        assert found[parameter][0] == pytest.approx(plain[parameter][0] * share), parameter
        assert found[parameter][1] == plain[parameter][1], (
            parameter
        )  # the decay per step scales with the group's learning rate


def train(model, optimizer, first, last):
    for step in range(first, last):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (step + 1)
        hidden = model["up"](model["norm"](model["embed"](torch.arange(12)))).relu()
        loss = nn.functional.cross_entropy(model["lm_head"](hidden).float(), (torch.arange(12) * 7) % 12)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def names_of(model):
    return {parameter: name for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_only_matrices_decay(name):
    model = tiny_model()
    optimizer = build(model, name)
    names = names_of(model)
    decayed = {names[p] for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    every = [names[p] for group in optimizer.param_groups for p in group["params"]]
    assert decayed == {"up.weight", "lm_head.weight"}
    assert sorted(every) == sorted(names.values()), "every parameter must be in exactly one group"


def test_full_shapes_decide_about_weight_decay():
    """Under ZeRO-3, parameters are empty, and their own shapes would disable weight decay."""
    whole = parameters_in_module({"up.weight": (16, 8), "up.bias": (16,)})
    optimizer = builder(whole)([(name, nn.Parameter(torch.empty(0))) for name in ("up.weight", "up.bias")])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_the_head_is_no_hidden_matrix_whatever_its_name():
    sizes = {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 1}
    model = build_meta_model(RwkvConfig(vocab_size=64, **sizes))
    assert model.get_output_embeddings() is model.head
    shapes = builder(model, "muon").spec.model
    assert [name for name in shapes.shapes if shapes.group_of(name) == "head"] == ["head.weight"]
    assert not shapes.is_hidden_matrix("head.weight")
    assert shapes.is_hidden_matrix("rwkv.blocks.0.attention.output.weight")


def test_decay_rates_of_mamba_are_not_hidden_matrices():
    shapes = builder(parameters_in_module({"mixer.A_log": (16, 8), "up.weight": (16, 8)})).spec.model
    assert [name for name in shapes.shapes if shapes.decays(name)] == ["up.weight"]
    assert [name for name in shapes.shapes if shapes.is_hidden_matrix(name)] == ["up.weight"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("adamw", torch.float32), ("adafactor", torch.float32), ("adafactor", torch.bfloat16), ("muon", torch.float32)],
)
def test_state_is_restored_bit_for_bit(name, dtype):
    whole = tiny_model(dtype)
    train(whole, build(whole, name), 0, 6)
    first = tiny_model(dtype)
    optimizer = build(first, name)
    train(first, optimizer, 0, 3)
    saved = {key: value.clone() for key, value in optimizer_state_by_name(optimizer, names_of(first)).items()}
    second = tiny_model(dtype)
    second.load_state_dict(first.state_dict())
    optimizer = build(second, name)
    load_state(optimizer, second, saved, name)
    loaded = optimizer_state_by_name(optimizer, names_of(second))
    assert all(torch.equal(loaded[key], value) and loaded[key].dtype == value.dtype for key, value in saved.items())
    train(second, optimizer, 3, 6)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_the_loss_decreases(name):
    model = tiny_model()
    optimizer = build(model, name)
    first = train(model, optimizer, 0, 1)
    assert train(model, optimizer, 0, 5) < first


def test_adafactor_factors_the_second_moment_of_matrices():
    model = tiny_model()
    optimizer = build(model, "adafactor")
    train(model, optimizer, 0, 1)
    shapes = {key: tuple(value.shape) for key, value in optimizer_state_by_name(optimizer, names_of(model)).items()}
    assert shapes["up.weight.row"] == (16,) and shapes["up.weight.column"] == (8,)
    assert shapes["up.bias.variance"] == (16,)


def test_adafactors_first_update_by_hand():
    """At step 1, the row and column means are those of the squared gradient, and the update is then clipped."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(2, 2))})
    parameter, optimizer = model["w"], build(model, "adafactor", learning_rate=0.5, weight_decay=0.0)
    parameter.grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    optimizer.step()
    squared = torch.tensor([[1.0, 4.0], [9.0, 16.0]])
    estimate = squared.mean(1, keepdim=True) * squared.mean(0, keepdim=True) / squared.mean()
    update = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) / estimate.sqrt()
    update /= max(1.0, update.square().mean().sqrt().item())
    torch.testing.assert_close(parameter.detach(), -0.5 * update, rtol=1e-5, atol=1e-6)


def test_stochastic_rounding_is_unbiased_and_repeats():
    values = torch.full((100_000,), 1.001).mul(torch.tensor([1.0, -1.0]).repeat(50_000))
    step = torch.tensor(7.0)
    rounded = round_stochastically(values, 3, step)
    assert set(rounded.abs().unique().tolist()) == {1.0, 1.0078125}, (
        "values must round to one of the two nearest bf16 numbers"
    )
    # P(rounding up) = 0.128, so the mean of 100,000 values is within 5 x 0.0078 x 0.33 / 316 = 4.1e-5.
    assert rounded.float().abs().mean().item() == pytest.approx(1.001, abs=4.1e-5)
    assert torch.equal(rounded, round_stochastically(values, 3, step))
    assert not torch.equal(rounded, round_stochastically(values, 4, step))
    special = torch.tensor([float("inf"), float("-inf"), 0.0])
    assert torch.equal(round_stochastically(special, 0, step).float(), special)


def test_stochastic_rounding_is_unbiased_and_independent_per_element():
    values, steps = torch.full((200,), 1.001), 2000
    is_up = torch.stack([round_stochastically(values, 3, torch.tensor(float(step))) > 1.0 for step in range(steps)])
    assert is_up.float().mean(0).sub(0.128).abs().max() < 0.035, "the mean of 2,000 samples is within 4.5 x 0.0075"
    together = (is_up.float().T.corrcoef() - torch.eye(200)).abs()
    assert together.max() < 0.15 and together.square().mean().sqrt() < 2 / steps**0.5
    in_time = torch.stack([is_up[:-lag].float().mul(is_up[lag:]).mean() for lag in range(1, 50)])
    assert in_time.sub(0.128**2).abs().max() < 0.005


def test_a_skipped_step_changes_nothing_in_the_fused_kernel():
    """strategy.update relies on found_inf = 1 leaving parameters, moments and the step count unchanged."""
    model = tiny_model()
    optimizer = build(model)
    train(model, optimizer, 0, 2)
    before = {key: value.clone() for key, value in optimizer_state_by_name(optimizer, names_of(model)).items()}
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.grad_scale, optimizer.found_inf = None, torch.ones(())
    optimizer.step()
    after = optimizer_state_by_name(optimizer, names_of(model))
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))


def updating(model, optimizer, scaler=None) -> Strategy:
    """Returns a strategy with only the attributes that `update` uses."""
    strategy = object.__new__(Strategy)
    strategy.causal_lm, strategy.optimizer, strategy.name_of = model, optimizer, names_of(model)
    strategy.accelerator = Namespace(scaler=scaler, unscale_gradients=lambda: scaler.unscale_(optimizer))
    return strategy


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_an_overflow_is_reported_and_lowers_the_scale(name):
    """With fp16, GradScaler always calls fused optimizers, so a call doesn't mean that the step was taken."""
    model, scaler = tiny_model(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    strategy = updating(model, build(model, name), scaler)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    for value, is_skipped in ((float("inf"), True), (1.0, False)):
        scale = scaler.scale(torch.ones(())).item()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value * scale)
        _, skipped = strategy.update(1.0)
        assert bool(skipped) == is_skipped and scaler.get_scale() == 512.0
        unchanged = [torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True)]
        assert all(unchanged) if is_skipped else not any(unchanged)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
@pytest.mark.parametrize("max_grad_norm", [0.05, 1e6, None])
def test_clipping_matches_torch(name, max_grad_norm):
    """AdamW applies the clipping divisor inside its kernel, so results differ by 1e-7."""
    models = [tiny_model(), tiny_model()]
    optimizers = [build(model, name) for model in models]
    strategy = updating(models[0], optimizers[0])
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for parameter, twin in zip(*(model.parameters() for model in models), strict=True):
            parameter.grad = (step + 1) * torch.randn(parameter.shape, generator=generator)
            twin.grad = parameter.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(models[1].parameters(), max_grad_norm or float("inf"))
        assert norm > 10 * 0.05, "the smallest limit must clip"
        optimizers[1].step()
        grad_norm, skipped = strategy.update(max_grad_norm)
        assert grad_norm.item() == pytest.approx(norm.item(), rel=1e-6) and not skipped
    for parameter, twin in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(parameter, twin, rtol=1e-5, atol=1e-6)


class NoWait(TorchDispatchMode):
    """Mode that fails if a number is read from a tensor, which would make the CPU wait for a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor", "adafactor in bf16"])
def test_an_update_never_synchronizes_and_a_skipped_one_changes_nothing(name):
    name, _, in_bf16 = name.partition(" in ")
    model = tiny_model(torch.bfloat16 if in_bf16 else torch.float32)
    strategy = object.__new__(Strategy)
    strategy.causal_lm, strategy.optimizer, strategy.accelerator = model, build(model, name), Namespace(scaler=None)
    strategy.name_of = names_of(model)
    before = []
    for value in (1.0, math.nan, math.inf):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        with NoWait():
            _, skipped = strategy.update(0.5)
        tensors = [*model.parameters(), *optimizer_state_by_name(strategy.optimizer, names_of(model)).values()]
        assert skipped.item() == (value != 1.0) and (not before or all(map(torch.equal, before, tensors)))
        before = [tensor.detach().clone() for tensor in tensors]


def saved_state(name):
    model = tiny_model()
    optimizer = build(model, name)
    train(model, optimizer, 0, 1)
    return dict(optimizer_state_by_name(optimizer, names_of(model)))


def test_state_that_does_not_fit_is_rejected_and_changes_nothing():
    model = tiny_model()
    optimizer = build(model)
    saved = saved_state("adamw")
    saved["other.weight.exp_avg"] = saved.pop("up.weight.exp_avg")
    saved["up.bias.exp_avg_sq"] = torch.zeros(3)
    with pytest.raises(InputError) as error:
        load_state(optimizer, model, saved)
    assert "doesn't match AdamW on this model" in str(error.value)
    for part in (
        "1 missing (up.weight.exp_avg)",
        "1 unexpected (other.weight.exp_avg)",
        "1 with the wrong shape (up.bias.exp_avg_sq)",
    ):
        assert part in str(error.value)
    assert not optimizer.state


@pytest.mark.parametrize(("saved_by", "loaded_by"), [("adafactor", "adamw"), ("adamw", "muon"), ("muon", "adafactor")])
def test_state_of_another_optimizer_is_rejected(saved_by, loaded_by):
    model = tiny_model()
    with pytest.raises(InputError, match="resume with the same optimizer and model"):
        load_state(build(model, loaded_by), model, saved_state(saved_by), loaded_by)


def test_state_from_before_the_first_step_is_empty_and_loads():
    model = tiny_model()
    optimizer = build(model)
    assert optimizer_state_by_name(optimizer, names_of(model)) == {}
    load_state(optimizer, model, {})
    train(model, optimizer, 0, 1)


def test_muon_uses_adamw_for_other_parameters():
    """torch's Muon rejects convolution kernels, which have three dimensions."""
    shapes = {"conv.weight": (4, 2, 3), "up.weight": (8, 4), "lm_head.weight": (9, 8), "embed.weight": (9, 4)}
    model = parameters_in_module(shapes)
    named, optimizer = list(model.named_parameters()), build(model, "muon", learning_rate=0.1)
    names = {parameter: name for name, parameter in named}
    by_muon = [names[p] for group in optimizer.param_groups if "ns_steps" in group for p in group["params"]]
    assert by_muon == ["up.weight"]
    for _, parameter in named:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    weights = {name: parameter.detach() for name, parameter in named}
    # AdamW's first step is lr x sign(gradient), after weight decay (except for the embedding).
    for name, decay in (("conv.weight", 0.01), ("lm_head.weight", 0.01), ("embed.weight", 0.0)):
        torch.testing.assert_close(weights[name], torch.full(shapes[name], 1 - decay - 0.1), rtol=0, atol=1e-5)
    # A matrix of ones has one singular value, which is 1 after division by the Frobenius norm.
    value = 1.0
    for _ in range(5):
        value = 3.4445 * value - 4.7750 * value**3 + 2.0315 * value**5
    update = 0.1 * 0.2 * 8**0.5 * value / (8 * 4) ** 0.5
    expected = torch.full(shapes["up.weight"], 1 - 0.01 - update)
    # In bf16, an update is accurate to two digits.
    torch.testing.assert_close(weights["up.weight"], expected, rtol=0, atol=0.02 * update)


def test_updates_under_stochastic_rounding_are_not_lost():
    """Adding 2^-12 to 1.0 in bf16 has no effect, but with stochastic rounding 100 steps add 100 x 2^-12 on average."""
    results = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = nn.ParameterDict({"w": nn.Parameter(torch.ones(4096, dtype=dtype))})
        parameter, optimizer = model["w"], build(model, "adafactor", learning_rate=2**-12, weight_decay=0.0)
        for _ in range(100):
            parameter.grad = torch.full_like(parameter, -1.0)
            optimizer.step()
        results[dtype] = parameter.detach().float().mean().item()
    assert results[torch.float32] == pytest.approx(1 + 100 * 2**-12, abs=1e-5)
    # A parameter's random walk has variance 100 x 2^-12 x 2^-7, so the mean of 4,096 is within 5 x 0.00022.
    assert results[torch.bfloat16] == pytest.approx(1 + 100 * 2**-12, abs=0.0011)


def big():
    """Returns a model with a matrix large enough for 8-bit moments."""
    torch.manual_seed(0)
    return nn.ModuleDict({"up": nn.Linear(64, 128)})


def steps(model, optimizer, first, last):
    for step in range(first, last):
        torch.manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()


def build_8bit(model):
    return build(model, "adamw_8bit")


def test_8bit_adamw_approximates_adamw():
    pytest.importorskip("bitsandbytes")
    start, coarse, exact = big()["up"].weight.detach(), big(), big()
    steps(coarse, build_8bit(coarse), 0, 20)
    steps(exact, build(exact), 0, 20)
    change = exact["up"].weight.detach() - start
    off = (coarse["up"].weight.detach() - exact["up"].weight.detach()).norm() / change.norm()
    assert 0 < off < 0.1, "8-bit moments with a scale per 256 elements must be close, but not exact"


def test_8bit_adamw_state_is_restored_bit_for_bit():
    pytest.importorskip("bitsandbytes")
    whole, part, rest = big(), big(), big()
    steps(whole, build_8bit(whole), 0, 6)
    optimizer = build_8bit(part)
    steps(part, optimizer, 0, 3)
    saved = {key: value.clone() for key, value in optimizer_state_by_name(optimizer, names_of(part)).items()}
    assert saved["up.weight.state1"].dtype == torch.uint8
    rest.load_state_dict(part.state_dict())
    optimizer = build_8bit(rest)
    load_state(optimizer, rest, saved, "adamw_8bit")
    steps(rest, optimizer, 3, 6)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), rest.parameters(), strict=True))


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="the package is there")
def test_8bit_adamw_without_its_package_is_rejected():
    with pytest.raises(InputError, match=r"adamw_8bit needs bitsandbytes: pip install .* adamw, muon and adafactor"):
        build(tiny_model(), "adamw_8bit")


def test_8bit_adamw_without_a_kernel_for_the_device_is_rejected(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace(__version__="0.1"))
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *_: False)
    spec = OPTIMIZERS["adamw_8bit"](builder(tiny_model()).spec.model)
    (problem,) = spec.problems(Optim(learning_rate=0.1), "cpu")
    assert problem.startswith("optim.name: bitsandbytes 0.1 has no 8-bit AdamW for cpu: upgrade it, or use adamw")


def test_a_learning_rate_for_an_empty_group_is_rejected():
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, tie_word_embeddings=True)
    settings = Optim(learning_rate=0.01, group_learning_rates={"head": 0.1, "scalars": 0.1})
    (problem,) = optimizer_problems(settings, build_meta_model(config), "cpu")
    assert problem.startswith("optim.group_learning_rates.head: this model has no parameters in this group; omit it")


def test_group_learning_rates_follow_the_schedule():
    model = parameters_in_module({"up.weight": (8, 4), "embed.weight": (9, 4)})
    rates = {}
    for own in ({}, {"embedding": 0.01}):
        strategy = object.__new__(Strategy)
        strategy.optimizer = build(model, "muon", learning_rate=0.04, group_learning_rates=own)
        strategy.set_learning_rate(0.02)
        rates[bool(own)] = [group["lr"] for group in strategy.optimizer.param_groups]
    assert rates == {False: [0.02, 0.02], True: [0.02, pytest.approx(0.005)]}, (
        "the embedding's learning rate must also be half of its peak"
    )


def test_blocks_follow_the_pattern_and_the_layout_of_the_weight():
    model = nn.ModuleDict({"qkv": Conv1D(12, 4), "up": nn.Linear(4, 16)})
    optimizer = build(model, "muon", muon={"split_matrices": {"qkv.*": 3, "*.weight": [12, 4]}})
    found = {name: optimizer.muon.matrices[p] for name, p in model.named_parameters() if name.endswith("weight")}
    assert found == {
        "qkv.weight": HiddenMatrix((4, 12), (4, 4, 4), 1),
        "up.weight": HiddenMatrix((16, 4), (12, 4), 0),
    }


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ({"*.c_attn.weight": 3}, r"\*.c_attn.weight matches no hidden matrix .* first hidden matrix is up.weight"),
        ({"up.*": 3}, "up.weight has 16 outputs, which doesn't match 3 equal blocks"),
        ({"up.*": [4, 4]}, r"up.weight has 16 outputs, which doesn't match 8, the sum of \[4, 4\]"),
    ],
)
def test_blocks_that_do_not_fit_are_rejected(blocks, message):
    with pytest.raises(InputError, match=message):
        builder(tiny_model(), "muon", muon={"split_matrices": blocks})


def test_muon_without_hidden_matrices_is_rejected():
    model = parameters_in_module({"embed.weight": (9, 4), "lm_head.weight": (9, 4), "conv.weight": (4, 2, 3)})
    with pytest.raises(InputError, match="this model has no hidden matrices for muon; use adamw"):
        builder(model, "muon")


def test_an_optimizer_is_described():
    assert describe_optimizer(build(tiny_model())) == "AdamW (fused), weight decay on 320 of 460 parameters"


class SignSGD(torch.optim.Optimizer):
    """Sign SGD with momentum."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 0.1)
                state["step"] = state.get("step", torch.zeros(())) + 1
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(momentum.sign(), alpha=group["lr"])


class SignSGDSpec(OptimizerSpec):
    """Spec for the added optimizer, as described in docs/optimizers.md."""

    takes = ("whole", "sharded")

    def make(self, parameters, settings, learning_rate, seed, device_type):
        return SignSGD(self.groups(parameters, settings.weight_decay), lr=learning_rate)

    def state_shapes(self, name):
        return {"step": (), "momentum": self.model.shapes[name]}


def test_an_optimizer_is_added_by_one_class_and_one_line(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "sign_sgd", SignSGDSpec)
    whole, first, second = (tiny_model() for _ in range(3))
    train(whole, build(whole, "sign_sgd"), 0, 2)
    optimizer = build(first, "sign_sgd")
    train(first, optimizer, 0, 1)
    saved = optimizer_state_by_name(optimizer, names_of(first))
    second.load_state_dict(first.state_dict())
    optimizer = build(second, "sign_sgd")
    load_state(optimizer, second, saved, "sign_sgd")
    train(second, optimizer, 1, 2)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))

    parameters = sum(parameter.numel() for parameter in whole.parameters())
    sizes = SimpleNamespace(shapes=ModelShapes.of(whole))
    assert optimizer_elements("sign_sgd", sizes) == parameters, "plan.py must count the optimizer's memory"
    config = SimpleNamespace(
        optim=Optim(learning_rate=0.01).model_copy(update={"name": "sign_sgd"}),
        precision="fp32",
        compile="none",
        batch=SimpleNamespace(no_sync=False),
    )
    assert Strategy.problems(config, "ddp") == []
    (problem,) = Zero.problems(config, "zero1")
    assert (
        problem.startswith("optim.name: sign_sgd is not supported with")
        and "use adamw or adafactor or muon," in problem
    )
