"""Tells Muon and Adafactor which tile of each parameter every rank of a mesh holds."""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from pretrain.optim.tiles import Tile, place_in, shape_of, tile_at, tile_of

if TYPE_CHECKING:
    from pretrain.optim.adafactor import ParameterPart
    from pretrain.optim.matrix_exchange import HiddenMatrix, Holders, MatrixPiece


def divided_axes(tensor: DTensor) -> dict[int, int]:
    """Returns {dimension of the mesh: dimension of the tensor that it divides}, for mesh dimensions larger than 1."""
    mesh = tensor.device_mesh
    # Not is_shard(), which is False for a _StridedShard: a shard of a dimension that is already divided.
    return {
        axis: placement.dim % tensor.dim()
        for axis, placement in enumerate(tensor.placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    }


def place_tiles(optimizer: torch.optim.Optimizer, replica_group: Callable[[], dist.ProcessGroup | None]) -> None:
    """Tells Muon or Adafactor which ranks hold which part of each parameter; a collective call.

    replica_group: returns the group of ranks that hold one replica together; None if a single dimension's is the same.
    """
    from pretrain.optim.adafactor import Adafactor
    from pretrain.optim.muon import MuonWithAdamW

    if not isinstance(optimizer, Adafactor | MuonWithAdamW):
        return
    replica = replica_group()
    if isinstance(optimizer, Adafactor):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        optimizer.placed = {parameter: [part_of(parameter, replica)] for parameter in parameters}
    else:
        muon = optimizer.muon
        muon.placed = {parameter: pieces_in(parameter, own, replica) for parameter, own in muon.matrices.items()}


def part_of(parameter: DTensor, replica: dist.ProcessGroup | None) -> "ParameterPart":
    """Returns Adafactor's view of a parameter: this rank's tile, and the ranks that hold the others."""
    from pretrain.optim.adafactor import ParameterPart
    from pretrain.optim.matrix_exchange import Holders

    axes = tuple(divided_axes(parameter))
    holders = holders_along(parameter, axes, replica)
    copies = dist.get_world_size(replica) // holders.size if axes and replica is not None else 1
    adds = True
    if copies > 1:
        # Ranks of tp, the innermost dimension, hold the same part. If each of their groups computed its own sum, the
        # statistics could differ in the last bit, and so could the replicas of the weights.
        holders = Holders(replica, holders.device)
        adds = dist.get_rank(replica) % copies == 0
    return ParameterPart(parameter, tuple(parameter.shape), holders, tile_of(parameter), adds=adds)


def pieces_in(parameter: DTensor, matrix: "HiddenMatrix", replica: dist.ProcessGroup | None) -> "list[MatrixPiece]":
    """Returns Muon's view of a parameter: the pieces of its matrix, or of all matrices of a stack."""
    from pretrain.optim.matrix_exchange import pieces_of

    divided = divided_axes(parameter)
    *stack, _, _ = shape_of(tile_of(parameter))
    # A mesh dimension that divides a stack between its matrices leaves them whole.
    axes = tuple(axis for axis, dim in divided.items() if dim >= parameter.dim() - 2)
    tiles: tuple[Tile, ...] = ()
    if axes:
        tiles = tuple(tile[-2:] for tile in tiles_along(parameter, axes))
    elif not divided:
        # All ranks have the whole matrix; those along the first dimension of several ranks share the work.
        axes = tuple(axis for axis, size in enumerate(parameter.device_mesh.shape) if size > 1)[:1]
    return pieces_of(matrix, holders_along(parameter, axes, replica), tiles, math.prod(stack))


def tiles_along(tensor: DTensor, axes: Sequence[int]) -> list[Tile]:
    """Returns the tiles of the ranks that differ from this one only along these mesh dimensions, in rank order."""
    mesh = tensor.device_mesh
    found = []
    for places in product(*(range(mesh.size(axis)) for axis in axes)):
        place = list(place_in(mesh))
        for axis, number in zip(axes, places, strict=True):
            place[axis] = number
        found.append(tile_at(tuple(tensor.shape), mesh.shape, tensor.placements, tuple(place)))
    return found


def holders_along(tensor: DTensor, axes: Sequence[int], replica: dist.ProcessGroup | None) -> "Holders":
    """Returns the ranks that differ from this one only along these mesh dimensions.

    replica: the group for two dimensions; its ranks hold all parts of one replica.
    """
    from pretrain.optim.matrix_exchange import Holders

    mesh = tensor.device_mesh
    group = mesh.get_group(axes[0]) if len(axes) == 1 else replica if axes else None
    return Holders(group, torch.device(mesh.device_type))
