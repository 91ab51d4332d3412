"""Tensors by name: whole for a checkpoint, perhaps sharded in training, as DTensors or otherwise."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

import torch
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class TensorGroup:
    """Whole tensors by name, wherever their shards are. All ranks must fetch them, in the same order."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    gather: Callable[[str], torch.Tensor]
    """Returns the whole tensor of this name on its device, maybe the one in training; a collective call."""

    @classmethod
    def of(
        cls, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    ) -> Self:
        """Builds a group of these tensors, which every rank has whole or, as DTensors, its shard of.

        shapes: shapes of the whole tensors that have another one in training; see `in_shape`.
        """
        shapes = {name: shapes.get(name, tuple(tensor.shape)) for name, tensor in tensors.items()}
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        return cls(shapes, dtypes, lambda name: in_shape(whole_of(tensors[name]), shapes[name]))

    def whole(self, name: str, wanted: bool = True) -> torch.Tensor | None:
        """Returns what `gather` returns; None on a rank that takes part but does not want it."""
        whole = self.gather(name)
        return whole if wanted else None

    def fetch(self, name: str, wanted: bool = True) -> torch.Tensor | None:
        """Returns the whole tensor on the CPU; None on a rank that takes part but does not want it."""
        whole = self.whole(name, wanted)
        return whole.to("cpu") if wanted else None


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole tensor; for a DTensor on the mesh's device, in a collective call of the mesh's ranks."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    from pretrain.optim.optimizers import sharded_like

    # Not full_tensor alone: a part in host memory has to be on the GPU first, and from_local moves it there.
    return sharded_like(tensor, tensor.to_local(), tuple(tensor.shape)).full_tensor()


def in_shape(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns the first elements of the flattened tensor in this shape; the tensor itself if it has it."""
    return tensor if tuple(tensor.shape) == shape else tensor.flatten()[: math.prod(shape)].view(shape)


@torch.no_grad()
def load_parts(tensors: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor]) -> None:
    """Copies whole tensors into those in training, by name; a DTensor gets this rank's shard."""
    from pretrain.optim.tiles import local_part

    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            tensor.to_local().copy_(local_part(whole[name], tensor))
        else:
            tensor.copy_(whole[name])
