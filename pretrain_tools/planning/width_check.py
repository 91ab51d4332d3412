"""Runs muP's coordinate check (Yang et al., arXiv 2203.03466, D.1).

Trains small copies of the architecture for a few steps at several widths, with the recipe's optimizer and the same
tokens. The change per element in hidden states and logits must not grow with the width.
"""

import math
from statistics import fmean

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig

from pretrain.config import Optim
from pretrain.errors import InputError
from pretrain.model.build import build_meta_model, build_model
from pretrain.model.small_copy import VOCABULARY, small_copies
from pretrain.model.width_roles import at_width, hidden_width, initial_scales
from pretrain.optim.optimizers import optimizer_builder

RATIO = 4
"""Ratio of the two widths."""
STEPS = 4
SEEDS = (0, 1)
MOST_GROWTH = 0.25
"""Maximum growth exponent. Without muP, the change in logits has an exponent of 1."""
Changes = dict[str, float]


def width_verdict(optim: Optim, config: PreTrainedConfig, learning_rate: float) -> str | None:
    """Describes the activation whose change grows fastest with the width; None if all pass."""
    growing = growth(optim, config, learning_rate)
    worst = max(growing, key=growing.get)
    if growing[worst] <= MOST_GROWTH:
        return None
    return (
        f"in {STEPS} steps, {worst} change in proportion to width^{growing[worst]:.2f}, so learning rates won't "
        "transfer across widths"
    )


def growth(optim: Optim, config: PreTrainedConfig, learning_rate: float) -> Changes:
    """Returns {activation: exponent with which its change grows with the width}.

    Compares the root mean square of the changes after STEPS steps at two widths, averaged over SEEDS.

    learning_rate: peak learning rate for the smaller width.
    """
    narrow = narrow_copy(config)
    if optim.parametrization == "mup":
        optim = optim.model_copy(update={"mup_base_width": hidden_width(narrow)})
    found = []
    for wide in (narrow, at_width(narrow, RATIO)):
        changes = [changes_of(optim, wide, learning_rate, seed) for seed in SEEDS]
        found.append({name: max(fmean(each[name] for each in changes), 1e-12) for name in changes[0]})
    less, more = found
    return {name: math.log(more[name] / less[name]) / math.log(RATIO) for name in less}


def narrow_copy(config: PreTrainedConfig) -> PreTrainedConfig:
    """Finds the smallest copy that can also be built at other widths. Raises InputError if there is none."""
    copies = sorted(small_copies(config, []), key=hidden_width)
    for copy in copies:
        try:
            build_meta_model(at_width(copy, RATIO))
            return copy
        except InputError:
            continue
    raise InputError("optim.parametrization: could not build small copies of this architecture at different widths")


def changes_of(optim: Optim, config: PreTrainedConfig, learning_rate: float, seed: int) -> Changes:
    """Measures the change in the logits and each layer's hidden states."""
    model = build_model(config, seed=seed)
    if optim.mup_base_width:
        scales = initial_scales(config, optim.mup_base_width)
        # build_model uses the standard initialization.
        for name, parameter in model.named_parameters():
            parameter.data *= scales.get(name, 1.0)
    build = optimizer_builder(optim, model, learning_rate, seed=seed, device_type="cpu")
    optimizer = build(list(model.named_parameters()))
    # In training, the schedule applies these scales.
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("learning_rate_scale", 1.0)
    ids_BT = torch.randint(VOCABULARY, (4, 33), generator=torch.Generator().manual_seed(seed))
    first = activations(model, ids_BT)
    for _ in range(STEPS):
        logits_BTV = model(ids_BT[:, :-1]).logits
        F.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    last = activations(model, ids_BT)
    return {name: (last[name] - first[name]).square().mean().sqrt().item() for name in first}


@torch.no_grad()
def activations(model: torch.nn.Module, ids_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    output = model(ids_BT[:, :-1], output_hidden_states=True)
    hidden = {f"hidden states {index}": state for index, state in enumerate(output.hidden_states)}
    return {**hidden, "logits": output.logits}
