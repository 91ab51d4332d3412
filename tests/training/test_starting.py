"""Crash loops and restarts by the launcher must be detected, and out-of-memory errors must include advice."""

import json
import os

import pytest
import torch
import yaml

from pretrain.errors import InputError
from pretrain.parallel.ranks import Ranks
from pretrain.recipe import read_run_config
from pretrain.training.starting import (
    CrashLoopError,
    advice_on_memory,
    crashes_without_progress,
    end_to_repeat,
    is_out_of_memory,
    refuse_crash_loop,
    refuse_mixed_settings,
    remove_if_empty,
    sole_use,
)
from support.save_and_die import ranks_of, strategy_of
from support.tiny_models import TINY_LLAMA


def write(run, *lines):
    """Writes a metrics.jsonl: 4 is a start at step 4, "t7" is step 7 in the log, and "e75" is an end with status
    75."""
    kinds = {"t": ("train", "step"), "e": ("end", "code")}
    with open(run / "metrics.jsonl", "w") as file:
        for line in lines:
            event, name = ("start", "step") if isinstance(line, int) else kinds[line[0]]
            file.write(json.dumps({"event": event, name: line if isinstance(line, int) else int(line[1:])}) + "\n")
    return run


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], (0, 4)),
        ([4, "t6", "e1"], (1, 6)),
        ([4, "t6", 4, "t6", "e1", 4, "t5"], (3, 6)),
        ([4, "t6", 4, "t9", "e1"], (1, 9)),  # counts as progress, because it got further
        ([0, "t6", 0, "t6", 4, "t6"], (1, 6)),  # counts as progress, because there is a later checkpoint
        ([4, "t6", 4, "t6", "e75", 4, "t6"], (1, 6)),  # an intended end
    ],
)
def test_crashes_without_progress(tmp_path, lines, expected):
    assert crashes_without_progress(write(tmp_path, *lines), 4) == expected


def test_the_fourth_restart_is_rejected_with_a_message(tmp_path):
    refuse_crash_loop(write(tmp_path, *[4, "t6", "e1"] * 3), 4, ranks_of())
    with pytest.raises(CrashLoopError, match="started 4 times from step 4 without getting past step 6"):
        refuse_crash_loop(write(tmp_path, *[4, "t6", "e1"] * 4), 4, ranks_of())
    refuse_crash_loop(write(tmp_path, *[4, "t6", "e1"] * 4, "e18"), 4, ranks_of())


def test_all_ranks_stop_even_if_only_one_sees_the_end(tmp_path):
    views = [write(tmp_path, *[4, "t6", "e1"] * 4), tmp_path / "later"]
    views[1].mkdir()
    write(views[1], *[4, "t6", "e1"] * 4, "e18")
    children = []
    for rank in (0, 1):
        if (child := os.fork()) == 0:
            code = 1
            try:
                refuse_crash_loop(views[rank], 4, ranks_of(rank, 2, tmp_path / "store"))
            except CrashLoopError as stop:
                code = stop.exit_code
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [18, 18]


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([0, "e75"], 75),
        ([0, "e16"], 16),
        ([0, "e18"], 18),
        ([0, "e1"], None),
        ([0, "e0"], None),
        ([0, "e75", 4, "t6"], None),  # preempted earlier, but killed now, so it must continue
        ([], None),
    ],
)
def test_a_restart_by_the_launcher_repeats_an_intended_end(tmp_path, monkeypatch, lines, code):
    write(tmp_path, *lines)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert end_to_repeat(tmp_path) == code
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert end_to_repeat(tmp_path) is None, "a manual start must continue"


def test_a_line_truncated_by_a_crash_is_ignored(tmp_path):
    path = write(tmp_path, 4, "t6") / "metrics.jsonl"
    with open(path, "a") as file:
        file.write('{"event": "end", "co')
    assert crashes_without_progress(tmp_path, 4) == (1, 6)


