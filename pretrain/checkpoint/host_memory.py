"""Host memory of a save: a thread writes it to files while the next steps change the tensors it was copied from."""

import itertools
import weakref
from contextlib import suppress

import torch

ALIGNMENT = 64


class HostMemory:
    """Room for named tensors, one after the other, page-locked from the first that comes from a GPU.

    A GPU copies to page-locked memory several times as fast. It is locked here, in one piece, because torch rounds
    what it locks itself (pin_memory) up to a power of two: of a tensor of 155 MB it makes 268 MB.
    """

    def __init__(self, layout: dict[str, tuple[tuple[int, ...], torch.dtype]]):
        self.layout = layout
        """{name: (shape, dtype)}."""
        sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, (shape, dtype) in layout.items()}
        starts = itertools.accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes.values()), initial=0)
        starts = dict(zip([*layout, None], starts, strict=True))
        self._bytes = torch.empty(starts[None], dtype=torch.uint8)
        self._tensors = {
            name: self._bytes[starts[name] : starts[name] + sizes[name]].view(dtype).view(shape)
            for name, (shape, dtype) in layout.items()
        }
        self._tried_to_lock = False

    def hold(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor as it is now, here; from a GPU as soon as its stream has been waited for."""
        if tensor.is_cuda and not self._tried_to_lock:
            self._tried_to_lock = True
            if lock(self._bytes, tensor.device):
                weakref.finalize(self, unlock, self._bytes.data_ptr()).atexit = False
        return self._tensors[name].copy_(tensor, non_blocking=True)


def lock(memory: torch.Tensor, device: torch.device) -> bool:
    """Page-locks host memory; False where the system does not allow so much, and copies are slower."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
        return True
    with suppress(RuntimeError):  # CUDA keeps the error until the next kernel, which must not be one of a step's
        torch.ones(1, device=device)
    return False


def unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
