"""Locks the run folder, detects crash loops, and records how the run ends."""

import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from pretrain.checkpoint.run_state import RunStoppedError
from pretrain.config import RunConfig
from pretrain.errors import (
    CRASHED,
    EXIT_BAD_INPUT,
    EXIT_CRASH_LOOP,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    InputError,
    UnreachableError,
    end_now,
    errors_in_own_code,
)
from pretrain.hardware import memory_bytes
from pretrain.parallel.launcher import ToolError, run_tool
from pretrain.parallel.ranks import Ranks
from pretrain.parallel.strategy import Strategy
from pretrain.processes import folder_lock
from pretrain.runs.event_log import read_metrics
from pretrain.runs.run_folder import LOCK_FILE, output_problem
from pretrain.training.metrics import Metrics
from pretrain.training.watchdog import END_FILE, record_end, recorded_end
from pretrain.units import leaves

RESTARTS_WITHOUT_PROGRESS = 3
ABANDONED_LOCK_SECONDS = 30.0
"""Age at which a lock from another machine counts as abandoned. A running process touches its lock every 2 s."""
ADVICE_SECONDS = 120.0
"""Time limit for computing the advice after an out-of-memory error."""


class CrashLoopError(RunStoppedError):
    """Raised if the run repeatedly crashes at the same point."""

    exit_code = EXIT_CRASH_LOOP


def with_recorded_end(config: RunConfig, strategy: Strategy, train: Callable[[Metrics], int]) -> int:
    """Calls `train` with the run folder locked, records the end in metrics.jsonl, and returns the exit code.

    Raises InputError on all ranks if another process uses the folder or the ranks' settings differ.
    """
    ranks = strategy.ranks
    run = config.output
    refuse_mixed_settings(config, ranks)
    with sole_use(run, ranks), ExitStack() as held:
        # Read by the main rank only, because on a network file system other ranks may see an older file.
        if (code := ranks.gather(end_to_repeat(run))[0]) is not None:
            return code
        try:  # before opening the log, which may come from the mirror
            if config.checkpoint.mirror is not None:
                from pretrain.checkpoint.mirror_fetch import on_mirror

                held.enter_context(on_mirror(run, config.checkpoint, ranks))
        except RunStoppedError as stop:
            Metrics(run, is_main=ranks.is_main).end(stop.exit_code, str(stop))
            return stop.exit_code
        if ranks.is_main:
            (run / END_FILE).unlink(missing_ok=True)
        metrics = Metrics(run, is_main=ranks.is_main)
        try:
            with errors_in_own_code():
                return train(metrics)
        except RunStoppedError as stop:  # raised on all ranks
            metrics.end(stop.exit_code, str(stop))
            return stop.exit_code
        except (InputError, UnreachableError) as error:
            if not metrics.began:  # raised on all ranks
                raise
            # Only this rank read the damaged shard or lost its connection, so it must report the error.
            code = EXIT_BAD_INPUT if isinstance(error, InputError) else EXIT_PREEMPTED
            print(f"rank {ranks.rank}: {error}", file=sys.stderr, flush=True)
            metrics.end(code, str(error))
            record_end(run, code, str(error))
            end_now(code)
        except KeyboardInterrupt:  # only before the first step; Watch handles a later Ctrl-C
            metrics.end(EXIT_INTERRUPTED, "interrupted; run the same command to resume from the newest checkpoint")
            end_now(EXIT_INTERRUPTED)
        except Exception as error:
            if end := recorded_end(run):  # by another rank
                metrics.end(*end)
                end_now(end[0])
            traceback.print_exc()
            advice = f"\n{advice_on_memory(config, strategy)}" if is_out_of_memory(error) else ""
            metrics.end(CRASHED, f"{type(error).__name__}: {error}"[:2000] + advice)
            if not ranks.is_main:
                print(advice, file=sys.stderr)
            end_now(CRASHED)


def refuse_mixed_settings(config: RunConfig, ranks: Ranks) -> None:
    """Raises InputError on all ranks if their settings differ, except for shard paths.

    This happens if the recipe differs between machines, or if two launches use the same address and port.
    """
    of_ranks = ranks.gather(leaves(config.model_dump(mode="json")))
    differing = []
    for path in dict.fromkeys(path for settings in of_ranks for path in settings):
        values = dict.fromkeys(str(settings.get(path, "not given")) for settings in of_ranks)
        if len(values) > 1 and not path.endswith("shards"):
            differing.append(f"{path}: {' or '.join(values)}")
    if differing:
        raise InputError(
            f"launcher: the processes of this run have different settings ({'; '.join(differing)}); "
            "use the same recipe and command on all machines, and a separate port for each run (--main_process_port)"
        )


