"""If only one process reads the data, runs must match bit for bit under every strategy.

Everything is trained in one launch with two processes (tests/support/train_strategies.py). In dispatched runs, the
second process runs in a folder without the shards, as on another machine. With STRATEGIES=all in the environment
(`make test-strategies`), every type of strategy is tested.
"""

import json
import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from pretrain.config import Data
from pretrain.data import dispatch
from pretrain.data.batches import open_training
from pretrain.data.dispatch import Dispatcher, describe_shards, rely_on_description
from pretrain.errors import InputError
from support.numbered_shards import write_shards
from support.project import ROOT, events, launch, losses
from support.tiny_models import TINY_LLAMA, TINY_MOE

STRATEGIES, ON_FOUR = ["ddp", "tp", "cp"], {}
if os.environ.get("STRATEGIES") == "all":
    STRATEGIES += ["fsdp2", "zero2", "zero3", "pp", "ep"]
    ON_FOUR = {"fsdp_tp": {}, "pp of two": {"PARALLELISM_CONFIG_PP_SIZE": "2"}}
"""{run: environment variables} for runs on four processes, two of which read the same sequences."""
STEPS = 4
ON = ["--data.dispatch_batches", "true"]


@pytest.fixture(scope="module")
def runs(shards, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dispatch")
    for name, values in {"dense": TINY_LLAMA, "experts": TINY_MOE}.items():
        (folder / f"{name}.json").write_text(json.dumps(values | {"vocab_size": "auto"}))
    for name in ("with", "without"):
        (folder / name).mkdir()
        (folder / name / "ds_configs").symlink_to(ROOT / "ds_configs")
    (folder / "with/text").symlink_to(shards)
    source = {"shards": "text"}
    recipe = {
        "model": str(folder / "dense.json"),
        "output": str(folder / "run"),
        "seed": 1,
        "precision": "fp32",
        # The second stage has longer sequences.
        "data": {
            "stages": [{"until": 0.5, "train": [source]}, {"train": [source], "sequence_length": 128}],
            "sequence_length": 64,
        },
        "budget": {"steps": STEPS},
        "batch": {"tokens_per_step": 1024, "sequences_per_micro_batch": 2},
        "optim": {"learning_rate": 0.003, "warmup_steps": 2},
        "compile": "none",
        # With seven sequences, the last micro-batch isn't full.
        "validation": {"every_steps": 2, "sequences": 7},
        "checkpoint": {"every_steps": 2, "keep_last": 9},
        "logging": {"every_steps": 1},
        "samples": {"prompts": ["def "], "max_new_tokens": 4, "every_steps": 4},
        "pipeline": {"schedule": "1F1B"},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    def run(strategy: str, name: str, *arguments: str, **more) -> dict:
        model = str(folder / ("experts.json" if strategy == "ep" else "dense.json"))
        where = [str(folder / "with"), *[str(folder / ("without" if "true" in arguments else "with"))] * 3]
        arguments = ["--model", model, "--output", str(folder / name), *arguments]
        return {"strategy": strategy, "arguments": arguments, "working_folders": where, **more}

    def middle(name: str) -> dict:
        return {"start_from": str(folder / name / "checkpoints/step-00000002")}

    ways = (("", []), (" on", ON))
    on_two = [run(name, f"{name}{way}", *given) for name in STRATEGIES for way, given in ways]
    packed = ["--data.sampling", "best_fit"]
    on_two += [run("ddp", "packed", *packed), run("ddp", "packed on", *packed, *ON), run("tp", "packed tp", *packed)]
    on_two.append(run("ddp", "packed then on", *packed, *ON, **middle("packed")))
    on_two += [run("ddp", "ddp then on", *ON, **middle("ddp")), run("ddp", "ddp then off", **middle("ddp on"))]
    on_four = [
        run(name.partition(" ")[0], f"{name}{way}", *given, environment=environment)
        for name, environment in ON_FOUR.items()
        for way, given in ways
    ]
    for processes, descriptions in ((2, on_two), (4, on_four)):
        if descriptions:
            (folder / "runs.json").write_text(json.dumps(descriptions))
            program = ["tests/support/train_strategies.py", folder / "recipe.yaml", folder / "runs.json"]
            launch("ddp", processes, *program, timeout=3000)
    return folder


def measured(run: Path) -> list[tuple]:
    lines = [(line["step"], line["loss"], line.get("stage_loss")) for line in events(run, "validation")]
    return [*lines, *((line["prompt"], line["text"]) for line in events(run, "sample"))]


@pytest.mark.parametrize("strategy", [*STRATEGIES, *ON_FOUR, "packed"])
def test_a_process_without_shards_trains_the_same_run_bit_for_bit(runs, strategy):
    usual, dispatched = runs / strategy, runs / f"{strategy} on"
    assert not (runs / "without/text").exists()
    assert len(losses(usual)) == STEPS and losses(dispatched) == losses(usual)
    assert len(measured(usual)) == 4 and measured(dispatched) == measured(usual)
    expected, found = (load_file(run / "checkpoints/step-00000004/model.safetensors") for run in (usual, dispatched))
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("name", ["ddp then on", "ddp then off", "packed then on"])
def test_a_run_resumes_with_or_without_dispatching(runs, name):
    assert [line["step"] for line in events(runs / name, "resume")] == [2]
    whole = losses(runs / name.partition(" ")[0])
    assert losses(runs / name) == {step: loss for step, loss in whole.items() if step > 2}


def test_windows_of_whole_documents_are_the_same_under_another_strategy(runs):
    assert losses(runs / "packed tp") == pytest.approx(losses(runs / "packed"), abs=1e-5)
    assert losses(runs / "packed") != losses(runs / "ddp")


class Threads:
    """Stub of torch.distributed for threads; a thread's group is its rank."""

    def __init__(self, ranks=2):
        self.barrier, self.sent, self.calls = threading.Barrier(ranks, timeout=60), None, 0

    def scatter_object_list(self, received, sent, src, group):
        if group == src:
            self.sent, self.calls = [pickle.dumps(part) for part in sent], self.calls + 1
        self.barrier.wait()
        received[0] = pickle.loads(self.sent[group])
        self.barrier.wait()


@pytest.fixture
def dispatchers(monkeypatch):
    """Returns the dispatchers of two ranks."""
    monkeypatch.setattr(dispatch, "dist", Threads())
    return [Dispatcher([0, 1], rank, rank) for rank in range(2)]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int64])
