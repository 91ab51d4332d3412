"""Named tensors for checkpoints, which store them unsharded even if training shards them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorGroup:
    """Unsharded tensors by name. All ranks must fetch them in the same order."""

    shapes: dict[str, Shape]
    dtypes: dict[str, torch.dtype]
    gather: Callable[[str], Tensor]
    """Function that gathers a tensor by name (a collective call).

    Returns the unsharded tensor on its device, possibly the training tensor itself.
    """

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape] = MappingProxyType({})) -> Self:
        """Builds a group from tensors that every rank holds, either unsharded or as DTensors.

        shapes: unsharded shapes of tensors that have a different shape in training; see `in_shape`.
        """
        shapes = {name: shapes.get(name, tuple(tensor.shape)) for name, tensor in tensors.items()}
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        return cls(shapes, dtypes, lambda name: in_shape(whole_of(tensors[name]), shapes[name]))

    def whole(self, name: str, wanted: bool = True) -> Tensor | None:
        """Calls `gather`, and returns the result, or None if not `wanted`. All ranks must call it."""
        whole = self.gather(name)
        return whole if wanted else None

    def fetch(self, name: str, wanted: bool = True) -> Tensor | None:
        """Returns the unsharded tensor on the CPU, or None if not `wanted`. All ranks must call it."""
        whole = self.whole(name, wanted)
        return whole.to("cpu") if wanted else None


def whole_of(tensor: Tensor) -> Tensor:
    """Returns the unsharded tensor. Gathers a DTensor on its mesh's device (a collective call)."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    from pretrain.optim.optimizers import sharded_like

    # full_tensor needs the shard on the GPU. from_local, called in sharded_like, moves an offloaded shard there.
    return sharded_like(tensor, tensor.to_local(), tuple(tensor.shape)).full_tensor()


def in_shape(tensor: Tensor, shape: Shape) -> Tensor:
    """Reshapes a tensor's first elements to `shape`. Returns the tensor itself if it already has this shape."""
    return tensor if tuple(tensor.shape) == shape else tensor.flatten()[: math.prod(shape)].view(shape)


@torch.no_grad()
def load_parts(tensors: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
    """Copies unsharded tensors into the training tensors with the same names. A DTensor gets this rank's shard."""
    from pretrain.optim.tiles import local_part

    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            tensor.to_local().copy_(local_part(whole[name], tensor))
        else:
            tensor.copy_(whole[name])
