"""Extending, ending or branching a run must not change the learning rates of earlier steps."""

import json
import shutil

import pytest
import yaml
from safetensors.torch import load_file

from support.project import events, launch, losses, run_script
from support.tiny_models import TINY_LLAMA


@pytest.fixture
def trunk(recipe):
    """Changes the recipe so that the decay takes half of the run and the checkpoints of steps 4, 8 and 12 are kept."""
    return change(recipe, optim={"schedule": "wsd", "decay_fraction": 0.5}, checkpoint={"keep_last": 9})


def change(recipe, name=None, **sections):
    """Changes settings of a recipe, or of a copy if `name` is given."""
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


WITHOUT_EXPORT = ("--checkpoint.save_final", "false")


def weights(run, step):
    return load_file(run / f"checkpoints/step-{step:08d}/model.safetensors")


def test_a_decayed_run_is_extended_from_a_checkpoint_before_its_decay(trunk, tmp_path):
    train(trunk)
    run, whole = tmp_path / "run", tmp_path / "whole"
    shutil.copytree(run / "final", run / "final-step-00000012")  # as if the run had been extended before
    out = train(change(trunk, budget={"steps": 20})).stdout
    assert "resuming from step-00000004" in out, (
        "the decay starts after step 6, and the last checkpoint before that is step 4"
    )
    assert (run / "final-step-00000012-2/model.safetensors").exists(), "the shorter run's model must be kept"
    assert [event["step"] for event in events(run, "resume")] == [4]
    train(trunk, "--output", whole, *WITHOUT_EXPORT)
    assert rates(run) == rates(whole) and losses(run) == losses(whole)
    assert max(rates(run).values()) == pytest.approx(0.003) and rates(run)[20] < rates(run)[12]
    expected, found = weights(whole, 20), weights(run, 20)
    assert all(expected[name].equal(found[name]) for name in expected), (
        "the weights must equal those of a run planned with this length"
    )


def test_an_extended_cosine_run_continues_at_its_minimum(recipe, tmp_path):
    train(recipe)
    before = rates(tmp_path / "run")
    train(change(recipe, budget={"steps": 16}), *WITHOUT_EXPORT)
    after = rates(tmp_path / "run")
    assert {step: after[step] for step in before} == before, "no step may be repeated"
    assert [after[step] for step in range(13, 17)] == pytest.approx([0.0003] * 4)
    assert after[13] <= after[12]
    assert (tmp_path / "run/final-step-00000012/model.safetensors").exists()
    assert not (tmp_path / "run/final").exists(), "a kill before the export must not leave the shorter run's model"


def test_a_decayed_run_without_an_earlier_checkpoint_is_not_extended(trunk, tmp_path):
    train(change(trunk, checkpoint={"keep_last": 1}), *WITHOUT_EXPORT)
    refused = train(change(trunk, budget={"steps": 20}), check=False)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "has been decaying its learning rate since step 6, but no earlier checkpoint is left" in refused.stderr


def test_a_branch_is_a_finished_model_with_its_lineage(trunk, tmp_path):
    train(change(trunk, optim={"schedule": "constant"}), *WITHOUT_EXPORT)
    path = change(trunk, "branch", output=str(tmp_path / "branch"), branch_from=f"{tmp_path}/run@8")
    train(path)
    branch = tmp_path / "branch"
    assert list(rates(branch)) == [9, 10, 11, 12], "the branch must have half as many steps as the run before it"
    assert rates(branch)[9] == pytest.approx(0.003) and rates(branch)[12] < 0.002
    assert events(branch, "branch")[0]["path"] == "step-00000008"
    state = json.loads((branch / "checkpoints/step-00000012/trainer_state.json").read_text())["state"]
    assert state["lineage"] == [{"run": f"{tmp_path}/run", "step": 8, "tokens": 8 * 256}]
    assert "- branched from run run at step 8, after 2.05k tokens" in (branch / "final/README.md").read_text()
    for how in ((), ("--check",), ("--checkpoint.stop_at_step", "7")):
        said = train(path, *how).stdout
        assert "is already complete: 12 steps" in said and "can start" not in said

    for address, steps, message in (
        ("run@5", 12, "available steps: 4, 8, 12"),
        ("run", 12, "must be RUN@STEP"),
        ("none@4", 12, "available steps: none"),
        ("run@8", 8, "budget: ends at step 8, where the branch begins; raise it"),
    ):
        asked = ("--branch_from", f"{tmp_path}/{address}", "--budget.steps", steps, "--output", tmp_path / "other")
        refused = train(path, *asked, check=False)
        assert refused.returncode == 2 and message in refused.stderr and "Traceback" not in refused.stderr


