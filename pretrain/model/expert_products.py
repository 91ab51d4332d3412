"""The experts' matrix products in the precision of the run.

torch.nn.functional.grouped_mm knows nothing of autocast: with fp32 weights, transformers multiplies a mixture's
experts, most of its work, in fp32 whatever the precision, and compiled through a loop that waits for the device.
"""

import warnings

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

EXPERT_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
TAKEN_OVER = ("num_experts", "has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "_is_expert_parallel")
TAKEN_OVER += ("act_fn", "_apply_gate", "post_expert_norm")


class CastExperts:
    """An experts module as transformers' function sees it, its weights in another dtype."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype):
        for name in (*TAKEN_OVER, *EXPERT_WEIGHTS, *(f"{weight}_bias" for weight in EXPERT_WEIGHTS)):
            value = getattr(experts, name, None)
            is_weight = isinstance(value, Tensor) and value.is_floating_point()
            setattr(self, name, value.to(dtype) if is_weight else value)


def grouped_mm_in_autocast(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers' grouped_mm; under autocast its products run in autocast's dtype, as those of linear layers do."""
    device_type = hidden_states.device.type
    if not torch.is_autocast_enabled(device_type):
        return grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
    dtype = torch.get_autocast_dtype(device_type)
    cast = CastExperts(experts, dtype)
    return grouped_mm_experts_forward(cast, hidden_states.to(dtype), top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register("grouped_mm", grouped_mm_in_autocast)
# Of transformers' own checks of torch's version, which compiled code runs once.
warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`", category=UserWarning)
