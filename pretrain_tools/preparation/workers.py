"""Workers that perform jobs in order: this process, or processes of this machine that end with it."""

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
# Forked workers start in milliseconds; elsewhere than on Linux forking is not safe.
POOL_CONTEXT = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
PARENT_CHECK_SECONDS = 0.5

_worker: Callable[[Any], Any] | None = None
"""The function that a process of a pool calls, set in that process only."""


def performed(make_worker: Callable[[Any], Callable[[Any], Any]], shared: Any, jobs: Iterable[Any], workers: int):
    """Yields the result of each job in order, by `workers` processes or, when 1, this one.

    make_worker: called with `shared` in each process, returns what performs a job. Raises InputError when one dies.
    """
    if workers == 1:
        yield from map(make_worker(shared), jobs)
        return
    # What exists now stays: a collection in a worker would copy its pages into the worker's memory.
    gc.freeze()
    initial = (os.getpid(), make_worker, shared)
    pool = ProcessPoolExecutor(workers, POOL_CONTEXT, initializer=_start_worker, initargs=initial)
    try:
        started = (pool.submit(_call_worker, job) for job in jobs)
        yield from map(Future.result, ahead(started, workers * JOBS_AHEAD_PER_WORKER))
    except BrokenProcessPool:
        raise InputError(
            "a worker process died, most likely out of memory; run the same command again with fewer --workers: it "
            "continues where it stopped"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def ahead(jobs: Iterable[Any], count: int) -> Iterator[Any]:
    """Yields jobs in order, each after `count` later ones have been taken, which starts them."""
    # Bounded: jobs and results wait in memory, and one slow job holds back all after it.
    waiting: collections.deque[Any] = collections.deque()
    for job in jobs:
        waiting.append(job)
        if len(waiting) > count:
            yield waiting.popleft()
    while waiting:
        yield waiting.popleft()


def _start_worker(parent: int, make_worker: Callable[[Any], Callable[[Any], Any]], shared: Any) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    _worker = make_worker(shared)


def _end_with_parent(parent: int) -> None:
    """Ends a worker whose parent was killed: it waits on a pipe that its siblings hold open, too."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(1)


def _call_worker(job: Any) -> Any:
    assert _worker is not None
    return _worker(job)
