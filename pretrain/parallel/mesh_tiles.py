"""Tells Muon and Adafactor which tile of each parameter is on which rank of a mesh."""

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
    """Returns {mesh dimension: tensor dimension that it shards}, without mesh dimensions of size 1."""
    mesh = tensor.device_mesh
    # is_shard() is False for _StridedShard, which shards an already sharded dimension.
    return {
        axis: placement.dim % tensor.dim()
        for axis, placement in enumerate(tensor.placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    }


def place_tiles(optimizer: torch.optim.Optimizer, replica_group: Callable[[], dist.ProcessGroup | None]) -> None:
    """Sets the location of each parameter's tiles in Muon or Adafactor (a collective call).

    replica_group: see `Mesh.replica_group`.
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
    """Returns this rank's tile of a parameter and the ranks with the other tiles, for Adafactor."""
    from pretrain.optim.adafactor import ParameterPart
    from pretrain.optim.matrix_exchange import Holders

    axes = tuple(divided_axes(parameter))
    holders = holders_along(parameter, axes, replica)
    copies = dist.get_world_size(replica) // holders.size if axes and replica is not None else 1
    adds = True
    if copies > 1:
        # Here, tp ranks (the innermost dimension) have identical tiles. If their groups computed separate sums, the
        # statistics, and therefore the weight replicas, could differ in the last bit.
        holders = Holders(replica, holders.device)
        adds = dist.get_rank(replica) % copies == 0
    return ParameterPart(parameter, tuple(parameter.shape), holders, tile_of(parameter), adds=adds)


def pieces_in(parameter: DTensor, matrix: "HiddenMatrix", replica: dist.ProcessGroup | None) -> "list[MatrixPiece]":
    """Returns this rank's pieces of a matrix, or of each matrix in a stack, for Muon."""
    from pretrain.optim.matrix_exchange import pieces_of

    divided = divided_axes(parameter)
    *stack, _, _ = shape_of(tile_of(parameter))
    # Sharding a stack between matrices doesn't split any matrix.
    axes = tuple(axis for axis, dim in divided.items() if dim >= parameter.dim() - 2)
    tiles: tuple[Tile, ...] = ()
    if axes:
        tiles = tuple(tile[-2:] for tile in tiles_along(parameter, axes))
    elif not divided:
        # The matrix is replicated, so the ranks along the first mesh dimension larger than 1 share the work.
        axes = tuple(axis for axis, size in enumerate(parameter.device_mesh.shape) if size > 1)[:1]
    return pieces_of(matrix, holders_along(parameter, axes, replica), tiles, math.prod(stack))


def tiles_along(tensor: DTensor, axes: Sequence[int]) -> list[Tile]:
    """Returns the tiles of the ranks that differ from this one only along these mesh dimensions, in rank order."""
    mesh = tensor.device_mesh
    found = []
    here = dict(enumerate(place_in(mesh)))
    for places in product(*(range(mesh.size(axis)) for axis in axes)):
        place = here | dict(zip(axes, places, strict=True))
        found.append(tile_at(tuple(tensor.shape), mesh.shape, tensor.placements, tuple(place.values())))
    return found


def holders_along(tensor: DTensor, axes: Sequence[int], replica: dist.ProcessGroup | None) -> "Holders":
    """Returns the ranks that differ from this one only along these mesh dimensions.

    replica: group to use for two dimensions; see `Mesh.replica_group`.
    """
    from pretrain.optim.matrix_exchange import Holders

    mesh = tensor.device_mesh
    group = mesh.get_group(axes[0]) if len(axes) == 1 else replica if axes else None
    return Holders(group, torch.device(mesh.device_type))
