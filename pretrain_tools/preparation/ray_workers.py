"""Runs workers on a Ray cluster with a shared file system."""

import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from pretrain.errors import InputError, one_line
from pretrain_tools.preparation.workers import JOBS_AHEAD_PER_WORKER, Perform, ahead


def performed_on_ray(perform: Perform, jobs: Iterable[Any], workers: int | None, address: str | None) -> Iterator[Any]:
    """Runs jobs on Ray actors and yields the results in order.

    Args:
        workers: number of actors; None for one per CPU core in the cluster.
        address: cluster address for ray.init; None starts Ray on this machine.

    Raises InputError if Ray isn't installed or can't be reached, or if an actor keeps dying.
    """
    ray = _started(address, workers)
    count = workers or int(ray.cluster_resources().get("CPU", 1))
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
        failed = f"--ray_address {address}: cannot reach the cluster ({one_line(error)}); start it with ray start"
        if address is None:
            failed = f"--engine ray: Ray failed to start ({one_line(error)}); try again, or use --workers"
        raise InputError(failed) from None
    return ray
