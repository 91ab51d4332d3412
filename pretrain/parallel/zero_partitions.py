"""Finds parameters in DeepSpeed's flat tensors; gives ZeRO-3's optimizer as tensors by parameter.

They may be on the device, in host memory or on a disk.
DeepSpeed's own functions for this bring a whole sub-group of parameters, up to 12 GB, in from the disk for each
tensor. Here it stays until a tensor of another one is asked for.
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
"""(parameter, flat tensor, where in it its part begins, first element and end of the part of each process)."""


class Partitions:
    """This process's parts of the fp32 master weights and of AdamW's moments.

    Private names of DeepSpeed: it swaps sub-groups with its disk and gathers partitions by these alone.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        """DeepSpeed's optimizer of stage 3."""
        self._present: int | None = None
        """The sub-group that was brought in from the disk."""
        self._changed = False

    def bring_in(self, group: int) -> None:
        """Reads a sub-group from the disk, if it is there and not in memory; another one is written back first."""
        if group != self._present and self._optimizer._swappable_optimizer_subgroup(group):
            self.release()
            self._optimizer._optimizer_states_and_gradient_swap_in(group)
            self._present = group

    def release(self) -> None:
        """Goes before anything is trained: DeepSpeed needs the memory, and reads from the disk what it works on."""
        if self._present is None:
            return
        if self._changed:
            self._optimizer._optimizer_states_and_gradient_swap_out(self._present)
        else:
            self._optimizer._release_swap_buffers(self._present)
        self._present = None
        self._changed = False

    def create_state(self, state_of: Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]) -> None:
        """Makes the state after some steps, which the optimizer itself makes in its first step only.

        state_of: (a parameter, the flat tensor that it is in) to the state of that tensor.
        """
        for group, flat in enumerate(self._optimizer.fp32_partitioned_groups_flat):
            self.bring_in(group)  # without elements until then
            self._optimizer.optimizer.state[flat] = state_of(self._optimizer.fp16_groups[group][0], flat)
            if group == self._present:
                # DeepSpeed takes new tensors on in the next swap, and only then reads them back.
                self._changed = True
                self.release()

    def places(self) -> "list[Place]":
        """Returns where each parameter's part is."""
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
        """Returns this process's elements of a master weight (key None) or of a moment, flat, until the next call."""
        group, offset, elements = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
        self.bring_in(group)
        flat = self._optimizer.fp32_partitioned_groups_flat[group]
        tensor = flat if key is None else self._optimizer.optimizer.state[flat][key]
        return tensor.narrow(0, offset, elements)

    def get(self, parameter: torch.Tensor, key: str | None, device: torch.device) -> torch.Tensor:
        """Returns the whole of it, on every process; all call together."""
        return self._optimizer._fp32_state_allgather(parameter, self.part(parameter, key).to(device))

    @torch.no_grad()
    def set(self, parameter: torch.Tensor, key: str | None, whole: torch.Tensor) -> None:
        """Puts this process's part of `whole` into a master weight and the weight, or into a moment.

        DeepSpeed's own safe_set_full_fp32_param leaves the weights stale, and fails where a tensor does not divide by
        the number of processes.
        """
        elements = parameter.ds_tensor.ds_numel
        padded = torch.zeros(elements * parameter.ds_zero_partition_world_size, device=whole.device)
        padded[: whole.numel()] = whole.flatten()
        part = padded.narrow(0, elements * parameter.ds_zero_partition_rank, elements)
        self.part(parameter, key).copy_(part)
        self._changed = self._present is not None
        if key is None:
            parameter.ds_tensor.copy_(part)
            if parameter.numel() == whole.numel():  # small ones stay gathered between steps
                parameter.copy_(whole.view_as(parameter))


def fragment_places(groups: Sequence[tuple[Sequence[torch.Tensor], torch.Tensor]]) -> list[Place]:
    """Returns, in stages 1 and 2, where each parameter's part is; all processes call together.

    groups: (parameters, this process's part of their flat masters). A process's part begins and ends anywhere.
    """
    parameters = [(parameter, flat) for them, flat in groups for parameter in them]
    fragments = [parameter._hp_mapping for parameter, _ in parameters]  # DeepSpeed has no public function for ranges
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
    """Returns {flat tensor: what it has of the parameters that are matrices}."""
    pieces: dict[torch.Tensor, list[MatrixPiece]] = {}
    for parameter, flat, offset, ranges in places:
        if parameter not in matrices:
            continue
        one = replace(matrices[parameter], stacked=1)
        elements = matrices[parameter].elements
        for start in range(0, matrices[parameter].stacked * elements, elements):
            inside = tuple(tuple(min(max(place - start, 0), elements) for place in each) for each in ranges)
            before = max(0, start - ranges[holders.rank][0])  # elements of this process's part
            first, end = inside[holders.rank]
            piece = MatrixPiece(one, holders, 0, inside, offset + before if first < end else offset)
            pieces.setdefault(flat, []).append(piece)
    return pieces


def placed_parts(places: Sequence[Place], holders: Holders) -> dict[torch.Tensor, list[ParameterPart]]:
    """Returns {flat tensor: what it has of every parameter}."""
    parts: dict[torch.Tensor, list[ParameterPart]] = {}
    for parameter, flat, offset, ranges in places:
        first, end = ranges[holders.rank]
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        part = ParameterPart(parameter, shape, holders, 0, first if first < end else 0, offset, end - first)
        parts.setdefault(flat, []).append(part)
    return parts
