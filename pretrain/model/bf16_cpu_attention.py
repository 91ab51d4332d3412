"""Causal attention within segments in bf16, on CPUs with AVX-512 BF16 or AMX.

The kernel is in bf16_cpu_attention.cpp. The first use on a machine compiles it, which takes two seconds, and stores
it in ~/.cache/groundwork.

Shapes: B windows, T positions, H query heads, G key heads, E head dimension, S segments.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.errors import one_line
from pretrain.hardware import ONEDNN_VARIABLES, missing_bf16

SOURCE = Path(__file__).with_suffix(".cpp")
OPTIONS = "-O3 -std=c++17 -shared -fPIC -fopenmp -mfma -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16"
AMX_OPTIONS = "-mamx-tile -mamx-bf16 -DUSE_AMX"
CPUINFO = Path("/proc/cpuinfo")
TOLERANCE = 2e-2
"""Maximum difference from torch's attention in fp32, relative to the norm. bf16 has 8 bits."""


class _View(ctypes.Structure):
    """A (B, H or G, T, E) tensor's address and its strides in elements. The last stride is 1."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("window", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("position", ctypes.c_int64),
    )


class _Sizes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("windows", "heads", "groups", "tokens", "width"))


def cxx_compiler() -> str:
    """Returns the command of the C++ compiler that torch.compile and this module use."""
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


@torch.compiler.assume_constant_result
def is_available() -> bool:
    """Returns True if the kernel works on this machine. The first call may compile it."""
    return why_not() is None


@functools.cache
def why_not() -> str | None:
    """Explains why the kernel doesn't work on this machine, or returns None. The first call may compile it."""
    if problem := why_unsupported():
        return problem
    try:
        _library()
        # Saved-tensor hooks, autocast, inference mode and fake tensors of the caller don't apply to other threads.
        with ThreadPoolExecutor(1) as thread:
            difference = thread.submit(_difference_from_torch).result()
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().split("\n")[0] or f"exit code {error.returncode}"
        return f"{error.cmd[0]} fails: {said}"
    except (OSError, RuntimeError, ValueError) as error:  # for example no home folder, or an unreadable CXX
        return one_line(error)
    return None if difference <= TOLERANCE else f"its results differ from torch's attention by {difference:.2g}"


def why_unsupported() -> str | None:
    """Explains why the kernel isn't written for this CPU, or returns None."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return "it needs Linux on x86-64"
    # The oldest supported torch has no public function for a CPU's instructions.
    return missing_bf16("cpu") or (None if torch.cpu._is_avx512_bf16_supported() else "this CPU has no AVX-512 BF16")


@functools.cache
def _library() -> ctypes.CDLL:
    """Loads the compiled kernel. Compiles it if necessary. Raises OSError or CalledProcessError."""
    command = [*shlex.split(cxx_compiler()), *OPTIONS.split()]
    if has_amx():
        try:
            return _load([*command, *AMX_OPTIONS.split()])
        except subprocess.CalledProcessError:  # by an old compiler or assembler
            pass
    return _load(command)


def has_amx() -> bool:
    """Returns True if this CPU multiplies bf16 matrices with AMX, and Linux and oneDNN's variables allow it."""
    limit = next(filter(None, map(os.environ.get, ONEDNN_VARIABLES)), "ALL").upper()
    is_allowed = "AMX" in limit or "AVX10" in limit or limit in ("ALL", "DEFAULT")
    # torch's own check ignores bf16. _init_amx asks Linux, and torch has no public function for this.
    return is_allowed and "amx_bf16" in CPUINFO.read_text().split() and torch.cpu._init_amx()


