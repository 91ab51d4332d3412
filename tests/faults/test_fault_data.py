"""Tests that damaged shards are detected at the start or on the first read, and reported with file name and rank."""

import json
import shutil

import numpy as np
import pytest

from pretrain.recipe import read_run_config
from pretrain.training.run_plan import derive
from support.faults import EVERYTHING, end_of, launch_with_faults, same_tensors, tell
from support.project import events, losses, run_script

DISPATCHED = ["--data.dispatch_batches", "true"]


@pytest.fixture
def copy(shards, tmp_path, recipe):
    """A copy of the shards to damage, and a recipe that trains on it."""
    folder = tmp_path / "spoilt"
    shutil.copytree(shards, folder)
    recipe.write_text(recipe.read_text().replace(str(shards), str(folder)))
    return folder


def test_a_shard_that_is_not_whole_is_found_at_the_start(copy, recipe, tmp_path):
    """tests/data/test_shards.py tests other kinds of damage."""
    shard = copy / "train-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    refused = run_script("train.py", "--config", recipe, "--check", check=False)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert f"{shard}: has {shard.stat().st_size:,} bytes, must have" in refused.stderr
    assert not (tmp_path / "run").exists()
    tell("21", "a shard cut short", "exit 2 at the start, shard named")


def test_an_id_beyond_the_vocabulary_is_named_by_the_rank_that_reads_it(copy, recipe, tmp_path):
    vocabulary = json.loads((copy / "manifest.json").read_text())["vocabulary_size"]
    ids = np.fromfile(copy / "train-00000.bin", np.uint16)
    batches = derive(read_run_config(recipe), ranks=2).batches
    _, position = batches.locate(batches.ramp.sequences_before(2) + 1, 1)[0]  # rank 1, third step
    ids[position + 5] = vocabulary
    ids.tofile(copy / "train-00000.bin")
    run = launch_with_faults(tmp_path / "bad", "ddp", 2, "--config", recipe)
    assert run.code != 0 and not run.left
    assert f"rank 1: {copy}: training tokens" in run.output and f"contain ID {vocabulary}, but" in run.output
    assert "prepare them again" in run.output
    assert end_of(tmp_path / "run")["step"] == 2
    tell("21", "an id beyond the vocabulary in one window", "the rank that reads it names folder and id; all end")


@pytest.mark.skipif(not EVERYTHING, reason="four launches of two processes; in make test-faults")
def test_faults_have_the_same_effect_if_one_process_reads_for_all(recipe, tmp_path):
    kills = [
        {"where": "forward", "step": 6, "micro_step": 2, "what": "SIGKILL"},
        {"where": "backward", "step": 10, "what": "SIGKILL", "rank": 0},
    ]
    nans = [{"where": "forward", "step": step, "what": "nan"} for step in (6, 7, 8)]
    for name, faults in (("kills", kills), ("nans", nans)):
        runs = [tmp_path / f"{name}-{way}" for way in ("usual", "dispatched")]
        for run, more, harm in zip(runs, ([], DISPATCHED), ([] if name == "kills" else nans, faults), strict=True):
            settings = ["--config", recipe, "--output", run, *more]
            ended = launch_with_faults(
                tmp_path / f"notes-{run.name}", "ddp", 2, *settings, faults=harm, launcher=["--max_restarts", 5]
            )
            assert ended.code == 0 and not ended.left, ended.output
        assert losses(runs[0]) == losses(runs[1]) and same_tensors(*runs, 12)
    assert len(events(tmp_path / "nans-dispatched", "rollback")) == 1
    disk, run = [{"where": "disk", "step": 3, "what": "EIO", "rank": 0}], tmp_path / "disk"
    ended = launch_with_faults(
        tmp_path / "notes", "ddp", 2, "--config", recipe, "--output", run, *DISPATCHED, faults=disk
    )
    assert ended.code != 0 and not ended.left and "Input/output error" in end_of(run)["reason"]
    assert "the first process, which reads the shards for all processes, failed" in ended.output
