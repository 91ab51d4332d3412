"""fp8 matmuls for the linear layers in the transformer blocks, with torchao's dynamic tensorwise scaling.

Everything except these matmuls is the same as with bf16. The embedding and the output head don't use fp8, because they
are the most sensitive to it (Peng et al., arXiv 2310.18313).
"""

import importlib.util
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from pretrain.model.compile import layers_of

SMALLEST_CAPABILITY = (8, 9)
"""Minimum CUDA compute capability for fp8 tensor cores (L4, L40, RTX 4090, H100 and newer)."""
SIZE_MULTIPLE = 16
"""Matrix dimensions must be multiples of this for the fp8 kernels. Other layers stay in bf16."""


def fp8_problem(device_type: str) -> str | None:
    """Returns an error message if this machine can't train in fp8 on 'cpu' or 'cuda', otherwise None."""
    if device_type != "cuda" or torch.cuda.get_device_capability() < SMALLEST_CAPABILITY:
        return (
            "precision: fp8 needs a GPU with fp8 tensor cores (compute capability 8.9 or higher, such as L4, L40, RTX "
            "4090 or H100); use bf16"
        )
    if importlib.util.find_spec("torchao") is None:
        return "precision: fp8 needs torchao; run pip install -r requirements-gpu.txt, or use bf16"
    return None


def use_fp8(causal_lm: PreTrainedModel, *, emulate: bool = False) -> int:
    """Converts the blocks' linear layers to fp8 in place, and returns the number of converted layers.

    Works on the meta device and doesn't change names. emulate: simulate fp8 (slowly) without fp8 hardware, for tests.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    config = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=emulate)
    chosen = set(fp8_layers(causal_lm))
    for layer in layers_of(causal_lm):
        convert_to_float8_training(layer, config=config, module_filter_fn=lambda module, name: module in chosen)
    return sum(isinstance(module, Float8Linear) for module in causal_lm.modules())


def fp8_layers(causal_lm: PreTrainedModel) -> list[torch.nn.Linear]:
    """Returns the blocks' linear layers whose dimensions the fp8 kernels support."""
    inside = [module for layer in layers_of(causal_lm) for module in layer.modules()]
    return [
        module
        for module in inside
        if isinstance(module, torch.nn.Linear)
        and module.in_features % SIZE_MULTIPLE == module.out_features % SIZE_MULTIPLE == 0
    ]
