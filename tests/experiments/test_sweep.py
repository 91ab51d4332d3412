"""Tests for runs.py sweep: rejected requests, recovery from kills, and reports."""

import json
import math
import re
import shutil
import signal
import statistics
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from pretrain.errors import InputError
from pretrain.recipe import read_run_config
from pretrain_tools.experiments import sweep as sweeps
from pretrain_tools.experiments.small_runs import RunOutcome, device_slots
from pretrain_tools.experiments.sweep import PointResult, pick_settings, verdict_of_sweep
from pretrain_tools.experiments.sweep_plan import (
    SweepRequest,
    cautions_of_sweep,
    check_points,
    config_of_run,
    read_axes,
    request_problems,
)
from support.project import events, run_script, start_script
from support.recorded_runs import record_instead_of_training


def sweep(recipe, output, *arguments, **settings):
    return run_script("runs.py", "sweep", "--config", recipe, "--output", output, *arguments, **settings)


def request(*vary, **changes):
    given = {"seeds": 1, "search": None, "changes": (), "recipe": Path("recipes/x.yaml")}
    given["output"] = Path("sweeps/x")
    return SweepRequest(axes=tuple(read_axes(vary)), **given | changes)


def test_values_are_split_only_outside_brackets():
    (axis,) = read_axes(["data.train=[{shards: a, weight: 1}, {shards: b}],[{shards: c}]"])
    assert axis.values == ("[{shards: a, weight: 1}, {shards: b}]", "[{shards: c}]")
    (axis,) = read_axes(["optim.learning_rate=1e-4..1e-2"])
    assert axis.is_range and axis.ends == (1e-4, 1e-2) and not axis.is_whole
    duplicate, descending = read_axes(["a=1,1", "b=8..2"])
    assert duplicate.values == ("1",) and descending.ends == (2, 8) and descending.is_whole


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"vary": ["a"]}, "must be a setting and its values"),
        ({"vary": ["a=1", "a=2"]}, "passed twice"),
        ({"vary": ["a=1..2"]}, "requires --search"),
        ({"vary": ["a=1e-3..0.001"], "search": 5}, "the ends of a range must differ"),
        ({"vary": ["a=1,2"], "search": 5}, "requires a range"),
        ({"vary": ["seed=1,2"], "seeds": 2}, "use only one of them"),
        ({"vary": ["output=a,b"]}, "its own folder"),
        ({"vary": ["a=1,2"], "output": Path("s3://b/x")}, "--output s3://b/x: must be a local path"),
        ({"vary": ["a=1,2"], "changes": (("a", "3"),)}, "use only one of them"),
    ],
)
def test_invalid_sweeps_are_rejected(arguments, problem):
    vary = arguments.pop("vary")
    try:
        found = request_problems(request(*vary, **arguments))
    except InputError as error:
        found = error.problems
    assert [text for text in found if problem in text], found


def refusal(asked: SweepRequest) -> str:
    with pytest.raises(InputError) as caught:
        sweeps.run_sweep(asked, None)
    return "\n".join(caught.value.problems)


def test_all_problems_of_all_runs_are_reported_before_any_starts(recipe, tmp_path):
    vary = ["optim.learning_rate=1e-3,2e-3", "batch.tokens_per_step=256,250", "data.sequence_length=64,4096"]
    said = refusal(request(*vary, seeds=2, recipe=recipe, output=tmp_path / "sweep"))
    assert "data.sequence_length: 4,096 is more than the model's max_position_embeddings" in said
    assert "250 is not a multiple of" in said and len(said.splitlines()) == len(set(said.splitlines()))
    assert not (tmp_path / "sweep").exists()


def test_different_validation_data_gives_a_warning(recipe, shards, tmp_path):
    (folder,) = {source.shards for source in read_run_config(recipe, []).data.train}
    other = tmp_path / "other"
    shutil.copytree(shards, other)
    both = f"[{{shards: {folder}}}, {{shards: {other}}}]"
    vary = [f"data.train=[{{shards: {folder}}}],{both}"]
    changes = {"recipe": recipe, "output": tmp_path / "sweep"}
    asked = request(*vary, **changes)
    (said,) = cautions_of_sweep(asked, check_points(asked, asked.grid))
    assert said.startswith("the runs use different validation data (") and "set data.validation" in said
    asked = request(*vary, changes=(("data.validation", f"[{{shards: {folder}}}]"),), **changes)
    assert not cautions_of_sweep(asked, check_points(asked, asked.grid))


