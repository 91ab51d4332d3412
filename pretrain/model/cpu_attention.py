"""Causal attention within segments on a CPU.

Short windows in compiled code use plain matmuls, with all other operations fused. Other windows in bf16 use the kernel
in bf16_cpu_attention.py if it works on this CPU. All others use a custom operator in fp32.

The operator computes medium-length segments in blocks of queries and saves the probabilities for the backward pass,
which is faster than torch's flash kernel. Long segments use the flash kernel, because the probabilities' memory is
quadratic in the length. Short segments also use it, because call overhead would dominate.

Shapes: B windows, T positions, H query heads, G key heads, E head dimension, N = rows x heads in one block.
"""

import functools
import itertools

import torch
from torch import Tensor

from pretrain.model import bf16_cpu_attention
from pretrain.model.bf16_cpu_attention import empty_gradients, empty_heads_last, rows_contiguous

HALF_DTYPES = (torch.bfloat16, torch.float16)
LENGTHS_IN_BLOCKS = range(256, 1025)
"""Lengths of segments to compute in blocks of queries (measured in docs/measurements_cpu.md)."""
LONGEST_AS_PRODUCTS = 128
LONGEST_AS_PRODUCTS_WITH_KERNEL = 31
"""Maximum window length for plain matmuls in compiled code (measured in docs/measurements_cpu.md)."""
BLOCK_QUERIES = 128
SCORES_BYTES = 7 * 2**20
"""Bytes of fp32 scores per block of queries, over all windows computed together.

Larger blocks would not fit into the caches, and smaller ones would need more calls.
"""


def attend(
    query_BHTE: Tensor, key_BGTE: Tensor, value_BGTE: Tensor, cu_seq_lens: Tensor | None, scaling: float | None
) -> Tensor:
    """Computes causal attention (B, H, T, E) within the segments in cu_seq_lens (S + 1,).

    If cu_seq_lens is None, each window is one segment.
    """
    if as_products(query_BHTE.dtype, query_BHTE.shape[2]):
        return attend_by_products(query_BHTE, key_BGTE, value_BGTE, cu_seq_lens, scaling)
    if cu_seq_lens is None:
        cu_seq_lens = torch.arange(query_BHTE.shape[0] + 1, dtype=torch.int32) * query_BHTE.shape[2]
    scale = query_BHTE.shape[-1] ** -0.5 if scaling is None else scaling
    if has_kernel(query_BHTE.dtype):
        return bf16_cpu_attention.attend(query_BHTE, key_BGTE, value_BGTE, cu_seq_lens, scale)
    dtype = _score_dtype(query_BHTE.dtype)
    inputs = [x.to(dtype) for x in (query_BHTE, key_BGTE, value_BGTE)]
    keeps = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    out_BHTE = torch.ops.groundwork.packed_attention(*inputs, cu_seq_lens, scale, keeps)[0]
    return out_BHTE.to(query_BHTE.dtype)


def has_kernel(dtype: torch.dtype) -> bool:
    """Returns True if `attend` uses the kernel in bf16_cpu_attention.py, except for short windows."""
    return dtype == torch.bfloat16 and bf16_cpu_attention.is_available()


def as_products(dtype: torch.dtype, tokens: int) -> bool:
    """Returns True if `attend_by_products` is the fastest method, as for short windows in compiled code."""
    if dtype == torch.float64 or not torch.compiler.is_compiling():
        return False
    return tokens <= (LONGEST_AS_PRODUCTS_WITH_KERNEL if has_kernel(dtype) else LONGEST_AS_PRODUCTS)


