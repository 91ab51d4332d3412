"""Threads that replace communicating processes, because they start faster."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

PROCESSES = 3


class Threads:
    """torch.distributed for threads, which use their rank as the group. Counts the collectives of rank 0."""

    def __init__(self):
        self.barrier, self.sent, self.calls = threading.Barrier(PROCESSES, timeout=20), [None] * PROCESSES, 0

    def run(self, function: Callable[[int], Any]) -> list:
        """Runs the function on each rank and returns the results."""
        with ThreadPoolExecutor(PROCESSES) as pool:
            return list(pool.map(function, range(PROCESSES)))

    def get_world_size(self, group):
        return PROCESSES

    def get_rank(self, group):
        return group

    def swap(self, rank: int, value: Any) -> list:
        """Exchanges values between all ranks and returns them."""
        self.calls += rank == 0
        self.sent[rank] = value
        self.barrier.wait()
        values = list(self.sent)
        self.barrier.wait()
        return values

    def all_reduce(self, tensor, group):
        tensor.copy_(sum(self.swap(group, tensor.clone())))

    def all_gather_single(self, output, sent, group):
        output.copy_(torch.cat(self.swap(group, sent.clone())))

    def all_to_all_single(self, received, sent, incoming, outgoing, group):
        of_rank = self.swap(group, sent.clone().split(outgoing))
        parts = [parts[group] for parts in of_rank]
        assert [part.numel() for part in parts] == incoming
        received.copy_(torch.cat(parts))


def edges_of_chunks(size: int) -> list[int]:
    """Returns the shard boundaries of a dimension split with torch.chunk. The last shards can be small or
    empty."""
    share = -(-size // PROCESSES)
    return [min(size, share * rank) for rank in range(PROCESSES + 1)]


def flat_layout(elements: list[int]) -> tuple[int, list[int], list[list[int]]]:
    """Returns (partition size, start of each tensor in the flat tensor, partition boundaries within each tensor).

    Tensors are separated by one element of padding.
    """
    starts = [sum(elements[:index]) + index for index in range(len(elements))]
    size = -(-(sum(elements) + len(elements)) // PROCESSES)
    edges = [
        [min(max(size * edge - start, 0), count) for edge in range(PROCESSES + 1)]
        for start, count in zip(starts, elements, strict=True)
    ]
    return size, starts, edges
