"""Replicas that differ in a single bit must be detected and reported with the differing rank."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pretrain.parallel.replicas import CHUNK, compare, digest_tensors, replica_differences

CPU = torch.device("cpu")


def one_digest(tensor: torch.Tensor) -> int:
    return digest_tensors([tensor], CPU).item()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_any_changed_bit_changes_the_digest(dtype):
    torch.manual_seed(0)
    tensor = torch.randint(-100, 100, (7, 9)).to(dtype)
    bytes_of_tensor = tensor.view(torch.uint8).view(-1)
    before = one_digest(tensor)
    for place in range(0, bytes_of_tensor.numel(), 3):
        bytes_of_tensor[place] ^= 1
        assert one_digest(tensor) != before, place
        bytes_of_tensor[place] ^= 1
    assert one_digest(tensor) == before


def test_order_and_sign_of_zero_matter():
    assert one_digest(torch.tensor([1.0, 2.0])) != one_digest(torch.tensor([2.0, 1.0]))
    assert one_digest(torch.tensor([0.0, 1.0])) != one_digest(torch.tensor([-0.0, 1.0]))
    assert one_digest(torch.ones(8)) != one_digest(-torch.ones(8)), "changes in the highest bit must not cancel out"
    nan = torch.tensor([float("nan"), 1.0])
    assert one_digest(nan) == one_digest(nan.clone()), "NaNs with equal bits must have equal digests"


def test_memory_layout_does_not_matter():
    matrix = torch.arange(12.0).view(3, 4)
    assert one_digest(matrix.T.contiguous()) == one_digest(matrix.T)


def test_elements_after_the_first_chunk_matter():
    tensor = torch.zeros(2 * CHUNK + 5, dtype=torch.bfloat16)
    digests = set()
    for place in (0, CHUNK, 2 * CHUNK, 2 * CHUNK + 4):
        tensor[place] = 1.0
        digests.add(one_digest(tensor))
        tensor[place] = 0.0
    assert len(digests) == 4


def test_the_differing_ranks_are_named():
    digests = torch.tensor([[1, 5, 7], [1, 5, 8], [1, 6, 9], [1, 5, 7]])
    assert compare(["a", "b", "c"], digests, [0, 2, 4, 6]) == [
        "b: different on 1 of 4 ranks: 4",
        "c: different on 4 of 4 ranks: 0, 2, 4, 6",
    ]
    assert compare(["a"], torch.tensor([[1], [2]]), [0, 1]) == ["a: different on 2 of 2 ranks: 0, 1"]
    five = torch.tensor([[1], [2], [1], [3], [1]])
    assert compare(["a"], five, range(5)) == ["a: different on 2 of 5 ranks: 1, 3"]


def in_two_groups(rank: int, folder: str) -> None:
    """Uses four processes: the first three form a group, and the last one has nothing to compare with."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=4)
    three = dist.new_group([0, 1, 2])
    tensors = {"norm": torch.ones(8), "head": torch.arange(6.0).view(2, 3)}
    groups = [] if rank == 3 else [(three, tensors)]
    found = [replica_differences(groups, CPU)]
    if rank == 1:
        tensors["head"][1, 2] = torch.nextafter(torch.tensor(5.0), torch.tensor(6.0))
    found.append(replica_differences(groups, CPU))
    world = {"norm": torch.ones(8) if rank < 3 else -torch.ones(8)}
    found.append(replica_differences([(None, world)], CPU))
    with open(f"{folder}/{rank}", "w", encoding="utf-8") as file:
        file.write(repr(found))
    dist.destroy_process_group()


def test_all_ranks_find_a_changed_parameter(tmp_path):
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mp.spawn(in_two_groups, (str(tmp_path),), nprocs=4)
    expected = [[], ["head: different on 1 of 3 ranks: 1"], ["norm: different on 1 of 4 ranks: 3"]]
    assert [(tmp_path / str(rank)).read_text() for rank in range(4)] == [repr(expected)] * 4
