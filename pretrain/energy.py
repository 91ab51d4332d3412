"""Measures a run's energy use in joules with hardware counters, or estimates it if there are none.

Includes only CPUs and GPUs, not cooling, power supplies, disks or the network. A reading takes microseconds with RAPL
and up to a millisecond with NVML.
"""

import ctypes
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch

from pretrain.gpus import gpu_called
from pretrain.mesh_sizes import processes_here

POWERCAP = Path("/sys/class/powercap")
WATTS_PER_THREAD = 4.0
"""Watts assumed per CPU thread: codecarbon's DEFAULT_POWER_PER_CORE (codecarbon/core/cpu.py)."""

Reader = Callable[[], float]
"""Function that returns the joules used since a fixed point in time. Raises OSError if reading fails."""


class EnergyMeter:
    """Measures the energy used by a run's machines between two readings.

    Reads only the counters on the main process's machine. They include other programs' energy. Assumes that the other
    machines use the same amount of energy.

    Args:
        ranks: number of processes in the run.
        powercap: folder of Linux's RAPL counters.
    """

    def __init__(self, device: torch.device, ranks: int, powercap: Path = POWERCAP):
        local = min(ranks, processes_here())
        self._machines = -(-ranks // local)
        self._readers, self.how = _readers(device, local, powercap)
        """How the values were obtained: 'measured by NVML', 'estimated: ...', or None."""
        if self.how and self._machines > 1:
            self.how += f", on one of {self._machines} machines"
        self._last = self._read()

    def joules(self) -> float | None:
        """Returns the joules used since the last call (or since the start), or None if a counter is unreadable."""
        before = self._last
        now = self._read()
        self._last = now
        if not now or len(now) != len(before):
            return None
        return round(self._machines * sum(b - a for a, b in zip(before, now, strict=True)), 3)

    def _read(self) -> list[float]:
        try:
            return [read() for read in self._readers]
        except OSError:
            return []


def _readers(device: torch.device, local: int, powercap: Path) -> tuple[list[Reader], str | None]:
    processors = rapl_readers(powercap)
    if device.type != "cuda":
        if processors:
            return processors, "measured by RAPL"
        watts = processor_watts(local)
        how = f"estimated: {watts:.3g} W for the CPU ({WATTS_PER_THREAD:g} W per thread)"
        return [_over_time(watts)], how
    if gpus := nvml_readers(local):
        return [*gpus, *processors], "measured by NVML" + (" and RAPL" if processors else ", GPUs only")
    gpu = gpu_called(torch.cuda.get_device_name(device))
    if gpu is None:
        return [], None
    return [_over_time(local * gpu.watts)], f"estimated: {gpu.watts:g} W per GPU (rated power)"


def _over_time(watts: float) -> Reader:
    return lambda: watts * time.perf_counter()


def rapl_readers(powercap: Path) -> list[Reader]:
    """Returns a reader per CPU and per DRAM counter, or [] if any counter is unreadable.

    By default, only root can read the counters on Linux (CVE-2020-8694).
    """
    zones = []
    for folder in sorted(powercap.glob("intel-rapl:*")):
        try:
            name = (folder / "name").read_text().strip()
            whole = re.fullmatch(r"intel-rapl:\d+", folder.name) and name.startswith("package")
            if whole or name == "dram":
                zones.append(_zone_reader(folder))
        except OSError:
            return []
    return zones


def _zone_reader(folder: Path) -> Reader:
    """Returns a reader for a microjoule counter, which may wrap around within minutes."""
    counter = folder / "energy_uj"
    full = int((folder / "max_energy_range_uj").read_text())
    last = int(counter.read_text())
    total = 0

    def read() -> float:
        nonlocal last, total
        now = int(counter.read_text())
        total += now - last if now >= last else now - last + full
        last = now
        return total / 1e6

    return read


def nvml_readers(count: int) -> list[Reader]:
    """Returns a reader per GPU, or [] if the GPUs have no energy counters or this process doesn't see all of them.

    Volta and newer GPUs count millijoules since the driver was loaded (nvmlDeviceGetTotalEnergyConsumption).
    """
    if torch.cuda.device_count() < count:
        return []
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2():
        return []
    readers = []
    for number in range(count):
        # Look GPUs up by UUID, because NVML's indices ignore CUDA_VISIBLE_DEVICES.
        name = f"GPU-{torch.cuda.get_device_properties(number).uuid}"
        handle = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)):
            return []
        readers.append(_gpu_reader(nvml, handle))
    try:
        for read in readers:
            read()
    except OSError:
        return []
    return readers


def _gpu_reader(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> Reader:
    def read() -> float:
        millijoules = ctypes.c_ulonglong()
        if status := nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
            raise OSError(f"NVML status {status}")
        return millijoules.value / 1e3

    return read


def processor_watts(local: int) -> float:
    """Returns the estimated CPU power of this many local processes, in watts."""
    return WATTS_PER_THREAD * min(os.cpu_count() or 1, local * torch.get_num_threads())
