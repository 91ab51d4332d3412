"""Values of `auto`: learning rate, batch, weight decay and warmup by parameters and tokens.

Pure functions of the recipe, never of the number of processes. They follow published laws; docs/quality.md compares
them with sweeps.
"""

REFERENCE_PARAMETERS = 108e6
REFERENCE_RATE = 0.0047 / 2
RATE_EXPONENT = -1 / 3
"""AdamW's peak (OLMo-core's model ladder, after Porian et al., arXiv 2406.19146, and halved)."""
REFERENCE_BATCH = 160 * 2048
REFERENCE_BATCH_EXPONENT = 2 / 3
"""The tokens per step which that ladder has at the reference parameters, and how they grow with the parameters."""
LEAST_PARAMETERS = 3e6
"""Smaller models get the rate of this many: in sweeps at 0.8M the law's own was twice the best (docs/quality.md)."""
BATCH_EXPONENT = 0.5
"""Exponent of the rate in the batch (Malladi et al., arXiv 2205.10287)."""
LEAST_BATCH_FACTOR = 0.35
MOST_BATCH_FACTOR = 2.0
"""Bounds of AdamW's factor by the batch; in sweeps with batches of a 30th to a 280th of the reference, 0.30 to 0.38
were best (docs/quality.md)."""
TIMESCALE = 1.084
TIMESCALE_EXPONENT = -0.527
"""Time constant of AdamW's weights, as a share of the run, by tokens per parameter
(Bergsma et al., arXiv 2505.13738)."""
LEAST_DECAY = 0.01
MOST_DECAY = 0.2
WARMUP_SHARE = 0.05
"""Largest share of the run that is warmup."""


def batch_by_law(tokens: float) -> float:
    """Tokens per step for a run of so many tokens: 0.58 D^0.571 whatever the model (Li et al., arXiv 2503.04715).

    The critical batch, above which tokens are wasted, grows with the tokens alone too and is two to four times as
    large: 22.9 D^0.47 (Zhang et al., arXiv 2410.21676).
    """
    return 0.58 * tokens**0.571


def tokens_of_steps(steps: int) -> float:
    """Tokens D of a run of `steps` steps with batch_by_law(D) tokens each: D = steps x 0.58 D^0.571, solved for D."""
    return (0.58 * steps) ** (1 / (1 - 0.571))


def rate_by_law(
    parameters: float, tokens_per_step: float, relative: float = 1.0, least_batch_factor: float = LEAST_BATCH_FACTOR
) -> float:
    """Peak learning rate; `relative` is the optimizer's own, relative to AdamW's, `least_batch_factor` its own too.

    Independent of the length of the run, so that a longer budget does not change rates already used.
    """
    size = max(parameters, LEAST_PARAMETERS) / REFERENCE_PARAMETERS
    batch = tokens_per_step / (REFERENCE_BATCH * size**REFERENCE_BATCH_EXPONENT)
    factor = min(max(batch**BATCH_EXPONENT, least_batch_factor), MOST_BATCH_FACTOR)
    return relative * REFERENCE_RATE * size**RATE_EXPONENT * factor


def weight_decay_by_law(parameters: float, tokens: float, tokens_per_step: float, learning_rate: float) -> float:
    """The decay that gives the weights the timescale by law: learning_rate x decay x tokens x timescale = batch.

    The weights are an average of the updates over 1 / (learning_rate x decay) steps; the best share of the run that
    this is falls with tokens per parameter. Between LEAST_DECAY and MOST_DECAY.
    """
    timescale = TIMESCALE * (tokens / parameters) ** TIMESCALE_EXPONENT
    decay = tokens_per_step / (learning_rate * tokens * timescale)
    return min(max(decay, LEAST_DECAY), MOST_DECAY)


def warmup_by_law(parameters: float, tokens: float, tokens_per_step: float) -> int:
    """Steps of warmup: a token per parameter (Porian et al., arXiv 2406.19146), at most WARMUP_SHARE of the run."""
    return max(1, round(min(parameters, WARMUP_SHARE * tokens) / tokens_per_step))
