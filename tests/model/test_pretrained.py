"""Tests for reading pretrained weights tensor by tensor: values match transformers, and no other tensors are read."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel

from pretrain.errors import InputError
from pretrain.model.build import InitialWeights, build_meta_model, build_model, units_of
from pretrain.model.own_code import register_all
from pretrain.model.pretrained import (
    LoadedModel,
    NewTokens,
    PretrainedTensors,
    TensorsInMemory,
    find_weights,
    load_pretrained,
    open_pretrained,
)
from pretrain.model.published_names import PublishedNames
from support.tiny_experts import tiny_config
from support.tiny_models import TINY

register_all()


def save(kind: str, folder, dtype=torch.float32, **options) -> str:
    build_model(AutoConfig.for_model(**TINY[kind]), seed=7).to(dtype).save_pretrained(folder, **options)
    return str(folder)


def filled(kind: str, weights: InitialWeights, units: list[str] | None = None) -> PreTrainedModel:
    model = build_meta_model(AutoConfig.for_model(**TINY[kind]))
    for unit in units_of(model) if units is None else units:
        weights.fill(model, unit)
    model.tie_weights()
    return model


def assert_same(found: PreTrainedModel, expected: PreTrainedModel) -> None:
    tensors, wanted = (dict([*m.named_parameters(), *m.named_buffers()]) for m in (found, expected))
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("units", [None, [""]], ids=["unit by unit", "at once"])
@pytest.mark.parametrize("kind", TINY)
def test_weights_are_those_that_transformers_loads(kind, units, tmp_path):
    path = save(kind, tmp_path, torch.bfloat16)
    pretrained = open_pretrained(path)
    assert isinstance(pretrained, PretrainedTensors)
    model = filled(kind, InitialWeights(seed=0, pretrained=pretrained), units)
    assert_same(model, load_pretrained(path))
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("kind", TINY)
def test_a_model_from_tensors_in_memory_draws_no_random_numbers(kind, monkeypatch):
    trained = build_model(AutoConfig.for_model(**TINY[kind]), seed=7)
    tensors = {name: parameter.detach() for name, parameter in trained.named_parameters()}
    drawn = []
    for draw in ("normal_", "uniform_"):
        monkeypatch.setattr(torch.Tensor, draw, lambda tensor, *_, **__: drawn.append(tensor.device.type))
    model = filled(kind, InitialWeights(seed=0, pretrained=TensorsInMemory(dict(tensors))), [""])
    assert set(drawn) <= {"meta"}
    assert_same(model, trained)
    places = {parameter.data_ptr() for parameter in trained.parameters()}
    assert not places & {parameter.data_ptr() for parameter in model.parameters()}, (
        "the new model must not share memory with the trained one"
    )


def test_several_files(tmp_path):
    path = save("llama", tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(filled("llama", InitialWeights(seed=0, pretrained=open_pretrained(path))), load_pretrained(path))


def test_files_of_the_base_model_alone(tmp_path):
    """Weights without the `transformer.` prefix, like those of GPT-2 on the Hub, are loaded."""
    config = AutoConfig.for_model(**TINY["gpt2"])
    build_model(config, seed=7).base_model.save_pretrained(tmp_path)
    pretrained = open_pretrained(str(tmp_path))
    assert isinstance(pretrained, PretrainedTensors)
    assert_same(filled("gpt2", InitialWeights(seed=0, pretrained=pretrained)), load_pretrained(str(tmp_path)))


def test_a_unit_reads_only_its_own_tensors(tmp_path, monkeypatch):
    pretrained = open_pretrained(save("llama", tmp_path))
    read, names = pretrained.read, []
    monkeypatch.setattr(pretrained, "read", lambda name: names.append(name) or read(name))
    model = filled("llama", InitialWeights(seed=0, pretrained=pretrained), ["model.layers.1", "model.norm"])
    expected = [n for n, _ in model.named_parameters() if n.startswith(("model.layers.1.", "model.norm."))]
    assert names == expected and len(names) == 10
    assert {n for n, p in model.named_parameters() if not p.is_meta} == set(expected)


def test_loading_does_not_change_the_files(tmp_path):
    path = save("llama", tmp_path)
    model = filled("llama", InitialWeights(seed=0, pretrained=open_pretrained(path)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    again = filled("llama", InitialWeights(seed=0, pretrained=open_pretrained(path)))
    assert_same(again, load_pretrained(path))


@pytest.mark.parametrize("way", ["tensor by tensor", "whole"])
@pytest.mark.parametrize("tied", [True, False])
def test_new_tokens_start_as_the_mean_of_their_parts(tied, way, tmp_path, monkeypatch):
    values = TINY["llama"] | {"tie_word_embeddings": tied}
    build_model(AutoConfig.for_model(**values), seed=7).save_pretrained(tmp_path)
    old = load_pretrained(str(tmp_path))
    rows = values["vocab_size"]
    first = rows - 3  # the last three rows were padding
    added = NewTokens(first, [[1, 2], [5], [7, 7, 9], [], [4, first - 1]], rows + 64)
    if way == "whole":
        monkeypatch.setattr("pretrain.model.pretrained.checked_places", lambda *given: (None, []))
    model = build_meta_model(AutoConfig.for_model(**values | {"vocab_size": rows + 64}))
    weights = InitialWeights(seed=0, pretrained=open_pretrained(str(tmp_path), added))
    for unit in units_of(model):
        weights.fill(model, unit)
    model.tie_weights()
    for of in ("get_input_embeddings", "get_output_embeddings"):
        found = getattr(model, of)().weight.detach()
        before = getattr(old, of)().weight.detach()
        assert found.shape == (rows + 64, before.shape[1])
        assert torch.equal(found[:first], before[:first])
        for number, parts in enumerate(added.parts):
            expected = before[parts or range(first)].mean(dim=0)
            torch.testing.assert_close(found[first + number], expected, atol=1e-7, rtol=0)
        torch.testing.assert_close(found[first + 5 :], before[:first].mean(dim=0).expand(62, -1), atol=1e-7, rtol=0)
    others = {name: p for name, p in model.named_parameters() if "embed_tokens" not in name and "lm_head" not in name}
    assert others and all(torch.equal(p, old.get_parameter(name)) for name, p in others.items())
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied


@pytest.mark.parametrize("shard", ["20KB", "1GB"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3"])
def test_experts_that_are_saved_one_by_one_are_put_together_layer_by_layer(kind, shard, tmp_path):
    config = tiny_config(kind)
    build_model(config, seed=7).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size=shard)
    pretrained = open_pretrained(str(tmp_path))
    assert isinstance(pretrained, PretrainedTensors)
    model, weights = build_meta_model(config), InitialWeights(seed=0, pretrained=pretrained)
    weights.fill(model, "model.layers.1")
    read = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    assert read and all(name.startswith("model.layers.1.") for name in read)
    for unit in units_of(model):
        weights.fill(model, unit)
    assert_same(model, load_pretrained(str(tmp_path)))


def test_files_that_need_several_tensors_for_one_make_a_whole_model(tmp_path, monkeypatch):
    config = tiny_config("mixtral")
    build_model(config, seed=7).save_pretrained(tmp_path)
    monkeypatch.setattr(PublishedNames, "_split_all", lambda names, tensors: {"all": next(iter(tensors.values()))})
    pretrained = open_pretrained(str(tmp_path))
    assert isinstance(pretrained, LoadedModel)
    model = build_meta_model(config)
    InitialWeights(seed=0, pretrained=pretrained).fill(model, "")
    assert_same(model, load_pretrained(str(tmp_path)))


@pytest.mark.parametrize("kind", ["llama", "llama_tied"])
def test_a_whole_model_keeps_its_weights_if_the_training_model_is_rounded(kind):
    """ZeRO reads the weights again after DeepSpeed has rounded or partitioned the training model's parameters."""
    trained = build_model(AutoConfig.for_model(**TINY[kind]), seed=7)
    weights = InitialWeights(seed=0, pretrained=LoadedModel(copy.deepcopy(trained)))
    first = filled(kind, weights).to(torch.bfloat16)
    for parameter in first.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    assert_same(filled(kind, weights), trained)
    assert all(parameter.numel() == 0 and parameter.dtype == torch.bfloat16 for parameter in first.parameters())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "1 weights are missing .* model.norm.weight"),
        (
            lambda tensors: tensors.update({"lm_head.weight": torch.ones(128, 32)}),
            "ties lm_head.weight and model.embed",
        ),
    ],
)
def test_weights_of_another_model_are_refused_before_anything_starts(tmp_path, change, said):
    path = save("llama_tied", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for read in (find_weights, open_pretrained):
        with pytest.raises(InputError, match=said):
            read(path)


@pytest.mark.parametrize("keeps_embedding", [True, False])
def test_a_tied_head_may_be_in_the_file(tmp_path, keeps_embedding):
    path = save("llama_tied", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if not keeps_embedding:
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    find_weights(path)
    assert_same(filled("llama_tied", InitialWeights(seed=0, pretrained=open_pretrained(path))), load_pretrained(path))


def test_ignored_weights_are_named(tmp_path, capsys):
    path = save("llama", tmp_path)
    open_pretrained(path)
    assert "ignored" not in capsys.readouterr().out
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # in files of old transformers
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    open_pretrained(path)
    assert (
        "1 of its weights are not in the model of its config.json, starting with model.layers.0.self_attn.q_proj.bias"
        in (" ".join(capsys.readouterr().out.split()))
    )


def test_invalid_weights_are_rejected_with_a_reason(tmp_path):
    AutoConfig.for_model(**TINY["llama"]).save_pretrained(tmp_path / "empty")
    with pytest.raises(InputError, match="cannot load safetensors weights"):
        open_pretrained(str(tmp_path / "empty"))
    path = save("llama", tmp_path / "short")
    config = AutoConfig.for_model(**{**TINY["llama"], "num_hidden_layers": 4})
    config.save_pretrained(path)
    with pytest.raises(InputError, match="9 weights are missing"):
        open_pretrained(path)
    AutoConfig.for_model(**{**TINY["llama"], "vocab_size": 96}).save_pretrained(path)
    with pytest.raises(InputError, match=r"weights are missing or do not have the shape .* \('lm_head.weight', torch"):
        load_pretrained(path)


@pytest.mark.parametrize(("suffix", "dtype", "said"), [("", "float8_e4m3fn", "F8_E4M3"), ("_packed", "int32", "I32")])
def test_quantized_weights_are_refused_before_anything_starts(tmp_path, suffix, dtype, said):
    path = save("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name + suffix] = tensors.pop(name).to(getattr(torch, dtype))
    name += suffix
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for read in (find_weights, open_pretrained):
        with pytest.raises(InputError, match=rf"{name} is quantized \({said}\)"):
            read(path)


def test_a_lora_adapter_is_refused_before_anything_starts(tmp_path):
    path = save("llama", tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="contains a LoRA adapter"):
        find_weights(path)


@pytest.mark.parametrize("damage", ["cut short", "no header", "no index", "no file", "no shard"])
def test_weights_that_are_damaged_are_refused_before_anything_starts(tmp_path, damage):
    path = save("llama", tmp_path, max_shard_size="20KB" if damage in ("no index", "no shard") else "1GB")
    find_weights(path)
    file = tmp_path / "model.safetensors"
    if damage == "cut short":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "no header":
        file.write_bytes(bytes([255]) * 8 + file.read_bytes()[8:])
    elif damage == "no index":
        (tmp_path / "model.safetensors.index.json").write_text("[5]")
    elif damage == "no shard":
        min(tmp_path.glob("model-*")).unlink()
    else:
        file.unlink()
    said = r"damaged|not a valid weight|lists no weights|has no model.safetensors|lists a file that is missing"
    with pytest.raises(InputError, match="lists a file" if damage == "no shard" else said):
        find_weights(path)
    with pytest.raises(InputError):
        open_pretrained(path)
    if damage != "no index":
        with pytest.raises(InputError, match=r"damaged|no safetensors"):
            load_pretrained(path)
    with pytest.raises(InputError, match=r"init: pretrained, but model: x\.json is a JSON"):
        find_weights("x.json")
