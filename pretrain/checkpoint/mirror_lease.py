"""Leases a mirror to one process at a time. Other processes exit, or wait until the holder is considered dead.

    MIRROR/NAME/leases/00000003.json     host, process ID and start ID of the holder, and a heartbeat counter

S3 (If-None-Match), GCS (generations) and disks create each file only once and reject a second writer. Other stores,
such as Hub buckets, overwrite the file. There, a process reads it again after SETTLE_SECONDS, and the last writer gets
the lease.

If a lease hasn't changed for SILENT_SECONDS, another process may create one with the next number. Ages are measured
with the store's clock, by comparing a lease's modification time with that of a new object.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from pretrain.checkpoint.mirror_store import MirrorStore
from pretrain.errors import InputError
from pretrain.terminal import say_stage
from pretrain.urls import patiently

FOLDER = "leases"
BEAT_SECONDS = 10.0
"""Seconds between the holder's heartbeats."""
SILENT_SECONDS = 45.0
"""Seconds without a heartbeat after which the holder is considered dead."""
LOOK_SECONDS = 2.0
ATOMIC = ("s3", "s3a", "gs", "gcs", "file", "local", "memory")
"""Protocols of stores that reject a second writer and set modification times with their own clock."""
SETTLE_SECONDS = 5.0
"""For other stores: seconds to wait for concurrent writers before reading a new lease again."""
CLOCK_SECONDS = 2.0
"""Maximum error of a lease's age in seconds. S3 rounds to seconds, and the clocks of a store's servers may differ."""
ANSWER_SECONDS = 20.0
"""Timeout for one request to the store."""
LAST_SECONDS = 5.0
"""Timeout for releasing the lease."""


class Lease:
    """Lease held by this process. A thread sends heartbeats until `release`."""

    def __init__(self, store: MirrorStore, number: int, values: dict[str, Any]):
        self.store = store
        self.number = number
        self.values = values
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Releases the lease. If the store doesn't respond, the lease expires."""
        self._over.set()
        self._thread.join(LAST_SECONDS)
        with suppress(Exception):
            patiently(self._remove, LAST_SECONDS, retry=False)

    def _remove(self) -> None:
        if is_held(self.store, self.number, self.values):
            self.store.system.rm_file(path_of(self.number))

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            with suppress(Exception):  # retried at the next heartbeat
                if not is_held(self.store, self.number, self.values):
                    return
                self.values["beat"] += 1
                self.store.write(path_of(self.number), json.dumps(self.values).encode())


def take_lease(store: MirrorStore, start: str, own: str | None) -> Lease:
    """Acquires the lease. If another process holds it, waits until that process is considered dead.

    Raises InputError if the holder is alive.

    Args:
        start: start ID of this process.
        own: start ID of the previous process in this run folder, which must have exited.
    """
    values = {"start": start, "host": socket.gethostname(), "pid": os.getpid(), "beat": 0}
    while True:
        numbers = _asked(numbers_of, store)
        last = max(numbers, default=0)
        held = _asked(read_lease, store, last) if numbers else None
        if held is not None and held.get("start") != own:
            _require_silence(store, last, held)
        if _asked(_create, store, last + 1, values):
            for number in numbers:
                with suppress(FileNotFoundError):
                    _asked(store.system.rm_file, path_of(number))
            return Lease(store, last + 1, values)


def _require_silence(store: MirrorStore, number: int, held: dict[str, Any]) -> None:
    """Waits until a lease is released or its holder is considered dead. Raises InputError if the holder is alive."""
    holder = f"process {held.get('pid', '?')} on {held.get('host', '?')}"
    seconds = SILENT_SECONDS - _age(store, number)
    if seconds > 0:
        say_stage(f"Waiting {seconds:.0f} s for a heartbeat from {holder}, which holds the lease on {store.address}")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        found = _asked(read_lease, store, number)
        if found is None:
            return
        if found != held:
            raise InputError(
                f"checkpoint.mirror: {store.address}: {holder} is already training this run; stop it there, or use "
                f"another --output. The lease expires {SILENT_SECONDS:g} s after the holder's last heartbeat. To take "
                f"over immediately, remove {store.address}/{FOLDER}"
            )


def _age(store: MirrorStore, number: int) -> float:
    """Returns a lease's age in seconds, minus CLOCK_SECONDS, or 0 if it is unknown."""
    if not _is_atomic(store):
        return 0.0
    probe = f"{FOLDER}/now-{uuid.uuid4().hex}"
    try:
        _asked(store.write, probe, b"now")
        store.system.invalidate_cache()
        now, then = (_asked(store.system.modified, name) for name in (probe, path_of(number)))
        return max(0.0, (now - then).total_seconds() - CLOCK_SECONDS)
    except Exception:  # not all file systems report modification times
        return 0.0
    finally:
        with suppress(Exception):
            _asked(store.system.rm_file, probe)


def _create(store: MirrorStore, number: int, values: dict[str, Any]) -> bool:
    """Creates a lease. Returns False if another process was faster."""
    problem = None
    try:
        store.create(path_of(number), json.dumps(values).encode())
    except Exception as error:  # error types depend on the file system
        problem = error
    # Even after an error, we may own the lease: a retried request fails if the first one succeeded.
    if problem is None and not _is_atomic(store):
        time.sleep(SETTLE_SECONDS)
    if problem is not None and read_lease(store, number) is None:
        raise problem
    return is_held(store, number, values)


def _is_atomic(store: MirrorStore) -> bool:
    protocol = store.system.fs.protocol
    return any(name in ATOMIC for name in ([protocol] if isinstance(protocol, str) else protocol))


def _asked(ask: Callable[..., Any], *arguments: Any) -> Any:
    return patiently(partial(ask, *arguments), ANSWER_SECONDS, retry=False)


def numbers_of(store: MirrorStore) -> list[int]:
    """Returns the numbers of all leases on a mirror."""
    names = [name.removesuffix(".json") for name in store.sizes(FOLDER)]
    return sorted(int(name) for name in names if name.isdecimal())


def path_of(number: int) -> str:
    """Returns a lease's path on the mirror."""
    return f"{FOLDER}/{number:08d}.json"


def read_lease(store: MirrorStore, number: int) -> dict[str, Any] | None:
    """Returns a lease's contents, {} if it is damaged, or None if it doesn't exist."""
    content = store.read(path_of(number))
    if content is None:
        return None
    with suppress(ValueError):
        values = json.loads(content)
        return values if isinstance(values, dict) else {}
    return {}


def is_held(store: MirrorStore, number: int, values: dict[str, Any]) -> bool:
    """Returns True if the process with these values holds the lease."""
    return (read_lease(store, number) or {}).get("start") == values["start"]
