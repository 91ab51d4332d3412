"""Who performs the tasks of the search for near duplicates: this process, processes of this machine, or Ray."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from typing import Any

from pretrain.errors import InputError
from pretrain_tools.preparation.cleaning.near_duplicate_search import STAGES, DuplicateSearch, StageProgress
from pretrain_tools.preparation.plan import PreparationRequest
from pretrain_tools.preparation.worker import POOL_CONTEXT, start_pool

STOP_LOOK_SECONDS = 0.5
"""Between two looks at whether to stop."""


class TaskStoppedError(Exception):
    """The main process asked a task to end."""


def perform_missing(
    search: DuplicateSearch,
    stages: Sequence[str],
    request: PreparationRequest,
    progress: StageProgress,
    share: tuple[int, int] = (0, 1),
) -> int:
    """Performs what is missing of stages, one after another; how many tasks of the last one begun are still missing.

    share: (number, count): every `count`-th task only; a stage begins when the one before is complete.
    """
    number, count = share
    with ExitStack() as cluster:
        remote = None
        for stage in stages:
            ours = [task for task in search.missing(stage) if task % count == number]
            if ours and request.on_ray and remote is None:
                from pretrain_tools.preparation.ray_workers import tasks_on_ray

                remote = cluster.enter_context(tasks_on_ray(search, request.workers, request.ray_address))
            if remote is not None:
                performed = remote(stage, ours)
            elif request.on_ray or request.workers == 1 or len(ours) < 2:
                performed = _here(search, stage, ours, progress.stop_if_asked)
            else:
                performed = _in_processes(search, stage, ours, request.workers, progress.stop_if_asked)
            for done, _ in enumerate(performed, 1):
                progress.update(stage, STAGES[stage], done, len(ours))
            if left := len(search.missing(stage)):
                return left
    return 0


def _here(
    search: DuplicateSearch, stage: str, tasks: Sequence[int], stop_if_asked: Callable[[], None]
) -> Iterator[None]:
    for task in tasks:
        yield search.perform(stage, task, stop_if_asked)


def _in_processes(
    search: DuplicateSearch, stage: str, tasks: Sequence[int], workers: int, stop_if_asked: Callable[[], None]
) -> Iterator[None]:
    stop = POOL_CONTEXT.Event()
    pool = start_pool(min(workers, len(tasks)), _set_search, search, stop)
    try:
        waiting: set[Any] = {pool.submit(_perform, stage, task) for task in tasks}
        while waiting:
            done, waiting = wait(waiting, STOP_LOOK_SECONDS, FIRST_COMPLETED)
            stop_if_asked()
            yield from (job.result() for job in done)
    except BrokenProcessPool:
        raise InputError(
            "a process of the search for near duplicates died, most likely out of memory; run the same command again "
            "with fewer --workers: it continues where it stopped"
        ) from None
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


_search: DuplicateSearch | None = None
_stop: Any = None


def _set_search(search: DuplicateSearch, stop: Any) -> None:
    global _search, _stop
    _search, _stop = search, stop


def _perform(stage: str, task: int) -> None:
    assert _search is not None
    _search.perform(stage, task, _end_if_stopped)


def _end_if_stopped() -> None:
    if _stop.is_set():
        raise TaskStoppedError