def test_each_process_gets_its_part_in_one_exchange(dispatchers, dtype):
    largest = np.iinfo(dtype).max

    def read(data_rank):
        return np.full((2, 3), largest - data_rank, dtype)

    futures = [dispatcher.take(5, read, lambda ids: ids - 1) for dispatcher in dispatchers]
    assert [future.result().tolist() for future in futures] == [[[largest - 1 - rank] * 3] * 2 for rank in range(2)]
    assert all(future.result().dtype == dtype for future in futures) and dispatch.dist.calls == 1


def test_model_parallel_ranks_get_the_same_batch_which_is_read_once(monkeypatch):
    monkeypatch.setattr(dispatch, "dist", Threads(ranks=4))
    data_ranks, read_for = [0, 1, 0, 1], []

    def read(data_rank):
        read_for.append(data_rank)
        return np.array([data_rank], np.uint16)

    futures = [Dispatcher(data_ranks, rank, rank).take(3, read) for rank in range(4)]
    assert [future.result().tolist() for future in futures] == [[0], [1], [0], [1]] and read_for == [0, 1]


@pytest.mark.parametrize(
    ("error", "of_the_other"), [(InputError("damaged"), InputError), (OSError("gone"), RuntimeError)]
)
def test_a_read_error_fails_on_all_ranks_and_the_next_batch_is_correct(dispatchers, error, of_the_other):
    def fail(data_rank):
        raise error

    first, other = [dispatcher.take(1, fail) for dispatcher in dispatchers]
    with pytest.raises(type(error), match=str(error)):
        first.result()
    with pytest.raises(of_the_other, match="see its error message"):
        other.result()
    futures = [dispatcher.take(2, lambda rank: np.array([rank], np.uint16)) for dispatcher in dispatchers]
    assert [future.result().tolist() for future in futures] == [[0], [1]]


def test_processes_at_different_steps_are_detected(dispatchers):
    first, other = (d.take(7 + d.rank, lambda rank: np.zeros(1, np.uint16)) for d in dispatchers)
    assert first.result().tolist() == [0]
    with pytest.raises(RuntimeError, match="sent batch 7 instead of batch 8"):
        other.result()


@pytest.fixture
def elsewhere(tmp_path):
    """Makes this process use the first process's description of the shards. One of their folders was moved."""

    def believing(*damaged):
        folders = [write_shards(tmp_path / name, 1000, files=3, validation=100) for name in ("a", "b")]
        for file in damaged:
            (tmp_path / file).unlink()
        data = Data(train=[{"shards": folder} for folder in folders], sequence_length=10)
        said = describe_shards(data)
        (tmp_path / "a").rename(tmp_path / "moved_a")
        rely_on_description(data, said)
        return data

    return believing


def test_shards_match_the_first_processs_description(elsewhere):
    assert [reader.tokens for reader in open_training(elsewhere()).values()] == [1000, 1000]


@pytest.mark.parametrize(
    ("damaged", "named"),
    [("a/train-00001.bin", "train-00001.bin: is missing"), ("b/manifest.json", "has no manifest")],
)
def test_all_processes_reject_invalid_shards(elsewhere, damaged, named):
    with pytest.raises(InputError, match=named) as refusal:
        open_training(elsewhere(damaged))
    assert len(refusal.value.problems) == 1
