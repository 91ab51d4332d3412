"""Tests for --check: warnings with figures, the estimated time, and the start command."""

import re
from collections import namedtuple

import pytest
import torch

from pretrain.recipe import read_run_config
from pretrain.training.run_plan import derive
from pretrain.training.validation import open_validation
from pretrain_tools.planning import judgement as judgement_module
from pretrain_tools.planning.footprints import largest_footprint
from pretrain_tools.planning.judgement import (
    few_steps,
    heavy_vocabulary,
    judgement,
    launch_command,
    memory_shortage,
    repeated_data,
    small_disk,
)
from pretrain_tools.planning.layouts import layout
from pretrain_tools.planning.memory import PlannedRun
from pretrain_tools.planning.step_time import default_mfu
from support.project import run_script

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def read(recipe):
    """Returns a function that reads the recipe with changed settings and returns (config, run)."""

    def read(**settings):
        config = read_run_config(recipe, [(name.replace("__", "."), str(value)) for name, value in settings.items()])
        return config, derive(config, ranks=1)

    return read


def test_a_text_that_is_read_again_and_again(read):
    _, run = read(budget__tokens="20M")
    (reader,) = run.batches.readers.values()
    epochs = run.total_tokens / (reader.tokens // 64 * 64)
    message = repeated_data(run)
    assert f"{epochs:,.1f} times, because the budget is 20M tokens" in message
    assert message.endswith("add data, or use a smaller budget")
    _, remedied = read(budget__tokens=4 * reader.tokens)
    assert repeated_data(remedied) is None


def test_a_run_without_validation(read):
    config, run = read()
    assert not said(config, run, "validation: ")
    config, run = read(data__validation="[]")
    assert not said(config, run, "validation: "), "a recipe that disables validation must not cause a warning"
    config, run = read()
    (line,) = [line for line in judgement(config, run, frozenset(), {}, []) if "validation: no source has" in line]
    assert "--validation_fraction 0.05" in line


def said(config, run, beginning):
    lines = judgement(config, run, frozenset(), open_validation(config.data), [])
    return [line for line in lines if line.startswith(f"warning: {beginning}")]


def test_a_vocabulary_that_outweighs_the_layers(read):
    assert heavy_vocabulary(read()[1]) is None
    # 512 x 32 in the embedding, at most 32 x 32 per matrix in the single narrow layer
    _, run = read(
        model__hidden_size=32, model__intermediate_size=32, model__num_hidden_layers=1, model__num_key_value_heads=1
    )
    message = heavy_vocabulary(run)
    share = 512 * 32 / run.parameters
    assert share > 0.5 and f"head for 512 IDs are {share:.0%} of {run.parameters / 1000:.1f}k parameters" in message


@pytest.mark.parametrize("budget", [{"budget__tokens": "12_800"}, {"budget__steps": 50}])
def test_a_batch_too_large_for_the_budget(read, budget):
    config, run = read(**budget)
    message = few_steps(config, run)
    assert "with 256 tokens per step, the run has only 50 steps, including 2 warmup steps" in message
    assert message.endswith("lower batch.tokens_per_step or raise the budget")
    assert few_steps(*read(budget__steps=100)) is None


def test_a_disk_too_small_for_the_checkpoints(read, monkeypatch, tmp_path):
    config, run = read()
    need = 4 * run.parameters * 3 * (config.checkpoint.keep_last + 1) + 2 * run.parameters
    for free, is_small in ((need, False), (need - 1, True)):
        monkeypatch.setattr(judgement_module.shutil, "disk_usage", lambda place, free=free: Usage(0, 0, free))
        message = small_disk(config, run)
        assert (message is not None) == is_small
    assert "2 checkpoints of" in message and f"{tmp_path} has" in message
    (tmp_path / "run/checkpoints/step-1").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step-1/model.safetensors").write_bytes(b"0")
    assert small_disk(config, run) is None, "checkpoints on disk must count as free space"


def test_a_step_too_large_for_the_memory(read, monkeypatch):
    long = {"data__sequence_length": 2048, "model__max_position_embeddings": 2048, "batch__tokens_per_step": 4096}
    config, run = read(**long)
    planned = PlannedRun(config, run.model_config, run.precision, "cpu")
    need = largest_footprint(planned, layout("single", 1), 1).total
    monkeypatch.setattr(judgement_module, "memory_bytes", lambda device: int(need))
    assert memory_shortage(config, run, torch.device("cpu")) is None
    monkeypatch.setattr(judgement_module, "memory_bytes", lambda device: int(0.5 * need))
    message = memory_shortage(config, run, torch.device("cpu"))
    assert message.startswith("memory: with single, a step with sequences of 2,048 tokens needs ")
    assert "--activation_checkpointing full, 33% slower: needs" in message and "zero3_offload" not in message


def test_an_architecture_whose_memory_cannot_be_traced_is_reported(read, monkeypatch):
    def fails(*_):
        raise TypeError("no such argument\nsecond line")

    monkeypatch.setattr(judgement_module, "largest_footprint", fails)
    said = "memory: cannot be estimated for llama (TypeError: no such argument)"
    assert memory_shortage(*read(), torch.device("cpu")) is None, "nothing must be traced if the model is small"
    monkeypatch.setattr(judgement_module, "memory_bytes", lambda device: 100_000)
    assert memory_shortage(*read(), torch.device("cpu")) == said


def test_the_estimated_time_uses_the_measured_peak(read, monkeypatch):
    monkeypatch.setattr(judgement_module, "peak_flops", lambda device, precision: (1e9, "measured"))
    config, run = read()
    seconds = run.flops_per_token * run.total_tokens / (0.4 * 1e9)
    line = judgement_module.time_here(config, run, torch.device("cpu"))
    assert line.startswith(
        f"time on this machine: about {round(seconds)} s for 3.07k tokens in 1 process, at an MFU of 40%"
    )
    monkeypatch.setattr(judgement_module, "peak_flops", lambda device, precision: (None, "unknown peak FLOP/s for X"))
    assert "unknown (unknown peak FLOP/s for X)" in judgement_module.time_here(config, run, torch.device("cpu"))


@pytest.mark.parametrize(
    ("parameters", "peak", "measured"),
    [
        (6e5, 0.17e12, 0.46), (6e5, 0.45e12, 0.14), (2.8e6, 0.45e12, 0.37), (2.8e6, 1.53e12, 0.14),
        (13.8e6, 1.53e12, 0.46),
    ],
)  # fmt: skip
def test_small_models_are_assumed_to_use_less_of_a_fast_cpu(parameters, peak, measured):
    """The measured values are those in `FULL_CPU_PARAMETERS`. Estimates are at most 0.4."""
    assert default_mfu(parameters, "cpu", peak) == pytest.approx(min(measured, 0.4), rel=0.15)


def test_the_start_command_is_the_checked_one_without_check(read, monkeypatch):
    config, _ = read()
    words = ["--config", "a b.yaml", "--check", "--verbose", "--optim.learning_rate", "1e-3"]
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    plain = "train.py --config 'a b.yaml' --optim.learning_rate 1e-3"
    assert launch_command(config, words) == f"python {plain}"
    monkeypatch.setattr(judgement_module.torch.cuda, "is_available", lambda: True)
    for gpus, launched in ((1, False), (2, True), (3, False)):  # 256 tokens can't be divided by 3 x 64
        monkeypatch.setattr(judgement_module.torch.cuda, "device_count", lambda gpus=gpus: gpus)
        expected = f"accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes {gpus} {plain}"
        assert launch_command(config, words) == (expected if launched else f"python {plain}")
    monkeypatch.setattr(judgement_module.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert launch_command(config, words) == f"python {plain}"


def test_a_check_without_data_reports_everything_else(recipe):
    asked = ("train.py", "--config", recipe, "--check", "--data.train", f"[{{shards: {recipe.parent}/none}}]")
    checked = run_script(*asked, "--export.weights", "average", check=False)
    assert checked.returncode == 2 and not checked.stdout
    assert f"{recipe.parent}/none: no such folder of prepared shards; prepare it with the commands" in checked.stderr
    assert "averaging.kind is none" in checked.stderr


def test_the_script_prints_the_warnings(recipe):
    out = run_script("train.py", "--config", recipe, "--check").stdout
    assert "warning: batch: with 256 tokens per step, the run has only 12 steps" in out
    assert "\ntime on this machine: about " in out
    assert f"\nstart the run with: python train.py --config {recipe}\n" in out
    assert re.search(r"\nNo errors, [1-9] warnings? above: this run can start\.\n$", out), "warnings must be counted"
