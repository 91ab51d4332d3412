"""Tests for non-finite and wrong values: skipped steps, deterministic rollbacks, and the final stop."""

import json
import shutil

import pytest
from safetensors.torch import load_file

from pretrain.files import damage
from support.faults import EVERYTHING, end_of, launch_with_faults, tell
from support.project import events, losses

TOLERANT = ["--guard.rollback_steps", 0, "--validation.every_steps", 50]


def without_times(run, *names):
    """Returns the events with these names, without fields that depend on the clock or the folder."""
    clocks = ("time", "tokens_per_second", "mfu", "step_seconds", "data_seconds", "peak_memory_bytes", "run")
    clocks += ("seconds", "stall_seconds", "joules")
    found = [event for name in names for event in events(run, name)]
    return [{key: value for key, value in event.items() if key not in clocks} for event in found]


def test_bad_steps_and_a_copy_that_differs(recipe, tmp_path):
    """One NaN skips a step, three NaNs cause a rollback, and a parameter that differs between ranks causes a restart.

    The steps after the rollback are trained both before and after the restart, with identical results. With
    FAULTS=all, the whole run is repeated.
    """
    faults = [
        {"where": "forward", "step": 3, "what": "nan"},
        *({"where": "forward", "step": step, "what": "nan"} for step in (6, 7, 8)),
        {"where": "forward", "step": 10, "what": "change", "rank": 1},
    ]
    settings = ["--config", recipe, *TOLERANT, "--guard.replica_check_every_steps", 2]
    settings += ["--averaging", "{kind: tail, every_steps: 1, tail_fraction: 1.0}"]
    runs = ["one", "two"] if EVERYTHING else ["one"]
    for name in runs:
        output = ["--output", tmp_path / name]
        run = launch_with_faults(
            tmp_path / f"notes-{name}", "ddp", 2, *settings, *output, faults=faults, launcher=["--max_restarts", 3]
        )
        assert run.code == 0, run.output
        ends = events(tmp_path / name, "end")
        assert [end["code"] for end in ends] == [1, 0]
        assert ends[0]["reason"].startswith("the replicas' weights differ") and ends[0]["step"] == 10
        assert [event["step"] for event in events(tmp_path / name, "skip")] == [3, 6, 7, 8]
        (rollback,) = events(tmp_path / name, "rollback")
        assert (rollback["to_step"], rollback["first_step"], rollback["last_step"]) == (4, 6, 8)
        # Steps 6 to 8 of 4 sequences are skipped, so later steps read what they would have read three steps later.
        assert rollback["samples"] == [20, 12]
        windows = run.windows()
        assert len({window for step in windows.values() for window in step}) == 12 * 4, "no window may be read twice"
    last = tmp_path / runs[0] / "checkpoints/step-00000012"
    state = json.loads((last / "trainer_state.json").read_text())["state"]
    assert state["average"] == {"kind": "tail", "first_step": 1, "count": 12}, (
        "the average must be rolled back with the weights"
    )
    assert all(tensor.isfinite().all() for tensor in load_file(last / "average.safetensors").values())
    trained = without_times(tmp_path / runs[0], "train")
    again = [line for line in trained if line["step"] == 9]
    assert len(again) == 2 and again[0] == again[1], "step 9 must be identical before and after the restart"
    if EVERYTHING:
        names = ("train", "skip", "rollback", "resume")  # without "checkpoint", which is logged late
        first, second = (without_times(tmp_path / name, *names) for name in runs)
        assert first == second, "the same faults must have exactly the same outcome"
    tell("19", "NaN on one rank, for one step and for three", "skipped on all; rolled back; the same again")
    tell("26", "one parameter changed on rank 1", "found in the same step, exit 1, continued", run.recovery([4]))


