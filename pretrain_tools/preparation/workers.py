"""Runs jobs in this process, in a pool of local processes, or on a Ray cluster with a shared file system."""

import collections
import gc
import itertools
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

from pretrain.errors import InputError, errors_in_own_code, one_line

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


@errors_in_own_code()  # the frames of the error don't reach the parent
def _perform_here(job: Any) -> Any:
    return _perform(job)


def performed_on_ray(perform: Perform, jobs: Iterable[Any], workers: int | None, address: str | None) -> Iterator[Any]:
    """Runs jobs on Ray actors and yields the results in order.

    Args:
        workers: number of actors; None for one per CPU core in the cluster.
        address: cluster address for ray.init; None starts Ray on this machine.

    Raises InputError if Ray isn't installed, can't be reached or has no CPU core, or if an actor keeps dying.
    """
    ray = _started(address, workers)
    count = workers or int(ray.cluster_resources().get("CPU", 1))
    if not count:
        raise InputError("--engine ray: the cluster has less than one CPU core; add a machine, or use --workers")
    try:
        place = ray.put(perform)
        actor = ray.remote(_Actor).options(num_cpus=1, max_restarts=3, max_task_retries=3)
        actors = [actor.remote(place) for _ in range(count)]
        results = (actor.perform.remote(job) for actor, job in zip(itertools.cycle(actors), jobs, strict=False))
        yield from map(ray.get, ahead(results, count * JOBS_AHEAD_PER_WORKER))
    except ray.exceptions.RayTaskError as error:
        # Raise the original error, as local workers do.
        raise error.cause if isinstance(error.cause, InputError | OSError) else error from None
    except ray.exceptions.RayError as error:
        raise InputError(
            f"--engine ray: an actor died ({type(error).__name__}); run the same command again to resume"
        ) from None


class _Actor:
    """Ray actor that runs jobs."""

    def __init__(self, perform: Perform):
        self._perform = perform

    @errors_in_own_code()
    def perform(self, job: Any) -> Any:
        return self._perform(job)


def stop_ray() -> None:
    """Disconnects from the cluster, or stops Ray if it was started on this machine."""
    if ray := sys.modules.get("ray"):
        ray.shutdown()


def _started(address: str | None, workers: int | None):
    try:
        import ray
    except ImportError:
        raise InputError("--engine ray: Ray is not installed; run pip install 'ray>=2.40', or use --workers") from None
    if ray.is_initialized():
        return ray
    here = {"num_cpus": workers, "include_dashboard": False} if address is None else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="warning", **here)
    except Exception as error:  # Ray raises a plain Exception if a node starts too slowly
        ray.shutdown()
        raise InputError(
            f"--engine ray: no connection to {address or 'Ray on this machine'} ({one_line(error)}); try again, "
            "start a cluster with ray start, or use --workers"
        ) from None
    return ray
