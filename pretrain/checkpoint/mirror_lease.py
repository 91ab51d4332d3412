"""Leases a mirror to one start of the run at a time. A second start exits, or waits until the holder is dead.

    MIRROR/NAME/leases/00000003.json     the holder's host, process and start, and a counter that grows while it lives

Each number can be created only once on S3 (If-None-Match), GCS (generations) and disks, which reject a second writer.
Other stores, such as buckets on the Hub, overwrite the object. There, a start reads it again after SETTLE_SECONDS, and
the last writer has the lease.

If a lease hasn't changed for SILENT_SECONDS, another start may create the next number. A lease's age is the difference
between its time and that of an object written now, both by the store's clock, so the machines' clocks don't matter.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pretrain.checkpoint.mirror_store import MirrorStore
from pretrain.errors import InputError
from pretrain.terminal import say_stage
from pretrain.urls import patiently

FOLDER = "leases"
BEAT_SECONDS = 10.0
"""Seconds between the holder's signs of life."""
SILENT_SECONDS = 45.0
"""Time without a sign of life after which the holder counts as dead."""
LOOK_SECONDS = 2.0
ATOMIC = ("s3", "s3a", "gs", "gcs", "file", "local", "memory")
"""Protocols of stores that create an object only once and date it by their own clock.

A bucket on the Hub uses the date given by the writer.
"""
SETTLE_SECONDS = 5.0
"""Time, on other stores, within which a start that found no lease writes its own."""
CLOCK_SECONDS = 2.0
"""Error of an age in seconds. S3 reports whole seconds, and a store's servers may differ."""
ANSWER_SECONDS = 20.0
"""Maximum wait for one answer from the store."""
LAST_SECONDS = 5.0
"""Maximum wait at the end of a run."""


class Lease:
    """Lease created by this process. A thread renews it until `release`."""

    def __init__(self, store: MirrorStore, number: int, values: dict[str, Any]):
        self.store = store
        self.number = number
        self.values = values
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Gives up the lease, if the store answers."""
        self._over.set()
        self._thread.join(LAST_SECONDS)
        with suppress(Exception):  # the next start finds that the holder is dead
            patiently(self._remove, LAST_SECONDS, retry=False)

    def _remove(self) -> None:
        if self._is_held():
            self.store.system.rm_file(path_of(self.number))

    def _is_held(self) -> bool:
        return start_of(self.store.read(path_of(self.number))) == self.values["start"]

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            with suppress(Exception):  # retried; a start that takes over writes its own lease
                if not self._is_held():
                    return
                self.values["beat"] += 1
                self.store.write(path_of(self.number), json.dumps(self.values).encode())


def take_lease(store: MirrorStore, start: str, own: str | None) -> Lease:
    """Takes the lease. If another start holds it, waits until that start has been silent for SILENT_SECONDS.

    Raises InputError if the holder is alive, and the file system's errors.

    Args:
        start: ID of this start.
        own: ID of the last start in this folder. It must be dead, because this process holds the folder's lock.
    """
    values = {"start": start, "host": socket.gethostname(), "pid": os.getpid(), "beat": 0}
    while True:
        numbers = _asked(lambda: numbers_of(store))
        last = max(numbers, default=0)
        held = _asked(lambda last=last: store.read(path_of(last))) if numbers else None
        if held is not None and start_of(held) != own:
            _require_silence(store, last, held)
        if _asked(lambda last=last: _create(store, last + 1, values)):
            for number in numbers:
                with suppress(FileNotFoundError):
                    _asked(lambda number=number: store.system.rm_file(path_of(number)))
            return Lease(store, last + 1, values)


def _require_silence(store: MirrorStore, number: int, held: bytes) -> None:
    """Returns once the holder of a lease is dead or has released it. Raises InputError if the holder is alive."""
    holder = describe(held)
    seconds = SILENT_SECONDS - _age(store, number)
    if seconds > 0:
        say_stage(f"Waiting {seconds:.0f} s for a sign of life of {holder}, which holds {store.address}")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        found = _asked(lambda: store.read(path_of(number)))
        if found is None:
            return
        if found != held:
            raise InputError(
                f"checkpoint.mirror: {store.address}: {holder} trains this run; stop it there, or use another "
                f"--output. A start takes over {SILENT_SECONDS:g} s after the holder's last sign of life; to take "
                f"over at once, remove {store.address}/{FOLDER}"
            )


def _age(store: MirrorStore, number: int) -> float:
    """Returns the seconds since a lease changed, up to CLOCK_SECONDS too few; 0 if the store doesn't report times."""
    if not _is_atomic(store):
        return 0.0
    probe = f"{FOLDER}/now-{uuid.uuid4().hex}"
    try:
        _asked(lambda: store.write(probe, b"now"))
        store.system.invalidate_cache()
        now, then = _asked(lambda: [store.system.modified(name) for name in (probe, path_of(number))])
        return max(0.0, (now - then).total_seconds() - CLOCK_SECONDS)
    except Exception:  # not all file systems have times; without one, waits the longest
        return 0.0
    finally:
        with suppress(Exception):
            _asked(lambda: store.system.rm_file(probe))


def _create(store: MirrorStore, number: int, values: dict[str, Any]) -> bool:
    """Creates a lease. Returns False if another start was faster."""
    problem = None
    try:
        store.create(path_of(number), json.dumps(values).encode())
    except Exception as error:  # each file system raises its own error if the object exists
        problem = error
    # Read back, because a request repeated after a lost answer fails on the object that it has just created.
    if problem is None and not _is_atomic(store):
        time.sleep(SETTLE_SECONDS)
    found = store.read(path_of(number))
    if found is None and problem is not None:
        raise problem
    return start_of(found) == values["start"]


def _is_atomic(store: MirrorStore) -> bool:
    protocol = store.system.fs.protocol
    return any(name in ATOMIC for name in ([protocol] if isinstance(protocol, str) else protocol))


def _asked(ask: Callable[[], Any]) -> Any:
    return patiently(ask, ANSWER_SECONDS, retry=False)


def numbers_of(store: MirrorStore) -> list[int]:
    """Returns the numbers of a mirror's leases."""
    names = [name.removesuffix(".json") for name in store.sizes(FOLDER)]
    return sorted(int(name) for name in names if name.isdecimal())


def path_of(number: int) -> str:
    """Returns a lease's path on the mirror."""
    return f"{FOLDER}/{number:08d}.json"


def start_of(content: bytes | None) -> str | None:
    """Returns the ID of the start that holds a lease; None if the lease is missing or damaged."""
    return _values(content).get("start")


def describe(content: bytes) -> str:
    """Names a lease's holder."""
    values = _values(content)
    return f"process {values.get('pid', '?')} on {values.get('host', '?')}"


def _values(content: bytes | None) -> dict[str, Any]:
    with suppress(ValueError):
        values = json.loads(content or b"")
        return values if isinstance(values, dict) else {}
    return {}
