"""The sender's side of control.py: asks a live run for something, and waits for the answer."""

import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretrain.errors import EXIT_INTERRUPTED, InputError
from pretrain.files import write_durably
from pretrain.runs.control import ANSWER_FILE, REQUEST_FILE
from pretrain.runs.run_folder import PROFILE_FOLDER, PROFILE_REPORT, read_json
from pretrain_tools.runs.history import last_start, require_run
from pretrain_tools.runs.status import is_training, read_status, state_text

DONE = {
    "save": "saved at step {step:,}",
    "stop": "saved and stopped at step {step:,}",
    "abort": "stopped at step {step:,}, nothing saved",
    "anneal": "decaying from step {step:,}",
    "profile": "profiling from step {step:,} on",
}
POLL_SECONDS = 0.1


def steer(run: Path, command: str, *, timeout_seconds: float, **more: Any) -> int:
    """Sends a command to a live run, waits until it is done and prints the answer.

    Returns the exit status: 1 for a profile that has found causes, EXIT_INTERRUPTED after Ctrl-C. Raises InputError as
    `send` and `wait_for_answer` do.
    """
    request = {"id": uuid.uuid4().hex}  # known before it is sent: Ctrl-C may come while it is being written
    watched = sys.stderr.isatty()
    shown = 0

    def show(seconds: float) -> None:
        nonlocal shown
        if seconds > 1 and int(seconds) > shown and (watched or int(seconds) % 10 == 0):
            shown = int(seconds)
            text = f"\r{command}: waiting for the run, {shown} s"
            print(text, end="" if watched else "\n", file=sys.stderr, flush=True)

    try:
        request = send(run, command, request["id"], **more)
        print(wait_for_answer(run, request, timeout_seconds=timeout_seconds, show=show), flush=True)
        if command != "profile":
            return 0
        report = wait_for_profile(run, request, show=show)
        print("\n" * watched + report["text"])
        return 1 if report["causes"] else 0
    except KeyboardInterrupt:
        withdraw(run, request)
        print(f"\n{command}: gave up waiting; cancelled, unless the run has already picked it up", file=sys.stderr)
        return EXIT_INTERRUPTED
    finally:
        if shown and watched:
            print(file=sys.stderr)


def send(run: Path, command: str, request_id: str | None = None, **more: Any) -> dict:
    """Writes the request and returns it, with a new id unless one is given, and with what `more` the command takes.

    Raises InputError for a folder that is not a run, a run that is not active, and a folder that is not writable.
    """
    require_run(run)
    if not is_training(run):
        raise InputError(_not_alive(run, command))
    start = last_start(run)
    start_id = start.get("start_id", start.get("time"))
    if start_id is None:
        raise InputError(f"{run}: the run has not started yet; wait for the first line of metrics.jsonl")
    request = {
        "id": request_id or uuid.uuid4().hex,
        "command": command,
        "start_id": str(start_id),
        "time": round(time.time(), 3),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        **more,
    }
    try:
        (run / REQUEST_FILE).parent.mkdir(exist_ok=True)
        write_durably(run / REQUEST_FILE, json.dumps(request))
    except OSError as error:
        raise InputError(
            f"{run / REQUEST_FILE}: is not writable ({error.strerror}); send commands as a user with write access"
        ) from None
    return request


def _not_alive(run: Path, command: str) -> str:
    status = read_status(run)
    at = f" at step {status.step:,}" if status.step is not None else ""
    # Without lock and heartbeat, lines that are fresh are the only sign of a process: too little.
    state = "it has neither lock nor heartbeat" if status.state == "running" else f"{state_text(status)}{at}"
    remedy = "its model is in final" if status.state == "finished" else "the command that started it continues it"
    return f"{run}: the run is not active ({state}), so there is nothing to {command}; {remedy}"


def wait_for_answer(run: Path, request: dict, *, timeout_seconds: float, show: Callable[[float], None]) -> str:
    """The trainer's answer as text. The files are reopened each time, as network disks require.

    show: called with the seconds waited so far, a few times per second.

    Raises InputError if the run ends without an answer or refuses, if another request replaces this one, or if the
    time is up; a request that timed out is cancelled.
    """
    start = time.monotonic()
    command = request["command"]
    while (waited := time.monotonic() - start) < timeout_seconds:
        # Asked before the answer is read: a trainer that stops first answers, then exits.
        alive = is_training(run)
        answer = read_json(run / ANSWER_FILE)
        if answer.get("id") == request["id"] and isinstance(answer.get("step"), int):
            if problem := answer.get("problem"):
                raise InputError(f"{run}: {command}: {problem}")
            return DONE[command].format(step=answer["step"])
        pending = read_json(run / REQUEST_FILE)
        if pending.get("id") != request["id"]:
            raise InputError(
                f"{run}: {pending.get('command', 'another command')}, sent by process {pending.get('pid', '?')} on "
                f"{pending.get('host', '?')}, took the place of this {command} before it was answered; send it again"
            )
        if not alive:
            raise InputError(f"{run}: ended before it answered {command}; see its train.log")
        show(waited)
        time.sleep(POLL_SECONDS)
    withdraw(run, request)
    raise InputError(
        f"{run}: no answer within {timeout_seconds:g} s, so {command} is cancelled; the run answers after the step "
        "it is in: give a longer --timeout if its steps or its checkpoints are slow"
    )


def wait_for_profile(run: Path, request: dict, *, show: Callable[[float], None]) -> dict:
    """The report of the profile that this request has begun, however long its steps take.

    Raises InputError if the run ends before, or gives the profile up.
    """
    start = time.monotonic()
    read = set()
    while True:
        alive = is_training(run)  # asked before the reports are read, as above
        for path in run.glob(f"{PROFILE_FOLDER}/step-*/{PROFILE_REPORT}"):
            version = path, path.stat().st_mtime_ns
            report = read_json(path) if version not in read else {}
            read.add(version)
            if report.get("request") == request["id"]:
                if problem := report.get("problem"):
                    raise InputError(f"{run}: profile: {problem}")
                return report
        if not alive:
            raise InputError(f"{run}: ended before the profile was complete; see its train.log")
        show(time.monotonic() - start)
        time.sleep(POLL_SECONDS)


def withdraw(run: Path, request: dict) -> None:
    """Withdraws a request that was not picked up yet; a later one stays."""
    if read_json(run / REQUEST_FILE).get("id") == request["id"]:
        (run / REQUEST_FILE).unlink(missing_ok=True)
