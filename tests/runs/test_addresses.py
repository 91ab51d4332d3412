"""Tests for resolving model addresses such as RUN@best to folders, and for the error messages."""

import json
from pathlib import Path

import pytest

from pretrain.errors import InputError
from pretrain.files import commit
from pretrain_tools.runs.addresses import find_models


def problems_of(call, *words) -> str:
    with pytest.raises(InputError) as caught:
        call(*words)
    return "\n".join(caught.value.problems)


def make_run(run, steps, final_step=None, losses=None):
    """Writes the parts of a run folder that are needed to resolve addresses."""
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("model: x\n")
    for step in steps:
        unfinished = run / "checkpoints" / f".saving-{step}"
        unfinished.mkdir(parents=True)
        (unfinished / "config.json").write_text("{}")
        state = {"state": {"step": step, "tokens": 10 * step}, "validation_loss": (losses or {}).get(step)}
        (unfinished / "trainer_state.json").write_text(json.dumps(state))
        commit(unfinished, run / "checkpoints" / f"step-{step:08d}", {})
    if final_step is not None:
        (run / ".f").mkdir()
        (run / ".f/config.json").write_text("{}")
        commit(run / ".f", run / "final", {})
        end = {"event": "end", "code": 0, "step": final_step, "tokens": 10 * final_step}
        (run / "metrics.jsonl").write_text(json.dumps(end) + "\n")
    return run


def found(*given):
    return [(str(address.folder), address.step, address.tokens) for g in given for address in find_models(str(g))]


def test_a_run_is_its_final_model_or_its_newest_valid_checkpoint(tmp_path, capsys):
    done, going = make_run(tmp_path / "done", [4, 8], final_step=8), make_run(tmp_path / "going", [4, 8])
    assert found(done) == [(f"{done}/final", 8, 80)]
    assert found(going) == [(f"{going}/checkpoints/step-00000008", 8, 80)]
    (going / "checkpoints/step-00000008/config.json").write_text("{ }")
    assert found(going) == [(f"{going}/checkpoints/step-00000004", 4, 40)]
    assert "step-00000008 cannot be used: config.json has 3 bytes instead of 2" in capsys.readouterr().err
    (address,) = find_models(str(done / "final"))
    assert address.run == done


def test_a_step_and_all_steps(tmp_path):
    run = make_run(tmp_path / "run", [4, 8], final_step=10)
    assert found(f"{run}@4") == [(f"{run}/checkpoints/step-00000004", 4, 40)]
    assert [step for _, step, _ in found(f"{run}@all")] == [4, 8, 10]
    for selector in ("5", "last"):
        message = problems_of(found, f"{run}@{selector}")
        assert f"--model {run}@{selector}: the part after @ must be the step of a checkpoint" in message
        assert f"got {selector!r}; available steps: 4, 8" in message
    (run / "checkpoints/step-00000004/MANIFEST.json").unlink()
    (run / "checkpoints/step-00000008/config.json").unlink()
    assert "is damaged: config.json is missing" in problems_of(found, f"{run}@8")


def test_the_best_step_is_the_one_with_the_lowest_validation_loss(tmp_path):
    run = make_run(tmp_path / "run", [4, 8, 12], losses={4: 3.0, 8: 2.5})
    assert found(f"{run}@best") == [(f"{run}/checkpoints/step-00000008", 8, 80)]
    assert find_models(f"{run}@best")[0].name == f"{run}@8"
    unmeasured = make_run(tmp_path / "unmeasured", [4])
    assert "best (if the run has validation losses)" in problems_of(found, f"{unmeasured}@best")


def test_an_address_without_a_model(tmp_path, monkeypatch):
    make_run(tmp_path / "runs/demo", [4])
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    message = (
        "--model runs/dmeo: neither a local folder nor a Hub ID (owner/name or owner/name@revision); did you mean"
    )
    assert f"{message} runs/demo?" in problems_of(found, "runs/dmeo")
    assert "--model /nowhere/at/all: neither a local folder nor" in problems_of(found, "/nowhere/at/all")
    (address,) = find_models("runs/demo@4")
    assert address.run == Path("runs/demo"), "results must not contain an absolute local path"
    assert "--model ./none: neither a local folder nor" in problems_of(found, "./none")
    assert "--model empty: neither a model folder (no config.json) nor a run" in problems_of(found, "empty")
    (tmp_path / "empty/metrics.jsonl").touch()
    assert "; wait for its first checkpoint, or save one with runs.py save RUN" in problems_of(found, "empty")
    assert "--model not a/model id: neither a local folder nor a Hub ID" in problems_of(found, "not a/model id")


def test_an_unreachable_hub_model(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="the Hub download failed"):
        find_models("nobody/no-such-model@v1")


def test_a_model_folder_with_a_manifest_is_compared_with_it(tmp_path):
    """train.py prints an evaluate.py command with RUN/final."""
    run = make_run(tmp_path / "run", [4], final_step=8)
    assert found(run / "final") == [(f"{run}/final", 8, 80)]
    (run / "final/config.json").write_text("{ }")
    for given in (run / "final", run, f"{run}@all"):
        assert "final is damaged: config.json has 3 bytes instead of 2" in problems_of(found, given)
