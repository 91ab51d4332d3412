"""Trains many runs, each in its own train.py process, and recovers them after a kill.

    FOLDER/recipes/NAME.yaml   the complete recipe of each run
    FOLDER/runs/NAME           its run folder
    FOLDER/logs/NAME.log       its console; the training process holds a lock on it, so that no run starts twice
    FOLDER/slots/0.json        the run that was started last on a device or share of the CPU

If the caller is killed, its runs continue, and the next caller waits for them like for its own. A run that was killed
resumes from its checkpoint.
"""

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_NUMERIC, EXIT_PREEMPTED
from pretrain.files import ROOT, SEAL_FILE, write_durably
from pretrain.parallel.launcher import environment_alone
from pretrain.processes import hold_while_open, is_held
from pretrain.runs.event_log import read_metrics
from pretrain.runs.run_folder import LOCK_FILE, METRICS_FILE, checkpoint_folders, read_json
from pretrain.terminal import LIVE_LINE, is_terminal
from pretrain.units import duration_text
from pretrain_tools.runs.history import count_hours, current_events, is_number
from pretrain_tools.runs.parity import refusals
from pretrain_tools.runs.status import read_status

POLL_SECONDS_OF_RUNS = 0.2
SECONDS_BETWEEN_PROGRESS_LINES = 60.0
"""Interval of progress lines if stderr is not a terminal."""


@dataclass(frozen=True)
class SmallRun:
    """A run of an experiment."""

    name: str
    folder: Path
    """Folder of the experiment."""
    total_steps: int
    flops: float
    """FLOPs of its whole budget."""

    @property
    def recipe(self) -> Path:
        return self.folder / "recipes" / f"{self.name}.yaml"

    @property
    def output(self) -> Path:
        return self.folder / "runs" / self.name

    @property
    def log(self) -> Path:
        return self.folder / "logs" / f"{self.name}.log"


@dataclass(frozen=True)
class RunOutcome:
    """The progress of a run, determined from its folder alone."""

    state: str
    """new, unfinished, finished, or diverged: ended by its guard, so that a retry would end the same way."""
    step: int
    """Step of the newest checkpoint, or the last step of a finished run."""
    tokens: int
    losses: dict[int, float]
    """Validation loss by step, averaged over the sources; infinite if it was not a finite number."""
    seconds: float
    reason: str = ""
    """Reason of its end, if it did not finish."""
    was_stopped: bool = False
    """True if it was stopped with a save: by a signal, a pause or `runs.py stop`."""

    @property
    def loss(self) -> float:
        """Final loss of a finished run; infinite for any other."""
        return self.losses.get(self.step, math.inf) if self.state == "finished" else math.inf

    def has_reached(self, step: int | None) -> bool:
        """Tells if nothing is left to train up to a step; None means to the end."""
        return self.state in ("finished", "diverged") or (step is not None and self.step >= step)


def read_outcome(run: SmallRun) -> RunOutcome:
    """Reads the outcome from a run's folder; copes with the remains of a crash."""
    events = read_metrics(run.output)
    count_hours(events)
    events = current_events(events)
    train = [event for event in events if event["event"] == "train"]
    last = next((e for e in reversed(events) if e["event"] in ("end", "start", "train")), {})
    code = last.get("code") if last.get("event") == "end" else None
    state = "unfinished" if events else "new"
    if code == EXIT_NUMERIC:
        state = "diverged"
    # The exit code alone is not enough: the export may have been deleted or damaged since.
    if code == 0 and (run.output / "final" / SEAL_FILE).is_file():
        state = "finished"
    losses: dict[int, list[float]] = {}
    for event in events:
        if event["event"] == "validation":
            loss = event.get("loss")
            losses.setdefault(event.get("step") or 0, []).append(loss if is_number(loss) else math.inf)
    checkpoint = max(checkpoint_folders(run.output), default=0)
    return RunOutcome(
        state=state,
        step=last.get("step", checkpoint) if state == "finished" else checkpoint,
        tokens=train[-1].get("tokens") or 0 if train else 0,
        losses={step: statistics.fmean(of_sources) for step, of_sources in losses.items()},
        seconds=3600 * events[-1]["hours"] if events else 0.0,
        reason=str(last.get("reason", "")) if state != "finished" else "",
        was_stopped=last.get("code") in (EXIT_PREEMPTED, EXIT_INTERRUPTED),
    )


