"""Runs whose stages change sequence length and RoPE must resume exactly and export correctly.

Everything is trained in two launches (tests/support/train_strategies.py), and the tests check the results. With
STRATEGIES=all in the environment (`make test-strategies`), every strategy is tested.
"""

import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pretrain_tools.runs.step_documents import documents_text
from support.project import ROOT, events, launch, losses, run_script
from support.tiny_models import TINY_LLAMA, TINY_MOE

EVERYTHING = os.environ.get("STRATEGIES") == "all"
STRATEGIES = ["ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3", "cp", "tp", "pp"]
UNDER = STRATEGIES if EVERYTHING else ["ddp", "zero2", "cp", "tp"]
STEPS, BORDER = 8, 4
ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SHORT = {"max_position_embeddings": 64}
UNMEASURED = ["--validation.every_steps", "null"]


def recipe_of(model: Path, shards: Path, output: Path) -> dict:
    """Returns a recipe with sequences of 64 tokens in the first half, and of 256 tokens with YaRN in the second."""
    source = {"shards": str(shards)}
    stages = [{"until": 0.5, "train": [source]}, {"train": [source], "sequence_length": 256, "rope_parameters": ROPE}]
    return {
        "model": str(model),
        "output": str(output),
        "seed": 1,
        "precision": "fp32",
        "data": {"stages": stages, "sequence_length": 64},
        "budget": {"steps": STEPS},
        "batch": {"tokens_per_step": 1024, "sequences_per_micro_batch": 2},
        "optim": {"learning_rate": 0.003, "warmup_steps": 2},
        "compile": "none",
        "validation": {"every_steps": 4, "sequences": 8},
        "checkpoint": {"every_steps": 2, "keep_last": 9},
        "logging": {"every_steps": 1},
    }


