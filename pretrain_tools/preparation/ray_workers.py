"""Runs workers on a Ray cluster whose machines share their files."""

import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from pretrain.errors import InputError, one_line
from pretrain_tools.preparation.documents.sources import LargeFile, Part
from pretrain_tools.preparation.workers import JOBS_AHEAD_PER_WORKER, Perform, ahead

PARTS_AHEAD_PER_READER = 16
WORKERS_PER_READER = 4
"""Number of workers that one reader of a large file can keep busy."""


def performed_on_ray(perform: Perform, jobs: Iterable[Any], workers: int | None, address: str | None) -> Iterator[Any]:
    """Yields the result of each job in order, from `workers` actors (None: one per core of the cluster).

    Each part of a large file is a job. The cluster reads the file, so its content never reaches this process.

    address: as in ray.init. None starts Ray on this machine, until `stop_ray`. Raises InputError if Ray isn't
    installed, is unreachable, or permanently loses an actor.
    """
    ray = _started(address, workers)
    count = workers or int(ray.cluster_resources().get("CPU", 1))
    try:
        place = ray.put(perform)
        actor = ray.remote(_Actor).options(num_cpus=1, max_restarts=3, max_task_retries=3)
        actors = [actor.remote(place) for _ in range(count)]
        single = _with_parts(ray, jobs, count // WORKERS_PER_READER)
        results = (actor.perform.remote(job) for actor, job in zip(itertools.cycle(actors), single, strict=False))
        yield from map(ray.get, ahead(results, count * JOBS_AHEAD_PER_WORKER))
    except ray.exceptions.RayTaskError as error:
        # Raise the same error as on one machine.
        raise error.cause if isinstance(error.cause, InputError | OSError) else error from None
    except ray.exceptions.RayError as error:
        raise InputError(
            f"--engine ray: an actor was lost ({type(error).__name__}); run the same command again: it continues"
        ) from None


class _Actor:
    """Runs jobs in one of the cluster's processes."""

    def __init__(self, perform: Perform):
        self._perform = perform

    def perform(self, job: Any) -> Any:
        return self._perform(job)


def _read(file: LargeFile) -> Iterator[Part]:
    for part in file.parts():
        _ = yield part  # Ray sends a value, which `yield from` would pass to an iterator without `send`


def _with_parts(ray: Any, jobs: Iterable[Any], others: int) -> Iterator[Any]:
    """Yields the jobs in order, with a reference for each part of a large file. Reads `others` files ahead."""
    # Readers reserve no cores, because they mostly wait and would take cores from the workers.
    read = ray.remote(_read).options(
        num_cpus=0,
        max_retries=3,
        scheduling_strategy="SPREAD",
        num_returns="streaming",
        _generator_backpressure_num_objects=PARTS_AHEAD_PER_READER,
    )
    reads = (read.remote(job) if isinstance(job, LargeFile) else (job,) for job in jobs)
    for parts in ahead(reads, others):
        yield from itertools.chain(parts)  # chain hides `close`, which a reader lacks


def stop_ray() -> None:
    """Disconnects from the cluster, or stops Ray on this machine."""
    if ray := sys.modules.get("ray"):
        ray.shutdown()


def _started(address: str | None, workers: int | None):
    try:
        import ray
    except ImportError:
        raise InputError("--engine ray: Ray is not installed; pip install 'ray>=2.40', or use --workers") from None
    if ray.is_initialized():
        return ray
    here = {"num_cpus": workers, "include_dashboard": False} if address is None else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="warning", **here)
    except Exception as error:  # Ray raises plain Exception when a node takes long to start
        ray.shutdown()
        failed = f"--ray_address {address}: cannot be reached ({one_line(error)}); start it: ray start"
        if address is None:
            failed = f"--engine ray: Ray failed to start ({one_line(error)}); run it again, or use --workers"
        raise InputError(failed) from None
    return ray
