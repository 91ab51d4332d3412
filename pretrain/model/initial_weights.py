"""The weights a run starts from, given to a model unit by unit, so that a strategy never holds more than it must."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from pretrain.errors import InputError
from pretrain.model.build import initialize_module
from pretrain.model.compile import layers_of
from pretrain.model.pretrained import PretrainedTensors


@dataclass(frozen=True)
class InitialWeights:
    """Where the weights come from: the seed, or a pretrained model."""

    seed: int
    pretrained: PretrainedTensors | PreTrainedModel | None = None
    """What `open_pretrained` returns: files to read, or a whole model of the same architecture on the CPU, whose
    tensors are handed over. None: drawn from the seed."""
    dtype: torch.dtype = torch.float32
    """Of the parameters. Buffers keep theirs: rotary tables must not be rounded."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """{name of a parameter: factor} of what the seed draws; see `width_roles`."""

    def fill(self, causal_lm: PreTrainedModel, unit: str) -> None:
        """Gives the module called `unit` inside `causal_lm`, on the meta device so far, its weights on the CPU.

        The same values however many units are filled, and in whatever order. `unit` is one of `units_of(causal_lm)`,
        or "" for the whole model; call `causal_lm.tie_weights()` after the last.
        """
        if isinstance(self.pretrained, PretrainedTensors):
            self.pretrained.fill(causal_lm, unit)
        elif self.pretrained is not None:
            hand_over(self.pretrained.get_submodule(unit), causal_lm.get_submodule(unit))
        else:
            initialize_module(causal_lm, unit, seed=self.seed)
        for name, parameter in causal_lm.get_submodule(unit).named_parameters(prefix=unit):
            if self.pretrained is None and name in self.scales:
                parameter.data *= self.scales[name]
            parameter.data = parameter.data.to(self.dtype)


def hand_over(source: nn.Module, target: nn.Module) -> None:
    """Makes the parameters and buffers of `source` those of `target`, which has the same structure."""
    for name, module in target.named_modules():
        twin = source.get_submodule(name)
        for key, parameter in list(twin.named_parameters(recurse=False)):
            setattr(module, key, parameter)
        for key, buffer in list(twin.named_buffers(recurse=False)):
            module._buffers[key] = buffer


def units_of(causal_lm: PreTrainedModel) -> list[str]:
    """Names of the parts that can be made alone: each layer, then whatever else holds no layer, in the model's order.

    Together they are the whole model. Raises InputError for a model with parameters beside its layers, in the modules
    that contain them.
    """
    layers = set(layers_of(causal_lm))
    layer_names = [name for name, module in causal_lm.named_modules() if module in layers]
    ancestors = {""} | {name[:end] for name in layer_names for end, character in enumerate(name) if character == "."}
    others = []
    for name in sorted(ancestors, key=len):
        container = causal_lm.get_submodule(name)
        own = [*container.named_parameters(recurse=False), *container.named_buffers(recurse=False)]
        if own:
            raise InputError(
                f"model: {type(causal_lm).__name__} has {own[0][0]} beside its layers{name and f', in {name}'}, so no "
                "strategy that makes it layer by layer runs it; use ddp"
            )
        paths = [f"{name}.{child}" if name else child for child, _ in container.named_children()]
        others += [path for path in paths if path not in ancestors and path not in layer_names]
    return [*layer_names, *others]
