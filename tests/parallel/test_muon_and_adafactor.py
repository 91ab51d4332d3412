"""Muon (with and without QK-clip) and Adafactor must have the same losses and resume under all strategies.

Buckets limit the number of collectives. Everything is trained in two launches, with one and with two processes
(tests/support/train_strategies.py). With STRATEGIES=all in the environment (`make test-strategies`), each strategy's
checkpoint is resumed under every strategy.
"""

import json
import os

import pytest
import yaml

from support.project import events, launch, losses
from support.tiny_models import TINY_LLAMA

EVERYTHING = os.environ.get("STRATEGIES") == "all"
STEPS = 6
EVERY = ["ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3", "zero3_offload", "tp", "pp", "cp"]
CLIPPING = ["ddp", "fsdp2", "hsdp", "tp", "pp", "cp"]
STRATEGIES = {
    "muon": EVERY,
    "adafactor": EVERY if EVERYTHING else ["fsdp2", "zero1", "zero3"],
    "qk_clip": CLIPPING,
}
ONLY_TRAIN = ["--data.validation", "[]"]
OPTIONS = {
    "muon": ["--optim.name", "muon", *ONLY_TRAIN],
    "adafactor": ["--optim.name", "adafactor", *ONLY_TRAIN],
    "qk_clip": ["--optim.name", "muon", "--optim.muon.qk_clip", "0.003"],
}
RESUMES = {
    "muon": ["single zero2", "zero1 fsdp2", "fsdp2 zero3", "zero3 pp", "tp zero1"],
    "adafactor": ["single zero1", "zero3 fsdp2"],
    "qk_clip": ["tp fsdp2"],
}
"""Strategy pairs tested by default, '<saved with> <resumed with>'."""
if EVERYTHING:
    PAIRS = [f"{source} {target}" for source in ["single", *EVERY] for target in EVERY]
    RESUMES |= {"muon": PAIRS, "adafactor": PAIRS}
CASES = [(name, strategy) for name, strategies in STRATEGIES.items() for strategy in strategies]
BUCKET = 2**13
"""Elements per bucket and process."""
BUCKETS = 7
"""Number of buckets for nine matrices of 8,192 elements, and six each of 4,096 and 2,048."""
MODEL = TINY_LLAMA | {"num_hidden_layers": 3, "tie_word_embeddings": False}
"""Model with three layers, so that the boundary between flat ZeRO partitions falls within a matrix."""


@pytest.fixture(scope="module")
def runs(shards, tmp_path_factory):
    """Returns a folder with a subfolder of runs for each optimizer."""
    folder = tmp_path_factory.mktemp("optimizers")
    (folder / "model.json").write_text(json.dumps(MODEL))
    muon = {"ns_coefficients": "polar_express"}
    recipe = {
        "model": str(folder / "model.json"),
        "output": str(folder / "run"),
        "seed": 1,
        "precision": "fp32",
        "data": {"train": [{"shards": str(shards)}], "sequence_length": 32},
        "budget": {"steps": STEPS},
        "batch": {"tokens_per_step": 128, "sequences_per_micro_batch": 2},
        # Parameter groups with different learning rates, and muP.
        "optim": {
            "learning_rate": 0.006,
            "warmup_steps": 2,
            "max_grad_norm": 0.5,
            "muon": muon,
            "group_learning_rates": {"embedding": 0.007, "head": 0.005, "scalars": 0.004},
            "parametrization": "mup",
            "mup_base_width": 32,
        },
        "compile": "none",
        "validation": {"sequences": 4},
        "checkpoint": {"every_steps": STEPS // 2, "keep_last": 9, "save_final": False},
        "logging": {"every_steps": 1},
        "pipeline": {"schedule": "1F1B"},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    def run(optimizer, name, strategy, **more):
        arguments = ["--output", str(folder / optimizer / name), *OPTIONS[optimizer]]
        return {"strategy": strategy, "arguments": arguments, "muon_bucket": BUCKET, **more}

    def resumed(optimizer, pair):
        source, target = pair.split()
        checkpoint = folder / optimizer / source / f"checkpoints/step-{STEPS // 2:08}"
        return run(optimizer, pair, target, start_from=str(checkpoint))

    def train(launcher, processes, runs):
        (folder / "runs.json").write_text(json.dumps(runs))
        program = ["tests/support/train_strategies.py", folder / "recipe.yaml", folder / "runs.json"]
        launch(launcher, processes, *program, timeout=3000)

    train("single", 1, [run(optimizer, "single", "single") for optimizer in STRATEGIES])
    first = [run(optimizer, strategy, strategy) for optimizer, strategy in CASES]
    train("ddp", 2, first + [resumed(optimizer, pair) for optimizer, pairs in RESUMES.items() for pair in pairs])
    return folder


@pytest.mark.parametrize(("optimizer", "strategy"), CASES)
def test_losses_match_one_process(runs, optimizer, strategy):
    expected, found = losses(runs / optimizer / "single"), losses(runs / optimizer / strategy)
    assert len(found) == STEPS and expected[STEPS] < expected[1] - 0.02
    most = 1e-6 if optimizer == "qk_clip" else 1e-5
    assert max(abs(found[step] - expected[step]) for step in expected) < most


@pytest.mark.parametrize("strategy", CLIPPING)
def test_validation_of_clipped_heads_matches_one_process(runs, strategy):
    expected, found = (events(runs / "qk_clip" / name, "validation") for name in ("single", strategy))
    assert [event["step"] for event in found] == [STEPS]
    assert [event["loss"] for event in found] == pytest.approx([event["loss"] for event in expected], abs=1e-5)


def test_heads_were_clipped(runs):
    clipped, free = losses(runs / "qk_clip" / "single"), losses(runs / "muon" / "single")
    assert clipped[1] == free[1] and all(clipped[step] != free[step] for step in range(2, STEPS + 1))


@pytest.mark.parametrize("strategy", STRATEGIES["muon"])
def test_collectives_are_bounded_by_buckets(runs, strategy):
    """Each bucket needs one collective to send matrices to their owners (except for replicas) and one to return
    them."""
    gathers, exchanges = ["_allgather_base_"], 2 * ["alltoall_base_"]
    expected = {
        "ddp": BUCKETS * gathers,
        "zero1": exchanges,  # only for the matrix that both processes share
        "zero2": exchanges,
        "hsdp": BUCKETS * gathers,  # with two processes, a group has one shard, and two replicas split the work
        "pp": [],
    }
    found = json.loads((runs / "muon" / strategy / "muon.json").read_text())
    assert found == expected.get(strategy, BUCKETS * exchanges)


@pytest.mark.parametrize("optimizer", STRATEGIES)
def test_any_checkpoint_resumes_under_any_strategy(runs, optimizer):
    """The losses must match an uninterrupted run (train_strategies.py compares the loaded tensors bit for bit)."""
    unbroken = losses(runs / optimizer / "single")
    for pair in RESUMES[optimizer]:
        run = runs / optimizer / pair
        curve = losses(run)
        assert list(curve) == list(range(STEPS // 2 + 1, STEPS + 1)) and events(run, "resume")[0]["step"] == STEPS // 2
        assert max(abs(curve[step] - unbroken[step]) for step in curve) < 1e-5, pair
