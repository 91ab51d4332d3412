"""Tests for spot machines that vanish with their disk, and for mirrors that are full or hang.

A machine vanishes when all its processes get SIGKILL and its run folder is removed. The next start resumes from the
mirror.
"""

import json
import math
import random
import shutil
import time

import pytest

from support.faults import EVERYTHING, end_of, kill_everything, launch_with_faults, same_tensors, tell, wait_until
from support.mirrors import steps_there
from support.project import events, losses

STEPS, SAVED_EVERY = 16, 4
NO_WAIT = {
    "pretrain.checkpoint.mirror_lease.SILENT_SECONDS": 0.2,
    "pretrain.checkpoint.mirror_lease.LOOK_SECONDS": 0.1,
}
"""Shortened timeouts, because all lease holders are dead in these tests."""


def vanish(process, folder, run):
    """Simulates the loss of a machine: kills all processes and removes the run folder."""
    kill_everything(process, folder)
    while run.exists():  # dying processes may still write
        shutil.rmtree(run, ignore_errors=True)


def live(folder, run, mirror, strategy, processes, *arguments, hang=None, copied=None, fresh=False):
    """Trains to the end on one machine, or hangs at step `hang` and loses the machine once the mirror has step
    `copied`."""
    faults = [] if hang is None else [{"where": "forward", "step": hang, "what": "sleep"}]
    killed = []

    def meanwhile(process):
        if hang is not None:
            wait_until(lambda: (folder / "fault-0").exists() and max([-1, *steps_there(mirror)]) >= copied, process)
            vanish(process, folder, run)
            killed.append(time.time())

    started = time.time()
    life = launch_with_faults(
        folder, strategy, processes, *arguments, faults=faults, meanwhile=meanwhile, fresh=fresh, constants=NO_WAIT
    )
    assert hang is not None or life.code == 0, life.output
    first = [note["time"] for note in life.notes(0) if note["event"] == "first read"]
    steps = [note["step"] for note in life.notes(0) if note["event"] == "read"]
    return {"seconds_to_first_step": first[0] - started, "steps": len(set(steps)), "killed": killed, "life": life}


def test_a_lost_disk_costs_the_steps_since_the_last_copy(recipe, tmp_path):
    """A run loses its disk twice and continues from the mirror, with accelerate, torchrun and a single process."""
    run, mirror = tmp_path / "run", tmp_path / "other/disk"
    settings = ["--config", recipe, "--budget.steps", STEPS, "--optim.learning_rate", 1e-4, "--output"]
    whole = launch_with_faults(tmp_path / "whole-notes", "ddp", 2, *settings, tmp_path / "whole")
    assert whole.code == 0, whole.output
    settings += [run, "--checkpoint.mirror", mirror]
    live(tmp_path / "life-1", run, mirror, "ddp", 2, *settings, hang=10, copied=8)
    again = live(tmp_path / "life-2", run, mirror, "torchrun", 2, *settings, hang=15, copied=12)
    assert again["seconds_to_first_step"] < 60
    log = [json.loads(line) for line in (mirror / "run/metrics.jsonl").read_text().splitlines()]
    copied = {line["step"]: line["loss"] for line in log if line["event"] == "train"}
    unbroken = losses(tmp_path / "whole")
    assert copied == {step: unbroken[step] for step in copied} and set(copied) >= set(range(1, 13)), (
        "losses must be identical"
    )
    assert same_tensors(mirror / "run", tmp_path / "whole", 12)
    last = live(tmp_path / "life-3", run, mirror, "single", 1, *settings)
    assert [event["step"] for event in events(run, "fetch")] == [8, 12]
    assert last["steps"] == STEPS - 12
    ours = losses(run)
    assert set(ours) == set(unbroken), "the loss curve must be complete"
    assert max(abs(ours[step] - unbroken[step]) for step in unbroken) < 1e-6, (
        "only rounding may differ with one process"
    )
    assert steps_there(mirror) == [12, 16] and (mirror / "run/final/MANIFEST.json").exists()
    assert (mirror / "run/metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes(), (
        "the mirrored log must be complete"
    )
    seconds = f"first step {again['seconds_to_first_step']:.0f} s after the start"
    tell("31", "SIGKILL to all and the run's folder removed, twice; 2, 2 and 1 processes", "bits as unbroken", seconds)


@pytest.mark.parametrize(
    "faults", [{"errno": "ENOSPC"}, {"hangs": True}][0 if EVERYTHING else 1 :], ids=lambda faults: next(iter(faults))
)
def test_a_mirror_that_takes_nothing_costs_no_step(recipe, tmp_path, faults):
    mirror = tmp_path / "mirror"
    (tmp_path / "mirror.faults").write_text(json.dumps(faults))
    settings = ["--config", recipe, "--checkpoint.mirror", f"faulty://{mirror}", "--checkpoint.mirror_wait_seconds", 1]
    run = launch_with_faults(tmp_path / "notes", "single", 1, *settings)
    assert run.code == 0 and end_of(tmp_path / "run")["code"] == 0, run.output
    said = [event["message"] for event in events(tmp_path / "run", "warning")]
    (left,) = [text for text in said if "to the mirror within 1 s" in text]
    assert left.startswith("could not copy step 12 and final/") and "pretrain.checkpoint.mirror_copy" in left
    assert steps_there(mirror) == [] and (tmp_path / "run/final/model.safetensors").exists()
    tell("32", f"a mirror that is {'full' if 'errno' in faults else 'hanging'}", "done; it says what was not copied")


