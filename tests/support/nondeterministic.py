"""Operators that raise an error on CUDA with torch.use_deterministic_algorithms."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

ALWAYS = (
    "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "_ctc_loss_backward",
    "adaptive_max_pool2d_backward", "avg_pool3d_backward", "fractional_max_pool2d_backward",
    "fractional_max_pool3d_backward", "grid_sampler_2d_backward", "grid_sampler_3d_backward", "kthvalue",
    "max_unpool2d", "max_unpool3d", "nll_loss2d_backward", "nll_loss2d_forward", "put", "reflection_pad1d_backward",
    "reflection_pad2d_backward", "reflection_pad3d_backward", "upsample_bicubic2d_backward",
    "upsample_bilinear2d_backward", "upsample_linear1d_backward", "upsample_trilinear3d_backward",
)  # fmt: skip
RAISES: Mapping[str, Callable[[dict[str, Any]], bool]] = {
    **dict.fromkeys(ALWAYS, lambda given: True),
    "_embedding_bag_dense_backward": lambda given: given["mode"] == 2,  # maximum
    "bincount": lambda given: given.get("weights") is not None,
    "cumsum": lambda given: (given.get("dtype") or given["self"].dtype).is_floating_point,
    "histc": lambda given: given["self"].is_floating_point(),
    "median": lambda given: "dim" in given,
    "nanmedian": lambda given: "dim" in given,
    "scatter": lambda given: "reduce" in given,
    "scatter_reduce": lambda given: given["reduce"] == "prod",
}
"""{operator: whether it raises for these arguments}, from the documentation of torch 2.13.

From torch's source: kthvalue also raises, NLLLoss only raises for images, and histc only for floating-point numbers.
"""


def raises(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns True if an operator would raise, given its arguments on CUDA."""
    condition = RAISES.get(func._opname.rstrip("_")) if func.namespace == "aten" else None
    if condition is None:
        return False
    names = [argument.name for argument in func._schema.arguments]
    return condition(dict(zip(names, args, strict=False)) | dict(kwargs))
