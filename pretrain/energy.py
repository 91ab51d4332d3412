"""Measures GPUs' energy use in joules with NVML's counters, and estimates it for CPUs and other GPUs.

Includes only CPUs or GPUs, not cooling, power supplies, disks or the network. A reading takes up to a millisecond.
"""

import ctypes
import os
import time
from collections.abc import Callable

import torch

from pretrain.gpus import gpu_called

WATTS_PER_THREAD = 4.0
"""Watts assumed per CPU thread: codecarbon's DEFAULT_POWER_PER_CORE (codecarbon/core/cpu.py)."""

Reader = Callable[[], float]
"""Function that returns the joules used since a fixed point in time. Raises OSError if reading fails."""


class EnergyMeter:
    """Measures the energy used by a run's machines between two readings.

    Reads only the counters on the main process's machine. They include other programs' energy. Assumes that the other
    machines use the same amount of energy.

    ranks: number of processes in the run.
    """

    def __init__(self, device: torch.device, ranks: int):
        local = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self._machines = -(-ranks // local)
        self._readers, self.how = _readers(device, local)
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


def _readers(device: torch.device, local: int) -> tuple[list[Reader], str | None]:
    if device.type != "cuda":
        watts = WATTS_PER_THREAD * min(os.cpu_count() or 1, local * torch.get_num_threads())
        how = f"estimated: {watts:.3g} W for the CPU ({WATTS_PER_THREAD:g} W per thread)"
        return [lambda: watts * time.perf_counter()], how
    if gpus := nvml_readers(local):
        return gpus, "measured by NVML, GPUs only"
    gpu = gpu_called(torch.cuda.get_device_name(device))
    if gpu is None:
        return [], None
    return [lambda: local * gpu.watts * time.perf_counter()], f"estimated: {gpu.watts:g} W per GPU (rated power)"


def nvml_readers(count: int) -> list[Reader]:
    """Returns a reader per GPU, or [] if the GPUs have no energy counters.

    Volta and newer GPUs count millijoules since the driver was loaded (nvmlDeviceGetTotalEnergyConsumption).
    """
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
