"""Tests for energy measurements with mock counters, and for estimates without counters."""

import types

import pytest
import torch

from pretrain import energy
from pretrain.energy import EnergyMeter
from pretrain.units import co2_text, energy_text

CPU = torch.device("cpu")


def zone(folder, name, microjoules, full=10_000_000):
    folder.mkdir(parents=True)
    for file, value in (("name", name), ("energy_uj", microjoules), ("max_energy_range_uj", full)):
        (folder / file).write_text(f"{value}\n")
    return folder / "energy_uj"


def test_rapl_adds_processors_and_memory_and_handles_overflow(tmp_path):
    first = zone(tmp_path / "intel-rapl:0", "package-0", 9_000_000)
    second = zone(tmp_path / "intel-rapl:1", "package-1", 0)
    memory = zone(tmp_path / "intel-rapl:0:1", "dram", 500_000)
    cores = zone(tmp_path / "intel-rapl:0:0", "core", 0)  # included in the package
    meter = EnergyMeter(CPU, 1, tmp_path)
    assert meter.how == "measured by RAPL" and meter.joules() == 0
    for counter, value in ((first, 1_000_000), (second, 3_000_000), (memory, 750_000), (cores, 9_000_000)):
        counter.write_text(str(value))
    assert meter.joules() == pytest.approx(2 + 3 + 0.25)  # wrapped from 9 to 1 at 10
    assert meter.joules() == 0
    first.unlink()
    assert meter.joules() is None


def test_without_counters_energy_is_marked_as_estimated(tmp_path, monkeypatch):
    clock = iter([100.0, 103.0])
    monkeypatch.setattr(energy, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(energy.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    meter = EnergyMeter(CPU, 6, tmp_path)
    assert meter.how == "estimated: 16 W for the CPU (4 W per thread), on one of 3 machines"
    assert meter.joules() == 3 * 3 * 16


def test_gpu_energy_is_measured_or_estimated_from_ratings(tmp_path, monkeypatch):
    """Energy is read from NVML's counters, in mJ. GPUs are identified by UUID, because CUDA_VISIBLE_DEVICES changes
    the indices."""
    counts = {b"GPU-a": 5000, b"GPU-b": 0}
    found = []

    class Nvml:
        def nvmlInit_v2(self):
            return 0

        def nvmlDeviceGetHandleByUUID(self, name, handle):
            found.append(name)
            handle._obj.value = len(found)
            return 0

        def nvmlDeviceGetTotalEnergyConsumption(self, handle, value):
            value._obj.value = counts[found[handle.value - 1]]
            return 0

    monkeypatch.setattr(energy.ctypes, "CDLL", lambda name: Nvml())
    uuids = [types.SimpleNamespace(uuid="a"), types.SimpleNamespace(uuid="b")]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: uuids[number])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    meter = EnergyMeter(torch.device("cuda"), 2, tmp_path)
    counts.update({b"GPU-a": 6500, b"GPU-b": 250})
    assert (meter.how, meter.joules()) == ("measured by NVML, GPUs only", 1.75)
    del uuids[1:]  # each process sees only its own GPU
    assert EnergyMeter(torch.device("cuda"), 2, tmp_path).how == "estimated: 700 W per GPU (rated power)"

    def none(name):
        raise OSError(name)

    monkeypatch.setattr(energy.ctypes, "CDLL", none)
    assert EnergyMeter(torch.device("cuda"), 2, tmp_path).how == "estimated: 700 W per GPU (rated power)"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU of next year")
    unknown = EnergyMeter(torch.device("cuda"), 2, tmp_path)
    assert unknown.how is None and unknown.joules() is None


def test_co2_is_omitted_if_the_carbon_intensity_is_unknown():
    assert energy_text(3.6e6, "measured by RAPL", 473.0) == "1 kWh, measured by RAPL (473 g of CO2 at 473 g/kWh)"
    assert energy_text(3.6e6, "measured by RAPL", None) == "1 kWh, measured by RAPL"
    assert co2_text(100, 50) == " (5 kg of CO2 at 50 g/kWh)" and co2_text(1e5, 50) == " (5 t of CO2 at 50 g/kWh)"
