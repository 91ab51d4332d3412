"""Diagnostics must match values computed directly from the model; test_mesh.py tests them on meshes."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pretrain.model.own_code import register_all
from pretrain.training.diagnostics import Diagnostics, Watched
from support.tiny_models import TINY

IDS = torch.randint(1, 128, (3, 24), generator=torch.Generator().manual_seed(0))
IDS[0, 9] = IDS[2, 17] = 0  # document ends


def strategy_of(model):
    return SimpleNamespace(
        causal_lm=model,
        device=torch.device("cpu"),
        ranks=SimpleNamespace(count=1),
        name_of={parameter: name for name, parameter in model.named_parameters()},
        model_tensors=lambda: SimpleNamespace(shapes={n: tuple(p.shape) for n, p in model.named_parameters()}),
        share_of=lambda parameter: 1.0,
        sum=lambda tensor, by_layer: tensor,
        before_update=(),
        after_update=(),
    )


def made(name: str, attention: str = "groundwork_sdpa"):
    register_all()
    torch.manual_seed(0)
    values = dict(TINY[name])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


def rms(*tensors) -> float:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).square().mean().sqrt().item()


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen3", "gpt2", "deepone"])
def test_every_metric_matches_the_models_tensors(name):
    model = made(name)
    strategy = strategy_of(model)
    diagnostics = Diagnostics(strategy)
    diagnostics.attach()
    diagnostics.is_due = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(IDS, labels=IDS).loss.backward()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    strategy.before_update[0]()
    optimizer.step()
    strategy.after_update[0](torch.zeros(()))
    found = diagnostics.measure(model, {"input_ids": IDS, "output_hidden_states": True})

    assert model.training and len(found["layers"]) == (4 if name in ("llama_tied", "qwen3") else 5)
    hidden = model.eval()(IDS, output_hidden_states=True).hidden_states
    named = dict(model.named_parameters())
    for row, place in enumerate(found["layers"]):
        inside = [n for n, p in named.items() if n.startswith(f"{place}.") and p.dim() > 1]
        assert found["weight_rms"][row] == pytest.approx(rms(*(before[n] for n in inside)), rel=1e-5)
        assert found["gradient_rms"][row] == pytest.approx(rms(*(named[n].grad for n in inside)), rel=1e-5)
        assert found["update_rms"][row] == pytest.approx(rms(*(named[n] - before[n] for n in inside)), rel=1e-3)
    first = next(row for row, value in enumerate(found["activation_rms"]) if value is not None)
    # transformers returns the last layer's output only after the final norm.
    assert found["activation_rms"][first : first + 2] == pytest.approx([rms(hidden[1]), rms(hidden[2])], rel=1e-5)
    assert all(value is not None for value in found["largest_logit"][first : first + 3])


def test_a_frozen_weight_has_no_gradient():
    model = made("llama")
    model.model.embed_tokens.weight.requires_grad_(False)
    diagnostics = Diagnostics(strategy_of(model))
    diagnostics.is_due = True
    model(IDS, labels=IDS).loss.backward()
    diagnostics.before_update()
    gradients = diagnostics._squares["gradient_rms"].tolist()
    assert gradients[0] == 0 and min(gradients[1:]) > 0


def test_other_steps_measure_nothing():
    diagnostics = Diagnostics(strategy_of(made("llama")))
    diagnostics.before_update()
    diagnostics.after_update(torch.zeros(()))
    assert not diagnostics._squares and not diagnostics._before


def test_a_unit_that_no_token_activates_counts_as_off():
    model = made("llama")
    up = model.model.layers[1].mlp.up_proj.weight
    up.data[: len(up) // 4] = 0
    found = Diagnostics(strategy_of(model)).measure(model, {"input_ids": IDS})
    assert [value for value in found["units_off"] if value is not None] == [0.0, 0.25, 0.0]


def test_a_unit_counts_as_off_only_if_it_is_off_on_all_ranks():
    strategy, sums = strategy_of(made("llama")), []

    def units_off(*magnitudes: float) -> float:
        watched = Watched(strategy.causal_lm.model.layers, strategy)
        watched.elements += 1
        watched.magnitudes[0] = [torch.tensor([*magnitudes, 1.0])]
        return watched.figures()["units_off"][0]

    strategy.sum = lambda tensor, by_layer: sums.append(tensor) or tensor
    assert units_off(1.0, 0.0, 0.0) == pytest.approx(2 / 3)
    strategy.sum = lambda tensor, by_layer: tensor + sums.pop(0)  # this rank and the first one
    assert units_off(0.0, 0.0, 1.0) == pytest.approx(1 / 3)
