"""Processes that die, hang or are stopped: the group goes down, the launcher starts it again, nothing is lost."""

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
    """In the second epoch killed in the all-reduce at the end of accumulation, and hanging.

    With FAULTS=all also killed in the forward pass in the middle of accumulation and in validation, and stopped.
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
    # From the fault until everybody is dead and the launcher has started the next processes.
    seconds = [run.seconds_to_restart(number) for number in range(len(kills + hangs))]
    # 5 s, and on a machine that is busy as much more as the launcher took to start: 0.1 s and 5.5 s when it is idle.
    # Where nobody watched the others, torchrun would wait 30 s for them.
    allowed = STEP_TIMEOUT + run.seconds_to_start
    assert max(seconds[: len(kills)]) < allowed
    assert all(STEP_TIMEOUT < of_hang < STEP_TIMEOUT + allowed for of_hang in seconds[len(kills) :])
    stacks = "".join(path.read_text() for path in (tmp_path / "run").glob("stacks-rank-*.txt"))
    steps = {int(step) for step in re.findall(r" s after step (\d+)", stacks)}
    assert steps == {fault["step"] - 1 for fault in hangs}, "who waits for a dead rank ends before it counts as a hang"
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert same_tensors(tmp_path / "run", tmp_path / "whole", STEPS)
    windows = run.windows()
    assert windows == whole.windows(), "the same windows in the same order"
    for first in (1, 1 + STEPS_PER_EPOCH):
        epoch = list(chain.from_iterable(windows[step] for step in range(first, first + STEPS_PER_EPOCH)))
        assert len(set(epoch)) == len(epoch) == 4 * STEPS_PER_EPOCH, "every window once in each epoch"
    assert not run.left
    assert "read_with_faults" in (tmp_path / "run/stacks-rank-00001.txt").read_text(), "where it hung"
    for number, fault in enumerate(kills + hangs):
        injected = f"{fault['what']} in {fault['where']}, step {fault['step']}, second epoch"
        outcome = "all down, started again; every bit and window as unbroken"
        tell("4, 17, 18", injected, outcome, run.recovery([number]))


def test_a_long_step_of_short_micro_steps_is_no_hang(recipe, tmp_path):
    """Four micro-steps of a second each, where a hang is 2.5 s without a sign of life."""
    settings = ["--config", recipe, "--output", tmp_path / "run", "--budget.steps", 2, "--validation.sequences", 1]
    slow = [{"where": "forward", "step": 2, "what": "sleep", "seconds": 1.0, "always": True}]
    settings += ["--guard.step_timeout_seconds", 2.5]
    run = launch_with_faults(tmp_path / "a", "single", 1, *settings, faults=slow)
    assert run.code == 0, run.output


@pytest.mark.skipif(not EVERYTHING, reason="five starts of two processes; in make test-faults")
def test_a_crash_at_the_same_step_every_time(recipe, tmp_path):
    """The launcher would start it again and again."""
    crash = [{"where": "forward", "step": 6, "what": "error", "always": True}]
    run = launch_with_faults(
        tmp_path / "notes", "ddp", 2, *arguments(recipe, tmp_path / "run"), "--checkpoint.async_save", "false",
        faults=crash, launcher=["--max_restarts", 6],
    )  # fmt: skip
    assert run.code != 0 and not run.left
    ends = [end["code"] for end in events(tmp_path / "run", "end")]
    assert ends == [1, 1, 1, 1, 1, 18], "from step 0; from step 4 and three restarts; the next gives up"
    assert len(run.starts()) == 2 * 7, "one more repeats that at once"
    assert "started 4 times from step 4" in end_of(tmp_path / "run")["reason"]
    again = run_script("train.py", *arguments(recipe, tmp_path / "run"), check=False)
    assert again.returncode == 0, "a person's start tries again, here without the fault"
    tell("22", "the same error in step 6 of every start, --max_restarts 6", "3 restarts without progress, then 18")


@pytest.mark.skipif(not EVERYTHING, reason="three launches of two processes; in make test-faults")
def test_a_death_on_one_of_two_machines(recipe, tmp_path):
    """Two launchers with a process each, as on two machines: each starts its own again, and they meet again."""
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