def attend_by_products(
    query_BHTE: Tensor, key_BGTE: Tensor, value_BGTE: Tensor, cu_seq_lens: Tensor | None, scaling: float | None
) -> Tensor:
    """Computes `attend` with plain matmuls and softmax, for compiled code. The scores are in fp32."""
    batch, heads, length, width = query_BHTE.shape
    scale = width**-0.5 if scaling is None else scaling
    dtype = _score_dtype(query_BHTE.dtype)
    query_NTE, key_NTE, value_NTE = (_heads_together(x, heads) for x in (query_BHTE, key_BGTE, value_BGTE))
    positions_T = torch.arange(length, device=query_BHTE.device)
    is_hidden = positions_T[:, None] < positions_T
    if cu_seq_lens is not None:
        segment_BT = segment_ids(cu_seq_lens, batch, length)
        is_hidden = (is_hidden | (segment_BT[:, :, None] != segment_BT[:, None]))[:, None]
        is_hidden = is_hidden.expand(batch, heads, length, length).flatten(0, 1)
    hidden = torch.where(is_hidden, -torch.inf, 0.0).to(dtype)
    scores_NTT = torch.baddbmm(hidden, query_NTE.to(dtype), key_NTE.transpose(1, 2).to(dtype), alpha=scale)
    return torch.bmm(scores_NTT.softmax(dim=-1).to(value_NTE.dtype), value_NTE).unflatten(0, (batch, heads))


def segment_ids(cu_seq_lens: Tensor, batch: int, length: int) -> Tensor:
    """Returns each token's segment ID, (B, T)."""
    tokens = torch.arange(batch * length, dtype=cu_seq_lens.dtype, device=cu_seq_lens.device)
    return torch.searchsorted(cu_seq_lens, tokens, right=True).view(batch, length)


def serves_windows(dtype: torch.dtype, tokens: int) -> bool:
    """Returns True if `attend` is faster than torch's causal attention for windows with one segment each."""
    return dtype in HALF_DTYPES or tokens in LENGTHS_IN_BLOCKS or as_products(dtype, tokens)


def segments_of(cu_seq_lens: Tensor, length: int) -> list[tuple[slice, slice]]:
    """Returns (rows, positions) for each segment. Groups adjacent rows that have only one segment each."""
    segments: list[tuple[slice, slice]] = []
    for start, end in itertools.pairwise(cu_seq_lens.tolist()):
        if start == end:
            continue
        row, first = divmod(start, length)
        first_row = row
        positions = slice(first, first + end - start)
        if segments and segments[-1][1] == positions == slice(0, length):
            first_row = segments.pop()[0].start
        segments.append((slice(first_row, row + 1), positions))
    return segments


