"""Muon trains alike under every strategy, in few collectives, and goes on under any other from any checkpoint.

Two launches (tests/support/train_strategies.py), one process and two. With STRATEGIES=all in the environment
(`make test-strategies`) the checkpoint of each strategy is continued under each.
"""

import json
import os

import pytest
import yaml

from support.project import events, launch, losses
from support.tiny_models import TINY_LLAMA

EVERYTHING = os.environ.get("STRATEGIES") == "all"
STEPS = 12
STRATEGIES = ["ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3", "zero3_offload", "tp", "pp"]
BUCKET = 2**13
"""Elements for each of two processes."""
BUCKETS = 7
"""Of all matrices: nine of 8,192 elements, six each of 4,096 and of 2,048."""
SOME = [
    ("single", "zero2"),
    ("zero1", "fsdp2"),
    ("fsdp2", "zero3"),
    ("zero3", "tp"),
    ("tp", "zero1"),
    ("zero2", "ddp"),
]
"""(saved by, continued under), of all pairs."""
MODEL = TINY_LLAMA | {"num_hidden_layers": 3, "tie_word_embeddings": False}
"""Of three layers, so that the halves of flat ZeRO partitions meet within a matrix."""


@pytest.fixture(scope="module")
def runs(shards, tmp_path_factory):
    folder = tmp_path_factory.mktemp("muon")
    (folder / "model.json").write_text(json.dumps(MODEL))
    recipe = {
        "model": str(folder / "model.json"),
        "output": str(folder / "run"),
        "seed": 1,
        "precision": "fp32",
        "data": {"train": [{"shards": str(shards)}], "sequence_length": 32},
        "budget": {"steps": STEPS},
        "batch": {"tokens_per_step": 128, "sequences_per_micro_batch": 2},
        "optim": {"name": "muon", "learning_rate": 0.003, "warmup_steps": 2, "max_grad_norm": 0.5},
        "compile": "none",
        "checkpoint": {"every_steps": 6, "keep_last": 9},
        "logging": {"every_steps": 1},
        "pipeline": {"schedule": "1F1B"},
    }
    recipe["optim"] |= {"muon": {"coefficients": "polar_express", "adamw_learning_rate": 0.001}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    def run(name, strategy, *arguments, **more):
        arguments = ["--output", str(folder / name), *arguments]
        return {"strategy": strategy, "arguments": arguments, "muon_bucket": BUCKET, **more}

    def train(launcher, processes, runs):
        (folder / "runs.json").write_text(json.dumps(runs))
        launch(
            launcher, processes, "tests/support/train_strategies.py", folder / "recipe.yaml", folder / "runs.json",
            timeout=900,
        )  # fmt: skip

    train("single", 1, [run("single", "single")])
    pairs = [(a, b) for a in ["single", *STRATEGIES] for b in STRATEGIES] if EVERYTHING else SOME
    middle = "checkpoints/step-00000006"
    train(
        *("ddp", 2),
        [
            *(run(strategy, strategy) for strategy in STRATEGIES),
            *(run(f"{a}-{b}", b, start_from=str(folder / a / middle)) for a, b in pairs),
        ],
    )
    return folder


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_are_those_of_one_process(runs, strategy):
    expected, found = losses(runs / "single"), losses(runs / strategy)
    assert len(found) == STEPS and expected[STEPS] < expected[1] - 0.05
    assert max(abs(found[step] - expected[step]) for step in expected) < 1e-5


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_collectives_are_bounded_by_buckets(runs, strategy):
    """One to the owners and one back for each; copies need none to the owners."""
    gathers, exchanges = ["_allgather_base_"], 2 * ["alltoall_base_"]
    expected = {
        "ddp": BUCKETS * gathers,
        "zero1": exchanges,  # only for the matrix of which both have a part
        "zero2": exchanges,
        "hsdp": [],  # on two processes a group has one shard
        "pp": [],
    }
    found = json.loads((runs / strategy / "muon.json").read_text())
    assert found == expected.get(strategy, BUCKETS * exchanges)


def test_any_checkpoint_continues_under_any_strategy(runs):
    """Tensors were compared bit by bit after each load; here the steps that follow."""
    unbroken = losses(runs / "single")
    resumed = list(runs.glob("*-*"))
    assert len(resumed) == (90 if EVERYTHING else len(SOME))
    for run in resumed:
        curve = losses(run)
        assert list(curve) == list(range(7, 13)) and events(run, "resume")[0]["step"] == 6
        assert max(abs(curve[step] - unbroken[step]) for step in curve) < 1e-5, run.name
