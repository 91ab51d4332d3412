"""Tests for controlling a live run with files: requests, answers, and everything that must not affect the run."""

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import warnings
from contextlib import contextmanager

import pytest

from pretrain.errors import InputError
from pretrain.files import write_durably
from pretrain.processes import folder_lock
from pretrain.runs.control import ANSWER_FILE, COMMANDS, REQUEST_FILE, Control
from pretrain_tools.runs.commands import new_request, wait_for_answer, withdraw
from pretrain_tools.runs.commands import send as send_request
from pretrain_tools.runs.status import read_json, read_status
from support.project import events, free_port, run_script, start_script
from support.run_logs import end_line, finished_run, start_line, train_line, write_run

START = "start-1"
SOON = 120.0
"""Timeout in seconds for work that usually takes one or two, with a margin for busy machines."""


@pytest.fixture
def run(tmp_path):
    """A run folder that is locked by this process, as if it were training."""
    folder = write_run(tmp_path / "run", [start_line(start_id=START), train_line(1)])
    with folder_lock(folder / ".lock"):
        yield folder


def send(run, command):
    request = new_request(run, command)
    send_request(run, request)
    return request


def ask(run, timeout_seconds=SOON, command="save"):
    return wait_for_answer(run, send(run, command), timeout_seconds=timeout_seconds)


def answer_one(run, step):
    """Processes one command in a separate thread, as the training loop does."""
    control = Control(run, START)

    def loop():
        deadline = time.monotonic() + SOON
        while time.monotonic() < deadline:
            if control.poll():
                control.acknowledge(step)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=loop)
    thread.start()
    return thread


@pytest.mark.parametrize("command", COMMANDS)
def test_a_request_is_processed_once_and_answered(run, command):
    control = Control(run, START)
    assert control.poll() is None
    send(run, command)
    assert control.poll() == command
    assert control.poll() is None
    control.acknowledge(1234)
    assert json.loads((run / ANSWER_FILE).read_text())["command"] == command
    assert control.poll() is None


def test_the_sender_learns_the_step_of_the_answer(run):
    trainer = answer_one(run, step=1234)
    assert ask(run) == "saved at step 1,234"
    trainer.join()


def test_a_second_request_is_processed_after_the_first(run):
    control = Control(run, START)
    for command in ("save", "save", "stop"):
        request = send(run, command)
        assert control.poll() == command
        control.acknowledge(7)
        assert json.loads((run / ANSWER_FILE).read_text())["id"] == request["id"]


def test_a_request_for_an_earlier_start_is_ignored(run):
    send(run, "stop")
    restarted = Control(run, "start-2")
    assert restarted.poll() is None


def test_a_new_reader_does_not_repeat_an_answered_request(run):
    send(run, "save")
    first = Control(run, START)
    assert first.poll() == "save"
    first.acknowledge(5)
    assert Control(run, START).poll() is None


def test_a_request_refers_to_the_newest_start(run):
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(start_line(1, start_id="start-2")) + "\n")
    assert send(run, "save")["start_id"] == "start-2"


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"id": 3, "command": "save"}', '{"id": "x", "command": "format"}']
)
def test_an_invalid_request_is_ignored_with_a_warning(run, content):
    said = []
    (run / "control").mkdir()
    (run / REQUEST_FILE).write_text(content)
    control = Control(run, START, warn=said.append)
    assert control.poll() is None and control.poll() is None
    assert len(said) == 1 and "use runs.py to send save, stop, abort, anneal" in said[0]
    send(run, "save")
    assert control.poll() == "save"


def test_polling_costs_next_to_nothing(run):
    send(run, "save")
    control = Control(run, START)
    control.poll()

    def seconds_of_a_hundred(look=control.poll) -> float:
        start = time.perf_counter()
        for _ in range(100):
            look()
        return time.perf_counter() - start

    polling = min(seconds_of_a_hundred() for _ in range(50))
    # Each poll takes 2 microseconds, or 20 if it read the file. The machine may be busy, so compare the minima.
    assert polling < min(seconds_of_a_hundred(lambda: read_json(run / REQUEST_FILE)) for _ in range(50)) / 2


def test_acknowledging_nothing_writes_nothing(run):
    Control(run, START).acknowledge(3)
    assert not (run / ANSWER_FILE).exists()


def test_no_reader_sees_half_a_file(tmp_path):
    path = tmp_path / "file.json"
    write_durably(path, '{"n": 0}')
    stop = threading.Event()

    def write():
        n = 0
        while not stop.is_set():
            n += 1
            write_durably(path, json.dumps({"n": n, "filling": "x" * 5000}))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(200):
            assert json.loads(path.read_text())["n"] >= 0
    finally:
        stop.set()
        thread.join()
    assert [file.name for file in path.parent.iterdir()] == ["file.json"]


