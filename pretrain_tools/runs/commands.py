"""Sends a command to a live run and waits for the answer. The run's side is in pretrain/runs/control.py."""

import json
import sys
import time
import uuid
from pathlib import Path

from pretrain.errors import EXIT_INTERRUPTED, InputError
from pretrain.files import write_durably
from pretrain.runs.control import ANSWER_FILE, REQUEST_FILE
from pretrain.runs.run_folder import read_json
from pretrain_tools.runs.history import last_start, require_run
from pretrain_tools.runs.status import is_training, read_status, state_text

DONE = {
    "save": "saved at step {step:,}",
    "stop": "saved and stopped at step {step:,}",
    "abort": "stopped at step {step:,} without saving",
    "anneal": "decaying from step {step:,}",
}
POLL_SECONDS = 0.1


def steer(run: Path, command: str, *, timeout: float) -> int:
    """Sends a command to a live run and prints the answer. Returns the exit status (EXIT_INTERRUPTED after Ctrl-C).

    timeout: in seconds. Raises InputError if the run doesn't answer; see `new_request`, `send` and `wait_for_answer`.
    """
    request = new_request(run, command)  # outside `try`, because only a sent request can be withdrawn
    try:
        send(run, request)
        print(f"{command}: waiting for the run ...", file=sys.stderr)
        print(wait_for_answer(run, request, timeout_seconds=timeout))
        return 0
    except KeyboardInterrupt:
        withdraw(run, request)
        print(f"\n{command}: canceled, unless the run has already picked it up", file=sys.stderr)
        return EXIT_INTERRUPTED


def new_request(run: Path, command: str) -> dict:
    """Creates a request. Raises InputError if the folder isn't a run, or if the run isn't active."""
    require_run(run)
    if not is_training(run):
        raise InputError(
            f"{run}: the run is not active: no process holds its lock or sends heartbeats (state: "
            f"{state_text(read_status(run))}), so there is nothing to {command}"
        )
    start = last_start(run)
    start_id = start.get("start_id", start.get("time"))
    if start_id is None:
        raise InputError(f"{run}: the run has not started yet; wait for the first line in metrics.jsonl")
    return {"id": uuid.uuid4().hex, "command": command, "start_id": str(start_id)}


def send(run: Path, request: dict) -> None:
    """Writes the request file. Raises InputError if the folder isn't writable."""
    try:
        (run / REQUEST_FILE).parent.mkdir(exist_ok=True)
        write_durably(run / REQUEST_FILE, json.dumps(request))
    except OSError as error:
        raise InputError(
            f"{run / REQUEST_FILE}: is not writable ({error.strerror}); run the command as a user with write access, "
            "or free up disk space"
        ) from None


def wait_for_answer(run: Path, request: dict, *, timeout_seconds: float) -> str:
    """Waits for the trainer's answer and returns it as text.

    Raises InputError if the run ends without an answer, if another request replaces this one, or after a timeout,
    which cancels the request. Reopens the files for each poll, because NFS refreshes its cache only on open.
    """
    start = time.monotonic()
    command = request["command"]
    while time.monotonic() - start < timeout_seconds:
        # Check this before reading the answer, because a stopping trainer may answer and exit between the two.
        alive = is_training(run)
        answer = read_json(run / ANSWER_FILE)
        if answer.get("id") == request["id"] and isinstance(answer.get("step"), int):
            return DONE[command].format(step=answer["step"])
        pending = read_json(run / REQUEST_FILE)
        if pending.get("id") != request["id"]:
            other = pending.get("command", "another command")
            raise InputError(f"{run}: {other} replaced this {command} before the run answered; run the command again")
        if not alive:
            raise InputError(f"{run}: the run ended before it answered {command}; see its train.log")
        time.sleep(POLL_SECONDS)
    withdraw(run, request)
    raise InputError(
        f"{run}: no answer within {timeout_seconds:g} s, so {command} was canceled. The run answers after its current "
        "step; increase --timeout if steps or checkpoints are slow"
    )


def withdraw(run: Path, request: dict) -> None:
    """Deletes a request unless the run has already picked it up or a newer request has replaced it."""
    if read_json(run / REQUEST_FILE).get("id") == request["id"]:
        (run / REQUEST_FILE).unlink(missing_ok=True)