def query_blocks(cu_seq_lens: Tensor, query_BHTE: Tensor) -> list[tuple[slice, slice, bool]]:
    """Returns (rows, positions, True to use blocks of queries) for each attention call, in order."""
    _, heads, length, _ = query_BHTE.shape
    parts = []
    for rows, positions in segments_of(cu_seq_lens, length):
        tokens = positions.stop - positions.start
        if tokens not in LENGTHS_IN_BLOCKS:
            parts.append((rows, positions, False))
            continue
        together = max(1, SCORES_BYTES // (4 * heads * min(BLOCK_QUERIES, tokens) * tokens))
        for row in range(rows.start, rows.stop, together):
            parts.append((slice(row, min(row + together, rows.stop)), positions, True))
    return parts


def _block_bounds(tokens: int) -> list[tuple[int, int]]:
    """Returns (first, last + 1) for the queries in each block."""
    return [(begin, min(begin + BLOCK_QUERIES, tokens)) for begin in range(0, tokens, BLOCK_QUERIES)]


@functools.lru_cache
def _probabilities_per_token(longest: int) -> int:
    """Returns the largest number of probabilities per head and token, for segments of up to `longest` tokens."""
    return max(
        -(-sum((end - begin) * end for begin, end in _block_bounds(tokens)) // tokens)
        for tokens in range(LENGTHS_IN_BLOCKS.start, longest + 1)
    )


def _score_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _Probabilities:
    """Softmax results of all blocks in one tensor, in the order in which they are computed."""

    def __init__(self, kept: Tensor):
        self._kept = kept
        self._end = 0

    def next(self, *shape: int) -> Tensor:
        begin = self._end
        self._end += torch.Size(shape).numel()
        return self._kept[begin : self._end].view(shape)


def _empty_probabilities(query_BHTE: Tensor, keeps: bool) -> Tensor:
    """Allocates memory for the probabilities, enough for any combination of segments.

    The operating system doesn't allocate pages that are never written.
    """
    batch, heads, length, _ = query_BHTE.shape
    longest = min(length, LENGTHS_IN_BLOCKS[-1])
    if not keeps or longest not in LENGTHS_IN_BLOCKS:
        return query_BHTE.new_empty(0)
    return query_BHTE.new_empty(batch * heads * length * _probabilities_per_token(longest))


def _heads_together(x_RHTE: Tensor, heads: int) -> Tensor:
    """Copies some rows of (B, H or G, T, E) into (N, T, E), and repeats key heads for their query heads."""
    groups = x_RHTE.shape[1]
    if groups == heads:
        return x_RHTE.clone(memory_format=torch.contiguous_format).flatten(0, 1)
    return x_RHTE.repeat_interleave(heads // groups, dim=1).flatten(0, 1)


@functools.lru_cache(maxsize=8)
def _future_mask(queries: int, dtype: torch.dtype) -> Tensor:
    """Returns an additive causal mask (Q, Q) for a block's last keys, seven times as fast as masked_fill."""
    return torch.full((queries, queries), -torch.inf, dtype=dtype, device="cpu").triu(1)


# Autocast would also apply within custom operators.
@torch.autocast("cpu", enabled=False)
def _forward_in_blocks(
    out_RHTE, query_RHTE, key_RGTE, value_RGTE, scale: float, probabilities: _Probabilities | None
) -> None:
    """Computes attention for some rows and writes it to out_RHTE."""
    rows, heads, length, _ = query_RHTE.shape
    query_NTE = _heads_together(query_RHTE, heads).mul_(scale)
    key_NET = _heads_together(key_RGTE, heads).transpose(1, 2)
    value_NTE = _heads_together(value_RGTE, heads)
    future_QQ = _future_mask(min(BLOCK_QUERIES, length), query_RHTE.dtype)
    for begin, end in _block_bounds(length):
        scores_NQK = torch.bmm(query_NTE[:, begin:end], key_NET[:, :, :end])
        scores_NQK[:, :, begin:] += future_QQ[: end - begin, : end - begin]
        softmax_NQK = torch.softmax(scores_NQK, dim=-1, out=scores_NQK)
        if probabilities is not None:
            softmax_NQK = probabilities.next(*scores_NQK.shape).copy_(softmax_NQK)
        out_RHTE[:, :, begin:end] = torch.bmm(softmax_NQK, value_NTE[:, :end]).unflatten(0, (rows, heads))


@torch.autocast("cpu", enabled=False)
def _backward_in_blocks(
    gradients, grad_out_RHTE, query_RHTE, key_RGTE, value_RGTE, scale: float, probabilities: _Probabilities
) -> None:
    """Computes the gradients of query, key and value and writes them to `gradients`."""
    rows, heads, length, _ = query_RHTE.shape
    key_NTE = _heads_together(key_RGTE, heads)
    value_NET = _heads_together(value_RGTE, heads).transpose(1, 2)
    blocks = _block_bounds(length)
    softmaxes_NQK = [probabilities.next(rows * heads, end - begin, end) for begin, end in blocks]
    for begin, end in reversed(blocks):  # the last block covers all keys, so it comes first and creates the sums
        # Each tensor is used twice, and bmm would copy a strided slice each time.
        query_NQE = _heads_together(query_RHTE[:, :, begin:end], heads).mul_(scale)
        grad_out_NQE = _heads_together(grad_out_RHTE[:, :, begin:end], heads)
        softmax_NQK = softmaxes_NQK.pop()
        grad_NQK = torch.bmm(grad_out_NQE, value_NET[:, :, :end])
        # Only this private function computes the gradient of softmax in place.
        torch._softmax_backward_data(grad_NQK, softmax_NQK, -1, grad_NQK.dtype, grad_input=grad_NQK)
        grad_query_NQE = torch.bmm(grad_NQK, key_NTE[:, :end]).mul_(scale)
        gradients[0][:, :, begin:end] = grad_query_NQE.unflatten(0, (rows, heads))
        grad_value_NKE = torch.bmm(softmax_NQK.transpose(1, 2), grad_out_NQE)
        grad_key_NKE = torch.bmm(grad_NQK.transpose(1, 2), query_NQE)
        if end == length:
            grad_value_NTE, grad_key_NTE = grad_value_NKE, grad_key_NKE
        else:
            grad_value_NTE[:, :end] += grad_value_NKE
            grad_key_NTE[:, :end] += grad_key_NKE
    groups = key_RGTE.shape[1]
    for gradient, sum_NTE in zip(gradients[1:], (grad_key_NTE, grad_value_NTE), strict=True):
        sum_RHTE = sum_NTE.unflatten(0, (rows, heads))
        gradient.copy_(sum_RHTE if groups == heads else sum_RHTE.unflatten(1, (groups, heads // groups)).sum(dim=2))


# Inductor caches compiled code by the operator's name. If the outputs' shapes change, so must the name.
@torch.library.custom_op("groundwork::packed_attention", mutates_args=(), device_types="cpu")
def _packed_attention(
    query_BHTE: Tensor, key_BGTE: Tensor, value_BGTE: Tensor, cu_seq_lens: Tensor, scale: float, keeps: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (output (B, H, T, E), the flash kernel's logsumexp (B, H, T), the blocks' probabilities).

    keeps: True if a backward pass will follow.
    """
    out_BHTE, lse_BHT, kept = _empty_outputs(query_BHTE, keeps)
    probabilities = _Probabilities(kept) if keeps else None
    for rows, positions, is_in_blocks in query_blocks(cu_seq_lens, query_BHTE):
        inputs = [x[rows, :, positions] for x in (query_BHTE, key_BGTE, value_BGTE)]
        if is_in_blocks:
            _forward_in_blocks(out_BHTE[rows, :, positions], *inputs, scale, probabilities)
            continue
        # torch's public function doesn't return the logsumexp, which our backward pass needs.
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, True, scale=scale)
        out_BHTE[rows, :, positions] = out
        lse_BHT[rows, :, positions] = lse
    return out_BHTE, lse_BHT, kept


@torch.library.custom_op("groundwork::packed_attention_backward", mutates_args=(), device_types="cpu")
def _packed_attention_backward(
    grad_out_BHTE: Tensor,
    query_BHTE: Tensor,
    key_BGTE: Tensor,
    value_BGTE: Tensor,
    out_BHTE: Tensor,
    lse_BHT: Tensor,
    kept: Tensor,
    cu_seq_lens: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value."""
    grad_out_BHTE = rows_contiguous(grad_out_BHTE)
    inputs = (query_BHTE, key_BGTE, value_BGTE)
    gradients = empty_gradients(grad_out_BHTE, *inputs)
    probabilities = _Probabilities(kept)
    for rows, positions, is_in_blocks in query_blocks(cu_seq_lens, query_BHTE):
        arguments = [x[rows, :, positions] for x in (grad_out_BHTE, *inputs)]
        views = [x[rows, :, positions] for x in gradients]
        if is_in_blocks:
            _backward_in_blocks(views, *arguments, scale, probabilities)
            continue
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *arguments, out_BHTE[rows, :, positions], lse_BHT[rows, :, positions], 0.0, True, scale=scale
        )
        for view, part in zip(views, parts, strict=True):
            view.copy_(part)
    return gradients


@_packed_attention.register_fake
def _(query_BHTE, key_BGTE, value_BGTE, cu_seq_lens, scale, keeps):
    return _empty_outputs(query_BHTE, keeps)


_packed_attention_backward.register_fake(empty_gradients)


def _empty_outputs(query_BHTE: Tensor, keeps: bool) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, length, _ = query_BHTE.shape
    lse_BHT = query_BHTE.new_empty(batch, length, heads).transpose(1, 2)
    return empty_heads_last(query_BHTE), lse_BHT, _empty_probabilities(query_BHTE, keeps)


def _save_for_backward(ctx, inputs, output):
    query_BHTE, key_BGTE, value_BGTE, cu_seq_lens, ctx.scale, _ = inputs
    ctx.save_for_backward(query_BHTE, key_BGTE, value_BGTE, *output, cu_seq_lens)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out_BHTE, *_):
    gradients = torch.ops.groundwork.packed_attention_backward(grad_out_BHTE, *ctx.saved_tensors, ctx.scale)
    return *gradients, None, None, None


_packed_attention.register_autograd(_backward, setup_context=_save_for_backward)
