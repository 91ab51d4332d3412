"""Tiles, which describe a rank's part of a tensor as index ranges along each dimension.

A rank's part of a matrix is a rectangle. For fused gate and up projections, it is one rectangle from each projection,
so a dimension has several ranges, which are concatenated in the part.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise, product

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

Ranges = tuple[tuple[int, int], ...]
"""(first index, end) of each range along a dimension, in the part's order. () means that the part is empty."""
Tile = tuple[Ranges, ...]
"""Ranges along each dimension."""
Slices = tuple[slice, ...]


def whole_tile(shape: Sequence[int]) -> Tile:
    """Returns a tile that covers the whole tensor."""
    return tuple(((0, size),) for size in shape)


def chunk_of(ranges: Ranges, number: int, count: int) -> Ranges:
    """Returns one of `count` chunks of the ranges, divided as torch.chunk does."""
    total = sum(end - first for first, end in ranges)
    share = -(-total // count)
    return narrowed(ranges, min(total, share * number), min(total, share * (number + 1)))


def narrowed(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Returns the indices at positions `start` to `stop` within the ranges."""
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
    """Concatenates several parts' ranges and merges adjacent ranges."""
    ranges = tuple(span for part in parts for span in part)
    return narrowed(ranges, 0, sum(end - first for first, end in ranges))


def shape_of(tile: Tile) -> tuple[int, ...]:
    """Returns the part's shape."""
    return tuple(sum(end - first for first, end in ranges) for ranges in tile)


def take(whole: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Returns the tile's part of a whole tensor, as a view if no dimension has several ranges."""
    # Dimensions with several ranges are copied, so they come last.
    for dim, ranges in sorted(enumerate(tile), key=lambda pair: len(pair[1])):
        parts = [whole.narrow(dim, first, end - first) for first, end in ranges or ((0, 0),)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return whole


def put(whole: torch.Tensor, tile: Tile, part: torch.Tensor) -> None:
    """Copies a part to its position in a whole tensor."""
    for inside, outside in rectangles(tile):
        whole[outside].copy_(part[inside])


def rectangles(tile: Tile) -> Iterator[tuple[Slices, Slices]]:
    """Yields (slices in the part, slices in the whole) for each rectangle in a tile."""
    dimensions = []
    for ranges in tile:
        places = pairwise(accumulate((end - first for first, end in ranges), initial=0))
        dimensions.append([(slice(*place), slice(*span)) for place, span in zip(places, ranges, strict=True)])
    for pairs in product(*dimensions):
        yield tuple(inside for inside, _ in pairs), tuple(outside for _, outside in pairs)


def tile_of(tensor: DTensor) -> Tile:
    """Returns this rank's tile. Raises RuntimeError if the local tensor has a different shape."""
    tile = tile_at(tuple(tensor.shape), tensor.device_mesh.shape, tensor.placements, place_in(tensor.device_mesh))
    if shape_of(tile) != tuple(tensor.to_local().shape):
        raise RuntimeError(
            f"{tensor.placements} of {tuple(tensor.shape)} over {tensor.device_mesh} should leave {shape_of(tile)} on "
            f"this rank, but it has {tuple(tensor.to_local().shape)}: torch divides tensors in another way"
        )
    return tile


@cache
def tile_at(shape: tuple[int, ...], sizes: tuple[int, ...], placements: tuple, place: tuple[int, ...]) -> Tile:
    """Returns the tile at a position in a mesh with these sizes, for a tensor with this shape."""
    tile = list(whole_tile(shape))
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        dim = placement.dim % len(shape)
        # A plain shard lacks this attribute. With it, each of several parts is split separately: fused gate and up
        # projections with tp, or tensors that tp has split before fully_shard.
        parts = getattr(placement, "split_factor", 1)
        of_parts = [chunk_of(tile[dim], part, parts) for part in range(parts)]
        tile[dim] = joined([chunk_of(ranges, place[axis], sizes[axis]) for ranges in of_parts])
    return tuple(tile)


def place_in(mesh: DeviceMesh) -> tuple[int, ...]:
    """Returns this rank's position along each mesh dimension."""
    return tuple(mesh.get_local_rank(axis) for axis in range(mesh.ndim))


def local_part(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Returns this rank's part of `whole`, sharded as the DTensor `like` is."""
    return take(whole, tile_of(like))
