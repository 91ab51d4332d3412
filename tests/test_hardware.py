"""A GPU that torch cannot use is never passed over in silence."""

import pytest
import torch

from pretrain import hardware
from pretrain.problems import InputError
from pretrain.strategy import device_type

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13 16:14:05 2021\nGCC version: 9.3.0\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """With a GPU whose driver is too old for torch."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (tmp_path / "version").write_text(DRIVER)
    monkeypatch.setattr(hardware, "DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr(hardware, "DEVICE_FILE", tmp_path / "nvidia0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    return tmp_path


def test_the_driver_and_what_torch_is_built_for_are_named(machine, monkeypatch):
    with pytest.raises(InputError, match=r"driver 470\.57\.02.* is built for CUDA 13\.0"):
        device_type()
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(InputError, match="is a build for the CPU; install one for CUDA"):
        device_type()
    (machine / "version").unlink()
    (machine / "nvidia0").touch()
    with pytest.raises(InputError, match="a driver whose version cannot be read"):
        device_type()


@pytest.mark.parametrize(("name", "value"), [("CUDA_VISIBLE_DEVICES", ""), ("ACCELERATE_USE_CPU", "true")])
def test_the_cpu_on_purpose(machine, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert device_type() == "cpu"


def test_devices_that_are_not_there_are_named(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(InputError, match="CUDA_VISIBLE_DEVICES is 7: does it name a GPU here"):
        device_type()


def test_a_machine_without_a_gpu_takes_its_cpu(machine):
    (machine / "version").unlink()
    assert device_type() == "cpu"
