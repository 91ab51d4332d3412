"""Exported folders must be complete and loadable without this project, and a wrong export must be detected."""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from pretrain.checkpoint.export import export_card
from pretrain.checkpoint.export_check import TrainingLosses, losses_of, verify_export
from pretrain.config import WindowSpec
from pretrain.data.manifest import Manifest, Shard
from pretrain.data.shards import ShardReader
from pretrain.files import commit, damage
from pretrain.model.model_config import load_model_config
from support.project import ROOT
from support.run_folders import write_model, write_tokenizer
from support.tiny_models import TINY_LLAMA

TINY_GPT2 = {"model_type": "gpt2", "vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
TINY_QWEN3 = {**TINY_LLAMA, "model_type": "qwen3", "head_dim": 16}
TINY_DEEPONE = {
    "model_type": "deepone", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
MODELS = {"llama": TINY_LLAMA, "qwen3": TINY_QWEN3, "gpt2": TINY_GPT2, "deepone": TINY_DEEPONE}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tiny")


@pytest.fixture
def reader(tmp_path):
    """Returns a validation split of 1,000 IDs in documents of 50."""
    ids = np.random.default_rng(0).integers(1, 300, 1000).astype("<u2")
    ids[49::50] = 0
    ids.tofile(tmp_path / "validation-00000.bin")
    shard = {"file": "validation-00000.bin", "split": "validation", "tokens": 1000, "documents": 20}
    shards = (Shard(**shard, text_bytes=4000, sha256=""),)
    return ShardReader(Manifest(tmp_path, "tiny", "", 300, 0, "uint16", shards, ""), "validation")


@pytest.fixture
def exported(tmp_path, tokenizer):
    """Returns (bf16 folder, fp32 checkpoint) with the same weights."""
    checkpoint = write_model(tmp_path / "step-00000008", tokenizer, TINY_LLAMA, seed=1, optimizer__safetensors="x")
    final = write_model(tmp_path / "final", tokenizer, TINY_LLAMA, seed=1, dtype=torch.bfloat16)
    return final, checkpoint


def change(folder, change_weights=None, **config):
    """Changes a folder and writes a new manifest, to simulate an export bug rather than disk damage."""
    if change_weights:
        weights = load_file(folder / "model.safetensors")
        change_weights(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text()) | config
        (folder / name).write_text(json.dumps(values))
    (folder / "MANIFEST.json").unlink()
    unfinished = folder.with_name(".again")
    folder.rename(unfinished)
    commit(unfinished, folder, {})


def check(exported, **settings):
    return verify_export(*exported, dtype="bf16", precision="fp32", **settings)


@pytest.mark.parametrize("name", MODELS)
def test_a_correct_export_is_verified(tmp_path, tokenizer, name):
    checkpoint = write_model(tmp_path / "step-00000008", tokenizer, MODELS[name], seed=1)
    final = write_model(tmp_path / "final", tokenizer, MODELS[name], seed=1, dtype=torch.bfloat16)
    result = check((final, checkpoint))
    assert not result.problems
    # bf16 has 8 bits of precision, so each weight has a relative error of 2^-9.
    assert 0 < result.logit_difference < 0.03
    words = result.in_words()
    assert "verified: logits identical to the last checkpoint's" in words and "not compared: the loss" in words


def test_an_export_in_fp32_has_identical_logits(exported):
    _, checkpoint = exported
    result = verify_export(checkpoint, checkpoint, dtype="fp32", precision="fp32")
    assert not result.problems and result.logit_difference == 0


def test_the_loss_of_the_training_model_is_compared(exported, reader):
    model = AutoModelForCausalLM.from_pretrained(exported[1], dtype=torch.float32)
    readers, window = {"docs": reader}, WindowSpec(64, True)
    trained = losses_of(model, readers, window)
    result = check(exported, trained=TrainingLosses(trained, readers, window))
    assert not result.problems
    assert result.loss_difference < 5e-3
    assert "one document at a time" in result.in_words()

    # An error in both the checkpoint and the export can only be detected by comparison with the training model.
    wrong = check(exported, trained=TrainingLosses({"docs": trained["docs"] - 0.2}, readers, window))
    assert "rounding explains at most 0.05" in wrong.in_words() and "does NOT match" in wrong.in_words()
    assert check(exported, trained=TrainingLosses({"docs": float("nan")}, readers, window)).problems
    unmasked = check(exported, trained=TrainingLosses(trained, readers, WindowSpec(64, False)))
    assert unmasked.loss_difference != result.loss_difference


def swap_two_layers(weights):
    first, second = (f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1))
    weights[first], weights[second] = weights[second].clone(), weights[first].clone()


def lose_a_tensor(weights):
    del weights["model.layers.1.mlp.up_proj.weight"]


def change_one_number(weights):
    weights["model.norm.weight"][3] += 0.25


def add_a_tensor(weights):
    weights["model.layers.2.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"].clone()


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (swap_two_layers, "logits differ by up to"),
        (change_one_number, "logits differ by up to"),
        (lose_a_tensor, "reports 1 missing weights, starting with model.layers.1.mlp.up_proj.weight"),
        (add_a_tensor, "reports 1 unexpected weights, starting with model.layers.2"),
    ],
)
def test_wrong_weights_are_detected(exported, mistake, words):
    change(exported[0], mistake)
    result = check(exported)
    assert any(words in problem for problem in result.problems), result.problems


