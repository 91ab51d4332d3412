"""Tests for averaging models: the mean is exact, and invalid requests are rejected."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from pretrain.checkpoint.average_folder import average_folder
from pretrain.errors import InputError
from pretrain.files import SEAL_FILE, commit, damage
from pretrain.model.pretrained import load_pretrained
from pretrain_tools.runs.addresses import ModelAddress
from pretrain_tools.runs.merge import merge_models, output_folder
from support.project import run_script
from support.run_folders import write_model, write_run, write_tokenizer
from support.tiny_experts import as_the_library_saves
from support.tiny_models import TINY_LLAMA, TINY_MOE


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "run", steps=(4, 8, 12))


def saved(folder):
    return load_file(folder / "model.safetensors")


def mean_of_steps(run, *steps):
    models = [saved(run / f"checkpoints/step-{step:08d}") for step in steps]
    return {name: (sum(model[name].double() for model in models) / len(models)).float() for name in models[0]}


def test_the_last_checkpoints_of_a_run(run):
    said = run_script("runs.py", "merge", run, "--last", "2").stdout
    folder = run / "merged-8-12"
    assert f"The mean of {run}@8, {run}@12 is in {folder}." in said
    found, expected = saved(folder), mean_of_steps(run, 8, 12)
    assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in found)
    assert damage(folder) == [] and not (folder / "trainer_state.json").exists()
    assert json.loads((folder / "merge.json").read_text()) == {"models": [f"{run}@8", f"{run}@12"], "weights": "raw"}
    model = load_pretrained(str(folder))
    assert all(parameter.equal(expected[name]) for name, parameter in model.named_parameters())
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"


def test_a_full_disk_is_reported_before_writing(run, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(InputError, match=r"--output .*/mean: cannot be written \(a checkpoint needs .* free\)"):
        merge_models([f"{run}@4", f"{run}@8"], last=None, weights="raw", output=tmp_path / "mean")
    assert not any(tmp_path.iterdir())


def test_folders_of_several_dtypes_can_be_averaged(run, tmp_path):
    final, checkpoint = run / "final", run / "checkpoints/step-00000004"
    folder = tmp_path / "a/b"
    merge_models([str(final), str(checkpoint)], last=None, weights="raw", output=folder)
    ours, theirs, mean = saved(final), saved(checkpoint), saved(folder)
    assert next(iter(ours.values())).dtype == torch.bfloat16
    for name, tensor in mean.items():
        assert tensor.equal(((ours[name].double() + theirs[name].double()) / 2).float())


def test_experts_under_either_name_are_the_same_model(tmp_path):
    """Checkpoints with stacked experts and exported folders with separate experts can be averaged."""
    ours = write_model(tmp_path / "ours", write_tokenizer(tmp_path / "tokenizer"), TINY_MOE, seed=1)
    shutil.copytree(ours, theirs := tmp_path / "theirs")
    expected = as_the_library_saves(ours, theirs, torch.float32)
    (theirs / SEAL_FILE).unlink()
    commit(theirs, sealed := tmp_path / "sealed", {})
    assert expected.keys() != saved(ours).keys()
    for texts in ([str(ours), str(sealed)], [str(sealed), str(ours)]):
        folder = tmp_path / f"mean, {Path(texts[0]).name}"
        said = merge_models(texts, last=None, weights="raw", output=folder)
        assert f"--model '{folder}' --data" in said
        assert saved(folder).keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in saved(folder).items())
    wider = write_model(tmp_path / "wider", tmp_path / "tokenizer", {**TINY_MOE, "moe_intermediate_size": 48}, seed=1)
    with pytest.raises(InputError, match="have different architectures"):
        merge_models([str(sealed), str(wider)], last=None, weights="raw", output=tmp_path / "none")


def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, capsys):
    run = write_run(tmp_path / "run", steps=(4, 8, 12))
    file = run / "checkpoints/step-00000008/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    said = merge_models([str(run)], last=2, weights="raw", output=None)
    assert f"The mean of {run}@4, {run}@12 is in {run / 'merged-4-12'}." in said
    assert "step-00000008 cannot be used: " in capsys.readouterr().err


def with_average(run, step):
    """Adds averaged weights to a checkpoint."""
    folder = run / f"checkpoints/step-{step:08d}"
    average = {name: tensor + 1 for name, tensor in saved(folder).items()}
    save_file(average, folder / "average.safetensors", metadata={"format": "pt"})
    (folder / SEAL_FILE).unlink()
    commit(folder, folder.with_name("sealed"), {})
    folder.with_name("sealed").rename(folder)
    return average


def test_the_average_in_a_checkpoint_is_exported_and_read_as_a_model(tmp_path):
    run = write_run(tmp_path / "run", steps=(4,))
    average = with_average(run, 4)
    merge_models([f"{run}@4"], last=None, weights="average", output=None)
    folder = run / "merged-4"
    assert all(saved(folder)[name].equal(average[name]) for name in average)
    with average_folder(run / "checkpoints/step-00000004") as view:
        model = load_pretrained(str(view))
        assert all(parameter.equal(average[name]) for name, parameter in model.named_parameters())
    assert not view.exists()


def test_a_final_average_is_another_model_than_the_checkpoint_at_its_step(tmp_path):
    run = write_run(tmp_path / "run", steps=(4, 8))
    events = [{"event": "export", "step": 8, "weights": "average"}, {"event": "end", "step": 8, "code": 0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert "The mean of" in merge_models([str(run), f"{run}@8"], last=None, weights="raw", output=None)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"models": ["{run}@4"]}, "merge {run}@4: needs at least two models, such as RUN --last 5"),
        ({"models": ["{run}"], "last": 5}, "merge {run} --last 5: the run has only 3 intact checkpoints"),
        (
            {"models": ["{run}@4", "{run}@5"]},
            "merge {run}@5: the part after @ must be the step of a checkpoint",
        ),
        ({"models": ["{run}@4", "{run}@8", "{run}@4"]}, "merge: {run}@4 would count twice"),
        ({"models": ["{run}@4", "{run}/../run@4"]}, "merge: {run}@4 and {run}/../run@4 would count twice"),
        ({"models": ["{run}", "{run}@12"]}, "merge: {run}/final and {run}@12 would count twice"),
        ({"models": ["{run}@4", "{run}@8"], "output": "final"}, "--output {run}/final: already exists"),
        ({"models": ["{run}@4", "{run}@8"], "output": "config.yaml/x"}, "--output: {run}/config.yaml/x: "),
        ({"models": ["{run}@4", "{run}@8"], "output": "s3://b/x"}, "--output s3://b/x: must be a local path"),
        ({"models": ["{run}@4", "{run}@8"], "last": 2}, "merge {run}@4 --last 2: --last needs runs with checkpoints"),
        ({"models": ["{run}@4"], "weights": "average"}, "merge {run}@4: --weights average: no averaged weights in"),
        ({"models": ["{run}@4", "{other}"]}, "merge: --output is required, because the models aren't all from the"),
        (
            {"models": ["{run}@4", "{other}"], "output": "x"},
            "merge {run}@4 {other}: have different architectures (vocab_size 512, now 640)",
        ),
    ],
)
def test_models_without_a_mean_are_rejected(run, tmp_path, given, problem):
    names = {"run": run, "other": tmp_path / "other"}
    write_model(names["other"], write_tokenizer(tmp_path / "tokenizer"), {**TINY_LLAMA, "vocab_size": 640}, seed=1)
    given = {"last": None, "weights": "raw", "output": None, **given}
    given["models"] = [text.format(**names) for text in given["models"]]
    if output := given["output"]:
        given["output"] = Path(output) if "://" in output else run / output
    with pytest.raises(InputError) as caught:
        merge_models(**given)
    assert any(found.startswith(problem.format(**names)) for found in caught.value.problems), caught.value.problems
    assert not list(run.glob(".saving-*"))


def test_a_final_model_without_an_end_event_needs_no_output(tmp_path):
    addresses = [ModelAddress("x/final", tmp_path / "final", tmp_path), ModelAddress("x@5", tmp_path, tmp_path, 5)]
    assert output_folder(addresses, None) == tmp_path / "merged-5"
