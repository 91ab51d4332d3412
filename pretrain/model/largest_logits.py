"""Computes each head's largest attention logit in blocks of queries, without a (T, T) matrix.

Shapes: B windows, R windows in a block, T positions, Q queries in a block, K keys, H query heads, G key heads, N
query heads per key head, E head dimension.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pretrain.model.cpu_attention import segment_ids

MAX_LOGITS = {"cpu": 2**21, "cuda": 2**26}
"""Maximum number of logits per block, by device type. They fit into a CPU's cache, or take 256 MB on a GPU."""
MAX_QUERIES = 256
RECORDING = "groundwork_recording"
"""Name of the attention function registered by `record_largest_logits`."""
RECORD = "largest_logits_H"
"""Name of the attention modules' attribute for the largest logits since the last reset, (H,) in fp32."""


def largest_logits(
    query_BHTE: Tensor,
    key_BGTE: Tensor,
    mask: Any = None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> Tensor:
    """Returns each query head's largest unmasked attention logit, (H,) in fp32, without device synchronization.

    The queries are at the last key positions.

    mask: a dense mask, a flex attention block mask, or None for causal attention within segments and the sliding
        window.
    """
    batch, heads, length, width = query_BHTE.shape
    groups, keys = key_BGTE.shape[1:3]
    most = MAX_LOGITS.get(query_BHTE.device.type, MAX_LOGITS["cuda"])
    queries = max(1, min(length, MAX_QUERIES, most // (heads * keys)))
    query_BGNTE = query_BHTE.to(key_BGTE.dtype).unflatten(1, (groups, heads // groups))
    position = torch.arange(keys, device=query_BHTE.device)
    number_B = torch.arange(batch, device=query_BHTE.device)[:, None, None]
    segment_BT = None if cu_seq_lens_q is None else segment_ids(cu_seq_lens_q, batch, length)

    def is_allowed(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if isinstance(mask, Tensor):
            here = mask[row % len(mask), 0, query, key]
            return here if here.dtype == torch.bool else here == 0
        if mask is not None:  # flex attention's mask
            return mask.mask_mod(row, torch.zeros_like(row), query, key)
        distance = query + (keys - length) - key
        allowed = (distance >= 0) & (distance < (sliding_window or keys))
        return allowed if segment_BT is None else allowed & (segment_BT[row, query] == segment_BT[row, key])

    largest_GN = torch.full((groups, heads // groups), -torch.inf, device=query_BHTE.device)
    for first in range(0, length, queries):
        end = min(first + queries, length)
        last_key = keys - length + end if mask is None else keys
        first_key = max(0, last_key - (end - first) - sliding_window) if sliding_window and mask is None else 0
        seen = slice(first_key, last_key)
        together = max(1, most // (heads * (end - first) * (last_key - first_key)))
        for row in range(0, batch, together):
            rows = slice(row, min(row + together, batch))
            allowed = is_allowed(number_B[rows], position[first:end, None], position[seen])
            query_RGME = query_BGNTE[rows, :, :, first:end].flatten(2, 3)
            logits_RGMK = (query_RGME @ key_BGTE[rows, :, seen].transpose(2, 3)).float()
            logits_RGNQK = logits_RGMK.unflatten(2, (heads // groups, end - first))
            logits_RGNQK.masked_fill_(~allowed[..., None, None, :, :], -torch.inf)
            largest_GN = torch.maximum(largest_GN, logits_RGNQK.amax((0, 3, 4)))
    return largest_GN.flatten() * (width**-0.5 if scaling is None else scaling)


# A custom operator, because torch.compile would unroll the loop over blocks in every layer.
@torch.library.custom_op("groundwork::largest_logits", mutates_args=())
def _largest_logits(
    query_BHTE: Tensor, key_BGTE: Tensor, cu_seq_lens: Tensor | None, scaling: float | None, window: int | None
) -> Tensor:
    return largest_logits(query_BHTE, key_BGTE, None, scaling, cu_seq_lens, window)


@_largest_logits.register_fake
def _(query_BHTE, key_BGTE, cu_seq_lens, scaling, window):
    return query_BHTE.new_empty(query_BHTE.shape[1], dtype=torch.float32)


def record_largest_logits(causal_lm: PreTrainedModel) -> None:
    """Makes attention modules with a RECORD attribute record their largest logits during training."""
    name = causal_lm.config._attn_implementation  # private; transformers has no public name for it
    attend = ALL_ATTENTION_FUNCTIONS[name]

    def recording(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **arguments):
        record_H = getattr(module, RECORD, None)
        if record_H is not None and module.training and torch.is_grad_enabled():
            with torch.no_grad():
                window = arguments.get("sliding_window")
                of_segments = arguments.get("cu_seq_lens_q")
                found_H = torch.ops.groundwork.largest_logits(
                    query.detach(), key.detach(), of_segments, arguments.get("scaling"), window
                )
                record_H.copy_(torch.maximum(record_H, found_H))
        return attend(module, query, key, value, mask, **arguments)

    AttentionInterface.register(RECORDING, recording)
    causal_lm.set_attn_implementation(RECORDING)
