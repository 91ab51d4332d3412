"""Determines which dimensions of each parameter grow with a model's width, by building the model at twice the width.

In maximal update parametrization (Yang et al., arXiv 2203.03466, table 3), these dimensions determine each parameter's
initial scale and learning rate, so that learning rates transfer between widths. There are no multipliers in the
forward pass, so exported models need no special code.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from pretrain.errors import InputError
from pretrain.model.build import build_meta_model, embedding_parameter_names, transposed_names
from pretrain.model.compile import layers_of
from pretrain.model.model_config import described
from pretrain.model.small_copy import GROWING, is_above


@dataclass(frozen=True)
class WidthRole:
    """Dimensions of a parameter that grow with the model's width."""

    inputs: bool
    """True if the fan-in grows, as for hidden matrices, heads and routers."""
    outputs: bool
    """True if the fan-out grows."""

    def initial_scale(self, ratio: float) -> float:
        """Returns the factor for initial values at `ratio` times the base width."""
        if not self.inputs:
            return 1.0
        return ratio**-0.5 if self.outputs else 1 / ratio

    def rate_scale(self, ratio: float, *, orthogonalized: bool = False) -> float:
        """Returns the learning rate factor at `ratio` times the base width.

        The factor is for updates whose elements have a fixed root mean square. For orthogonalized updates, it is
        sqrt(ratio) times as large, because all of their singular values are equal.
        """
        if not self.inputs:
            return 1.0
        return ratio**-0.5 if orthogonalized else 1 / ratio


def hidden_width(config: PreTrainedConfig) -> int:
    """Returns the width of the hidden states."""
    return config.get_text_config().hidden_size


def width_roles(config: PreTrainedConfig) -> dict[str, WidthRole]:
    """Returns {parameter name: role}. Raises InputError if the roles can't be determined.

    A tied head has the role of an embedding, so the norm before the head gets the head's role instead.
    """
    try:
        here = build_meta_model(config)
        wide = build_meta_model(at_width(config, 2.0))
    except Exception as error:  # the library may raise any error for unusual sizes
        raise InputError(
            f"optim.parametrization: mup: this model cannot be built at twice its width ({described(error)}), "
            "which mup requires; use parametrization: standard"
        ) from None
    shapes = {name: tuple(parameter.shape) for name, parameter in wide.named_parameters()}
    embeddings = embedding_parameter_names(here)
    transposed = transposed_names(here)
    roles = {}
    for name, parameter in here.named_parameters():
        grown = [a != b for a, b in zip(parameter.shape, shapes[name], strict=True)]
        if len(grown) < 2 or name in embeddings:  # an embedding lookup has no fan-in
            roles[name] = WidthRole(inputs=False, outputs=any(grown))
        else:
            outputs, inputs = grown[-2:][::-1] if name in transposed else grown[-2:]
            roles[name] = WidthRole(inputs, outputs)
    if config.get_text_config().tie_word_embeddings:
        head = WidthRole(inputs=True, outputs=False)
        roles |= {name: head for name in roles if name.rpartition(".")[0] == norm_before_head(here)}
    if not any(role.inputs and role.outputs for role in roles.values()):
        raise InputError(
            "optim.parametrization: mup: no matrix in this model grows in both dimensions with the width; use "
            "parametrization: standard"
        )
    return roles


def norm_before_head(model: PreTrainedModel) -> str:
    """Returns the name of the norm between the last layer and the head.

    Raises InputError if there isn't exactly one, or if its weight isn't initialized to 1, because gains of the form
    1 + weight can't be scaled.
    """
    inside = {module for layer in layers_of(model) for module in layer.modules()}
    outside = []
    after_layers = []
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if module in inside:
            after_layers = []
        elif own and all(parameter.dim() == 1 for parameter in own):
            outside.append((name, module))
            after_layers.append((name, module))
    # Some models declare the final norm before the layers.
    (name, norm), *others = after_layers or outside or [("", None)]
    if norm is not None and not others:
        norm = copy.deepcopy(norm)
        with torch.no_grad():
            model._init_weights(norm.to_empty(device="cpu"))
        if norm.weight.eq(1).all():
            return name
    raise InputError(
        "optim.parametrization: mup: the head is tied to the embedding (tie_word_embeddings), and there is no norm "
        "before it to scale instead; set --model.tie_word_embeddings false, or parametrization: standard"
    )


def at_width(config: PreTrainedConfig, ratio: float) -> PreTrainedConfig:
    """Returns the configuration at `ratio` times the width. The number of heads changes, but not the head width."""
    values = config.to_dict()

    def grown(value: Any) -> Any:
        if isinstance(value, list):
            return [grown(item) for item in value]
        return max(1, math.floor(value * ratio)) if is_above(value, 0) else value

    values |= {name: grown(values[name]) for name in GROWING if values.get(name) is not None}
    return type(config).from_dict(values)


def initial_scales(config: PreTrainedConfig, mup_base_width: int) -> Mapping[str, float]:
    """Returns {parameter name: factor for the architecture's initial values}, without factors of 1."""
    ratio = hidden_width(config) / mup_base_width
    scales = {name: role.initial_scale(ratio) for name, role in width_roles(config).items()}
    return {name: scale for name, scale in scales.items() if scale != 1}
