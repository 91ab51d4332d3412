"""Tests for changes that prevent a run from resuming, and for rollbacks that must survive a crash between two
checkpoints."""

import hashlib
import json
import os
from types import SimpleNamespace

import pytest

from pretrain.checkpoint.run_state import RunState, record_rollbacks, recorded_rollbacks
from pretrain.files import write_durably
from pretrain.training.continued_plan import identity_problems, tokenizer_problems

SAVED = {
    "model": "1234",
    "seed": 1,
    "data.train": [{"until": None, "train": [["shards", "abcd", 1.0, None]]}],
    "data.sequence_length": 64,
    "batch.tokens_per_step": 256,
    "optim.name": "adamw",
}


@pytest.mark.parametrize(
    ("path", "other"),
    [
        ("model", "5678"),
        ("data.train", [{"until": None, "train": [["shards", "ef01", 1.0, None]]}]),
        ("batch.tokens_per_step", 512),
    ],
)
def test_a_changed_setting_is_rejected_unless_it_is_named(path, other):
    now = SAVED | {path: other}
    (problem,) = identity_problems(SAVED, now, frozenset())
    assert problem.startswith(f"{path}: the run was started with {json.dumps(SAVED[path])}")
    assert f"the recipe now has {json.dumps(other)}" in problem and f"accept it with --{path}" in problem
    assert identity_problems(SAVED, now, frozenset({path})) == []
    assert identity_problems(SAVED, now, frozenset({f"{path}.0.weight"})) == [], "naming part of the setting is enough"
    assert identity_problems(SAVED, now, frozenset({"output"})) == [problem]


@pytest.mark.parametrize(("path", "other"), [("seed", 2), ("data.sequence_length", 32)])
def test_a_changed_data_order_is_rejected_even_if_it_is_named(path, other):
    """The change can't be accepted, because some data would be read twice and some never."""
    now = SAVED | {path: other}
    (problem,) = identity_problems(SAVED, now, frozenset({path}))
    assert problem.startswith(f"{path}: the run was started with") and "accept it" not in problem
    assert identity_problems(SAVED, now, frozenset(), begins_branch=True) != []


def test_a_changed_optimizer_is_rejected_even_if_it_is_named():
    """The saved optimizer state couldn't be loaded."""
    now = SAVED | {"optim.name": "muon"}
    (problem,) = identity_problems(SAVED, now, frozenset({"optim.name"}))
    assert problem.startswith('optim.name: the run was started with "adamw"') and "another --output" in problem
    assert "accept it" not in problem


@pytest.mark.parametrize(("path", "other"), [("seed", 2), ("data.sequence_length", 32), ("optim.name", "muon")])
def test_a_branch_is_told_to_become_a_new_run(path, other):
    """A branch already has another --output."""
    (problem,) = identity_problems(SAVED, SAVED | {path: other}, frozenset(), begins_branch=True)
    assert "omit branch_from" in problem and "--output" not in problem


def test_data_with_another_tokenizer_of_the_same_size_is_rejected(tokenizer, tmp_path):
    checkpoint, longer, other = tmp_path / "checkpoint", tmp_path / "longer", tmp_path / "other"
    content = json.loads((tokenizer / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    longer_vocabulary = vocabulary | {"new token": 1 + max(vocabulary.values())}
    swapped = vocabulary | {first: vocabulary[second], second: vocabulary[first]}
    for folder, ids in ((checkpoint, vocabulary), (longer, longer_vocabulary), (other, swapped)):
        folder.mkdir()
        content["model"]["vocab"] = ids
        (folder / "tokenizer.json").write_text(json.dumps(content))

    def problems(folder, path="other shards"):
        digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
        manifest = SimpleNamespace(tokenizer_folder=folder, tokenizer_name=folder.name, tokenizer_sha256=digest)
        plan = SimpleNamespace(identity={"data.train": path}, batches=SimpleNamespace(manifest=manifest))
        return tokenizer_problems(checkpoint, {"data.train": "shards"}, plan)

    (problem,) = problems(other)
    assert problem.startswith(f"data: its tokenizer other is not the one in {checkpoint}: 2 of 5")
    assert f"--tokenizer {checkpoint}" in problem and problem.endswith("or use another --output")
    assert problems(tokenizer) == problems(checkpoint) == problems(longer) == []
    assert problems(other, path="shards") == [], "only a change of the data is compared"


def test_all_differences_are_reported_at_once():
    now = SAVED | {"seed": 2, "model": "5678"}
    assert len(identity_problems(SAVED, now, frozenset())) == 2


def test_rollbacks_survive_a_crash(tmp_path):
    assert recorded_rollbacks(tmp_path) == []
    first = {"samples": [20, 12], "learning_rate_factor": 1.0}
    second = {"samples": None, "learning_rate_factor": 0.5}
    record_rollbacks(tmp_path, [first])
    record_rollbacks(tmp_path, [first, second])
    state = RunState(rollbacks=recorded_rollbacks(tmp_path))
    assert state.left_out == [(20, 12)] and state.learning_rate_factor == 0.5
    assert not list(tmp_path.glob(".*"))


ROLLBACK = {"samples": [1, 2], "learning_rate_factor": 1.0}


def test_a_crash_while_writing_rollbacks_keeps_the_previous_ones(tmp_path, monkeypatch):
    record_rollbacks(tmp_path, [ROLLBACK])

    def crash(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError):
        write_durably(tmp_path / "rollbacks.json", "[]")
    assert recorded_rollbacks(tmp_path) == [ROLLBACK]
