"""Compares weight replicas across ranks bit by bit.

Replicas get the same updates, and nothing else compares them. A flipped bit, a broken link or a GPU kernel with a
different summation order would go unnoticed until it affects the loss. We compare an integer digest of each tensor,
which changes if any single bit changes. torch.hash_tensor XORs the elements, so it would miss swapped elements, or the
same bit flip in two elements.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

ReplicaGroup = tuple[dist.ProcessGroup | None, dict[str, Tensor]]
"""(process group, or None for all ranks; {name: tensor} on this rank). All ranks must have equal tensors."""

CHUNK = 2**22
"""Number of elements to digest at a time. The weights and the weighted elements take up to 32 MB each."""
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""{bytes per element: integer dtype with the same width}"""


def replica_differences(groups: Sequence[ReplicaGroup], device: torch.device) -> list[str]:
    """Returns one line per difference between replicas. The result is the same on all ranks.

    Waits for the device. All ranks must call it, each with its own groups (see `Strategy.replicas`).

    Args:
        device: the strategy's device, used to exchange digests.
    """
    found: list[str] = []
    for group, tensors in groups:
        if tensors and dist.get_world_size(group) > 1:
            digests = digest_tensors(list(tensors.values()), device)
            of_rank = [torch.empty_like(digests) for _ in range(dist.get_world_size(group))]
            dist.all_gather(of_rank, digests, group=group)
            found += compare(list(tensors), torch.stack(of_rank).cpu(), dist.get_process_group_ranks(group))
    if not dist.is_initialized():
        return found
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, found)
    return list(dict.fromkeys(line for lines in everywhere for line in lines))


def digest_tensors(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns a 64-bit digest of each tensor's bits, as int64 of shape (tensors,) on `device`."""
    # Random weights prevent changes in several elements from canceling out. Odd weights prevent a single change from
    # vanishing modulo 2^64.
    longest = min(CHUNK, max(tensor.numel() for tensor in tensors))
    generator = torch.Generator().manual_seed(0)
    weights = (torch.randint(-(2**63), 2**63 - 1, (longest,), generator=generator) | 1).to(device)
    return torch.stack([digest(tensor, weights) for tensor in tensors])


@torch.no_grad()
def digest(tensor: Tensor, weights: Tensor) -> Tensor:
    """Sums the elements' bit patterns, weighted by position, modulo 2^64. Integer sums don't depend on the order.

    Offloaded tensors are copied to the weights' device, one chunk at a time.
    """
    bits = tensor.detach().contiguous().view(-1).view(INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=weights.device)
    for chunk in bits.split(CHUNK):
        total = total * 1_000_003 + (chunk.to(weights.device) * weights[: chunk.numel()]).sum()
    return total


def compare(names: Sequence[str], digests: Tensor, ranks: Sequence[int]) -> list[str]:
    """Returns one line per differing tensor. It lists the ranks outside the majority, or all ranks if there is none.

    Args:
        digests: int64 of shape (ranks, tensors).
        ranks: global rank of each row.
    """
    lines = []
    for column in (digests != digests[0]).any(dim=0).nonzero().flatten().tolist():
        values, counts = digests[:, column].unique(return_counts=True)
        majority = values[counts.argmax()] if counts.max() > len(ranks) / 2 else None
        odd = [str(rank) for rank, value in zip(ranks, digests[:, column], strict=True) if value != majority]
        lines.append(f"{names[column]}: different on {len(odd)} of {len(ranks)} ranks: {', '.join(odd)}")
    return lines
