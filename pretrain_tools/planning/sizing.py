"""Chooses the vocabulary size, model shape, token count and batch size for an amount of text and a FLOP budget."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pretrain_tools.planning.families import LLAMA_RUNGS, Shape

LADDER = LLAMA_RUNGS[:11]
"""(layers, width) of the available Llama models, smallest first, up to 24 x 2,048."""
SMALLEST_VOCABULARY_CHOSEN = 512
LARGEST_VOCABULARY_CHOSEN = 32_768
MOST_HEAD_SHARE = 0.5
"""Maximum ratio of head parameters to layer parameters."""

# Scaling law of Hoffmann et al. (arXiv 2203.15556), fitted by Muennighoff et al. (arXiv 2305.16264, appendix A):
# loss = E + A / N^alpha + B / D^alpha. It is extrapolated below 7M parameters, their smallest model.
LOSS_FLOOR = 1.869
"""E, in nats per token."""
LOSS_BY_PARAMETERS = 520.9
"""A."""
LOSS_BY_TOKENS = 1487.6
"""B."""
LOSS_EXPONENT = 0.35266
"""alpha."""
REPEATED_TOKENS = 15.39
"""R_D* of Muennighoff et al.: the scale, in epochs, at which repetition stops helping."""
EXCESS_PARAMETERS = 5.31
"""R_N* of Muennighoff et al.: the scale, in optimal models, at which a larger model stops helping."""
MOST_EPOCHS = 5.0
"""Maximum number of epochs. In their experiments, four epochs were almost as good as new data. On 1 MB of text, our
0.6M-parameter model overfit: its validation loss was 3.96 after four epochs and 4.11 after nine."""
WORTHWHILE = 0.01
"""Relative improvement in expected loss that justifies a larger model."""
MOST_LOST = 0.04
"""Maximum relative increase in expected loss for using all of the time. The scaling law overestimates this increase.

On 2 MB, 4 x 128 reached a validation loss of 3.486 after 4.2 epochs in three minutes, and 2 x 128 reached 3.496 after
five epochs in 2:23. On 1 MB, 4 x 192 reached 3.622 after 4.6 epochs in three minutes, and 4 x 128 reached 3.589 after
five epochs in 1:54.
"""
SPEED_MAY_RISE = 2.0
"""Maximum ratio of actual to expected steps, in case the machine is faster than expected."""
MOST_TIMES_LARGER = 8.0
"""Maximum model size relative to the model that would leave time unused."""
TIME_USED = 0.9
"""Fraction of the time above which it counts as fully used."""

BATCH_OF_THE_DEMO = 2048
"""Tokens per step in a run of TOKENS_OF_THE_DEMO tokens. The batch size grows with the square root of the run's token
count, in powers of two."""
TOKENS_OF_THE_DEMO = 1.2e6
SMALLEST_BATCH = 512
"""Tokens per step."""
LARGEST_BATCH = 2**19
"""Tokens per step."""
OF_THE_DEMO = Shape(4, 256, 1024)


@dataclass(frozen=True)
class Sizing:
    """The chosen model and run."""

    shape: Shape
    unique_tokens: int
    tokens_per_step: int
    steps: int
    """Expected number of steps, a multiple of four."""
    most_steps: int
    """Maximum number of steps, even if time is left."""

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def epochs(self) -> float:
        return self.tokens / self.unique_tokens


def vocabulary_for(text_bytes: int, flops: float) -> int:
    """Chooses a vocabulary size: 1,024 for 1 MB of text and 8 times that for 100 MB, in powers of two.

    Chooses a smaller size if the head would use too large a share of the FLOPs.
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


def parameters_per_token() -> float:
    """Returns the optimal parameters per token: 1 / 19.6 for any compute budget, because both exponents are equal."""
    return (LOSS_BY_PARAMETERS / LOSS_BY_TOKENS) ** (1 / LOSS_EXPONENT)


