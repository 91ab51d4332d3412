"""Keeps a running mean of the weights, which are noisy at a constant learning rate.

With weights s_1, s_2, ... after every k-th step (k: averaging.every_steps), the mean m is

    m_1 = s_1,    m_n = m_(n-1) + w_n (s_n - m_(n-1))
    tail:  w_n = 1 / n
    ema:   w_n = max(1 / n, 1 - 2^(-k / h)),    h = half_life_fraction x steps of the run

tail is the uniform mean over the end of a run (LAWA: Kaddour, arXiv 2209.14981; Sanyal et al., arXiv 2306.03241). ema
is the exponential mean with a decay per step of 2^(-1 / h), applied k steps at a time. It starts as a uniform mean
instead of using a bias correction. As in Karras et al., arXiv 2312.02696, the half-life is relative to the run's
length.
"""

from collections.abc import Mapping
from typing import Any

import torch

from pretrain.config import Averaging
from pretrain.optim.optimizers import local_tensor

AverageState = dict[str, Any]
"""An average's metadata: its `kind`, the `first_step` included, and the `count` of steps."""


def averages_after(settings: Averaging, total_steps: int) -> int:
    """Returns the last step before the average begins."""
    return round((1 - settings.tail_fraction) * total_steps) if settings.kind == "tail" else 0


def can_continue(settings: Averaging, before: AverageState | None, total_steps: int) -> bool:
    """Returns True if an average can continue.

    Its kind must be the same. If the run was extended, the average must not contain weights from before the longer
    run's tail.
    """
    if before is None or before["kind"] != settings.kind:
        return False
    return before["first_step"] > averages_after(settings, total_steps)


def average_after_step(
    settings: Averaging, before: AverageState | None, step: int, total_steps: int
) -> tuple[AverageState | None, float]:
    """Returns the average's metadata after including `step`, and the weight w_n for the weights at that step.

    The metadata is None if there is no average yet. A weight of 1 starts an average.
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
    """Lists problems with the averaging settings in a run of `total_steps`."""
    if settings.kind == "none":
        if exports_average:
            return ["export.weights: average, but averaging.kind is none: set it to ema or tail, or export raw"]
        return []
    problems = []
    if rounds_stochastically:
        problems.append(
            f"averaging.kind: {settings.kind} averages weights in fp32, but optim.stochastic_rounding keeps them in "
            "bf16; omit one of them"
        )
    first = averages_after(settings, total_steps)
    if (count := total_steps // settings.every_steps - first // settings.every_steps) < 2:
        problems.append(
            f"averaging.every_steps: {settings.every_steps:,} averages only {count} of the "
            f"{total_steps - first:,} steps, but a mean needs two; use at most "
            f"{max(1, (total_steps - first) // 2):,}, or average more of the run"
        )
    return problems


class WeightAverage:
    """Mean of this rank's weight shards, in fp32 and with the same layout."""

    @torch.no_grad()
    def __init__(self, weights: Mapping[str, torch.Tensor]):
        self.means = {name: weight.detach().clone() for name, weight in weights.items()}

    @torch.no_grad()
    def update(self, weights: Mapping[str, torch.Tensor], share: float) -> None:
        """Moves the mean toward the weights by `share`, without communication or waiting for the device."""
        means = list(map(local_tensor, self.means.values()))
        torch._foreach_lerp_(means, list(map(local_tensor, weights.values())), share)

    @torch.no_grad()
    def exchange(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Swaps the mean and the weights bit for bit. A second call restores both."""
        pairs = zip(self.means.values(), weights.values(), strict=True)
        for mean, weight in (map(local_tensor, pair) for pair in pairs):
            # Swapping one tensor at a time avoids a third copy of the model.
            kept = weight.clone()
            weight.copy_(mean)
            mean.copy_(kept)
