"""Encoding and the search for near duplicates on a Ray cluster whose machines see the same files."""

import itertools
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pretrain.errors import InputError, one_line
from pretrain_tools.preparation.documents.records import Reading
from pretrain_tools.preparation.documents.sources import LargeFile, Part
from pretrain_tools.preparation.encoded_part import EncodedPart
from pretrain_tools.preparation.near_duplicate_search import DuplicateSearch, Tasks
from pretrain_tools.preparation.worker import PARTS_AHEAD_PER_WORKER, PartEncoder, ahead

PARTS_AHEAD_PER_READER = 16
WORKERS_PER_READER = 4
"""A process that reads a large file is faster than so many workers encode."""


def encode_parts_on_ray(
    pieces: Iterable[Part | LargeFile], encoder: PartEncoder, workers: int | None, address: str | None
) -> Iterator[EncodedPart]:
    """Encodes parts in order, with `workers` actors (None: one per core of the cluster).

    The cluster reads large files, too: their content never comes to this process.

    address: as for ray.init; None starts Ray on this machine, until `stop_ray`. Raises InputError when Ray
    is not installed, cannot be reached, or loses an actor for good.
    """
    with _cluster(address, workers) as (ray, count):
        shared = ray.put(encoder)
        actor = ray.remote(_Actor).options(num_cpus=1, max_restarts=3, max_task_retries=3)
        actors = [actor.remote(shared) for _ in range(count)]
        parts = _parts_of_readers(ray, pieces, encoder.options.reading, count // WORKERS_PER_READER)
        jobs = (actor.encode.remote(part) for actor, part in zip(itertools.cycle(actors), parts, strict=False))
        yield from map(ray.get, ahead(jobs, count * PARTS_AHEAD_PER_WORKER))


class _Actor:
    """Encodes parts in a process of the cluster."""

    def __init__(self, encoder: PartEncoder):
        self._encoder = encoder

    def encode(self, part: Part) -> EncodedPart:
        return self._encoder.encode(part)


def _read(file: LargeFile, reading: Reading) -> Iterator[Part]:
    for part in file.parts(reading):
        _ = yield part  # Ray sends a value, which `yield from` would pass on to a generator that takes none


def _parts_of_readers(ray: Any, pieces: Iterable[Part | LargeFile], reading: Reading, others: int) -> Iterator[Any]:
    """Yields the parts in order; those of large files as references. `others` files are read ahead."""
    # No cores: readers mostly wait, and would take cores from the workers.
    read = ray.remote(_read).options(
        num_cpus=0,
        max_retries=3,
        scheduling_strategy="SPREAD",
        num_returns="streaming",
        _generator_backpressure_num_objects=PARTS_AHEAD_PER_READER,
    )
    reads = (read.remote(piece, reading) if isinstance(piece, LargeFile) else (piece,) for piece in pieces)
    for parts in ahead(reads, others):
        yield from itertools.chain(parts)  # which hides `close`: a reader has none


def tasks_on_ray(workers: int | None, address: str | None) -> Tasks:
    """Returns what performs tasks of the search for near duplicates on the cluster."""

    def perform(search: DuplicateSearch, stage: str, tasks: Sequence[int]) -> Iterator[None]:
        if not tasks:
            return
        with _cluster(address, workers) as (ray, count):
            shared = ray.put(search)
            task_type = ray.remote(DuplicateSearch.perform).options(num_cpus=1, max_retries=3)
            left = deque(tasks)
            running: list[Any] = []
            while left or running:
                while left and len(running) < count * PARTS_AHEAD_PER_WORKER:
                    running.append(task_type.remote(shared, stage, left.popleft()))
                done, running = ray.wait(running)
                yield from ray.get(done)

    return perform


@contextmanager
def _cluster(address: str | None, workers: int | None) -> Iterator[tuple[Any, int]]:
    """Yields (ray, workers to start). Raises InputError like encode_parts_on_ray."""
    ray = _started(address, workers)
    try:
        yield ray, workers or int(ray.cluster_resources().get("CPU", 1))
    except ray.exceptions.RayTaskError as error:
        # Raised as on one machine.
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
    here = {"num_cpus": workers, "include_dashboard": False} if address is None else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="warning", **here)
    except Exception as error:  # Ray raises plain Exception when a node takes long to start
        ray.shutdown()
        failed = f"--ray_address {address}: cannot be reached ({one_line(error)}); start it: ray start"
        if address is None:
            failed = f"--engine ray: Ray does not start here ({one_line(error)}); run it again, or use --workers"
        raise InputError(failed) from None
    return ray
