"""Runs jobs in order, in this process or in local processes that end with it."""

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
# Forked workers start in milliseconds, but forking is only safe on Linux.
POOL_CONTEXT = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
PARENT_CHECK_SECONDS = 0.5

Perform = Callable[[Any], Any]
"""Runs a job and returns its result. Picklable."""
_perform: Perform | None = None
"""A pool process's function, set only in that process."""


def performed(perform: Perform, jobs: Iterable[Any], workers: int) -> Iterator[Any]:
    """Yields the result of each job in order, from `workers` processes, or from this process if `workers` is 1.

    Raises InputError if a process dies.
    """
    if workers == 1:
        yield from map(perform, jobs)
        return
    # Freeze existing objects. Garbage collection in a worker would otherwise copy their pages into the worker's
    # memory.
    gc.freeze()
    pool = ProcessPoolExecutor(workers, POOL_CONTEXT, initializer=_start_worker, initargs=(os.getpid(), perform))
    try:
        started = (pool.submit(_perform_here, job) for job in jobs)
        yield from map(Future.result, ahead(started, workers * JOBS_AHEAD_PER_WORKER))
    except BrokenProcessPool:
        raise InputError(
            "a worker process died, most likely out of memory; run the same command again with fewer --workers: it "
            "continues where it stopped"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def ahead(jobs: Iterable[Any], count: int) -> Iterator[Any]:
    """Yields jobs in order, each after fetching `count` later ones, which starts them."""
    # Bounded, because jobs and results wait in memory, and one slow job delays all later ones.
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
    """Ends a worker after its parent was killed. It would wait forever on a pipe that its siblings keep open."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(1)


def _perform_here(job: Any) -> Any:
    return _perform(job)