def test_without_an_answer_the_request_is_canceled(run):
    with pytest.raises(InputError, match=r"no answer within 0.3 s, so save was canceled.*--timeout"):
        ask(run, timeout_seconds=0.3)
    assert not (run / REQUEST_FILE).exists()


def test_only_its_own_request_is_canceled(run):
    first, second = send(run, "save"), send(run, "stop")
    withdraw(run, first)
    assert json.loads((run / REQUEST_FILE).read_text()) == second
    withdraw(run, second)
    withdraw(run, second)
    assert not (run / REQUEST_FILE).exists()


def test_ctrl_c_stops_waiting_and_withdraws(run):
    sender = start_script("runs.py", "save", run, stderr=subprocess.PIPE)
    wait_until((run / REQUEST_FILE).exists, sender)
    sender.send_signal(signal.SIGINT)
    _, said = sender.communicate(timeout=SOON)
    assert sender.returncode == 130 and "canceled, unless" in said and "Traceback" not in said
    assert not (run / REQUEST_FILE).exists()


def test_a_replaced_request_raises_an_error(run):
    request = send(run, "save")
    send(run, "stop")
    with pytest.raises(InputError, match="stop replaced this save"):
        wait_for_answer(run, request, timeout_seconds=SOON)


def test_the_death_of_a_run_before_its_answer_is_noticed(tmp_path):
    folder = write_run(tmp_path / "run", [start_line(start_id=START), train_line(1)])
    with folder_lock(folder / ".lock"):
        request = send(folder, "save")
    (folder / ".lock").write_text(json.dumps({"pid": 2**22 + 1, "host": socket.gethostname()}))
    with pytest.raises(InputError, match=r"ended before it answered save; see its train.log"):
        wait_for_answer(folder, request, timeout_seconds=SOON)


def test_an_inactive_run_cannot_be_steered(tmp_path):
    finished = finished_run(tmp_path / "finished")
    unlocked = write_run(tmp_path / "unlocked", [start_line(), train_line(1)])
    crashed = write_run(tmp_path / "crashed", [start_line(), train_line(1)])
    preempted = write_run(tmp_path / "preempted", [start_line(), train_line(4), end_line(4, 75, "preempted")])
    for folder in (crashed, preempted):
        # A killed process leaves a lock file, but no longer holds the lock.
        (folder / ".lock").write_text(json.dumps({"pid": 2**22 + 1, "host": socket.gethostname()}))
    cases = {
        finished: "no process holds its lock or sends heartbeats (state: finished), so there is nothing to save",
        unlocked: "the run is not active",
        crashed: "(state: crashed)",
        preempted: "(state: stopped: preempted)",
        tmp_path / "nowhere": "no such run",
        tmp_path: "is not a run, or has not started: it has no metrics.jsonl",
    }
    for folder, message in cases.items():
        with pytest.raises(InputError) as error:
            send(folder, "save")
        assert message in str(error.value)
        assert not (folder / "control").exists()


def test_the_regular_end_of_a_run_before_its_answer_is_noticed(tmp_path):
    folder = write_run(tmp_path / "run", [start_line(start_id=START), train_line(1)])
    with folder_lock(folder / ".lock"):
        request = send(folder, "stop")
    assert not (folder / ".lock").exists()
    with pytest.raises(InputError, match="ended before it answered stop"):
        wait_for_answer(folder, request, timeout_seconds=SOON)


def test_a_run_on_another_machine_is_judged_by_its_heartbeat(tmp_path):
    run = write_run(tmp_path / "run", [start_line(start_id=START), train_line(1)])
    (run / ".lock").write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    beat = run / "heartbeats" / "rank-00000.json"
    beat.parent.mkdir()
    beat.write_text(json.dumps({"pid": 1, "host": "elsewhere", "step": 1, "time": time.time()}))
    trainer = answer_one(run, step=2)
    assert ask(run) == "saved at step 2"
    trainer.join()
    beat.write_text(json.dumps({"pid": 1, "host": "elsewhere", "step": 1, "time": time.time() - 600}))
    os.utime(beat, (time.time() - 600,) * 2)
    with pytest.raises(InputError, match="the run is not active"):
        send(run, "save")


def test_an_unwritable_folder_is_named(run):
    (run / "control").write_text("a file where the folder should be")
    with pytest.raises(InputError, match=r"control/request.json: is not writable"):
        send(run, "save")


