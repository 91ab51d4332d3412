"""Batch-size schedule as a pure function of the step."""

import bisect
import itertools
import math
from dataclasses import dataclass, replace
from fractions import Fraction

from pretrain.errors import InputError
from pretrain.units import counted


@dataclass(frozen=True)
class BatchRamp:
    """Piecewise-constant batch-size schedule. Create it with `batch_ramp`."""

    sequences_per_level: tuple[int, ...]
    """Global batch size of each level, in sequences."""
    first_steps: tuple[int, ...]
    """First step of each level, in ascending order, starting from 0."""
    total_steps: int
    """Number of optimizer steps in the run."""
    first_sequences: tuple[int, ...] = ()
    """Number of sequences before each level. If empty, it is computed from the other fields."""

    def __post_init__(self):
        if not self.first_sequences:
            steps = [end - begin for begin, end in itertools.pairwise(self.first_steps)]
            per_level = [count * level for count, level in zip(steps, self.sequences_per_level, strict=False)]
            # Frozen dataclasses don't allow assignment.
            object.__setattr__(self, "first_sequences", tuple(itertools.accumulate(per_level, initial=0)))

    @property
    def total_sequences(self) -> int:
        """Number of sequences in the run."""
        return self.sequences_before(self.total_steps)

    def sequences_at(self, step: int) -> int:
        """Returns the global batch size at `step`, in sequences."""
        return self.sequences_per_level[self._level(step)]

    def sequences_before(self, step: int) -> int:
        """Returns the number of sequences trained before `step`."""
        level = self._level(step)
        sequences = self.first_sequences[level] + (step - self.first_steps[level]) * self.sequences_per_level[level]
        # Old checkpoints may contain only a total instead of all levels.
        return min([sequences, *self.first_sequences[level + 1 : level + 2]])

    def steps_to_reach(self, sequences: int) -> int:
        """Returns the number of steps needed to train on this many sequences."""
        level = max(0, bisect.bisect_left(self.first_sequences, sequences) - 1)
        missing = sequences - self.first_sequences[level]
        return self.first_steps[level] + max(0, -(-missing // self.sequences_per_level[level]))

    def after(self, past: "BatchRamp", step: int, sequences: int) -> "BatchRamp":
        """Returns a schedule that switches from `past` to this one at `step`, after `sequences` sequences."""
        levels = zip(past.sequences_per_level, past.first_steps, past.first_sequences, strict=False)
        levels = [level for level in levels if level[1] < step]
        for first in (step, *(first for first in self.first_steps if first > step)):
            per_step = self.sequences_at(first)
            last_per_step, last_first, last_sequences = levels[-1] if levels else (0, step, sequences)
            reached = last_sequences + (first - last_first) * last_per_step
            before = sequences if first == step else reached
            if per_step != last_per_step or before != reached:
                levels.append((per_step, first, before))
        per_level, first_steps, first_sequences = zip(*levels, strict=True)
        return BatchRamp(per_level, first_steps, self.total_steps, first_sequences)

    def _level(self, step: int) -> int:
        return bisect.bisect_right(self.first_steps, step) - 1


def batch_ramp(
    sequences_per_step: int,
    *,
    total_sequences: int | None = None,
    total_steps: int | None = None,
    ramp_from: float = 1.0,
    ramp_over: float = 0.0,
) -> BatchRamp:
    """Creates a batch-size schedule. Pass either total_sequences or total_steps.

    With ramp_from = 1/n, the batch size increases in n levels: 1/n, 2/n, ..., n/n of sequences_per_step. The levels
    below the full batch size are equally long (in sequences, rounded up to whole steps) and together cover the
    fraction `ramp_over` of the run. The default is a constant batch size. Raises InputError if sequences_per_step
    isn't a multiple of n, or if ramp_over isn't below 1.
    """
    if not ramp_over < 1.0:
        raise InputError(f"batch.ramp.over: {ramp_over} leaves no steps for the full batch size; use a value below 1")
    parts = round(1.0 / ramp_from) if ramp_over else 1
    if rest := sequences_per_step % parts:
        below = sequences_per_step - rest
        nearest = " or ".join(f"{fitting:,}" for fitting in (below, below + parts) if fitting)
        raise InputError(
            f"batch.tokens_per_step: {counted(sequences_per_step, 'sequence')} per step is not a multiple of {parts} "
            f"ramp levels; nearest: {nearest} sequences"
        )
    levels = [sequences_per_step * part // parts for part in range(1, parts + 1)]
    # With floats, a rounding error could move the end of a level by a step.
    over = Fraction(ramp_over).limit_denominator(10**6)
    if total_sequences is None:
        # Smaller batches need more steps for the same number of sequences.
        steps_below = sum(Fraction(sequences_per_step, level) for level in levels[:-1])
        steps_per_full = 1 - over + (over * steps_below / (parts - 1) if parts > 1 else over)
        target = total_steps * sequences_per_step / steps_per_full
    else:
        target = total_sequences
    first_steps = [0]
    seen = 0
    for index, level in enumerate(levels[:-1], start=1):
        steps = max(0, math.ceil((target * over * index / (parts - 1) - seen) / level))
        seen += steps * level
        first_steps.append(first_steps[-1] + steps)
    ramp = BatchRamp(tuple(levels), tuple(first_steps), 0)
    return replace(ramp, total_steps=ramp.steps_to_reach(total_sequences) if total_steps is None else total_steps)
