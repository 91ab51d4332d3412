"""Exchange of matrices that are sharded over ranks: an owner gathers each one, works on it, and sends it back.

The matrices of a bucket travel together: one collective to the owners and one back, or only one if every rank has
every matrix already. So the number of collectives depends on an update's bytes, not on its number of matrices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

BUCKET_ELEMENTS = 2**24
"""Elements in a bucket for each rank that shares it; a larger matrix has a bucket of its own."""


@dataclass(frozen=True)
class Holders:
    """Ranks that hold the same matrices, or parts of them; without a group only this rank."""

    group: dist.ProcessGroup | None
    device: torch.device
    """Device on which they compute and communicate, wherever the optimizer's tensors are."""

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)


@dataclass(frozen=True)
class HiddenMatrix:
    """A matrix as its update sees it."""

    shape: tuple[int, int]
    blocks: tuple[int, ...] = ()
    """Sizes of the blocks that are updated as separate matrices, such as q, k and v; (): it is one matrix."""
    block_dim: int = 0
    """Dimension along which the blocks are concatenated."""
    alternates: bool = False
    """True if the blocks, all of one size, are interleaved row by row along `block_dim`."""
    stacked: int = 1
    """Number of such matrices stacked in the parameter: a layer's experts."""

    @property
    def elements(self) -> int:
        """Number of elements of one such matrix."""
        return self.shape[0] * self.shape[1]

    def split(self, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns views of the blocks of a tensor of this shape."""
        if self.alternates:
            views = whole.mT if self.block_dim else whole
            count = len(self.blocks)
            parts = [views[first::count] for first in range(count)]
            return tuple(part.mT if self.block_dim else part for part in parts)
        return whole.split(self.blocks, self.block_dim) if self.blocks else (whole,)


@dataclass(frozen=True)
class MatrixPiece:
    """Piece of a matrix that this rank holds, in one of the tensors that its optimizer updates."""

    matrix: HiddenMatrix
    holders: Holders
    tensor: int
    """Index of that tensor."""
    ranges: tuple[tuple[int, int], ...] = ()
    """(first element, end) of each rank's piece of the flat matrix; (): every rank has all of it."""
    offset: int | None = None
    """Index of the piece's first element in the flat tensor; None: the tensor is the piece."""
    is_transposed: bool = False
    """True if the ranges are of the transposed matrix."""

    @property
    def elements(self) -> int:
        return self.matrix.elements

    @property
    def owner(self) -> int | None:
        """Rank that has all of it, if only one has any."""
        return next((rank for rank, (first, end) in enumerate(self.ranges) if end - first == self.elements), None)

    @property
    def is_alone(self) -> bool:
        """True if a single rank updates it without communication."""
        return self.holders.size == 1 or self.owner is not None

    @property
    def is_here(self) -> bool:
        """True if this rank has any of it."""
        return not self.ranges or self.counts()[self.holders.rank] > 0

    def counts(self) -> list[int]:
        """Returns the number of elements on each rank."""
        return [end - first for first, end in self.ranges]

    def part(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns this rank's elements, in the order of the ranges."""
        part = tensors[self.tensor]
        if self.offset is not None:
            part = part.view(-1).narrow(
                0, self.offset, self.counts()[self.holders.rank] if self.ranges else self.elements
            )
        return part.mT if self.is_transposed else part

    def whole(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the matrix, if all of it is on this rank."""
        return tensors[self.tensor] if self.offset is None else self.part(tensors).view(self.matrix.shape)

    def as_matrix(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns a view, as the matrix, of all its elements in the order of the ranges."""
        return flat.view(self.matrix.shape[::-1]).mT if self.is_transposed else flat.view(self.matrix.shape)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a tensor, as a plain tensor with the same storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def pieces_of(parameter: torch.Tensor, matrix: HiddenMatrix, tensor: int, copies: Holders | None) -> list[MatrixPiece]:
    """Returns the pieces of a parameter that is a matrix or a stack, whole or sharded along one dimension (DTensor).

    copies: the ranks that hold replicas of the whole parameter and share the work of its update.
    """
    holders = copies or Holders(None, parameter.device)
    dim = None
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        placements = parameter.placements
        divided = [(axis, placement) for axis, placement in enumerate(placements) if mesh.size(axis) > 1]
        # Not is_shard(), which is False for a shard of a dimension that another axis has divided already.
        sharded = [(axis, placement.dim) for axis, placement in divided if not placement.is_replicate()]
        holders = Holders(None, torch.device(mesh.device_type))
        if sharded:
            ((axis, dim),) = sharded
            holders = replace(holders, group=mesh.get_group(axis))
        elif divided:  # replicas, which share the work
            holders = replace(holders, group=mesh.get_group(divided[0][0]))
    if matrix.stacked > 1:
        return stacked_pieces(matrix, holders, tensor, dim)
    if dim is None:
        return [MatrixPiece(matrix, holders, tensor)]
    rows, columns = matrix.shape if dim == 0 else matrix.shape[::-1]
    share = -(-rows // holders.size)  # as torch.chunk divides
    ends = [columns * min(rows, share * rank) for rank in range(holders.size + 1)]
    return [MatrixPiece(matrix, holders, tensor, tuple(pairwise(ends)), is_transposed=dim == 1)]


def stacked_pieces(matrix: HiddenMatrix, holders: Holders, tensor: int, dim: int | None) -> list[MatrixPiece]:
    """Returns a piece per matrix of a stack; each is whole on every rank or, sharded along `dim` 0, on one of them."""
    if dim not in (None, 0):
        raise ValueError(f"stacked matrices are sharded between them, not along their dimension {dim}")
    one = replace(matrix, stacked=1)
    elements = matrix.elements
    if dim is None:
        return [MatrixPiece(one, holders, tensor, offset=index * elements) for index in range(matrix.stacked)]
    share = -(-matrix.stacked // holders.size)  # as torch.chunk divides
    pieces = []
    for index in range(matrix.stacked):
        owner, place = divmod(index, share)
        ranges = tuple((0, elements if rank == owner else 0) for rank in range(holders.size))
        offset = place * elements if owner == holders.rank else 0
        pieces.append(MatrixPiece(one, holders, tensor, ranges, offset))
    return pieces


def replace_whole_matrices(
    pieces: Sequence[MatrixPiece],
    tensors: Sequence[torch.Tensor],
    dtype: Callable[[torch.device], torch.dtype],
    replace_all: Callable[[list[tuple[torch.Tensor, HiddenMatrix]]], None],
) -> None:
    """Replaces matrices by a function of them, in the tensors that hold their pieces.

    A collective call: all ranks of a group must make it, with the same pieces in the same order.

    Args:
        tensors: this rank's tensors, which hold the pieces.
        dtype: dtype in which matrices are sent and worked on, by device.
        replace_all: overwrites each of some whole matrices with its result.
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
            is_split = [piece for piece, _ in bucket if piece.ranges]
            exchange = exchange_parts if is_split else exchange_results
            exchange(bucket, holders, tensors, dtype(holders.device), replace_all)


Bucket = list[tuple[MatrixPiece, int]]
"""Pieces, each with the rank of its owner."""


def buckets_of(pieces: Sequence[MatrixPiece], processes: int) -> list[Bucket]:
    """Groups the pieces into buckets and balances the owners' work, in each bucket as well as in total."""
    work = [0] * processes
    buckets: list[Bucket] = []
    room = 0
    # Sharded and replicated matrices apart, since they use different collectives. Largest first, equal shapes
    # together.
    for piece in sorted(pieces, key=lambda piece: (bool(piece.ranges), -piece.elements, piece.matrix.shape)):
        owner = work.index(min(work))
        # Proportional to the operations of the matmul X X^T.
        work[owner] += piece.elements * min(piece.matrix.shape)
        if not buckets or piece.elements > room or bool(buckets[-1][0][0].ranges) != bool(piece.ranges):
            buckets.append([])
            room = BUCKET_ELEMENTS * processes
        buckets[-1].append((piece, owner))
        room -= piece.elements
    return buckets


def exchange_results(bucket: Bucket, holders: Holders, tensors, dtype: torch.dtype, replace_all) -> None:
    """Updates replicated matrices: all ranks get their owners' results in one collective."""
    owned = [[piece for piece, owner in bucket if owner == rank] for rank in range(holders.size)]
    longest = max(sum(piece.elements for piece in theirs) for theirs in owned)
    gathered = torch.empty(holders.size, longest, dtype=dtype, device=holders.device)
    views = [
        consecutive_views(row, [piece.elements for piece in theirs])
        for row, theirs in zip(gathered, owned, strict=True)
    ]
    mine = owned[holders.rank]
    own_views = views[holders.rank]
    matrices = [piece.as_matrix(view) for piece, view in zip(mine, own_views, strict=True)]
    copy_all(matrices, [piece.whole(tensors) for piece in mine])
    replace_all([(matrix, piece.matrix) for matrix, piece in zip(matrices, mine, strict=True)])
    # Cloned: a collective must not read the memory that it writes.
    dist.all_gather_single(gathered.view(-1), gathered[holders.rank].clone(), group=holders.group)
    for theirs, of_rank in zip(owned, views, strict=True):
        copy_all([piece.whole(tensors) for piece in theirs], map(MatrixPiece.as_matrix, theirs, of_rank))


def exchange_parts(bucket: Bucket, holders: Holders, tensors, dtype: torch.dtype, replace_all) -> None:
    """Updates sharded matrices: all parts go to the owners, and the results back, in one collective each."""
    me = holders.rank
    processes = range(holders.size)
    owned = [[piece for piece, owner in bucket if owner == rank] for rank in processes]
    mine = owned[me]
    parts = [piece.part(tensors) for theirs in owned for piece in theirs]
    outgoing = [sum(part.numel() for part in of_rank) for of_rank in split_like(parts, owned)]
    incoming = [sum(piece.counts()[rank] for piece in mine) for rank in processes]
    sent = torch.empty(sum(outgoing), dtype=dtype, device=holders.device)
    received = torch.empty(sum(incoming), dtype=dtype, device=holders.device)
    sent_parts = [
        view.view(part.shape)
        for view, part in zip(consecutive_views(sent, map(torch.numel, parts)), parts, strict=True)
    ]
    copy_all(sent_parts, parts)
    dist.all_to_all_single(received, sent, incoming, outgoing, group=holders.group)

    wholes = consecutive_views(torch.empty_like(received), [piece.elements for piece in mine])
    # By rank, then by piece: the order in which the collective delivers them.
    received_parts = consecutive_views(received, [piece.counts()[rank] for rank in processes for piece in mine])
    places = [
        whole[slice(*piece.ranges[rank])] for rank in processes for piece, whole in zip(mine, wholes, strict=True)
    ]
    copy_all(places, received_parts)
    replace_all([(piece.as_matrix(whole), piece.matrix) for piece, whole in zip(mine, wholes, strict=True)])
    # The results go back in the memory in which the parts came: the same layout, sent the other way.
    copy_all(received_parts, places)

    dist.all_to_all_single(sent, received, outgoing, incoming, group=holders.group)
    copy_all(parts, sent_parts)


def consecutive_views(flat: torch.Tensor, sizes) -> list[torch.Tensor]:
    """Returns consecutive views of the beginning of a flat tensor, in these sizes."""
    return [flat[first:end] for first, end in pairwise(accumulate(sizes, initial=0))]


def split_like(values: Sequence, groups: Sequence[Sequence]) -> list[Sequence]:
    """Groups the values into the same lengths as the groups."""
    return [values[first:end] for first, end in pairwise(accumulate(map(len, groups), initial=0))]


def copy_all(targets, sources) -> None:
    pairs = [(target, source) for target, source in zip(targets, sources, strict=True) if target.numel()]
    if pairs:
        torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))
