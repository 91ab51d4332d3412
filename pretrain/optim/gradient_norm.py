"""The norm of a model's gradient, the same to the last digits that matter however the gradient is laid out."""

from collections.abc import Iterable

import torch

MOST_ADDED_UP = 2**16
"""Squares that a CPU adds up one after the other: with so many the result is off by 2e-7, with a million by 1e-5."""


def total_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """L2 norm of all gradients together, fp32, as a scalar (a DTensor where the gradients are).

    A CPU adds the squares of a large tensor up in fp32 one after the other: with 25 million elements the result is
    off by 1e-3, and by another amount for every way to shard. So rows are taken first there; a GPU adds in a tree, all
    tensors in a few kernels. Those of bf16 gradients would be bf16 too, and off by 1 %, unless told otherwise.
    """
    gradients = list(gradients)
    if gradients and gradients[0].device.type != "cpu":
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)))
    rows = [
        torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.float32)
        if gradient.dim() > 1 and gradient.numel() > MOST_ADDED_UP
        else gradient.float()
        for gradient in gradients
    ]
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(rows, 2))) if rows else torch.tensor(0.0)
