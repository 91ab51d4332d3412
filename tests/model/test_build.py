"""Tests for building, loading and saving models with a few thousand parameters, and for counting parameters."""

import hashlib
import json
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaPreTrainedModel

from pretrain.errors import InputError
from pretrain.model.build import (
    InitialWeights,
    active_parameters,
    build_meta_model,
    build_model,
    check_vocabulary,
    copy_model,
    count_parameters,
    embedding_parameter_names,
    initialize_module,
    matrix_parameters,
    save_model_metadata,
    set_end_of_document,
    units_of,
)
from pretrain.model.compile import layers_of
from pretrain.model.model_config import load_model_config
from pretrain.model.own_code import register_all
from pretrain.model.pretrained import load_pretrained
from support.tiny_models import LLAMA, TINY

register_all()


@pytest.fixture(params=TINY)
def config(request):
    return AutoConfig.for_model(**TINY[request.param])


def tiny(kind: str):
    return AutoConfig.for_model(**TINY[kind])


def write_json(tmp_path, keys) -> str:
    path = tmp_path / "tiny.json"
    path.write_text(keys if isinstance(keys, str) else json.dumps(keys))
    return str(path)


def problems_of(tmp_path, keys) -> list[str]:
    with pytest.raises(InputError) as caught:
        load_model_config(write_json(tmp_path, keys))
    return caught.value.problems


def digest(model) -> str:
    state = hashlib.sha256()
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        state.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return state.hexdigest()


# --- counts and shapes


def test_counts_by_hand():
    attention, feed_forward, norms = 2 * 32 * 32 + 2 * 32 * 16, 3 * 32 * 64, 2 * 32
    body = 3 * (attention + feed_forward + norms) + 32
    assert count_parameters(tiny("llama")) == body + 2 * 128 * 32
    assert matrix_parameters(tiny("llama")) == body + 128 * 32
    assert count_parameters(tiny("llama_tied")) == body + 128 * 32
    assert matrix_parameters(tiny("llama_tied")) == body + 128 * 32
    # GPT-2's learned positions are a lookup table that isn't shared with the head.
    assert count_parameters(tiny("gpt2")) - matrix_parameters(tiny("gpt2")) == 64 * 32


def test_a_changed_config_is_counted_again():
    config = tiny("llama")
    before = count_parameters(config), matrix_parameters(config), active_parameters(config)
    config.num_hidden_layers += 1
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
    after = count_parameters(config), matrix_parameters(config), active_parameters(config)
    assert [new - old for old, new in zip(before, after, strict=True)] == [layer] * 3


def test_shapes_name_a_tied_pair_once():
    shapes, tied = (
        {name: tuple(parameter.shape) for name, parameter in build_meta_model(tiny(name)).named_parameters()}
        for name in ("llama", "llama_tied")
    )
    assert shapes["lm_head.weight"] == (128, 32)
    assert "lm_head.weight" not in tied and tied["model.embed_tokens.weight"] == (128, 32)


def test_embedding_names_follow_the_owner_and_include_a_tied_head():
    assert embedding_parameter_names(build_meta_model(tiny("llama"))) == {"model.embed_tokens.weight"}
    tied = embedding_parameter_names(build_meta_model(tiny("llama_tied")))
    assert tied == {"model.embed_tokens.weight", "lm_head.weight"}
    gpt2 = embedding_parameter_names(build_meta_model(tiny("gpt2")))
    assert gpt2 == {"transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"}


# --- initial weights


def test_initial_weights_depend_only_on_config_and_seed(config):
    torch.manual_seed(1)
    first = digest(build_model(config, seed=7))
    torch.manual_seed(2)
    torch.rand(5)
    assert digest(build_model(config, seed=7)) == first
    assert digest(build_model(config, seed=8)) != first


def test_building_leaves_the_global_random_state_as_it_was(config):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    build_model(config, seed=7)
    assert torch.equal(torch.rand(4), expected)


def test_a_built_model_is_fp32_tied_and_finite_and_runs(config):
    model = build_model(config, seed=7)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == config.tie_word_embeddings
    logits = model(torch.arange(20)[None]).logits
    # An untrained model predicts almost uniformly, so its loss is close to ln(vocabulary).
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], torch.arange(1, 20))
    assert abs(loss.item() - math.log(128)) < 0.5


