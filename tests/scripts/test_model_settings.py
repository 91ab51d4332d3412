"""Tests for model settings in a recipe: they are recorded, restored, and rejected if they differ from the
checkpoint's."""

import json
import re

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from support.project import events, losses, run_script

CHANGES = ("--model.num_hidden_layers", "1", "--model.vocab_size", "auto")


def train(recipe, *overrides, **settings):
    return run_script("train.py", "--config", recipe, *overrides, **settings)


@pytest.fixture
def shorter(recipe, tmp_path):
    """A recipe whose model config has vocab_size 1112, 600 more than the data needs."""
    path = tmp_path / "tiny_llama.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 1112}))
    return recipe


def test_changes_are_recorded_resumed_and_exported(shorter, tmp_path):
    run = tmp_path / "run"
    out = train(shorter, *CHANGES, "--budget.steps", "4").stdout
    assert "tiny_llama.json with num_hidden_layers 1 (llama), " in out
    assert re.search(r"^vocabulary +512 IDs$", out, re.MULTILINE)
    recorded = yaml.safe_load((run / "config.yaml").read_text())["model"]
    assert recorded == {"config": str(tmp_path / "tiny_llama.json"), "num_hidden_layers": 1, "vocab_size": "auto"}
    for folder in (run / "checkpoints/step-00000004", run / "final"):
        config = AutoConfig.from_pretrained(folder)
        assert (config.num_hidden_layers, config.vocab_size) == (1, 512)
    assert AutoModelForCausalLM.from_pretrained(run / "final").get_input_embeddings().weight.shape == (512, 64)

    train(shorter, *CHANGES, "--budget.steps", "8", "--optim.schedule", "constant")
    assert [event["step"] for event in events(run, "resume")] == [4]
    train(run / "config.yaml", "--budget.steps", "12", "--optim.schedule", "constant")
    assert sorted(losses(run)) == list(range(1, 13)), "the recorded config must work as a recipe"

    refused = train(shorter, check=False)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "was trained with num_hidden_layers 1, now 2, vocab_size 512, now 1112" in refused.stderr
    # Without this check, a two-layer model would load one layer and leave the second at its initial values.
    named = train(shorter, "--model.num_hidden_layers", "2", "--model.vocab_size", "auto", check=False)
    assert named.returncode == 2 and "Traceback" not in named.stderr
    assert "num_hidden_layers 1, now 2, so the checkpoint's weights do not match the model" in named.stderr


def test_a_key_without_shape_may_change_when_it_is_named(recipe, tmp_path):
    train(recipe, "--budget.steps", "4")
    text = recipe.read_text()
    model = str(tmp_path / "tiny_llama.json")
    recipe.write_text(text.replace(model, f"{{config: {model}, attention_dropout: 0.1}}"))
    refused = train(recipe, check=False)
    assert refused.returncode == 2
    assert "was trained with attention_dropout 0.0, now 0.1; restore it, use another --output" in refused.stderr
    assert train(recipe, "--model.attention_dropout", "0.1").returncode == 0


def test_mistakes_are_reported_together_with_the_nearest_name(recipe):
    refused = train(recipe, "--model.num_hiden_layers", "8", "--model.hidden_size", "many", "--check", check=False)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "num_hiden_layers is not a key of LlamaConfig; did you mean num_hidden_layers?" in refused.stderr
    assert "hidden_size: must be int, got 'many' (str)" in refused.stderr


def test_pretrained_weights_keep_their_shapes(recipe, tmp_path):
    train(recipe, "--budget.steps", "2")
    start = ("--model", tmp_path / "run/final", "--init", "pretrained", "--output", tmp_path / "more", "--check")
    refused = train(recipe, *start, "--model.num_hidden_layers", "1", check=False)
    assert refused.returncode == 2
    assert "tensors differ, starting with model.layers.1" in refused.stderr and "init: scratch" in refused.stderr
    assert train(recipe, *start, "--model.max_position_embeddings", "256").returncode == 0


def test_a_pretrained_model_takes_new_tokens(recipe, text_files, tokenizer, tmp_path):
    train(recipe, "--budget.steps", "2")
    text = ("--input", f"{text_files}/*.py", "--validation_fraction", "0.2")
    run_script(
        "prepare_data.py", *text, "--tokenizer", tokenizer, "--train_tokenizer", 600, "--output", tmp_path / "new"
    )
    run_script(
        "prepare_data.py", *text, "--train_tokenizer", 600, "--pre_tokenizer", "gpt2", "--output", tmp_path / "other"
    )
    run_script(
        "prepare_data.py", *text, "--train_tokenizer", 512, "--pre_tokenizer", "gpt2", "--output", tmp_path / "as_many"
    )
    for name in ("new", "other", "as_many"):
        run_script("prepare_data.py", *text, "--tokenizer", tmp_path / name, "--output", tmp_path / f"{name}_shards")
    start = ("--model", tmp_path / "run/final", "--init", "pretrained", "--output", tmp_path / "more")
    start += ("--data.train", f"[{{shards: {tmp_path / 'new_shards'}}}]", "--budget.steps", "2")
    refused = train(recipe, *start, "--data.train", f"[{{shards: {tmp_path / 'as_many_shards'}}}]", check=False)
    assert refused.returncode == 2 and not (tmp_path / "more").exists()
    assert "is not the model's final: " in refused.stderr and " of 512 IDs map to different tokens" in refused.stderr
    refused = train(recipe, *start, "--check", check=False).stderr
    assert "has 600 IDs, but the model's vocab_size is 512" in refused and "use --model.vocab_size auto" in refused
    auto = ("--model.vocab_size", "auto")
    refused = train(recipe, *start, *auto, "--data.train", f"[{{shards: {tmp_path / 'other_shards'}}}]", check=False)
    assert refused.returncode == 2 and "is not an extension of the model's (512): " in refused.stderr
    said = train(recipe, *start, *auto, "--optim.learning_rate", "1e-9").stderr
    assert "Initializing 88 new tokens, each as the mean of the old tokens it replaces" in said
    # New rows must equal the mean of their parts, up to the effect of two steps with a tiny learning rate.
    old, new = (load_file(tmp_path / name / "final/model.safetensors") for name in ("run", "more"))
    name = next(name for name in old if name.endswith("embed_tokens.weight"))
    before = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    after = Tokenizer.from_file(str(tmp_path / "more/final/tokenizer.json"))
    assert after.get_vocab_size() == 600 and new[name].shape[0] == 640
    for number in (512, 555, 599):
        parts = [part.id for part in before.model.tokenize(after.id_to_token(number))]
        expected = old[name][parts].float().mean(dim=0)
        assert len(parts) > 1
        torch.testing.assert_close(new[name][number].float(), expected, atol=2e-3, rtol=1e-2)


def test_plan_and_compare_use_them(shorter, tmp_path):
    plan = run_script("plan.py", "--config", shorter, "--json", *CHANGES)
    planned = json.loads(plan.stdout)
    for name, changes in (("one", CHANGES), ("two", ())):
        train(shorter, *changes, "--budget.steps", "3", "--output", tmp_path / name)
    (start,) = events(tmp_path / "one", "start")
    assert planned["parameters"] == start["parameters"]
    compared = run_script("runs.py", "compare", tmp_path / "one", tmp_path / "two").stdout
    rows = {line.split()[0]: line.split()[1:] for line in compared.splitlines() if line.startswith("model.")}
    assert rows["model.num_hidden_layers"] == ["1", "2"] and rows["model.vocab_size"] == ["512", "1112"]