def _load(command: list[str]) -> ctypes.CDLL:
    """Loads the library that this command compiles, and stores it in a folder for later runs."""
    key = hashlib.sha256(repr(command).encode() + SOURCE.read_bytes()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "groundwork" / "kernels"
    compiled = cache / f"{SOURCE.stem}_{key}.so"
    try:
        return ctypes.CDLL(str(compiled))
    except OSError:
        pass  # missing, or damaged by a crash
    try:
        cache.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=cache)
    except OSError:  # not writable, as in some containers
        folder = tempfile.TemporaryDirectory()
    with folder:
        output = Path(folder.name, compiled.name)
        subprocess.run([*command, str(SOURCE), "-o", str(output)], check=True, capture_output=True, text=True)
        library = ctypes.CDLL(str(output))
        with contextlib.suppress(OSError):
            output.replace(compiled)  # atomic, because other ranks may compile it at the same time
    return library


def _difference_from_torch() -> float:
    """Returns the largest relative difference between the operator and torch's attention in fp32, with gradients.

    Two windows, the first of which has two segments, and grouped heads.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, 80, 40) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, generator=generator).bfloat16().float().requires_grad_() for shape in shapes]
    out_gradient = torch.randn(shapes[0], generator=generator).bfloat16().float()
    cu_seq_lens = torch.tensor([0, 48, 80, 160], dtype=torch.int32)
    causal_TT = torch.ones(80, 80).tril()
    apart_TT = causal_TT * torch.block_diag(torch.ones(48, 48), torch.ones(32, 32))
    mask = torch.stack([apart_TT, causal_TT])[:, None].bool()
    with torch.enable_grad():
        own = attend(*(x.bfloat16() for x in inputs), cu_seq_lens, 0.2)
        wanted = F.scaled_dot_product_attention(*inputs, mask, scale=0.2, enable_gqa=True)
        found = [own.float(), *torch.autograd.grad(own, inputs, out_gradient.bfloat16())]
        expected = [wanted, *torch.autograd.grad(wanted, inputs, out_gradient)]
    differences = [(a - b).norm() / b.norm() for a, b in zip(found, expected, strict=True)]
    return torch.stack(differences).max().item()  # unlike Python's max, NaN if any of them is


def attend(query_BHTE: Tensor, key_BGTE: Tensor, value_BGTE: Tensor, cu_seq_lens: Tensor, scale: float) -> Tensor:
    """Computes causal attention (B, H, T, E) within the segments in cu_seq_lens (S + 1,), in bf16."""
    return torch.ops.groundwork.bf16_cpu_attention(query_BHTE, key_BGTE, value_BGTE, cu_seq_lens, scale)[0]


def _arguments(tensors: list[Tensor], query: int, cu_seq_lens: Tensor, scale: float, lse_BHT: Tensor) -> tuple:
    """Returns the kernel's arguments. `query` is the query's place in `tensors`, and the key comes next."""
    batch, heads, length, width = tensors[query].shape
    sizes = _Sizes(batch, heads, tensors[query + 1].shape[1], length, width)
    views = (_View * len(tensors))(*(_View(x.data_ptr(), *x.stride()[:3]) for x in tensors))
    addresses = [ctypes.c_void_p(x.data_ptr()) for x in (lse_BHT, cu_seq_lens)]
    counts = [ctypes.c_int64(n) for n in (len(cu_seq_lens), torch.get_num_threads())]
    return ctypes.byref(sizes), views, *addresses, *counts, ctypes.c_float(scale)


def rows_contiguous(x: Tensor) -> Tensor:
    """Copies the tensor if its last dimension isn't contiguous, like the gradient of a sum."""
    return x if x.stride(-1) == 1 else x.contiguous()