@pytest.mark.parametrize(
    ("varied", "minutes", "warns"),
    [("seed=1,2", "5", True), ("seed=1,2", "null", False), ("model.num_hidden_layers=1,2", "5", False)],
)
def test_a_time_limit_gives_a_warning_unless_model_sizes_are_compared(recipe, tmp_path, varied, minutes, warns):
    asked = request(varied, recipe=recipe, output=tmp_path / "sweep", changes=(("budget.minutes", minutes),))
    said = cautions_of_sweep(asked, check_points(asked, asked.grid))
    assert ["set --budget.minutes null" in text for text in said] == [True] * warns


def test_equal_values_in_different_words_are_refused(recipe, tmp_path):
    vary = ["optim.learning_rate=5e-3,0.005,1e-2", "data.document_mask=true,True"]
    said = refusal(request(*vary, recipe=recipe, output=tmp_path / "sweep")).splitlines()
    assert sorted(said) == [
        "--vary data.document_mask: true and True are the same value; list it once",
        "--vary optim.learning_rate: 5e-3 and 0.005 are the same value; list it once",
    ]
    assert not (tmp_path / "sweep").exists()


def test_each_gpu_takes_a_run_and_processors_are_divided(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in device_slots(None)] == ["3", "5"]
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in device_slots(3)] == ["3", "5", "3"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("pretrain.limits.available_cores", lambda: 9)
    assert device_slots(None) == [{}] and device_slots(2) == [{"OMP_NUM_THREADS": "4"}] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert device_slots(2) == [{}, {}], "the user's OMP_NUM_THREADS must stay unchanged"


def finished_run(folder, loss):
    return RunOutcome(folder, "finished", 8, {8: {"x": loss}})


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ([3.11, 3.21], "0.1095 below the next best (90% interval 0.1063 to 0.1127"),
        ([2.9, 3.5], "not significant"),
        ([], "best"),
    ],
)
def test_the_verdict_depends_on_the_spread_of_the_seeds(second, said, tmp_path):
    """A difference between settings is compared with the spread across seeds, here 0.1."""

    def point(losses):
        return PointResult({"a": "1"}, 9, [finished_run(tmp_path, loss) for loss in losses])

    best = point([3.0, 3.101])
    text = verdict_of_sweep([best, point(second)] if second else [best])
    assert said in text.replace("Best", "best") and ("interval" in text) == bool(second)


def test_a_search_learns_from_earlier_trials_and_is_deterministic(tmp_path):
    pytest.importorskip("optuna")
    asked = request("optim.learning_rate=1e-4..1e-1", "optim.name=adamw,muon", search=20, output=tmp_path)

    def result(settings, number):
        distance = abs(math.log10(float(settings["optim.learning_rate"])) + 2)
        return PointResult(settings, 100, [finished_run(tmp_path / str(number), 3 + distance)])

    tried = []
    for number in range(20):
        settings = pick_settings(asked, tried, set())
        assert settings == pick_settings(asked, tried, set()), "the same trial must be picked again after a kill"
        tried.append(result(settings, number))
    distances = [result.mean_loss - 3 for result in tried]
    assert statistics.fmean(distances[10:]) < statistics.fmean(distances[:10]) and min(distances) < 0.2
    assert len({json.dumps(result.settings) for result in tried}) == 20


def test_a_search_trains_what_it_picks_and_is_reported(recipe, tmp_path, monkeypatch, capsys):
    pytest.importorskip("optuna")
    trained = record_instead_of_training(
        monkeypatch, lambda config: {"source": 3 + abs(math.log10(config.optim.learning_rate) + 2)}
    )
    output = tmp_path / "found"
    asked = request(
        "optim.learning_rate=1e-4..1e-1", search=5, recipe=recipe, output=output, changes=(("budget.steps", "3"),)
    )
    assert sweeps.run_sweep(asked, 2) == 0
    said = capsys.readouterr()
    assert len(trained) == 5 and "5 runs, 2 runs at a time" in said.err and "Best: optim.learning_rate" in said.out
    trials = json.loads((output / "trials.json").read_text())["trials"]
    assert [f"learning_rate={trial['optim.learning_rate']}" for trial in trials] == trained
    results = json.loads((output / "results.json").read_text())["results"]
    losses = [point["loss"] for point in results]
    assert losses == sorted(losses) and losses[0] == pytest.approx(min(losses))
    assert sweeps.run_sweep(asked, 2) == 0 and capsys.readouterr().out == said.out and len(trained) == 5
    assert "use the same --vary" in refusal(replace(asked, axes=tuple(read_axes(["optim.learning_rate=1e-4..1e-2"]))))


