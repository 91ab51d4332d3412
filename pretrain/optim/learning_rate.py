"""Learning rate as a pure function of progress, so that resuming needs no state.

Steps count from 0. During warmup, step s has the factor (s + 1) / warmup_steps, so the first step changes the weights
and the last warmup step is at the peak. A decay reaches its floor at step == total_steps, one past the run's last step
(as in nanoGPT's get_lr with lr_decay_iters == max_iters), so the last step is just above the floor. Beyond
total_steps, the factor stays at the floor.

A schedule is a function (schedule, step) -> factor of the peak, registered in `registry.SCHEDULES`.
docs/learning_rate.md shows all schedules.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from pretrain.errors import InputError
from pretrain.registry import SCHEDULES

DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""{shape: function from a decay's progress (0 to 1) to the remaining share (1 to 0)}. sqrt is from Hägele et al.,
arXiv 2405.18392.
"""

DECAYING = ("cosine", "linear", "wsd", "infinite")
"""Schedules that decay to a floor at the end of the run. A longer budget may move the end."""


@dataclass(frozen=True)
class Schedule:
    """A run's learning-rate schedule. Raises InputError if its phases are longer than the run."""

    name: str
    """Key in SCHEDULES."""
    total_steps: int
    """Number of optimizer steps in the run."""
    warmup_steps: int = 0
    """Number of linear warmup steps, at most total_steps."""
    final_ratio: float = 0.1
    """Floor of the decay, as a share of the peak."""
    decay_steps: int | None = None
    """Length of the final decay (wsd only). None means 20% of the run."""
    decay_shape: str = "linear"
    """Key in DECAY_SHAPES (wsd only)."""
    cooldown_steps: int | None = None
    """Length of the cosine cooldown after the warmup (infinite only).

    None means 70% of the run. Set it for a run that may be extended, because a default that grows with total_steps
    would change learning rates that were already used.
    """
    constant_ratio: float = 7.5e-6 / 1.4e-5
    """Plateau after the cooldown, as a share of the peak (infinite only)."""
    anneal_steps: int = 0
    """Length of the final annealing (infinite only). With 0, the run ends on the plateau and can be continued."""
    first_step: int = 0
    """First warmup step: 0, or the step at which an ongoing run switched to this schedule."""
    decayed: tuple[int, int, float] | None = None
    """(first step of the final decay, step at which the run's end was moved, the decay's progress at that step).

    The rest of the decay is stretched to total_steps, so that the learning rate doesn't jump. None means that the end
    hasn't moved.
    """

    def __post_init__(self):
        problems = _problems_of_schedule(self)
        if problems:
            raise InputError(*problems)

    def factor(self, step: int) -> float:
        """Returns the share of the peak learning rate at `step`, counted from 0."""
        if step < self.warmup_end:
            return (step - self.first_step + 1) / self.warmup_steps
        return SCHEDULES[self.name](self, step)

    def learning_rate(self, step: int, peak: float) -> float:
        """Returns the learning rate at `step`, counted from 0, for the given peak."""
        return peak * self.factor(step)

    @property
    def warmup_end(self) -> int:
        """First step after the warmup."""
        return self.first_step + self.warmup_steps

    @property
    def steps(self) -> int:
        """Number of steps from the schedule's first step to the end of the run."""
        return self.total_steps - self.first_step

    @property
    def decays_from(self) -> int:
        """First step of the final decay, or total_steps if there is no decay or the whole run decays."""
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
        """Returns the decay's progress before `step`, from 0 to 1."""
        if self.decayed is None:
            return _progress(step, self._decay_begin, self.total_steps)
        _, begin, progress = self.decayed
        return progress + (1.0 - progress) * _progress(step, begin, self.total_steps)

    def moved_to(self, total_steps: int, step: int, planned: "Schedule") -> "Schedule":
        """Returns the schedule after the run's end has moved to `total_steps` at `step`.

        Learning rates up to `step` don't change. If the decay has already begun, the rest of it stretches over the
        remaining steps.

        Args:
            planned: the recipe's schedule for a run with the new length.
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
    """A schedule with an early end: the learning rate decays to the floor from `from_step` on."""

    schedule: Schedule
    from_step: int
    steps: int
    """Length of the decay."""

    @property
    def name(self) -> str:
        return f"{self.schedule.name}, annealing from step {self.from_step:,}"

    @property
    def warmup_steps(self) -> int:
        """Number of linear warmup steps in the schedule."""
        return self.schedule.warmup_steps

    def learning_rate(self, step: int, peak: float) -> float:
        """Returns the learning rate at `step`; see `Schedule.learning_rate`."""
        if step < self.from_step:
            return self.schedule.learning_rate(step, peak)
        begin = self.schedule.factor(max(self.from_step - 1, 0))
        floor = min(begin, self.schedule.final_ratio)
        left = DECAY_SHAPES[self.schedule.decay_shape](_progress(step, self.from_step, self.from_step + self.steps))
        return peak * (floor + (begin - floor) * left)


def cosine(schedule: Schedule, step: int) -> float:
    """Follows half a cosine from the peak to the floor (Loshchilov & Hutter 2017, arXiv 1608.03983; no restarts)."""
    return _decayed(schedule, "cosine", step)


def linear(schedule: Schedule, step: int) -> float:
    """Follows a straight line from the peak to the floor."""
    return _decayed(schedule, "linear", step)


def constant(schedule: Schedule, step: int) -> float:
    """Stays at the peak."""
    return 1.0


def warmup_stable_decay(schedule: Schedule, step: int) -> float:
    """Stays at the peak, then decays to the floor over the last decay_steps (Hu et al. 2024, arXiv 2404.06395)."""
    return _decayed(schedule, schedule.decay_shape, step)


def infinite(schedule: Schedule, step: int) -> float:
    """Cools down along a cosine to a plateau, stays there, and finally anneals exponentially to the floor.

    The annealing takes the last anneal_steps (Ibrahim et al. 2024, arXiv 2403.08763). It starts from the current
    learning rate, even during the cooldown.
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
    """Returns the infinite schedule's cooldown steps: max(min_cooldown_tokens, cooldown_fraction of the run).

    A run shorter than min_cooldown_tokens stays near the peak, because half a cosine starts flat.
    """
    return max(math.ceil(min_cooldown_tokens / tokens_per_step), round(cooldown_fraction * total_steps))