def test_a_mirror_that_cannot_be_written_blocks_no_start(recipe, tmp_path):
    """A run with local checkpoints, finished or not, starts even if the mirror isn't writable."""
    run, mirror = tmp_path / "run", tmp_path / "mirror"
    settings = ["--config", recipe, "--checkpoint.mirror", f"faulty://{mirror}", "--checkpoint.mirror_wait_seconds", 1]
    settings += ["--output", run]
    first = launch_with_faults(tmp_path / "first", "single", 1, *settings, "--checkpoint.stop_at_step", 8)
    assert steps_there(mirror)[-1] == 8, first.output
    (mirror / "run/run.json").write_text("{")
    (tmp_path / "mirror.faults").write_text('{"errno": "EROFS"}')
    second = launch_with_faults(tmp_path / "second", "single", 1, *settings)
    assert second.code == 0 and (run / "final/model.safetensors").exists(), second.output
    said = [event["message"] for event in events(run, "warning")]
    assert any(text.startswith("damaged on the mirror: run.json (cannot be read") for text in said)
    assert any("could not be reached or written to at startup (OSError: [Errno 30]" in text for text in said)
    assert any(text.startswith("could not copy step 12 and final/ to the mirror within 1 s") for text in said)
    assert any(text.startswith("still damaged on the mirror: run.json") for text in said)
    third = launch_with_faults(tmp_path / "third", "single", 1, *settings)
    assert third.code == 0 and "is already complete" in third.output
    tell(
        "34", "a mirror that is read-only, one of its files damaged", "the run goes on, ends with 0, says what is left"
    )


STEP_SECONDS, HOUR_SECONDS, SECONDS_BETWEEN_KILLS = 1.0, 3600, 300
SAVED_EVERY_IN_THE_HOUR = 5


@pytest.mark.skipif(not EVERYTHING, reason="minutes; in make test-faults")
def test_an_hour_of_spot_machines(recipe, tmp_path):
    """Simulates an hour on a dozen spot machines that vanish at random moments, one of them with a single process.

    Each step represents STEP_SECONDS. Before a machine is killed, the test waits until the mirror has every checkpoint
    older than two seconds, which is how long a copy takes. Startup is real, including imports. Reports the fraction of
    computed steps that were kept, and the fraction of time spent on them.
    """
    run, mirror = tmp_path / "run", tmp_path / "mirror"
    steps, chance = round(HOUR_SECONDS / STEP_SECONDS), random.Random(1)
    settings = [
        "--config", recipe, "--budget.steps", steps, "--checkpoint.every_steps", SAVED_EVERY_IN_THE_HOUR,
        "--validation.every_steps", 10**6, "--optim.learning_rate", 1e-5, "--output",
    ]  # fmt: skip
    whole = launch_with_faults(tmp_path / "whole-notes", "ddp", 2, *settings, tmp_path / "whole", timeout=1500)
    assert whole.code == 0, whole.output
    settings += [run, "--checkpoint.mirror", mirror]
    kills, step = [], 0
    while (step := step + math.ceil(chance.expovariate(1 / SECONDS_BETWEEN_KILLS) / STEP_SECONDS)) < steps:
        kills += [step] if not kills or step > kills[-1] + 2 * SAVED_EVERY_IN_THE_HOUR else []
    lives, alone = [], len(kills) // 2
    lag_steps = math.ceil(2.0 / STEP_SECONDS)
    for number, end in enumerate([*kills, None]):
        processes = 1 if number == alone else 2
        strategy = ["torchrun", "ddp"][number % 2] if processes == 2 else "single"
        copied = None if end is None else (end - 1 - lag_steps) // SAVED_EVERY_IN_THE_HOUR * SAVED_EVERY_IN_THE_HOUR
        where = (tmp_path / f"life-{number}", run, mirror, strategy, processes)
        lives.append(live(*where, *settings, hang=end, copied=copied, fresh=True))
        if number == alone - 1:
            log = [json.loads(line) for line in (mirror / "run/metrics.jsonl").read_text().splitlines()]
            exact = {line["step"]: line["loss"] for line in log if line["event"] == "train"}
    unbroken, ours = losses(tmp_path / "whole"), losses(run)
    assert exact == {step: unbroken[step] for step in exact} and len(exact) > kills[alone - 2], (
        "losses must be identical up to the machine with one process"
    )
    assert set(ours) == set(unbroken)
    largest = max(abs(ours[step] - unbroken[step]) for step in unbroken)
    assert largest < 1e-5
    computed = sum(life["steps"] for life in lives)
    restarts = sum(life["seconds_to_first_step"] for life in lives)
    time_share = steps * STEP_SECONDS / (computed * STEP_SECONDS + restarts)
    assert steps / computed >= 0.95
    tell(
        "33", f"{len(kills)} machines vanish in an hour of steps of {STEP_SECONDS:g} s, with their disks",
        f"{steps / computed:.1%} of the steps kept, {time_share:.1%} of the time with the starts; losses to the last "
        f"bit up to the machine with one process, then {largest:.0e} apart",
        f"first step after {restarts / len(lives):.0f} s",
    )  # fmt: skip
