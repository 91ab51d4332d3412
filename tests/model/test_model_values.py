"""Tests for config values: impossible ones are rejected with their key, and all keys that the library reads are
accepted."""

import json
from pathlib import Path

import pytest

from pretrain.errors import InputError
from pretrain.model.build import build_meta_model, count_parameters
from pretrain.model.model_config import load_model_config
from support.tiny_models import TINY_LLAMA


def load(folder: Path, **changes):
    path = folder / "model.json"
    path.write_text(json.dumps({**TINY_LLAMA, **changes}))
    return load_model_config(str(path))


def problems_of(folder: Path, **changes) -> list[str]:
    with pytest.raises(InputError) as caught:
        load(folder, **changes)
    return [problem.replace(f"{folder}/model.json: ", "") for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("hidden_act", "nonsense", "'nonsense' is not an activation; allowed: gelu"),
        ("hidden_act", "", "'' is not an activation"),
        ("rope_parameters", {"rope_type": "nonsense"}, "'nonsense' is not a rope_type; allowed: default"),
        ("rope_parameters", {"rope_type": "linear", "factor": 0.0}, "must be a number of at least 1 (such as 8.0)"),
        ("rope_scaling", {"type": "linear", "factor": -1}, "must be a number of at least 1 (such as 8.0), got -1"),
        ("rope_parameters", {"rope_type": "linear", "factor": True}, "factor: must be a number, got True"),
        ("rope_parameters", {"rope_theta": [1e4]}, "rope_theta: must be a number, got [10000.0]"),
        ("rope_scaling", ["linear"], "['linear'] is not an object"),
        ("rope_theta", float("inf"), "must be a finite number"),
        ("torch_dtype", "nonsense", "'nonsense' is not a dtype; allowed: bfloat16"),
        ("model_type", ["llama"], "unknown model_type ['llama']"),
        ("id2label", 5, "5 is not a label mapping"),
        ("hidden_size", 2**40, "1,099,511,627,776 is too large; allowed: at most 1,048,576"),
        ("num_hidden_layers", 10**9, "1,000,000,000 is too large; allowed: at most 1,024 layers"),
        ("num_attention_heads", 2**63, "allowed: at most 16,384 heads"),
        ("vocab_size", 10**15, "allowed: at most 100,000,000 vocabulary tokens"),
        ("num_hidden_layers", True, "got True (bool)"),
        ("rms_norm_eps", float("nan"), "must be a finite number"),
        ("rms_norm_eps", -1.0, "must be a small number between 0 and 1"),
        ("attention_dropout", 2.0, "must be a probability (at least 0 and below 1), got 2.0"),
        ("initializer_range", -1.0, "must be a non-negative number"),
        ("pad_token_id", [[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]], "must be int | None, got [[["),
    ],
)
def test_impossible_values_are_rejected_with_their_key(tmp_path, key, value, allowed):
    found = problems_of(tmp_path, **{key: value})
    assert any(allowed in problem for problem in found), found
    assert any(key in problem for problem in found), found


def test_all_impossible_values_are_reported_together(tmp_path):
    found = problems_of(tmp_path, hidden_act="x", rms_norm_eps=-1.0, hiden_size=3, num_attention_heads=7)
    for key in ("hidden_act", "rms_norm_eps", "hiden_size", "hidden_size 64 is not a multiple"):
        assert any(problem.startswith(key) for problem in found), found


def test_undeclared_keys_that_the_model_reads_are_accepted(tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = load(tmp_path, model_type="qwen3_moe", head_dim=32, **experts)
    projection = build_meta_model(config).model.layers[0].self_attn.q_proj
    assert projection.weight.shape == (4 * 32, 64), "the model must use this key"
    (problem,) = problems_of(tmp_path, model_type="qwen3_moe", head_dimm=32, **experts)
    assert problem.startswith("head_dimm is not a key of Qwen3MoeConfig")
    assert problems_of(tmp_path, model_type="qwen3_moe", head_dim="x", **experts)[0].startswith(
        "head_dim: must be an integer"
    )


@pytest.mark.parametrize("model_type", ["hunyuan_v1_dense", "ministral"])
def test_the_head_dimension_is_derived_if_the_class_has_no_default(tmp_path, model_type):
    config = load(tmp_path, model_type=model_type)
    assert config.head_dim == 16
    assert count_parameters(config) == count_parameters(load(tmp_path, model_type=model_type, head_dim=16))


def test_errors_in_the_models_code_become_input_errors(tmp_path, monkeypatch):
    config = load(tmp_path)
    config.rope_parameters = {"rope_type": "nonsense", "rope_theta": 1.0}
    with pytest.raises(InputError, match="LlamaConfig cannot be built with these values"):
        build_meta_model(config)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}"], ids=["brackets", "digits"])
def test_json_that_cannot_be_parsed_is_rejected(tmp_path, text):
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"model.json: (is nested too deeply|not a valid JSON file)"):
        load_model_config(str(path))
