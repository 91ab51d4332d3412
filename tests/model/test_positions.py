"""Tests for changing RoPE settings of a model in place: results match the library's tables, or an error says what to
do."""

import copy
import json

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from pretrain.config import Data
from pretrain.errors import InputError
from pretrain.model.build import build_model
from pretrain.model.model_config import load_model_config
from pretrain.model.positions import configs_of_stages, use_positions
from support.project import ROOT
from support.tiny_models import TINY_LLAMA

TYPES = [
    {"rope_theta": 500_000.0},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0,
     "high_freq_factor": 4.0},
]  # fmt: skip


SMALL = {
    "qwen3": TINY_LLAMA | {"max_position_embeddings": 64, "head_dim": 16},
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 96, "n_positions": 128},
    "gptj": {"n_layer": 2, "n_embd": 32, "n_head": 2, "rotary_dim": 8, "vocab_size": 96, "n_positions": 128},
    "gemma3_text": {},
}


def small(kind):
    return CONFIG_MAPPING[kind](**{key: value for key, value in SMALL[kind].items() if key != "model_type"})


def data_of(**second) -> Data:
    stages = [{"until": 0.5, "train": [{"shards": "a"}]}, {"train": [{"shards": "a"}], **second}]
    return Data.model_validate({"stages": stages, "sequence_length": 64})


def llama(tmp_path, **changes):
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(TINY_LLAMA | {"max_position_embeddings": 64} | changes))
    return load_model_config(str(path))


@pytest.mark.parametrize("rope", TYPES, ids=lambda rope: rope.get("rope_type", "base"))
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_model_changed_in_place_equals_a_newly_built_one(kind, rope, tmp_path):
    config = llama(tmp_path) if kind == "llama" else small(kind)
    first, second = configs_of_stages(config, data_of(sequence_length=256, rope_parameters=rope))
    assert first is config and second.max_position_embeddings == max(256, config.max_position_embeddings)
    assert second.rope_parameters == {"rope_type": "default"} | config.rope_parameters | rope
    model = build_model(config, seed=1).eval()
    theirs = AutoModelForCausalLM.from_config(copy.deepcopy(second)).eval()
    theirs.load_state_dict(model.state_dict())
    ids = torch.randint(2, config.vocab_size, (1, 200), generator=torch.Generator().manual_seed(0))
    before = model(ids).logits
    use_positions(model, second)
    assert model.config.to_diff_dict() | {"dtype": 0} == second.to_diff_dict() | {"dtype": 0}
    after = model(ids).logits
    assert torch.equal(after, theirs(ids).logits) and not torch.allclose(after, before, atol=1e-3)
    use_positions(model, first)
    assert torch.equal(model(ids).logits, before), "restoring the settings must restore the logits"


def test_what_no_stage_changes_stays_the_same_object(tmp_path):
    config = llama(tmp_path, max_position_embeddings=512)
    assert [c is config for c in configs_of_stages(config, data_of(sequence_length=256))] == [True, True]


def test_a_stage_with_a_new_rope_type_keeps_only_the_base(tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 2.0, "original_max_position_embeddings": 32}
    config = llama(tmp_path, rope_parameters=rope)
    _, yarn = configs_of_stages(config, data_of(rope_parameters={"factor": 8.0}))
    assert yarn.rope_parameters == rope | {"factor": 8.0}
    _, plain = configs_of_stages(config, data_of(rope_parameters={"rope_type": "default"}))
    assert plain.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "yarn needs original_max_position_embeddings"),
        ({"rope_parameters": {"rope_type": "linear"}}, "linear needs factor"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
            "dynamic has different frequencies for each input",
        ),
        ({"rope_parameters": {"rope_type": "yarm"}}, "'yarm' is not a rope_type; did you mean yarn"),
        ({"rope_parameters": {"rope_thetta": 1e6}}, "rope_thetta is not a rotary parameter"),
        ({"rope_parameters": {"rope_theta": -1}}, "must be a number above 0"),
        ({"rope_parameters": {"rope_theta": 10000.0}}, "does not use them"),
    ],
)
def test_impossible_rope_parameters_are_rejected(tmp_path, second, problem):
    with pytest.raises(InputError) as refusal:
        configs_of_stages(llama(tmp_path), data_of(sequence_length=256, **second))
    assert problem in str(refusal.value) and "data.stages[1]" in str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "second", "problem"),
    [
        ("gpt2", {"sequence_length": 1 << 20}, "learns an embedding for each position; set --model."),
        ("gpt2", {"rope_parameters": {"rope_theta": 1e6}}, "gpt2 has no rotary positions"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e6}}, "has different rotary parameters for each"),
        ("gptj", {"sequence_length": 1 << 12}, "has a table of all positions; set --model.max_position_embeddings"),
    ],
)
def test_models_whose_positions_cannot_change_are_rejected_with_a_remedy(kind, second, problem):
    with pytest.raises(InputError) as refusal:
        configs_of_stages(small(kind), data_of(**second))
    assert problem in str(refusal.value)


def test_the_own_architectures_base_can_change():
    config = load_model_config(str(ROOT / "model_configs/deepone_162m.json"))
    _, changed = configs_of_stages(config, data_of(rope_parameters={"rope_theta": 1e6}))
    assert changed.rope_theta == 1e6
