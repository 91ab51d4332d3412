"""Weight averaging during training, which reduces the noise in the weights at a constant learning rate.

Let s_1, s_2, ... be the weights after every k-th step (k = averaging.every_steps). Their running mean m is

    m_1 = s_1,    m_n = m_(n-1) + w_n (s_n - m_(n-1))
    tail:  w_n = 1 / n
    ema:   w_n = max(1 / n, 1 - 2^(-k / h)),    h = half_life_fraction x total steps

tail is the uniform mean over the end of the run (LAWA: Kaddour, arXiv 2209.14981; Sanyal et al., arXiv 2306.03241).
ema is an exponential moving average with a half-life of h steps. It starts as a uniform mean instead of being
bias-corrected. The half-life is relative to the run length (Karras et al., arXiv 2312.02696).
"""

from collections.abc import Mapping
from typing import Any

import torch

from pretrain.config import Averaging
from pretrain.optim.optimizers import local_tensor

AverageState = dict[str, Any]
"""Metadata of an average: `kind`, `first_step` and `count` (number of averaged steps)."""


def averages_after(settings: Averaging, total_steps: int) -> int:
    """Returns the last step before averaging starts."""
    return round((1 - settings.tail_fraction) * total_steps) if settings.kind == "tail" else 0


def can_continue(settings: Averaging, before: AverageState | None, total_steps: int) -> bool:
    """Returns True if a saved average can be continued with these settings.

    If the run was extended, a tail average that started before the new tail can't be continued.
    """
    if before is None or before["kind"] != settings.kind:
        return False
    return before["first_step"] > averages_after(settings, total_steps)


def average_after_step(
    settings: Averaging, before: AverageState | None, step: int, total_steps: int
) -> tuple[AverageState | None, float]:
    """Returns the average's metadata after `step`, and the weight w_n, which is 1 for a new average.

    Returns (None, 0.0) before averaging starts.
    """
    if step <= averages_after(settings, total_steps):
        return None, 0.0
    if not can_continue(settings, before, total_steps):
        return {"kind": settings.kind, "first_step": step, "count": 1}, 1.0
    count = before["count"] + 1
    weight = 1 / count
    if settings.kind == "ema":
        weight = max(weight, 1 - 2 ** (-settings.every_steps / (settings.half_life_fraction * total_steps)))
    return {**before, "count": count}, weight


def averaging_problems(
    settings: Averaging, *, total_steps: int, exports_average: bool, rounds_stochastically: bool
) -> list[str]:
    """Lists problems with the averaging settings."""
    if settings.kind == "none":
        if exports_average:
            return ["export.weights: average, but averaging.kind is none: set it to ema or tail, or export raw"]
        return []
    problems = []
    if rounds_stochastically:
        problems.append(
            f"averaging.kind: {settings.kind} averages weights in fp32, but optim.stochastic_rounding keeps them in "
            "bf16; use only one of them"
        )
    first = averages_after(settings, total_steps)
    if (count := total_steps // settings.every_steps - first // settings.every_steps) < 2:
        problems.append(
            f"averaging.every_steps: {settings.every_steps:,} averages only {count} of the "
            f"{total_steps - first:,} steps, but an average needs at least two; use at most "
            f"{max(1, (total_steps - first) // 2):,}, or average more of the run"
        )
    return problems


class WeightAverage:
    """Average of the weights, in fp32 and with the same sharding."""

    @torch.no_grad()
    def __init__(self, weights: Mapping[str, torch.Tensor]):
        self.means = {name: weight.detach().clone() for name, weight in weights.items()}

    @torch.no_grad()
    def update(self, weights: Mapping[str, torch.Tensor], share: float) -> None:
        """Moves the average toward the weights by the fraction `share`. Needs no communication or device sync."""
        means = list(map(local_tensor, self.means.values()))
        torch._foreach_lerp_(means, list(map(local_tensor, weights.values())), share)

    @torch.no_grad()
    def exchange(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Swaps the average and the weights. A second call restores both exactly."""
        pairs = zip(self.means.values(), weights.values(), strict=True)
        for mean, weight in (map(local_tensor, pair) for pair in pairs):
            # One tensor at a time, to avoid a third copy of the model.
            kept = weight.clone()
            weight.copy_(mean)
            mean.copy_(kept)
