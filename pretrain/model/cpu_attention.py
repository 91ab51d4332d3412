"""Causal attention within segments on a CPU.

Short windows in compiled code use plain matmuls, with all other operations fused. Other windows use a custom operator.

The operator computes medium-length segments in blocks of queries and saves the probabilities for the backward pass,
which is faster than torch's flash kernel. Long segments use the flash kernel, because the probabilities' memory is
quadratic in the length. In fp32, short segments also use it.

Shapes: B windows, T positions, H query heads, G key heads, E head dimension, R rows (windows) computed together,
N = R x H, Q queries in a block, K keys in a block.
"""

import functools
import itertools
import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

HALF_DTYPES = (torch.bfloat16, torch.float16)
HALF_SHORTEST_IN_BLOCKS = 48
FP32_SHORTEST_IN_BLOCKS = 256
LONGEST_IN_BLOCKS = 1024
"""Range of segment lengths to compute in blocks of queries (measured in docs/measurements_cpu.md)."""
HALF_LONGEST_AS_PRODUCTS = 64
FP32_LONGEST_AS_PRODUCTS = 128
"""Maximum window length for plain matmuls in compiled code (measured in docs/measurements_cpu.md)."""
BLOCK_QUERIES = 128
KEY_STEP = 32
"""A block's first key is at a multiple of this position.

oneDNN compiles a kernel for every shape of a half-precision matmul, which takes longer than a small matmul itself, and
documents begin anywhere.
"""
SCORES_BYTES = 14 * 2**20
"""Bytes of fp32 scores per block of queries, over all windows computed together.

Larger blocks would not fit into the caches, and smaller ones would need more calls.
"""


class Block(NamedTuple):
    """A block of queries, from `begin` to `end`, which attends to keys from `first` to `end`."""

    begin: int
    end: int
    first: int


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
    keeps = torch.is_grad_enabled() and any(x.requires_grad for x in (query_BHTE, key_BGTE, value_BGTE))
    return torch.ops.groundwork.blockwise_attention(query_BHTE, key_BGTE, value_BGTE, cu_seq_lens, scale, keeps)[0]


def as_products(dtype: torch.dtype, tokens: int) -> bool:
    """Returns True if `attend_by_products` is the fastest method, as for short windows in compiled code."""
    longest = HALF_LONGEST_AS_PRODUCTS if dtype in HALF_DTYPES else FP32_LONGEST_AS_PRODUCTS
    return dtype != torch.float64 and tokens <= longest and torch.compiler.is_compiling()


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


def in_blocks(dtype: torch.dtype, windows: int, tokens: int) -> bool:
    """Returns True if segments of `tokens` tokens in `windows` windows are computed in blocks of queries."""
    if dtype not in HALF_DTYPES:
        return FP32_SHORTEST_IN_BLOCKS <= tokens <= LONGEST_IN_BLOCKS
    return HALF_SHORTEST_IN_BLOCKS <= tokens <= LONGEST_IN_BLOCKS and windows * tokens >= BLOCK_QUERIES


def serves_windows(dtype: torch.dtype, windows: int, tokens: int) -> bool:
    """Returns True if `attend` is faster than torch's causal attention for windows with one segment each."""
    own = in_blocks(dtype, windows, tokens) or as_products(dtype, tokens)
    return own or (dtype in HALF_DTYPES and tokens <= LONGEST_IN_BLOCKS)


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


def lengths_in_blocks(query_BHTE: Tensor) -> range:
    """Returns the lengths of segments to compute in blocks of queries."""
    batch, _, length, _ = query_BHTE.shape
    if query_BHTE.dtype not in HALF_DTYPES:
        return range(FP32_SHORTEST_IN_BLOCKS, LONGEST_IN_BLOCKS + 1)
    # Short segments share blocks with others, so only the window must be long enough.
    longest = LONGEST_IN_BLOCKS if in_blocks(query_BHTE.dtype, batch, min(length, LONGEST_IN_BLOCKS)) else 0
    return range(1, longest + 1)


