"""Tests for Ctrl-C in a terminal: with every launcher, the prompt returns only after the run's last output."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from pretrain import launch
from pretrain.launch import status_of, supervise
from pretrain.runs.run_folder import heartbeat_path
from support.project import events, free_port, losses, run_script, start_script
from support.terminals import CONTROL_C, InTerminal

LONG = ("--budget.steps", "1000000", "--checkpoint.every_steps", "1000000", "--validation.every_steps", "1000000")
LONG += ("--logging.every_steps", "1000000")
SOON = 300
"""Timeout in seconds for work that usually takes twenty, with a margin for busy machines."""


def launched(strategy, processes, recipe):
    file = f"accelerate_configs/{strategy}.yaml"
    port = ("--main_process_port", free_port())
    allowed = ("--max_restarts", 9, "--num_processes", processes)
    return ["-m", "pretrain.launch", "--config_file", file, *allowed, *port, "train.py", recipe]


@pytest.mark.parametrize(("strategy", "processes"), [(None, 1), ("single", 1), ("ddp", 2)])
def test_control_c_ends_with_the_runs_last_output(strategy, processes, recipe, tmp_path):
    command = launched(strategy, processes, recipe) if strategy else ["train.py", recipe]
    with InTerminal(*command, *LONG) as typed:
        typed.read_until("tok/s")  # printed in the progress line; no step is logged
        typed.press(CONTROL_C)
        assert typed.finish() == 130, typed.output
    (end,) = events(tmp_path / "run", "end")
    assert end["code"] == 130 and events(tmp_path / "run", "checkpoint")[-1]["step"] == end["step"]
    assert "Traceback" not in typed.output and not re.search(r"[IWE]\d{4} ", typed.output), (
        "torchrun's own log lines must be hidden"
    )
    last = " ".join(line.strip() for line in typed.screen[-4:])
    assert f"saved at step {end['step']:,}; run the same command to resume" in last, typed.output


@pytest.mark.parametrize(("strategy", "processes"), [("single", 1), ("ddp", 2)])
def test_the_exit_status_is_that_of_the_run(strategy, processes, recipe):
    ended = run_script(*launched(strategy, processes, recipe), "--batch.tokens_per_step", "250", check=False)
    assert ended.returncode == 2, "the launcher must not replace the status with 1"
    assert ended.stderr.count("batch.tokens_per_step: 250 is not") == 1, "no process may be restarted"
    assert "Traceback" not in ended.stdout + ended.stderr


@pytest.mark.parametrize(("text", "message"), [(None, "does not exist"), ("a: [", "while parsing")])
def test_an_unusable_config_file_is_bad_input(text, message, tmp_path):
    """With any other status, --supervise would restart the run forever."""
    if text is not None:
        (tmp_path / "own.yaml").write_text(text)
    ended = run_script("-m", "pretrain.launch", "--config_file", tmp_path / "own.yaml", "train.py", check=False)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr and message in ended.stderr


def test_a_port_in_use_is_reported_without_a_traceback():
    """--supervise tries again, because an earlier launch may still be ending."""
    with socket.create_server(("localhost", 0)) as server:
        machines = ("--num_machines", "2", "--machine_rank", "0", "--main_process_ip", "localhost")
        port = ("--main_process_port", server.getsockname()[1], "--num_processes", "2")
        config = ("--config_file", "accelerate_configs/ddp.yaml")
        ended = run_script("-m", "pretrain.launch", *config, *machines, *port, "train.py", check=False)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr and "specify a different port" in ended.stderr


@pytest.mark.parametrize("to", ["launcher", "process"])
def test_sigusr1_saves_and_ends_despite_allowed_restarts(to, recipe, tmp_path):
    run = tmp_path / "run"
    command = launched("ddp", 2, recipe)
    with start_script(*command, *LONG, "--logging.every_steps", 1, stderr=subprocess.PIPE) as launcher:
        try:
            deadline = time.monotonic() + SOON
            while not (heartbeat_path(run, 0).exists() and losses(run)):
                assert time.monotonic() < deadline and launcher.poll() is None
                time.sleep(0.05)
            beat = json.loads(heartbeat_path(run, 0).read_text())
            os.kill(launcher.pid if to == "launcher" else beat["pid"], signal.SIGUSR1)
            assert launcher.wait(SOON) == 75
        finally:
            launcher.terminate()  # and its processes
        said = launcher.stderr.read()
    (end,) = events(run, "end")
    assert end["code"] == 75 and events(run, "checkpoint")[-1]["step"] == end["step"]
    assert len(events(run, "start")) == 1 == said.count("Loading ..."), said


def test_help_names_its_own_option_too():
    shown = run_script("-m", "pretrain.launch", "--help")
    assert "--supervise" in shown.stdout.partition("usage:")[0] and "--num_processes" in shown.stdout


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_signal_before_the_first_process_ends_the_launcher(number, code):
    """torchrun handles signals only once its first process has started."""
    waits = "import time; from pretrain.launch import *; hear_signals(alone_ends=True); print(); time.sleep(300)"
    with start_script("-uc", waits, fresh=True, stdout=subprocess.PIPE) as launcher:
        launcher.stdout.readline()
        launcher.send_signal(number)
        assert launcher.wait(SOON) == code


def test_a_process_that_was_killed_has_crashed(capsys):
    assert [status_of(code) for code in (0, 16, -9)] == [0, 16, 1]
    assert "SIGKILL" in capsys.readouterr().err


def test_a_supervised_run_is_restarted_after_crashes(tmp_path, monkeypatch, capsys):
    """A supervised run restarts after a crash, a kill or an unreachable server, but not after bad input, divergence or
    a normal exit."""
    monkeypatch.setattr(launch, "SHORTEST_PAUSE_SECONDS", 0.01)
    lives = tmp_path / "lives"
    run = f"import os, sys; open({str(lives)!r}, 'a').write('.'); n = len(open({str(lives)!r}).read())\n"
    run += "os.kill(os.getpid(), 9) if n == 2 else sys.exit([1, None, 75][n - 1] if n < 4 else int(sys.argv[1]))"
    for code in (0, 2, 16, 18):
        lives.unlink(missing_ok=True)
        assert supervise([sys.executable, "-S", "-c", run, str(code)]) == code
        assert len(lives.read_text()) == 4
    assert capsys.readouterr().err.count("restarting in") == 4 * 3
    monkeypatch.setattr(launch, "HEARD", [signal.SIGTERM])
    lives.unlink()
    assert supervise([sys.executable, "-S", "-c", run, "0"]) == 1 and len(lives.read_text()) == 1, (
        "a run that was told to end must not be restarted"
    )
