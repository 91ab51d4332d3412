"""Encoding and the search for near duplicates on a Ray cluster whose machines see the same files."""

import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pretrain.errors import InputError, one_line
from pretrain_tools.preparation.cleaning.near_duplicate_search import DuplicateSearch
from pretrain_tools.preparation.documents.records import Reading
from pretrain_tools.preparation.documents.sources import LargeFile, Part
from pretrain_tools.preparation.worker import (
    PARTS_AHEAD_PER_WORKER,
    EncodedPart,
    EncodingSettings,
    PartEncoder,
    results_in_order,
)

WORKERS_PER_READER, PARTS_AHEAD_PER_READER = 4, 16
"""Large files are read ahead by as many processes: one reads faster than so many workers encode."""


def encode_parts_on_ray(
    pieces: Iterable[Part | LargeFile], settings: EncodingSettings, workers: int | None, address: str | None
) -> Iterator[EncodedPart]:
    """Encodes parts in order, with `workers` actors (None: one per core of the cluster).

    Large files are read by the cluster as well: what they hold never comes to this process.

    address: as for ray.init; None starts Ray on this machine, until `stop_ray`. Raises InputError when Ray
    is not installed, cannot be reached, or loses an actor for good.
    """
    with _cluster(address, workers) as (ray, count):
        shared = ray.put(settings)
        actor = ray.remote(PartEncoder).options(num_cpus=1, max_restarts=3, max_task_retries=3)
        actors = [actor.remote(shared) for _ in range(count)]
        parts = _parts_of_readers(ray, pieces, settings.reading, 1 + count // WORKERS_PER_READER)
        jobs = (actor.encode.remote(part) for actor, part in zip(itertools.cycle(actors), parts, strict=False))
        yield from results_in_order(jobs, ray.get, count)


def _read(file: LargeFile, reading: Reading) -> Iterator[Part]:
    for part in file.parts(reading):
        _ = yield part  # Ray sends a value, which `yield from` would pass on to what takes none


def _parts_of_readers(ray: Any, pieces: Iterable[Part | LargeFile], reading: Reading, readers: int) -> Iterator[Any]:
    """The parts in order; of large files, references to them. So many files are read ahead."""
    # They wait for files and for the workers, so they take no core from these.
    read = ray.remote(_read).options(
        num_cpus=0,
        max_retries=3,
        scheduling_strategy="SPREAD",
        num_returns="streaming",
        _generator_backpressure_num_objects=PARTS_AHEAD_PER_READER,
    )
    pieces, waiting = iter(pieces), deque()
    while True:
        for piece in itertools.islice(pieces, readers - len(waiting)):
            waiting.append(read.remote(piece, reading) if isinstance(piece, LargeFile) else (piece,))
        if not waiting:
            return
        yield from itertools.chain(waiting.popleft())  # which hides `close`: a reader has none


@contextmanager
def tasks_on_ray(
    search: DuplicateSearch, workers: int | None, address: str | None
) -> Iterator[Callable[[str, Sequence[int]], Iterator[None]]]:
    """What performs tasks of a stage on the cluster, and yields after each."""
    with _cluster(address, workers) as (ray, count):
        shared = ray.put(search)
        task_type = ray.remote(DuplicateSearch.perform).options(num_cpus=1, max_retries=3)

        def perform(stage: str, tasks: Sequence[int]) -> Iterator[None]:
            running: list[Any] = []
            for task in tasks:
                if len(running) >= count * PARTS_AHEAD_PER_WORKER:
                    done, running = ray.wait(running)
                    yield from ray.get(done)
                running.append(task_type.remote(shared, stage, task))
            while running:
                done, running = ray.wait(running)
                yield from ray.get(done)

        yield perform


@contextmanager
def _cluster(address: str | None, workers: int | None) -> Iterator[tuple[Any, int]]:
    """(ray, workers to start) of a cluster in use. Raises InputError as encode_parts_on_ray says."""
    ray = _started(address, workers)
    try:
        yield ray, workers or int(ray.cluster_resources().get("CPU", 1))
    except ray.exceptions.RayTaskError as error:
        # As if it had happened on this machine.
        raise error.cause if isinstance(error.cause, InputError | OSError) else error from None
    except ray.exceptions.RayError as error:
        raise InputError(
            f"--engine ray: an actor was lost ({type(error).__name__}); run the same command again: it continues"
        ) from None


def stop_ray() -> None:
    """Leaves the cluster, or ends the one that was started on this machine."""
    if ray := sys.modules.get("ray"):
        ray.shutdown()


def _started(address: str | None, workers: int | None):
    try:
        import ray
    except ImportError:
        raise InputError("--engine ray: Ray is not installed; pip install 'ray>=2.40', or use --workers") from None
    if ray.is_initialized():
        return ray
    try:
        if address is None:
            ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="warning")
        else:
            ray.init(address=address, log_to_driver=False, logging_level="warning")
    except Exception as error:  # Ray raises plain Exception when a node takes long to start
        ray.shutdown()
        failed = f"--ray_address {address}: cannot be reached ({one_line(error)}); start it: ray start"
        if address is None:
            failed = f"--engine ray: Ray does not start here ({one_line(error)}); run it again, or use --workers"
        raise InputError(failed) from None
    return ray
