"""Tests for signals: all ranks stop at the same step, save and exit with the right status. Secrets never leak."""

import os
import signal
import subprocess
import time

from pretrain.files import damage
from support.faults import EVERYTHING, end_of, launch_with_faults, reached, tell, wait_until
from support.faults import notes as rank_notes
from support.project import events, losses, run_script, start_script

SECRETS = {
    "HF_TOKEN": "hf_canaryCANARYcanary1",
    "WANDB_API_KEY": "canary2canary2canary2canary2canary2canar",
    "MY_DATABASE_PASSWORD": "canary3-Tr0ub4dor",
}


def arguments(recipe, run, *more):
    return ["--config", recipe, "--output", run, "--budget.steps", 100_000, "--validation.every_steps", 100_000, *more]


def test_sigterm_between_steps_during_a_save_and_with_a_save_that_is_too_slow(recipe, tmp_path):
    """SIGTERM during a save stops the run with a checkpoint, and secrets in the environment never leak.

    FAULTS=all also tests signals between saves, during a save that is too slow, and to a single rank.
    """
    run = tmp_path / "run"

    def stop(name, step, *more, **environment):
        at_step = {"where": "read", "step": step, "what": "SIGTERM", "to": "launcher", "rank": 0}
        return launch_with_faults(
            tmp_path / name, "ddp", 2, *arguments(recipe, run), faults=[at_step, *more],
            **{"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "270", **environment, **SECRETS},
        )  # fmt: skip

    saved, outputs = 0, []
    if EVERYTHING:
        between = stop("between", 6)
        assert end_of(run)["code"] == 75, between.output
        saved, outputs = events(run, "checkpoint")[-1]["step"], [between]
        assert saved == end_of(run)["step"] == max(losses(run)) and "preempted" in end_of(run)["reason"]
        assert not between.left

    # Step 4 or 12 is being saved.
    meanwhile = stop("during", 13 if EVERYTHING else 5, {"where": "write", "nth": 1, "what": "sleep", "seconds": 2})
    assert not EVERYTHING or events(run, "resume")[-1]["step"] == saved, "no step may be lost"
    assert end_of(run)["code"] == 75, meanwhile.output
    saved = end_of(run)["step"]
    assert events(run, "checkpoint")[-1]["step"] == saved and not meanwhile.left
    outputs.append(meanwhile)

    if EVERYTHING:
        slow = {"where": "write", "nth": 1, "what": "sleep", "seconds": 600}
        killed = stop("slow", saved + 1, slow, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="3")
        assert not killed.left
        newest = sorted((run / "checkpoints").glob("step-*"))[-1]
        assert newest.name == f"step-{saved:08d}" and damage(newest) == [], "the previous checkpoint must be intact"
        tell("16", "SIGTERM, save slower than the launcher's patience", "the one before is intact; continued from it")
        outputs.append(killed)

        # Only one rank gets the signal, as when a scheduler stops one of several machines. All ranks stop at the same
        # step.
        alone = [{"where": "read", "step": saved + 3, "what": "SIGUSR1", "rank": 1}]
        last = launch_with_faults(tmp_path / "alone", "ddp", 2, *arguments(recipe, run), faults=alone, **SECRETS)
        assert end_of(run)["code"] == 75 and events(run, "resume")[-1]["step"] == saved, last.output
        assert saved + 3 <= end_of(run)["step"] <= saved + 4
        outputs.append(last)
    assert not list((run / "checkpoints").glob(".*")), "no temporary files may be left"
    where = "during a save, between steps, to one rank alone" if EVERYTHING else "during a save"
    tell("15", f"SIGTERM {where}", "one step agreed on, saved, exit 75")
    for ended in outputs:
        assert not [name for name, secret in SECRETS.items() if secret in ended.output]
    assert_no_secret(run)


def assert_no_secret(folder):
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not [name for name, secret in SECRETS.items() if secret.encode() in content], path


def test_sigterm_in_what_is_done_between_steps(recipe, tmp_path):
    """SIGTERM interrupts long work between steps: the last validation and the check of the exported model.

    FAULTS=all also tests text samples. The signal is sent either to a single rank, or to the main rank while the
    others wait for it.
    """
    run = tmp_path / "run"
    settings = ["--config", recipe, "--budget.steps", 8, "--validation.every_steps", 50, "--validation.sequences", 64]

    def stop(where, step, *more):
        """Sends SIGTERM at the start of work that would take more than 60 s."""
        faults = [{"where": where, "step": step, "what": "SIGTERM", "rank": 0}, *more]
        ended = launch_with_faults(tmp_path / where, "ddp", 2, *settings, "--output", run, faults=faults)
        seconds = end_of(run)["time"] - ended.struck()
        assert seconds < 60 and not ended.left, ended.output
        tell("15", f"SIGTERM in {where}", f"left, saved, exit {end_of(run)['code']}", f"{seconds:.1f} s to the end")
        return [event["message"] for event in events(run, "warning")]

    if EVERYTHING:
        settings += ["--samples.every_steps", 4, "--samples.prompts", "['def']"]
        warnings = stop("sample", 4, {"where": "sample", "step": 4, "what": "sleep", "seconds": 600, "rank": 0})
        assert "samples skipped because the run is stopping" in warnings
        assert (end_of(run)["code"], end_of(run)["step"]) == (75, 4) and not events(run, "sample")
        settings = settings[:-4]
    # The last rank takes two seconds for each of 32 batches. The signal reaches the other rank during its first batch.
    warnings = stop("validation", 8, {"where": "validation", "step": 8, "what": "sleep", "seconds": 2, "always": True})
    assert "validation skipped because the run is stopping" in warnings
    assert (end_of(run)["code"], end_of(run)["step"]) == (75, 8)
    assert {event["step"] for event in events(run, "validation")} == {0}
    assert damage(run / "checkpoints/step-00000008") == [] and not (run / "final").exists()

    warnings = stop("check", 0, {"where": "check", "what": "sleep", "seconds": 600, "rank": 0})
    assert {event["step"] for event in events(run, "validation")} == {0, 8}, "the restarted run must validate"
    assert any(message.startswith("verification of") and "final skipped" in message for message in warnings)
    assert end_of(run)["code"] == 0 and damage(run / "final") == []


def test_secrets_do_not_reach_trackers_logs_or_cards(recipe, tmp_path):
    result = run_script(
        "train.py", "--config", recipe, "--budget.steps", "4", "--trackers", "[tensorboard, wandb]",
        WANDB_MODE="offline", **SECRETS,
    )  # fmt: skip
    assert (tmp_path / "run/wandb").exists() and (tmp_path / "run/tensorboard").exists()
    assert not [name for name, secret in SECRETS.items() if secret in result.stdout + result.stderr]
    assert_no_secret(tmp_path / "run")
    tell("24", f"{len(SECRETS)} secrets in the environment", "in no output, log, tracker, checkpoint or card")


def test_control_c_and_a_second_start(recipe, tmp_path):
    """A second start on the same folder is rejected with the PID of the first."""
    run = tmp_path / "run"
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = start_script("train.py", *arguments(recipe, run), **pipes)
    try:
        wait_until(lambda: reached(run, 5), process)
        second = run_script("train.py", *arguments(recipe, run), check=False)
        assert second.returncode == 2 and f"process {process.pid} on" in second.stderr
        assert "Traceback" not in second.stderr
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=300)[1]
    finally:
        process.kill()
    assert process.returncode == end_of(run)["code"] == 130, errors
    assert events(run, "checkpoint")[-1]["step"] == end_of(run)["step"]
    assert not (run / ".lock").exists()
    tell("27", "a second start in the folder of a live run", "refused, by name of the first")


