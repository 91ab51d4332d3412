"""Exchanges sharded matrices: an owner gathers each matrix, works on it, and sends it back.

A bucket's matrices are sent together, in one collective to the owners and one back. If every rank already has every
matrix, one collective is enough. The number of collectives depends on the update's size in bytes, not on its number of
matrices.
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
"""Number of elements in a bucket per participating rank. A larger matrix has its own bucket."""


@dataclass(frozen=True)
class Holders:
    """Ranks that hold the same matrices or parts of them. If there is no group, this rank is the only one."""

    group: dist.ProcessGroup | None
    device: torch.device
    """Device for computation and communication. The optimizer's tensors may be on a different device."""

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)


@dataclass(frozen=True)
class HiddenMatrix:
    """Shape and blocks of a matrix to update."""

    shape: tuple[int, int]
    blocks: tuple[int, ...] = ()
    """Sizes of blocks that are updated as separate matrices, such as q, k and v. () means a single matrix."""
    block_dim: int = 0
    """Dimension along which the blocks are concatenated."""
    alternates: bool = False
    """True if the blocks, which are equally large, are interleaved row by row along `block_dim`."""
    stacked: int = 1
    """Number of matrices stacked in the parameter, such as a layer's experts."""

    @property
    def elements(self) -> int:
        """Number of elements per matrix."""
        return self.shape[0] * self.shape[1]

    def split(self, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns views of the blocks in a tensor with this shape."""
        if self.alternates:
            views = whole.mT if self.block_dim else whole
            count = len(self.blocks)
            parts = [views[first::count] for first in range(count)]
            return tuple(part.mT if self.block_dim else part for part in parts)
        return whole.split(self.blocks, self.block_dim) if self.blocks else (whole,)


@dataclass(frozen=True)
class MatrixPiece:
    """This rank's piece of a matrix, in one of its optimizer's tensors."""

    matrix: HiddenMatrix
    holders: Holders
    tensor: int = 0
    """Index of the optimizer's tensor."""
    tiles: tuple[Tile, ...] = ()
    """Each rank's part.

    A one-dimensional tile refers to the flattened matrix. () means that every rank has the whole matrix.
    """
    offset: int = 0
    """Index of the piece's first element in the flattened tensor."""

    @property
    def elements(self) -> int:
        return self.matrix.elements

    @cached_property
    def counts(self) -> list[int]:
        """Number of elements on each rank."""
        return [math.prod(shape_of(tile)) for tile in self.tiles]

    @property
    def owner(self) -> int | None:
        """Rank with the whole matrix, if all parts are on one rank."""
        return next((rank for rank, count in enumerate(self.counts) if count == self.elements), None)

    @property
    def is_alone(self) -> bool:
        """True if a single rank updates the matrix without communication."""
        return self.holders.size == 1 or self.owner is not None

    @property
    def is_here(self) -> bool:
        """True if this rank holds any part of the matrix."""
        return not self.tiles or self.counts[self.holders.rank] > 0

    def part(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns this rank's elements in its tile's shape."""
        shape = shape_of(self.tiles[self.holders.rank]) if self.tiles else self.matrix.shape
        return tensors[self.tensor].view(-1).narrow(0, self.offset, math.prod(shape)).view(shape)

    def whole(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the whole matrix, if it is on this rank."""
        return self.part(tensors).view(self.matrix.shape)

    def places(self, rank: int, whole: torch.Tensor, part: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns (view of the whole matrix, view of a rank's flat part) for each of the rank's rectangles."""
        tile = self.tiles[rank]
        whole = whole.view(-1) if len(tile) == 1 else whole
        part = part.view(shape_of(tile))
        return [(whole[outside], part[inside]) for inside, outside in rectangles(tile)]


def pieces_of(
    matrix: HiddenMatrix, holders: Holders, tiles: tuple[Tile, ...] = (), held: int | None = None
) -> list[MatrixPiece]:
    """Returns a matrix's piece, or one piece for each matrix in a stack.

    Args:
        holders: the ranks with parts or replicas of the same matrices. They share the work.
        tiles: each holder's tile of a matrix. () means that every rank has the whole matrix.
        held: number of the stack's matrices with a part on this rank. None means all of them.
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
    """Replaces matrices with a function of them, in the tensors that contain their pieces.

    All of a group's ranks must call it, with the same pieces in the same order.

    Args:
        tensors: this rank's tensors with the pieces.
        dtype: returns the dtype for sending and computing on a device.
        replace_all: overwrites whole matrices with their results.
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
            is_split = [piece for piece, _ in bucket if piece.tiles]
            exchange = exchange_parts if is_split else exchange_results
            exchange(bucket, holders, tensors, dtype(holders.device), replace_all)


Bucket = list[tuple[MatrixPiece, int]]
"""Pieces, each with its owner's rank."""


def buckets_of(pieces: Sequence[MatrixPiece], processes: int) -> list[Bucket]:
    """Groups the pieces into buckets, and balances the owners' work within each bucket and in total."""
    work = [0] * processes
    buckets: list[Bucket] = []
    room = 0
    # Sharded and replicated matrices use different collectives, so we keep them apart. Largest first, with equal
    # shapes together.
    for piece in sorted(pieces, key=lambda piece: (bool(piece.tiles), -piece.elements, piece.matrix.shape)):
        owner = work.index(min(work))
        # Proportional to the FLOPs for the matmul X X^T.
        work[owner] += piece.elements * min(piece.matrix.shape)
        if not buckets or piece.elements > room or bool(buckets[-1][0][0].tiles) != bool(piece.tiles):
            buckets.append([])
            room = BUCKET_ELEMENTS * processes
        buckets[-1].append((piece, owner))
        room -= piece.elements
    return buckets


def gather_flat(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fills a flat tensor with equal parts from all ranks, in rank order. All ranks must call it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
    gather(whole, part, group=group)


def exchange_results(bucket: Bucket, holders: Holders, tensors, dtype: torch.dtype, replace_all) -> None:
    """Updates replicated matrices. All ranks receive the owners' results in one collective."""
    owned = [[piece for piece, owner in bucket if owner == rank] for rank in range(holders.size)]
    longest = max(sum(piece.elements for piece in theirs) for theirs in owned)
    gathered = torch.empty(holders.size, longest, dtype=dtype, device=holders.device)
    views = [
        consecutive_views(row, [piece.elements for piece in theirs])
        for row, theirs in zip(gathered, owned, strict=True)
    ]
    mine = owned[holders.rank]
    own_views = views[holders.rank]
    matrices = [view.view(piece.matrix.shape) for piece, view in zip(mine, own_views, strict=True)]
    copy_all(matrices, [piece.whole(tensors) for piece in mine])
    replace_all([(matrix, piece.matrix) for matrix, piece in zip(matrices, mine, strict=True)])
    # A collective must not read the memory that it writes, so we clone.
    gather_flat(gathered.view(-1), gathered[holders.rank].clone(), holders.group)
    for theirs, of_rank in zip(owned, views, strict=True):
        results = [view.view(piece.matrix.shape) for piece, view in zip(theirs, of_rank, strict=True)]
        copy_all([piece.whole(tensors) for piece in theirs], results)


def exchange_parts(bucket: Bucket, holders: Holders, tensors, dtype: torch.dtype, replace_all) -> None:
    """Updates sharded matrices, with one collective to the owners and one back."""
    processes = range(holders.size)
    owned = [[piece for piece, owner in bucket if owner == rank] for rank in processes]
    mine = owned[holders.rank]
    parts = [piece.part(tensors) for theirs in owned for piece in theirs]
    outgoing = [sum(part.numel() for part in of_rank) for of_rank in split_like(parts, owned)]
    incoming = [sum(piece.counts[rank] for piece in mine) for rank in processes]
    sent = torch.empty(sum(outgoing), dtype=dtype, device=holders.device)
    received = torch.empty(sum(incoming), dtype=dtype, device=holders.device)
    sent_parts = [
        view.view(part.shape)
        for view, part in zip(consecutive_views(sent, map(torch.numel, parts)), parts, strict=True)
    ]
    copy_all(sent_parts, parts)
    dist.all_to_all_single(received, sent, incoming, outgoing, group=holders.group)

    flat = consecutive_views(torch.empty_like(received), [piece.elements for piece in mine])
    wholes = [view.view(piece.matrix.shape) for view, piece in zip(flat, mine, strict=True)]
    # The collective delivers parts by rank, then by piece.
    arrived = iter(consecutive_views(received, [piece.counts[rank] for rank in processes for piece in mine]))
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
    # The results are sent back from the same memory, in the same layout.
    copy_all(received_parts, in_wholes)

    dist.all_to_all_single(sent, received, outgoing, incoming, group=holders.group)
    copy_all(parts, sent_parts)


def consecutive_views(flat: torch.Tensor, sizes) -> list[torch.Tensor]:
    """Returns consecutive views with these sizes, from the beginning of a flat tensor."""
    return [flat[first:end] for first, end in pairwise(accumulate(sizes, initial=0))]


def split_like(values: Sequence, groups: Sequence[Sequence]) -> list[Sequence]:
    """Splits the values into groups of the same lengths as `groups`."""
    return [values[first:end] for first, end in pairwise(accumulate(map(len, groups), initial=0))]


def copy_all(targets, sources) -> None:
    pairs = [(target, source) for target, source in zip(targets, sources, strict=True) if target.numel()]
    if pairs:
        torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))
