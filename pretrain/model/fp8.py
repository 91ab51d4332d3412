"""fp8 matmuls for the linear layers in the transformer blocks, with torchao's dynamic tensorwise scaling.

Everything except these matmuls is the same as with bf16. The embedding and the output head don't use fp8, because they
are the most sensitive to it (Peng et al., arXiv 2310.18313).
"""

import importlib.util
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pretrain.model.attention import autocast_dtype
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


def use_fp8(causal_lm: PreTrainedModel, *, tp: int = 1, emulate: bool = False) -> list[torch.nn.Linear]:
    """Converts the blocks' linear layers to fp8 in place, and returns the converted layers.

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
    return [module for module in causal_lm.modules() if isinstance(module, Float8Linear)]


def fp8_layers(causal_lm: PreTrainedModel, tp: int = 1) -> list[torch.nn.Linear]:
    """Returns the blocks' linear layers whose dimensions the fp8 kernels support, also if split into `tp` slices."""
    multiple = SIZE_MULTIPLE * tp
    inside = [module for layer in layers_of(causal_lm) for module in layer.modules()]
    return [
        module
        for module in inside
        if isinstance(module, torch.nn.Linear) and module.in_features % multiple == module.out_features % multiple == 0
    ]


def forward_with_parameters(linear: torch.nn.Linear, x: Tensor) -> Tensor:
    """Replaces the forward method of torchao's fp8 layer. Saves the weight for the backward pass; see `Product`."""
    return fp8_linear(linear, x, linear.weight, linear.bias)


def fp8_linear(linear: torch.nn.Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes the output of an fp8 layer with the given weight and bias, for example this rank's slices of them."""
    out = Product.apply(x.to(autocast_dtype(x)), weight, linear.linear_mm_config, linear.config)
    return out if bias is None else out + bias.to(out.dtype)


@torch._dynamo.allow_in_graph  # like torchao's function
class Product(torch.autograd.Function):
    """Calls torchao's autograd function, but saves the weight for the backward pass instead of its transposed view.

    A view would keep the gathered weight in memory after ZeRO-3 has freed it.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, linear_mm_config: Any, config: Any) -> Tensor:
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

        ctx.save_for_backward(x, weight)
        ctx.settings = {"linear_mm_config": linear_mm_config, "config": config}
        inner = SimpleNamespace(save_for_backward=lambda *_: None)
        return matmul_with_hp_or_float8_args.forward(inner, x, weight.t(), linear_mm_config, config)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

        x, weight = ctx.saved_tensors
        inner = SimpleNamespace(saved_tensors=(x, weight.t()), **ctx.settings)
        grad_x, transposed, *none = matmul_with_hp_or_float8_args.backward(inner, grad)
        return grad_x, transposed.t(), *none
