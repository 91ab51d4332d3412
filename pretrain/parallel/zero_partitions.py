"""Locates parameters in DeepSpeed's flat tensors; reads and writes ZeRO-3's optimizer state by parameter.

The state may be on the device, in CPU memory or on disk. DeepSpeed's own functions for this read a whole sub-group of
parameters, up to 12 GB, from disk for each tensor. Here a sub-group stays in memory until a tensor of another one is
needed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from pretrain.optim.adafactor import ParameterPart
from pretrain.optim.matrix_exchange import HiddenMatrix, Holders, MatrixPiece

Place = tuple[torch.Tensor, torch.Tensor, int, tuple[tuple[int, int], ...]]
"""(parameter, flat tensor, offset of this rank's part in it, (first, end) element of each rank's part)."""


class Partitions:
    """This rank's shards of the fp32 master weights and of AdamW's moments.

    Uses private names of DeepSpeed, since there is no public way to swap sub-groups or to gather partitions.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        """DeepSpeed's optimizer of stage 3."""
        self._present: int | None = None
        """Sub-group that was read from disk."""
        self._changed = False

    def bring_in(self, group: int) -> None:
        """Reads a sub-group from disk, unless it is in memory; the previous one is written back first."""
        if group != self._present and self._optimizer._swappable_optimizer_subgroup(group):
            self.release()
            self._optimizer._optimizer_states_and_gradient_swap_in(group)
            self._present = group

    def release(self) -> None:
        """Frees the sub-group before training continues: DeepSpeed needs the memory, and reads its state from disk."""
        if self._present is None:
            return
        if self._changed:
            self._optimizer._optimizer_states_and_gradient_swap_out(self._present)
        else:
            self._optimizer._release_swap_buffers(self._present)
        self._present = None
        self._changed = False

    def create_state(self, state_of: Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]) -> None:
        """Creates the state as after some steps, which the optimizer itself creates only in its first step.

        state_of: maps (a parameter, the flat tensor that contains it) to the state of that tensor.
        """
        for group, flat in enumerate(self._optimizer.fp32_partitioned_groups_flat):
            self.bring_in(group)  # the flat tensor has no elements before
            self._optimizer.optimizer.state[flat] = state_of(self._optimizer.fp16_groups[group][0], flat)
            if group == self._present:
                # DeepSpeed registers new tensors in the next swap-out, and only then reads them back.
                self._changed = True
                self.release()

    def places(self) -> "list[Place]":
        """Lists where each parameter's part is."""
        found = []
        for parameters, flat in zip(
            self._optimizer.fp16_groups, self._optimizer.fp32_partitioned_groups_flat, strict=True
        ):
            for parameter in parameters:
                _, offset, elements = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
                ends = [min(parameter.ds_numel, elements * rank) for rank in range(dist.get_world_size() + 1)]
                found.append((parameter, flat, offset, tuple(pairwise(ends))))
        return found

    def part(self, parameter: torch.Tensor, key: str | None) -> torch.Tensor:
        """Returns this rank's elements of a master weight (key None) or a moment, flat; valid until the next call."""
        group, offset, elements = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
        self.bring_in(group)
        flat = self._optimizer.fp32_partitioned_groups_flat[group]
        tensor = flat if key is None else self._optimizer.optimizer.state[flat][key]
        return tensor.narrow(0, offset, elements)

    def get(self, parameter: torch.Tensor, key: str | None, device: torch.device) -> torch.Tensor:
        """Returns the whole tensor, on every rank; a collective call."""
        return self._optimizer._fp32_state_allgather(parameter, self.part(parameter, key).to(device))

    @torch.no_grad()
    def set(self, parameter: torch.Tensor, key: str | None, whole: torch.Tensor) -> None:
        """Copies this rank's part of `whole` into a master weight and its weight, or into a moment.

        DeepSpeed's own safe_set_full_fp32_param leaves the weights stale, and fails if a tensor does not divide by
        the number of ranks.
        """
        elements = parameter.ds_tensor.ds_numel
        padded = torch.zeros(elements * parameter.ds_zero_partition_world_size, device=whole.device)
        padded[: whole.numel()] = whole.flatten()
        part = padded.narrow(0, elements * parameter.ds_zero_partition_rank, elements)
        self.part(parameter, key).copy_(part)
        self._changed = self._present is not None
        if key is None:
            parameter.ds_tensor.copy_(part)
            if parameter.numel() == whole.numel():  # small parameters stay gathered between steps
                parameter.copy_(whole.view_as(parameter))


def fragment_places(groups: Sequence[tuple[Sequence[torch.Tensor], torch.Tensor]]) -> list[Place]:
    """Lists, in stages 1 and 2, where each parameter's part is; a collective call.

    groups: (parameters, this rank's part of their flat masters). A part can begin and end inside of a parameter.
    """
    parameters = [(parameter, flat) for them, flat in groups for parameter in them]
    fragments = [parameter._hp_mapping for parameter, _ in parameters]  # private: there is no public way to the ranges
    starts = [fragment.lp_fragment_address.start if fragment else 0 for fragment in fragments]
    ends = [start + (f.lp_fragment_address.numel if f else 0) for start, f in zip(starts, fragments, strict=True)]
    of_rank: list = [None] * dist.get_world_size()
    dist.all_gather_object(of_rank, list(zip(starts, ends, strict=True)))
    return [
        (parameter, flat, fragment.hp_fragment_address.start if fragment else 0, ranges)
        for (parameter, flat), fragment, ranges in zip(parameters, fragments, zip(*of_rank, strict=True), strict=True)
    ]


def placed_pieces(
    places: Sequence[Place], matrices: Mapping[torch.Tensor, HiddenMatrix], holders: Holders
) -> dict[torch.Tensor, list[MatrixPiece]]:
    """Returns {flat tensor: its pieces of the parameters that are matrices}."""
    pieces: dict[torch.Tensor, list[MatrixPiece]] = {}
    for parameter, flat, offset, ranges in places:
        if parameter not in matrices:
            continue
        one = replace(matrices[parameter], stacked=1)
        elements = matrices[parameter].elements
        for start in range(0, matrices[parameter].stacked * elements, elements):
            inside = tuple(tuple(min(max(place - start, 0), elements) for place in each) for each in ranges)
            tiles = tuple((((low, high),) if low < high else (),) for low, high in inside)
            before = max(0, start - ranges[holders.rank][0])  # elements of this rank's part before this matrix
            first, end = inside[holders.rank]
            piece = MatrixPiece(one, holders, 0, tiles, offset + before if first < end else offset)
            pieces.setdefault(flat, []).append(piece)
    return pieces


def placed_parts(places: Sequence[Place], holders: Holders) -> dict[torch.Tensor, list[ParameterPart]]:
    """Returns {flat tensor: its parts of all parameters}."""
    parts: dict[torch.Tensor, list[ParameterPart]] = {}
    for parameter, flat, offset, ranges in places:
        first, end = ranges[holders.rank]
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        part = ParameterPart.flat(parameter, shape, holders, first if first < end else 0, offset, end - first)
        parts.setdefault(flat, []).append(part)
    return parts
