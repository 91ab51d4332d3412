"""How a model's layers run: compiled, or recomputed in the backward pass. In place: parameter names stay."""

import torch
from transformers import PreTrainedModel


def layers_of(causal_lm: PreTrainedModel) -> list[torch.nn.Module]:
    """The model's blocks, in order: the modules that transformers says must not be split."""
    return [module for module in causal_lm.modules() if type(module).__name__ in (causal_lm._no_split_modules or ())]


def compile_model(model: torch.nn.Module, causal_lm: PreTrainedModel, mode: str) -> None:
    """none: as it is. regional: each block, by one compilation that all share. full: the whole of `model`.

    Shapes are static: a batch of another shape is compiled anew instead of slowly.
    """
    if mode == "regional":
        for layer in layers_of(causal_lm):
            layer.compile(dynamic=False)
    elif mode == "full":
        model.compile(dynamic=False)


def checkpoint_activations(causal_lm: PreTrainedModel, mode: str) -> None:
    """none: keep all activations. full: keep each block's input and compute the rest again in the backward pass."""
    if mode == "full":
        causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
