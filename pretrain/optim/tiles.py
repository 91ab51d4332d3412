"""Tiles: the part of a tensor that a rank holds, as index ranges along each dimension.

A rank's part of a matrix is a rectangle of it or, of gate and up projections stored as one matrix, a rectangle of
each: then a dimension has several ranges, and the part holds their indices one after the other.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise, product

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

Ranges = tuple[tuple[int, int], ...]
"""(first index, end) of each range along a dimension, in the order of the part; () if the part is empty."""
Tile = tuple[Ranges, ...]
"""Ranges along each dimension."""
Slices = tuple[slice, ...]


def whole_tile(shape: Sequence[int]) -> Tile:
    """Returns the tile that is the whole tensor."""
    return tuple(((0, size),) for size in shape)


def chunk_of(ranges: Ranges, number: int, count: int) -> Ranges:
    """Returns one of `count` parts of the ranges, as torch.chunk divides their indices."""
    total = sum(end - first for first, end in ranges)
    share = -(-total // count)
    return narrowed(ranges, min(total, share * number), min(total, share * (number + 1)))


def narrowed(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Returns the indices from place `start` to place `stop` of the ranges."""
    found: list[tuple[int, int]] = []
    place = 0
    for first, end in ranges:
        low = max(start - place, 0)
        high = min(stop - place, end - first)
        if low < high and found and found[-1][1] == first + low:
            found[-1] = (found[-1][0], first + high)
        elif low < high:
            found.append((first + low, first + high))
        place += end - first
    return tuple(found)


def joined(parts: Sequence[Ranges]) -> Ranges:
    """Returns the ranges of several parts as those of one, neighbors as one range."""
    ranges = tuple(span for part in parts for span in part)
    return narrowed(ranges, 0, sum(end - first for first, end in ranges))


def shape_of(tile: Tile) -> tuple[int, ...]:
    """Returns the shape of the part."""
    return tuple(sum(end - first for first, end in ranges) for ranges in tile)


def take(whole: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Returns the part of a whole tensor; a view of it if no dimension has several ranges."""
    # Dimensions with several ranges last, because they are copied.
    for dim, ranges in sorted(enumerate(tile), key=lambda pair: len(pair[1])):
        parts = [whole.narrow(dim, first, end - first) for first, end in ranges or ((0, 0),)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return whole


def put(whole: torch.Tensor, tile: Tile, part: torch.Tensor) -> None:
    """Copies a part to its place in a whole tensor."""
    for inside, outside in rectangles(tile):
        whole[outside].copy_(part[inside])


def rectangles(tile: Tile) -> Iterator[tuple[Slices, Slices]]:
    """Yields (its slices in the part, its slices in the whole) of each rectangle of a tile."""
    dimensions = []
    for ranges in tile:
        places = pairwise(accumulate((end - first for first, end in ranges), initial=0))
        dimensions.append([(slice(*place), slice(*span)) for place, span in zip(places, ranges, strict=True)])
    for pairs in product(*dimensions):
        yield tuple(inside for inside, _ in pairs), tuple(outside for _, outside in pairs)


def tile_of(tensor: DTensor) -> Tile:
    """Returns this rank's tile. Raises RuntimeError if the local tensor has another shape."""
    tile = tile_at(tuple(tensor.shape), tensor.device_mesh.shape, tensor.placements, place_in(tensor.device_mesh))
    if shape_of(tile) != tuple(tensor.to_local().shape):
        raise RuntimeError(
            f"{tensor.placements} of {tuple(tensor.shape)} over {tensor.device_mesh} should leave {shape_of(tile)} on "
            f"this rank, which has {tuple(tensor.to_local().shape)}: torch divides tensors in another way"
        )
    return tile


@cache
def tile_at(shape: tuple[int, ...], sizes: tuple[int, ...], placements: tuple, place: tuple[int, ...]) -> Tile:
    """Returns the tile of the rank at a place in a mesh of these sizes, for a tensor of this shape."""
    tile = list(whole_tile(shape))
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        dim = placement.dim % len(shape)
        # A plain shard has no such attribute. With one, each part of so many has its share, one after the other: rows
        # of gate and up projections that tp splits together, or what tp has split before fully_shard does.
        parts = getattr(placement, "split_factor", 1)
        of_parts = [chunk_of(tile[dim], part, parts) for part in range(parts)]
        tile[dim] = joined([chunk_of(ranges, place[axis], sizes[axis]) for ranges in of_parts])
    return tuple(tile)


def place_in(mesh: DeviceMesh) -> tuple[int, ...]:
    """Returns this rank's place along each dimension of a mesh."""
    return tuple(mesh.get_local_rank(axis) for axis in range(mesh.ndim))


def local_part(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Returns this rank's part of `whole` if it is divided like the DTensor `like`."""
    return take(whole, tile_of(like))
