"""Attention for packed documents, in which tokens only attend to tokens in the same document.

Every document in the token stream is followed by the end-of-document ID, which is also the first token of the next
document's segment, like a BOS token. So a segment starts at position 0 of each window and at every end-of-document
token in the input. No targets are masked, so each step has the same number of targets.

transformers' models call the function registered under config._attn_implementation with their keyword arguments. We
register no mask functions, so transformers doesn't build a (B, 1, T, T) mask from position_ids that restart. Models
receive the segments as cumulative lengths instead, which avoids device synchronization. Their number differs in every
batch, so compiled code treats it as a dynamic size.

Shapes: B windows, T positions, H query heads, G key heads, E head dimension, S segments.
"""

import importlib.util
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen
from transformers import AttentionInterface, PreTrainedConfig

from pretrain.config import WindowSpec
from pretrain.errors import InputError, did_you_mean
from pretrain.model import cpu_attention
from pretrain.model.cpu_attention import HALF_DTYPES, segment_ids

IGNORED = -100
"""Target that the loss ignores."""
UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias")
UNKNOWN_TO_FLASH = ("s_aux", "position_bias", "attention_mask")
VARLEN_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
"""True if varlen attention supports grouped-query attention. torch 2.11 doesn't support it."""
INDUCTOR_KEEPS_OFFSETS = torch.__version__ >= (2, 13)
"""True if compiled as_strided respects a slice's storage offset. In torch 2.11, it reads the wrong values."""
FLEX_BLOCK = 128
"""Block size of flex attention, for queries and keys."""


def document_layout(input_ids_BT: np.ndarray, end_of_document_id: int) -> dict[str, Tensor]:
    """Computes position IDs and segment boundaries for a batch of windows, as CPU tensors.

    Returns position_ids (B, T), int64, which restart at each segment, and the cumulative segment lengths over the
    flattened batch as cu_seq_lens_q, int32 (S + 1,). They aren't padded, because GPU kernels would launch as many
    blocks for an empty segment as for a full window.
    """
    batch, length = input_ids_BT.shape
    starts_BT = input_ids_BT == end_of_document_id
    # A window usually starts mid-document, but its first token still opens a segment.
    starts_BT[:, 0] = True
    starts_S = np.flatnonzero(starts_BT)
    tokens = batch * length
    bounds = np.append(starts_S, tokens)
    position_ids = np.arange(tokens, dtype=np.int64) - np.repeat(starts_S, np.diff(bounds))
    position_ids = torch.from_numpy(position_ids).view(batch, length)
    return {"position_ids": position_ids, "cu_seq_lens_q": torch.from_numpy(bounds.astype(np.int32))}


def attention_arguments(layout: Mapping[str, Tensor], attention: str, device: torch.device | str) -> dict[str, Any]:
    """Returns the keyword arguments that tell a model on `device` where documents begin.

    For flex_attention, this builds the block mask once for all layers.

    Args:
        layout: segments from `document_layout`, pinned for an asynchronous copy to a GPU.
        attention: the model's attention implementation (see `candidates_of`).
    """
    if classes_in_rows(attention):
        from pretrain.model.document_rows import DocumentRows

        rows = DocumentRows.of(layout["cu_seq_lens_q"], tuple(layout["position_ids"].shape), device)
        return {**attention_arguments(layout, without_rows(attention), device), "document_rows": rows}
    position_ids = layout["position_ids"].to(device, non_blocking=True)
    cu_seq_lens = of_any_size(layout["cu_seq_lens_q"].to(device, non_blocking=True))
    batch, length = position_ids.shape
    if attention == "flex_attention":
        return {"position_ids": position_ids, "attention_mask": _flex_block_mask(cu_seq_lens, batch, length)}
    if attention in ("sdpa", "eager"):
        return {"position_ids": position_ids}
    if "+mask" in attention:
        return {"position_ids": position_ids, "attention_mask": _library_masks(cu_seq_lens, batch, length, attention)}
    # The longest segment's length would change in every step and cause recompilation, so we pass the window's length.
    segments = {"cu_seq_lens_q": cu_seq_lens, "cu_seq_lens_k": cu_seq_lens}
    return {"position_ids": position_ids, **segments, "max_length_q": length, "max_length_k": length}


