"""Determines a run's state, progress and time left. Reads only the end of each file."""

import fcntl
import itertools
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.errors import InputError, shortened
from pretrain.processes import is_alive
from pretrain.runs.event_log import Event
from pretrain.runs.run_folder import LOCK_FILE, METRICS_FILE, MIRROR_STATUS, heartbeat_path, latest_step, read_json
from pretrain.terminal import printable
from pretrain.units import count_text, counted, duration_text, table
from pretrain_tools.runs.history import (
    end_of,
    find_runs,
    is_number,
    last_start,
    measured,
    planned_steps,
    read_end,
    require_run,
)

STALE_HEARTBEAT_SECONDS = 60.0
"""Age at which a heartbeat indicates a dead or hanging process. Heartbeats are written every few seconds."""
LONG_STEP_SECONDS = 60.0
"""Time without progress after which `status` reports it."""
SHOWN_EVENTS = 8
SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class RunStatus:
    """Current state of a run. None means unknown."""

    folder: Path
    state: str
    """running, finished, stopped or crashed."""
    reason: str | None
    """Why the run ended, if recorded."""
    where: str | None
    """The run's process, such as 'process 123 on HOST'."""
    step: int | None
    total_steps: int | None
    train: Event
    """The last logged step, or {}."""
    seconds_left: float | None
    """Estimated time to the last step; None unless the run is running."""
    logged: float
    """Last modification of the log, as a Unix timestamp."""
    silent_seconds: float | None
    """Time since the last progress, from the heartbeat; None unless the run is running."""
    events: list[Event] = field(repr=False)
    """Recent events, without superseded ones."""

    @property
    def progress(self) -> float | None:
        """Fraction of steps completed, from 0 to 1."""
        return self.step / self.total_steps if self.step is not None and self.total_steps else None


def is_training(run: Path) -> bool | None:
    """Returns True if a process is training this run, or None if unknown.

    Checks the lock on the training machine, and the heartbeat on other machines.
    """
    holder = read_json(run / LOCK_FILE)
    if holder.get("host") == socket.gethostname():
        return _holds_lock(run / LOCK_FILE, holder)
    try:
        touched = heartbeat_path(run).stat().st_mtime
    except OSError:
        return None
    # The writer's or the file server's clock may be wrong, so use the later time.
    last = max(touched, read_json(heartbeat_path(run)).get("time") or 0.0)
    return time.time() - last < STALE_HEARTBEAT_SECONDS


def _holds_lock(path: Path, holder: dict) -> bool:
    if not isinstance(holder.get("pid"), int) or not is_alive(holder["pid"]):
        return False
    # Testing the lock acquires it briefly, which could block a starting run, so check the process first.
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        # PermissionError: another user's file, and the process is alive
        return isinstance(error, BlockingIOError | PermissionError)
    return False


def read_status(run: Path) -> RunStatus:
    """Reads a run's state from the end of its metrics, its lock and its heartbeat."""
    events = read_end(run)
    heartbeat = read_json(heartbeat_path(run))
    last = {event["event"]: event for event in events}
    train = last.get("train", {})
    alive = is_training(run)
    end = end_of(events)
    logged = (run / METRICS_FILE).stat().st_mtime
    # Without a lock or heartbeat, assume that the run is alive if its log was written recently.
    if alive is None:
        alive = not end and time.time() - logged < STALE_HEARTBEAT_SECONDS
    reached = (train.get("step"), last.get("start", {}).get("step"), last.get("rollback", {}).get("to_step"))
    step = next((step for step in reached if is_number(step)), None)
    total_steps = planned_steps(events) or last_start(run).get("total_steps")
    # On other machines, the lock may be missing, but the heartbeat also contains the process ID.
    holder = read_json(run / LOCK_FILE) or heartbeat
    return RunStatus(
        folder=run,
        state="running" if alive else "crashed" if not end else "finished" if end.get("code") == 0 else "stopped",
        reason=None if alive or not end else str(end.get("reason")),
        where=f"process {holder.get('pid', '?')} on {holder.get('host', '?')}" if alive and holder else None,
        step=step,
        total_steps=total_steps,
        train=train,
        seconds_left=_seconds_left(events, step, total_steps) if alive else None,
        logged=logged,
        silent_seconds=heartbeat.get("silent_seconds") if alive else None,
        events=events,
    )


def _validation_loss(events: list[Event]) -> float | None:
    """Returns the mean over sources at the last validation, or None if a loss wasn't finite."""
    validations = [e for e in events if e["event"] == "validation"]
    newest = [e.get("loss") for e in validations if e.get("step") == validations[-1].get("step")]
    return statistics.fmean(newest) if newest and all(map(is_number, newest)) else None


def _seconds_left(events: list[Event], step: int | None, total_steps: int | None) -> float | None:
    """Estimates the time left from the speed since the last start, rollback or stage.

    Includes validation and checkpoints, but not the time before the first log line, such as compilation.
    """
    since = max((n for n, e in enumerate(events) if e["event"] in ("start", "rollback", "stage")), default=0)
    steps = [e for e in measured(events[since:], "time") if e["event"] == "train"]
    if not total_steps or len(steps) < 2:
        return None
    done, seconds = (steps[-1][name] - steps[0][name] for name in ("step", "time"))
    if done <= 0 or seconds < 0:  # the clock was set back
        return None
    return max(0, total_steps - step) * seconds / done