def expected_loss(parameters: float, tokens: float, unique_tokens: float = math.inf) -> float:
    """Estimates the loss in nats per token with the scaling law for repeated data. Use it only for comparisons."""
    # Parameters beyond the optimum for the unique tokens are worth less, like repeated tokens.
    unique_parameters = min(parameters, unique_tokens * parameters_per_token())
    effective_parameters = with_repetition(parameters, unique_parameters, EXCESS_PARAMETERS)
    effective_tokens = with_repetition(tokens, min(tokens, unique_tokens), REPEATED_TOKENS)
    by_parameters = LOSS_BY_PARAMETERS / effective_parameters**LOSS_EXPONENT
    return LOSS_FLOOR + by_parameters + LOSS_BY_TOKENS / effective_tokens**LOSS_EXPONENT


def with_repetition(amount: float, unique: float, scale: float) -> float:
    """Returns the effective amount when `unique` is repeated: U + U R* (1 - exp(-(amount / U - 1) / R*))."""
    return unique * (1 + scale * -math.expm1(-(amount / unique - 1) / scale))


def choose_sizing(
    flops: Callable[[Shape], float], unique_tokens: int, vocabulary: int, most_parameters: float = math.inf
) -> Sizing:
    """Chooses the smallest model within WORTHWHILE of the best expected loss, and how long to train it.

    If training for MOST_EPOCHS would leave time unused, chooses a larger model.

    Args:
        flops: maximum training FLOPs for a shape.
        unique_tokens: number of tokens in the training split.
        most_parameters: maximum number of parameters that fits in memory.
    """
    shapes = [Shape(*rung, vocabulary) for rung in LADDER]
    shapes = [shape for shape in shapes if shape.parameters <= most_parameters] or shapes[:1]
    in_time = {shape: flops(shape) / shape.flops_per_token for shape in shapes}
    most = MOST_EPOCHS * unique_tokens
    tokens = {shape: min(in_time[shape], most) for shape in shapes}
    smallest = best_shape(tokens, unique_tokens)
    larger = [shape for shape in shapes if 1 <= shape.parameters / smallest.parameters <= MOST_TIMES_LARGER]
    losses = {shape: expected_loss(shape.active, tokens[shape], unique_tokens) for shape in larger}
    # never empty, because `larger` includes `smallest`
    useful = [shape for shape in larger if losses[shape] <= (1 + MOST_LOST) * losses[smallest]]
    shape = next((shape for shape in useful if most >= TIME_USED * in_time[shape]), useful[-1])
    batch = batch_for(tokens[shape], max(SMALLEST_BATCH, shape.sequence_length), LARGEST_BATCH)
    # Validation, checkpoints and samples run after each quarter.
    steps = 4 * max(1, round(tokens[shape] / batch / 4))
    most_steps = max(steps, round(min(most, SPEED_MAY_RISE * in_time[shape]) / batch))
    return Sizing(shape, unique_tokens, batch, steps, most_steps)


def best_shape(tokens: Mapping[Shape, float], unique_tokens: float) -> Shape:
    """Chooses the smallest shape within WORTHWHILE of the best expected loss.

    tokens: {shape: number of training tokens}, smallest shape first.
    """
    losses = {shape: expected_loss(shape.active, tokens[shape], unique_tokens) for shape in tokens}
    best = min(losses.values())
    return next(shape for shape in tokens if losses[shape] <= (1 + WORTHWHILE) * best)


def nearest_shape(tokens: Mapping[Shape, float], tokens_per_parameter: float) -> Shape:
    """Chooses the shape whose tokens per active parameter are closest to this ratio."""
    return min(tokens, key=lambda shape: abs(math.log(tokens[shape] / shape.active / tokens_per_parameter)))


def batch_for(tokens: float, smallest: int, largest: int) -> int:
    """Chooses the tokens per step, a power of two."""
    wanted = BATCH_OF_THE_DEMO * math.sqrt(tokens / TOKENS_OF_THE_DEMO)
    return 2 ** round(math.log2(min(max(wanted, smallest), largest)))