def test_no_branch_from_a_run_that_decays(trunk, tmp_path):
    train(trunk, *WITHOUT_EXPORT)
    refused = train(trunk, "--output", tmp_path / "branch", "--branch_from", f"{tmp_path}/run@8", check=False)
    assert refused.returncode == 2 and "use a checkpoint from step 6 or earlier" in refused.stderr


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_a_paused_run_matches_an_uninterrupted_run(recipe, tmp_path, schedule):
    """A pause must have no effect, even during the decay or at a step when nothing else is due."""
    path = change(recipe, optim={"schedule": schedule, "decay_fraction": 0.5}, checkpoint={"save_final": False})
    paused = tmp_path / "paused"
    train(path)
    first = train(path, "--output", paused, "--checkpoint.stop_at_step", "7", check=False)
    assert first.returncode == 130 and "paused at checkpoint.stop_at_step, saved at step 7" in first.stderr
    assert [event["step"] for event in events(paused, "validation")] == [0, 6, 7]
    for how in ((), ("--check",)):
        again = train(path, "--output", paused, "--checkpoint.stop_at_step", "7", *how, check=False)
        assert again.returncode == 2 and "set a later step, or null, to continue" in again.stderr
    train(path, "--output", paused)
    assert rates(paused) == rates(tmp_path / "run") and losses(paused) == losses(tmp_path / "run")


def tokens(run):
    return {event["step"]: event["tokens"] for event in events(run, "train")}


def test_a_batch_ramp_does_not_restart_in_an_extended_run(recipe, tmp_path):
    """The batch size must grow from one to four sequences and stay at four after the run is extended."""
    batch = {"ramp": {"from": 0.25, "over": 0.4}}
    path = change(recipe, batch=batch, budget={"steps": 16}, checkpoint={"save_final": False})
    train(path)
    train(change(path, budget={"steps": 24}))
    found = tokens(tmp_path / "run")
    steps = [after - before for before, after in zip([0, *found.values()], found.values(), strict=False)]
    assert steps == sorted(steps) and steps[0] == 64
    assert steps[13:] == [256] * 11 and found[24] == sum(steps)


def test_a_new_batch_size_applies_from_the_checkpoint(recipe, tmp_path):
    """No token may be read twice, counted twice or skipped."""
    train(change(recipe, checkpoint={"save_final": False}))
    refused = train(change(recipe, batch={"tokens_per_step": 128}, budget={"steps": 20}), check=False)
    assert refused.returncode == 2 and "applies it from the checkpoint's step on" in refused.stderr
    train(recipe, "--batch.tokens_per_step", "128")
    run = tmp_path / "run"
    assert tokens(run)[12] == 12 * 256 and tokens(run)[20] == 12 * 256 + 8 * 128
    for step, first in ((12, 44), (13, 48), (20, 62)):
        shown = run_script("runs.py", "documents", run, "--step", step, "--limit", "1").stdout
        assert f"samples {first} to " in shown


BRANCHES = {
    "finishes the model": ([], 10, (0.003, 0.00165)),
    "continues with another learning rate": (
        ["--optim.learning_rate", "0.006", "--budget.steps", "20"],
        20,
        (0.006, 0.006),
    ),
    "uses its own schedule": (["--optim.schedule", "linear"], 12, (0.003, 0.000975)),
    "warms up again": (["--optim.warmup_steps", "3"], 12, (0.001, 0.003)),
    "uses another batch size": (["--batch.tokens_per_step", "512", "--budget.steps", "14"], 14, (0.003, 0.003)),
}


@pytest.mark.parametrize("what", BRANCHES)
def test_a_branch_uses_explicit_settings_and_check_shows_them(trunk_at_a_constant_rate, what, tmp_path):
    arguments, end, (first, last) = BRANCHES[what]
    recipe, trunk = trunk_at_a_constant_rate
    arguments = [*arguments, "--branch_from", f"{trunk}@8", "--output", tmp_path / "branch"]
    said = train(recipe, "--check", *arguments).stdout
    assert f"branches from {trunk}/checkpoints/step-00000008 at step 8, after 2,048 tokens" in said
    assert f"to step {end}: " in said and f"learning rate {first:.3g} at the first step, {last:.3g}" in said
    assert not (tmp_path / "branch").exists()
    train(recipe, *arguments, *WITHOUT_EXPORT)
    found = rates(tmp_path / "branch")
    assert list(found) == list(range(9, end + 1))
    assert (found[9], found[end]) == pytest.approx((first, last), rel=1e-2)
    batch = 512 if "batch" in what else 256
    assert tokens(tmp_path / "branch")[end] == 8 * 256 + (end - 8) * batch


