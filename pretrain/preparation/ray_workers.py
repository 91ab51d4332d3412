"""Encoding parts on a Ray cluster: actors on machines that see the same files, results in the order of the parts."""

import collections
from collections.abc import Iterable, Iterator

from pretrain.errors import InputError
from pretrain.preparation.documents.sources import Part
from pretrain.preparation.worker import PARTS_AHEAD_PER_WORKER, EncodedPart, EncodingSettings, PartEncoder


def encode_parts_on_ray(
    parts: Iterable[Part], settings: EncodingSettings, workers: int | None, address: str | None
) -> Iterator[EncodedPart]:
    """Encodes parts with `workers` actors (None: one per core of the cluster), in the order of the parts.

    address: of a cluster, as ray.init takes it; None starts Ray on this machine for the time of the work. Raises
    InputError when Ray is not installed, cannot be reached, or loses an actor for good.
    """
    ray = _started(address, workers)
    try:
        count = workers or int(ray.cluster_resources().get("CPU", 1))
        shared = ray.put(settings)
        actor = ray.remote(PartEncoder).options(num_cpus=1, max_restarts=3, max_task_retries=3)
        actors = [actor.remote(shared) for _ in range(count)]
        waiting: collections.deque = collections.deque()
        for number, part in enumerate(parts):
            waiting.append(actors[number % count].encode.remote(part))
            if len(waiting) > count * PARTS_AHEAD_PER_WORKER:
                yield ray.get(waiting.popleft())
        while waiting:
            yield ray.get(waiting.popleft())
    except ray.exceptions.RayTaskError as error:
        # What a part raised on the other machine is what it would have raised on this one.
        raise error.cause if isinstance(error.cause, InputError | OSError) else error from None
    except ray.exceptions.RayError as error:
        raise InputError(
            f"--engine ray: an actor was lost ({type(error).__name__}); run the same command again: it continues"
        ) from None
    finally:
        ray.shutdown()


def _started(address: str | None, workers: int | None):
    try:
        import ray
    except ImportError:
        raise InputError("--engine ray: Ray is not installed; pip install 'ray>=2.40', or use --workers") from None
    try:
        if address is None:
            ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="warning")
        else:
            ray.init(address=address, log_to_driver=False, logging_level="warning")
    except (ConnectionError, ValueError, RuntimeError) as error:
        given = address or "on this machine"
        lines = str(error).splitlines() or [type(error).__name__]
        raise InputError(f"--ray_address {given}: cannot be reached ({lines[0][:200]}); start it: ray start") from None
    return ray