def plan_calls(
    segments: list[tuple[slice, slice]], query_BHTE: Tensor
) -> tuple[list[tuple[slice, list[Block]]], list[tuple[slice, slice]]]:
    """Returns (rows, blocks) to compute together, and the segments for the flash kernel.

    Blocks are aligned to the windows. They can include queries of flash segments, whose results are then replaced.
    """
    batch, heads, length, _ = query_BHTE.shape
    lengths = lengths_in_blocks(query_BHTE)
    is_flash = [positions.stop - positions.start not in lengths for _, positions in segments]
    in_row: list[list[slice]] = [[] for _ in range(batch)]
    for rows, positions in itertools.compress(segments, map(operator.not_, is_flash)):
        for row in range(rows.start, rows.stop):
            in_row[row].append(positions)
    queries = min(BLOCK_QUERIES, length)
    together = max(1, SCORES_BYTES // (4 * heads * queries * min(length, LONGEST_IN_BLOCKS)))
    groups = []
    for row in range(0, batch, together):
        rows = slice(row, min(row + together, batch))
        firsts: dict[int, int] = {}
        for positions in itertools.chain(*in_row[rows]):
            for number in range(positions.start // queries, (positions.stop - 1) // queries + 1):
                # A block's queries always have a key: their own token.
                first = min(positions.start // KEY_STEP * KEY_STEP, number * queries)
                firsts[number] = min(first, firsts.get(number, first))
        if firsts:
            blocks = [
                Block(number * queries, min((number + 1) * queries, length), first)
                for number, first in sorted(firsts.items())
            ]
            groups.append((rows, blocks))
    return groups, list(itertools.compress(segments, is_flash))


def _flash_dtype(dtype: torch.dtype, positions: slice) -> torch.dtype:
    """Returns the dtype for the flash kernel. Unless the segment is long, fp32 is faster than half precision."""
    is_long = positions.stop - positions.start > LONGEST_IN_BLOCKS
    return dtype if is_long or dtype not in HALF_DTYPES else torch.float32


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
    lengths = lengths_in_blocks(query_BHTE)
    if not keeps or not lengths or length < lengths.start:
        return query_BHTE.new_empty(0)
    # A block's keys reach back to the start of its first segment. The next block has up to BLOCK_QUERIES more keys, or
    # few if it begins a new segment. So there are most keys if all segments are as long as possible.
    most_keys = LONGEST_IN_BLOCKS + BLOCK_QUERIES + KEY_STEP
    kept = 0
    for number, begin in enumerate(reversed(range(0, length, BLOCK_QUERIES))):
        end = min(begin + BLOCK_QUERIES, length)
        kept += (end - begin) * min(end, most_keys - number * BLOCK_QUERIES % LONGEST_IN_BLOCKS)
    return query_BHTE.new_empty(batch * heads * kept)


def _heads_together(x_RHTE: Tensor, heads: int, dtype: torch.dtype | None = None) -> Tensor:
    """Copies some rows of (B, H or G, T, E) into (N, T, E), and repeats key heads for their query heads."""
    rows, groups, length, width = x_RHTE.shape
    repeated_RGhTE = x_RHTE[:, :, None].expand(-1, -1, heads // groups, -1, -1)
    copy = repeated_RGhTE.to(dtype or x_RHTE.dtype, copy=True, memory_format=torch.contiguous_format)
    return copy.view(rows * heads, length, width)


@functools.lru_cache(maxsize=8)
def _future_mask(queries: int, dtype: torch.dtype) -> Tensor:
    """Returns an additive causal mask (Q, Q) for a block's last keys, seven times as fast as masked_fill."""
    return torch.full((queries, queries), -torch.inf, dtype=dtype, device="cpu").triu(1)


@contextmanager
def _products_of_bf16(dtype: torch.dtype) -> Iterator[None]:
    """Multiplies fp32 matrices in bf16 with fp32 sums, if `dtype` is bf16.

    torch has no matmul from bf16 to fp32 on a CPU. If the inputs are bf16 values, this is exact, and twice as fast.
    """
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    if dtype == torch.bfloat16:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _scores(query_RHQE: Tensor, key_RGKE: Tensor, scale: float) -> Tensor:
    """Returns scale x query x key^T (N, Q, K) in fp32, or in fp64 for fp64 inputs."""
    heads = query_RHQE.shape[1]
    dtype = _score_dtype(query_RHQE.dtype)
    fraction, exponent = math.frexp(scale)
    if fraction == 0.5:
        fraction, exponent = 1.0, exponent - 1
    # Scaling by a power of 2 keeps bf16 values exact.
    query_NQE = _heads_together(query_RHQE, heads, dtype).mul_(2.0**exponent)
    key_NKE = _heads_together(key_RGKE, heads, dtype)
    with _products_of_bf16(query_RHQE.dtype):
        scores_NQK = torch.bmm(query_NQE, key_NKE.transpose(1, 2))
    return scores_NQK if fraction == 1.0 else scores_NQK.mul_(fraction)


def _hide(scores_NQK: Tensor, block: Block, segment_RT: Tensor | None) -> None:
    """Hides later keys and other segments' keys from each query, in place."""
    begin, end, first = block
    future_QQ = _future_mask(end - begin, scores_NQK.dtype)
    if segment_RT is None:
        scores_NQK[:, :, begin - first :] += future_QQ
        return
    is_other_RQK = segment_RT[:, begin:end, None] != segment_RT[:, None, first:end]
    hidden_RQK = torch.where(is_other_RQK, -torch.inf, 0.0).to(scores_NQK.dtype)
    hidden_RQK[:, :, begin - first :] += future_QQ
    scores_NQK.unflatten(0, (segment_RT.shape[0], -1)).add_(hidden_RQK[:, None])


def _forward_in_blocks(
    out_RHTE, query_RHTE, key_RGTE, value_RGTE, blocks, segment_RT, scale: float, probabilities: _Probabilities | None
) -> None:
    """Computes attention for some rows and writes it to out_RHTE."""
    rows, heads, _, _ = query_RHTE.shape
    dtype = value_RGTE.dtype
    for block in blocks:
        begin, end, first = block
        scores_NQK = _scores(query_RHTE[:, :, begin:end], key_RGTE[:, :, first:end], scale)
        _hide(scores_NQK, block, segment_RT)
        softmax_NQK = torch.softmax(scores_NQK, dim=-1, out=scores_NQK)
        if probabilities is None:
            softmax_NQK = softmax_NQK.to(dtype)
        else:
            softmax_NQK = probabilities.next(*scores_NQK.shape).copy_(softmax_NQK)
        block_NQE = torch.bmm(softmax_NQK, _heads_together(value_RGTE[:, :, first:end], heads))
        out_RHTE[:, :, begin:end] = block_NQE.unflatten(0, (rows, heads))


def _backward_in_blocks(
    gradients, grad_out_RHTE, query_RHTE, key_RGTE, value_RGTE, blocks, scale: float, probabilities: _Probabilities
) -> None:
    """Computes the gradients of query, key and value and writes them to `gradients`."""
    rows, heads, length, width = query_RHTE.shape
    groups = key_RGTE.shape[1]
    dtype = query_RHTE.dtype
    sums_NTE = [query_RHTE.new_empty(rows * heads, length, width, dtype=_score_dtype(dtype)) for _ in range(2)]
    summed_from = length  # the sums have values from this position on
    softmaxes_NQK = [probabilities.next(rows * heads, end - begin, end - first) for begin, end, first in blocks]
    for begin, end, first in reversed(blocks):
        key_NKE = _heads_together(key_RGTE[:, :, first:end], heads)
        value_NKE = _heads_together(value_RGTE[:, :, first:end], heads)
        # Each tensor is used twice, and bmm would copy a strided slice each time.
        query_NQE = _heads_together(query_RHTE[:, :, begin:end], heads).mul_(scale)
        grad_out_NQE = _heads_together(grad_out_RHTE[:, :, begin:end], heads)
        softmax_NQK = softmaxes_NQK.pop()
        grad_NQK = torch.bmm(grad_out_NQE, value_NKE.transpose(1, 2))
        # Only this private function computes the gradient of softmax in place.
        torch._softmax_backward_data(grad_NQK, softmax_NQK, -1, dtype, grad_input=grad_NQK)
        grad_query_NQE = torch.bmm(grad_NQK, key_NKE).mul_(scale)
        gradients[0][:, :, begin:end] = grad_query_NQE.unflatten(0, (rows, heads))
        grad_key_NKE = torch.bmm(grad_NQK.transpose(1, 2), query_NQE)
        grad_value_NKE = torch.bmm(softmax_NQK.transpose(1, 2), grad_out_NQE)
        new = max(first, min(summed_from, end))
        for sum_NTE, grad_NKE in zip(sums_NTE, (grad_key_NKE, grad_value_NKE), strict=True):
            sum_NTE[:, new:end] += grad_NKE[:, new - first :]
            sum_NTE[:, first:new] = grad_NKE[:, : new - first]
        summed_from = min(summed_from, first)
    for gradient, sum_NTE in zip(gradients[1:], sums_NTE, strict=True):
        sum_RHTE = sum_NTE.unflatten(0, (rows, heads))
        gradient.copy_(sum_RHTE if groups == heads else sum_RHTE.unflatten(1, (groups, heads // groups)).sum(dim=2))


# Inductor caches compiled code by the operator's name. If the outputs' shapes change, so must the name.
@torch.library.custom_op("groundwork::blockwise_attention", mutates_args=(), device_types="cpu")
def _blockwise_attention(
    query_BHTE: Tensor, key_BGTE: Tensor, value_BGTE: Tensor, cu_seq_lens: Tensor, scale: float, keeps: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (output (B, H, T, E), the flash kernel's logsumexp (B, H, T), the blocks' probabilities).

    keeps: True if a backward pass will follow.
    """
    out_BHTE, lse_BHT, kept = _empty_outputs(query_BHTE, keeps)
    probabilities = _Probabilities(kept) if keeps else None
    inputs = (query_BHTE, key_BGTE, value_BGTE)
    batch, _, length, _ = query_BHTE.shape
    segments = segments_of(cu_seq_lens, length)
    has_boundaries = any(positions != slice(0, length) for _, positions in segments)
    segment_BT = segment_ids(cu_seq_lens, batch, length) if has_boundaries else None
    groups, flash = plan_calls(segments, query_BHTE)
    for rows, blocks in groups:
        segment_RT = None if segment_BT is None else segment_BT[rows]
        _forward_in_blocks(out_BHTE[rows], *(x[rows] for x in inputs), blocks, segment_RT, scale, probabilities)
    for rows, positions in flash:
        dtype = _flash_dtype(query_BHTE.dtype, positions)
        # torch's public function doesn't return the logsumexp, which our backward pass needs.
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x[rows, :, positions].to(dtype) for x in inputs), 0.0, True, scale=scale
        )
        out_BHTE[rows, :, positions] = out
        lse_BHT[rows, :, positions] = lse
    return out_BHTE, lse_BHT, kept


@torch.library.custom_op("groundwork::blockwise_attention_backward", mutates_args=(), device_types="cpu")
def _blockwise_attention_backward(
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
    grad_out_BHTE = grad_out_BHTE.contiguous() if grad_out_BHTE.stride(-1) != 1 else grad_out_BHTE
    inputs = (query_BHTE, key_BGTE, value_BGTE)
    gradients = tuple(_empty_like_heads_last(x) for x in inputs)
    probabilities = _Probabilities(kept)
    groups, flash = plan_calls(segments_of(cu_seq_lens, query_BHTE.shape[2]), query_BHTE)
    if groups and flash:
        block_grad_out_BHTE = grad_out_BHTE.clone()
        for rows, positions in flash:
            block_grad_out_BHTE[rows, :, positions] = 0.0
    else:
        block_grad_out_BHTE = grad_out_BHTE
    for rows, blocks in groups:
        arguments = (x[rows] for x in (block_grad_out_BHTE, *inputs))
        _backward_in_blocks([x[rows] for x in gradients], *arguments, blocks, scale, probabilities)
    for rows, positions in flash:
        dtype = _flash_dtype(query_BHTE.dtype, positions)
        arguments = (x[rows, :, positions].to(dtype) for x in (grad_out_BHTE, *inputs, out_BHTE))
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *arguments, lse_BHT[rows, :, positions], 0.0, True, scale=scale
        )
        for gradient, part in zip(gradients, parts, strict=True):
            gradient[rows, :, positions] = part
    return gradients


@_blockwise_attention.register_fake
def _(query_BHTE, key_BGTE, value_BGTE, cu_seq_lens, scale, keeps):
    return _empty_outputs(query_BHTE, keeps)


@_blockwise_attention_backward.register_fake
def _(grad_out_BHTE, query_BHTE, key_BGTE, value_BGTE, out_BHTE, lse_BHT, kept, cu_seq_lens, scale):
    return tuple(_empty_like_heads_last(x) for x in (query_BHTE, key_BGTE, value_BGTE))


def _empty_like_heads_last(x_BHTE: Tensor) -> Tensor:
    """Allocates (B, H, T, E) with the memory layout (B, T, H, E), which avoids copies in the projections."""
    batch, heads, length, width = x_BHTE.shape
    return x_BHTE.new_empty(batch, length, heads, width).transpose(1, 2)


def _empty_outputs(query_BHTE: Tensor, keeps: bool) -> tuple[Tensor, Tensor, Tensor]:
    # The kernel's logsumexp is fp32, or fp64 for fp64 inputs.
    dtype = _score_dtype(query_BHTE.dtype)
    batch, heads, length, _ = query_BHTE.shape
    lse_BHT = query_BHTE.new_empty(batch, length, heads, dtype=dtype).transpose(1, 2)
    return _empty_like_heads_last(query_BHTE), lse_BHT, _empty_probabilities(query_BHTE, keeps)


def _save_for_backward(ctx, inputs, output):
    query_BHTE, key_BGTE, value_BGTE, cu_seq_lens, ctx.scale, _ = inputs
    ctx.save_for_backward(query_BHTE, key_BGTE, value_BGTE, *output, cu_seq_lens)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out_BHTE, *_):
    gradients = torch.ops.groundwork.blockwise_attention_backward(grad_out_BHTE, *ctx.saved_tensors, ctx.scale)
    return *gradients, None, None, None


_blockwise_attention.register_autograd(_backward, setup_context=_save_for_backward)
