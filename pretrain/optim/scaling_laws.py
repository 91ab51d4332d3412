"""Computes values for `auto` settings: learning rate, batch size, weight decay and warmup.

The values depend only on the recipe, never on the number of ranks, and follow published scaling laws. docs/quality.md
compares them with sweeps.
"""

REFERENCE_PARAMETERS = 108e6
REFERENCE_RATE = 0.0047 / 2
RATE_EXPONENT = -1 / 3
"""AdamW's peak learning rate (from OLMo-core's model ladder, after Porian et al., arXiv 2406.19146, halved)."""
REFERENCE_BATCH = 160 * 2048
REFERENCE_BATCH_EXPONENT = 2 / 3
"""Tokens per step in that ladder for the reference parameters, and the exponent for other parameter counts."""
MIN_PARAMETERS = 3e6
"""Smaller models use the learning rate for this size.

At 0.8M parameters, the law's learning rate was twice the best one in sweeps (docs/quality.md).
"""
BATCH_EXPONENT = 0.5
"""Exponent with which the learning rate depends on the batch size (Malladi et al., arXiv 2205.10287)."""
MIN_BATCH_FACTOR = 0.35
MAX_BATCH_FACTOR = 2.0
"""Bounds for the factor by which the batch size changes AdamW's learning rate.

In sweeps with batches of 1/30 to 1/280 of the reference, 0.30 to 0.38 were best (docs/quality.md).
"""
TIMESCALE = 1.084
TIMESCALE_EXPONENT = -0.527
"""Timescale of AdamW's weights, as a share of the run and a function of tokens per parameter (Bergsma et al., arXiv
2505.13738).
"""
MIN_DECAY = 0.01
MAX_DECAY = 0.2
WARMUP_SHARE = 0.05
"""Maximum share of the run for warmup."""


def scaling_law_batch(tokens: float) -> float:
    """Returns tokens per step for a run of D tokens: 0.58 D^0.571 (Li et al., arXiv 2503.04715).

    The result doesn't depend on the model. The critical batch size, above which tokens are wasted, doesn't either. It
    is two to four times larger: 22.9 D^0.47 (Zhang et al., arXiv 2410.21676).
    """
    return 0.58 * tokens**0.571


def tokens_of_steps(steps: int) -> float:
    """Returns a run's total tokens D from its steps and scaling_law_batch(D), by solving D = steps x 0.58 D^0.571."""
    return (0.58 * steps) ** (1 / (1 - 0.571))


def scaling_law_learning_rate(
    parameters: float, tokens_per_step: float, relative: float = 1.0, min_batch_factor: float = MIN_BATCH_FACTOR
) -> float:
    """Returns the peak learning rate. relative: the optimizer's usual learning rate relative to AdamW's.

    The result doesn't depend on the run's length, so a longer budget doesn't change learning rates that were already
    used.
    """
    size = max(parameters, MIN_PARAMETERS) / REFERENCE_PARAMETERS
    batch = tokens_per_step / (REFERENCE_BATCH * size**REFERENCE_BATCH_EXPONENT)
    factor = min(max(batch**BATCH_EXPONENT, min_batch_factor), MAX_BATCH_FACTOR)
    return relative * REFERENCE_RATE * size**RATE_EXPONENT * factor


def scaling_law_weight_decay(parameters: float, tokens: float, tokens_per_step: float, learning_rate: float) -> float:
    """Returns the weight decay that gives the scaling law's timescale: lr x decay x tokens x timescale = batch.

    The weights average the updates over 1 / (learning rate x decay) steps. As a share of the run, the optimal number
    of steps decreases with tokens per parameter. The result is between MIN_DECAY and MAX_DECAY.
    """
    timescale = TIMESCALE * (tokens / parameters) ** TIMESCALE_EXPONENT
    decay = tokens_per_step / (learning_rate * tokens * timescale)
    return min(max(decay, MIN_DECAY), MAX_DECAY)


def scaling_law_warmup(parameters: float, tokens: float, tokens_per_step: float) -> int:
    """Returns the warmup steps for one token per parameter (Porian et al., arXiv 2406.19146), at most WARMUP_SHARE."""
    return max(1, round(min(parameters, WARMUP_SHARE * tokens) / tokens_per_step))
