"""Chooses vocabulary, shape, tokens and batch for a text of some size and an amount of computation.

Pure functions: sized_recipe measures the machine, own_text writes the recipe.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pretrain_tools.planning.families import LLAMA_RUNGS, Shape

LADDER = LLAMA_RUNGS[:11]
"""(layers, width) of the Llamas to choose from for a text, smallest first, up to 24 x 2,048."""
SMALLEST_VOCABULARY_CHOSEN = 512
LARGEST_VOCABULARY_CHOSEN = 32_768
MOST_HEAD_SHARE = 0.5
"""Largest ratio of the head's parameters to those of the layers."""

# Hoffmann et al.'s law (arXiv 2203.15556) as fitted by Muennighoff et al. (arXiv 2305.16264, appendix A): loss =
# E + A / N^alpha + B / D^alpha. Their models begin at 7M parameters; below, it is an extrapolation.
LOSS_FLOOR = 1.869
"""E, in nats per token."""
LOSS_BY_PARAMETERS = 520.9
"""A."""
LOSS_BY_TOKENS = 1487.6
"""B."""
LOSS_EXPONENT = 0.35266
"""alpha."""
REPEATED_TOKENS = 15.39
"""R_D* of Muennighoff et al.: the scale, in epochs, on which repeating stops to help."""
EXCESS_PARAMETERS = 5.31
"""R_N* of Muennighoff et al.: the scale, in optimal models, on which enlarging stops to help."""
MOST_EPOCHS = 5.0
"""They found four epochs worth almost as much as new text. On 1 MB a model of 0.6M parameters, far below theirs, ended
at a validation loss of 3.96 after four epochs and of 4.11 after nine: it memorises."""
WORTHWHILE = 0.01
"""Relative gain of the expected loss that a larger model must bring, unless it uses time that would be left over."""
MOST_LOST = 0.04
"""Expected loss, relative, that using all of the time may cost. At these sizes the law expects more than is so. On
2 MB, 4 x 128 ended at a validation loss of 3.486 after 4.2 epochs in three minutes, and 2 x 128 at 3.496 after five
epochs in 2:23. On 1 MB, 4 x 192 ended at 3.622 after 4.6 epochs in three minutes, and 4 x 128 at 3.589 after five in
1:54."""
SPEED_MAY_RISE = 2.0
"""A run may take so many times the expected steps, if the machine turns out to be faster than expected."""
MOST_TIMES_LARGER = 8.0
"""Largest ratio of the chosen model's parameters to those of a small model that would leave time over."""
TIME_USED = 0.9
"""Share of the time from which on it counts as used."""

BATCH_OF_THE_DEMO = 2048
"""Tokens per step in a run of TOKENS_OF_THE_DEMO. From there the batch grows with the square root of the tokens, in
powers of two: hundreds of steps in a run of minutes, tens of thousands in one of days."""
TOKENS_OF_THE_DEMO = 1.2e6
SMALLEST_BATCH = 512
"""Tokens per step."""
LARGEST_BATCH = 2**19
"""Tokens per step."""
OF_THE_DEMO = Shape(4, 256, 1024)


@dataclass(frozen=True)
class Sizing:
    """The model and the run that were chosen."""

    shape: Shape
    unique_tokens: int
    tokens_per_step: int
    steps: int
    """Expected steps. A multiple of four: validation and samples come with each quarter, the last at the end."""
    most_steps: int
    """Steps at which the run ends, however much time is left."""

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def epochs(self) -> float:
        return self.tokens / self.unique_tokens

    @property
    def flops(self) -> float:
        return self.tokens * self.shape.flops_per_token


def vocabulary_for(text_bytes: int, flops: float) -> int:
    """Chooses a power of two: 1,024 for 1 MB of text, 8 times as many for 100 times the text.

    It is smaller if the head would waste the computation of the model that these FLOPs allow.
    """
    size = 2 ** round(10 + 1.5 * math.log10(text_bytes / 1e6))
    size = min(max(size, SMALLEST_VOCABULARY_CHOSEN), LARGEST_VOCABULARY_CHOSEN)
    # The best model for text without repetition has G x sqrt(C / 6) parameters.
    affordable = math.sqrt(parameters_per_token() * flops / 6)
    shapes = [Shape(*rung, size) for rung in LADDER]
    nearest = min(shapes, key=lambda shape: abs(math.log(shape.layer_parameters / affordable)))
    while size > SMALLEST_VOCABULARY_CHOSEN and size * nearest.width > MOST_HEAD_SHARE * nearest.layer_parameters:
        size //= 2
    return size


def padded(vocabulary: int) -> int:
    """Rounds up to a multiple of 64, for the kernels."""
    return math.ceil(vocabulary / 64) * 64


