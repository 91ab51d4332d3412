"""A run that grows, ends early or is branched: the learning rates so far stay what they were."""

import json

import pytest
import yaml
from safetensors.torch import load_file

from support.project import events, losses, run_script


@pytest.fixture
def trunk(recipe):
    """The recipe with a decay over its second half, its checkpoints of steps 4, 8 and 12 all kept."""
    return change(recipe, optim={"schedule": "wsd", "decay_fraction": 0.5}, checkpoint={"keep_last": 9})


def change(recipe, name=None, **sections):
    """Changes settings of a recipe; in a copy if it gets another name."""
    values = yaml.safe_load(recipe.read_text())
    for section, settings in sections.items():
        values[section] = {**values[section], **settings} if isinstance(settings, dict) else settings
    path = recipe.with_name(f"{name}.yaml") if name else recipe
    path.write_text(yaml.safe_dump(values))
    return path


def train(recipe, *overrides, **kwargs):
    return run_script("train.py", "--config", recipe, *overrides, **kwargs)


def rates(run):
    return {event["step"]: event["learning_rate"] for event in events(run, "train")}


def weights(run, step):
    return load_file(run / f"checkpoints/step-{step:08d}/model.safetensors")


def test_a_decayed_run_is_extended_from_before_its_decay(trunk, tmp_path):
    train(trunk)
    out = train(change(trunk, budget={"steps": 20})).stdout
    assert "resuming from step-00000004" in out, "the decay began after step 6, the checkpoint before is of step 4"
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert (run / "final-step-00000012/model.safetensors").exists(), "the shorter run's model stays"
    assert [event["step"] for event in events(run, "resume")] == [4]
    train(trunk, "--output", whole)
    assert rates(run) == rates(whole) and losses(run) == losses(whole)
    assert max(rates(run).values()) == pytest.approx(0.003) and rates(run)[20] < rates(run)[12]
    expected, found = weights(whole, 20), weights(run, 20)
    assert all(expected[name].equal(found[name]) for name in expected), "as if it had been planned that long"


def test_a_cosine_that_has_ended_goes_on_at_its_floor(recipe, tmp_path):
    train(recipe)
    before = rates(tmp_path / "run")
    train(change(recipe, budget={"steps": 16}))
    after = rates(tmp_path / "run")
    assert {step: after[step] for step in before} == before, "nothing is trained again"
    assert [after[step] for step in range(13, 17)] == pytest.approx([0.0003] * 4)
    assert after[13] <= after[12]


def test_a_decayed_run_without_an_earlier_checkpoint_is_not_extended(trunk, tmp_path):
    train(change(trunk, checkpoint={"keep_last": 1}))
    refused = train(change(trunk, budget={"steps": 20}), check=False)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "has decayed its learning rate since step 6, and no checkpoint from before is left" in refused.stderr


def test_a_branch_is_a_finished_model_with_its_lineage(trunk, tmp_path):
    train(change(trunk, optim={"schedule": "constant"}))
    path = change(trunk, "branch", output=str(tmp_path / "branch"), branch_from=f"{tmp_path}/run@8")
    train(path)
    branch = tmp_path / "branch"
    assert list(rates(branch)) == [9, 10, 11, 12], "half of the eight steps before"
    assert rates(branch)[9] == pytest.approx(0.003) and rates(branch)[12] < 0.002
    assert events(branch, "branch")[0]["path"] == "step-00000008"
    state = json.loads((branch / "checkpoints/step-00000012/trainer_state.json").read_text())["state"]
    assert state["lineage"] == [{"run": f"{tmp_path}/run", "step": 8, "tokens": 8 * 256}]
    assert "- branched from the run run at step 8, after 2.05k tokens" in (branch / "final/README.md").read_text()
    assert "is already complete: 12 steps" in train(path).stdout

    for address, message in (("run@5", "steps there: 4, 8, 12"), ("run", "give RUN@STEP"), ("none@4", "there: none")):
        refused = train(path, "--branch_from", f"{tmp_path}/{address}", "--output", tmp_path / "other", check=False)
        assert refused.returncode == 2 and message in refused.stderr and "Traceback" not in refused.stderr


def test_no_branch_from_a_run_that_decays(trunk, tmp_path):
    train(trunk)
    refused = train(trunk, "--output", tmp_path / "branch", "--branch_from", f"{tmp_path}/run@8", check=False)
    assert refused.returncode == 2 and "take a checkpoint of step 6 or before" in refused.stderr


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_a_run_that_paused_on_the_way_is_the_run_that_did_not(recipe, tmp_path, schedule):
    """Also where it pauses within the decay, and at a step at which nothing else was due."""
    path, paused = change(recipe, optim={"schedule": schedule, "decay_fraction": 0.5}), tmp_path / "paused"
    train(path)
    first = train(path, "--output", paused, "--checkpoint.pause_at", "7", check=False)
    assert first.returncode == 130 and "paused as checkpoint.pause_at says, saved at step 7" in first.stderr
    assert [event["step"] for event in events(paused, "validation")] == [0, 6, 7]
    again = train(path, "--output", paused, "--checkpoint.pause_at", "7", check=False)
    assert again.returncode == 2 and "give a later step, or null, to continue" in again.stderr
    train(path, "--output", paused)
    assert rates(paused) == rates(tmp_path / "run") and losses(paused) == losses(tmp_path / "run")
