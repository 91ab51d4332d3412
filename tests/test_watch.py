"""The thread beside the loop, in processes of its own, since it ends them."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT

PROGRAM = """
import os, sys, threading, time
from pathlib import Path
from pretrain.watch import Watch

run, step_timeout, neighbour = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
def on_end(reason, code):
    (run / "end").write_text(f"{code} {reason}")
    {last_words}
watch = Watch(run, 0, [neighbour] if neighbour else [], step_timeout_seconds=step_timeout,
              first_step_timeout_seconds=60, on_end=on_end)
watch.start()
watch.beat(1)
print("ready", flush=True)
{loop}
"""
BEATS = "while not watch.request:\n    watch.beat()\n    time.sleep(0.01)\nwatch.close()\nsys.exit(40 + watch.request)"
BEATS_ON = "while True:\n    watch.beat()\n    time.sleep(0.01)"
HANGS = "threading.Event().wait()"


@pytest.fixture
def start(tmp_path):
    """Starts a process with a watch; ends it after the test."""
    started = []

    def start(loop, step_timeout=1.0, neighbour=0, last_words="", **options):
        program = PROGRAM.replace("{loop}", loop).replace("{last_words}", last_words)
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), str(step_timeout), str(neighbour)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # What runs the tests may ignore SIGHUP, as under nohup, and processes inherit that.
            **{"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL), **options},
        )
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("number", "request_number"),
    [(signal.SIGTERM, 3), (signal.SIGUSR1, 3), (signal.SIGHUP, 3), (signal.SIGINT, 4)],
)
def test_a_signal_is_a_request(start, number, request_number):
    process = start(BEATS)
    process.send_signal(number)
    assert process.wait(5) == 40 + request_number


def test_nohup_is_respected(start):
    process = start(BEATS, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.7)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_the_second_signal_ends_a_loop_that_never_comes_back(start, tmp_path, number, code):
    process = start(HANGS, step_timeout=60)
    process.send_signal(number)
    time.sleep(0.2)
    process.send_signal(number)  # the terminal's and the launcher's: one signal
    time.sleep(1.0)
    assert process.poll() is None
    process.send_signal(number)
    assert process.wait(5) == code
    assert (tmp_path / "end").read_text().startswith(f"{code} {signal.Signals(number).name} after a first signal")


def test_a_hang_is_ended_in_time_with_stacks(start, tmp_path):
    process = start(HANGS, step_timeout=2.0)
    begun = time.monotonic()
    assert process.wait(10) == 1
    assert 1.9 < time.monotonic() - begun < 2.2 + 0.5, "10 % and what a busy machine takes"
    assert "1 no progress, 2 s after step 1" in (tmp_path / "end").read_text()
    stacks = (tmp_path / "stacks-rank-00000.txt").read_text()
    assert 'File "<string>"' in stacks and "wait" in stacks


@pytest.mark.parametrize("last_words", ["raise OSError(28, 'disk full')", "raise KeyError('bug')", "time.sleep(1000)"])
def test_nothing_keeps_a_hanging_process_alive(start, last_words):
    process = start(HANGS, step_timeout=0.5, last_words=last_words)
    assert process.wait(8) == 1


def test_stacks_that_cannot_be_written_do_not_keep_it_alive(start, tmp_path):
    (tmp_path / "stacks-rank-00000.txt").mkdir()
    assert start(HANGS, step_timeout=0.5).wait(5) == 1


def test_nobody_reads_what_is_said(start):
    process = start(BEATS)
    process.stderr.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 43


def sleeper() -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])


def test_a_dead_neighbour_ends_a_process_that_waits(start, tmp_path):
    neighbour = sleeper()
    process = start(HANGS, step_timeout=60, neighbour=neighbour.pid)
    neighbour.kill()  # and it stays a zombie, as with a launcher that is busy
    begun = time.monotonic()
    assert process.wait(10) == 1 and time.monotonic() - begun < 5
    assert f"process {neighbour.pid} of this run has died" in (tmp_path / "end").read_text()
    neighbour.wait()


def test_a_stopped_neighbour_is_killed_even_where_this_loop_beats(start, tmp_path):
    """As while both wait for a checkpoint to be written."""
    neighbour = sleeper()
    process = start(BEATS_ON, step_timeout=2.0, neighbour=neighbour.pid)
    neighbour.send_signal(signal.SIGSTOP)
    assert process.wait(6) == 1
    assert neighbour.wait(2) == -signal.SIGKILL
    assert f"process {neighbour.pid} of this run is stopped" in (tmp_path / "end").read_text()


def test_a_pause_of_the_process_itself_is_no_hang(start):
    """Ctrl-Z for longer than the timeout, then fg."""
    process = start(f"beats = 0\n{BEATS}", step_timeout=3.0)
    process.send_signal(signal.SIGSTOP)
    time.sleep(6.0)
    process.send_signal(signal.SIGCONT)
    time.sleep(1.0)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 43


LAUNCHER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", *sys.argv[1:]])
"""


def test_a_launcher_that_dies_is_noticed(tmp_path):
    """It starts the watched process and is killed; the process ends by itself."""
    loop = BEATS.replace("sys.exit(40 + watch.request)", '(run / "code").write_text(str(watch.request))')
    program = PROGRAM.replace("{loop}", loop).replace("{last_words}", "")
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, program, str(tmp_path), "5", "0"],
        cwd=ROOT,
        env={**os.environ, "ACCELERATE_MIXED_PRECISION": "no"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert launcher.stdout.readline() == b"ready\n"
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 5
    while not (tmp_path / "code").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (tmp_path / "code").read_text() == "3"


def test_heartbeats(start, tmp_path):
    process = start(BEATS_ON)
    time.sleep(0.5)
    beat = json.loads((tmp_path / "heartbeats/rank-00000.json").read_text())
    assert beat["pid"] == process.pid and beat["step"] in (0, 1)