def of_any_size(cu_seq_lens: Tensor) -> Tensor:
    """Makes compiled code accept any number of segments without recompilation, and returns the tensor."""
    # torch documents this function, although its module is private.
    torch._dynamo.maybe_mark_dynamic(cu_seq_lens, 0)
    return cu_seq_lens


@dataclass(frozen=True)
class HostBatch:
    """A micro-batch in CPU memory, pinned if the model is on a GPU."""

    ids: Tensor
    """Token IDs (B, T + 1) in the shards' dtype (2 or 4 bytes per ID)."""
    layout: Mapping[str, Tensor]
    """Segments from `document_layout`. Empty for attention over the whole window."""

    def on_device(self, device: torch.device, attention: str, rows: int | None = None) -> dict[str, Any]:
        """Returns the model's arguments; see `model_inputs`."""
        # We cast after the copy, so the copy takes only 2 or 4 bytes per token ID.
        ids = self.ids.to(device, non_blocking=True).to(torch.int64)
        targets = ids[:, 1:].clone(memory_format=torch.contiguous_format)  # contiguous() wouldn't copy a single row
        if rows is not None:
            targets[rows:] = IGNORED
        arguments = attention_arguments(self.layout, attention, device) if self.layout else {}
        return {"input_ids_BT": ids[:, :-1].contiguous(), "targets_BT": targets, **arguments}


def host_batch(ids: np.ndarray, window: WindowSpec, *, end_of_document_id: int, device: torch.device) -> HostBatch:
    """Builds a micro-batch from token IDs (B, T + 1), with one `window` per row, for a model on `device`."""
    layout = document_layout(ids[:, :-1], end_of_document_id) if window.document_mask else {}
    batch = HostBatch(torch.from_numpy(ids), layout)
    if device.type != "cuda":
        return batch
    # Copies from pageable memory would be synchronous.
    return HostBatch(batch.ids.pin_memory(), {name: tensor.pin_memory() for name, tensor in layout.items()})


def model_inputs(
    ids: np.ndarray,
    window: WindowSpec,
    *,
    end_of_document_id: int,
    device: torch.device,
    attention: str,
    rows: int | None = None,
) -> dict[str, Any]:
    """Returns the model's arguments on `device`, given token IDs (B, T + 1) with one `window` per row.

    Args:
        attention: the model's attention implementation (see `candidates_of`).
        rows: number of leading rows that contribute to the loss. Targets in all other rows are IGNORED. None means all
            rows.
    """
    batch = host_batch(ids, window, end_of_document_id=end_of_document_id, device=device)
    return batch.on_device(device, attention, rows)


def candidates_of(requested: str, config: PreTrainedConfig) -> list[str]:
    """Returns candidate implementations for a recipe's `attention`, fastest first.

    training/probe.py tests which of them are correct for an architecture. This module's implementations don't support
    soft caps, sinks or position biases, and some models don't pass on the document boundaries. The fallbacks are
    transformers' `sdpa` and `eager`, which build a dense mask from position_ids that restart. For models that ignore
    position_ids, `+mask` passes this mask to the model, and `+masks(...)` passes one mask per layer type, with its
    sliding window.
    """
    own = ATTENTION_NAMES[requested]
    library = {"auto": ["sdpa", "eager"], "sdpa": ["sdpa"], "eager": ["eager"]}
    if requested not in library:
        return [own]
    forms = ["", "+mask"]
    kinds = sorted(set(getattr(config, "layer_types", None) or ()))
    if kinds and set(kinds) <= {"full_attention", "sliding_attention"}:
        windows = [f"sliding_attention={config.sliding_window}" if "sliding" in kind else kind for kind in kinds]
        forms.append(f"+masks({','.join(windows)})")
    return [own, *(name + form for name in library[requested] for form in forms)]


def implementation_of(attention: str) -> str:
    """Returns transformers' attn_implementation for a name from `candidates_of`."""
    return attention.partition("+")[0]


