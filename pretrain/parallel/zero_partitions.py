"""Reads and writes each parameter's fp32 weights and optimizer state in DeepSpeed's flat tensors.

The flat tensors may be on the device, in CPU memory or, in stage 3, on NVMe. DeepSpeed has its own functions for this,
but they differ between stages, don't update the weights used in the forward pass, and read a whole sub-group (up to
12 GB) from NVMe for each tensor. Here, a sub-group stays in memory until a different one is needed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pretrain.optim.adafactor import ParameterPart
from pretrain.optim.matrix_exchange import HiddenMatrix, Holders, MatrixPiece, gather_flat
from pretrain.parallel.tensor_group import Shape

GROUPS_OF = {
    "fp32_partitioned_groups_flat": "fp16_groups",
    "single_partition_of_fp32_groups": "bit16_groups",
    "fp32_groups_flat_partition": "bf16_groups",
}
"""{attribute with the flat fp32 tensors: attribute with their parameters}, for DeepSpeed's three optimizers"""


@dataclass(frozen=True)
class Place:
    """A parameter's location in the flat tensors."""

    group: int
    """Index of the flat tensor."""
    offset: int
    """Offset of this rank's partition in the flat tensor."""
    ranges: tuple[tuple[int, int], ...]
    """(start, end) of each rank's partition, in elements of the parameter."""

    @property
    def mine(self) -> tuple[int, int]:
        return self.ranges[dist.get_rank()]

    def narrow(self, flat: Tensor) -> Tensor:
        """Returns this rank's partition of the parameter in a flat tensor."""
        first, end = self.mine
        return flat.narrow(0, self.offset, end - first)


