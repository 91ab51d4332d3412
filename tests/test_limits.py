"""Tests for CPU and memory limits from control groups."""

import os

import pytest

from pretrain import limits


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Returns a function that writes {path below /sys/fs/cgroup: contents} and this process's groups."""
    monkeypatch.setattr(limits, "GROUPS_FOLDER", tmp_path / "sys")
    monkeypatch.setattr(limits, "GROUPS_FILE", tmp_path / "groups")
    monkeypatch.setattr(limits, "bound_cores", lambda: 64)

    def write(own, files):
        (tmp_path / "groups").write_text("\n".join(own) + "\n")
        for name, contents in files.items():
            path = tmp_path / "sys" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(contents)

    return write


VERSION_1 = ["9:name=systemd:/", "4:memory:/docker/ab", "1:cpu,cpuacct:/docker/ab", "0::/"]


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        (["0::/"], {"cpu.max": "400000 100000\n"}, 4),
        (["0::/"], {"cpu.max": "250000 100000\n"}, 2),
        (["0::/"], {"cpu.max": "50000 100000\n"}, 1),
        (["0::/"], {"cpu.max": "max 100000\n"}, 64),
        (["0::/"], {}, 64),
        (["0::/pod/box"], {"pod/box/cpu.max": "max 100000\n", "pod/cpu.max": "800000 100000\n"}, 8),
        (VERSION_1, {"cpu/docker/ab/cpu.cfs_quota_us": "300000\n", "cpu/docker/ab/cpu.cfs_period_us": "100000\n"}, 3),
        # in the container, its own group is the root
        (VERSION_1, {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        (VERSION_1, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
    ],
)
def test_a_quota_limits_the_cores(groups, own, files, cores):
    groups(own, files)
    assert limits.available_cores() == cores


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        (["0::/pod"], {"pod/memory.max": "536870912\n"}, 2**29),
        (["0::/pod"], {"pod/memory.max": "max\n", "memory.max": "268435456\n"}, 2**28),
        (VERSION_1, {"memory/memory.limit_in_bytes": "536870912\n"}, 2**29),
        (VERSION_1, {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
    ],
)
def test_a_limit_on_memory_is_read(groups, own, files, limit):
    groups(own, files)
    assert limits.available_memory() == (limit or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def test_without_control_groups_affinity_and_memory_count(groups):
    assert limits.available_cores() == 64 and limits.available_memory() > 2**28
