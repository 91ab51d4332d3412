"""Tiles are the parts that torch divides a tensor into, whatever divides it, and however unevenly."""

from itertools import product

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from pretrain.optim.tiles import put, shape_of, take
from pretrain.parallel.mesh_tiles import tile_at

PLACEMENTS = {
    "a replica": (Replicate(), Shard(0)),
    "rows by fsdp, columns by tp": (Shard(0), Shard(1)),
    "rows by tp, and again by fsdp": (_StridedShard(0, split_factor=2), Shard(0)),
    "gate and up by tp": (Shard(0), _StridedShard(1, split_factor=2)),
    "the last dimension": (Replicate(), _StridedShard(2, split_factor=2)),
}
SHAPES = [(8, 12, 4), (7, 10, 6), (2, 6, 5), (3, 4, 4)]
SIZES = (4, 2)


def torchs_part(whole, placements, place):
    for placement, size, rank in zip(placements, SIZES, place, strict=True):
        if not placement.is_replicate():
            whole = placement._split_tensor(whole, size, with_padding=False)[0][rank]
    return whole


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", PLACEMENTS)
def test_a_tile_is_the_part_that_torch_makes(shape, kind):
    placements = PLACEMENTS[kind]
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    together = torch.full(shape, -1)
    for place in product(*map(range, SIZES)):
        tile = tile_at(shape, SIZES, placements, place)
        part = torchs_part(whole, placements, place)
        assert shape_of(tile) == tuple(part.shape) and torch.equal(take(whole, tile), part)
        put(together, tile, part)
    assert torch.equal(together, whole)
