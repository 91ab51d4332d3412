"""Activates FlashAttention 3 if possible, and reports which attention kernel a GPU run uses."""

import functools

import torch
from transformers import PreTrainedConfig

from pretrain.config import WindowSpec
from pretrain.errors import one_line
from pretrain.model.attention import (
    ATTENTION_NAMES,
    FLASH_PACKAGES,
    VARLEN_TAKES_GROUPS,
    head_widths,
    why_not,
    why_not_flash,
)

HOPPER = (9, 0)
"""Compute capability that FlashAttention 3 requires."""
FLASH_3_TOLERANCE = 2e-2
"""Maximum difference between FlashAttention 3 and torch's kernel, relative to the largest value."""


def prefer_flash_3(
    requested: str, attention: str, *, dtype: torch.dtype, window: WindowSpec, model_config: PreTrainedConfig
) -> str | None:
    """Makes torch's varlen attention use FlashAttention 3, if `attention: auto` chose varlen and the kernel works.

    Returns None on success, or the reason why not. For the arguments, see `kernels_used`.
    """
    if requested != "auto":
        return f"attention is {requested}"
    if attention != "groundwork_sdpa":
        return f"the model needs {attention}"
    here = {"device_type": "cuda", "dtype": dtype, "window": window}
    if problem := why_not("varlen", **here) or why_not_flash(model_config) or why_not("flash_attention_3", **here):
        return problem
    if torch.cuda.get_device_capability() != HOPPER:
        return "torch only supports it on Hopper"
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic is true, but its backward pass is only deterministic for some head dimensions"
    width, _ = head_widths(model_config) or (64, 64)
    return _activate_flash_3(dtype, -(-width // 8) * 8, "cuda")  # `sdpa` pads heads to this width


@functools.cache
def _activate_flash_3(dtype: torch.dtype, width: int, device: str) -> str | None:
    """Activates FlashAttention 3 in torch, and compares it with torch's own kernel on a small batch.

    If it fails or the results differ, restores torch's kernel and returns the problem. Otherwise, the first step would
    fail if the package is incompatible with torch or was built without this head width.
    """
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    wanted = _small_varlen(dtype, width, device)
    try:
        activate_flash_attention_impl("FA3")
        found = _small_varlen(dtype, width, device)
        differences = [(a - b).abs().max() / b.abs().max() for a, b in zip(found, wanted, strict=True)]
        if all(difference <= FLASH_3_TOLERANCE for difference in differences):
            return None
        problem = f"its results differ from torch's kernel by {max(differences):.2g}"
    except Exception as error:  # a package built for a different torch version may raise any error
        problem = f"fails here ({one_line(error)})"
    restore_flash_attention_impl(_raise_warn=False)
    return problem


def _small_varlen(dtype: torch.dtype, width: int, device: str) -> list[torch.Tensor]:
    """Returns varlen attention's output and gradients in fp32, for two segments and two empty ones."""
    from torch.nn.attention import varlen

    generator = torch.Generator().manual_seed(0)
    heads, grouped = (2, {"enable_gqa": True}) if VARLEN_TAKES_GROUPS else (4, {})
    shapes = ((192, 4, width), (192, heads, width), (192, heads, width))
    numbers = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    ends = torch.tensor([0, 64, 192, 192, 192], dtype=torch.int32, device=device)
    out = varlen.varlen_attn(*numbers, ends, ends, 192, 192, window_size=(-1, 0), **grouped)
    gradients = torch.autograd.grad(out.float().square().sum(), numbers)
    return [x.detach().float() for x in (out, *gradients)]


def kernels_used(
    requested: str,
    attention: str,
    *,
    dtype: torch.dtype,
    window: WindowSpec,
    model_config: PreTrainedConfig,
) -> str:
    """Describes the attention kernel that a GPU run uses, and why it doesn't use a faster one.

    Args:
        requested: the recipe's `attention`.
        attention: the model's attention, one of `attention.candidates_of`.
        dtype: dtype of the matmuls.
    """
    if name := next((name for name in FLASH_PACKAGES if ATTENTION_NAMES[name] == attention), None):
        return name
    if attention != "groundwork_sdpa":
        return f"{attention} in torch {torch.__version__}"
    here = {"dtype": dtype, "window": window}
    flash_3 = prefer_flash_3(requested, attention, model_config=model_config, **here)
    if flash_3 is None:
        return f"varlen in torch {torch.__version__} with FlashAttention 3"
    if varlen := why_not("varlen", device_type="cuda", **here) or why_not_flash(model_config):
        dense = " with a dense mask for packed documents" if window.document_mask else ""
        return f"sdpa in torch {torch.__version__}{dense}; not varlen: {varlen}"
    return (
        f"varlen (flash attention for packed documents) in torch {torch.__version__}; not FlashAttention 3: {flash_3}"
    )
