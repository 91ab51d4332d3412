"""Tests for publish.py --gguf: llama.cpp loads the file with the same outputs and token IDs, or an error says
why not."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from pretrain.data.tokenizer import load_decoder
from pretrain.errors import InputError
from pretrain_tools.preparation.tokenizer_training import _trained
from pretrain_tools.publishing import gguf_comparison, gguf_file
from pretrain_tools.publishing.gguf_comparison import compare, comparison_note, validation_text
from pretrain_tools.publishing.gguf_file import check_convertible, write_gguf
from support.project import ROOT, run_script
from support.run_folders import write_model, write_run

gguf = pytest.importorskip("gguf", reason="pip install gguf")

DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {**DEFAULT, "rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
SHAPE = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "rope_parameters": DEFAULT, "initializer_range": 0.2,
}  # fmt: skip
LLAMA = {**SHAPE, "model_type": "llama", "rms_norm_eps": 1e-5}
QWEN3 = {**SHAPE, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True}
GPT2 = {
    "model_type": "gpt2", "vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": True,
}  # fmt: skip
MODELS = {
    "llama": {**LLAMA, "tie_word_embeddings": True},
    "llama_untied_with_biases": {**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    "llama_linear": {**LLAMA, "rope_parameters": LINEAR},
    "llama_3": {**LLAMA, "rope_parameters": LLAMA3},
    "qwen3": QWEN3,
    "gpt2": GPT2,
}
TEXT = (ROOT / "docs/learning_rate.md").read_text()


@pytest.fixture(scope="module")
def own_tokenizer(tmp_path_factory):
    """A tokenizer trained the same way as in prepare_data.py."""
    folder = tmp_path_factory.mktemp("tokenizer")
    _trained(iter([TEXT]), 500, ["<|user|>"], "gpt4").save(folder)
    return folder


@pytest.mark.parametrize(("name", "theirs"), {"gpt4": "dbrx", "qwen2": "qwen2", "gpt2": "gpt-2"}.items())
def test_llama_cpp_knows_each_pre_tokenizer(name, theirs):
    trained = json.loads(_trained(iter([TEXT]), 300, [], name).json)
    assert gguf_file.splitter_of(trained) == theirs


def test_the_text_to_compare_on_is_the_runs_own(shards, tmp_path):
    run = write_run(tmp_path / "x", data={"train": [{"shards": str(shards)}]})
    text = validation_text(run)
    assert len(text) > 500 and load_decoder(shards / "tokenizer").encode(text).ids


def write_varied(folder, tokenizer, model):
    """Writes a model whose norm weights aren't all one and whose biases aren't all zero."""
    write_model(folder, tokenizer, model, seed=1)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(2)
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            tensors[name] = tensor + 0.1 * torch.randn_like(tensor)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_the_same(tmp_path, own_tokenizer, name):
    pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python compares the logits; it builds llama.cpp")
    folder = write_varied(tmp_path / "model", own_tokenizer, MODELS[name])
    write_gguf(folder, tmp_path / "x.gguf", "fp32")
    tokens, largest = compare(folder, tmp_path / "x.gguf", "A document.<|endoftext|>" + TEXT)
    assert tokens == 512 and largest < 1e-3


def test_a_wrong_tensor_and_a_wrong_tokenizer_are_found(tmp_path, own_tokenizer, monkeypatch):
    pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python")
    folder = write_varied(tmp_path / "model", own_tokenizer, MODELS["llama"])
    with monkeypatch.context() as patch:
        patch.setattr(gguf_file, "in_order_of_llama_cpp", lambda name, tensor, config: tensor)
        with pytest.raises(InputError, match=r"logits differ from transformers' by up to"):
            comparison_note(folder, TEXT)
    monkeypatch.setitem(gguf_file.SPLITTERS, "dbrx", [])
    monkeypatch.setitem(gguf_file.SPLITTERS, "gpt-2", [gguf_file.SPLIT_PATTERN])
    with pytest.raises(InputError, match="tokens differ, starting at token"):
        comparison_note(folder, TEXT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_the_file_to_compare_is_inside_the_folder_that_is_removed_after_a_kill(tmp_path, own_tokenizer, monkeypatch):
    folder = write_model(tmp_path / "model", own_tokenizer, MODELS["llama"], seed=1)
    compared = []
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(__version__="1"))
    monkeypatch.setattr(gguf_comparison, "compare", lambda _, file, text: compared.append(file) or (1, 0.0))
    before = sorted(folder.iterdir())
    comparison_note(folder, "")
    assert folder in compared[0].parents and sorted(folder.iterdir()) == before


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", "BF16"), ("fp16", "F16"), ("fp32", "F32")])
def test_the_file_holds_every_tensor_and_token(tmp_path, own_tokenizer, dtype, kind):
    folder = write_varied(tmp_path / "model", own_tokenizer, MODELS["gpt2"])
    write_gguf(folder, tmp_path / "x.gguf", dtype, "tiny")
    read = gguf.GGUFReader(tmp_path / "x.gguf")
    tensors = {tensor.name: tensor for tensor in read.tensors}
    saved = load_file(folder / "model.safetensors")
    assert len(tensors) == len(saved)
    c_fc = tensors["blk.0.ffn_up.weight"]
    assert c_fc.tensor_type.name == kind and tensors["blk.1.ffn_up.bias"].tensor_type.name == "F32"
    expected = saved["transformer.h.0.mlp.c_fc.weight"].T.to(gguf_file.DTYPES[dtype]).float()
    found = torch.tensor(gguf.quants.dequantize(c_fc.data, c_fc.tensor_type))
    assert torch.equal(found.view(expected.shape), expected)
    tokens = read.fields["tokenizer.ggml.tokens"].contents()
    ours = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(tokens) == 512 and all(tokens[number] == token for token, number in ours.items())
    assert tokens[511] == "[PAD511]" and read.fields["tokenizer.ggml.pre"].contents() == "dbrx"
    assert read.fields["tokenizer.ggml.eos_token_id"].contents() == 0
    assert read.fields["general.name"].contents() == "tiny"
    assert read.fields["tokenizer.ggml.add_bos_token"].contents() is False
    merges = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    assert read.fields["tokenizer.ggml.merges"].contents() == [" ".join(pair) for pair in merges]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mixtral"}, "model type mixtral isn't supported (only llama, qwen3, gpt2)"),
        ({"hidden_act": "gelu"}, 'hidden_act must be "silu" for llama in llama.cpp, got "gelu"'),
        ({"residual_multiplier": 2.0}, "residual_multiplier can't be represented"),
        ({"rope_parameters": {**DEFAULT, "rope_type": "yarn"}}, "rope_type must be one of default, linear, llama3"),
        ({"model_type": "qwen3", "rope_parameters": LLAMA3}, "must be one of default, linear for qwen3 in llama.cpp"),
        (
            {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}},
            "rope_parameters contains partial_rotary_factor",
        ),
    ],
)
def test_models_that_llama_cpp_computes_differently_are_rejected(tmp_path, own_tokenizer, changes, said):
    folder = write_model(tmp_path / "model", own_tokenizer, MODELS["llama"], seed=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(InputError) as refused:
        check_convertible(folder)
    assert said in str(refused.value)


def test_added_tokens_that_llama_cpp_matches_differently_are_rejected(own_tokenizer):
    tokenizer = json.loads((own_tokenizer / "tokenizer.json").read_text())
    assert gguf_file.tokenizer_problems(tokenizer) == []
    tokenizer["added_tokens"][1]["lstrip"] = True
    (problem,) = gguf_file.tokenizer_problems(tokenizer)
    assert "the added token '<|user|>' has lstrip: true" in problem


@pytest.mark.parametrize(
    ("pre_tokenizer", "ignore_merges", "name"),
    [
        ({"type": "ByteLevel", "add_prefix_space": False}, False, "gpt-2"),
        ({"type": "ByteLevel", "add_prefix_space": True}, False, None),
        ({"type": "Whitespace"}, False, None),
        ([{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel"}], False, "smollm"),
        ([gguf_file.SPLIT_PATTERN], False, "dbrx"),
        ([gguf_file.SPLIT_PATTERN], True, "llama-bpe"),
        ([gguf_file.SPLIT_PATTERN.replace("{1,3}", "")], False, "qwen2"),
        ([r"\S+|\s+"], False, None),
    ],
)
def test_a_tokenizer_is_identified_by_its_pre_tokenizer(pre_tokenizer, ignore_merges, name):
    def step(given):
        split = {"type": "Split", "behavior": "Isolated", "invert": False}
        return {**split, "pattern": {"Regex": given}} if isinstance(given, str) else given

    if isinstance(pre_tokenizer, list):
        steps = [step(given) for given in pre_tokenizer]
        if isinstance(pre_tokenizer[0], str):
            steps.append({"type": "ByteLevel", "use_regex": False})
        pre_tokenizer = {"type": "Sequence", "pretokenizers": steps}
    tokenizer = {"pre_tokenizer": pre_tokenizer, "model": {"type": "BPE", "ignore_merges": ignore_merges}}
    assert gguf_file.splitter_of(tokenizer) == name


def test_the_command_writes_one_file_or_none(tmp_path):
    run = write_run(tmp_path / "x", model=MODELS["llama"])
    left = tmp_path / ".gguf-x.gguf"  # by a killed process
    (left / "folder").mkdir(parents=True)
    (left / "model.safetensors").write_text("cut off")
    out = run_script("publish.py", "--run", run, "--gguf", tmp_path / "x.gguf", "--checkpoint", "4")
    assert "x.gguf: step 4, bf16" in out.stdout
    assert gguf.GGUFReader(tmp_path / "x.gguf").fields["general.architecture"].contents() == "llama"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer", "x", "x.gguf"]
    wrong = ("--run", run, "--gguf", tmp_path / "x.gguf", "--repo", "me/x", "--checkpoint", "4", "--final")
    out = run_script("publish.py", *wrong, check=False)
    assert out.returncode == 2 and "Traceback" not in out.stderr
    for part in ("--repo: can't be combined with --gguf", "x.gguf: already exists", "accepts only one model"):
        assert part in out.stderr
