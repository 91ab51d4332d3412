"""Adafactor, with stochastic rounding for bf16 parameters."""

import hashlib
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist

from pretrain.optim.matrix_exchange import Holders
from pretrain.optim.optimizers import OptimizerSpec, local_tensor
from pretrain.optim.tiles import Tile, narrowed, put, shape_of, take, whole_tile

CLIP = 1.0
"""Maximum RMS of an update. Each matrix in a stack, such as MoE experts, is clipped separately."""
DECAY_EXPONENT = 0.8
"""The second moment's decay at step t is 1 - t^-DECAY_EXPONENT."""
MIN_SQUARE = 1e-30
"""Epsilon added to the squared gradients."""
GOLDEN = 0x9E3779B97F4A7C15
"""SplitMix64's increment."""
DRAWN_TOGETHER = 2**24
"""Maximum number of elements to round at once. Rounding needs 24 bytes per element."""


@dataclass(frozen=True)
class ParameterPart:
    """This rank's shard of a parameter: either a tile, or a slice of a flat tensor shared by many parameters."""

    parameter: torch.Tensor
    """Key in the optimizer's state."""
    shape: tuple[int, ...]
    """Unsharded shape of the parameter."""
    holders: Holders | None = None
    """Ranks that share the parameter. None if it isn't sharded."""
    tile: Tile | None = None
    """The shard's tile. For a flat slice, the tile of the rows it spans. None for the whole parameter."""
    start: int = 0
    """Index of the slice's first element in the flattened parameter."""
    offset: int | None = None
    """Index of the slice's first element in the flat tensor. None if the tensor itself is the shard."""
    elements: int = 0
    """Number of elements in the slice."""
    adds: bool = True
    """False if another rank already counts the same shard in the sums."""

    @classmethod
    def flat(
        cls, parameter: torch.Tensor, shape: tuple[int, ...], holders: Holders, start: int, offset: int, elements: int
    ) -> Self:
        """Creates a flat slice."""
        inner = math.prod(shape[1:])
        rows = ((start // inner, -(-(start + elements) // inner)),) if elements else ()
        return cls(parameter, shape, holders, (rows, *whole_tile(shape[1:])), start, offset, elements)

    @property
    def rows(self) -> Tile:
        """Tile of the tensor that `block` returns. A scalar is treated as a tensor of shape (1,)."""
        return whole_tile(self.shape or (1,)) if self.tile is None else self.tile

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the shard as a view of a weight or gradient tensor."""
        return tensor if self.offset is None else tensor.narrow(0, self.offset, self.elements)

    def block(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the shard as a tile. A flat slice is zero-padded to complete rows."""
        if self.offset is None:
            return part
        block = torch.zeros(shape_of(self.rows), dtype=part.dtype, device=part.device)
        self.inside(block).copy_(part)
        return block

    def inside(self, block: torch.Tensor) -> torch.Tensor:
        """Returns the shard as a view of its block."""
        if self.offset is None:
            return block
        first = self.rows[0][0][0] if self.elements else 0
        return block.view(-1).narrow(0, self.start - first * math.prod(self.shape[1:]), self.elements)

    def share_of(self, sums: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Returns this rank's contribution to the sums over all ranks."""
        return list(sums) if self.adds else [torch.zeros_like(own) for own in sums]


class Adafactor(torch.optim.Optimizer):
    """Adafactor (Shazeer and Stern, arXiv 1804.04235) with an explicit learning rate and no momentum.

    The second moment of a matrix is factored into row and column means. bf16 parameters are updated with stochastic
    rounding, so they don't need an fp32 copy. The random bits depend only on the seed, the step, the parameter's name
    and the element's index, so resuming or resharding a run doesn't change them.

    The state is replicated on every rank. Sharded parameters need two all-reduces per step. `step` overwrites the
    gradients. `grad_scale` and `found_inf` work as in torch's fused optimizers.

    Args:
        lr: learning rate. Each update is clipped to an RMS of CLIP before it is multiplied by lr.
        names: parameter names, required for bf16 parameters.
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    def __init__(
        self,
        params: Iterable,
        lr: float,
        *,
        weight_decay: float = 0.0,
        seed: int = 0,
        names: Mapping[torch.Tensor, str] | None = None,
    ):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.seed = seed
        self.names = names or {}
        self.placed: dict[torch.Tensor, list[ParameterPart]] = {}
        """{tensor: shards in it}. Set by strategies that shard parameters or flatten them into one tensor."""
        self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure=None):
        shared: dict[Holders, list[Generator]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                weight = local_tensor(parameter)
                gradient = local_tensor(parameter.grad)
                for part in self.placed.get(parameter) or [ParameterPart(parameter, tuple(parameter.shape))]:
                    name = self.names.get(part.parameter, "")
                    update = self._update(part, part.view(weight), part.view(gradient), group, name)
                    if part.holders is None or part.holders.size == 1:
                        run_together([update], None)
                    else:
                        shared.setdefault(part.holders, []).append(update)
        for holders, updates in shared.items():
            run_together(updates, holders)

    def _update(
        self, part: ParameterPart, weight: torch.Tensor, gradient: torch.Tensor, group: dict, name: str
    ) -> Generator[list[torch.Tensor], list[torch.Tensor], None]:
        """Updates the weight. Yields tensors to all-reduce and receives their sums."""
        state = self.state[part.parameter]
        skips = None
        for key, shape in factored_shapes(part.shape).items():
            state[key] = state[key].to(weight.device) if key in state else torch.zeros(shape, device=weight.device)
        if self.grad_scale is not None:
            gradient.div_(self.grad_scale.to(gradient.device))
        if self.found_inf is not None:
            skips = self.found_inf.to(gradient.device).bool()
            # lerp with an infinite value returns NaN, even with an interpolation weight of 0.
            gradient.masked_fill_(skips, 0)
        state["step"] += 1 if skips is None else (~skips).float()
        new = state["step"].double().pow(-DECAY_EXPONENT).float()
        new = new if skips is None else torch.where(skips, 0.0, new)

        # bf16 isn't precise enough for squared gradients.
        block = part.block(gradient.float())
        places = {key: torch.zeros_like(state[key]) for key in state if key != "step"}
        squared = block.square()
        rows = part.rows[:-1]
        columns = part.rows[:-2] + part.rows[-1:]
        matrices = part.rows[:-2]
        if "row" in state:
            put(places["row"], rows, squared.sum(-1))
            put(places["column"], columns, squared.sum(-2))
        else:
            put(places["variance"].view(-1), part.rows, squared.view(-1))
        del squared
        # `run_together` all-reduces the sums of all parameters in one collective.
        sums = dict(zip(places, (yield part.share_of(places.values())), strict=True))
        if "row" in state:
            state["row"].lerp_(sums["row"] / part.shape[-1] + MIN_SQUARE, new)
            state["column"].lerp_(sums["column"] / part.shape[-2] + MIN_SQUARE, new)
            row = (state["row"] / state["row"].mean(-1, keepdim=True)).rsqrt()
            block.mul_(take(row, rows).unsqueeze(-1))
            block.mul_(take(state["column"].rsqrt(), columns).unsqueeze(-2))
        else:
            state["variance"].lerp_(sums["variance"] + MIN_SQUARE, new)
            block.mul_(take(state["variance"].rsqrt().view(-1), part.rows).view_as(block))
        update = part.inside(block)
        if is_stack := are_matrices(part.shape):
            squares = torch.zeros(part.shape[:-2], device=block.device)
            put(squares, matrices, block.square().sum((-2, -1)))
        else:
            squares = update.square().sum()
        if part.offset is not None:
            # A flat slice's block is larger than the slice, so free it before waiting for the other updates.
            gradient.copy_(update)
            update = gradient
            del block
        (square,) = yield part.share_of([squares])
        rms = square.sqrt() / math.sqrt(math.prod(part.shape[-2:] if is_stack else part.shape))
        excess = torch.clamp(rms / CLIP, min=1.0)
        if is_stack:
            block = part.block(update)
            block.div_(take(excess, matrices)[..., None, None])
            update.copy_(part.inside(block))
            del block
        else:
            update.div_(excess)
        decay = 1 - group["lr"] * group["weight_decay"]
        if skips is not None:
            update.masked_fill_(skips, 0)
            decay = torch.where(skips, 1.0, decay)
        fresh = weight.float().mul_(decay).add_(update, alpha=-group["lr"])
        if weight.dtype == torch.bfloat16:
            weight.copy_(round_stochastically(fresh, draws_of(self.seed, name), state["step"], part.rows, part.shape))


def run_together(updates: Sequence[Generator], holders: Holders | None) -> None:
    """Runs updates in lockstep. All-reduces the tensors that they yield in one collective."""
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
    """Returns {name: shape} of the state: step, row and column for matrices, otherwise step and variance."""
    if len(shape) < 2:
        return {"step": (), "variance": shape}
    return {"step": (), "row": shape[:-1], "column": shape[:-2] + shape[-1:]}


def are_matrices(shape: tuple[int, ...]) -> bool:
    """Returns True for a stack of matrices, such as a layer's experts, but not for per-channel filters."""
    return len(shape) > 2 and min(shape[-2:]) > 1


def draws_of(seed: int, name: str) -> int:
    """Returns the random seed for a parameter, below 2^63."""
    return int.from_bytes(hashlib.blake2b(repr((seed, name)).encode(), digest_size=8).digest(), "little") >> 1


def round_stochastically(
    values: torch.Tensor, seed: int, step: torch.Tensor, tile: Tile | None = None, shape: tuple[int, ...] = ()
) -> torch.Tensor:
    """Rounds fp32 values to bf16 stochastically. The expected result is exact.

    bf16 is the upper half of an fp32 number. Adding a uniform 16-bit integer before truncation carries into the upper
    half with exactly the right probability, for both signs.

    tile, shape: the values' tile and the parameter's unsharded shape. By default, `values` is the whole parameter.
    """
    if values.dim() == 0:
        return round_stochastically(values.view(1), seed, step).view(())
    shape = shape if tile else tuple(values.shape)
    rows, *others = tile or whole_tile(shape)
    rounded = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
    at_once = max(1, DRAWN_TOGETHER * len(values) // max(1, values.numel()))
    for first in range(0, len(values), at_once):
        some = values[first : first + at_once]
        noise = draws(seed, step, (narrowed(rows, first, first + at_once), *others), shape)
        bits = some.contiguous().view(torch.int32)
        up_or_down = ((bits + noise) & -65536).view(torch.float32)
        rounded[first : first + at_once] = torch.where(some.isfinite(), up_or_down, some)
    return rounded


def draws(seed: int, step: torch.Tensor, tile: Tile, shape: tuple[int, ...]) -> torch.Tensor:
    """Generates a random 16-bit integer, as int32, for each element of a parameter's tile.

    Uses SplitMix64 (Steele et al. 2014). The counter is the element's index in the unsharded parameter, so the numbers
    don't depend on the sharding.
    """
    numbers = mixed(step.long() + seed)
    stride = 1
    for dim, ranges in reversed(list(enumerate(tile))):
        places = torch.cat([torch.arange(first, end, device=step.device) for first, end in ranges or ((0, 0),)])
        numbers = numbers + places.mul_(signed(stride * GOLDEN)).view(-1, *[1] * (len(shape) - dim - 1))
        stride *= shape[dim]
    return mixed(numbers).bitwise_and_(0xFFFF).int()


def mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Mixes the bits of int64 numbers in place with SplitMix64's output function."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers.bitwise_xor_(numbers >> shift).mul_(signed(factor))
    return numbers.bitwise_xor_(numbers >> 31)


def signed(number: int) -> int:
    """Interprets a number's lower 64 bits as an int64."""
    return (number + 2**63) % 2**64 - 2**63


class AdafactorSpec(OptimizerSpec):
    """Adafactor, with its state replicated on every rank."""

    takes = ("whole", "sharded", "pieces")
    state_is_whole = True

    def make(self, parameters, settings, learning_rate, seed, device_type) -> torch.optim.Optimizer:
        names = {parameter: name for name, parameter in parameters}
        return Adafactor(self.groups(parameters, settings.weight_decay), lr=learning_rate, seed=seed, names=names)

    def state_shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        return factored_shapes(self.model.shapes[name])