def test_a_search_ends_when_everything_was_tried(recipe, tmp_path, monkeypatch, capsys):
    pytest.importorskip("optuna")
    trained = record_instead_of_training(monkeypatch, lambda config: {"source": 3 / config.budget.steps})
    asked = request("budget.steps=2..4", search=6, recipe=recipe, output=tmp_path / "found")
    assert sweeps.run_sweep(asked, 1) == 0
    assert len(trained) == 3 and "stopping after 3 trials: found no untried" in capsys.readouterr().err
    assert len(json.loads((tmp_path / "found/results.json").read_text())["results"]) == 3


def test_only_its_own_folder_continues_a_sweep(recipe, tmp_path, monkeypatch):
    trained = record_instead_of_training(monkeypatch, lambda config: {"x": config.optim.learning_rate})
    output = tmp_path / "sweep"
    asked = request("optim.learning_rate=1e-3,2e-3", recipe=recipe, output=output)
    assert sweeps.run_sweep(asked, None) == 0
    record = output / "recipes/learning_rate=1e-3.json"
    settings = json.loads(record.read_text())
    del settings["guard.loss_window"]  # as if the setting had been added after the sweep
    # As if an earlier version had written it, with old names.
    settings["guard.distance"] = settings.pop("guard.rollback_steps")
    settings["optim.width_transfer"] = settings.pop("optim.parametrization").replace("standard", "none")
    record.write_text(json.dumps(settings))
    assert sweeps.run_sweep(asked, None) == 0 and len(trained) == 2
    changed = (("guard.loss_window", "9"),)
    assert "guard.loss_window was null, but is now 9" in refusal(replace(asked, changes=changed))

    run = output / "runs/learning_rate=1e-3"
    before = sorted(run.iterdir())
    assert f"--output {run}: contains other files; use another folder" in refusal(replace(asked, output=run))
    assert sorted(run.iterdir()) == before and len(trained) == 2


def test_another_sweep_does_not_overwrite_the_results_in_its_folder(recipe, tmp_path, monkeypatch):
    trained = record_instead_of_training(monkeypatch, lambda config: {"x": config.optim.learning_rate})
    output = tmp_path / "sweep"
    asked = request("optim.learning_rate=1e-3,2e-3", recipe=recipe, output=output)
    assert sweeps.run_sweep(asked, None) == 0
    before = (output / "results.json").read_bytes()
    held = '--vary {"optim.learning_rate": ["1e-3", "2e-3"]}, but got --vary {"optim.'
    for vary in ("optim.weight_decay=0,0.1", "optim.learning_rate=2e-3,4e-3"):
        said = refusal(replace(asked, axes=tuple(read_axes([vary]))))
        assert f"{output}: contains a sweep with {held}" in said and "or a different --output" in said
    assert sweep(recipe, output, "--vary", vary, check=False).returncode == 2
    assert (output / "results.json").read_bytes() == before and len(trained) == 2
    # More values keep all results.
    assert sweeps.run_sweep(replace(asked, axes=tuple(read_axes(["optim.learning_rate=1e-3,2e-3,4e-3"]))), None) == 0
    assert len(trained) == 3


def test_seeds_can_be_added_but_not_removed(recipe, tmp_path, monkeypatch):
    trained = record_instead_of_training(monkeypatch, lambda config: {"x": config.optim.learning_rate})
    asked = request("optim.learning_rate=1e-3,2e-3", recipe=recipe, output=tmp_path / "sweep")
    assert sweeps.run_sweep(asked, None) == 0 and len(trained) == 2
    more = replace(asked, seeds=3)
    for _ in range(2):
        assert sweeps.run_sweep(more, None) == 0 and len(trained) == 6
    results = json.loads((tmp_path / "sweep/results.json").read_text())["results"]
    assert [len(point["runs"]) for point in results] == [3, 3]
    said = refusal(replace(asked, seeds=2))
    assert (
        said
        == f"--seeds 2: {tmp_path}/sweep contains a sweep with 3 seeds; use --seeds 3 or more, or a different --output"
    )


