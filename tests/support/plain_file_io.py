"""Replacement for DeepSpeed's asynchronous I/O operator on machines without libaio."""

from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import torch


class PlainHandle:
    """Synchronous version of `aio_handle` with the methods used to swap optimizer state."""

    locked: ClassVar[set[int]] = set()
    """Addresses of page-locked buffers, shared by all handles."""

    def __init__(self, **_):
        self.done = 0

    def new_cpu_locked_tensor(self, elements: int, like: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(elements, dtype=like.dtype)
        self.locked.add(buffer.untyped_storage().data_ptr())
        return buffer

    def async_pread(self, tensor: torch.Tensor, path: str, offset: int) -> int:
        flat = tensor.view(-1).view(torch.uint8)
        flat.copy_(torch.from_numpy(np.fromfile(path, dtype=np.uint8, count=len(flat), offset=offset)))
        self.done += 1
        return 0

    def async_pwrite(self, tensor: torch.Tensor, path: str, offset: int) -> int:
        assert offset == 0
        tensor.view(-1).view(torch.uint8).numpy().tofile(path)
        self.done += 1
        return 0

    def wait(self) -> int:
        done, self.done = self.done, 0
        return done

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.locked


def use_plain_files() -> None:
    """Replaces DeepSpeed's operator with PlainHandle."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    AsyncIOBuilder.load = lambda builder, verbose=True: SimpleNamespace(aio_handle=PlainHandle)
    AsyncIOBuilder.is_compatible = lambda builder, verbose=False: True
