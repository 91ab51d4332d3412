"""Only one start of a run may train; another must stop with an error, or take over after the first has died."""

import json
import threading
import time

import pytest

from pretrain.checkpoint import mirror_lease
from pretrain.checkpoint.mirror_lease import numbers_of, path_of, take_lease
from pretrain.checkpoint.mirror_store import MirrorStore
from pretrain.errors import InputError
from support.object_store import store_server


def check_and_write(store, name, content):
    """Creates a file non-atomically, as on the Hub: if two starts check before either writes, both succeed."""
    if store.read(name) is not None:
        raise FileExistsError(name)
    time.sleep(0.2)
    store.write(name, content)


@pytest.fixture(scope="module")
def server():
    with store_server() as server:
        yield server


@pytest.fixture(params=["disk", "memory", "s3", "unsure"])
def store(request, tmp_path, monkeypatch):
    monkeypatch.setattr(mirror_lease, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(mirror_lease, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(mirror_lease, "LOOK_SECONDS", 0.05)
    if request.param == "unsure":
        monkeypatch.setattr(mirror_lease, "ATOMIC", ())
        monkeypatch.setattr(mirror_lease, "SETTLE_SECONDS", 0.5)
        monkeypatch.setattr(MirrorStore, "create", check_and_write)
    if request.param == "s3":
        for name, value in request.getfixturevalue("server").environment.items():
            monkeypatch.setenv(name, value)
    place = {
        "disk": str(tmp_path),
        "memory": f"memory://leases{tmp_path}",
        "unsure": f"memory://unsure{tmp_path}",
        "s3": "s3://mine/leases",
    }
    return MirrorStore(place[request.param], tmp_path.name)


def test_a_living_holder_is_named_and_a_dead_one_replaced(store):
    first = take_lease(store, "one", None)
    with pytest.raises(
        InputError, match=r"process \d+ on .* is already training this run.*1 s after the holder's last heartbeat"
    ):
        take_lease(store, "two", None)
    first._over.set()  # killed
    first._thread.join()
    began = time.monotonic()
    second = take_lease(store, "two", "another")
    assert time.monotonic() - began > 0.9 and numbers_of(store) == [2]
    first.release()  # the first start was only suspended
    assert numbers_of(store) == [2] and json.loads(store.read(path_of(2)))["start"] == "two"
    second.release()
    assert numbers_of(store) == []


@pytest.fixture
def no_wait(monkeypatch):
    """Makes a start fail if it would have to wait."""
    monkeypatch.setattr(mirror_lease, "say_stage", lambda text: pytest.fail(text))


def test_the_next_start_in_the_same_folder_does_not_wait(store, no_wait):
    killed = take_lease(store, "one", None)
    killed._over.set()
    killed._thread.join()
    lease = take_lease(store, "two", "one")
    assert numbers_of(store) == [lease.number] == [2]
    lease.release()


@pytest.mark.parametrize("store", ["disk", "memory", "s3"], indirect=True)
def test_a_holder_that_has_long_been_dead_is_not_waited_for(store, monkeypatch, request):
    """The lease's age is measured by the store's clock, which S3 reports in whole seconds."""
    monkeypatch.setattr(mirror_lease, "CLOCK_SECONDS", 1.0)
    killed = take_lease(store, "one", None)
    killed._over.set()
    killed._thread.join()
    deadline = time.monotonic() + 30
    while mirror_lease._age(store, 1) < mirror_lease.SILENT_SECONDS:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    request.getfixturevalue("no_wait")
    take_lease(store, "two", None).release()
    assert store.sizes(mirror_lease.FOLDER) == {}


def test_only_one_of_several_simultaneous_starts_trains(store):
    """All starts detect that the previous holder is dead."""
    dead = take_lease(store, "dead", None)
    dead._over.set()
    dead._thread.join()
    found = []

    def start(name):
        try:
            found.append(take_lease(store, name, None))
        except InputError as error:
            found.append(error)

    threads = [threading.Thread(target=start, args=(f"start {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    leases = [lease for lease in found if not isinstance(lease, InputError)]
    assert len(leases) == 1 and len(found) == 4 and numbers_of(store) == [2]
    leases[0].release()
