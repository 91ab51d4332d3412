"""Warnings with figures about settings that run but may not be intended."""

import torch

from pretrain.config import RunConfig
from pretrain.hardware import emulation_of_bf16
from pretrain.model.build import build_meta_model
from pretrain.model.model_config import padded_vocabulary
from pretrain.optim.optimizers import OPTIMIZERS
from pretrain.training.run_plan import RunPlan
from pretrain.units import count_text

FAR = 5.0
"""Factor between a stated learning rate and auto's above which a warning appears."""
FAR_FOR_ANOTHER_OPTIMIZER = 2.0
"""Such a factor if the command line changes the optimizer but keeps the recipe's learning rate for another one."""
WASTE = 0.01
"""Share of a model's parameters in rows of unused token IDs above which a warning appears."""


def start_warnings(config: RunConfig, run: RunPlan, overridden: frozenset[str], device: torch.device) -> list[str]:
    """Lists warnings, a sentence or two each; takes 0.2 s if bf16 is emulated, else no time.

    Args:
        overridden: dotted paths of the settings given on the command line.
    """
    emulation = emulation_of_bf16(device) if config.precision == "bf16" else None
    precision = f"precision: {emulation}; use precision: fp32 or auto" if emulation else None
    found = (precision, unusual_learning_rate(config, run, overridden), unused_vocabulary(config, run))
    return [caution for caution in found if caution]


def unusual_learning_rate(config: RunConfig, run: RunPlan, overridden: frozenset[str]) -> str | None:
    """Warns that the peak is far from auto's for this optimizer and size; None if it is near, or auto."""
    optim = config.optim
    stated = run.peak_learning_rate
    if optim.learning_rate == "auto":
        return None
    tokens_per_step = run.ramp.sequences_per_level[-1] * run.batches.window.sequence_length
    usual = OPTIMIZERS[optim.name].auto_rate(run.parameters, tokens_per_step)
    factor = stated / usual
    setting = "optim.learning_rate" if optim.base_learning_rate is None else "optim.base_learning_rate"
    by_hand = {"optim", setting} & overridden
    another = "optim.name" in overridden and not by_hand
    far = FAR_FOR_ANOTHER_OPTIMIZER if another else FAR
    is_low = config.init == "scratch" and factor < 1 / far  # continued pretraining uses low learning rates
    if factor <= far and not is_low:
        return None
    times = f"{factor:.3g} times" if factor > 1 else f"1/{1 / factor:.3g} of"
    origin = f"the recipe's, while --optim.name {optim.name} is the command line's, and " if another else ""
    return (
        f"{setting}: the peak of {stated:.3g} is {origin}{times} what auto gives {optim.name} at "
        f"{count_text(run.parameters)} parameters, {usual:.3g}; use --optim.learning_rate auto unless this is intended"
    )


def unused_vocabulary(config: RunConfig, run: RunPlan) -> str | None:
    """Warns that the model has many more rows than the data has token IDs; None within padding, or if pretrained."""
    ids = run.batches.vocabulary_size
    rows = run.model_config.vocab_size
    padded = padded_vocabulary(ids)
    if rows <= padded or config.init == "pretrained":
        return None
    model = build_meta_model(run.model_config)
    heads = (model.get_input_embeddings(), model.get_output_embeddings())
    matrices = {head.weight for head in heads if head is not None}  # one if they are tied
    wasted = len(matrices) * run.model_config.hidden_size * (rows - padded)
    if wasted <= WASTE * run.parameters:
        return None
    return (
        f"vocabulary: the model has {rows:,} rows and the data {ids:,} ids: {count_text(wasted)} of "
        f"{count_text(run.parameters)} parameters ({wasted / run.parameters:.0%}) stand for no text; "
        f"--model.vocab_size auto makes it {padded:,}"
    )