def test_runs_are_exported_because_finished_runs_are_recognized_by_their_export(recipe, tmp_path):
    changes = [("checkpoint.save_final", "false")]
    asked = replace(request("optim.learning_rate=1e-3,1e-2", output=tmp_path / "x"), changes=tuple(changes))
    assert config_of_run(read_run_config(recipe, changes), asked, 1, "a").checkpoint.save_final


def test_trackers_group_the_runs_of_a_sweep_and_name_them_by_folder(recipe, tmp_path):
    config = read_run_config(recipe, [("tracking.name", "mine"), ("tracking.project", "p")])
    asked = request("optim.learning_rate=1e-3,1e-2", output=tmp_path / "rates")
    tracking = config_of_run(config, asked, 1, "a").tracking
    assert (tracking.project, tracking.group, tracking.name) == ("p", "rates", None)
    config = read_run_config(recipe, [("tracking.group", "g")])
    assert config_of_run(config, asked, 1, "a").tracking.group == "g"


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_killed_sweep_is_continued_and_then_reported(recipe, tmp_path, capsys):
    """A sweep restarted after SIGKILL finds the run that kept training, and reports a setting that fails."""
    output = tmp_path / "sweep"
    arguments = ["--vary", "optim.learning_rate=3e-3,1e-2", "--seeds", "2", "--validation.sequences", "4"]
    with start_script("runs.py", "sweep", "--config", recipe, "--output", output, *arguments) as first:
        run = output / "runs/learning_rate=3e-3,seed=1"
        wait_for((run / "metrics.jsonl").exists)
        first.send_signal(signal.SIGKILL)
    command = ["runs.py", "sweep", "--config", recipe, "--output", output, *arguments]
    with start_script(*command, stderr=subprocess.PIPE) as second:
        wait_for((output / "runs/learning_rate=3e-3,seed=2/metrics.jsonl").exists)
        second.send_signal(signal.SIGINT)
        said = second.communicate(timeout=120)[1]
    assert second.returncode == 130 and "run the same command to resume" in said
    done = sweep(recipe, output, *arguments, "--parallel", "2")
    assert len(events(run, "start")) == 1, "the run must not be started twice"
    values = json.loads((output / "results.json").read_text())
    assert [len(point["runs"]) for point in values["results"]] == [2, 2]
    means = {p["settings"]["optim.learning_rate"]: p["loss"] for p in values["results"]}
    for rate, loss in means.items():
        of_seeds = [events(output / f"runs/learning_rate={rate},seed={seed}", "validation")[-1] for seed in (1, 2)]
        assert loss == pytest.approx(statistics.fmean(event["loss"] for event in of_seeds))
        assert all(event["step"] == 12 for event in of_seeds)
    best = min(means, key=means.get)
    assert f"Best: optim.learning_rate {best}" in done.stdout
    recipe_of_best = yaml.safe_load((output / "best.yaml").read_text())
    assert (
        recipe_of_best["optim"]["learning_rate"] == float(best) and recipe_of_best["output"] == f"{tmp_path}/run_best"
    )
    assert recipe_of_best["validation"]["sequences"] == 4 and recipe_of_best["checkpoint"]["keep_last"] == 2
    assert "this run can start" in run_script("train.py", "--config", output / "best.yaml", "--check").stdout

    # The same command finds all runs finished. A different command is rejected and changes nothing.
    lines = (run / "metrics.jsonl").read_text()
    capsys.readouterr()
    asked = request(arguments[1], seeds=2, recipe=recipe, output=output, changes=(("validation.sequences", "4"),))
    assert sweeps.run_sweep(asked, None) == 0
    assert capsys.readouterr().out == done.stdout and (run / "metrics.jsonl").read_text() == lines
    other = replace(asked, changes=(*asked.changes, ("optim.weight_decay", "0")))
    assert "optim.weight_decay was 0.1, but is now 0.0" in refusal(other)

    # A run that can't continue fails alone, and its setting can't be the best.
    damaged = output / f"runs/learning_rate={best},seed=2"
    shutil.rmtree(damaged / "final")
    next(damaged.glob("checkpoints/*/model.safetensors")).write_bytes(b"")
    failed = sweep(recipe, output, *arguments)
    assert re.search(f"learning_rate={best},seed=2: ended early: .*checkpoint", failed.stderr)
    assert f"Best: optim.learning_rate {best}" not in failed.stdout and "1 of 2 combinations failed" in failed.stdout
