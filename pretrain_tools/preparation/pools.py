"""Pools of processes that end with this one."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from typing import Any

from pretrain.errors import InputError

# Forked workers start in milliseconds; elsewhere than on Linux forking is not safe.
POOL_CONTEXT = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
PARENT_CHECK_SECONDS = 0.5

_worker: Callable[..., Any] | None = None
"""The function that a process of a pool calls, set in that process only."""


@contextmanager
def open_pool(
    name: str, workers: int, make_worker: Callable[..., Callable[..., Any]], *arguments: Any
) -> Iterator[Callable[..., Future[Any]]]:
    """Starts processes, each with a worker of its own, and yields what submits a call of one.

    name: for messages. make_worker: called with the arguments in each process. Raises InputError when one dies.
    """
    initial = (os.getpid(), make_worker, arguments)
    pool = ProcessPoolExecutor(workers, POOL_CONTEXT, initializer=_start_worker, initargs=initial)
    try:
        yield partial(pool.submit, _call_worker)
    except BrokenProcessPool:
        raise InputError(
            f"{name} died, most likely out of memory; run the same command again with fewer --workers: it continues "
            "where it stopped"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(parent: int, make_worker: Callable[..., Callable[..., Any]], arguments: tuple[Any, ...]) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    _worker = make_worker(*arguments)


def _end_with_parent(parent: int) -> None:
    """Ends a worker whose parent was killed: it waits on a pipe that its siblings hold open, too."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(1)


def _call_worker(*arguments: Any) -> Any:
    assert _worker is not None
    return _worker(*arguments)
