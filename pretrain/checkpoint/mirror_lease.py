"""Lease of a mirror: one start of the run trains, and a start on another machine ends or waits until that one is dead.

    MIRROR/NAME/leases/00000003.json     host, process and start of the holder, and a count that grows while it lives

An object of each number can be created once: S3 (If-None-Match), GCS (generations) and disks refuse a second writer.
Other stores, such as buckets on the Hub, overwrite it. There a start looks again after SETTLE_SECONDS, and the last
writer has the lease.

Whoever finds a lease that has not changed for SILENT_SECONDS creates the next number. Machines' clocks are not
compared: a lease's age is that of an object written now, by the store's own clock.
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
"""Seconds between two signs of life of the holder."""
SILENT_SECONDS = 45.0
"""Time without one after which the holder counts as dead."""
LOOK_SECONDS = 2.0
ATOMIC = ("s3", "s3a", "gs", "gcs", "file", "local", "memory")
"""Protocols whose stores create an object only once, and date it by their own clock. A bucket on the Hub keeps the
date that its writer gives."""
SETTLE_SECONDS = 5.0
"""Time within which a start that has found no lease writes its own, on other stores."""
CLOCK_SECONDS = 2.0
"""Error of an age: S3 gives whole seconds, and the servers of a store may differ."""
ANSWER_SECONDS = 20.0
"""Longest wait for one answer of the store."""
LAST_SECONDS = 5.0
"""Longest wait at the end of a run."""


class Lease:
    """Lease that this process has created; a thread gives signs of life until `release`."""

    def __init__(self, store: MirrorStore, number: int, values: dict[str, Any]):
        self.store = store
        self.number = number
        self.values = values
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Gives the lease up, if the store answers."""
        self._over.set()
        self._thread.join(LAST_SECONDS)
        with suppress(Exception):  # the next start finds that nobody lives
            patiently(self._remove, LAST_SECONDS, retry=False)

    def _remove(self) -> None:
        if self._is_held():
            self.store.system.rm_file(path_of(self.number))

    def _is_held(self) -> bool:
        return start_of(self.store.read(path_of(self.number))) == self.values["start"]

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            with suppress(Exception):  # tried again; whoever takes the lease over writes his own claim
                if not self._is_held():
                    return
                self.values["beat"] += 1
                self.store.write(path_of(self.number), json.dumps(self.values).encode())


def take_lease(store: MirrorStore, start: str, own: str | None) -> Lease:
    """Takes the lease; if another start holds it, once that has been silent for SILENT_SECONDS.

    Raises InputError if its holder lives, and what the file system raises.

    Args:
        start: ID of this start.
        own: ID of the last start in this very folder, which is dead: this process holds the folder's lock.
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
    """Returns once the holder of a lease is dead or has given it up. Raises InputError if it gives a sign of life."""
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
    """Returns the seconds since a lease last changed, at most CLOCK_SECONDS too few; 0 if the store does not tell."""
    if not _is_atomic(store):
        return 0.0
    probe = f"{FOLDER}/now-{uuid.uuid4().hex}"
    try:
        _asked(lambda: store.write(probe, b"now"))
        store.system.invalidate_cache()
        now, then = _asked(lambda: [store.system.modified(name) for name in (probe, path_of(number))])
        return max(0.0, (now - then).total_seconds() - CLOCK_SECONDS)
    except Exception:  # not all file systems have times; the wait is the longest then
        return 0.0
    finally:
        with suppress(Exception):
            _asked(lambda: store.system.rm_file(probe))


def _create(store: MirrorStore, number: int, values: dict[str, Any]) -> bool:
    """Creates a lease; returns False if another start has been faster."""
    problem = None
    try:
        store.create(path_of(number), json.dumps(values).encode())
    except Exception as error:  # each file system has its own error for what exists
        problem = error
    # Read back: a store that is asked again after a lost answer refuses what it has just written for us.
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
    """Returns the numbers of the leases on a mirror."""
    names = [name.removesuffix(".json") for name in store.sizes(FOLDER)]
    return sorted(int(name) for name in names if name.isdecimal())


def path_of(number: int) -> str:
    """Returns the path of a lease on the mirror."""
    return f"{FOLDER}/{number:08d}.json"


def start_of(content: bytes | None) -> str | None:
    """Returns the start that holds a lease; None if it is missing or damaged."""
    return _values(content).get("start")


def describe(content: bytes) -> str:
    """Names the holder of a lease."""
    values = _values(content)
    return f"process {values.get('pid', '?')} on {values.get('host', '?')}"


def _values(content: bytes | None) -> dict[str, Any]:
    with suppress(ValueError):
        values = json.loads(content or b"")
        return values if isinstance(values, dict) else {}
    return {}
