"""Kills a run at twenty random moments with each of six strategies. This is the slow part of `make test-faults`."""

import json
import random

import pytest

from support.faults import EVERYTHING, launch_with_faults, same_tensors, tell
from support.project import losses
from support.tiny_models import TINY_LLAMA

LAUNCHES = [("ddp", 2), ("fsdp2", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2), ("ddp", 4), ("fsdp_tp", 4)]
"""(strategy, processes)"""
KILLS, SAVED_EVERY = 20, 3
STEPS = SAVED_EVERY * (KILLS + 2)


@pytest.mark.skipif(not EVERYTHING, reason="takes minutes per strategy; in make test-faults")
@pytest.mark.parametrize(("strategy", "processes"), LAUNCHES)
def test_twenty_kills_change_nothing(recipe, tmp_path, strategy, processes):
    """Killing random ranks twenty times between checkpoints changes neither losses nor weights, even with dropout."""
    (tmp_path / "tiny_llama.json").write_text(json.dumps(TINY_LLAMA | {"attention_dropout": 0.1}))
    settings = [
        "--config", recipe, "--budget.steps", STEPS, "--checkpoint.every_steps", SAVED_EVERY,
        "--validation.every_steps", 1000, "--attention", "eager", "--batch.tokens_per_step", 128 * processes,
        "--output",
    ]  # fmt: skip
    chance = random.Random(LAUNCHES.index((strategy, processes)))
    faults = [
        {"where": chance.choice(["read", "forward"]), "step": step + chance.randrange(SAVED_EVERY), "what": "SIGKILL"}
        | {"rank": chance.randrange(processes), "micro_step": chance.choice([1, 2])}
        for step in range(SAVED_EVERY + 1, SAVED_EVERY * (KILLS + 1) + 1, SAVED_EVERY)
    ]
    whole = launch_with_faults(tmp_path / "a", strategy, processes, *settings, tmp_path / "whole")
    assert whole.code == 0, whole.output
    run = launch_with_faults(
        tmp_path / "b", strategy, processes, *settings, tmp_path / "run", faults=faults,
        launcher=["--max_restarts", 2 * KILLS], timeout=1500,
    )  # fmt: skip
    assert run.code == 0, run.output
    down = [run.seconds_to_restart(number) for number in range(KILLS)]
    first_steps = [run.seconds_to_first_step(number) for number in range(KILLS)]
    assert max(down) < 60 and max(first_steps) < 300, "generous limits: an idle machine needs 5 s and a minute"
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert same_tensors(tmp_path / "run", tmp_path / "whole", STEPS)
    assert run.windows() == whole.windows()
    same = "losses, weights, moments and windows as unbroken, to the last bit"
    tell(
        "2, 3",
        f"{KILLS} x SIGKILL at random micro-steps, {strategy} on {processes} processes, dropout",
        same,
        run.recovery(range(KILLS)),
    )


@pytest.mark.skipif(not EVERYTHING, reason="in make test-faults; test_strategies.py compares only losses")
def test_one_process_reads_what_two_read(recipe, tmp_path):
    """One process reads the same windows as two. The learning rate is low to keep rounding differences small."""
    settings = ["--config", recipe, "--optim.learning_rate", 1e-4, "--output"]
    runs = {
        processes: launch_with_faults(tmp_path / f"notes-{processes}", name, processes, *settings, tmp_path / name)
        for name, processes in (("single", 1), ("ddp", 2))
    }
    assert runs[1].windows() == runs[2].windows()
    one, two = losses(tmp_path / "single"), losses(tmp_path / "ddp")
    largest = max(abs(one[step] - two[step]) for step in one)
    assert largest < 1e-6
    tell("5", "one process, and two", f"same windows in the same order; losses at most {largest:.0e} apart")
