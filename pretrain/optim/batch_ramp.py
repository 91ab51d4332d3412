"""The batch size as a pure function of the step: no state, so a resumed run needs none."""

import bisect
import math
from dataclasses import dataclass, replace
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
        return first_step + max(0, -(-(sequences - self.sequences_before(first_step)) // per_step))


def batch_ramp(
    sequences_per_step: int,
    *,
    total_sequences: int | None = None,
    total_steps: int | None = None,
    ramp_from: float = 1.0,
    ramp_over: float = 0.0,
) -> BatchRamp:
    """The batch sizes of a run whose budget is total_sequences, or exactly total_steps: one of the two.

    With ramp_from = 1/n the batch climbs 1/n, 2/n ... n/n of sequences_per_step, a multiple of n; the levels below the
    full batch share the first `ramp_over` of the run's sequences equally, each rounded up to whole steps. The defaults
    give a constant batch. Raises InputError for a batch that is not a multiple of n and a ramp that never ends.
    """
    if not ramp_over < 1.0:
        raise InputError(f"batch.ramp.over: {ramp_over} leaves no part of the run for the full batch; use less than 1")
    parts = round(1.0 / ramp_from) if ramp_over else 1
    if rest := sequences_per_step % parts:
        below = sequences_per_step - rest
        nearest = " or ".join(f"{fitting:,}" for fitting in (below, below + parts) if fitting)
        raise InputError(
            f"{sequences_per_step:,} sequences per step is not a multiple of {parts} ramp levels; nearest: {nearest}"
        )
    levels = [sequences_per_step * part // parts for part in range(1, parts + 1)]
    over = Fraction(ramp_over).limit_denominator(10**6)
    if total_sequences is None:
        # Sequences x steps per sequence = total_steps: a level below the full batch takes more steps per sequence.
        steps_below = Fraction(sum(Fraction(sequences_per_step, level) for level in levels[:-1]))
        steps_per_full = 1 - over + (over * steps_below / (parts - 1) if parts > 1 else over)
        target = Fraction(total_steps * sequences_per_step) / steps_per_full
    else:
        target = Fraction(total_sequences)
    first_steps, seen = [0], 0
    for index, level in enumerate(levels[:-1], start=1):
        steps = max(0, math.ceil((target * over * index / (parts - 1) - seen) / level))
        seen += steps * level
        first_steps.append(first_steps[-1] + steps)
    ramp = BatchRamp(tuple(levels), tuple(first_steps), 0)
    return replace(ramp, total_steps=ramp.steps_to_reach(total_sequences) if total_steps is None else total_steps)