def parameters_per_token() -> float:
    """Returns parameters per token at the optimum: 1 / 19.6 for any computation, since both exponents are equal."""
    return (LOSS_BY_PARAMETERS / LOSS_BY_TOKENS) ** (1 / LOSS_EXPONENT)


def expected_loss(parameters: float, tokens: float, unique_tokens: float = math.inf) -> float:
    """Estimates nats per token, by the law for repeated data; only to compare models with."""
    # Parameters beyond the optimum for the unique tokens are worth less, as repeated tokens are.
    unique_parameters = min(parameters, unique_tokens * parameters_per_token())
    effective_parameters = with_repetition(parameters, unique_parameters, EXCESS_PARAMETERS)
    effective_tokens = with_repetition(tokens, min(tokens, unique_tokens), REPEATED_TOKENS)
    by_parameters = LOSS_BY_PARAMETERS / effective_parameters**LOSS_EXPONENT
    return LOSS_FLOOR + by_parameters + LOSS_BY_TOKENS / effective_tokens**LOSS_EXPONENT


def with_repetition(amount: float, unique: float, scale: float) -> float:
    """Returns the worth of an amount of which only `unique` is new: U + U R* (1 - exp(-(amount / U - 1) / R*))."""
    return unique * (1 + scale * -math.expm1(-(amount / unique - 1) / scale))


def choose_sizing(
    flops: Callable[[Shape], float], unique_tokens: int, vocabulary: int, most_parameters: float = math.inf
) -> Sizing:
    """Chooses the smallest model whose expected loss no other beats by more than WORTHWHILE, and what to train it on.

    Where MOST_EPOCHS of the text would leave time over, it is a larger model that uses it, for fewer epochs.

    Args:
        flops: what can be spent on a model; less is where the text would be repeated more than MOST_EPOCHS times.
        unique_tokens: of the training split.
        most_parameters: that the machine's memory holds.
    """
    shapes = [Shape(*rung, vocabulary) for rung in LADDER]
    shapes = [shape for shape in shapes if shape.parameters <= most_parameters] or shapes[:1]
    in_time = {shape: flops(shape) / shape.flops_per_token for shape in shapes}
    most = MOST_EPOCHS * unique_tokens
    tokens = {shape: min(in_time[shape], most) for shape in shapes}
    smallest = best_shape(tokens, unique_tokens)
    larger = [shape for shape in shapes if 1 <= shape.parameters / smallest.parameters <= MOST_TIMES_LARGER]
    # `larger` begins with the smallest itself, so there is always a useful one.
    useful = [shape for shape in larger if is_as_good(shape, smallest, tokens, unique_tokens)]
    shape = next((shape for shape in useful if most >= TIME_USED * in_time[shape]), useful[-1])
    batch = batch_for(tokens[shape], max(SMALLEST_BATCH, shape.sequence_length), LARGEST_BATCH)
    # A multiple of four: validation, checkpoints and samples come with each quarter.
    steps = 4 * max(1, round(tokens[shape] / batch / 4))
    most_steps = max(steps, round(min(most, SPEED_MAY_RISE * in_time[shape]) / batch))
    return Sizing(shape, unique_tokens, batch, steps, most_steps)


def is_as_good(shape: Shape, other: Shape, tokens: Mapping[Shape, float], unique_tokens: float) -> bool:
    """Tells if a shape's expected loss is within MOST_LOST of another's."""
    mine, others = (expected_loss(one.active, tokens[one], unique_tokens) for one in (shape, other))
    return mine <= (1 + MOST_LOST) * others


def best_shape(tokens: Mapping[Shape, float], unique_tokens: float) -> Shape:
    """Chooses the first of these, smallest first, whose expected loss no other beats by more than WORTHWHILE.

    tokens: that each can be trained on.
    """
    losses = {shape: expected_loss(shape.active, tokens[shape], unique_tokens) for shape in tokens}
    best = min(losses.values())
    return next(shape for shape in tokens if losses[shape] <= (1 + WORTHWHILE) * best)


def nearest_shape(tokens: Mapping[Shape, float], tokens_per_parameter: float) -> Shape:
    """Chooses the shape whose tokens per active parameter are nearest to this ratio."""
    return min(tokens, key=lambda shape: abs(math.log(tokens[shape] / shape.active / tokens_per_parameter)))


def batch_for(tokens: float, smallest: int, largest: int) -> int:
    """Chooses the tokens per step: a power of two."""
    wanted = BATCH_OF_THE_DEMO * math.sqrt(tokens / TOKENS_OF_THE_DEMO)
    return 2 ** round(math.log2(min(max(wanted, smallest), largest)))
