"""Adafactor of parameters that are divided is that of whole ones. Threads play the processes."""

import pytest
import torch
from torch import nn

from pretrain.optim import adafactor, matrix_exchange
from pretrain.optim.adafactor import Adafactor, ParameterPart
from pretrain.optim.matrix_exchange import Holders
from support.threads_as_processes import PROCESSES, Threads, edges_of_chunks, flat_layout

CPU = torch.device("cpu")
SHAPES = [(7, 5), (4, 6), (5,), (2, 4, 3), (9, 2), (1,), ()]
STEPS = 3


def values(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def train(optimizer, parameters, gradients_of):
    for step in range(STEPS):
        for parameter, gradient in zip(parameters, gradients_of(values(10 + step)), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


@pytest.fixture
def expected():
    """(parameters, state) after some steps on one process."""
    parameters = [nn.Parameter(value) for value in values(1)]
    optimizer = Adafactor(parameters, lr=0.1, weight_decay=0.2)
    train(optimizer, parameters, list)
    return [p.detach() for p in parameters], [optimizer.state[p] for p in parameters]


def test_each_matrix_of_a_stack_is_updated_as_it_would_be_alone():
    """Gradients of other sizes: clipped together, the update of one would scale those of the others."""
    generator = torch.Generator().manual_seed(0)
    weights, spikes = torch.randn(3, 4, 5, generator=generator), torch.tensor([1.0, 50.0, 1e-3])
    stack, alone = nn.Parameter(weights.clone()), [nn.Parameter(matrix.clone()) for matrix in weights]
    optimizers = [Adafactor([stack], lr=0.1, weight_decay=0.2), Adafactor(alone, lr=0.1, weight_decay=0.2)]
    for step in range(STEPS):
        sizes = spikes if step else torch.ones(3)
        stack.grad = torch.randn(3, 4, 5, generator=generator) * sizes[:, None, None]
        for parameter, own in zip(alone, stack.grad.clone(), strict=True):
            parameter.grad = own
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(stack.detach(), torch.stack([parameter.detach() for parameter in alone]))


@pytest.fixture
def threads(monkeypatch):
    threads = Threads()
    for module in (adafactor, matrix_exchange):
        monkeypatch.setattr(module, "dist", threads)
    return threads


def compare_state(found, expected):
    for of_rank in found:
        for state, whole in zip(of_rank, expected, strict=True):
            assert state.keys() == whole.keys()
            assert all(torch.allclose(state[key], whole[key], rtol=1e-5, atol=0) for key in whole)


@pytest.mark.parametrize("dim", [0, 1])
def test_slices(threads, expected, monkeypatch, dim):
    """Of rows or columns, where there are two dimensions or more; the rest is divided along its only one, or whole."""

    def cut(rank, whole):
        along = min(dim, whole.dim() - 1)
        if whole.dim() == 0:
            return whole, along, 0
        edges = edges_of_chunks(whole.size(along))
        return whole.narrow(along, edges[rank], edges[rank + 1] - edges[rank]), along, edges[rank]

    def run(rank):
        wholes = values(1)
        parameters = [nn.Parameter(cut(rank, whole)[0].clone()) for whole in wholes]
        optimizer = Adafactor(parameters, lr=0.1, weight_decay=0.2)
        for parameter, whole in zip(parameters, wholes, strict=True):
            _, along, start = cut(rank, whole)
            holders = Holders(rank, CPU) if whole.dim() else None
            optimizer.placed[parameter] = [ParameterPart(parameter, tuple(whole.shape), holders, along, start)]
        train(optimizer, parameters, lambda wholes: [cut(rank, whole)[0] for whole in wholes])
        return [p.detach() for p in parameters], [optimizer.state[p] for p in parameters]

    found = threads.run(run)
    for whole, *slices in zip(expected[0], *(parameters for parameters, _ in found), strict=True):
        together = torch.cat(slices, min(dim, whole.dim() - 1)) if whole.dim() else slices[0]
        torch.testing.assert_close(together, whole)
    compare_state([state for _, state in found], expected[1])
    assert threads.calls == 2 * STEPS, "two sums for all parameters"


def test_flat_partitions_that_cut_anywhere(threads, expected):
    size, starts, edges = flat_layout([value.numel() for value in values(0)])

    def partition(rank, wholes):
        flat = torch.zeros(PROCESSES * size)
        for whole, start in zip(wholes, starts, strict=True):
            flat[start : start + whole.numel()] = whole.flatten()
        return flat[size * rank : size * (rank + 1)].clone()

    def run(rank):
        flat = nn.Parameter(partition(rank, values(1)))
        optimizer = Adafactor([flat], lr=0.1, weight_decay=0.2)
        keys = [torch.empty(0) for _ in SHAPES]  # stand for the parameters of the model
        for key, shape, start, ends in zip(keys, SHAPES, starts, edges, strict=True):
            first, end = ends[rank], ends[rank + 1]
            offset = max(0, start - size * rank) if first < end else 0
            part = ParameterPart(key, shape, Holders(rank, CPU), 0, first if first < end else 0, offset, end - first)
            optimizer.placed.setdefault(flat, []).append(part)
        train(optimizer, [flat], lambda wholes: [partition(rank, wholes)])
        return flat.detach(), [optimizer.state[key] for key in keys]

    found = threads.run(run)
    flat = torch.cat([flat for flat, _ in found])
    for whole, start in zip(expected[0], starts, strict=True):
        torch.testing.assert_close(flat[start : start + whole.numel()].view(whole.shape), whole)
    compare_state([state for _, state in found], expected[1])
    assert threads.calls == 2 * STEPS
