"""The batch size as a pure function of the step: no state, so a resumed run needs none."""

import bisect
import math
from dataclasses import dataclass
from fractions import Fraction

from pretrain.errors import InputError


@dataclass(frozen=True)
class BatchRamp:
    """Sequences per optimizer step over a run: levels that rise to the full batch. Built by `batch_ramp`."""

    sequences_per_level: tuple[int, ...]
    """Global batch of each level in sequences, ascending; the last is the full batch."""
    first_steps: tuple[int, ...]
    """Step at which each level begins; the first is 0."""
    total_steps: int
    """Optimizer steps of the run."""

    @property
    def total_sequences(self) -> int:
        """Sequences that the run's steps hold: the budget, rounded up to whole steps."""
        return self.sequences_before(self.total_steps)

    def sequences_at(self, step: int) -> int:
        """Global batch of `step` in sequences."""
        return self.sequences_per_level[bisect.bisect_right(self.first_steps, step) - 1]

    def sequences_before(self, step: int) -> int:
        """Sequences seen by all steps before `step`; costs one term per level, whatever the step."""
        ends = (*self.first_steps[1:], step)
        steps = (max(0, min(step, end) - first) for first, end in zip(self.first_steps, ends, strict=True))
        return sum(n * level for n, level in zip(steps, self.sequences_per_level, strict=True))

    def steps_to_reach(self, sequences: int) -> int:
        """Fewest steps after which at least that many sequences were seen."""
        level = len(self.first_steps) - 1
        while level > 0 and self.sequences_before(self.first_steps[level]) >= sequences:
            level -= 1
        first_step, per_step = self.first_steps[level], self.sequences_per_level[level]
        return first_step + max(0, _ceil_div(sequences - self.sequences_before(first_step), per_step))


def batch_ramp(
    sequences_per_step: int,
    *,
    sequences_per_group: int = 1,
    total_sequences: int | None = None,
    total_steps: int | None = None,
    ramp_from: float = 1.0,
    ramp_over: float = 0.0,
) -> BatchRamp:
    """The batch sizes of a run whose budget is total_sequences, or exactly total_steps.

    With ramp_from = 1/n the batch climbs 1/n, 2/n ... n/n of sequences_per_step in equal steps; the levels below the
    full batch share the first `ramp_over` of the run's sequences equally, each rounded up to whole steps. The
    defaults give a constant batch. sequences_per_group is what all ranks take in one micro-step: micro-batch x ranks.

    Raises InputError if a level is not a multiple of sequences_per_group, naming the nearest batches that fit.
    """
    levels = _levels(sequences_per_step, sequences_per_group, ramp_from, ramp_over)
    if (total_sequences is None) == (total_steps is None):
        raise InputError("a run needs exactly one budget: total_sequences or total_steps")
    over = Fraction(ramp_over).limit_denominator(10**6)
    if total_sequences is None:
        # Sequences x steps per sequence = total_steps: a level below the full batch takes more steps per sequence.
        steps_below = Fraction(sum(Fraction(sequences_per_step, level) for level in levels[:-1]))
        steps_per_full = 1 - over + (over * steps_below / (len(levels) - 1) if len(levels) > 1 else over)
        target = Fraction(total_steps * sequences_per_step) / steps_per_full
    else:
        target = Fraction(total_sequences)
    first_steps, seen = [0], 0
    for index, level in enumerate(levels[:-1], start=1):
        steps = max(0, math.ceil((target * over * index / (len(levels) - 1) - seen) / level))
        seen += steps * level
        first_steps.append(first_steps[-1] + steps)
    ramp = BatchRamp(tuple(levels), tuple(first_steps), 0)
    steps = ramp.steps_to_reach(total_sequences) if total_steps is None else total_steps
    return BatchRamp(ramp.sequences_per_level, ramp.first_steps, steps)


def _levels(sequences_per_step: int, sequences_per_group: int, ramp_from: float, ramp_over: float) -> list[int]:
    problems = []
    if not 0.0 < ramp_from <= 1.0 or abs(1.0 / round(1.0 / ramp_from) - ramp_from) > 0.005 * ramp_from:
        problems.append(f"ramp from {ramp_from} is not one part of a whole batch: use 1/2, 1/3, 1/4 (0.25) ... 1/n")
    if not 0.0 <= ramp_over < 1.0:
        problems.append(f"ramp over {ramp_over} is not a share of the run: use 0 (no ramp) up to, not including, 1")
    if problems:
        raise InputError(*problems)
    parts = round(1.0 / ramp_from) if ramp_over > 0.0 else 1
    unit = parts * sequences_per_group
    if sequences_per_step % unit:
        below, above = sequences_per_step // unit * unit, _ceil_div(sequences_per_step, unit) * unit
        nearest = f"{below:,} or {above:,}" if below else f"{above:,}"
        ramp_term = f"{parts} ramp levels x " if parts > 1 else ""
        raise InputError(
            f"{sequences_per_step:,} sequences per step is not a multiple of {ramp_term}{sequences_per_group:,} "
            f"sequences per micro-step of all ranks = {unit:,}; nearest: {nearest}"
        )
    return [sequences_per_step * part // parts for part in range(1, parts + 1)]


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
