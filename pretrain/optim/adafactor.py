"""Adafactor, which factors a matrix's second moment into a row and a column, with stochastic rounding of bf16."""

import hashlib
import math
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from pretrain.optim.matrix_exchange import Holders, local_tensor

CLIP = 1.0
"""Maximum root mean square of an update; in a stack of matrices, such as experts, of each matrix's."""
DECAY_EXPONENT = 0.8
"""The second moment's decay at step t is 1 - t^-DECAY_EXPONENT."""
LEAST_SQUARE = 1e-30
"""Added to squared gradients."""

# Dimensions, from the end, that a number per row, per column or per matrix of a parameter does not have.
ROW = (-1,)
COLUMN = (-2,)
MATRIX = (-2, -1)


@dataclass(frozen=True)
class ParameterPart:
    """Part of a parameter that this rank holds: a slice, or flat elements somewhere in a tensor of many."""

    parameter: torch.Tensor
    """Parameter under which the optimizer keeps the state."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    holders: Holders | None = None
    """Ranks that hold the other parts; None: this is the whole."""
    dim: int = 0
    """Dimension along which the parameter is sharded."""
    start: int = 0
    """First index of the slice along `dim`; for flat elements, index of the first in the flattened parameter."""
    offset: int | None = None
    """Index of the first flat element in its tensor; None: the tensor is the part."""
    elements: int = 0
    """Number of flat elements."""

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the part, in the tensor that the optimizer updates or in one of the same layout."""
        return tensor if self.offset is None else tensor.narrow(0, self.offset, self.elements)

    def block(self, part: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Returns (slice along `dim` that contains the part, its first index); flat elements are padded with zeros."""
        if self.offset is None:
            return part, self.start
        inner = math.prod(self.shape[1:])
        first = self.start // inner
        last = -(-(self.start + self.elements) // inner)
        block = torch.zeros((last - first, *self.shape[1:]), dtype=part.dtype, device=part.device)
        self.inside(block, first).copy_(part)
        return block, first

    def inside(self, block: torch.Tensor, first: int) -> torch.Tensor:
        """Returns the part in its block."""
        if self.offset is None:
            return block
        return block.view(-1).narrow(0, self.start - first * math.prod(self.shape[1:]), self.elements)

    def of_block(
        self, numbers: torch.Tensor, first: int, block: torch.Tensor, without: tuple[int, ...]
    ) -> torch.Tensor:
        """Narrows numbers over the whole parameter to those of a block, as `block` returns it.

        without: dimensions of the parameter that the numbers do not have, from the end: (-1,) for one per row.
        """
        missing = [len(self.shape) + dim for dim in without]
        if self.dim in missing:
            return numbers
        dim = self.dim - sum(other < self.dim for other in missing)
        return numbers.narrow(dim, first, block.size(self.dim))


class Adafactor(torch.optim.Optimizer):
    """Adafactor (Shazeer and Stern, arXiv 1804.04235) with a given learning rate and no momentum.

    The second moment of a matrix is stored as its row and column means. Parameters in bf16 are updated with stochastic
    rounding: up or down at random so that the expectation is exact, which keeps small updates from being lost without
    an fp32 copy. The random bits are a function of (seed, step, position of the parameter), so a resumed run repeats
    them.

    State is replicated on every rank. For sharded parameters, two all-reduces in each step keep it so: of all rows and
    columns, and of the updates' squares. A step turns fp32 gradients into updates in place. `grad_scale` and
    `found_inf` are as in torch's fused optimizers.

    lr: step size, relative to the clipped update, whose root mean square is at most CLIP.
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    def __init__(self, params: Iterable, lr: float, *, weight_decay: float = 0.0, seed: int = 0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.seed = seed
        self.placed: dict[torch.Tensor, list[ParameterPart]] = {}
        """{flat tensor: the parts in it}, if a strategy updates many parameters as one tensor."""
        self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure=None):
        position = 0
        shared: dict[Holders, list[Generator]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                position += 1
                if parameter.grad is None:
                    continue
                weight = local_tensor(parameter)
                gradient = local_tensor(parameter.grad)
                for part in self.placed.get(parameter) or [part_of(parameter)]:
                    update = self._update(part, part.view(weight), part.view(gradient), group, position)
                    if part.holders is None or part.holders.size == 1:
                        run_together([update], None)
                    else:
                        shared.setdefault(part.holders, []).append(update)
        for holders, updates in shared.items():
            run_together(updates, holders)

    def _update(
        self, part: ParameterPart, weight: torch.Tensor, gradient: torch.Tensor, group: dict, position: int
    ) -> Generator[list[torch.Tensor], list[torch.Tensor], None]:
        """Updates the weight; yields tensors to sum over the ranks that have parts, and receives the sums."""
        state = self.state[part.parameter]
        skips = None
        for key, shape in factored_shapes(part.shape).items():
            state[key] = state[key].to(weight.device) if key in state else torch.zeros(shape, device=weight.device)
        if self.grad_scale is not None:
            gradient.div_(self.grad_scale.to(gradient.device))
        if self.found_inf is not None:
            skips = self.found_inf.to(gradient.device).bool()
            # lerp with weight 0 towards an infinite mean would still give NaN.
            gradient.masked_fill_(skips, 0)
        state["step"] += 1 if skips is None else (~skips).float()
        new = state["step"].double().pow(-DECAY_EXPONENT).float()
        new = new if skips is None else torch.where(skips, 0.0, new)

        block, first = part.block(gradient.float())
        places = {key: torch.zeros_like(state[key]) for key in state if key != "step"}
        squared = block.square()
        if "row" in state:
            part.of_block(places["row"], first, block, ROW).copy_(squared.sum(-1))
            part.of_block(places["column"], first, block, COLUMN).copy_(squared.sum(-2))
        else:
            part.of_block(places["variance"].view(-1), first, block.view(-1), ()).copy_(squared.view(-1))
        del squared
        # Every update waits here, so that one collective sums for all; see `run_together`.
        sums = dict(zip(places, (yield list(places.values())), strict=True))
        if "row" in state:
            state["row"].lerp_(sums["row"] / part.shape[-1] + LEAST_SQUARE, new)
            state["column"].lerp_(sums["column"] / part.shape[-2] + LEAST_SQUARE, new)
            row = (state["row"] / state["row"].mean(-1, keepdim=True)).rsqrt()
            block.mul_(part.of_block(row, first, block, ROW).unsqueeze(-1))
            block.mul_(part.of_block(state["column"].rsqrt(), first, block, COLUMN).unsqueeze(-2))
        else:
            state["variance"].lerp_(sums["variance"] + LEAST_SQUARE, new)
            block.mul_(part.of_block(state["variance"].rsqrt().view(-1), first, block.view(-1), ()).view_as(block))
        update = part.inside(block, first)
        if is_stack := are_matrices(part.shape):
            squares = torch.zeros(part.shape[:-2], device=block.device)
            part.of_block(squares, first, block, MATRIX).copy_(block.square().sum((-2, -1)))
        else:
            squares = update.square().sum()
        if part.offset is not None:
            # Flat parts are in larger blocks: storing the update in the gradient's memory frees the block.
            gradient.copy_(update)
            update = gradient
            del block
        (square,) = yield [squares]
        rms = square.sqrt() / math.sqrt(math.prod(part.shape[-2:] if is_stack else part.shape))
        excess = torch.clamp(rms / CLIP, min=1.0)
        if is_stack:
            block, first = part.block(update)
            block.div_(part.of_block(excess, first, block, MATRIX)[..., None, None])
            update.copy_(part.inside(block, first))
            del block
        else:
            update.div_(excess)
        decay = 1 - group["lr"] * group["weight_decay"]
        if skips is not None:
            update.masked_fill_(skips, 0)
            decay = torch.where(skips, 1.0, decay)
        fresh = weight.float().mul_(decay).add_(update, alpha=-group["lr"])
        if weight.dtype == torch.bfloat16:
            key = repr((self.seed, position)).encode()
            seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
            weight.copy_(round_stochastically(fresh, seed, state["step"]))


def part_of(parameter: torch.Tensor) -> ParameterPart:
    """Returns this rank's part of a parameter, which is whole or a DTensor that is sharded along one dimension."""
    if not isinstance(parameter, DTensor):
        return ParameterPart(parameter, tuple(parameter.shape))
    mesh = parameter.device_mesh
    placements = enumerate(parameter.placements)
    sharded = [axis for axis, placement in placements if not placement.is_replicate() and mesh.size(axis) > 1]
    if not sharded:
        return ParameterPart(parameter, tuple(parameter.shape))
    (axis,) = sharded
    dim = parameter.placements[axis].dim
    holders = Holders(mesh.get_group(axis), torch.device(mesh.device_type))
    start = min(parameter.shape[dim], holders.rank * -(-parameter.shape[dim] // holders.size))
    return ParameterPart(parameter, tuple(parameter.shape), holders, dim, start)


def run_together(updates: Sequence[Generator], holders: Holders | None) -> None:
    """Runs updates in lockstep; what they yield is summed over the ranks in one collective."""
    asked = [next(update) for update in updates]
    while asked:
        if holders is not None:
            tensors = [tensor for them in asked for tensor in them]
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(holders.device)
            dist.all_reduce(flat, group=holders.group)
            sums = iter(flat.to(tensors[0].device).split([tensor.numel() for tensor in tensors]))
            asked = [[next(sums).view(tensor.shape) for tensor in them] for them in asked]
        answers = asked
        asked = []
        for update, answer in zip(updates, answers, strict=True):
            with suppress(StopIteration):
                asked.append(update.send(answer))


def factored_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Returns {name: shape} of Adafactor's state: {step, row, column} of a matrix, else {step, variance}."""
    if len(shape) < 2:
        return {"step": (), "variance": shape}
    return {"step": (), "row": shape[:-1], "column": shape[:-2] + shape[-1:]}


def are_matrices(shape: tuple[int, ...]) -> bool:
    """Tells if a parameter is a stack of matrices, such as a layer's experts; one filter per channel is not."""
    return len(shape) > 2 and min(shape[-2:]) > 1


def round_stochastically(values: torch.Tensor, seed: int, step: torch.Tensor) -> torch.Tensor:
    """Rounds fp32 to bf16, up or down so that the expectation is exact; nothing waits for the device.

    bf16 is the upper half of fp32's bits: adding a uniform 16-bit number before truncating the lower half carries
    into the upper half with exactly the right probability, for either sign.
    """
    generator = torch.Generator(values.device).manual_seed(seed)
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, generator=generator, device=bits.device, dtype=torch.int32)
    # The step's number is on the device, so it cannot seed the generator: it permutes the 2^16 numbers instead.
    mixed = step.long() + 1
    for factor in (0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64):  # SplitMix64's
        mixed = mixed * factor
        mixed = mixed ^ (mixed >> 31)
    noise.mul_(mixed & 0x7FFF | 1).add_(mixed >> 16 & 0xFFFF).bitwise_and_(0xFFFF)
    finite = values.isfinite()
    rounded = ((bits + noise) & -65536).view(torch.float32)
    return torch.where(finite, rounded, values).to(torch.bfloat16)
