"""Records profiled steps on one rank: trace, machine load, memory, and lines that wait for the device.

A step of a large model has 100,000 profiler events. To save memory, they are collected in blocks of steps. Only the
last block's trace is written to a file.
"""

import os
import socket
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pretrain.errors import one_line
from pretrain.limits import available_cores
from pretrain.parallel.strategy import Strategy
from pretrain.training.prefetch import ReadAhead
from pretrain.training.run import Run
from pretrain_tools.profiling.causes import RankSteps
from pretrain_tools.profiling.sync_lines import SyncLines, short_path
from pretrain_tools.profiling.trace_events import (
    BACKWARD,
    BETWEEN_STEPS,
    FORWARD,
    MARK,
    STEP,
    UPDATE,
    WAITING_FOR_DATA,
    StepRecord,
    read_events,
    read_steps,
)

SCHEDSTAT = Path("/proc/thread-self/schedstat")
LOADAVG = Path("/proc/loadavg")


class PhaseMarks:
    """Marks the phases of a step in the trace. Phases don't overlap and add up to the whole step."""

    def __init__(self, strategy: Strategy, read_ahead: ReadAhead):
        self.phase = BETWEEN_STEPS
        """The current phase."""
        self._open: record_function | None = None
        self._undo = ExitStack()
        self._mark(read_ahead, "micro_batch", WAITING_FOR_DATA, FORWARD)
        self._mark(strategy, "backward", BACKWARD, BETWEEN_STEPS)
        self._mark(strategy, "update", UPDATE, BETWEEN_STEPS)

    def _mark(self, owner: Any, verb: str, during: str, after: str) -> None:
        """Wraps a method so that it enters the phase `during`, then the phase `after`."""
        call = getattr(owner, verb)

        def marked(*arguments: Any, **named: Any) -> Any:
            self._enter(during)
            result = call(*arguments, **named)
            self._enter(after)
            return result

        # Set it on the instance, so that deleting the attribute restores the method.
        setattr(owner, verb, marked)
        self._undo.callback(delattr, owner, verb)

    def _enter(self, phase: str) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self.phase = phase
        self._open = record_function(MARK + phase)
        self._open.__enter__()

    def begin_step(self, step: int) -> None:
        """Opens a step's mark. step: number of the step in the log."""
        self._step = record_function(f"{STEP}{step}")
        self._step.__enter__()
        self._enter(BETWEEN_STEPS)

    def end_step(self) -> None:
        # record_function ranges must nest, so close the inner one first.
        self._open.__exit__(None, None, None)
        self._step.__exit__(None, None, None)
        self._open = None

    def remove(self) -> None:
        self._undo.close()


class Recording:
    """Records steps until `close`. The first step warms up the profiler.

    Args:
        folder: output folder. Write errors are listed in `problems` and don't end training.
    """

    def __init__(self, run: Run, read_ahead: ReadAhead, folder: Path):
        strategy = run.strategy
        self.folder = folder
        self.strategy = strategy
        self.on_device = strategy.device.type == "cuda"
        self.problems: list[str] = []
        self.records: list[StepRecord] = []
        self._marks = PhaseMarks(strategy, read_ahead)
        self._lines = SyncLines(lambda: self._marks.phase, self.on_device)
        self._began = time.time()
        self._retries = self._count_retries()

    def begin_block(self) -> None:
        """Starts the profiler for a block of steps. Call it on all ranks."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler logs to stderr
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_device else [])]
        self._profiler = profile(activities=activities)
        self._machine: list[dict[str, float]] = []
        try:
            self._profiler.start()
        except RuntimeError as error:
            self._problem(error)
        self._lines.begin()
        # Without a barrier, the first step would seem slow on ranks that arrive early.
        self.strategy.ranks.barrier()

    def begin_step(self, step: int) -> None:
        """Begins a step. step: its number in the log."""
        self._marks.begin_step(step)
        self._starved = read_machine()["starved"]

    def end_step(self) -> None:
        self._marks.end_step()
        now = read_machine()
        self._machine.append({**now, "starved": now["starved"] - self._starved})

    def end_block(self, *, is_first: bool, is_last: bool) -> None:
        """Stops the profiler and reads its events."""
        self._lines.end()
        records = []
        try:
            self._profiler.stop()
            records = read_steps(read_events(self._profiler), on_device=self.on_device)
        except Exception as error:  # an unreadable trace must not end the run
            self._problem(error)
        # Drop the first step, which includes the profiler's startup.
        if is_first:
            self._lines.forget()
        else:
            self.records += [
                replace(record, **machine) for record, machine in zip(records, self._machine, strict=False)
            ]
        if is_last:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                path = self.folder / f"trace-rank-{self.strategy.ranks.rank:05d}.json.gz"
                self._profiler.export_chrome_trace(str(path))
            except (OSError, RuntimeError) as error:
                self._problem(error)
        # Free the events, which take hundreds of megabytes.
        del self._profiler

    def close(self) -> None:
        """Stops counting lines and removes the phase marks."""
        self._lines.end()
        self._marks.remove()

    def abandon(self) -> None:
        """Closes the recording in the middle of a block."""
        self._profiler.stop()
        self.close()

    def _problem(self, error: Exception) -> None:
        self.problems.append(f"rank {self.strategy.ranks.rank}: {one_line(error)}")

    def summary(self) -> RankSteps:
        """Returns this rank's data, so that ranks can gather it."""
        return RankSteps(
            rank=self.strategy.ranks.rank,
            host=socket.gethostname(),
            device=torch.cuda.get_device_name(self.strategy.device) if self.on_device else "CPU",
            cores=available_cores(),
            steps=self.records,
            sync_lines=self._lines.found()[:20],
            compilations=compilations_since(self._began),
            retries_per_step=(self._count_retries() - self._retries) / max(1, len(self.records)),
            problems=self.problems,
        )

    def _count_retries(self) -> int:
        """Returns how often torch freed its cache and retried a failed allocation."""
        return torch.cuda.memory_stats(self.strategy.device).get("num_alloc_retries", 0) if self.on_device else 0


def read_machine() -> dict[str, float]:
    """Returns `starved` (in total since the thread started) and `runnable` for a StepRecord; 0 if not on Linux."""
    starved = 0.0
    runnable = 0
    with suppress(OSError, ValueError, IndexError):
        starved = int(SCHEDSTAT.read_text().split()[1]) / 1e9
        runnable = int(LOADAVG.read_text().split()[3].partition("/")[0])
    return {"starved": starved, "runnable": runnable}


def compilations_since(began: float) -> list[dict[str, Any]]:
    """Returns torch.compile's compilations since `began` (seconds since 1970)."""
    if "torch._dynamo" not in sys.modules:
        return []
    # Private, but otherwise only the log contains recompilation reasons.
    from torch._dynamo.utils import get_compilation_metrics

    return [
        {
            "place": f"{found.co_name} in {short_path(found.co_filename or '?')}:{found.co_firstlineno}",
            "reason": found.recompile_reason,
            "seconds": (found.duration_us or 0) / 1e6,
        }
        for found in get_compilation_metrics()
        if (found.start_time_us or 0) / 1e6 >= began
    ]
