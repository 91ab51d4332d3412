"""Tests that compare FLOPs per token with hand calculations, including MoE models and explicit head dimensions."""

import re

import pytest
from transformers import AutoConfig

from pretrain.model.build import active_parameters, flops_per_token
from pretrain.model.model_config import load_model_config
from support.project import ROOT

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
SIZES |= {"vocab_size": 1000, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
QUERY_AND_OUTPUT, KEY_AND_VALUE = 2 * 64 * (4 * 32), 2 * 64 * (2 * 32)
NORMS = 2 * (2 * 64 + 2 * 32) + 64  # two per layer, query and key norms, final norm
HEAD = 1000 * 64
ATTENTION = 12 * 2 * (4 * 32) * 256  # layers, heads x head dimension, tokens


@pytest.mark.parametrize("tied", [True, False])
def test_qwen3(tied):
    config = AutoConfig.for_model("qwen3", **SIZES, intermediate_size=96, tie_word_embeddings=tied)
    matrices = 2 * (QUERY_AND_OUTPUT + KEY_AND_VALUE + 3 * 64 * 96) + NORMS + HEAD
    assert flops_per_token(config, 256) == 6 * matrices + ATTENTION
    assert active_parameters(config) == matrices + (0 if tied else HEAD)


def test_moe_models_count_the_active_experts():
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    config = AutoConfig.for_model("qwen3_moe", **SIZES, **experts, tie_word_embeddings=False)
    layer = QUERY_AND_OUTPUT + KEY_AND_VALUE + 2 * (3 * 64 * 48) + 64 * 8  # two experts, and the router for all eight
    matrices = 2 * layer + NORMS + HEAD
    assert flops_per_token(config, 256) == 6 * matrices + ATTENTION
    assert active_parameters(config) == matrices + HEAD


def test_the_performance_page_has_the_share_of_attention_in_mfu():
    text = " ".join((ROOT / "docs/performance.md").read_text().split())
    shares = re.findall(r"([\d.]+)% of the MFU of `(\w+)`", text)
    assert "At T=2,048, this is at most" in text and len(shares) == 2
    for share, model in shares:
        config = load_model_config(str(ROOT / f"model_configs/{model}.json"))
        attention = 1 - flops_per_token(config, 0) / flops_per_token(config, 2048)
        assert share == f"{attention:.1%}".strip("%"), model
