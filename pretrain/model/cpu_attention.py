"""Causal attention within segments on a CPU.

Short windows in compiled code use plain matmuls, with all other operations fused. Other windows use a custom operator.

The operator computes medium-length segments in blocks of queries and saves the probabilities for the backward pass. On
two cores without AMX, this takes about half as long as torch's flash kernel, whose backward pass is slow in half
precision. Long segments use the flash kernel, because the probabilities' memory is quadratic in the length. Short
segments also use it, because call overhead would dominate.

Shapes: B windows, T positions, H query heads, G key heads, E head dimension, N = rows x heads in one block.
"""

import functools
import itertools

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
SCORES_BYTES = 7 * 2**20
"""Bytes of fp32 scores per block of queries, over all windows computed together.

Larger blocks would not fit into the caches, and smaller ones would need more calls.
"""
HALF_PADDING = 32
"""Segments in half precision are padded to a multiple of this many tokens.

oneDNN compiles a kernel for every matmul shape, which takes longer than a small matmul itself. Padding bounds the
number of shapes. fp32 matmuls don't need it, because MKL's kernels work for every shape.
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
    keeps = torch.is_grad_enabled() and any(x.requires_grad for x in (query_BHTE, key_BGTE, value_BGTE))
    return torch.ops.groundwork.packed_attention(query_BHTE, key_BGTE, value_BGTE, cu_seq_lens, scale, keeps)[0]


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


def query_blocks(cu_seq_lens: Tensor, query_BHTE: Tensor) -> list[tuple[slice, slice, bool]]:
    """Returns (rows, positions, True to use blocks of queries) for each attention call, in order."""
    _, heads, length, _ = query_BHTE.shape
    parts = []
    for rows, positions in segments_of(cu_seq_lens, length):
        tokens = positions.stop - positions.start
        if not in_blocks(query_BHTE.dtype, rows.stop - rows.start, tokens):
            parts.append((rows, positions, False))
            continue
        together = max(1, SCORES_BYTES // (4 * heads * min(BLOCK_QUERIES, tokens) * tokens))
        for row in range(rows.start, rows.stop, together):
            parts.append((slice(row, min(row + together, rows.stop)), positions, True))
    return parts


def _flash_dtype(dtype: torch.dtype, positions: slice) -> torch.dtype:
    """Returns the dtype for the flash kernel. Unless the segment is long, fp32 is faster than half precision."""
    is_long = positions.stop - positions.start > LONGEST_IN_BLOCKS
    return dtype if is_long or dtype not in HALF_DTYPES else torch.float32


def _padded(dtype: torch.dtype, tokens: int) -> int:
    """Returns a segment's length after padding for blocks of queries."""
    return -(-tokens // HALF_PADDING) * HALF_PADDING if dtype in HALF_DTYPES else tokens


def _block_bounds(tokens: int) -> list[tuple[int, int]]:
    """Returns (first, last + 1) for the queries in each block."""
    return [(begin, min(begin + BLOCK_QUERIES, tokens)) for begin in range(0, tokens, BLOCK_QUERIES)]


@functools.lru_cache
def _probabilities_per_token(dtype: torch.dtype, longest: int) -> int:
    """Returns the largest number of probabilities per head and token, for segments of up to `longest` tokens."""
    shortest = min(HALF_SHORTEST_IN_BLOCKS if dtype in HALF_DTYPES else FP32_SHORTEST_IN_BLOCKS, longest)
    return max(
        -(-sum((end - begin) * end for begin, end in _block_bounds(_padded(dtype, tokens))) // tokens)
        for tokens in range(shortest, longest + 1)
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
    longest = min(length, LONGEST_IN_BLOCKS)
    if not keeps or not in_blocks(query_BHTE.dtype, batch, longest):
        return query_BHTE.new_empty(0)
    return query_BHTE.new_empty(batch * heads * length * _probabilities_per_token(query_BHTE.dtype, longest))


def _heads_together(x_RHTE: Tensor, heads: int, tokens: int | None = None) -> Tensor:
    """Copies some rows of (B, H or G, T, E) into (N, T, E), and repeats key heads for their query heads.

    tokens: if greater than T, the result is padded with zeros to this length.
    """
    rows, groups, length, width = x_RHTE.shape
    if tokens is not None and tokens > length:
        padded_NTE = x_RHTE.new_zeros(rows * heads, tokens, width)
        padded_NTE.view(rows, groups, heads // groups, tokens, width)[..., :length, :] = x_RHTE[:, :, None]
        return padded_NTE
    if groups == heads:
        return x_RHTE.clone(memory_format=torch.contiguous_format).flatten(0, 1)
    return x_RHTE.repeat_interleave(heads // groups, dim=1).flatten(0, 1)


@functools.lru_cache(maxsize=8)
def _future_mask(queries: int, dtype: torch.dtype) -> Tensor:
    """Returns an additive causal mask (Q, Q) for a block's last keys, seven times as fast as masked_fill."""
    return torch.full((queries, queries), -torch.inf, dtype=dtype, device="cpu").triu(1)


def _forward_in_blocks(
    out_RHTE, query_RHTE, key_RGTE, value_RGTE, scale: float, probabilities: _Probabilities | None
) -> None:
    """Computes attention for some rows and writes it to out_RHTE."""
    rows, heads, length, _ = query_RHTE.shape
    score_dtype = _score_dtype(query_RHTE.dtype)
    tokens = _padded(query_RHTE.dtype, length)
    query_NTE = _heads_together(query_RHTE, heads, tokens).to(score_dtype) * scale
    key_NET = _heads_together(key_RGTE, heads, tokens).to(score_dtype).transpose(1, 2)
    value_NTE = _heads_together(value_RGTE, heads, tokens)
    future_QQ = _future_mask(min(BLOCK_QUERIES, tokens), score_dtype)
    for begin, end in _block_bounds(tokens):
        scores_NQK = torch.bmm(query_NTE[:, begin:end], key_NET[:, :, :end])
        scores_NQK[:, :, begin:] += future_QQ[: end - begin, : end - begin]
        softmax_NQK = torch.softmax(scores_NQK, dim=-1, out=scores_NQK)
        if probabilities is None:
            softmax_NQK = softmax_NQK.to(value_NTE.dtype)
        else:
            softmax_NQK = probabilities.next(*scores_NQK.shape).copy_(softmax_NQK)
        block_RHQE = torch.bmm(softmax_NQK, value_NTE[:, :end]).unflatten(0, (rows, heads))
        out_RHTE[:, :, begin:end] = block_RHQE[:, :, : length - begin]


def _backward_in_blocks(
    gradients, grad_out_RHTE, query_RHTE, key_RGTE, value_RGTE, scale: float, probabilities: _Probabilities
) -> None:
    """Computes the gradients of query, key and value and writes them to `gradients`."""
    rows, heads, length, _ = query_RHTE.shape
    dtype = query_RHTE.dtype
    sum_dtype = _score_dtype(query_RHTE.dtype)
    tokens = _padded(dtype, length)
    key_NTE = _heads_together(key_RGTE, heads, tokens)
    value_NET = _heads_together(value_RGTE, heads, tokens).transpose(1, 2)
    blocks = _block_bounds(tokens)
    softmaxes_NQK = [probabilities.next(rows * heads, end - begin, end) for begin, end in blocks]
    for begin, end in reversed(blocks):  # the last block covers all keys, so it comes first and creates the sums
        # Each tensor is used twice, and bmm would copy a strided slice each time.
        query_NQE = _heads_together(query_RHTE[:, :, begin:end], heads, end - begin).mul_(scale)
        grad_out_NQE = _heads_together(grad_out_RHTE[:, :, begin:end], heads, end - begin)
        softmax_NQK = softmaxes_NQK.pop()
        grad_NQK = torch.bmm(grad_out_NQE, value_NET[:, :, :end])
        # Only this private function computes the gradient of softmax in place.
        torch._softmax_backward_data(grad_NQK, softmax_NQK, -1, dtype, grad_input=grad_NQK)
        grad_query_NQE = torch.bmm(grad_NQK, key_NTE[:, :end]).mul_(scale)
        gradients[0][:, :, begin:end] = grad_query_NQE.unflatten(0, (rows, heads))[:, :, : length - begin]
        grad_value_NKE = torch.bmm(softmax_NQK.transpose(1, 2), grad_out_NQE)
        grad_key_NKE = torch.bmm(grad_NQK.transpose(1, 2), query_NQE)
        if end == tokens:
            grad_value_NTE = grad_value_NKE.to(sum_dtype)
            grad_key_NTE = grad_key_NKE.to(sum_dtype)
        else:
            grad_value_NTE[:, :end] += grad_value_NKE
            grad_key_NTE[:, :end] += grad_key_NKE
    groups = key_RGTE.shape[1]
    for gradient, sum_NTE in zip(gradients[1:], (grad_key_NTE, grad_value_NTE), strict=True):
        sum_RHTE = sum_NTE[:, :length].unflatten(0, (rows, heads))
        gradient.copy_(sum_RHTE if groups == heads else sum_RHTE.unflatten(1, (groups, heads // groups)).sum(dim=2))


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
        dtype = _flash_dtype(query_BHTE.dtype, positions)
        # torch's public function doesn't return the logsumexp, which our backward pass needs.
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.to(dtype) for x in inputs), 0.0, True, scale=scale
        )
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
    grad_out_BHTE = grad_out_BHTE.contiguous() if grad_out_BHTE.stride(-1) != 1 else grad_out_BHTE
    inputs = (query_BHTE, key_BGTE, value_BGTE)
    gradients = tuple(_empty_like_heads_last(x) for x in inputs)
    probabilities = _Probabilities(kept)
    for rows, positions, is_in_blocks in query_blocks(cu_seq_lens, query_BHTE):
        arguments = [x[rows, :, positions] for x in (grad_out_BHTE, *inputs)]
        views = [x[rows, :, positions] for x in gradients]
        if is_in_blocks:
            _backward_in_blocks(views, *arguments, scale, probabilities)
            continue
        dtype = _flash_dtype(query_BHTE.dtype, positions)
        arguments = (x.to(dtype) for x in (*arguments, out_BHTE[rows, :, positions]))
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *arguments, lse_BHT[rows, :, positions], 0.0, True, scale=scale
        )
        for view, part in zip(views, parts, strict=True):
            view.copy_(part)
    return gradients


@_packed_attention.register_fake
def _(query_BHTE, key_BGTE, value_BGTE, cu_seq_lens, scale, keeps):
    return _empty_outputs(query_BHTE, keeps)


@_packed_attention_backward.register_fake
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
    gradients = torch.ops.groundwork.packed_attention_backward(grad_out_BHTE, *ctx.saved_tensors, ctx.scale)
    return *gradients, None, None, None


_packed_attention.register_autograd(_backward, setup_context=_save_for_backward)
