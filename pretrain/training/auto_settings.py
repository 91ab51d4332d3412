"""Resolves a recipe's `auto` settings."""

import math

from pretrain.config import Batch, Optim, RunConfig
from pretrain.data.vocabulary import planned_model_config
from pretrain.errors import InputError
from pretrain.mesh_sizes import processes_launched
from pretrain.model.build import active_parameters, count_parameters
from pretrain.optim.learning_rate import learning_rate_for_batch
from pretrain.optim.optimizers import OPTIMIZERS
from pretrain.optim.scaling_laws import (
    scaling_law_batch,
    scaling_law_warmup,
    scaling_law_weight_decay,
    tokens_of_steps,
)


def resolve_auto(config: RunConfig, processes: int | None = None) -> RunConfig:
    """Replaces `auto` settings with values computed from the recipe and its data.

    Args:
        processes: number of processes; None for the number launched. Affects only the micro-batch size.
    """
    optim = config.optim
    if "auto" not in (config.batch.tokens_per_step, optim.learning_rate, optim.weight_decay, optim.warmup_steps):
        return config
    try:
        model_config = planned_model_config(config)
        parameters = count_parameters(model_config)
        active = active_parameters(model_config)
    except InputError:  # `derive` reports this error
        parameters = 1
        active = 1
    budget = config.budget
    tokens = budget.tokens or (budget.tokens_per_parameter or 0) * active
    batch = auto_batch(config, tokens or tokens_of_steps(budget.steps), processes or processes_launched())
    per_step = batch.tokens_per_step
    tokens = tokens or budget.steps * per_step
    if optim.learning_rate == "auto":
        rate = float(f"{OPTIMIZERS[optim.name].auto_learning_rate(parameters, per_step):.3g}")
        optim = optim.model_copy(update={"learning_rate": rate})
    if optim.weight_decay == "auto":
        rate = peak_learning_rate(optim, per_step // config.data.sequence_length)
        weight_decay = float(f"{scaling_law_weight_decay(parameters, tokens, per_step, rate):.2g}")
        optim = optim.model_copy(update={"weight_decay": weight_decay})
    if optim.warmup_steps == "auto":
        warmup_steps = scaling_law_warmup(parameters, tokens, per_step)
        optim = optim.model_copy(update={"warmup_steps": warmup_steps})
    return config.model_copy(update={"batch": batch, "optim": optim})


def peak_learning_rate(optim: Optim, sequences_per_step: int) -> float:
    """Returns the peak learning rate, scaled to the batch if the recipe sets it per sequence."""
    if optim.learning_rate_per_sequence is not None:
        return learning_rate_for_batch(optim.learning_rate_per_sequence, sequences_per_step)
    return optim.learning_rate


def auto_batch(config: RunConfig, tokens: float, processes: int) -> Batch:
    """Returns the batch closest to the scaling law's, with a power-of-two number of sequences per ramp level.

    Only the micro-batch size depends on `processes`.
    """
    batch = config.batch
    length = config.data.sequence_length
    if batch.tokens_per_step != "auto":
        return batch
    levels = batch.ramp_levels
    per_level = 2 ** max(0, round(math.log2(scaling_law_batch(tokens) / (length * levels))))
    micro = batch.sequences_per_micro_batch
    while micro > 1 and per_level % (micro * processes):
        micro -= 1
    values = {"tokens_per_step": levels * per_level * length, "sequences_per_micro_batch": micro}
    return batch.model_copy(update=values)
