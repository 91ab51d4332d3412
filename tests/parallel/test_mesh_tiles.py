"""Tiles must match torch's shards for all placements, including uneven ones."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from pretrain.mesh_sizes import Sizes
from pretrain.optim.tiles import put, shape_of, take
from pretrain.parallel.expert_parallel import dimension_to_shard
from pretrain.parallel.mesh import Mesh
from pretrain.parallel.mesh_tiles import part_of, tile_at

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
def test_a_tile_matches_torchs_shard(shape, kind):
    placements = PLACEMENTS[kind]
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    together = torch.full(shape, -1)
    for place in product(*map(range, SIZES)):
        tile = tile_at(shape, SIZES, placements, place)
        part = torchs_part(whole, placements, place)
        assert shape_of(tile) == tuple(part.shape) and torch.equal(take(whole, tile), part)
        put(together, tile, part)
    assert torch.equal(together, whole)


@pytest.mark.parametrize("rank", range(4))
def test_only_one_of_the_tp_replicas_adds_to_a_sum(rank):
    """Only one replica of a norm may contribute to its sum, or the replicas could differ in the last bit."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        mesh = Mesh(Sizes(dp_shard=2, tp=2), "cpu")
        replica = mesh.replica_group()
        norm = distribute_tensor(torch.ones(8), mesh.shards(), [Shard(0)], src_data_rank=None)
        matrix = distribute_tensor(
            torch.ones(8, 8), mesh.dense["fsdp", "tp"], [Shard(0), Shard(1)], src_data_rank=None
        )
        of_norm, of_matrix = part_of(norm, replica), part_of(matrix, replica)
        assert of_norm.holders == of_matrix.holders and of_norm.holders.size == 4, "one collective for both"
        assert of_matrix.adds and of_norm.adds == (mesh.rank("tp") == 0)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("shape", "placements", "expected"),
    [
        ((2, 24, 16), None, 1),
        ((8, 24, 16), None, None),
        ((5, 24, 16), None, 1),
        ((2, 7, 16), None, 2),
        ((2, 7, 9), None, None),
        ((2, 16), None, None),
        ((2, 24, 16), [Shard(1)], 2),
        ((4, 24, 16), [Shard(0)], 1),
    ],
)
def test_few_experts_are_sharded_along_a_divisible_dimension(shape, placements, expected):
    """Experts must be sharded along a dimension divisible by four ranks, even if tensor parallelism already shards
    another dimension."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        tensor = torch.ones(shape)
        if placements:
            other = Mesh(Sizes(dp_shard=4, tp=2), "cpu").dense["tp"]
            tensor = distribute_tensor(tensor, other, placements, src_data_rank=None)
        found = dimension_to_shard(4, torch.nn.Parameter(tensor))
        assert (found and found.dim) == expected
    finally:
        dist.destroy_process_group()
