"""Stand-ins for the FlashAttention packages, implemented in torch for any device."""

import contextlib
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, **_
) -> Tensor:
    """Computes attention for (B, T, H, E) tensors. The queries are aligned with the last keys."""
    queries, keys = q.shape[1], k.shape[1]
    position = torch.arange(keys, device=q.device)
    distance = position[keys - queries :, None] - position[None, :]
    return _attend(q, k, v, _seen(distance, causal, window_size), softmax_scale, softcap)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, **_,
) -> Tensor:  # fmt: skip
    """Computes attention within packed segments, (N, H, E)."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and isinstance(max_seqlen_q, int)
    position = torch.arange(q.shape[0], device=q.device)
    segment = torch.searchsorted(cu_seqlens_q, position.to(torch.int32), right=True)
    seen = _seen(position[:, None] - position[None, :], causal, window_size) & (segment[:, None] == segment[None, :])
    return _attend(q[None], k[None], v[None], seen, softmax_scale, softcap)[0]


def _seen(distance: Tensor, causal: bool, window_size: tuple[int, int]) -> Tensor:
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window_size[0] < 0 else seen & (distance <= window_size[0])


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None, softcap: float) -> Tensor:
    assert q.dtype == k.dtype == v.dtype and q.shape[-1] == k.shape[-1] == v.shape[-1]
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * (scores / softcap).tanh() if softcap else scores
    return F.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1).matmul(v).transpose(1, 2)


def _rounded(function):
    """Wraps a function so that it returns the input dtype, like the kernels."""

    def rounded(q, *arguments, **settings):
        assert settings["causal"], "attention must be causal"
        assert q.shape[-1] % 8 == 0, "head_size must be a multiple of 8"
        return function(q, *arguments, **settings).to(q.dtype)

    return rounded


def _without_dropout(function):
    def without(*arguments, **settings):
        assert "dropout_p" not in settings
        return function(*arguments, **settings)

    return without


@contextlib.contextmanager
def flash_packages() -> Iterator[None]:
    """Makes flash_attn and flash_attn_interface importable. The latter doesn't support dropout."""
    packages = {}
    for name, changed in (("flash_attn", lambda function: function), ("flash_attn_interface", _without_dropout)):
        packages[name] = ModuleType(name)
        packages[name].__spec__ = ModuleSpec(name, loader=None)  # find_spec needs it
        for function in (flash_attn_func, flash_attn_varlen_func):
            setattr(packages[name], function.__name__, changed(_rounded(function)))
    # mock.patch.dict would also remove torch modules imported in this context, which can't be imported twice.
    sys.modules.update(packages)
    try:
        yield
    finally:
        for name in packages:
            del sys.modules[name]
