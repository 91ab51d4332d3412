"""Gathers each sharded matrix on one rank, updates it there, and sends the result back.

Matrices are grouped into buckets. Each bucket needs one collective to gather the matrices and one to return the
results. If the matrices are replicated, only the second is needed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from pretrain.optim.tiles import Tile, rectangles, shape_of

BUCKET_ELEMENTS = 2**24
"""Maximum number of elements per rank in a bucket. A larger matrix gets its own bucket."""


@dataclass(frozen=True)
class Holders:
    """Ranks with shards or replicas of the same matrices."""

    group: dist.ProcessGroup | None
    """Process group of these ranks. None for this rank alone."""
    device: torch.device
    """Device for computation and communication. The optimizer's tensors may be offloaded from it."""

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)


@dataclass(frozen=True)
class HiddenMatrix:
    """Shape of a hidden matrix and of its blocks, which are updated separately."""

    shape: tuple[int, int]
    blocks: tuple[int, ...] = ()
    """Block sizes, such as those of fused q, k and v. Empty if the matrix isn't split."""
    block_dim: int = 0
    """Dimension along which the blocks are concatenated."""
    alternates: bool = False
    """True if the blocks have equal sizes and are interleaved along `block_dim`."""
    stacked: int = 1
    """Number of matrices stacked in the parameter, such as a layer's experts."""

    @property
    def elements(self) -> int:
        """Number of elements in one matrix."""
        return self.shape[0] * self.shape[1]

    def split(self, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns views of a matrix's blocks."""
        if self.alternates:
            views = whole.mT if self.block_dim else whole
            count = len(self.blocks)
            parts = [views[first::count] for first in range(count)]
            return tuple(part.mT if self.block_dim else part for part in parts)
        return whole.split(self.blocks, self.block_dim) if self.blocks else (whole,)


@dataclass(frozen=True)
class MatrixPiece:
    """This rank's shard of a matrix."""

    matrix: HiddenMatrix
    holders: Holders
    tensor: int = 0
    """Index of the tensor that contains the shard."""
    tiles: tuple[Tile, ...] = ()
    """Each rank's tile. A 1D tile refers to the flattened matrix. Empty if the matrix is replicated."""
    offset: int = 0
    """Index of the shard's first element in the flattened tensor."""

    @property
    def elements(self) -> int:
        return self.matrix.elements

    @cached_property
    def counts(self) -> list[int]:
        """Number of elements on each rank."""
        return [math.prod(shape_of(tile)) for tile in self.tiles]

    @property
    def owner(self) -> int | None:
        """Rank that stores the whole matrix. None if the matrix is split across ranks or replicated."""
        return next((rank for rank, count in enumerate(self.counts) if count == self.elements), None)

    @property
    def is_alone(self) -> bool:
        """True if the update needs no communication."""
        return self.holders.size == 1 or self.owner is not None

    @property
    def is_here(self) -> bool:
        """True if this rank's shard isn't empty."""
        return not self.tiles or self.counts[self.holders.rank] > 0

    def part(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns a view of the shard, in its tile's shape."""
        shape = shape_of(self.tiles[self.holders.rank]) if self.tiles else self.matrix.shape
        return tensors[self.tensor].view(-1).narrow(0, self.offset, math.prod(shape)).view(shape)

    def whole(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns a view of the whole matrix, which must be on this rank."""
        return self.part(tensors).view(self.matrix.shape)

    def places(self, rank: int, whole: torch.Tensor, part: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns (view of the whole matrix, view of a rank's shard) for each rectangle in the rank's tile."""
        tile = self.tiles[rank]
        whole = whole.view(-1) if len(tile) == 1 else whole
        return [(whole[outside], part[inside]) for inside, outside in rectangles(tile)]


def pieces_of(
    matrix: HiddenMatrix, holders: Holders, tiles: tuple[Tile, ...] = (), held: int | None = None
) -> list[MatrixPiece]:
    """Returns this rank's shards, one for each matrix in the parameter.

    Args:
        tiles: each rank's tile of a matrix. Empty if the matrix is replicated.
        held: number of stacked matrices on this rank. None for all.
    """
    one = replace(matrix, stacked=1)
    elements = math.prod(shape_of(tiles[holders.rank])) if tiles else matrix.elements
    count = matrix.stacked if held is None else held
    return [MatrixPiece(one, holders, tiles=tiles, offset=index * elements) for index in range(count)]


def replace_whole_matrices(
    pieces: Sequence[MatrixPiece],
    tensors: Sequence[torch.Tensor],
    dtype: Callable[[torch.device], torch.dtype],
    replace_all: Callable[[list[tuple[torch.Tensor, HiddenMatrix]]], None],
) -> None:
    """Updates matrices in place with a function that needs whole matrices.

    A collective call. All ranks must pass the same pieces in the same order.

    Args:
        tensors: this rank's tensors, which contain the shards.
        dtype: returns the dtype for communication and computation on a device.
        replace_all: updates whole matrices in place.
    """
    shared: dict[Holders, list[MatrixPiece]] = {}
    here = []
    for piece in pieces:
        if not piece.is_alone:
            shared.setdefault(piece.holders, []).append(piece)
        elif piece.owner in (None, piece.holders.rank):
            whole = piece.whole(tensors)
            device = piece.holders.device
            if whole.device.type == device.type:
                here.append((whole, piece.matrix))
            else:  # offloaded
                moved = whole.to(device, dtype(device))
                replace_all([(moved, piece.matrix)])
                whole.copy_(moved)
    replace_all(here)
    for holders, theirs in shared.items():
        for bucket in buckets_of(theirs, holders.size):
            is_split = any(piece.tiles for owned in bucket for piece in owned)
            exchange = exchange_parts if is_split else exchange_results
            exchange(bucket, holders, tensors, dtype(holders.device), replace_all)


Bucket = list[list[MatrixPiece]]
"""Pieces that each rank updates."""


def buckets_of(pieces: Sequence[MatrixPiece], processes: int) -> list[Bucket]:
    """Groups pieces into buckets and assigns each piece to a rank, balancing the work."""
    work = [0] * processes
    buckets: list[Bucket] = []
    room = 0
    is_split = None
    # Sharded and replicated matrices need different collectives, so they go in different buckets.
    for piece in sorted(pieces, key=lambda piece: (bool(piece.tiles), -piece.elements, piece.matrix.shape)):
        owner = work.index(min(work))
        # Proportional to the FLOPs of X X^T.
        work[owner] += piece.elements * min(piece.matrix.shape)
        if piece.elements > room or is_split != bool(piece.tiles):
            buckets.append([[] for _ in range(processes)])
            room = BUCKET_ELEMENTS * processes
            is_split = bool(piece.tiles)
        buckets[-1][owner].append(piece)
        room -= piece.elements
    return buckets


def gather_flat(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """All-gathers flat tensors of equal size."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    gather(whole, part, group=group)


def exchange_results(owned: Bucket, holders: Holders, tensors, dtype: torch.dtype, replace_all) -> None:
    """Updates replicated matrices, each on one rank, and all-gathers the results."""
    longest = max(sum(piece.elements for piece in theirs) for theirs in owned)
    gathered = torch.empty(holders.size, longest, dtype=dtype, device=holders.device)
    views = [
        consecutive_views(row, [piece.matrix.shape for piece in theirs])
        for row, theirs in zip(gathered, owned, strict=True)
    ]
    mine = owned[holders.rank]
    matrices = views[holders.rank]
    copy_all(matrices, [piece.whole(tensors) for piece in mine])
    replace_all([(matrix, piece.matrix) for matrix, piece in zip(matrices, mine, strict=True)])
    # Cloned, because the collective's input and output must not overlap.
    gather_flat(gathered.view(-1), gathered[holders.rank].clone(), holders.group)
    for theirs, results in zip(owned, views, strict=True):
        copy_all([piece.whole(tensors) for piece in theirs], results)


def exchange_parts(owned: Bucket, holders: Holders, tensors, dtype: torch.dtype, replace_all) -> None:
    """Updates sharded matrices, each on one rank, with one all-to-all before the update and one after it."""
    processes = range(holders.size)
    mine = owned[holders.rank]
    parts = [piece.part(tensors) for theirs in owned for piece in theirs]
    outgoing = [sum(piece.counts[holders.rank] for piece in theirs) for theirs in owned]
    incoming = [sum(piece.counts[rank] for piece in mine) for rank in processes]
    sent = torch.empty(sum(outgoing), dtype=dtype, device=holders.device)
    received = torch.empty(sum(incoming), dtype=dtype, device=holders.device)
    sent_parts = consecutive_views(sent, [part.shape for part in parts])
    copy_all(sent_parts, parts)
    dist.all_to_all_single(received, sent, incoming, outgoing, group=holders.group)

    wholes = consecutive_views(torch.empty_like(received), [piece.matrix.shape for piece in mine])
    # all_to_all_single orders the received shards by rank.
    shapes = [shape_of(piece.tiles[rank]) for rank in processes for piece in mine]
    arrived = iter(consecutive_views(received, shapes))
    places = [
        pair
        for rank in processes
        for piece, whole in zip(mine, wholes, strict=True)
        for pair in piece.places(rank, whole, next(arrived))
    ]
    in_wholes = [place for place, _ in places]
    received_parts = [part for _, part in places]
    copy_all(in_wholes, received_parts)
    replace_all([(whole, piece.matrix) for whole, piece in zip(wholes, mine, strict=True)])
    # The results are sent back in the same layout.
    copy_all(received_parts, in_wholes)

    dist.all_to_all_single(sent, received, outgoing, incoming, group=holders.group)
    copy_all(parts, sent_parts)


def consecutive_views(flat: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Returns views of a flat tensor with these shapes, one after another."""
    ends = accumulate(map(math.prod, shapes), initial=0)
    return [flat[first:end].view(shape) for (first, end), shape in zip(pairwise(ends), shapes, strict=True)]


def copy_all(targets, sources) -> None:
    pairs = [(target, source) for target, source in zip(targets, sources, strict=True) if target.numel()]
    if pairs:
        torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))