# Inductor caches compiled code by the operator's name. If the outputs' shapes change, so must the name.
@torch.library.custom_op("groundwork::bf16_cpu_attention", mutates_args=(), device_types="cpu")
def _attention(
    query_BHTE: Tensor, key_BGTE: Tensor, value_BGTE: Tensor, cu_seq_lens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns (output (B, H, T, E), logsumexp (B, H, T) in units of log 2). Raises ValueError for other shapes."""
    batch, heads, length, width = query_BHTE.shape
    key_shape = (batch, key_BGTE.shape[1], length, width)
    dtypes = {query_BHTE.dtype, key_BGTE.dtype, value_BGTE.dtype}
    if {key_BGTE.shape, value_BGTE.shape} != {key_shape} or heads % key_shape[1] or dtypes != {torch.bfloat16}:
        shapes = ", ".join(f"{x.dtype} {[*x.shape]}" for x in (query_BHTE, key_BGTE, value_BGTE))
        raise ValueError(f"the kernel needs bf16 keys and values with the same shape as the queries, not {shapes}")
    out_BHTE, lse_BHT = _empty_outputs(query_BHTE)
    tensors = [*map(rows_contiguous, (query_BHTE, key_BGTE, value_BGTE)), out_BHTE]
    cu_seq_lens = cu_seq_lens.int().contiguous()
    _library().forward(*_arguments(tensors, 0, cu_seq_lens, scale, lse_BHT))
    return out_BHTE, lse_BHT


@torch.library.custom_op("groundwork::bf16_cpu_attention_backward", mutates_args=(), device_types="cpu")
def _attention_backward(
    grad_out_BHTE: Tensor,
    query_BHTE: Tensor,
    key_BGTE: Tensor,
    value_BGTE: Tensor,
    out_BHTE: Tensor,
    lse_BHT: Tensor,
    cu_seq_lens: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value."""
    heads, groups = query_BHTE.shape[1], key_BGTE.shape[1]
    tensors = [*map(rows_contiguous, (grad_out_BHTE, query_BHTE, key_BGTE, value_BGTE, out_BHTE))]
    grad_query_BHTE = empty_heads_last(query_BHTE)
    # With grouped heads, the kernel returns a gradient per query head in fp32.
    dtype = query_BHTE.dtype if heads == groups else torch.float32
    grads_BHTE = [empty_heads_last(query_BHTE, dtype) for _ in range(2)]
    tensors += [grad_query_BHTE, *grads_BHTE]
    cu_seq_lens = cu_seq_lens.int().contiguous()
    _library().backward(*_arguments(tensors, 1, cu_seq_lens, scale, lse_BHT))
    if heads == groups:
        return grad_query_BHTE, *grads_BHTE
    grads_BGTE = [empty_heads_last(x) for x in (key_BGTE, value_BGTE)]
    for grad_BGTE, grad_BHTE in zip(grads_BGTE, grads_BHTE, strict=True):
        grad_BGTE.copy_(grad_BHTE.unflatten(1, (groups, -1)).sum(dim=2))
    return grad_query_BHTE, *grads_BGTE


@_attention.register_fake
def _(query_BHTE, key_BGTE, value_BGTE, cu_seq_lens, scale):
    return _empty_outputs(query_BHTE)


def empty_gradients(grad_out_BHTE: Tensor, *inputs: Tensor | float) -> tuple[Tensor, ...]:
    """Allocates the gradients of query, key and value, the first three inputs. Used to trace backward operators."""
    return tuple(map(empty_heads_last, inputs[:3]))


_attention_backward.register_fake(empty_gradients)


def empty_heads_last(x_BHTE: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocates (B, H, T, E) with the memory layout (B, T, H, E), which avoids copies in the projections."""
    batch, heads, length, width = x_BHTE.shape
    return x_BHTE.new_empty(batch, length, heads, width, dtype=dtype).transpose(1, 2)


def _empty_outputs(query_BHTE: Tensor) -> tuple[Tensor, Tensor]:
    return empty_heads_last(query_BHTE), query_BHTE.new_empty(query_BHTE.shape[:3], dtype=torch.float32)


def _save_for_backward(ctx, inputs, output):
    *tensors, cu_seq_lens, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output, cu_seq_lens)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out_BHTE, _):
    gradients = torch.ops.groundwork.bf16_cpu_attention_backward(grad_out_BHTE, *ctx.saved_tensors, ctx.scale)
    return *gradients, None, None


_attention.register_autograd(_backward, setup_context=_save_for_backward)