def test_initial_weights_and_buffers_have_the_librarys_distribution(config):
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config)
    ours = build_model(config, seed=0)
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        # The sample std of n normal values is within 5 / sqrt(2 n) of the true std, for each of the two models.
        tolerance = 10 / math.sqrt(2 * parameter.numel()) * expected[name].std().item() + 1e-9
        assert abs(parameter.std().item() - expected[name].std().item()) <= tolerance, name
        assert abs(parameter.mean().item() - expected[name].mean().item()) <= tolerance, name
    for name, buffer in theirs.named_buffers():
        assert torch.equal(dict(ours.named_buffers())[name], buffer), name


def test_gpt2_residual_projections_have_the_scaled_spread():
    config = AutoConfig.for_model(**{**TINY["gpt2"], "n_embd": 128, "n_layer": 8})
    model = build_model(config, seed=0)
    for block in model.transformer.h:
        for projection in (block.attn.c_proj, block.mlp.c_proj):
            # With at least 16,384 samples, the sample std is within 2.8% (5 sigma) of the true std.
            assert projection.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.03)
        assert block.attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.03)


def test_modules_do_not_share_their_random_numbers(config):
    modules = build_model(config, seed=7).modules()
    layers = next(module for module in modules if isinstance(module, torch.nn.ModuleList))
    first, second = (dict(layer.named_parameters()) for layer in layers[:2])
    matrices = [name for name in first if first[name].dim() == 2]
    assert matrices
    assert not [name for name in matrices if torch.equal(first[name], second[name])]


def test_units_made_one_at_a_time_are_those_of_the_whole_model(config):
    whole = build_model(config, seed=7)
    alone = build_meta_model(config)
    base = alone.base_model_prefix
    blocks = next(name for name, module in alone.named_modules() if isinstance(module, torch.nn.ModuleList))
    units = [f"{blocks}.{index}" for index in range(config.num_hidden_layers)]
    units += [f"{base}.{name}" for name, _ in alone.base_model.named_children() if f"{base}.{name}" != blocks]
    units.append("lm_head")
    for unit in reversed(units):
        initialize_module(alone, unit, seed=7)
        assert not [name for name, value in alone.get_submodule(unit).named_parameters() if value.is_meta] or (
            unit == "lm_head" and config.tie_word_embeddings
        )
    alone.tie_weights()
    assert digest(alone) == digest(whole)


@pytest.mark.parametrize("model_type", ["llama", "ctrl"])  # ctrl doesn't name its layer class
def test_units_together_are_the_whole_model(model_type):
    model = build_meta_model(AutoConfig.for_model(model_type))
    filled = {id(parameter) for unit in units_of(model) for parameter in model.get_submodule(unit).parameters()}
    assert filled == {id(parameter) for parameter in model.parameters()} != set()


def test_a_model_that_cannot_be_built_in_units_is_rejected():
    with pytest.raises(InputError, match=r"model: GPTBigCodeForCausalLM has bias outside its layers, in transformer"):
        units_of(build_meta_model(AutoConfig.for_model("gpt_bigcode")))


def test_weights_from_a_checkpoint_are_not_initialized_but_buffers_are(config, monkeypatch):
    whole = build_model(config, seed=7)
    drawn = []
    monkeypatch.setitem(init.TORCH_INIT_FUNCTIONS, "normal_", lambda tensor, **_: drawn.append(tensor))
    resumed = build_meta_model(config)
    InitialWeights(seed=7, are_loaded=True).fill(resumed, "")
    resumed.tie_weights()
    assert not drawn
    assert all(parameter.isnan().all() for parameter in resumed.parameters())
    buffers = dict(whole.named_buffers())
    assert buffers.keys() == dict(resumed.named_buffers()).keys()
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in resumed.named_buffers())