def device_slots(parallel: int | None) -> list[dict[str, str]]:
    """Returns the environment variables of parallel runs: `parallel` runs, by default one per GPU, or one on the CPU.

    If there are more runs than GPUs, they share the GPUs; on the CPU they share the cores.
    """
    import torch

    # Keep the caller's names: CUDA_VISIBLE_DEVICES may already restrict or reorder the GPUs.
    if count := torch.cuda.device_count():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",")[:count] if visible else [str(number) for number in range(count)]
        return [{"CUDA_VISIBLE_DEVICES": names[n % count]} for n in range(parallel or count)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Each run would start a thread per core and compete with the others; a number set by the user stays.
    if not parallel or parallel == 1 or "OMP_NUM_THREADS" in os.environ:
        return [{} for _ in range(parallel or 1)]
    return [{"OMP_NUM_THREADS": str(max(1, cores // parallel))} for _ in range(parallel)]


class Progress:
    """The progress of all runs, and the remaining time at the speed so far.

    Args:
        runs: runs by name; a search adds to the mapping later.
        work: total FLOPs to train, which halving makes less than the sum of the runs' budgets.
    """

    def __init__(self, runs: Mapping[str, SmallRun], work: float):
        self.runs = runs
        self.work = work
        self.steps = {name: read_outcome(run).step for name, run in runs.items()}
        """Current step by name."""
        self._done_before = self.done()
        self._since = self._shown = time.monotonic()

    def done(self) -> float:
        """Returns the FLOPs trained so far."""
        runs = ((self.runs[name], step) for name, step in self.steps.items())
        return sum(run.flops * min(1.0, step / run.total_steps) for run, step in runs)

    def left_text(self) -> str:
        """Formats the remaining time as '12 min 05 s left'; '' while nothing is known."""
        done = self.done()
        trained = done - self._done_before
        if trained <= 0:
            return ""
        return f"{duration_text(max(0.0, self.work - done) / trained * (time.monotonic() - self._since))} left"

    def show(self, active: list[str]) -> None:
        """Redraws the live line, or prints a line every minute if stderr is not a terminal."""
        watched = is_terminal(sys.stderr)
        now = time.monotonic()
        if now - self._shown < (1.0 if watched else SECONDS_BETWEEN_PROGRESS_LINES):
            return
        self._shown = now
        parts = []
        for name in active:
            run = self.runs[name]
            text = "starting"
            status = read_status(run.output, brief=True) if (run.output / METRICS_FILE).is_file() else None
            if status and status.step:
                self.steps[name] = status.step
                loss = f", loss {status.loss:.4f}" if status.loss is not None else ""
                text = f"step {status.step:,}/{run.total_steps:,}{loss}"
            parts.append(f"{name} {text}")
        text = " · ".join(filter(None, [*parts, self.left_text()]))
        if watched:
            LIVE_LINE.show(text)
        else:
            print(text, file=sys.stderr, flush=True)


@dataclass
class Training:
    """A train.py process: our child, or one that an earlier caller left behind."""

    run: SmallRun
    process: subprocess.Popen | None = None

    def ended(self) -> bool:
        return self.process.poll() is not None if self.process else not is_held(self.run.log)

    def signal(self, number: int) -> None:
        if self.process:
            self.process.send_signal(number)
        elif isinstance(pid := read_json(self.run.output / LOCK_FILE).get("pid"), int):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def train_runs(
    runs: Mapping[str, SmallRun],
    slots: list[dict[str, str]],
    next_run: Callable[[set[str]], tuple[SmallRun, int | None] | None],
    ended: Callable[[SmallRun, int | None], None],
    progress: Progress,
) -> int:
    """Trains until `next_run` has no more runs and all have ended. Returns 0, or the exit status of an interruption.

    Passes Ctrl-C, SIGTERM and SIGHUP on to the runs, which save; the same command continues them.

    Args:
        next_run: called with the names in training; returns the next run and the step to pause at (None: no pause), or
            None if nothing can start now.
        ended: called with each run that has ended, and its exit status if known.
    """
    training = left_behind(runs)
    with signals_passed_on(training) as received:
        while True:
            for slot, one in [(slot, one) for slot, one in training.items() if one.ended()]:
                del training[slot]
                progress.steps[one.run.name] = read_outcome(one.run).step
                LIVE_LINE.clear()
                ended(one.run, one.process.returncode if one.process else None)
            for slot, environment in enumerate(slots):
                if slot not in training and not received:
                    given = next_run({one.run.name for one in training.values()})
                    # Slots are interchangeable: if nothing can start in this one, nothing can start in the others.
                    if given is None:
                        break
                    training[slot] = start_training(*given, slot, environment)
            if not training:
                LIVE_LINE.clear()
                if not received:
                    return 0
                return EXIT_INTERRUPTED if received[0] == signal.SIGINT else EXIT_PREEMPTED
            progress.show([one.run.name for one in training.values()])
            time.sleep(POLL_SECONDS_OF_RUNS)


def left_behind(runs: Mapping[str, SmallRun]) -> dict[int, Training]:
    """Returns the runs, by slot, that an earlier caller started and that are still training."""
    found = {}
    # A slot's file may name a run that has ended; only the lock on its log shows that it is still training.
    for folder in {run.folder for run in runs.values()}:
        for path in (folder / "slots").glob("*.json"):
            run = runs.get(str(read_json(path).get("run")))
            if run is not None and is_held(run.log):
                print(f"{run.name}: still being trained since before; waiting for it", file=sys.stderr, flush=True)
                found[int(path.stem)] = Training(run)
    return found


def start_training(run: SmallRun, pause_at: int | None, slot: int, environment: Mapping[str, str]) -> Training:
    """Starts train.py as a user would, with the console going to the run's log."""
    record = run.folder / "slots" / f"{slot}.json"
    for folder in (record.parent, run.log.parent):
        folder.mkdir(parents=True, exist_ok=True)
    # Written before the start, so that the next caller finds the run even if this one is killed in between.
    write_durably(record, json.dumps({"run": run.name}))
    pause = ["--checkpoint.pause_at", str(pause_at)] if pause_at else []
    with open(run.log, "ab") as log:
        # The child inherits the lock, so it remains held even if the caller dies.
        hold_while_open(log)
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), "--config", str(run.recipe), *pause],
            # A launcher's variables (RANK, WORLD_SIZE) would make each run join the caller's process group.
            env=environment_alone() | environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that Ctrl-C reaches it only once, passed on by us
        )
    return Training(run, process)


@contextmanager
def signals_passed_on(training: Mapping[int, Training]) -> Iterator[list[int]]:
    """Passes signals on to all runs while the context is open; yields the list of signals received."""
    received: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        received.append(number)
        for one in list(training.values()):
            one.signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def failure_text(run: SmallRun, status: int | None) -> str:
    """Returns the reason why a run ended early: the input errors it reported, else the last line of its log."""
    log = run.log.read_text(encoding="utf-8", errors="replace") if run.log.is_file() else ""
    if status == EXIT_BAD_INPUT and (found := refusals(log, status)):
        return "; ".join(found[-3:])
    if status is not None and status < 0:
        return f"killed by signal {-status}"
    lines = [line for line in (read_outcome(run).reason or log).splitlines() if line.strip()]
    return lines[-1] if lines else f"exit {status}"