def test_a_folder_belongs_to_one_process(tmp_path):
    run = tmp_path / "run"
    refused = pytest.raises(InputError, match=f"process {os.getpid()} on")
    with sole_use(run, ranks_of()), refused, sole_use(run, ranks_of()):
        pytest.fail("two processes must not train in one folder")
    assert not run.exists(), "an unused folder must be removed"
    run.touch()
    with pytest.raises(InputError, match="is a file; use another name"), sole_use(run, ranks_of()):
        pytest.fail("a file must not be accepted as the folder")


def test_out_of_memory_advice_has_numbers_and_strategies(tmp_path, monkeypatch):
    error, wrapped = torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("stage 0 failed to run forward")
    assert is_out_of_memory(error) and not is_out_of_memory(wrapped)
    wrapped.__cause__ = error  # as in torch's pipeline stages
    assert is_out_of_memory(wrapped)
    (tmp_path / "tiny.json").write_text(json.dumps(TINY_LLAMA))
    recipe = {
        "model": str(tmp_path / "tiny.json"), "output": "o", "compile": "none", "precision": "fp32",
        "data": {"train": [{"shards": "s"}], "sequence_length": 64}, "optim": {"learning_rate": 1e-3},
        "batch": {"tokens_per_step": 1024, "sequences_per_micro_batch": 4},
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    strategy = strategy_of()
    strategy.name, strategy.ranks, strategy.precision = "ddp", Ranks(0, 2), "fp32"
    monkeypatch.setattr("pretrain.training.starting.memory_bytes", lambda device: 2**20)
    rungs = advice_on_memory(read_run_config(path), strategy).splitlines()[1:-1]
    assert "--activation_checkpointing full" in rungs[1] and "--batch.sequences_per_micro_batch 2: needs" in rungs[2]
    assert any("accelerate_configs/zero1.yaml: needs" in rung for rung in rungs)
    assert all("in 1.0 MB" in rung for rung in rungs)
    monkeypatch.setattr("pretrain.parallel.launcher.python_path", lambda: "")
    monkeypatch.chdir(tmp_path)  # the tools can't be imported from here
    without = advice_on_memory(read_run_config(path), strategy)
    assert without.startswith("Out of memory. No suggestions are available") and "No module named" in without
    assert 'docs/failures.md, section "Out of memory"; python plan.py' in without


@pytest.mark.parametrize(("written", "stays"), [("", False), ("a line", True)])
def test_a_rejected_start_leaves_no_folder_of_empty_files(tmp_path, written, stays):
    run = tmp_path / "run"
    with pytest.raises(InputError, match="refused"), sole_use(run, Ranks()):
        (run / "train.log").write_text(written)
        raise InputError("refused")
    assert run.exists() == stays


@pytest.mark.parametrize(("second", "named"), [({"optim.learning_rate": "0.01"}, "0.003 or 0.01"), ({}, None)])
def test_processes_from_different_launches_are_rejected(recipe, tmp_path, second, named):
    children = []
    for rank, changes in enumerate(({}, {**second, "data.train.0.shards": str(tmp_path)})):
        if (child := os.fork()) == 0:
            found = "accepted"
            try:
                config = read_run_config(recipe, list(changes.items()))
                refuse_mixed_settings(config, ranks_of(rank, 2, tmp_path / "store"))
            except InputError as error:
                found = str(error)
            finally:
                (tmp_path / f"found-{rank}").write_text(found)
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    both = [(tmp_path / f"found-{rank}").read_text() for rank in (0, 1)]
    expected = f"have different settings (optim.learning_rate: {named}); use the same" if named else "accepted"
    assert all(expected in found for found in both), both


def test_a_rejected_run_keeps_what_the_user_made(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "train.log").touch()
    remove_if_empty(run)
    assert not run.exists()
    run.mkdir()
    (run / "checkpoints").symlink_to(tmp_path)
    remove_if_empty(run)
    assert (run / "checkpoints").is_symlink()