@contextmanager
def sole_use(run: Path, ranks: Ranks) -> Iterator[None]:
    """Locks the run folder within the context. Raises InputError on all ranks if another process holds the lock."""
    with ExitStack() as held:
        problems = []
        if ranks.is_main:
            if not run.exists():
                held.callback(remove_if_empty, run)  # runs after the lock is released
            try:
                run.mkdir(parents=True, exist_ok=True)
                held.enter_context(folder_lock(run / LOCK_FILE, silence_seconds=ABANDONED_LOCK_SECONDS))
            except InputError as error:
                problems = error.problems
            except OSError as error:
                problems = [output_problem(run) or f"output: {run} is not writable ({error}); use another --output"]
        if problems := ranks.gather(problems)[0]:
            raise InputError(*problems)
        yield


def remove_if_empty(run: Path) -> None:
    """Removes the folder if all its files are empty, because the run was rejected before it began."""
    # A link, such as checkpoints/ on another disk, is the user's.
    if not any(path.is_symlink() or (path.is_file() and path.stat().st_size) for path in run.rglob("*")):
        shutil.rmtree(run, ignore_errors=True)


def end_to_repeat(run: Path) -> int | None:
    """Returns the previous exit code if a restart by torchrun must exit immediately, otherwise None.

    torchrun restarts after any nonzero exit code, but only a run that crashed or was killed should restart.
    """
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return None
    last = (starts_and_ends(run) or [{}])[-1]  # without an end event, the run was killed and may continue
    return last["code"] if last.get("code") not in (None, 0, CRASHED) else None


def refuse_crash_loop(run: Path, step: int, ranks: Ranks) -> None:
    """Raises CrashLoopError on all ranks if too many starts from this `step` crashed without progress."""
    # Only the main rank's count is used, because a slow rank could already read the end of this start.
    crashes, furthest = ranks.gather(crashes_without_progress(run, step))[0]
    if crashes > RESTARTS_WITHOUT_PROGRESS:
        raise CrashLoopError(
            f"started {crashes} times from step {step:,} without getting past step {furthest:,}; see the end of "
            f"{run}/train.log and the stack traces in {run} for the cause, fix it, and run the same command again"
        )


def crashes_without_progress(run: Path, step: int) -> tuple[int, int]:
    """Counts consecutive starts from `step` that crashed without getting further than earlier ones.

    Returns (count, furthest step reached).
    """
    crashes = 0
    furthest = step
    for line in starts_and_ends(run):
        if line["event"] == "end" and line["code"] != CRASHED:
            crashes = 0
        elif line["event"] == "start" and line["step"] == step:
            crashes = 1 if line["reached"] > furthest else crashes + 1
            furthest = max(furthest, line["reached"])
    return crashes, furthest


def starts_and_ends(run: Path) -> list[dict]:
    """Returns a run's `start` and `end` events. Each start also has the last logged step after it, as `reached`."""
    found = []
    start = {}
    for event in read_metrics(run):
        if event["event"] == "train":
            start["reached"] = event["step"]
        elif event["event"] in ("start", "end"):
            found.append(event)
        if event["event"] == "start":
            start = event
            start["reached"] = event["step"]
    return found


def is_out_of_memory(error: Exception) -> bool:
    """Returns True for an out-of-memory error. On CPUs, torch has no exception class for it."""
    error = error.__cause__ or error  # torch's pipeline stages raise RuntimeError from the original error
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def advice_on_memory(config: RunConfig, strategy: Strategy) -> str:
    """Suggests changes that reduce memory, cheapest first, with the memory that each needs.

    The planner computes them in a separate process, because training doesn't import it.
    """
    page = 'docs/failures.md, section "Out of memory"; python plan.py --config RECIPE shows the memory per strategy'
    facts = {
        "config": config.model_dump(mode="json"),
        "strategy": strategy.name,
        "ranks": strategy.ranks.count,
        "sizes": vars(strategy.sizes) if hasattr(strategy, "sizes") else None,
        "offloads": getattr(strategy, "offloads", False),
        "deepspeed": getattr(strategy, "settings", {}),
        "precision": strategy.precision,
        "device": strategy.device.type,
        "memory_bytes": memory_bytes(strategy.device),
    }
    try:
        rungs = run_tool("planning.memory_advice", given=json.dumps(facts), seconds=ADVICE_SECONDS)
    except ToolError as error:  # must not hide the original error
        return f"Out of memory. No suggestions are available for this run ({error}). See {page}."
    return f"Out of memory. Try these changes in order; results stay the same up to rounding:\n{rungs}See {page}."
