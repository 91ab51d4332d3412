"""Tiles: tensor shards, described by index ranges for each dimension.

A dimension may have several ranges. For example, a shard of fused gate and up projections contains rows from both.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise, product

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

Ranges = tuple[tuple[int, int], ...]
"""(start, end) of each index range in a dimension. The shard concatenates them. Empty if the shard is empty."""
Tile = tuple[Ranges, ...]
"""Index ranges for each dimension."""
Slices = tuple[slice, ...]


def whole_tile(shape: Sequence[int]) -> Tile:
    """Returns a tile that covers the whole tensor."""
    return tuple(((0, size),) for size in shape)


def chunk_of(ranges: Ranges, number: int, count: int) -> Ranges:
    """Splits the ranges into `count` chunks, like torch.chunk, and returns chunk `number`."""
    total = sum(end - first for first, end in ranges)
    share = -(-total // count)
    return narrowed(ranges, min(total, share * number), min(total, share * (number + 1)))


def narrowed(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Slices the concatenated ranges from `start` to `stop`."""
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
    """Concatenates ranges and merges adjacent ones."""
    ranges = tuple(span for part in parts for span in part)
    return narrowed(ranges, 0, sum(end - first for first, end in ranges))


def shape_of(tile: Tile) -> tuple[int, ...]:
    """Returns the shape of the shard."""
    return tuple(sum(end - first for first, end in ranges) for ranges in tile)


def take(whole: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Extracts the shard from a whole tensor. Returns a view, unless a dimension has several ranges."""
    # Dimensions with several ranges need a copy, so they come last.
    for dim, ranges in sorted(enumerate(tile), key=lambda pair: len(pair[1])):
        parts = [whole.narrow(dim, first, end - first) for first, end in ranges or ((0, 0),)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return whole


def put(whole: torch.Tensor, tile: Tile, part: torch.Tensor) -> None:
    """Copies a shard to its position in the whole tensor."""
    for inside, outside in rectangles(tile):
        whole[outside].copy_(part[inside])


def rectangles(tile: Tile) -> Iterator[tuple[Slices, Slices]]:
    """Yields (slices in the shard, slices in the whole tensor) for each contiguous rectangle in a tile."""
    dimensions = []
    for ranges in tile:
        places = pairwise(accumulate((end - first for first, end in ranges), initial=0))
        dimensions.append([(slice(*place), slice(*span)) for place, span in zip(places, ranges, strict=True)])
    for pairs in product(*dimensions):
        yield tuple(inside for inside, _ in pairs), tuple(outside for _, outside in pairs)


def tile_of(tensor: DTensor) -> Tile:
    """Returns this rank's tile of a DTensor. Raises RuntimeError if the local tensor has a different shape."""
    tile = tile_at(tuple(tensor.shape), tensor.device_mesh.shape, tensor.placements, place_in(tensor.device_mesh))
    if shape_of(tile) != tuple(tensor.to_local().shape):
        raise RuntimeError(
            f"{tensor.placements} of {tuple(tensor.shape)} over {tensor.device_mesh} should give this rank "
            f"shape {shape_of(tile)}, got {tuple(tensor.to_local().shape)}; this torch version shards differently"
        )
    return tile


@cache
def tile_at(shape: tuple[int, ...], sizes: tuple[int, ...], placements: tuple, place: tuple[int, ...]) -> Tile:
    """Returns the tile of the rank at position `place` in a mesh.

    shape: unsharded shape. sizes: size of each mesh dimension.
    """
    tile = list(whole_tile(shape))
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        dim = placement.dim % len(shape)
        # _StridedShard shards several parts of the dimension separately, such as fused gate and up projections.
        parts = getattr(placement, "split_factor", 1)
        of_parts = [chunk_of(tile[dim], part, parts) for part in range(parts)]
        tile[dim] = joined([chunk_of(ranges, place[axis], sizes[axis]) for ranges in of_parts])
    return tuple(tile)


def place_in(mesh: DeviceMesh) -> tuple[int, ...]:
    """Returns this rank's position in each mesh dimension."""
    return tuple(mesh.get_local_rank(axis) for axis in range(mesh.ndim))


def local_part(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Returns this rank's shard of `whole`, sharded like the DTensor `like`."""
    return take(whole, tile_of(like))