def with_rows(attention: str, classes: Collection[str]) -> str:
    """Appends `+rows(...)` to an implementation's name, with the mixer classes that need one document per row.

    See model/document_rows.py. Without classes, returns the name unchanged.
    """
    if not classes:
        return attention
    return f"{attention}+rows({','.join(sorted(classes))})"


def classes_in_rows(attention: str) -> list[str]:
    """Returns the mixer classes in a name returned by `with_rows`, or [] if there are none."""
    classes = attention.partition("+rows(")[2]
    return classes.removesuffix(")").split(",") if classes else []


def without_rows(attention: str) -> str:
    """Removes the mixer classes from a name from `with_rows`."""
    return attention.partition("+rows(")[0]


def choose_attention(requested: str, *, device_type: str, dtype: torch.dtype, window: WindowSpec | None = None) -> str:
    """Returns the attn_implementation for a recipe's `attention`.

    auto is the same as sdpa. On CPUs, sdpa runs the operator in model/cpu_attention.py. On GPUs, it runs torch's
    varlen flash attention, or uses a dense mask if the dtype is fp32 or the GPU is older than Ampere. Raises
    InputError, with alternatives, if the device, dtype, installed packages or `window` don't support the request.
    """
    if requested not in ATTENTION_NAMES:
        raise InputError(f"attention {requested!r} is unknown{did_you_mean(requested, ATTENTION_NAMES)}")
    here = {"device_type": device_type, "dtype": dtype, "window": window}
    if reason := why_not(requested, **here):
        works = [name for name in sorted(ATTENTION_NAMES) if not why_not(name, **here)]
        raise InputError(f"attention {requested} {reason}; available here: {', '.join(works)}")
    return ATTENTION_NAMES[requested]


FLASH_CAPABILITY = (8, 0)
"""Minimum CUDA compute capability for flash attention (A100, RTX 3090 and newer)."""
NEWEST_OF_FLASH_3 = (9, 0)
"""Maximum compute capability for FlashAttention 3, which only supports Hopper."""
FLASH_PACKAGES = {
    "flash_attention_2": ("flash_attn", "see requirements-flash-attn.txt"),
    "flash_attention_3": ("flash_attn_interface", "pip install flash-attn-3, see requirements-flash-attn.txt"),
}
"""{attention: (module, installation instructions)}"""
ATTENTION_NAMES = {
    "auto": "groundwork_sdpa",
    "sdpa": "groundwork_sdpa",
    "varlen": "groundwork_sdpa",
    "eager": "groundwork_eager",
    "flex_attention": "flex_attention",
    "flash_attention_2": "groundwork_fa2",
    "flash_attention_3": "groundwork_fa3",
}
"""{`attention` in the recipe: attn_implementation in transformers}"""


def why_not(requested: str, *, device_type: str, dtype: torch.dtype, window: WindowSpec | None = None) -> str | None:
    """Explains why an attention implementation doesn't work on this machine or with this dtype or window.

    Returns a phrase to append to its name in a message, or None if it works.
    """
    if requested in ("auto", "sdpa", "eager"):
        return None
    if requested == "flex_attention":
        return None if device_type == "cuda" else f"has no backward pass on {device_type}"
    if device_type != "cuda":
        return f"does not run on {device_type}"
    if dtype not in HALF_DTYPES:
        return f"supports only bf16 and fp16, not {str(dtype).removeprefix('torch.')}"
    capability = torch.cuda.get_device_capability()
    if capability < FLASH_CAPABILITY or (requested == "flash_attention_3" and capability > NEWEST_OF_FLASH_3):
        return f"does not support GPUs with compute capability {'.'.join(map(str, capability))}"
    if requested == "varlen":
        return None if window is None or window.document_mask else "requires data.document_mask"
    package, source = FLASH_PACKAGES[requested]
    if importlib.util.find_spec(package):
        return None
    return f"requires the package {package}, which is not installed: {source}"


WIDEST_OF_FLASH = 256
"""Maximum head width in flash attention."""
WITHOUT_BACKWARD = (((8, 6), (8, 9)), ((12, 0), (12, 1)))
"""Ranges of compute capabilities without enough shared memory for a backward pass at head widths from 193 to 224."""