class Masters:
    """This rank's partitions of the fp32 master weights and the optimizer state. Its methods are collective.

    Uses private DeepSpeed attributes, because there is no public way to swap sub-groups or to locate a partition.
    """

    def __init__(self, optimizer: Any, stage: int, device: torch.device):
        self._optimizer = optimizer
        self._stage = stage
        self._device = device
        name = next(name for name in GROUPS_OF if hasattr(optimizer, name))
        self.flats: list[Tensor] = getattr(optimizer, name)
        self.groups: list[list[Tensor]] = getattr(optimizer, GROUPS_OF[name])
        self.places = self._partitions() if stage == 3 else self._fragments()
        self._present: int | None = None
        """Index of the sub-group that has been read from NVMe into memory."""
        self._changed = False

    def _partitions(self) -> dict[Tensor, Place]:
        places = {}
        for parameter in [parameter for group in self.groups for parameter in group]:
            group, offset, elements = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
            ends = [min(parameter.ds_numel, elements * rank) for rank in range(dist.get_world_size() + 1)]
            places[parameter] = Place(group, offset, tuple(pairwise(ends)))
        return places

    def _fragments(self) -> dict[Tensor, Place]:
        """Locates the partitions in stages 1 and 2, which can start and end inside a parameter."""
        mine = {}
        for number, group in enumerate(self.groups):
            for parameter in group:
                start = offset = elements = 0
                if (fragment := parameter._hp_mapping) is not None:
                    start = fragment.lp_fragment_address.start
                    offset = fragment.hp_fragment_address.start
                    elements = fragment.lp_fragment_address.numel
                mine[parameter] = (number, offset, (start, start + elements))
        of_rank: list = [None] * dist.get_world_size()
        dist.all_gather_object(of_rank, [part for *_, part in mine.values()])
        return {
            parameter: Place(number, offset, ranges)
            for (parameter, (number, offset, _)), ranges in zip(mine.items(), zip(*of_rank, strict=True), strict=True)
        }

    def _bring_in(self, group: int) -> None:
        """Reads a sub-group from NVMe if it isn't in memory. Releases the previous one first."""
        if self._stage == 3 and group != self._present and self._optimizer._swappable_optimizer_subgroup(group):
            self.release()
            self._optimizer._optimizer_states_and_gradient_swap_in(group)
            self._present = group

    def release(self) -> None:
        """Writes the sub-group back if it has changed, then frees it.

        DeepSpeed needs the memory for its own sub-groups.
        """
        if self._present is None:
            return
        if self._changed:
            self._optimizer._optimizer_states_and_gradient_swap_out(self._present)
        else:
            self._optimizer._release_swap_buffers(self._present)
        self._present = None
        self._changed = False

    def create_state(self, state_of: Callable[[list[Tensor], Tensor], dict[str, Tensor]]) -> None:
        """Creates the optimizer state, which otherwise wouldn't exist before the first step.

        state_of: returns the state for a flat tensor, given (its parameters, the flat tensor).
        """
        for group, flat in enumerate(self.flats):
            self._bring_in(group)  # until then, the flat tensor is empty
            self._optimizer.optimizer.state[flat] = state_of(self.groups[group], flat)
            if group == self._present:
                # DeepSpeed can only read tensors back in after it has swapped them out once.
                self._changed = True
                self.release()

    def part(self, parameter: Tensor, key: str | None) -> Tensor:
        """Returns this rank's partition of a moment, or of a master weight if key is None.

        Valid until the next call.
        """
        place = self.places[parameter]
        self._bring_in(place.group)
        flat = self.flats[place.group]
        return place.narrow(flat if key is None else self._optimizer.optimizer.state[flat][key])

    def scalar(self, parameter: Tensor, key: str) -> Tensor:
        """Returns a number in the optimizer state, such as a step count, which is the same on every rank."""
        return torch.as_tensor(self._state_of(parameter)[key], dtype=torch.float32).clone()

    def actual_state_shapes(self, parameter: Tensor, shape: Shape) -> dict[str, Shape]:
        """Returns {key: unsharded shape} for a parameter with this shape. State is a number or as large as it."""
        return {key: shape if getattr(value, "ndim", 0) else () for key, value in self._state_of(parameter).items()}

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Returns the optimizer state of the parameter's flat tensor."""
        return self._optimizer.optimizer.state.get(self.flats[self.places[parameter].group], {})

    @torch.no_grad()
    def gathered(self, parameter: Tensor, part: Tensor) -> Tensor:
        """Gathers a flat tensor from all ranks' partitions (a collective call)."""
        ranges = self.places[parameter].ranges
        part = part.to(self._device)
        if self._stage == 3:
            longest = ranges[0][1]
            whole = torch.empty(longest * len(ranges), device=self._device)
            gather_flat(whole, F.pad(part, (0, longest - part.numel())))
            return whole[: ranges[-1][1]]
        whole = torch.zeros(parameter.numel(), device=self._device)
        first, end = self.places[parameter].mine
        whole[first:end] = part
        dist.all_reduce(whole)
        return whole

    @torch.no_grad()
    def set(self, parameter: Tensor, key: str | None, whole: Tensor) -> None:
        """Copies this rank's partition of `whole` into a moment.

        If key is None, copies it into the master weight and the forward pass's weight instead.
        """
        first, end = self.places[parameter].mine
        self.part(parameter, key).copy_(whole.flatten()[first:end])
        self._changed = self._present is not None
        if key is None:
            self.compute_with(parameter, whole)

    @torch.no_grad()
    def compute_with(self, parameter: Tensor, whole: Tensor) -> None:
        """Copies a full weight into the forward pass's weight."""
        if self._stage == 3:
            first, end = self.places[parameter].mine
            parameter.ds_tensor[: end - first] = whole.flatten()[first:end]
        if parameter.numel() == whole.numel():  # stage 3 keeps small parameters gathered between steps
            parameter.copy_(whole.view_as(parameter))

    def pieces(self, matrices: Mapping[Tensor, HiddenMatrix], holders: Holders) -> dict[Tensor, list[MatrixPiece]]:
        """Returns {flat tensor: matrix pieces in it} for Muon."""
        found: dict[Tensor, list[MatrixPiece]] = {}
        for parameter, place in self.places.items():
            if (matrix := matrices.get(parameter)) is None:
                continue
            one = replace(matrix, stacked=1)
            elements = matrix.elements
            for start in range(0, matrix.stacked * elements, elements):
                inside = tuple(tuple(min(max(edge - start, 0), elements) for edge in each) for each in place.ranges)
                tiles = tuple((((low, high),) if low < high else (),) for low, high in inside)
                before = max(0, start - place.mine[0])  # elements in this rank's partition before this matrix
                first, end = inside[holders.rank]
                piece = MatrixPiece(one, holders, 0, tiles, place.offset + before if first < end else place.offset)
                found.setdefault(self.flats[place.group], []).append(piece)
        return found

    def parts(self, holders: Holders) -> dict[Tensor, list[ParameterPart]]:
        """Returns {flat tensor: parameter slices in it} for Adafactor."""
        found: dict[Tensor, list[ParameterPart]] = {}
        for parameter, place in self.places.items():
            first, end = place.mine
            start = first if first < end else 0
            part = ParameterPart.flat(parameter, full_shape(parameter), holders, start, place.offset, end - first)
            found.setdefault(self.flats[place.group], []).append(part)
        return found


def full_shape(parameter: Tensor) -> Shape:
    """Returns a parameter's unsharded shape. In stage 3, the parameter itself is empty."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