@pytest.fixture(scope="module")
def trunk_at_a_constant_rate(shards, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trunk")
    (folder / "model.json").write_text(json.dumps(TINY_LLAMA))
    values = {
        "model": str(folder / "model.json"),
        "output": str(folder / "run"),
        "seed": 1,
        "precision": "fp32",
        "data": {"train": [{"shards": str(shards)}], "sequence_length": 64},
        "budget": {"steps": 12},
        "batch": {"tokens_per_step": 256, "sequences_per_micro_batch": 1},
        "optim": {"learning_rate": 0.003, "warmup_steps": 2, "schedule": "constant", "decay_type": "linear"},
        "compile": "none",
        "checkpoint": {"every_steps": 4, "keep_last": 9},
        "logging": {"every_steps": 1},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    train(folder / "recipe.yaml")
    return folder / "recipe.yaml", folder / "run"


def test_a_branch_does_not_overwrite_another_run(trunk_at_a_constant_rate):
    recipe, run = trunk_at_a_constant_rate
    before = (run / "final/model.safetensors").read_bytes()
    for check in ([], ["--check"]):
        refused = train(recipe, "--branch_from", f"{run}@8", "--budget.steps", "20", *check, check=False)
        assert refused.returncode == 2
        assert "contains a run that was not branched from another run; use another" in refused.stderr
    assert (run / "final/model.safetensors").read_bytes() == before


def test_a_budget_already_exceeded_is_rejected(trunk_at_a_constant_rate, tmp_path):
    recipe, run = trunk_at_a_constant_rate
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/final")
    refused = train(recipe, "--output", tmp_path / "run", "--budget.steps", "10", check=False)
    assert refused.returncode == 2 and "ends after step 10, but the run is at step 12" in refused.stderr


@pytest.fixture
def timed(recipe):
    """Changes the recipe to have more steps than fit into budget.minutes."""
    return change(
        recipe, optim={"schedule": "wsd"}, budget={"steps": 100_000, "minutes": 0.1}, checkpoint={"keep_last": 99}
    )


def test_minutes_end_a_run_with_its_decay_and_more_minutes_extend_it(timed, tmp_path):
    train(timed)
    run, by_clock = tmp_path / "run", events(tmp_path / "run", "control")
    assert {event["by"] for event in by_clock} == {"budget.minutes"}
    # If the machine becomes slower, the decay is shortened.
    assert [event["command"] for event in by_clock] == ["anneal"] + ["shorten"] * (len(by_clock) - 1)
    begin, end = by_clock[0]["step"], events(run, "end")[-1]["step"]
    assert begin < end == by_clock[-1]["total_steps"] <= 1 + 1.2 * begin
    assert (run / "final/model.safetensors").exists() and rates(run)[end] < 0.5 * max(rates(run).values())
    assert "already complete" in train(timed).stdout
    train(timed, "--budget.minutes", "0.15")
    assert events(run, "resume")[-1]["step"] <= begin, "the run must resume from before the decay"
    commands = [event["command"] for event in events(run, "control")]
    assert events(run, "end")[-1]["step"] > begin and commands.count("anneal") == 2


def test_minutes_include_earlier_starts(timed, tmp_path):
    train(timed, "--checkpoint.stop_at_step", "4", check=False)
    state = json.loads((tmp_path / "run/checkpoints/step-00000004/trainer_state.json").read_text())["state"]
    assert 0 < state["seconds"] < 60
    refused = train(timed, "--budget.minutes", "0.0001", check=False)
    assert refused.returncode == 2 and "raise it, or set it to null" in refused.stderr
    assert "up to step 4" in refused.stderr and "Traceback" not in refused.stderr
    told = train(timed, "--check").stdout
    assert "of budget.minutes used" in told and "at most 0.1 min (budget.minutes)" in told
    train(timed, "--budget.minutes", "null", "--budget.steps", "12", *WITHOUT_EXPORT)
    assert events(tmp_path / "run", "end")[-1]["step"] == 12 and not events(tmp_path / "run", "control")


def test_two_ranks_start_their_decay_at_the_same_step(timed, tmp_path):
    launch("ddp", 2, "train.py", "--config", timed, *WITHOUT_EXPORT)
    controls, (end,) = events(tmp_path / "run", "control"), events(tmp_path / "run", "end")
    assert controls[0]["command"] == "anneal" and end["code"] == 0
    assert controls[0]["step"] < end["step"] == controls[-1]["total_steps"]
