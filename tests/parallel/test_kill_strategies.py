"""A run killed with SIGKILL in the middle of a step must resume and match an uninterrupted run bit for bit.

Each launch finishes the run that was killed in the previous launch, and is then killed while training with the next
strategy. Dropout and gradient accumulation are enabled. Some strategies are random combinations of parallel
dimensions. With STRATEGIES=all in the environment (`make test-strategies`), all strategies and ten combinations are
tested.
"""

import json
import os
import random
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from support.mesh_products import MODELS, SCHEDULES, products, variables
from support.project import events, launch, losses
from support.tiny_models import TINY_LLAMA, TINY_MOE

ALL = ["ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3", "zero3_offload", "pp", "tp", "ep", "cp"]
EVERYTHING = os.environ.get("STRATEGIES") == "all"
DRAW = random.Random(27)
DRAWN = DRAW.sample(list(products(4)), 10)
PRODUCTS = {name: DRAW.choice(SCHEDULES) for name in (DRAWN if EVERYTHING else DRAWN[:1])}
STRATEGIES = [*(ALL if EVERYTHING else ["ddp", "zero3"]), *PRODUCTS]
STEPS, SAVED_EVERY = 14, 3
DROPOUT = {"attention_dropout": 0.1, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def folder(shards, tmp_path_factory) -> Path:
    """Returns a folder with the uninterrupted runs in whole/, and the runs that were killed and resumed in killed/."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "llama.json").write_text(json.dumps(TINY_LLAMA | DROPOUT))
    (folder / "experts.json").write_text(json.dumps(TINY_MOE | DROPOUT))
    for name, values in MODELS.items():
        (folder / f"{name}.json").write_text(json.dumps(values | {"attention_dropout": 0.1}))
    recipe = {
        "model": str(folder / "llama.json"),
        "output": str(folder / "run"),
        "seed": 1,
        "precision": "fp32",
        "attention": "eager",
        "data": {"train": [{"shards": str(shards)}], "sequence_length": 64},
        "budget": {"steps": STEPS},
        "batch": {"tokens_per_step": 256, "sequences_per_micro_batch": 1},
        "optim": {"learning_rate": 0.001, "warmup_steps": 2, "max_grad_norm": 0.5, "weight_decay": 0.1},
        "pipeline": {"schedule": "1F1B"},
        "compile": "none",
        "validation": {"every_steps": 4, "sequences": 8},
        "checkpoint": {"every_steps": SAVED_EVERY, "keep_last": 2},
        "logging": {"every_steps": 1},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    chance = random.Random(3)

    def run_of(name: str, kind: str) -> dict:
        words = ["--output", str(folder / kind / name)]
        if name not in PRODUCTS:
            model = ["--model", str(folder / "experts.json")] if name == "ep" else []
            return {"strategy": name, "arguments": [*words, *model]}
        model, sizes = products(4)[name]
        words += ["--model", str(folder / f"{model}.json"), "--pipeline.schedule", PRODUCTS[name]]
        words += ["--data.sequence_length", "32", "--batch.sequences_per_micro_batch", "2"]
        words += ["--batch.tokens_per_step", "1024"]
        return {"strategy": "mesh", "arguments": words, "environment": variables(sizes)}

    for processes, names in ((2, [name for name in STRATEGIES if name not in PRODUCTS]), (4, list(PRODUCTS))):
        runs = [run_of(name, "whole") for name in names]
        for name in names:
            run = run_of(name, "killed")
            # After the first checkpoint and before the last step.
            moment = [chance.randint(SAVED_EVERY + 2, STEPS - 1), chance.uniform(0, 0.03)]
            assert train(folder, processes, name, [*runs, {**run, "kill_in_step": moment}]) == -9
            runs = [run]
        assert train(folder, processes, "last", runs) == 0
    return folder


def train(folder: Path, processes: int, name: str, runs: list[dict]) -> int:
    """Trains the runs in one launch. Returns its exit status, or -9 if it was killed."""
    (folder / f"{name}.json").write_text(json.dumps(runs))
    program = ["tests/support/train_strategies.py", folder / "recipe.yaml", folder / f"{name}.json"]
    result = launch("ddp", processes, *program, check=False)
    assert result.returncode in (0, -9), f"{result.stdout}\n{result.stderr}"
    return result.returncode


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_match_the_uninterrupted_run(folder, strategy):
    whole, killed = folder / "whole" / strategy, folder / "killed" / strategy
    resumed = events(killed, "resume")
    assert len(resumed) == 1 and resumed[0]["step"] % SAVED_EVERY == 0 and resumed[0]["step"] > 0
    assert len(events(killed, "start")) == 2 and len(events(killed, "end")) == 1
    assert losses(killed) == losses(whole) and len(losses(whole)) == STEPS
    norms, expected = ({e["step"]: e["grad_norm"] for e in events(run, "train")} for run in (killed, whole))
    assert norms == expected
    measured, expected = ({e["step"]: e["loss"] for e in events(run, "validation")} for run in (killed, whole))
    assert measured == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tensors_match_the_uninterrupted_run(folder, strategy):
    for file in ("model", "optimizer"):
        whole, killed = (
            load_file(folder / run / strategy / f"checkpoints/step-{STEPS:08d}/{file}.safetensors")
            for run in ("whole", "killed")
        )
        assert whole.keys() == killed.keys()
        assert all(torch.equal(tensor, killed[name]) for name, tensor in whole.items()), file
    whole, killed = ((folder / run / strategy / "final/model.safetensors").read_bytes() for run in ("whole", "killed"))
    assert whole == killed
