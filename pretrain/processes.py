"""Locks an output folder for one process, and checks which processes are alive."""

import fcntl
import json
import math
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from pretrain.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, InputError

LOOK_SECONDS = 0.2


@contextmanager
def folder_lock(path: Path, silence_seconds: float | None = None) -> Iterator[None]:
    """Locks the file `path` during a with block, and then removes it.

    The kernel releases the lock when the process that holds it dies. Raises InputError with the process ID and host if
    another process holds the lock, if the file is from another host, whose processes can't be checked from here, or if
    the file system has no locks.

    Args:
        silence_seconds: time after which a process on another host is considered dead if it hasn't touched the file.
            Processes that hold the lock touch it regularly. None means that they are never considered dead.
    """
    descriptor = _acquire(path, silence_seconds)
    try:
        yield
    finally:
        # Remove it while still locked, so that a process that has already opened it notices the changed inode.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def hold_while_open(file: IO) -> None:
    """Locks an open file until every process that inherits it has closed it or died."""
    with suppress(OSError):  # waiting processes also ignore file systems without locks
        fcntl.flock(file, fcntl.LOCK_SH)


def is_held(path: Path) -> bool:
    """Returns True if a process still holds a file locked by `hold_while_open`."""
    try:
        with open(path, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def _acquire(path: Path, silence_seconds: float | None) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        holder = _holder(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise InputError(
                f"{path.parent}: in use by process {holder.get('pid', '?')} on {holder.get('host', '?')}; "
                "wait until that process has finished, stop it, or use another --output"
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise InputError(
                f"{path.parent}: its file system does not support locks ({error.strerror}); use another --output, or "
                "mount the file system with locks (Lustre: -o flock)"
            ) from None
        if holder and holder.get("host") != socket.gethostname() and not _is_silent(path, silence_seconds):
            os.close(descriptor)
            raise InputError(
                f"{path.parent}: still locked by process {holder.get('pid')} on {holder.get('host')}; "
                f"if that process is gone, remove {path} and run again"
            )
        if _is_at(path, descriptor):
            content = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, content, 0)
            return descriptor
        os.close(descriptor)


def _is_silent(path: Path, silence_seconds: float | None) -> bool:
    """Returns True if the file isn't touched for this long.

    Only compares the file's timestamps with each other, because the hosts' clocks may differ. Counts polls instead of
    seconds, because this machine may be suspended.
    """
    if silence_seconds is None:
        return False
    touched = path.stat().st_mtime_ns
    for _ in range(math.ceil(silence_seconds / LOOK_SECONDS)):
        time.sleep(LOOK_SECONDS)
        if path.stat().st_mtime_ns != touched:
            return False
    return True


def _holder(descriptor: int) -> dict[str, object]:
    with suppress(ValueError):
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return holder if isinstance(holder, dict) else {}
    return {}


def _is_at(path: Path, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False


def process_state(pid: int) -> str | None:
    """Returns a process's state letter as in ps (Z: dead, T: stopped).

    Returns None if the process or /proc doesn't exist.
    """
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return None


def is_alive(pid: int) -> bool:
    """Returns True if a process is running on this machine. Zombies don't count."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process_state(pid) not in ("Z", "X")


def status_after(number: int) -> int:
    """Returns the exit status for a run that was stopped by a signal."""
    return EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_PREEMPTED