def test_the_default_warning_is_pythons_own(run):
    (run / "control").mkdir()
    (run / REQUEST_FILE).write_text("{}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Control(run, START).poll()
    assert len(caught) == 1


def test_the_command_line_steers_and_reports_errors(run, tmp_path):
    trainer = answer_one(run, step=42)
    assert run_script("runs.py", "stop", run).stdout == "saved and stopped at step 42\n"
    trainer.join()
    for folder in (tmp_path / "nowhere", finished_run(tmp_path / "done")):
        result = run_script("runs.py", "anneal", folder, check=False)
        assert result.returncode == 2 and "Traceback" not in result.stderr and str(folder) in result.stderr
    result = run_script("runs.py", "save", run, "--timeout", "0", check=False)
    assert result.returncode == 2 and "must be greater than 0, got 0" in result.stderr


ALL = os.environ.get("STRATEGIES") == "all"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero3"] if ALL else ["ddp"])
def test_a_live_run_of_two_processes_is_steered(strategy, recipe, tmp_path):
    run = tmp_path / "run"
    # Most of the time, the run samples, so it hears of the commands then.
    with live_run(strategy, recipe, run, "--samples.every_steps", "1") as trainer:
        for command in ("save", "stop"):
            step = steer(run, command)
            assert (run / "checkpoints" / f"step-{step:08d}" / "MANIFEST.json").exists()
        trainer.wait(timeout=SOON)
    assert [line["code"] for line in events(run, "end")] == [130]
    assert read_status(run).state == "stopped"
    said = run_script("runs.py", "save", run, check=False)
    assert said.returncode == 2 and "the run is not active: " in said.stderr and "(state: stopped)" in said.stderr
    if ALL:
        anneal_a_live_run(strategy, recipe, run)


def test_a_live_run_is_aborted_without_a_save_and_another_annealed_to_its_end(recipe, tmp_path):
    run = tmp_path / "run"
    with live_run("single", recipe, run) as trainer:
        steer(run, "abort")
        trainer.wait(timeout=SOON)
    (end,) = events(run, "end")
    assert end["code"] == 130 and "nothing saved" in end["reason"]
    assert list((run / "checkpoints").glob("step-*")) == []
    anneal_a_live_run("single", recipe, run)


def anneal_a_live_run(strategy, recipe, run):
    with live_run(strategy, recipe, run) as trainer:
        wait_until(lambda: events(run, "train")[-1]["step"] >= 50, trainer)  # for a decay of several steps
        step = steer(run, "anneal")
        trainer.wait(timeout=SOON)
    assert events(run, "end")[-1]["code"] == 0 and read_status(run).state == "finished"
    assert step < events(run, "train")[-1]["step"] <= 1.2 * step + 1
    last = events(run, "train")[-1]
    assert last["learning_rate"] < 0.5 * 0.003
    # Simulates a crash in the decay, with only the command's checkpoint left.
    for newer in (run / "final", run / "checkpoints" / f"step-{last['step']:08d}"):
        shutil.rmtree(newer)
    with live_run(strategy, recipe, run) as trainer:
        trainer.wait(timeout=SOON)
    again = [event for event in events(run, "train") if event["step"] == last["step"]]
    assert len(again) == 2 and again[0]["learning_rate"] == again[1]["learning_rate"]
    assert events(run, "end")[-1]["code"] == 0 and events(run, "train")[-1]["step"] == last["step"]


def steer(run, command):
    """Sends the command. Returns the step from the answer, which must match the log."""
    said = run_script("runs.py", command, run).stdout
    step = int(said.split("step ")[1].split()[0].replace(",", ""))
    assert [line["step"] for line in events(run, "control") if line["command"] == command][-1] == step
    return step


@contextmanager
def live_run(strategy, recipe, run, *options):
    """Starts an endless training run of one or two processes, and yields after the first logged step."""
    before = len(events(run, "train")) if run.exists() else 0
    processes = 1 if strategy == "single" else 2
    trainer = start_script(
        "-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{strategy}.yaml",
        "--num_processes", processes, "--main_process_port", free_port(), "train.py", "--config", recipe,
        "--budget.steps", "100000", "--validation.every_steps", "100000", "--checkpoint.every_steps", "100000",
        *options, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until(lambda: len(events(run, "train")) > before, trainer)
        yield trainer
    finally:
        if trainer.poll() is None:
            trainer.terminate()  # the launcher forwards the signal to its processes
            trainer.wait(timeout=SOON)


def wait_until(happened, process, seconds=300):
    """Waits until the condition is true. Fails if the process has exited."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if happened():
                return
        except (FileNotFoundError, ValueError):  # no log yet, or an incomplete line
            pass
        time.sleep(0.02)
    pytest.fail(f"the condition was never true; exit status {process.poll()}")
