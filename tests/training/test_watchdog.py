"""Tests for the watchdog thread, run in separate processes because it ends them."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from pretrain.checkpoint.run_state import Request
from support.project import ROOT

PROGRAM = """
import os, sys, threading, time
from pathlib import Path
from pretrain.errors import leave
from pretrain.training.watchdog import Watch

run, step_timeout, neighbour = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
def on_end(code, reason):
    (run / "end").write_text(f"{code} {reason}")
    {last_words}
watch = Watch(run, 0, [neighbour] if neighbour else [], step_timeout_seconds=step_timeout,
              first_step_timeout_seconds=60, held=None, on_end=on_end)
{prepare}
watch.start()
begun = time.monotonic()
watch.beat(1)
print("ready", begun, flush=True)
{loop}
"""
BEATS = "while not watch.request:\n    watch.beat()\n    time.sleep(0.01)\nwatch.close()\nleave(40 + watch.request)"
BEATS_ON = "while True:\n    watch.beat()\n    time.sleep(0.01)"
HANGS = "threading.Event().wait()"
CLOCK_OF_SIGNALS = """
# For the watch, 0.6 s pass between two signals, regardless of the real time.
import pretrain.training.watchdog
from types import SimpleNamespace
now, take = [time.monotonic()], watch._handle
def taken(number):
    take(number)
    now[0] += 0.6
    print("taken", flush=True)
watch._handle = taken
pretrain.training.watchdog.time = SimpleNamespace(**{**vars(time), "monotonic": lambda: now[0]})
"""
SOON = 120
"""Timeout in seconds, long enough for a very busy machine."""


def program_of(loop, last_words="", prepare="") -> str:
    return PROGRAM.replace("{loop}", loop).replace("{last_words}", last_words).replace("{prepare}", prepare)


@pytest.fixture
def start(tmp_path):
    """Starts a process with a watch, and kills it after the test.

    The attribute `begun` is the time right after the watch started.
    """
    started = []

    def start(loop, step_timeout=600.0, neighbour=0, last_words="", prepare="", **options):
        program = program_of(loop, last_words, prepare)
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), str(step_timeout), str(neighbour)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Under nohup, the tests ignore SIGHUP, and child processes would inherit that.
            **{"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL), **options},
        )
        started.append(process)
        said, process.begun = process.stdout.readline().split()
        assert said == "ready"
        process.begun = float(process.begun)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def neighbour():
    """Starts a sleeping process."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("number", "request_made"),
    [
        (signal.SIGTERM, Request.PREEMPT),
        (signal.SIGUSR1, Request.PREEMPT),
        (signal.SIGHUP, Request.PREEMPT),
        (signal.SIGINT, Request.INTERRUPT),
    ],
)
def test_a_signal_is_a_request(start, number, request_made):
    process = start(BEATS)
    process.send_signal(number)
    assert process.wait(SOON) == 40 + request_made


def test_nohup_is_respected(start):
    process = start(BEATS, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.7)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_the_second_signal_ends_a_hanging_loop(start, tmp_path, number, code):
    process = start(HANGS, prepare=CLOCK_OF_SIGNALS)
    for _ in range(2):  # sent by both the terminal and the launcher, which counts as one signal
        process.send_signal(number)
        assert process.stdout.readline() == "taken\n"
    assert process.poll() is None
    process.send_signal(number)
    assert process.wait(SOON) == code
    assert (tmp_path / "end").read_text().startswith(f"{code} second signal ({signal.Signals(number).name})")


def test_a_hang_is_ended_in_time_with_stacks(start, tmp_path):
    seconds = 100.0
    for _ in range(9):  # a busy machine can be late, but not every time
        process = start(HANGS, step_timeout=2.0)
        assert process.wait(SOON) == 1
        seconds = min(seconds, time.monotonic() - process.begun)
        if seconds < 2.7:
            break
    assert 2.0 < seconds < 2.2 + 0.5, "10 % of the timeout, and 0.5 s for a busy machine"
    assert re.search(r"1 no progress, \d+ s after step 1", (tmp_path / "end").read_text())
    stacks = (tmp_path / "stacks-rank-00000.txt").read_text()
    assert 'File "<string>"' in stacks and "wait" in stacks


@pytest.mark.parametrize("last_words", ["raise OSError(28, 'disk full')", "raise KeyError('bug')", "time.sleep(1000)"])
def test_nothing_keeps_a_hanging_process_alive(start, last_words):
    process = start(HANGS, step_timeout=0.5, last_words=last_words)
    assert process.wait(SOON) == 1


def test_unwritable_stacks_do_not_keep_a_process_alive(start, tmp_path):
    (tmp_path / "stacks-rank-00000.txt").mkdir()
    assert start(HANGS, step_timeout=0.5).wait(SOON) == 1


def test_a_closed_output_does_not_matter(start):
    process = start(BEATS)
    process.stderr.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(SOON) == 40 + Request.PREEMPT


def test_a_dead_neighbour_ends_a_process_that_waits(start, tmp_path, neighbour):
    process = start(HANGS, neighbour=neighbour.pid)
    neighbour.kill()  # it remains a zombie, as with a busy launcher
    assert process.wait(SOON) == 1
    assert f"process {neighbour.pid} of this run has died" in (tmp_path / "end").read_text()


def test_a_stopped_neighbour_is_killed_even_if_this_process_is_alive(start, tmp_path, neighbour):
    """For example, both processes may be waiting for a checkpoint to be written."""
    process = start(BEATS_ON, step_timeout=2.0, neighbour=neighbour.pid)
    neighbour.send_signal(signal.SIGSTOP)
    assert process.wait(SOON) == 1
    assert neighbour.wait(SOON) == -signal.SIGKILL
    assert f"process {neighbour.pid} of this run is stopped" in (tmp_path / "end").read_text()


def test_a_suspended_process_is_not_a_hang(start):
    """Ctrl-Z for longer than the timeout, followed by fg, must not count as a hang."""
    process = start(f"beats = 0\n{BEATS}", step_timeout=3.0)
    process.send_signal(signal.SIGSTOP)
    time.sleep(6.0)
    process.send_signal(signal.SIGCONT)
    time.sleep(1.0)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(SOON) == 40 + Request.PREEMPT


LAUNCHER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", *sys.argv[1:]])
"""


def wait_for(condition):
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_launcher_that_dies_is_noticed(tmp_path):
    """The launcher is killed after starting the watched process, which must then exit."""
    loop = BEATS.replace("leave(40 + watch.request)", '(run / "code").write_text(str(watch.request))')
    program = program_of(loop)
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, program, str(tmp_path), "600", "0"],
        cwd=ROOT,
        env={**os.environ, "ACCELERATE_MIXED_PRECISION": "no"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert launcher.stdout.readline().startswith(b"ready ")
    launcher.kill()
    launcher.wait()
    code = tmp_path / "code"
    wait_for(lambda: code.exists() and code.read_text())
    assert code.read_text() == str(int(Request.PREEMPT))


def test_heartbeats(start, tmp_path):
    process = start(BEATS_ON)
    wait_for((tmp_path / "heartbeats/rank-00000.json").exists)
    beat = json.loads((tmp_path / "heartbeats/rank-00000.json").read_text())
    assert beat["pid"] == process.pid and beat["step"] in (0, 1)
