"""Learning-rate schedules, which are pure functions of the step.

Steps are counted from 0. During warmup, the factor at step s is (s + 1) / warmup_steps, so the first learning rate
isn't 0 and the last warmup step uses the peak. The decay reaches its floor at step == total_steps, one step after the
last one, as in nanoGPT's get_lr with lr_decay_iters == max_iters.

A schedule is a function (schedule, step) -> fraction of the peak, registered in `registry.SCHEDULES`.
docs/learning_rate.md describes all schedules.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real

from pretrain.errors import InputError
from pretrain.registry import SCHEDULES

DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""{shape: function that maps progress (0 to 1) to a factor (1 to 0)}. sqrt is from Hägele et al., arXiv 2405.18392."""

DECAYING = ("cosine", "linear", "wsd", "infinite")
"""Schedules that decay to a floor at the end of the run."""


@dataclass(frozen=True)
class Schedule:
    """Learning-rate schedule. Raises InputError if its phases don't fit in the run."""

    name: str
    """Key in SCHEDULES."""
    total_steps: int
    """Number of optimizer steps in the run."""
    warmup_steps: int = 0
    """Number of linear warmup steps, at most total_steps."""
    final_ratio: float = 0.1
    """Learning rate after the decay, as a fraction of the peak."""
    decay_steps: int | None = None
    """Number of steps in the final decay (wsd only). None means 20% of the run."""
    decay_shape: str = "linear"
    """Key in DECAY_SHAPES (wsd only)."""
    cooldown_steps: int | None = None
    """Number of steps in the cosine cooldown after the warmup (infinite only). None means 70% of the run.

    Set it if the run may be extended. Otherwise, extending it would change past learning rates.
    """
    constant_ratio: float = 7.5e-6 / 1.4e-5
    """Learning rate after the cooldown, as a fraction of the peak (infinite only)."""
    anneal_steps: int = 0
    """Number of steps in the final annealing (infinite only). With 0, the run ends at the constant learning rate."""
    first_step: int = 0
    """First warmup step: 0, or the step at which the run switched to this schedule."""
    decayed: tuple[int, int, float] | None = None
    """(first decay step, step at which total_steps was changed, decay progress at that step).

    The rest of the decay is stretched to total_steps, so that the learning rate doesn't jump. None if total_steps
    wasn't changed during the decay.
    """

    def __post_init__(self):
        problems = _problems_of_schedule(self)
        if problems:
            raise InputError(*problems)

    def factor(self, step: int) -> float:
        """Returns the learning rate at `step`, as a fraction of the peak.

        Raises InputError unless the schedule returns a finite number of at least 0.
        """
        if step < self.warmup_end:
            return (step - self.first_step + 1) / self.warmup_steps
        factor = SCHEDULES[self.name](self, step)
        if isinstance(factor, Real) and 0 <= factor < math.inf:
            return float(factor)
        raise InputError(
            f"optim.schedule: {self.name} returned {factor!r} at step {step:,}; it must return the learning rate as a "
            "fraction of its peak, a finite number of at least 0"
        )

    def learning_rate(self, step: int, peak: float) -> float:
        """Returns the learning rate at `step`."""
        return peak * self.factor(step)

    @property
    def warmup_end(self) -> int:
        """First step after the warmup."""
        return self.first_step + self.warmup_steps

    @property
    def steps(self) -> int:
        """Number of steps from first_step to the end of the run."""
        return self.total_steps - self.first_step

    @property
    def decays_from(self) -> int:
        """First step of the final decay (wsd, infinite). Equal to total_steps for other schedules."""
        return self._decay_begin if self.name in ("wsd", "infinite") else self.total_steps

    @property
    def _decay_begin(self) -> int:
        """First step of the decay to the floor."""
        if self.decayed is not None:
            return self.decayed[0]
        if self.name == "wsd":
            decay_steps = round(0.2 * self.steps) if self.decay_steps is None else self.decay_steps
            return max(self.warmup_end, self.total_steps - decay_steps)
        if self.name == "infinite":
            return self.total_steps - self.anneal_steps
        return self.warmup_end

    def progress(self, step: int) -> float:
        """Returns the decay progress at `step`, from 0 to 1."""
        if self.decayed is None:
            return _progress(step, self._decay_begin, self.total_steps)
        _, begin, progress = self.decayed
        return progress + (1.0 - progress) * _progress(step, begin, self.total_steps)

    def moved_to(self, total_steps: int, step: int, planned: "Schedule") -> "Schedule":
        """Returns the schedule after total_steps was changed at `step`. Past learning rates don't change.

        If the decay has already started, it is stretched over the remaining steps.

        Args:
            planned: the recipe's schedule for the new total_steps.
        """
        kept = {"total_steps": total_steps, "first_step": self.first_step, "warmup_steps": self.warmup_steps}
        if self.name == "infinite":
            kept["cooldown_steps"] = self.cooldown_steps
        moved = replace(planned, **kept)
        if moved.name not in DECAYING or (moved.name == "infinite" and not moved.anneal_steps):
            return moved
        progress = self.progress(step)
        if progress > 0.0:
            return replace(moved, decayed=(self._decay_begin, step, progress))
        return replace(moved, decayed=(step, step, 0.0)) if moved.decays_from < step else moved