def test_spikes_are_rolled_back_three_times_and_then_stop_the_run(recipe, tmp_path):
    spikes = [{"where": "forward", "step": step, "what": "spike", "always": True} for step in (13, 14, 15)]
    run = tmp_path / "run"
    ended = launch_with_faults(
        tmp_path / "notes", "single", 1, "--config", recipe, "--output", run, "--budget.steps", 30, *TOLERANT,
        "--guard.rollback_steps", 2, faults=spikes,
    )  # fmt: skip
    assert end_of(run)["code"] == 16, ended.output
    assert "3 earlier rollbacks" in end_of(run)["reason"]
    rollbacks = events(run, "rollback")
    assert [event["to_step"] for event in rollbacks] == [8, 8, 8]
    assert len({tuple(event["samples"]) for event in rollbacks}) == 3, "each rollback must skip different data"
    assert len(events(run, "spike")) == 4 * 3
    assert max(losses(run)) == 15
    newest = sorted((run / "checkpoints").glob("step-*"))
    assert newest[0].name == "step-00000008" and damage(newest[0]) == []
    tell("20", "the same spike over three steps, again and again", "rolled back 3 times, other data left out; exit 16")


def test_a_rollback_may_halve_the_rate_and_read_the_same_again_and_a_run_end_without_a_save(recipe, tmp_path):
    spikes = [{"where": "forward", "step": step, "what": "spike"} for step in (13, 14, 15)]
    run = tmp_path / "run"
    settings = [
        "--config", recipe, "--output", run, "--budget.steps", 18, *TOLERANT, "--guard.on_spike",
        "halve_learning_rate", "--optim.schedule", "constant", "--checkpoint.save_final", "false",
    ]  # fmt: skip
    ended = launch_with_faults(tmp_path / "notes", "single", 1, *settings, faults=spikes)
    assert end_of(run)["code"] == ended.code == 0, ended.output
    (rollback,) = events(run, "rollback")
    assert (rollback["to_step"], rollback["change"]) == (12, "halving the learning rate")
    rates = [(line["step"], line["learning_rate"]) for line in events(run, "train") if line["step"] in (12, 13, 18)]
    assert rates == [(12, 0.003), (13, 0.003), (13, 0.0015), (18, 0.0015)]
    read = [note["windows"] for note in ended.notes(0) if note["event"] == "read" and note["step"] == 13]
    half = len(read) // 2
    assert half and read[:half] == read[half:], "the same windows must be read again"
    assert max(path.name for path in (run / "checkpoints").glob("step-*")) == "step-00000016"
    assert not (run / "final").exists()
    # If resumed from before the spikes, the run takes the same actions again, and all later steps are identical.
    shutil.rmtree(run / "checkpoints/step-00000016")
    last = {line["step"]: line for line in without_times(run, "train")}
    again = launch_with_faults(tmp_path / "again", "single", 1, *settings)
    assert again.code == 0 and events(run, "resume")[-1]["step"] == 12, again.output
    assert without_times(run, "train")[-6:] == [last[step] for step in range(13, 19)]
    assert len(events(run, "rollback")) == 1
    tell("20", "a spike over three steps, the rate halved; started again from before it", "the same to the last bit")


def test_out_of_memory_errors_suggest_settings(recipe, tmp_path):
    fault = {"where": "forward", "step": 2, "what": "memory"}
    run = tmp_path / "run"
    ended = launch_with_faults(tmp_path / "notes", "single", 1, "--config", recipe, "--output", run, faults=[fault])
    assert ended.code == 1
    assert "CUDA out of memory (injected)" in end_of(run)["reason"]
    assert (
        "Out of memory. Try these changes in order" in end_of(run)["reason"] and "\n  1. --" in end_of(run)["reason"]
    )


@pytest.mark.skipif(not EVERYTHING, reason="four launches of two processes; in make test-faults")
@pytest.mark.parametrize("strategy", ["fsdp2", "zero1", "zero2", "zero3"])
def test_nan_is_skipped_and_rolled_back_in_every_strategy(recipe, tmp_path, strategy):
    faults = [{"where": "forward", "step": step, "what": "nan"} for step in (3, 6, 7, 8)]
    run = tmp_path / "run"
    ended = launch_with_faults(
        tmp_path / "notes", strategy, 2, "--config", recipe, *TOLERANT, "--output", run, faults=faults
    )
    assert ended.code == 0, ended.output
    assert [event["step"] for event in events(run, "skip")] == [3, 6, 7, 8]
    (rollback,) = events(run, "rollback")
    assert (rollback["to_step"], rollback["samples"]) == (4, [20, 12])
    windows = ended.windows()
    assert len({window for step in windows.values() for window in step}) == 12 * 4, "no window may be read twice"
    tell("19", f"NaN on one rank, for one step and for three, {strategy}", "skipped on all; rolled back")