@torch.compiler.assume_constant_result
def has_flash_kernels(device_index: int | None, width: int) -> bool:
    """Returns True if torch's flash attention supports this head width on this GPU."""
    capability = torch.cuda.get_device_capability(device_index)
    is_small = any(first <= capability <= last for first, last in WITHOUT_BACKWARD)
    lacks_backward = is_small and 192 < width <= 224
    return capability >= FLASH_CAPABILITY and width <= WIDEST_OF_FLASH and not lacks_backward


def why_not_flash(config: PreTrainedConfig) -> str | None:
    """Explains why flash attention on this GPU doesn't support this model, or returns None."""
    names = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")
    if any(isinstance(share := getattr(config, name, None), float) and share > 0 for name in names):
        return "does not support attention dropout, which this model uses"
    widths = head_widths(config)
    if widths is not None and widths[0] < widths[1]:
        return f"does not support value head dimension {widths[1]} with key head dimension {widths[0]}"
    if widths is not None and not has_flash_kernels(None, widths[0]):
        return f"does not support head dimension {widths[0]} on this GPU"
    return None


def head_widths(config: PreTrainedConfig) -> tuple[int, int] | None:
    """Returns the query and value head widths from the usual configuration keys, or None if they are missing."""
    width, hidden, heads = (getattr(config, name, None) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    if not width and isinstance(hidden, int) and isinstance(heads, int):
        width = hidden // heads
    parts = [getattr(config, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    query = sum(parts) if all(parts) else width
    return (query, getattr(config, "v_head_dim", None) or query) if isinstance(query, int) else None


def sdpa(
    module: torch.nn.Module,
    query_BHTE: Tensor,
    key_BGTE: Tensor,
    value_BGTE: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Computes causal attention within segments, or over the whole window without cu_seq_lens_q.

    Supports training, and generation without padding. transformers only passes an attention_mask if it is already
    (B, 1, T, T). The signature and the result (B, T, H, E) follow transformers' attention interface.
    """
    # Ignoring one of these arguments would silently train a different model.
    _refuse("sdpa", UNSUPPORTED_ARGUMENTS, kwargs)
    query_BHTE, key_BGTE, value_BGTE = in_one_dtype(query_BHTE, key_BGTE, value_BGTE)
    batch, _, length, width = query_BHTE.shape
    keys = key_BGTE.shape[2]
    value_width = value_BGTE.shape[-1]
    # A window as long as the sequence masks nothing, but would exclude kernels without window support.
    window = None if sliding_window is None or sliding_window >= keys else sliding_window
    device = query_BHTE.device
    in_half_on_gpu = device.type == "cuda" and query_BHTE.dtype in HALF_DTYPES
    has_flash = in_half_on_gpu and has_flash_kernels(device.index, width)
    if attention_mask is None and not dropout and value_width <= width:
        own = length == keys and value_width == width and cpu_attention.serves_windows(query_BHTE.dtype, length)
        if device.type == "cpu" and window is None and (cu_seq_lens_q is not None or own):
            out_BHTE = cpu_attention.attend(
                query_BHTE, key_BGTE, _as_wide_as(width, value_BGTE), cu_seq_lens_q, scaling
            )
            return out_BHTE[..., :value_width].transpose(1, 2), None
        if has_flash and cu_seq_lens_q is not None:
            return _varlen(query_BHTE, key_BGTE, value_BGTE, cu_seq_lens_q, scaling, window), None
    mask = attention_mask
    # During generation, a single query attends to every key. is_causal requires as many queries as keys.
    if mask is None and (cu_seq_lens_q is not None or window is not None or 1 < length < keys):
        mask = _dense_mask((batch, length, keys), device, cu_seq_lens_q, window)
    is_causal = mask is None and length > 1
    is_grouped = query_BHTE.shape[1] != key_BGTE.shape[1]
    serves_groups = has_flash and mask is None and value_width == width
    if is_grouped and device.type == "cuda" and not serves_groups:
        # Only torch's flash kernel supports grouped heads on every GPU. It needs values as wide as the queries. Other
        # kernels would materialize the (T, T) weights.
        group = query_BHTE.shape[1] // key_BGTE.shape[1]
        is_grouped = False
        key_BGTE, value_BGTE = (x.repeat_interleave(group, dim=1) for x in (key_BGTE, value_BGTE))
    out_BHTE = F.scaled_dot_product_attention(
        query_BHTE, key_BGTE, value_BGTE, mask, dropout, is_causal, scale=scaling, enable_gqa=is_grouped
    )
    return out_BHTE.transpose(1, 2), None


def eager(
    module: torch.nn.Module,
    query_BHTE: Tensor,
    key_BGTE: Tensor,
    value_BGTE: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """Computes `sdpa` with materialized (T, T) weights, for debugging and as a reference."""
    _refuse("eager", UNSUPPORTED_ARGUMENTS, kwargs)
    query_BHTE, key_BGTE, value_BGTE = in_one_dtype(query_BHTE, key_BGTE, value_BGTE)
    group = query_BHTE.shape[1] // key_BGTE.shape[1]
    key_BHTE, value_BHTE = (x.repeat_interleave(group, dim=1) for x in (key_BGTE, value_BGTE))
    scale = query_BHTE.shape[-1] ** -0.5 if scaling is None else scaling
    mask = attention_mask
    if mask is None:
        shape = (query_BHTE.shape[0], query_BHTE.shape[2], key_BGTE.shape[2])
        mask = _dense_mask(shape, query_BHTE.device, cu_seq_lens_q, sliding_window)
    scores_BHTT = (query_BHTE @ key_BHTE.transpose(2, 3)).float() * scale
    scores_BHTT = scores_BHTT.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores_BHTT + mask
    weights_BHTT = scores_BHTT.softmax(dim=-1).to(value_BHTE.dtype)
    weights_BHTT = F.dropout(weights_BHTT, p=dropout, training=module.training)
    return (weights_BHTT @ value_BHTE).transpose(1, 2), weights_BHTT


def flash_attention_2(
    module: torch.nn.Module, *tensors: Tensor, dropout: float = 0.0, **kwargs
) -> tuple[Tensor, None]:
    """Computes `sdpa` with the flash_attn package, which also supports soft caps."""
    import flash_attn

    return _flash(flash_attn, *tensors, dropout_p=dropout, **kwargs), None


def flash_attention_3(
    module: torch.nn.Module, *tensors: Tensor, dropout: float = 0.0, **kwargs
) -> tuple[Tensor, None]:
    """Computes `sdpa` with the flash_attn_interface package, which supports soft caps, but not dropout."""
    import flash_attn_interface

    _refuse("flash_attention_3", ("dropout",), {"dropout": dropout or None})
    return _flash(flash_attn_interface, *tensors, **kwargs), None


AttentionInterface.register("groundwork_sdpa", sdpa)
AttentionInterface.register("groundwork_eager", eager)
# For names that contain "flash", transformers would build position masks and synchronize with the device.
AttentionInterface.register("groundwork_fa2", flash_attention_2)
AttentionInterface.register("groundwork_fa3", flash_attention_3)


def _refuse(implementation: str, arguments: Sequence[str], kwargs: dict[str, Any]) -> None:
    given = [name for name in arguments if kwargs.get(name) is not None]
    if given:
        raise InputError(
            f"this model's attention uses {', '.join(given)}, which {implementation} does not support; use a "
            "different attention (on a GPU, flex_attention and flash_attention_2 support soft caps) or architecture"
        )


def in_one_dtype(*tensors: Tensor) -> list[Tensor]:
    """Casts tensors to one dtype. Autocast doesn't do this for custom operators, and norms may return fp32."""
    dtype = autocast_dtype(tensors[-1])
    return [tensor.to(dtype) for tensor in tensors]


def autocast_dtype(x: Tensor, otherwise: torch.dtype | None = None) -> torch.dtype:
    """Returns autocast's dtype on the tensor's device. Without autocast, returns `otherwise` or the tensor's dtype."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else otherwise or x.dtype


def _dense_mask(
    shape: tuple[int, int, int], device: torch.device, cu_seq_lens: Tensor | None, window: int | None
) -> Tensor:
    """Returns a mask (B or 1, 1, T, keys), True if a query may attend to a key.

    The queries are at the last key positions. shape: (B, T, number of keys).
    """
    batch, length, keys = shape
    key_position = torch.arange(keys, device=device)
    distance_TT = key_position[keys - length :, None] - key_position[None, :]
    mask_TT = distance_TT >= 0
    if window is not None:
        mask_TT = mask_TT & (distance_TT < window)
    if cu_seq_lens is None:
        return mask_TT[None, None]
    segment_BT = segment_ids(cu_seq_lens, batch, length)
    return (mask_TT & (segment_BT[:, :, None] == segment_BT[:, None, :]))[:, None]


def _library_masks(cu_seq_lens: Tensor, batch: int, length: int, attention: str) -> Tensor | dict[str, Tensor]:
    """Returns (B, 1, T, T) masks in transformers' format: boolean for sdpa, additive for eager.

    Returns one mask for all layers, or {layer type: mask} if `attention` contains `+masks(...)`.
    """
    implementation, _, form = attention.partition("+")

    def as_taken(window: str) -> Tensor:
        shape = (batch, length, length)
        allowed = _dense_mask(shape, cu_seq_lens.device, cu_seq_lens, int(window) if window else None)
        if implementation == "sdpa":
            return allowed
        lowest = torch.finfo(torch.float32).min
        return torch.zeros(allowed.shape, device=allowed.device).masked_fill(~allowed, lowest)

    if form == "mask":
        return as_taken("")
    kinds = [kind.partition("=") for kind in form.removeprefix("masks(").removesuffix(")").split(",")]
    return {kind: as_taken(window) for kind, _, window in kinds}


class _TokensFirst(torch.autograd.Function):
    """Views (B, H, T, E) as (B x T, H, E), for a tensor with the memory layout (B, T, H, E).

    as_strided makes Inductor use this layout for rotated queries. With a plain view, Inductor would use (B, H, T, E)
    and then copy.
    """

    @staticmethod
    def forward(ctx, x_BHTE: Tensor) -> Tensor:
        batch, heads, length, width = ctx.shape = x_BHTE.shape
        _, of_head, of_token, of_channel = x_BHTE.stride()
        return x_BHTE.as_strided((batch * length, heads, width), (of_token, of_head, of_channel))

    @staticmethod
    def backward(ctx, grad_NHE: Tensor) -> Tensor:
        batch, _, length, _ = ctx.shape
        return grad_NHE.unflatten(0, (batch, length)).transpose(1, 2)


def _tokens_first(x_BHTE: Tensor) -> Tensor:
    """Reshapes to (B x T, H, E), without a copy if possible."""
    # as_strided isn't safe for slices, such as the keys in GPT-2's (B, T, 3 x H x E). If Inductor changes the full
    # tensor's layout, as_strided reads the wrong values.
    if torch.compiler.is_compiling() and INDUCTOR_KEEPS_OFFSETS and x_BHTE.transpose(1, 2).is_contiguous():
        return _TokensFirst.apply(x_BHTE)
    return x_BHTE.transpose(1, 2).flatten(0, 1)


def _as_wide_as(width: int, x: Tensor) -> Tensor:
    """Pads heads with zeros, without a copy if they have this width."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _varlen(query_BHTE, key_BGTE, value_BGTE, cu_seq_lens, scaling, window) -> Tensor:
    batch, heads, length, width = query_BHTE.shape
    value_width = value_BGTE.shape[-1]
    scaling = width**-0.5 if scaling is None else scaling
    # varlen_attn requires equal widths, in multiples of 8. Unlike torch's sdpa, it doesn't pad.
    padded = width + -width % 8
    tokens = [_as_wide_as(padded, _tokens_first(x)) for x in (query_BHTE, key_BGTE, value_BGTE)]
    segments = (cu_seq_lens, cu_seq_lens, length, length)
    grouped = {}
    if heads != key_BGTE.shape[1] and VARLEN_TAKES_GROUPS:
        grouped = {"enable_gqa": True}
    elif heads != key_BGTE.shape[1]:
        tokens[1:] = [x.repeat_interleave(heads // x.shape[1], dim=1) for x in tokens[1:]]
    # The kernel's window excludes the query itself.
    seen = (-1 if window is None else window - 1, 0)
    out_NHE = varlen.varlen_attn(*tokens, *segments, scale=scaling, window_size=seen, **grouped)
    return out_NHE[..., :value_width].unflatten(0, (batch, length))


def _flash(
    package: ModuleType,
    query_BHTE: Tensor,
    key_BGTE: Tensor,
    value_BGTF: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout_p: float | None = None,
    **kwargs,
) -> Tensor:
    """Calls a flash attention package and returns (B, T, H, F). The value width F may be less than E."""
    _refuse("flash attention", UNKNOWN_TO_FLASH, {**kwargs, "attention_mask": attention_mask})
    tensors = in_one_dtype(query_BHTE, key_BGTE, value_BGTF)
    batch, _, length, width = query_BHTE.shape
    value_width = value_BGTF.shape[-1]
    # The kernels require equal key and value widths, in multiples of 8. The padding is removed below.
    padded = width + -width % 8
    tensors = [_as_wide_as(padded, x) for x in tensors]
    scaling = width**-0.5 if scaling is None else scaling
    settings = {"softmax_scale": scaling, "causal": True, "softcap": softcap or 0.0}
    # By default, the backward pass uses atomic adds in varying order.
    settings["deterministic"] = torch.are_deterministic_algorithms_enabled()
    settings["window_size"] = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
    if dropout_p is not None:
        settings["dropout_p"] = dropout_p
    if cu_seq_lens_q is None:
        out = package.flash_attn_func(*(x.transpose(1, 2) for x in tensors), **settings)
    else:
        tensors = [_tokens_first(x) for x in tensors]
        out = package.flash_attn_varlen_func(*tensors, cu_seq_lens_q, cu_seq_lens_q, length, length, **settings)
    out = out[0] if isinstance(out, tuple) else out  # early FlashAttention 3 releases also return the logsumexp
    return out.view(batch, length, -1, padded)[..., :value_width]


def _flex_block_mask(cu_seq_lens: Tensor, batch: int, length: int):
    """Builds the same mask as create_block_mask, without evaluating all (T, T) pairs in each micro-step.

    Segments are contiguous, so each block's first and last segment are sufficient. A query block and an earlier key
    block are partially masked if they share a segment, and fully visible if both contain only that segment.
    """
    from torch.nn.attention.flex_attention import BlockMask

    segment_BT = segment_ids(cu_seq_lens, batch, length)

    def same_segment_and_causal(b, h, query, key):
        return (segment_BT[b, query] == segment_BT[b, key]) & (query >= key)

    first_BN = segment_BT[:, ::FLEX_BLOCK]
    last_BN = segment_BT[:, FLEX_BLOCK - 1 :: FLEX_BLOCK]
    blocks = first_BN.shape[1]
    is_cut = last_BN.shape[1] < blocks  # the last block extends beyond the window
    last_BN = torch.cat([last_BN, segment_BT[:, -1:]], dim=1) if is_cut else last_BN
    position = torch.arange(blocks, device=cu_seq_lens.device)
    is_earlier_NN = position[:, None] > position[None, :]
    shares_BNN = is_earlier_NN & (first_BN[:, :, None] == last_BN[:, None, :])
    is_full_BNN = shares_BNN & (first_BN[:, None, :] == last_BN[:, :, None])
    if is_cut:
        is_full_BNN = is_full_BNN & (position < blocks - 1)[:, None]
    is_partial_BNN = (shares_BNN & ~is_full_BNN) | (position[:, None] == position[None, :])
    blocks_to_visit = (*_listed(is_partial_BNN[:, None]), *_listed(is_full_BNN[:, None]))
    return BlockMask.from_kv_blocks(
        *blocks_to_visit, FLEX_BLOCK, same_segment_and_causal, seq_lengths=(length, length)
    )


def _listed(is_in: Tensor) -> tuple[Tensor, Tensor]:
    """Returns int32 (number of True entries per row, column indices with the True entries first)."""
    order = torch.argsort(is_in.to(torch.int8), dim=-1, descending=True, stable=True)
    return is_in.sum(dim=-1, dtype=torch.int32), order.to(torch.int32)