def test_a_model_whose_initializer_reads_its_weights_is_copied_and_resumed(monkeypatch):
    def normalized(model, module, initialize=LlamaPreTrainedModel._init_weights):
        initialize(model, module)
        if isinstance(module, torch.nn.Linear):
            module.weight.div_(torch.linalg.matrix_norm(module.weight, 2))

    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", normalized)
    whole = build_model(tiny("llama"), seed=7)
    assert digest(copy_model(whole, attention="sdpa")) == digest(whole)
    resumed = build_meta_model(tiny("llama"))
    InitialWeights(seed=7, are_loaded=True).fill(resumed, "")
    assert all(parameter.isnan().all() for parameter in resumed.parameters())


def test_existing_weights_are_initialized_in_place_to_the_same_values(config):
    whole = build_model(config, seed=7)
    existing = AutoModelForCausalLM.from_config(config)
    initialize_module(existing, "", seed=7)
    assert digest(existing) == digest(whole)


def test_an_architecture_that_forgets_a_parameter_is_refused():
    model = build_meta_model(tiny("llama"))
    model.model.norm.register_parameter("scale", torch.nn.Parameter(torch.empty(4, device="meta")))
    with pytest.raises(InputError, match=r"does not initialize model\.norm\.scale; initialize them in its _ini"):
        initialize_module(model, "model.norm", seed=7)


def test_a_model_that_shares_single_parameters_is_refused(monkeypatch):
    def share(self, config):
        create(self, config)
        self.lm_head.weight = self.model.embed_tokens.weight

    create = LlamaForCausalLM.__init__
    monkeypatch.setattr(LlamaForCausalLM, "__init__", share)
    config = tiny("llama")
    config.tie_word_embeddings = False
    with pytest.raises(InputError, match=r"llama shares parameters .*: lm_head\.weight; share the whole module"):
        build_model(config, seed=0)
    config.tie_word_embeddings = True
    assert build_model(config, seed=0).lm_head.weight is not None


def test_an_unknown_attention_is_rejected_with_the_alternatives():
    with pytest.raises(InputError, match=r"attention fast cannot be used with this model here.*only possible.*eager"):
        build_model(tiny("llama"), seed=0, attention="fast")


def test_the_requested_attention_is_used():
    assert build_model(tiny("llama"), seed=0, attention="eager").config._attn_implementation == "eager"
    assert build_model(tiny("llama"), seed=0).config._attn_implementation == "sdpa"


# --- the end-of-document ID


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_residual_stream_is_bf16_only_under_bf16_autocast(kind):
    """GPT-2 adds two embeddings, which must both be bf16."""
    model = build_model(tiny(kind), seed=0).eval()
    seen = []
    for layer in layers_of(model):
        layer.register_forward_pre_hook(lambda layer, args, kwargs: seen.append(args[0].dtype), with_kwargs=True)
    ids = torch.arange(1, 9)[None]
    plain = model.base_model(ids, use_cache=False).last_hidden_state
    with torch.autocast("cpu", torch.float16):
        model.base_model(ids, use_cache=False)
    assert set(seen) == {torch.float32}, "the residual stream must stay fp32 under fp16 autocast"
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model.base_model(ids, use_cache=False).last_hidden_state
    assert set(seen) == {torch.bfloat16}
    torch.testing.assert_close(rounded.float(), plain, rtol=0, atol=0.1)
    rounded.sum().backward()
    weight = model.get_input_embeddings().weight
    assert weight.dtype == weight.grad.dtype == torch.float32


def test_the_end_of_document_row_gets_a_gradient(config):
    set_end_of_document(config, 5)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (5, 5, None)
    config.pad_token_id = 5  # as set by some configs on the Hub
    config.tie_word_embeddings = False
    model = build_model(config, seed=7)
    model(torch.tensor([[1, 5, 2, 3]])).logits.sum().backward()
    embedding = model.get_input_embeddings().weight
    assert embedding.grad[5].abs().sum() > 0
    assert embedding[5].abs().sum() > 0


def test_a_vocabulary_that_does_not_fit_is_named_with_the_remedy():
    assert check_vocabulary(tiny("llama"), 128) == []
    assert check_vocabulary(tiny("llama"), 50257) == [
        "the data's tokenizer has 50,257 IDs, but the model's vocab_size is 128; use --model.vocab_size auto, which "
        "sets it to 50,304, or prepare the data with a tokenizer that has fewer IDs"
    ]
    (pretrained,) = check_vocabulary(tiny("llama"), 50257, has_weights=True)
    assert "vocab_size is 128; prepare the data with the model's own tokenizer, or, if the data's tok" in pretrained


