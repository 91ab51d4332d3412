"""Runs jobs in this process or in a pool of local processes."""

import collections
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from pretrain.errors import InputError

JOBS_AHEAD_PER_WORKER = 2
# Forking starts workers in milliseconds, but is only safe on Linux.
POOL_CONTEXT = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
PARENT_CHECK_SECONDS = 0.5

Perform = Callable[[Any], Any]
"""Function that runs a job and returns its result. Must be picklable."""
_perform: Perform | None = None
"""The function to run, set only in worker processes."""


def performed(perform: Perform, jobs: Iterable[Any], workers: int) -> Iterator[Any]:
    """Runs jobs in `workers` processes, or in this process if `workers` is 1, and yields the results in order.

    Raises InputError if a worker dies.
    """
    if workers == 1:
        yield from map(perform, jobs)
        return
    # Otherwise, garbage collection in a forked worker would copy the parent's memory pages.
    gc.freeze()
    pool = ProcessPoolExecutor(workers, POOL_CONTEXT, initializer=_start_worker, initargs=(os.getpid(), perform))
    try:
        started = (pool.submit(_perform_here, job) for job in jobs)
        yield from map(Future.result, ahead(started, workers * JOBS_AHEAD_PER_WORKER))
    except BrokenProcessPool:
        raise InputError(
            "a worker process died, probably because it ran out of memory; run the same command again with fewer "
            "--workers to resume"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def ahead(jobs: Iterable[Any], count: int) -> Iterator[Any]:
    """Yields jobs in order while `count` later jobs are running. `jobs` must start each job before yielding it."""
    # The limit bounds memory, because finished results pile up behind a slow job.
    waiting: collections.deque[Any] = collections.deque()
    for job in jobs:
        waiting.append(job)
        if len(waiting) > count:
            yield waiting.popleft()
    while waiting:
        yield waiting.popleft()


def _start_worker(parent: int, perform: Perform) -> None:
    global _perform
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    _perform = perform


def _end_with_parent(parent: int) -> None:
    """Exits when the parent process dies. Otherwise the worker would wait forever on a pipe kept open by siblings."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(1)


def _perform_here(job: Any) -> Any:
    return _perform(job)
