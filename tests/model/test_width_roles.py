"""Tests that parameter roles, found by changing the width, match those implied by the parameter names."""

import pytest
import torch
from transformers import GemmaConfig

from pretrain.errors import InputError
from pretrain.model.build import InitialWeights, build_model
from pretrain.model.model_config import load_model_config
from pretrain.model.width_roles import WidthRole, at_width, hidden_width, initial_scales, width_roles
from support.project import ROOT

HIDDEN, HEAD, OTHER = WidthRole(True, True), WidthRole(True, False), WidthRole(False, True)
BY_NAME = {
    "llama_demo": {"proj": HIDDEN, "lm_head": HEAD, "embed": OTHER, "norm": OTHER},
    "gpt2_124m": {"c_": HIDDEN, "lm_head": HEAD, "wte": OTHER, "wpe": OTHER, "ln_": OTHER},
    "qwen3_moe_5m": {"proj": HIDDEN, "gate.weight": HEAD, "lm_head": HEAD, "embed": OTHER, "layernorm": OTHER},
}


def untied(name: str):
    config = load_model_config(str(ROOT / "model_configs" / f"{name}.json"))
    config.tie_word_embeddings = False
    return config


@pytest.mark.parametrize("name", BY_NAME)
def test_roles_match_the_parameter_names(name):
    for parameter, role in width_roles(untied(name)).items():
        told = next((role for part, role in BY_NAME[name].items() if part in parameter), None)
        if parameter.endswith("bias") or "q_norm" in parameter or "k_norm" in parameter or parameter == "norm":
            assert not role.inputs
        elif told:
            assert role == told, parameter


def test_the_same_shape_at_another_width_has_more_heads_of_one_width():
    config = untied("llama_demo")
    wide = at_width(config, 2)
    assert hidden_width(wide) == 2 * hidden_width(config)
    assert wide.num_attention_heads == 2 * config.num_attention_heads and wide.head_dim == config.head_dim
    assert wide.vocab_size == config.vocab_size and wide.num_hidden_layers == config.num_hidden_layers


def test_initial_weights_are_the_architectures_own_at_the_base_width():
    assert initial_scales(untied("llama_demo"), hidden_width(untied("llama_demo"))) == {}


def test_initial_weights_are_scaled_by_role():
    config = at_width(untied("llama_demo"), 0.25)
    own = build_model(config, seed=1)
    scaled = build_model(config, seed=1)
    scales = initial_scales(config, hidden_width(config) // 4)
    InitialWeights(seed=1, scales=scales).fill(scaled, "")
    for (name, before), after in zip(own.named_parameters(), scaled.parameters(), strict=True):
        factor = 0.25 if name == "lm_head.weight" else 0.5 if "proj" in name else 1.0
        torch.testing.assert_close(after, factor * before)


@pytest.mark.parametrize(("name", "norm"), [("llama_demo", "model.norm"), ("gpt2_124m", "transformer.ln_f")])
def test_before_a_tied_head_the_norm_stands_for_its_scale(name, norm):
    config = untied(name)
    config.tie_word_embeddings = True
    heads = {parameter for parameter, role in width_roles(config).items() if role == HEAD}
    assert heads == {parameter for parameter in width_roles(config) if parameter.startswith(norm)}


def test_a_tied_head_behind_a_norm_of_one_plus_weight_is_refused():
    config = GemmaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16)
    with pytest.raises(InputError, match="tie_word_embeddings"):
        width_roles(config)