# --- saving and loading


@pytest.mark.parametrize("kind", TINY)
def test_metadata_and_weights_make_a_loadable_folder(tmp_path, kind):
    config = tiny(kind)
    set_end_of_document(config, 5)
    model = build_model(config, seed=7)
    save_model_metadata(model, tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"config.json", "generation_config.json"} | ({"deepone.py"} if kind == "deepone" else set())
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(model).__name__]
    generation = GenerationConfig.from_pretrained(tmp_path)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (5, 5, 5)
    model.save_pretrained(tmp_path / "weights")
    (tmp_path / "weights" / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert digest(load_pretrained(str(tmp_path))) == digest(model)


def test_pretrained_weights_become_fp32_masters_without_a_padding_row(tmp_path):
    config = tiny("llama")
    config.pad_token_id = config.eos_token_id = 5
    build_model(config, seed=7).to(torch.bfloat16).save_pretrained(tmp_path)
    model = load_pretrained(str(tmp_path))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.model.embed_tokens.padding_idx is None


def test_pretrained_refuses_what_has_no_weights(tmp_path):
    save_model_metadata(build_meta_model(tiny("llama")), tmp_path / "folder")
    with pytest.raises(InputError, match=r"cannot load safetensors weights"):
        load_pretrained(str(tmp_path / "folder"))


def test_pretrained_refuses_a_checkpoint_with_missing_weights(tmp_path):
    build_model(tiny("llama"), seed=7).save_pretrained(tmp_path)
    keys = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**keys, "num_hidden_layers": 4}))
    with pytest.raises(InputError, match=r"9 weights are missing.*incomplete or belongs to a different configuration"):
        load_pretrained(str(tmp_path))


def test_pretrained_never_reads_a_pickle(tmp_path):
    model = build_model(tiny("llama"), seed=7)
    save_model_metadata(model, tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"cannot load safetensors weights"):
        load_pretrained(str(tmp_path))


# --- reading configs


def test_a_good_json_is_read_with_either_spelling_of_rope(tmp_path):
    new = load_model_config(write_json(tmp_path, {**LLAMA, "rope_parameters": {"rope_theta": 500.0}}))
    old = load_model_config(write_json(tmp_path, {**LLAMA, "rope_theta": 500.0}))
    assert new.rope_parameters == old.rope_parameters == {"rope_theta": 500.0, "rope_type": "default"}