@pytest.fixture(scope="module")
def runs(shards, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    (folder / "llama.json").write_text(json.dumps(TINY_LLAMA | SHORT))
    (folder / "experts.json").write_text(json.dumps(TINY_MOE | SHORT))
    recipe = recipe_of(folder / "llama.json", shards, folder / "run")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    def run(strategy: str, name: str, *arguments: str, **more) -> dict:
        return {"strategy": strategy, "arguments": ["--output", str(folder / name), *arguments], **more}

    def resumed(step: int) -> dict:
        return run("single", f"from {step}", start_from=str(folder / f"whole/checkpoints/step-{step:08d}"))

    experts = ["--model", str(folder / "experts.json"), *UNMEASURED]
    alone = [run("single", "whole"), *map(resumed, (2, 4, 6)), run("single", "experts", *experts)]
    two_stages = ["--pipeline.schedule", "1F1B"]  # the model has two layers
    together = [run(name, name, *UNMEASURED, *(two_stages if name == "pp" else [])) for name in UNDER]
    together.append(run("ep", "ep", *experts))
    longer = ["--optim.schedule", "constant", "--budget.steps", str(STEPS + 2)]
    together.append(run("ddp", "ddp", *UNMEASURED, *longer))
    for strategy, processes, descriptions in (("single", 1, alone), ("ddp", 2, together)):
        path = folder / f"{processes}.json"
        path.write_text(json.dumps(descriptions))
        launch(
            strategy, processes, "tests/support/train_strategies.py", folder / "recipe.yaml", path, timeout=3000
        )  # fmt: skip
    return folder


def measured(run):
    """Returns {step: validation results}."""
    found = {event["step"]: event for event in events(run, "validation")}
    names = ("loss", "stage_loss", "stage_sequence_length", "loss_by_position", "tokens_by_position")
    return {step: {name: event.get(name) for name in names} for step, event in found.items()}


def config_of(folder):
    values = json.loads((folder / "config.json").read_text())
    return values["max_position_embeddings"], values["rope_parameters"]["rope_type"]


@pytest.mark.parametrize("step", [2, 4, 6])
def test_a_run_resumed_near_a_stage_boundary_matches_the_uninterrupted_run(runs, step):
    whole, resumed = runs / "whole", runs / f"from {step}"
    assert losses(resumed) == {number: loss for number, loss in losses(whole).items() if number > step}
    again = measured(resumed)
    assert again and all(again[number] == measured(whole)[number] for number in again if number > step)
    for number in range(step + 2, STEPS + 1, 2):
        ours, theirs = (run / f"checkpoints/step-{number:08d}" for run in (resumed, whole))
        for file in ("model.safetensors", "optimizer.safetensors"):
            mine, others = load_file(ours / file), load_file(theirs / file)
            assert all(torch.equal(mine[name], others[name]) for name in others | mine)
        assert config_of(ours) == config_of(theirs) == ((64, "default") if number <= BORDER else (256, "yarn"))


def test_a_stage_is_validated_at_its_own_length(runs):
    whole = runs / "whole"
    (stage,) = events(whole, "stage")
    assert (stage["step"], stage["sequences_per_step"], stage["sequences_per_micro_batch"]) == (BORDER, 4, 1)
    train = {event["step"]: event for event in events(whole, "train")}
    flops = stage["flops_per_token"] / events(whole, "start")[0]["flops_per_token"]
    work = {step: event["mfu"] / event["tokens_per_second"] for step, event in train.items()}
    assert work[5] / work[4] == pytest.approx(flops, rel=1e-4), "MFU must use the FLOPs per token of each length"
    last = measured(whole)[STEPS]
    assert last["stage_sequence_length"] == 256 and list(last["loss_by_position"]) == ["0-127", "128-255"]
    by_range = [last[name].values() for name in ("loss_by_position", "tokens_by_position")]
    mean = sum(a * b for a, b in zip(*by_range, strict=True)) / sum(by_range[1])
    assert mean == pytest.approx(last["stage_loss"], rel=1e-6) and sum(by_range[1]) == 2 * 256


def test_the_export_matches_the_trained_model(runs, shards, tmp_path):
    """The exported model must have the same loss as the run at the new sequence length."""
    whole, last = runs / "whole", measured(runs / "whole")[STEPS]
    exported = AutoModelForCausalLM.from_pretrained(whole / "final", dtype=torch.float32)
    trained = AutoModelForCausalLM.from_pretrained(whole / f"checkpoints/step-{STEPS:08d}")
    ids = torch.randint(2, exported.config.vocab_size, (1, 256), generator=torch.Generator().manual_seed(0))
    assert exported.config.max_position_embeddings == 256 and exported.config.rope_parameters["factor"] == 4
    assert torch.allclose(exported(ids).logits, trained(ids).logits, atol=0.02)
    asked = ("--data", shards, "--sequence_length", "256", "--sequences", "2", "--output", tmp_path / "found.json")
    run_script("evaluate.py", "--model", f"{whole}@{STEPS}", *asked)
    (found,) = json.loads((tmp_path / "found.json").read_text())["models"][0]["sources"].values()
    assert found["loss"] == pytest.approx(last["stage_loss"], rel=1e-5)
    assert found["loss_by_position"] == pytest.approx(last["loss_by_position"], rel=1e-5)
    shown = documents_text(whole, 5, limit=1)
    assert "step 5: 4 sequences of 256 tokens, samples 64 to 79 of the run" in shown


@pytest.mark.parametrize("name", [*UNDER, "ep"])
def test_every_strategy_trains_the_same_stages(runs, name):
    expected = losses(runs / ("experts" if name == "ep" else "whole"))
    found = {step: loss for step, loss in losses(runs / name).items() if step <= STEPS}
    assert found.keys() == expected.keys()
    assert max(abs(found[step] - loss) for step, loss in expected.items()) <= 2e-6


def test_an_extended_run_keeps_its_stage_boundary(runs):
    assert len(events(runs / "ddp", "stage")) == 1, "the boundary must not move to the middle of the longer run"
    assert losses(runs / "ddp").keys() == set(range(1, STEPS + 3))


def test_compiled_layers_are_recompiled_once_at_the_boundary(runs, tmp_path):
    """Compiled layers must also have the same losses as uncompiled ones.

    Validation and the export check are disabled, because they are compiled separately.
    """
    environment = {"COMPILATIONS": str(tmp_path / "compilations"), "BACKEND": "aot_eager"}
    settings = ("--compile", "regional", "--data.validation", "[]", "--checkpoint.save_final", "false")
    arguments = ("--config", runs / "recipe.yaml", "--output", tmp_path / "run", *settings)
    run_script("tests/support/train_and_count.py", *arguments, **environment)
    began = [float(line.split()[0]) for line in (tmp_path / "compilations0").read_text().splitlines()]
    times = {line["step"]: line["time"] for line in events(tmp_path / "run", "train")}
    assert len(began) <= 2 and sum(when > times[BORDER] for when in began) <= 1
    expected = losses(runs / "whole")
    assert max(abs(expected[step] - loss) for step, loss in losses(tmp_path / "run").items()) <= 1e-5


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (("data.stages.1.sequence_length", "100"), "must be a multiple of sequence_length, 64 (got [64, 100])"),
        (("batch.tokens_per_step", "1152"), "tokens_per_step 1,152 is not a multiple of 256 tokens x 1 processes"),
        (("model.config", str(ROOT / "model_configs/gpt2_124m.json"), "data.stages.1.sequence_length", "2k",
          "batch.tokens_per_step", "4k", "data.stages.1.rope_parameters", "null"),
         "more than the 1,024 positions of gpt2, which learns an embedding for each position"),
    ],
)  # fmt: skip
def test_invalid_stages_end_with_status_2(shards, tmp_path, changes, problem):
    (tmp_path / "llama.json").write_text(json.dumps(TINY_LLAMA | SHORT))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(recipe_of(tmp_path / "llama.json", shards, tmp_path / "run")))
    words = [f"--{word}" if place % 2 == 0 else word for place, word in enumerate(changes)]
    result = run_script("train.py", "--config", recipe, *words, "--check", check=False)
    assert result.returncode == 2 and problem in result.stderr and "Traceback" not in result.stderr
