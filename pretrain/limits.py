"""Reads how many CPU cores and how much memory this process may use, as limited by its affinity and control groups.

Containers and SLURM limit a process with control groups (cgroups(7)). Python and torch don't read them.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GROUPS_FILE = Path("/proc/self/cgroup")
GROUPS_FOLDER = Path("/sys/fs/cgroup")


def bound_cores(process: int = 0) -> int:
    """Returns the number of CPU cores on which a process (0: this one) may run."""
    return len(os.sched_getaffinity(process)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_cores() -> int:
    """Returns the number of CPU cores available to this process. A quota of 2.5 cores counts as 2."""
    cores = bound_cores()
    for folder in _folders("cpu"):
        with suppress(OSError, ValueError):
            if (folder / "cpu.max").exists():  # version 2 has both values in one file
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:  # no quota is -1 in version 1; "max" in version 2 isn't an integer
                cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def available_memory() -> int:
    """Returns the machine's memory in bytes, or this process's limit if it is lower."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for folder in _folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):
                memory = min(memory, int((folder / name).read_text()))
    return memory


def _folders(controller: str) -> Iterator[Path]:
    """Yields the folders of this process's control groups, for version 1 and 2, and their parents' folders."""
    with suppress(OSError):  # not Linux
        for line in GROUPS_FILE.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = GROUPS_FOLDER / controller if controllers else GROUPS_FOLDER
            # In a container, the path can be the host's, and the container's own group is the root.
            group = root / path.lstrip("/")
            yield group
            yield from (parent for parent in group.parents if parent.is_relative_to(root))
