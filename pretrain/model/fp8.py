"""fp8 matmuls for the linear layers in the transformer blocks, with torchao's dynamic tensorwise scaling.

Everything except these matmuls is the same as with bf16. The embedding and the output head don't use fp8, because they
are the most sensitive to it (Peng et al., arXiv 2310.18313).
"""

import importlib.util
from dataclasses import replace

import torch
from torch import Tensor
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


def use_fp8(causal_lm: PreTrainedModel, *, tp: int = 1, emulate: bool = False) -> int:
    """Converts the blocks' linear layers to fp8 in place, and returns the number of converted layers.

    Works on the meta device and doesn't change names.

    Args:
        tp: number of slices of each matrix.
        emulate: simulate fp8 (slowly) without fp8 hardware, for tests.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    config = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=emulate)
    chosen = set(fp8_layers(causal_lm, tp))
    for layer in layers_of(causal_lm):
        convert_to_float8_training(layer, config=config, module_filter_fn=lambda module, name: module in chosen)
    return sum(isinstance(module, Float8Linear) for module in causal_lm.modules())


def fp8_layers(causal_lm: PreTrainedModel, tp: int = 1) -> list[torch.nn.Linear]:
    """Returns the blocks' linear layers whose dimensions the fp8 kernels support, also if split into `tp` slices."""
    multiple = SIZE_MULTIPLE * tp
    inside = [module for layer in layers_of(causal_lm) for module in layer.modules()]
    return [
        module
        for module in inside
        if isinstance(module, torch.nn.Linear) and module.in_features % multiple == module.out_features % multiple == 0
    ]


def fp8_product(linear: torch.nn.Linear, x: Tensor, weight: Tensor) -> Tensor:
    """Multiplies by this weight as the fp8 layer would multiply by its own weight, without the bias."""
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return matmul_with_hp_or_float8_args.apply(x, weight.t(), linear.linear_mm_config, linear.config)
