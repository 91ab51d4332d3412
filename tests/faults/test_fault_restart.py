"""Tests for processes that die, hang or are stopped: the launcher restarts the group and nothing is lost."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest

from support.faults import EVERYTHING, end_of, launch_with_faults, same_tensors, short_source, tell
from support.project import events, free_port, losses, run_script

STEP_TIMEOUT, STEPS = 5.0, 20
STEPS_PER_EPOCH = 8


def arguments(recipe, run):
    return [
        "--config", recipe, "--output", run, "--budget.steps", STEPS, "--guard.step_timeout_seconds", STEP_TIMEOUT,
        "--guard.first_step_timeout_seconds", 600,
    ]  # fmt: skip


def test_dead_and_hanging_ranks(recipe, shards, tmp_path):
    """A rank that is killed in the all-reduce or hangs is restarted, and no window is lost or repeated.

    FAULTS=all also tests stopped ranks, and ranks killed during validation or in a forward pass during gradient
    accumulation.
    """
    source = json.dumps([{"shards": str(short_source(shards, tmp_path / "short", 4 * STEPS_PER_EPOCH))}])
    settings = ["--data.train", source]
    whole = launch_with_faults(tmp_path / "a", "ddp", 2, *arguments(recipe, tmp_path / "whole"), *settings)
    assert whole.code == 0, whole.output
    kills = [
        {"where": "forward", "step": 10, "micro_step": 2, "what": "SIGKILL"},
        {"where": "backward", "step": 13, "micro_step": 2, "what": "SIGKILL", "rank": 0},
        {"where": "validation", "step": 12, "what": "SIGKILL"},
    ]
    hangs = [{"where": "read", "step": 15, "what": "sleep"}, {"where": "backward", "step": 18, "what": "SIGSTOP"}]
    if not EVERYTHING:
        kills, hangs = kills[1:2], hangs[:1]
    run = launch_with_faults(
        tmp_path / "b", "ddp", 2, *arguments(recipe, tmp_path / "run"), *settings, faults=kills + hangs,
        launcher=["--max_restarts", 9],
    )  # fmt: skip
    assert run.code == 0, run.output
    # Time from the fault until all processes are dead and the launcher has started new ones.
    seconds = [run.seconds_to_restart(number) for number in range(len(kills + hangs))]
    # Allow 5 s, plus the launcher's start time because the machine may be busy. Without our own monitoring, torchrun
    # would wait 30 s for the other processes.
    allowed = STEP_TIMEOUT + run.seconds_to_start
    assert max(seconds[: len(kills)]) < allowed
    assert all(STEP_TIMEOUT < of_hang < STEP_TIMEOUT + allowed for of_hang in seconds[len(kills) :])
    stacks = "".join(path.read_text() for path in (tmp_path / "run").glob("stacks-rank-*.txt"))
    steps = {int(step) for step in re.findall(r" s after step (\d+)", stacks)}
    assert steps == {fault["step"] - 1 for fault in hangs}, "waiting for a dead rank must not count as a hang"
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert same_tensors(tmp_path / "run", tmp_path / "whole", STEPS)
    windows = run.windows()
    assert windows == whole.windows(), "the windows must be read in the same order"
    for first in (1, 1 + STEPS_PER_EPOCH):
        epoch = list(chain.from_iterable(windows[step] for step in range(first, first + STEPS_PER_EPOCH)))
        assert len(set(epoch)) == len(epoch) == 4 * STEPS_PER_EPOCH, "each epoch must contain every window once"
    assert not run.left
    assert "read_with_faults" in (tmp_path / "run/stacks-rank-00001.txt").read_text(), (
        "the stack must show where the process hung"
    )
    for number, fault in enumerate(kills + hangs):
        injected = f"{fault['what']} in {fault['where']}, step {fault['step']}, second epoch"
        outcome = "all down, started again; every bit and window as unbroken"
        tell("4, 17, 18", injected, outcome, run.recovery([number]))


def test_a_long_step_of_short_micro_steps_is_not_a_hang(recipe, tmp_path):
    """A step may exceed the timeout (2.5 s) if none of its four micro-steps (1 s each) does."""
    settings = ["--config", recipe, "--output", tmp_path / "run", "--budget.steps", 2, "--validation.sequences", 1]
    slow = [{"where": "forward", "step": 2, "what": "sleep", "seconds": 1.0, "always": True}]
    settings += ["--guard.step_timeout_seconds", 2.5]
    run = launch_with_faults(tmp_path / "a", "single", 1, *settings, faults=slow)
    assert run.code == 0, run.output


@pytest.mark.skipif(not EVERYTHING, reason="five starts of two processes; in make test-faults")
def test_a_crash_at_the_same_step_every_time(recipe, tmp_path):
    """The run gives up after repeated crashes at the same step, even if the launcher allows more restarts."""
    crash = [{"where": "forward", "step": 6, "what": "error", "always": True}]
    run = launch_with_faults(
        tmp_path / "notes", "ddp", 2, *arguments(recipe, tmp_path / "run"), "--checkpoint.async_save", "false",
        faults=crash, launcher=["--max_restarts", 6],
    )  # fmt: skip
    assert run.code != 0 and not run.left
    ends = [end["code"] for end in events(tmp_path / "run", "end")]
    assert ends == [1, 1, 1, 1, 1, 18], "the run must give up after three restarts from step 4"
    assert len(run.starts()) == 2 * 7, "one more restart must give up at once"
    assert "started 4 times from step 4" in end_of(tmp_path / "run")["reason"]
    again = run_script("train.py", *arguments(recipe, tmp_path / "run"), check=False)
    assert again.returncode == 0, "a manual start must try again"
    tell("22", "the same error in step 6 of every start, --max_restarts 6", "3 restarts without progress, then 18")


@pytest.mark.skipif(not EVERYTHING, reason="three launches of two processes; in make test-faults")
def test_a_death_on_one_of_two_machines(recipe, tmp_path):
    """Each of two machines has its own launcher. Both restart their process and rejoin the group."""
    settings = ["--config", recipe, "--budget.steps", STEPS, "--output"]
    whole = launch_with_faults(tmp_path / "whole", "ddp", 2, *settings, tmp_path / "run-whole")
    assert whole.code == 0, whole.output
    port = free_port()
    kill = [{"where": "forward", "step": 10, "micro_step": 2, "what": "SIGKILL", "rank": 1}]

    def machine(rank):
        meeting = ["--main_process_ip", "127.0.0.1", "--main_process_port", port, "--max_restarts", 9]
        return launch_with_faults(
            tmp_path / f"machine-{rank}", "ddp", 2, *settings, tmp_path / "run", faults=kill,
            launcher=["--num_machines", 2, "--machine_rank", rank, *meeting],
        )  # fmt: skip

    with ThreadPoolExecutor() as pool:
        machines = list(pool.map(machine, (0, 1)))
    assert [run.code for run in machines] == [0, 0], machines[0].output + machines[1].output
    assert [len(run.starts()) for run in machines] == [2, 2] and not machines[0].left + machines[1].left
    assert losses(tmp_path / "run") == losses(tmp_path / "run-whole")
    assert same_tensors(tmp_path / "run", tmp_path / "run-whole", STEPS)
    tell("18", "SIGKILL on one of two launchers, as on two machines", "both start again, every bit as unbroken")
