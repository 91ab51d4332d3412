"""fp8 layers for tracing activations: they allocate and save the same tensors as torchao's, but don't need torchao."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pretrain.model.attention import autocast_dtype
from pretrain.model.fp8 import fp8_layers

INPUTS, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
"""Data types of inputs and weights, and of outputs' gradients."""


def use_fp8_shapes(model: PreTrainedModel, *, gathers: bool) -> None:
    """Replaces the layers' matmuls in place. gathers: weights arrive in fp8, as from fully_shard."""
    for linear in fp8_layers(model):
        linear.__class__ = _Linear
        linear.register_buffer("gathered", torch.empty_like(linear.weight, dtype=INPUTS) if gathers else None)


class _Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = _Product.apply(x.to(autocast_dtype(x)), self.weight, self.gathered)
        return out if self.bias is None else out + self.bias.to(out.dtype)


@torch._dynamo.allow_in_graph
class _Product(torch.autograd.Function):
    """Follows torchao's matmul_with_hp_or_float8_args, also in which tensors exist at the same time."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, gathered: Tensor | None) -> Tensor:
        given = weight if gathered is None else gathered
        ctx.save_for_backward(x, given)
        in_fp8, scale = _in_fp8(x, INPUTS)
        out = _multiply(in_fp8.reshape(-1, x.shape[-1]), scale, *_in_fp8(given.t(), INPUTS), x.dtype)
        return out.reshape(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, given = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        # torchao casts the gradient twice, and keeps both results and the weight until the end.
        by_weight = _in_fp8(rows, GRADIENTS)
        weight, scale = _in_fp8(given.t(), INPUTS)
        grad_x = _multiply(*by_weight, weight.t(), scale, x.dtype).reshape(x.shape)
        by_input, scale = _in_fp8(rows, GRADIENTS)
        inputs = _in_fp8(x.reshape(-1, x.shape[-1]), INPUTS)
        return grad_x, _multiply(by_input.t(), scale, *inputs, x.dtype), None


def _in_fp8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the scaled values in fp8, and their scale."""
    if x.dtype == dtype:
        return x, torch.ones((), device=x.device)
    largest = torch.finfo(dtype).max
    scale = (largest / x.abs().max().double().clamp(min=1e-12)).float()
    scaled = x.float() * scale
    return scaled.clamp(-largest, largest).to(dtype), scale


def _multiply(left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiplies fp8 matrices. The kernel needs a row-major left and a column-major right matrix."""
    columns = right.t().contiguous().t()
    scales = (left_scale.reciprocal(), right_scale.reciprocal())
    return torch._scaled_mm(left.contiguous(), columns, *scales, out_dtype=dtype)
