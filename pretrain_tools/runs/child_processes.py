"""Sends signals to child processes."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil


def signal_tree(pid: int, number: int) -> None:
    """Sends a signal to a process and all its descendants, including those in other process groups.

    torch's launcher starts each rank in its own process group, so os.killpg doesn't reach the ranks.
    """
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)


@contextmanager
def signals_handled(handle: Callable[[int, object], None]) -> Iterator[None]:
    """Calls `handle` for Ctrl-C, SIGTERM and SIGHUP during a with block."""
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signals_passed_on() -> Iterator[list[int]]:
    """Forwards signals to all child processes during a with block. Yields a list of the signals received so far.

    Start the child processes in a new session. Otherwise, they would receive Ctrl-C twice.
    """
    received: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        received.append(number)
        for process in psutil.Process().children():
            process.send_signal(number)

    with signals_handled(pass_on):
        yield received