def test_a_second_signal_ends_at_once(recipe, tmp_path):
    run, notes = tmp_path / "run", tmp_path / "notes"
    slow = [
        {"where": "read", "step": 6, "what": "SIGTERM"},
        {"where": "write", "nth": 3, "what": "sleep", "seconds": 600},  # the second save (two files each)
    ]

    def insist(process):
        wait_until((notes / "fault-1").exists, process)
        time.sleep(1.5)
        os.kill(rank_notes(notes / "rank-0.jsonl")[0]["pid"], signal.SIGTERM)

    ended = launch_with_faults(notes, "single", 1, *arguments(recipe, run), faults=slow, meanwhile=insist)
    assert end_of(run)["code"] == 75 and "nothing saved" in end_of(run)["reason"], ended.output
    assert not ended.left
    assert damage(run / "checkpoints/step-00000004") == []


def test_the_end_between_two_log_lines_says_all_steps_and_tokens(recipe, tmp_path):
    faults = [{"where": "read", "step": 5, "what": "SIGTERM", "rank": 0}]
    more = ["--logging.every_steps", 1000, "--checkpoint.every_steps", 1000]
    launch_with_faults(tmp_path / "one", "single", 1, *arguments(recipe, tmp_path / "run", *more), faults=faults)
    end = end_of(tmp_path / "run")
    assert end["code"] == 75 and not losses(tmp_path / "run"), "no step was logged"
    assert end["step"] >= 5 and end["tokens"] == 256 * end["step"]
    assert events(tmp_path / "run", "checkpoint")[-1]["step"] == end["step"]
