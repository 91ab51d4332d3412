"""Host memory for saves must be as large as the tensors, page-locked once and freed correctly."""

import gc

import pytest
import torch

from pretrain.checkpoint import tensor_files
from pretrain.checkpoint.tensor_files import HostMemory

LAYOUT = {
    "head.weight": ((50304, 768), torch.float32),
    "head.step": ((), torch.float32),
    "norm": ((3,), torch.bfloat16),
    "absmax": ((0,), torch.uint8),
    "codes": ((5, 7), torch.uint8),
}


class FromGpu(torch.Tensor):
    """CPU tensor that claims to be on a GPU."""

    is_cuda = True


@pytest.fixture
def driver(monkeypatch):
    """Records CUDA calls in order; locking fails while "refuses" is in the list."""
    calls = []

    class Cudart:
        def cudaHostRegister(self, address, size, flags):
            calls.append(("lock", address, size))
            return int("refuses" in calls)

        def cudaHostUnregister(self, address):
            calls.append(("unlock", address))

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(tensor_files.torch, "ones", lambda *size, device: calls.append("error cleared"))
    return calls


def tensors_of(layout, kind):
    return {n: torch.arange(torch.Size(s).numel()).view(s).to(d).as_subclass(kind) for n, (s, d) in layout.items()}


def test_tensors_are_copied_unchanged(driver):
    memory, tensors = HostMemory(LAYOUT), tensors_of(LAYOUT, torch.Tensor)
    kept = {name: memory.hold(name, tensor) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        wanted = tensor.clone()
        tensor.add_(1)
        assert torch.equal(kept[name], wanted) and kept[name].dtype == wanted.dtype and kept[name].is_contiguous()
    assert kept["norm"].data_ptr() == memory.hold("norm", tensors["norm"]).data_ptr(), "memory must be reused"
    assert driver == [], "memory for CPU tensors must not be locked"


def test_memory_for_gpu_tensors_is_locked_once_and_only_as_needed(driver):
    memory, tensors = HostMemory(LAYOUT), tensors_of(LAYOUT, FromGpu)
    for _ in range(2):
        for name, tensor in tensors.items():
            memory.hold(name, tensor)
    needed = sum(tensor.nbytes for tensor in tensors.values())
    ((_, address, size),) = driver
    assert needed <= size < needed + 64 * len(tensors), (
        "only the needed 155 MB may be locked (torch would lock 268 MB)"
    )
    del memory
    gc.collect()
    assert driver[1:] == [("unlock", address)]


def test_a_failed_lock_is_tolerated(driver):
    driver.append("refuses")
    memory, tensors = HostMemory(LAYOUT), tensors_of(LAYOUT, FromGpu)
    assert all(torch.equal(memory.hold(name, tensor), tensor) for name, tensor in tensors.items())
    del memory
    gc.collect()
    assert [call[0] if isinstance(call, tuple) else call for call in driver] == ["refuses", "lock", "error cleared"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_locked_memory_is_pinned_on_a_gpu():
    memory = HostMemory({"a": ((1000,), torch.float32)})
    kept = memory.hold("a", torch.arange(1000.0, device="cuda"))
    torch.cuda.synchronize()
    assert kept.is_pinned() and torch.equal(kept, torch.arange(1000.0))