@dataclass(frozen=True)
class Annealing:
    """Schedule that ends early, with a decay to the floor starting at `from_step`."""

    schedule: Schedule
    from_step: int
    steps: int
    """Number of steps in the decay."""

    @property
    def name(self) -> str:
        return f"{self.schedule.name}, annealing from step {self.from_step:,}"

    @property
    def warmup_steps(self) -> int:
        """Number of linear warmup steps."""
        return self.schedule.warmup_steps

    def learning_rate(self, step: int, peak: float) -> float:
        """Returns the learning rate at `step`."""
        if step < self.from_step:
            return self.schedule.learning_rate(step, peak)
        begin = self.schedule.factor(max(self.from_step - 1, 0))
        floor = min(begin, self.schedule.final_ratio)
        left = DECAY_SHAPES[self.schedule.decay_shape](_progress(step, self.from_step, self.from_step + self.steps))
        return peak * (floor + (begin - floor) * left)


def cosine(schedule: Schedule, step: int) -> float:
    """Decays from the peak to the floor along a half cosine (Loshchilov & Hutter 2017, arXiv 1608.03983)."""
    return _decayed(schedule, "cosine", step)


def linear(schedule: Schedule, step: int) -> float:
    """Decays linearly from the peak to the floor."""
    return _decayed(schedule, "linear", step)


def constant(schedule: Schedule, step: int) -> float:
    """Stays at the peak."""
    return 1.0


def warmup_stable_decay(schedule: Schedule, step: int) -> float:
    """Stays at the peak, then decays to the floor in the last decay_steps (Hu et al. 2024, arXiv 2404.06395)."""
    return _decayed(schedule, schedule.decay_shape, step)


def infinite(schedule: Schedule, step: int) -> float:
    """Decays with a cosine to a constant learning rate, then anneals exponentially in the last anneal_steps.

    From Ibrahim et al. 2024, arXiv 2403.08763. If annealing starts during the cooldown, it replaces the rest of the
    cooldown.
    """
    cooldown_steps = round(0.7 * schedule.steps) if schedule.cooldown_steps is None else schedule.cooldown_steps
    cooling = _progress(min(step, schedule.decays_from), schedule.warmup_end, schedule.warmup_end + cooldown_steps)
    plateau = schedule.constant_ratio
    factor = plateau + (1.0 - plateau) * DECAY_SHAPES["cosine"](cooling)
    if not schedule.anneal_steps:
        return factor
    return factor * (schedule.final_ratio / factor) ** schedule.progress(step)


def cooldown_steps_of_infinite(
    total_steps: int, tokens_per_step: int, min_cooldown_tokens: int = 0, cooldown_fraction: float = 0.7
) -> int:
    """Returns the number of cooldown steps: cooldown_fraction of the run, but at least min_cooldown_tokens."""
    return max(math.ceil(min_cooldown_tokens / tokens_per_step), round(cooldown_fraction * total_steps))


def learning_rate_for_batch(learning_rate_per_sequence: float, sequences_per_step: int) -> float:
    """Scales the learning rate with the square root of the batch size (Malladi et al. 2022, arXiv 2205.10287)."""
    return learning_rate_per_sequence * math.sqrt(sequences_per_step)


def _decayed(schedule: Schedule, shape: str, step: int) -> float:
    left = DECAY_SHAPES[shape](schedule.progress(step))
    return schedule.final_ratio + (1.0 - schedule.final_ratio) * left


def _progress(step: int, start: int, end: int) -> float:
    return min(max((step - start) / max(end - start, 1), 0.0), 1.0)


def _problems_of_schedule(schedule: Schedule) -> list[str]:
    """Lists invalid combinations of settings. `pretrain.config` validates individual settings."""
    if schedule.steps < 1:
        return [
            f"total_steps must be at least {schedule.first_step + 1:,}, got {schedule.total_steps:,}; raise the budget"
        ]
    problems = []
    phases = {"warmup_steps": schedule.warmup_steps}
    if schedule.name == "wsd":
        phases["decay_steps"] = schedule.decay_steps or 0
    if schedule.name == "infinite":
        phases["anneal_steps"] = schedule.anneal_steps
        if schedule.anneal_steps and not schedule.final_ratio:
            problems.append("final_ratio: exponential annealing can't reach 0; use a positive value, such as 0.01")
    if schedule.steps < sum(phases.values()):
        given = " + ".join(f"{name} {steps:,}" for name, steps in phases.items() if steps)
        begins = f" starting at step {schedule.first_step:,}" if schedule.first_step else ""
        problems.append(
            f"{given} is longer than the run ({schedule.steps:,} steps{begins}); shorten it or raise the budget"
        )
    return problems
