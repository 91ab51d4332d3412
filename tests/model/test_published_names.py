"""Tests for exported folders: names and tensors match save_pretrained, and they can be read back tensor by tensor."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from pretrain.model.build import build_model
from pretrain.model.own_code import register_all
from pretrain.model.published_names import JoinedTensors, PublishedNames
from support.tiny_experts import MODELS, tiny_config
from support.tiny_models import TINY

register_all()

CONFIGS = {name: lambda name=name: tiny_config(name) for name in MODELS}
CONFIGS |= {name: lambda name=name: AutoConfig.for_model(**TINY[name]) for name in ("llama_tied", "gpt2", "deepone")}


def tensors_that_train(config):
    """Returns a model and {name: tensor} of its parameters and saved buffers. Tied tensors occur once."""
    model = build_model(config, seed=7)
    kept = dict(model.named_parameters())
    kept |= {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    return model, {name: tensor.detach() for name, tensor in kept.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_tensors_are_those_of_save_pretrained(name, tmp_path):
    config = CONFIGS[name]()
    model, trained = tensors_that_train(config)
    model.save_pretrained(tmp_path)
    expected, names, found = load_file(tmp_path / "model.safetensors"), PublishedNames(config), {}
    for key, tensor in trained.items():
        pieces = names.split(key, tensor)
        assert {piece: tuple(part.shape) for piece, part in pieces.items()} == names.pieces[key]
        found |= pieces
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    joined = JoinedTensors(expected, names)
    assert set(joined) == trained.keys() and len(joined) == len(trained)
    assert all(key in joined and torch.equal(joined[key], tensor) for key, tensor in trained.items())
    assert joined.shapes({key: tuple(tensor.shape) for key, tensor in expected.items()}) == {
        key: tuple(tensor.shape) for key, tensor in trained.items()
    }
    as_trained = JoinedTensors(trained, names)
    assert list(as_trained) == list(trained) and all(as_trained[key] is tensor for key, tensor in trained.items())


def test_experts_are_published_one_by_one():
    names = PublishedNames(tiny_config("qwen3_moe"))
    experts = "model.layers.1.mlp.experts"
    assert names.pieces[f"{experts}.down_proj"] == {f"{experts}.{n}.down_proj.weight": (32, 16) for n in range(8)}
    assert len(names.pieces[f"{experts}.gate_up_proj"]) == 16
    mixtral = PublishedNames(tiny_config("mixtral"))
    assert list(mixtral.pieces["model.layers.0.mlp.gate.weight"]) == ["model.layers.0.block_sparse_moe.gate.weight"]


@pytest.mark.parametrize("fails", [False, True])
def test_tensors_that_cannot_be_converted_alone_keep_their_names(fails, monkeypatch):
    """Names are kept if the library merges several tensors into one, or fails to convert a single tensor."""

    def taken_apart(names, tensors):
        if fails:
            raise ValueError("several are needed")
        return {"one of all": next(iter(tensors.values()))}

    monkeypatch.setattr(PublishedNames, "_split_all", taken_apart)
    names = PublishedNames(tiny_config("qwen3_moe"))
    tensor = torch.zeros(8, 32, 16)
    assert names.split("model.layers.1.mlp.experts.down_proj", tensor) == {
        "model.layers.1.mlp.experts.down_proj": tensor
    }
