"""Exchanged matrices are those of one process, however they are divided. Threads play the processes."""

from itertools import pairwise

import pytest
import torch

from pretrain.optim import matrix_exchange
from pretrain.optim.matrix_exchange import HiddenMatrix, Holders, MatrixPiece, buckets_of, replace_whole_matrices
from support.threads_as_processes import PROCESSES, Threads, edges_of_chunks, flat_layout

CPU = torch.device("cpu")
MATRICES = [HiddenMatrix(shape) for shape in [(4, 6), (7, 3), (2, 9), (6, 4), (1, 5), (8, 8), (5, 5)]]
BUCKETS = 4
"""Of MATRICES with 20 elements for each process: the last has three."""


def wholes():
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(matrix.shape, generator=generator) for matrix in MATRICES]


def replaced(pairs):
    """Something that takes all of a matrix, and its shape."""
    for whole, matrix in pairs:
        assert whole.shape == matrix.shape
        whole.copy_(whole.flip(0).cumsum(1) * whole.sum())


def rows(matrix, dim):
    """Elements of shards along a dimension."""
    return tuple(pairwise(matrix.shape[1 - dim] * edge for edge in edges_of_chunks(matrix.shape[dim])))


def expected():
    matrices = wholes()
    replaced(list(zip(matrices, MATRICES, strict=True)))
    return matrices


def run_threads(monkeypatch, of_rank):
    """The tensors of each rank after the exchange, and how many collectives it took."""
    threads = Threads()
    monkeypatch.setattr(matrix_exchange, "dist", threads)
    monkeypatch.setattr(matrix_exchange, "BUCKET_ELEMENTS", 20)

    def run(rank):
        tensors, pieces = of_rank(rank)
        replace_whole_matrices(pieces, tensors, lambda device: torch.float32, replaced)
        return tensors

    return threads.run(run), threads.calls


@pytest.mark.parametrize("dim", [0, 1])
def test_shards(monkeypatch, dim):
    def of_rank(rank):
        tensors, pieces = [], []
        for index, (whole, matrix) in enumerate(zip(wholes(), MATRICES, strict=True)):
            ranges = rows(matrix, dim)
            first, end = (edge // matrix.shape[1 - dim] for edge in ranges[rank])
            tensors.append(whole.narrow(dim, first, end - first).clone())
            pieces.append(MatrixPiece(matrix, Holders(rank, CPU), index, ranges, is_transposed=dim == 1))
        return tensors, pieces

    found, calls = run_threads(monkeypatch, of_rank)
    for shards, whole in zip(zip(*found, strict=True), expected(), strict=True):
        torch.testing.assert_close(torch.cat(shards, dim), whole)
    assert calls <= 2 * BUCKETS


def test_flat_partitions_that_cut_matrices_anywhere(monkeypatch):
    """With padding between them; a matrix that is whole somewhere does not travel."""
    size, starts, edges = flat_layout([matrix.shape[0] * matrix.shape[1] for matrix in MATRICES])

    def of_rank(rank):
        flat = torch.zeros(PROCESSES * size)
        for whole, start in zip(wholes(), starts, strict=True):
            flat[start : start + whole.numel()] = whole.flatten()
        pieces = []
        for matrix, start, ends in zip(MATRICES, starts, edges, strict=True):
            offset = max(0, start - size * rank) if ends[rank] < ends[rank + 1] else 0
            pieces.append(MatrixPiece(matrix, Holders(rank, CPU), 0, tuple(pairwise(ends)), offset))
        return [flat[size * rank : size * (rank + 1)].clone()], pieces

    found, calls = run_threads(monkeypatch, of_rank)
    flat = torch.cat([tensors[0] for tensors in found])
    for start, whole in zip(starts, expected(), strict=True):
        torch.testing.assert_close(flat[start : start + whole.numel()].view(whole.shape), whole)
    assert calls == 4, "two matrices are cut, each larger than what is left of a bucket"


def test_copies_are_equal_and_take_one_collective_for_a_bucket(monkeypatch):
    def of_rank(rank):
        return wholes(), [MatrixPiece(matrix, Holders(rank, CPU), index) for index, matrix in enumerate(MATRICES)]

    found, calls = run_threads(monkeypatch, of_rank)
    for copies, whole in zip(zip(*found, strict=True), expected(), strict=True):
        assert torch.equal(copies[0], copies[1]) and torch.equal(copies[0], copies[2])
        torch.testing.assert_close(copies[0], whole)
    assert calls <= BUCKETS


def test_owners_have_about_equal_work():
    layer = [(4, 4)] * 4 + [(16, 4)] * 2 + [(4, 16)]
    pieces = [MatrixPiece(HiddenMatrix(shape), Holders(None, CPU), 0) for shape in layer * 6]
    work = [0] * 4
    for bucket in buckets_of(pieces, 4):
        for piece, owner in bucket:
            work[owner] += piece.elements * 4
    assert max(work) <= 1.1 * sum(work) / 4