def test_wrong_ids_are_detected(exported):
    change(exported[0], eos_token_id=5)
    assert any("different end-of-text IDs" in problem for problem in check(exported).problems)


def test_a_damaged_folder_is_not_loaded(exported):
    (exported[0] / "config.json").write_text("{}")
    assert "damaged: config.json has 2 bytes" in check(exported).in_words()


def test_a_missing_checkpoint_is_reported(exported):
    shutil.rmtree(exported[1])
    result = check(exported)
    assert not result.problems and "doesn't exist" in result.in_words()


def test_too_little_memory_is_reported_and_harmless(exported, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    assert "GB of memory, but only" in check(exported).in_words()


def test_long_windows_that_do_not_fit_in_memory_are_not_compared(exported, reader, monkeypatch):
    """Eager attention needs memory for (heads, length, length) scores, so the system would kill the run."""
    trained = TrainingLosses({"docs": 1.0}, {"docs": reader}, WindowSpec(512, True))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=10_000_000))
    result = check(exported, trained=trained)
    assert result.loss_difference is None and result.problems == []
    assert "the loss (sequences of 512 tokens need 0.0 GB of memory" in result.in_words()


def test_a_failing_model_card_does_not_affect_the_model(tmp_path):
    (tmp_path / "config.yaml").write_text("data: 3\n")
    assert "model card could not be written" in export_card(tmp_path, tmp_path)
    assert "could not be written" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("name", MODELS)
def test_the_folder_has_everything_and_works_in_a_pipeline(tmp_path, tokenizer, name):
    folder = write_model(tmp_path / "final", tokenizer, MODELS[name], seed=1, dtype=torch.bfloat16)
    model, its_tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    ends = {its_tokenizer.eos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id}
    assert ends == {0} and its_tokenizer.decode([0]) == "<|endoftext|>"
    assert model.generation_config.pad_token_id == 0 and model.config.pad_token_id is None
    stored = load_file(folder / "model.safetensors")
    tied = model.config.tie_word_embeddings
    assert ("lm_head.weight" in stored) is not tied
    if tied:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    generate = pipeline("text-generation", model=model, tokenizer=its_tokenizer)
    assert generate("def ", max_new_tokens=3)[0]["generated_text"].startswith("def ")


def test_our_architecture_loads_without_this_project(tmp_path, tokenizer):
    folder = write_model(tmp_path / "final", tokenizer, TINY_DEEPONE, seed=1)
    ids_BT = torch.arange(12).view(1, 12)
    with torch.no_grad():
        ours_BTV = AutoModelForCausalLM.from_pretrained(folder)(ids_BT).logits
    program = (
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)\n"
        "assert not any(name.split('.')[0] == 'pretrain' for name in sys.modules), 'the project was imported'\n"
        "assert type(model).__module__.startswith('transformers_modules')\n"
        "from safetensors.torch import save_file\n"
        "logits = model(torch.arange(12).view(1, 12)).logits.detach()\n"
        "save_file({'logits': logits.contiguous()}, 'logits.safetensors')\n"
    )
    # With -P, the current folder isn't searched for modules.
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    subprocess.run([sys.executable, "-P", "-c", program], cwd=tmp_path, env=environment, check=True)
    # The code and the machine are the same, but threads may change the summation order.
    assert torch.allclose(load_file(tmp_path / "logits.safetensors")["logits"], ours_BTV, atol=1e-5)
    assert not (ROOT / "logits.safetensors").exists()


def test_gpt2_has_both_names_of_its_context_length(tmp_path, tokenizer):
    """llama.cpp's converter needs n_ctx, which transformers no longer writes."""
    folder = write_model(tmp_path / "final", tokenizer, TINY_GPT2, seed=1)
    assert json.loads((folder / "config.json").read_text())["n_ctx"] == 128
    assert load_model_config(str(folder)).n_positions == 128


def test_a_models_folder_as_tokenizer_gives_only_its_tokenizer(tmp_path, tokenizer):
    """As with `tokenizer: gpt2` for foreign shards, if the Hub's cache also contains the model."""
    other = write_model(tmp_path / "other", tokenizer, TINY_GPT2, seed=2)
    (other / "original").mkdir()
    folder = write_model(tmp_path / "step-00000008", other, TINY_LLAMA, seed=1)
    assert not damage(folder)
    assert AutoModelForCausalLM.from_pretrained(folder).config.model_type == "llama"
    assert AutoTokenizer.from_pretrained(folder).decode([0]) == "<|endoftext|>"
