"""Computes `auto` settings (learning rate, batch size, weight decay, warmup) from published scaling laws.

docs/quality.md compares the results with sweeps.
"""

REFERENCE_PARAMETERS = 108e6
REFERENCE_RATE = 0.0047 / 2
RATE_EXPONENT = -1 / 3
"""AdamW's peak learning rate: half the value in OLMo-core's model ladder (Porian et al., arXiv 2406.19146)."""
REFERENCE_BATCH = 160 * 2048
REFERENCE_BATCH_EXPONENT = 2 / 3
"""Batch size in the same ladder: tokens per step at REFERENCE_PARAMETERS, and exponent for the parameter count."""
MIN_PARAMETERS = 3e6
"""Smaller models use the learning rate for this size.

In sweeps with 0.8M parameters, the scaling law's learning rate was twice the best one (docs/quality.md).
"""
BATCH_EXPONENT = 0.5
"""The learning rate is proportional to (batch size)^BATCH_EXPONENT (Malladi et al., arXiv 2205.10287)."""
MIN_BATCH_FACTOR = 0.35
MAX_BATCH_FACTOR = 2.0
"""Limits for the factor by which the batch size scales the learning rate.

In sweeps at 1/30 to 1/280 of the reference batch size, the best factors were 0.30 to 0.38 (docs/quality.md).
"""
TIMESCALE = 1.084
TIMESCALE_EXPONENT = -0.527
"""AdamW's timescale as a fraction of the run: TIMESCALE (tokens per parameter)^TIMESCALE_EXPONENT (Bergsma et al.,
arXiv 2505.13738).
"""
MIN_DECAY = 0.01
MAX_DECAY = 0.2
WARMUP_SHARE = 0.05
"""Maximum warmup, as a fraction of the run."""


def scaling_law_batch(tokens: float) -> float:
    """Returns the number of tokens per step for a run with D tokens: 0.58 D^0.571 (Li et al., arXiv 2503.04715).

    The critical batch size, 22.9 D^0.47 (Zhang et al., arXiv 2410.21676), is two to four times larger.
    """
    return 0.58 * tokens**0.571


def tokens_of_steps(steps: int) -> float:
    """Returns the number of tokens D in a run with this many steps, by solving D = steps x scaling_law_batch(D)."""
    return (0.58 * steps) ** (1 / (1 - 0.571))


def scaling_law_learning_rate(
    parameters: float, tokens_per_step: float, relative: float = 1.0, min_batch_factor: float = MIN_BATCH_FACTOR
) -> float:
    """Returns the peak learning rate. It doesn't depend on the length of the run, so a run can be extended.

    relative: the optimizer's usual learning rate relative to AdamW's.
    """
    size = max(parameters, MIN_PARAMETERS) / REFERENCE_PARAMETERS
    batch = tokens_per_step / (REFERENCE_BATCH * size**REFERENCE_BATCH_EXPONENT)
    factor = min(max(batch**BATCH_EXPONENT, min_batch_factor), MAX_BATCH_FACTOR)
    return relative * REFERENCE_RATE * size**RATE_EXPONENT * factor


def scaling_law_weight_decay(parameters: float, tokens: float, tokens_per_step: float, learning_rate: float) -> float:
    """Returns the weight decay for the optimal timescale, clamped to [MIN_DECAY, MAX_DECAY].

    AdamW averages its updates over about 1 / (learning rate x decay) steps. The scaling law predicts the optimal
    number as a fraction of the run.
    """
    timescale = TIMESCALE * (tokens / parameters) ** TIMESCALE_EXPONENT
    decay = tokens_per_step / (learning_rate * tokens * timescale)
    return min(max(decay, MIN_DECAY), MAX_DECAY)


def scaling_law_warmup(parameters: float, tokens: float, tokens_per_step: float) -> int:
    """Returns the number of warmup steps: one token per parameter (Porian et al., arXiv 2406.19146), but at most
    WARMUP_SHARE of the run.
    """
    return max(1, round(min(parameters, WARMUP_SHARE * tokens) / tokens_per_step))