def mirror_text(run: Path) -> str | None:
    """Formats the mirror's state, such as 'step 400, 100 steps behind the newest checkpoint · s3://...'.

    Returns None without a mirror.
    """
    status = read_json(run / MIRROR_STATUS)
    if not status:
        return None
    copied = status.get("copied_step")
    latest = latest_step(run)
    if copied is None:
        said = "no checkpoint copied in this session"
    elif latest is None or copied >= latest:
        said = f"step {copied:,}, the newest checkpoint"
    else:
        said = f"step {copied:,}, {latest - copied:,} steps behind the newest checkpoint"
    if status.get("problem"):
        said += f"; first failed {ago(status['problem_since'])}: {_value_text(status['problem'])}"
    if status.get("dropped"):
        said += f"; {counted(status['dropped'], 'checkpoint')} skipped"
    if status.get("damaged"):
        said += f"; damaged in the mirror: {', '.join(status['damaged'])}"
    return f"{said} · {status.get('mirror')}"


def state_text(status: RunStatus) -> str:
    """Formats the state with a short reason, such as 'running' or 'stopped: preempted'."""
    reason = (status.reason or "").split(",")[0].split(";")[0]
    return f"{status.state}: {reason}" if status.state == "stopped" and reason not in ("", "stopped") else status.state


def list_text(folder: Path) -> str:
    """Formats a table with one line per run in a folder, without control characters.

    Raises InputError if there are no runs.
    """
    runs = find_runs(folder)
    if not runs:
        raise InputError(f"{folder}: contains no runs; start one with train.py, or use another folder")
    rows = [["run", "state", "step", "done", "tokens", "loss", "val loss", "tok/s", "left", "last line"]]
    for status in map(read_status, runs):
        cells = (
            str(status.folder),
            state_text(status),
            text_of(status.step, f"{{:,}}/{status.total_steps:,}".format if status.total_steps else ","),
            text_of(status.progress, ".0%"),
            text_of(status.train.get("tokens"), count_text),
            text_of(status.train.get("loss"), ".4f"),
            text_of(_validation_loss(status.events), ".4f"),
            text_of(status.train.get("tokens_per_second"), count_text),
            text_of(status.seconds_left, duration_text),
            ago(status.logged),
        )
        rows.append([printable(cell) for cell in cells])
    return table(rows, right=set(range(2, len(rows[0]))))


def ago(moment: float) -> str:
    """Formats a Unix timestamp relative to now, such as '2 min 00 s ago'."""
    # The clock may have been set back.
    return f"{duration_text(max(0.0, time.time() - moment))} ago"


def text_of(value: object, form: str | Callable[[Any], str]) -> str:
    """Formats a number for a table cell, with a format such as ',' or a function. Returns '-' for other values."""
    if not is_number(value):
        return "-"
    return format(value, form) if isinstance(form, str) else form(value)


def status_text(folder: Path) -> str:
    """Formats a run's status on one screen, or a list if the folder contains several runs.

    Raises InputError if the folder neither is a run nor contains any.
    """
    if find_runs(folder) not in ([], [folder]):
        return list_text(folder)
    status = read_status(require_run(folder))
    state = state_text(status) + (f", {status.where}" if status.where else "")
    rows = {"run": str(status.folder), "state": f"{state}; last log line {ago(status.logged)}"}
    if status.progress is not None:
        filled = round(30 * min(status.progress, 1.0))
        bar = "█" * filled + "░" * (30 - filled)
        tokens = text_of(status.train.get("tokens"), count_text)
        step = f"step {status.step:,} of {status.total_steps:,}"
        rows["progress"] = f"{bar} {status.progress:.1%} · {step} · {tokens} tokens"
    if status.silent_seconds is not None and status.silent_seconds >= LONG_STEP_SECONDS:
        rows["silence"] = f"no progress for {duration_text(status.silent_seconds)} (a long step or a hang)"
    if status.seconds_left is not None:
        rows["time left"] = f"{duration_text(status.seconds_left)} at the current pace"
    if losses := [event["loss"] for event in measured(status.events, "loss") if event["event"] == "train"]:
        # A loss that isn't finite is logged as null.
        rows["loss"] = f"{text_of(status.train.get('loss'), '.4f')}  {sparkline(losses)}  last {len(losses)} lines"
    for event in status.events:
        if event["event"] == "validation":
            average = event.get("average_loss")
            of_average = f", averaged weights {average:.4f}" if is_number(average) else ""
            text = f"loss {text_of(event.get('loss'), '.4f')}{of_average} at step {event['step']:,}"
            rows[f"validation {event.get('source')}"] = text
    speed = text_of(status.train.get("tokens_per_second"), ",.0f")
    mfu = text_of(status.train.get("mfu"), ".1%")
    rows["speed"] = f"{speed} tok/s · MFU {mfu}"
    if mirror := mirror_text(status.folder):
        rows["mirror"] = mirror
    lines = [table([[name, value] for name, value in rows.items()])]
    events = [e for e in status.events if e["event"] not in ("train", "validation")][-SHOWN_EVENTS:]
    if events:
        lines += ["", "last events", *(f"  {event_text(event)}" for event in events)]
    return "\n".join(lines)


def event_text(event: Event) -> str:
    """Formats an event as one line: '2026-01-31 12:00:00  checkpoint  step 500 · path step-00000500 ...'."""
    moment = event.get("time")
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)) if is_number(moment) else ""
    shown = {k: v for k, v in event.items() if k not in ("event", "time", "start_id") and v is not None}
    parts = [f"{name} {_value_text(value)}" for name, value in list(shown.items())[:7]]
    return f"{when}  {event['event']:<10}  {' · '.join(parts)}".rstrip()


def _value_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if is_number(value):
        return f"{value:,}"
    return shortened(" ".join(str(value).split()), 80)


def sparkline(values: list[float]) -> str:
    """Draws a curve with block characters. Each character shows the mean of one of 40 equal intervals."""
    width = min(40, len(values))
    bounds = [round(n * len(values) / width) for n in range(width + 1)]
    means = [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(bounds)]
    low = min(means)
    high = max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((mean - low) * scale)] for mean in means)
