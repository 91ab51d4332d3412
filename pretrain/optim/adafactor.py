"""Adafactor, which keeps a row and a column of a matrix's second moment, with stochastic rounding of bf16."""

import hashlib
import math
from collections.abc import Iterable

import torch

CLIP = 1.0
"""Largest root mean square of an update."""
DECAY_EXPONENT = 0.8
"""The second moment's decay at step t is 1 - t^-DECAY_EXPONENT."""
LEAST_SQUARE = 1e-30
"""Added to squared gradients."""


class Adafactor(torch.optim.Optimizer):
    """Adafactor (Shazeer and Stern, arXiv 1804.04235) with a given learning rate and no momentum.

    The second moment of a matrix is kept as its row and column means. Parameters in bf16 are updated with stochastic
    rounding: up or down at random so that the expectation is exact, which keeps small updates from being lost without
    an fp32 copy. The random bits follow from (seed, step, position of the parameter), so a resumed run repeats them.

    lr: step size, relative to a root mean square of one of the clipped update.
    """

    def __init__(self, params: Iterable, lr: float, *, weight_decay: float = 0.0, seed: int = 0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.seed = seed

    @torch.no_grad()
    def step(self, closure=None):
        position = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                position += 1
                if parameter.grad is not None:
                    self._update(parameter, group, position)

    def _update(self, parameter: torch.Tensor, group: dict, position: int) -> None:
        state = self.state[parameter]
        if not state:
            for key, shape in factored_shapes(tuple(parameter.shape)).items():
                # The step stays on the host, where the next seed is made from it.
                device = "cpu" if key == "step" else parameter.device
                state[key] = torch.zeros(shape, dtype=torch.float32, device=device)
        state["step"] += 1
        step = int(state["step"].item())
        gradient = parameter.grad.float()
        beta = 1.0 - step**-DECAY_EXPONENT
        squared = gradient.square().add_(LEAST_SQUARE)
        if "row" in state:
            state["row"].lerp_(squared.mean(-1), 1 - beta)
            state["column"].lerp_(squared.mean(-2), 1 - beta)
            row = state["row"] / state["row"].mean(-1, keepdim=True)
            update = gradient * row.rsqrt().unsqueeze(-1) * state["column"].rsqrt().unsqueeze(-2)
        else:
            state["variance"].lerp_(squared, 1 - beta)
            update = gradient * state["variance"].rsqrt()
        rms = update.norm() / math.sqrt(update.numel())
        update.div_(torch.clamp(rms / CLIP, min=1.0))
        fresh = parameter.float()
        fresh.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
        if parameter.dtype == torch.bfloat16:
            key = repr((self.seed, step, position)).encode()
            seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
            fresh = round_stochastically(fresh, seed)
        parameter.copy_(fresh)


def factored_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """{name: shape} of Adafactor's state: {step, row, column} of a matrix, {step, variance} of anything else."""
    if len(shape) < 2:
        return {"step": (), "variance": shape}
    return {"step": (), "row": shape[:-1], "column": shape[:-2] + shape[-1:]}


def round_stochastically(values: torch.Tensor, seed: int) -> torch.Tensor:
    """fp32 to bf16, up or down with the probabilities that make the expectation exact.

    bf16 is the upper half of fp32's bits: adding a uniform 16-bit number before cutting the lower half off carries
    into the upper half with exactly the right probability, for either sign.
    """
    generator = torch.Generator(values.device).manual_seed(seed)
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, generator=generator, device=bits.device, dtype=torch.int32)
    finite = values.isfinite()
    rounded = ((bits + noise) & -65536).view(torch.float32)
    return torch.where(finite, rounded, values).to(torch.bfloat16)