def learning_rate_for_batch(learning_rate_per_sequence: float, sequences_per_step: int) -> float:
    """Returns learning_rate_per_sequence times sqrt(global batch size in sequences).

    Square-root scaling suits optimizers that divide by the gradient's magnitude (Malladi et al. 2022, arXiv
    2205.10287).
    """
    return learning_rate_per_sequence * math.sqrt(sequences_per_step)


def _decayed(schedule: Schedule, shape: str, step: int) -> float:
    left = DECAY_SHAPES[shape](schedule.progress(step))
    return schedule.final_ratio + (1.0 - schedule.final_ratio) * left


def _progress(step: int, start: int, end: int) -> float:
    return min(max((step - start) / max(end - start, 1), 0.0), 1.0)


def _problems_of_schedule(schedule: Schedule) -> list[str]:
    """Lists problems with combinations of settings. The recipe's types check individual settings."""
    if schedule.steps < 1:
        return [f"total_steps {schedule.total_steps:,} is below {schedule.first_step + 1:,}: raise the budget"]
    problems = []
    phases = {"warmup_steps": schedule.warmup_steps}
    if schedule.name == "wsd":
        phases["decay_steps"] = schedule.decay_steps or 0
    if schedule.name == "infinite":
        phases["anneal_steps"] = schedule.anneal_steps
        if schedule.anneal_steps and not schedule.final_ratio:
            problems.append("final_ratio: exponential annealing can't reach 0; use more than 0, such as 0.01")
    if schedule.steps < sum(phases.values()):
        given = " + ".join(f"{name} {steps:,}" for name, steps in phases.items() if steps)
        begins = f" left from step {schedule.first_step:,} on" if schedule.first_step else ""
        problems.append(
            f"{given} is longer than the run of {schedule.steps:,} steps{begins}: shorten it or raise the budget"
        )
    return problems
