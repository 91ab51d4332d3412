"""Adafactor must update sharded parameters in the same way as unsharded ones. Processes are simulated with threads."""

import pytest
import torch
from torch import nn

from pretrain.optim import adafactor, matrix_exchange
from pretrain.optim.adafactor import Adafactor, ParameterPart, round_stochastically
from pretrain.optim.matrix_exchange import Holders
from pretrain.optim.tiles import take, whole_tile
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
    """Returns (parameters, state) after some steps on one process."""
    parameters = [nn.Parameter(value) for value in values(1)]
    optimizer = Adafactor(parameters, lr=0.1, weight_decay=0.2)
    train(optimizer, parameters, list)
    return [p.detach() for p in parameters], [optimizer.state[p] for p in parameters]


def test_each_matrix_of_a_stack_is_updated_separately():
    """If the matrices were clipped together, a large gradient in one would scale down the updates of the others."""
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


def tile_of(rank, shape, kind):
    """Returns a rank's tile of a parameter. `kind` is the sharded dimension (limited to the last one) or "two
    dimensions"."""
    tile = [((0, size),) for size in shape]
    if not shape:
        return ()
    if kind == "two dimensions" and len(shape) > 1:
        # The first rank has the upper rows, and the others share the columns of the lower rows.
        (_, rows), (_, columns) = tile[-2][0], tile[-1][0]
        tile[-2] = ((0, rows // 2),) if rank == 0 else ((rows // 2, rows),)
        tile[-1] = (tile[-1], ((0, columns // 2),), ((columns // 2, columns),))[rank]
        return tuple(tile)
    dim = min(kind if kind != "two dimensions" else 0, len(shape) - 1)
    first, end = edges_of_chunks(shape[dim])[rank : rank + 2]
    tile[dim] = ((first, end),) if first < end else ()
    return tuple(tile)


@pytest.mark.parametrize("kind", [0, 1, "two dimensions"])
def test_tiles(threads, expected, kind):
    """Parameters with one dimension are sharded along it, and scalars are replicated."""

    def run(rank):
        wholes = values(1)
        tiles = [tile_of(rank, shape, kind) for shape in SHAPES]
        parameters = [nn.Parameter(take(whole, tile).clone()) for whole, tile in zip(wholes, tiles, strict=True)]
        optimizer = Adafactor(parameters, lr=0.1, weight_decay=0.2)
        for parameter, shape, tile in zip(parameters, SHAPES, tiles, strict=True):
            part = ParameterPart(parameter, shape, Holders(rank, CPU) if shape else None, tile or None)
            optimizer.placed[parameter] = [part]
        train(optimizer, parameters, lambda wholes: list(map(take, wholes, tiles)))
        return [p.detach() for p in parameters], [optimizer.state[p] for p in parameters]

    found = threads.run(run)
    for index, whole in enumerate(expected[0]):
        for rank, (parameters, _) in enumerate(found):
            torch.testing.assert_close(parameters[index], take(whole, tile_of(rank, SHAPES[index], kind)))
    compare_state([state for _, state in found], expected[1])
    assert threads.calls == 2 * STEPS, "a step needs two all-reduces for all parameters"


@pytest.mark.parametrize("shape", [(40, 30), (8, 10, 6), (50,)])
def test_random_rounding_does_not_depend_on_sharding(monkeypatch, shape):
    monkeypatch.setattr(adafactor, "DRAWN_TOGETHER", 64)
    generator = torch.Generator().manual_seed(0)
    whole, step = torch.randn(shape, generator=generator), torch.tensor(3.0)
    rounded = round_stochastically(whole, 7, step)
    nearest = whole.to(torch.bfloat16)
    assert not torch.equal(rounded, nearest)
    for kind in (0, 1, "two dimensions"):
        for rank in range(PROCESSES):
            tile = tile_of(rank, shape, kind)
            assert torch.equal(round_stochastically(take(whole, tile), 7, step, tile, shape), take(rounded, tile))
    both = (*whole_tile(shape[:-1]), ((0, 2), (shape[-1] - 2, shape[-1])))
    assert torch.equal(round_stochastically(take(whole, both), 7, step, both, shape), take(rounded, both))


def test_flat_partitions_with_arbitrary_boundaries(threads, expected):
    size, starts, edges = flat_layout([value.numel() for value in values(0)])

    def partition(rank, wholes):
        flat = torch.zeros(PROCESSES * size)
        for whole, start in zip(wholes, starts, strict=True):
            flat[start : start + whole.numel()] = whole.flatten()
        return flat[size * rank : size * (rank + 1)].clone()

    def run(rank):
        flat = nn.Parameter(partition(rank, values(1)))
        optimizer = Adafactor([flat], lr=0.1, weight_decay=0.2)
        keys = [torch.empty(0) for _ in SHAPES]  # stand-ins for the model's parameters
        for key, shape, start, ends in zip(keys, SHAPES, starts, edges, strict=True):
            first, end = ends[rank], ends[rank + 1]
            offset = max(0, start - size * rank) if first < end else 0
            start = first if first < end else 0
            part = ParameterPart.flat(key, shape, Holders(rank, CPU), start, offset, end - first)
            optimizer.placed.setdefault(flat, []).append(part)
        train(optimizer, [flat], lambda wholes: [partition(rank, wholes)])
        return flat.detach(), [optimizer.state[key] for key in keys]

    found = threads.run(run)
    flat = torch.cat([flat for flat, _ in found])
    for whole, start in zip(expected[0], starts, strict=True):
        torch.testing.assert_close(flat[start : start + whole.numel()].view(whole.shape), whole)
    compare_state([state for _, state in found], expected[1])
    assert threads.calls == 2 * STEPS
