"""Exchanged matrices must match those of one process with any sharding. Processes are simulated with threads."""

from itertools import pairwise, product

import pytest
import torch

from pretrain.optim import matrix_exchange
from pretrain.optim.matrix_exchange import (
    HiddenMatrix,
    Holders,
    MatrixPiece,
    buckets_of,
    pieces_of,
    replace_whole_matrices,
)
from pretrain.optim.tiles import take
from support.threads_as_processes import PROCESSES, Threads, edges_of_chunks, flat_layout

CPU = torch.device("cpu")
MATRICES = [HiddenMatrix(shape) for shape in [(4, 6), (7, 3), (2, 9), (6, 4), (1, 5), (8, 8), (5, 5)]]
BUCKETS = 4
"""Number of buckets for MATRICES with 20 elements per process; the last one has three matrices."""


def wholes():
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(matrix.shape, generator=generator) for matrix in MATRICES]


def replaced(pairs):
    """Replaces each matrix with values that depend on all of its elements and its shape."""
    for whole, matrix in pairs:
        assert whole.shape == matrix.shape
        whole.copy_(whole.flip(0).cumsum(1) * whole.sum())


def ranges_of(size, parts=1):
    """Returns each rank's index ranges if a dimension is split into `parts` equal parts and each part is sharded."""
    part = size // parts
    return [
        tuple((part * number + first, part * number + end) for number in range(parts) if first < end)
        for first, end in pairwise(edges_of_chunks(part))
    ]


def expected():
    matrices = wholes()
    replaced(list(zip(matrices, MATRICES, strict=True)))
    return matrices


def run_threads(monkeypatch, of_rank, threads=None):
    """Returns each rank's tensors after the exchange, and the number of collectives."""
    threads = threads or Threads()
    monkeypatch.setattr(matrix_exchange, "dist", threads)
    monkeypatch.setattr(matrix_exchange, "BUCKET_ELEMENTS", 20)

    def run(rank):
        tensors, pieces = of_rank(rank)
        replace_whole_matrices(pieces, tensors, lambda device: torch.float32, replaced)
        return tensors

    return threads.run(run), threads.calls


def cut(matrix, kind):
    """Returns the tile of each rank."""
    rows, columns = matrix.shape
    if kind == "rows":
        return [(ranges, ((0, columns),)) for ranges in ranges_of(rows)]
    if kind == "columns":
        return [(((0, rows),), ranges) for ranges in ranges_of(columns)]
    if kind == "both halves of the columns":
        odd = ((columns // 2 * 2, columns),) if columns % 2 else ()
        halves = ranges_of(columns // 2 * 2, parts=2)
        return [(((0, rows),), ranges + (odd if rank == 1 else ())) for rank, ranges in enumerate(halves)]
    # Two dimensions: the first rank has the upper rows, and the others share the columns of the lower rows.
    middle, half = rows // 2, columns // 2
    below = ((middle, rows),)
    return [(((0, middle),) if middle else (), ((0, columns),)), (below, ((0, half),)), (below, ((half, columns),))]


@pytest.mark.parametrize("kind", ["rows", "columns", "both halves of the columns", "two dimensions"])
def test_tiles(monkeypatch, kind):
    """Some tiles are empty."""

    def of_rank(rank):
        tensors, pieces = [], []
        for index, (whole, matrix) in enumerate(zip(wholes(), MATRICES, strict=True)):
            tiles = tuple(cut(matrix, kind))
            tensors.append(take(whole, tiles[rank]).clone())
            pieces.append(MatrixPiece(matrix, Holders(rank, CPU), index, tiles))
        return tensors, pieces

    found, calls = run_threads(monkeypatch, of_rank)
    for (index, whole), rank in product(enumerate(expected()), range(PROCESSES)):
        torch.testing.assert_close(found[rank][index], take(whole, cut(MATRICES[index], kind)[rank]))
    assert calls <= 2 * BUCKETS


def test_a_stack_split_by_tp(monkeypatch):
    """Each rank has a shard of every matrix in the stack."""
    matrix = HiddenMatrix((6, 4), stacked=3)
    tiles = tuple((((0, 6),), ranges) for ranges in ranges_of(4))
    stack = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(1))

    def of_rank(rank):
        part = torch.stack([take(one, tiles[rank]) for one in stack])
        return [part], pieces_of(matrix, Holders(rank, CPU), tiles, held=3)

    found, _ = run_threads(monkeypatch, of_rank)
    whole = stack.clone()
    replaced([(one, HiddenMatrix((6, 4))) for one in whole])
    torch.testing.assert_close(torch.cat([tensors[0] for tensors in found], 2), whole)


def test_flat_partitions_that_split_matrices(monkeypatch):
    """Matrices within one partition must not be sent."""
    size, starts, edges = flat_layout([matrix.shape[0] * matrix.shape[1] for matrix in MATRICES])

    def of_rank(rank):
        flat = torch.zeros(PROCESSES * size)
        for whole, start in zip(wholes(), starts, strict=True):
            flat[start : start + whole.numel()] = whole.flatten()
        pieces = []
        for matrix, start, ends in zip(MATRICES, starts, edges, strict=True):
            offset = max(0, start - size * rank) if ends[rank] < ends[rank + 1] else 0
            tiles = tuple((((first, end),) if first < end else (),) for first, end in pairwise(ends))
            pieces.append(MatrixPiece(matrix, Holders(rank, CPU), 0, tiles, offset))
        return [flat[size * rank : size * (rank + 1)].clone()], pieces

    found, calls = run_threads(monkeypatch, of_rank)
    flat = torch.cat([tensors[0] for tensors in found])
    for start, whole in zip(starts, expected(), strict=True):
        torch.testing.assert_close(flat[start : start + whole.numel()].view(whole.shape), whole)
    assert calls == 4, "two matrices are split, and each needs its own bucket"


def test_replicas_are_equal_and_need_one_collective_per_bucket(monkeypatch):
    def of_rank(rank):
        return wholes(), [MatrixPiece(matrix, Holders(rank, CPU), index) for index, matrix in enumerate(MATRICES)]

    found, calls = run_threads(monkeypatch, of_rank)
    for copies, whole in zip(zip(*found, strict=True), expected(), strict=True):
        assert torch.equal(copies[0], copies[1]) and torch.equal(copies[0], copies[2])
        torch.testing.assert_close(copies[0], whole)
    assert calls <= BUCKETS


def test_replicas_are_gathered_with_either_of_torchs_names(monkeypatch):
    """torch 2.11 and 2.12 have only the older name, which is deprecated in 2.13."""

    class Older:
        def __init__(self, threads):
            self.threads = threads

        def __getattr__(self, name):
            if name == "all_gather_single":
                raise AttributeError(name)
            return getattr(self.threads, name.replace("all_gather_into_tensor", "all_gather_single"))

    def of_rank(rank):
        return wholes(), [MatrixPiece(matrix, Holders(rank, CPU), index) for index, matrix in enumerate(MATRICES)]

    found, _ = run_threads(monkeypatch, of_rank, Older(Threads()))
    torch.testing.assert_close(found[2], expected())


def test_work_is_balanced_between_owners():
    layer = [(4, 4)] * 4 + [(16, 4)] * 2 + [(4, 16)]
    pieces = [MatrixPiece(HiddenMatrix(shape), Holders(None, CPU), 0) for shape in layer * 6]
    work = [0] * 4
    for bucket in buckets_of(pieces, 4):
        for owner, owned in enumerate(bucket):
            work[owner] += sum(piece.elements * 4 for piece in owned)
    assert max(work) <= 1.1 * sum(work) / 4
