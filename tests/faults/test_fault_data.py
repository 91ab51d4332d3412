"""Shards that are damaged: found at the start, or at the first read, by the rank that reads them, by name."""

import json
import shutil

import numpy as np
import pytest

from pretrain.recipe import read_run_config
from pretrain.training.run_plan import derive
from support.faults import end_of, launch_with_faults, tell
from support.project import run_script


@pytest.fixture
def copy(shards, tmp_path, recipe):
    """Shards to spoil, and a recipe that trains on them."""
    folder = tmp_path / "spoilt"
    shutil.copytree(shards, folder)
    recipe.write_text(recipe.read_text().replace(str(shards), str(folder)))
    return folder


def test_a_shard_that_is_not_whole_is_found_at_the_start(copy, recipe, tmp_path):
    """Other kinds of damage: tests/data/test_shards.py."""
    shard = copy / "train-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    refused = run_script("train.py", "--config", recipe, "--check", check=False)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert f"{shard}: has {shard.stat().st_size:,} bytes, must have" in refused.stderr
    assert not (tmp_path / "run").exists()
    tell("21", "a shard cut short", "exit 2 at the start, shard named")


def test_an_id_beyond_the_vocabulary_is_named_by_the_rank_that_reads_it(copy, recipe, tmp_path):
    """Every window but the first few samples' holds one, so that some rank meets it in the middle of the run."""
    vocabulary = json.loads((copy / "manifest.json").read_text())["vocabulary_size"]
    ids = np.fromfile(copy / "train-00000.bin", np.uint16)
    batches = derive(read_run_config(recipe), ranks=2).batches
    _, position = batches.locate(batches.ramp.sequences_before(2) + 1, 1)[0]  # of rank 1 in the third step
    ids[position + 5] = vocabulary
    ids.tofile(copy / "train-00000.bin")
    run = launch_with_faults(tmp_path / "bad", "ddp", 2, "--config", recipe)
    assert run.code != 0 and not run.left
    assert f"rank 1: {copy}: id {vocabulary} in the training tokens" in run.output
    assert "prepare them again" in run.output
    assert end_of(tmp_path / "run")["step"] == 2
    tell("21", "an id beyond the vocabulary in one window", "the rank that reads it names folder and id; all end")
