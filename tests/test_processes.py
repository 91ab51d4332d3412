"""Tests for folder locks: a lock is released when its process exits, and the error message names the process that
holds it."""

import errno
import json
import os
import signal
import threading
import time

import pytest

from pretrain.errors import InputError
from pretrain.processes import folder_lock


def hold_in_a_child(path) -> int:
    """Returns the PID of a child process that holds the lock until it is killed."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        with folder_lock(path):
            os.write(writer, b"x")
            signal.pause()
        os._exit(0)
    os.read(reader, 1)
    os.close(reader)
    os.close(writer)
    return child


def test_a_killed_processs_lock_is_taken_over_at_once(tmp_path):
    child = hold_in_a_child(tmp_path / ".lock")
    with pytest.raises(InputError, match=rf"in use by process {child} on .*"), folder_lock(tmp_path / ".lock"):
        pytest.fail("a held lock must be respected")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert (tmp_path / ".lock").exists()
    with folder_lock(tmp_path / ".lock"):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    assert not (tmp_path / ".lock").exists()


def test_a_lock_of_another_machine(tmp_path):
    """The lock is respected as long as its file is updated, because processes on other machines aren't visible."""
    path = tmp_path / ".lock"
    path.write_text(json.dumps({"pid": 7, "host": "elsewhere"}))
    with pytest.raises(InputError, match="still locked by process 7 on elsewhere"), folder_lock(path):
        pytest.fail("the lock must be respected, because the process may be alive")
    ended = threading.Event()

    def touch():
        while not ended.wait(0.05):
            os.utime(path)

    toucher = threading.Thread(target=touch)
    toucher.start()
    with pytest.raises(InputError, match="elsewhere"), folder_lock(path, silence_seconds=120.0):
        pytest.fail("the lock must be respected while its file is updated")
    ended.set()
    toucher.join()
    begun = time.monotonic()
    with folder_lock(path, silence_seconds=0.5):
        assert time.monotonic() - begun > 0.5
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_an_invalid_lock_file_is_ignored(tmp_path):
    (tmp_path / ".lock").write_text("nonsense")
    with folder_lock(tmp_path / ".lock"):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(descriptor, kind):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("pretrain.processes.fcntl.flock", refuse)
    with pytest.raises(InputError, match=r"does not support locks \(Function not"), folder_lock(tmp_path / ".lock"):
        pytest.fail("without a lock, two processes could write to the folder")