def test_a_saved_config_does_not_claim_quantized_weights(tmp_path):
    model = build_meta_model(tiny("llama"))
    model.config.quantization_config = {"quant_method": "fp8"}
    save_model_metadata(model, tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert model.config.quantization_config, "the run's own config must not change"


def test_a_config_that_asks_for_attention_weights_can_be_saved(tmp_path):
    config = tiny("llama")
    config.output_attentions = True
    save_model_metadata(build_meta_model(config, attention="groundwork_sdpa"), tmp_path)
    assert not load_model_config(str(tmp_path)).output_attentions


def test_a_saved_config_is_read_again(tmp_path, config):
    save_model_metadata(build_meta_model(config), tmp_path)
    assert str(tmp_path) not in (tmp_path / "config.json").read_text()
    read_as_folder = load_model_config(str(tmp_path)).to_dict()
    read_as_json = load_model_config(str(tmp_path / "config.json")).to_dict()
    assert {**read_as_folder, "_name_or_path": ""} == read_as_json
    original = {**config.to_dict(), "_name_or_path": ""}
    written_on_saving = ("architectures", "auto_map", "transformers_version", "dtype")
    assert {key for key in original if original[key] != read_as_json[key]} <= set(written_on_saving)


def test_standard_names_are_accepted_where_a_class_has_its_own(tmp_path):
    keys = {"model_type": "gpt2", "vocab_size": 128, "hidden_size": 36, "num_attention_heads": 4, "n_layer": 1}
    assert load_model_config(write_json(tmp_path, keys)).n_embd == 36


def test_a_misspelt_key_is_refused_with_the_right_one(tmp_path):
    (problem,) = problems_of(tmp_path, {**LLAMA, "hiden_size": 512})
    assert problem.endswith("tiny.json: hiden_size is not a key of LlamaConfig; did you mean hidden_size?")


def test_all_problems_come_at_once(tmp_path):
    keys = {
        **LLAMA,
        "num_layers": 2,
        "vocab_size": "32k",
        "tie_word_embeddings": "yes",
        "num_key_value_heads": 3,
        "rope_parameters": {"rope_tehta": 1.0},
    }
    problems = [problem.split("tiny.json: ")[1] for problem in problems_of(tmp_path, keys)]
    assert problems == [
        "num_layers is not a key of LlamaConfig; did you mean num_hidden_layers?",
        "vocab_size: must be int, got '32k' (str)",
        "tie_word_embeddings: must be bool, got 'yes' (str)",
        "rope_parameters.rope_tehta is not a rotary parameter; did you mean rope_theta?",
        "num_key_value_heads 3 does not divide num_attention_heads 4; allowed: 1, 2, 4",
    ]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"hidden_size": 34}, "hidden_size 34 is not a multiple of num_attention_heads 4; nearest: 32 or 36"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        ({"hidden_size": 36}, "head_dim must be even for rotary positions, got 9"),
        ({"rope_theta": "1e4"}, "rope_theta: must be a number, got '1e4'"),
        ({"vocab_size": None}, "vocab_size: must be int, got None (NoneType)"),
        ({"vocab_size": True}, "vocab_size: must be int, got True (bool)"),
        ({"model_type": "lama"}, "unknown model_type 'lama'; did you mean llama?"),
        ({"model_type": "zzzz"}, "unknown model_type 'zzzz'; for example llama, qwen3, gpt2, deepone"),
        ({"model_type": None}, "model_type is missing; set it, for example to llama, qwen3, gpt2, deepone"),
        ({"model_type": "vit"}, "model_type 'vit' has no causal language model"),
    ],
)
def test_an_impossible_value_is_refused(tmp_path, change, expected):
    (problem,) = problems_of(tmp_path, {**LLAMA, **change})
    assert expected in problem


def test_impossible_shapes_are_named_by_the_keys_of_the_class(tmp_path):
    (problem,) = problems_of(tmp_path, {**TINY["gpt2"], "n_embd": 33})
    assert problem.endswith("n_embd 33 is not a multiple of n_head 4; nearest: 32 or 36")


def test_errors_of_the_config_class_are_input_errors(tmp_path):
    (problem,) = problems_of(tmp_path, {**LLAMA, "hidden_size": 34, "head_dim": 8})
    assert "The hidden size (34) is not a multiple of the number of attention heads (4)" in problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not a valid JSON file: Expecting property name"),
        ("[1]", "must be a JSON object, got list"),
        ('{"model_type": "llama", "vocab_size": 1, "vocab_size": 2}', "vocab_size occurs more than once"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, text, expected):
    (problem,) = problems_of(tmp_path, text)
    assert expected in problem


def test_a_missing_file_or_folder_is_refused_with_its_neighbour(tmp_path):
    write_json(tmp_path, LLAMA)
    with pytest.raises(InputError, match=r"tinny\.json: no such file; did you mean .*tiny\.json\?"):
        load_model_config(str(tmp_path / "tinny.json"))
    with pytest.raises(InputError, match=r"no such folder; use a \.json file, a model folder or a Hub ID"):
        load_model_config(str(tmp_path / "nothing"))
    with pytest.raises(InputError, match=r"llama_30m: no such folder; did you mean model_configs/llama_30m\.json\?"):
        load_model_config("llama_30m")
    with pytest.raises(InputError, match=r"has no config\.json, so it is not a model folder"):
        load_model_config(str(tmp_path))


def test_a_folder_with_custom_code_is_rejected(tmp_path):
    keys = {"model_type": "foreign", "auto_map": {"AutoConfig": "foreign.ForeignConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    (tmp_path / "foreign.py").write_text("raise SystemExit('executed')")
    with pytest.raises(InputError, match=r"has custom code.*allow it with --trust_remote_code"):
        load_model_config(str(tmp_path))
