"""Fake CUDA for machines without a GPU: tensors have a shape, dtype and device but no values.

The cases of a test file run in a separate process, because the library that enables autograd on fake CUDA replaces
torch's hooks for the rest of the process:

    outcomes = outcomes_of("support.steps_on_fake_cuda")    # {case: its Outcome}

A case module defines CASES, {name: function}. Each function returns a JSON value; an exception becomes the outcome's
`error`. A case can create fake tensors:

    with fake_cuda() as fake:
        torch.empty(2, device="cuda")                       # a fake tensor
        fake.from_tensor(host_tensor)                       # a fake tensor with the same shape

As on a GPU, operations on tensors from different devices fail. Unlike on a GPU, synchronization between host and
device also fails (see `Waits`), and so do operators that would fail with `deterministic: true`.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

SOURCE = Path(__file__).with_suffix(".cpp")
SUPPORT = "__SUPPORT__"


@dataclass(frozen=True)
class Outcome:
    """Result or error of a case."""

    result: Any = None
    error: str | None = None
    seconds: float = 0.0


@functools.cache
def outcomes_of(module: str) -> dict[str, Outcome]:
    """Runs a module's CASES on fake CUDA. Skips the test if fake CUDA can't be used on this machine."""
    timeout = 4 * 3600.0 if "all" in (os.environ.get("CUDA"), os.environ.get("STRATEGIES")) else 600.0
    import pytest
    import torch

    from support.project import run_script

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU; run the tests marked gpu instead")
    if not (compiler := shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("fake CUDA needs a C++ compiler")
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        arguments = (__file__, module, results, _library(compiler))
        run = run_script(*arguments, check=False, timeout=timeout, CUDA_VISIBLE_DEVICES="")
        lines = results.read_text().splitlines() if results.exists() else []
    outcomes = {line.pop("name"): Outcome(**line) for line in map(json.loads, lines)}
    if refused := outcomes.pop(SUPPORT, None):
        pytest.skip(f"fake CUDA does not work with torch {torch.__version__}: {refused.error}")
    if run.returncode:
        pytest.fail(f"{module} exited with {run.returncode} after {list(outcomes)[-1:]}\n{run.stderr[-4000:]}")
    return outcomes


def _library(compiler: str) -> Path:
    """Compiles SOURCE for the installed torch and caches the library."""
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths

    read = SOURCE.read_bytes() + f"{torch.__version__} {torch.__file__} {compiler} {os.getuid()}".encode()
    library = Path(tempfile.gettempdir()) / f"fake_cuda_{hashlib.sha256(read).hexdigest()[:16]}.so"
    if not library.exists():
        unfinished = library.with_suffix(f".{os.getpid()}")
        includes = [f"-I{folder}" for folder in include_paths()]
        places = [flag for folder in library_paths() for flag in (f"-L{folder}", f"-Wl,-rpath,{folder}")]
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        command = [compiler, "-O1", "-std=c++20", "-fPIC", "-shared", abi, str(SOURCE), "-o", str(unfinished)]
        subprocess.run(
            [*command, *includes, f"-I{sysconfig.get_path('include')}", *places, "-lc10", "-ltorch_cpu"], check=True
        )
        unfinished.replace(library)
    return library


@contextlib.contextmanager
def fake_cuda(devices: int = 1, *, may_wait: bool = False) -> Iterator[Any]:
    """Enables fake tensors and a fake torch.cuda with compute capability 9.0. Yields the FakeTensorMode.

    Args:
        devices: number of GPUs.
        may_wait: allow synchronizing copies between host and device. Values still can't be read.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch_cuda_with(devices))
        stack.enter_context(mock.patch.multiple(torch.Tensor, pin_memory=pin_memory, is_pinned=is_pinned))
        for name in ("tensor", "as_tensor"):  # these bypass the modes below
            stack.enter_context(mock.patch.object(torch, name, _by_way_of_the_host(getattr(torch, name))))
        device_kernels = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        device_kernels.impl("empty_strided", _refuse_host_data, "CUDA")
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        if not may_wait:
            stack.enter_context(refuse_waits())
        yield mode


def _by_way_of_the_host(make):
    def made(data, *, dtype=None, device=None, **settings):
        tensor = make(data, dtype=dtype, **settings)
        if device is None:
            return tensor
        tensor.constant = None  # torch would use this known value in computations
        return tensor.to(device)

    return made


def _refuse_host_data(*_, **__):
    """Replaces CUDA's empty_strided. Raises Waits in a `refuse_waits` context.

    x[[0, 1]], new_tensor and torch.asarray convert Python data in C++, where the modes don't see the blocking copy to
    the device. That copy is all that gets here: other operations use fake tensors.
    """
    _wait("copy of Python data to the device")
    raise NotImplementedError("fake CUDA only copies Python data in torch.tensor and torch.as_tensor")


_PINNED = set()
"""Weak references to the storages of pinned tensors. They keep the storages' IDs from being reused."""


def _storage(tensor) -> Any:
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


def pinned(tensor):
    """Marks a tensor on the host, and all tensors with the same storage, as pinned. Returns the tensor."""
    _PINNED.add(_storage(tensor))
    return tensor


def is_pinned(tensor, device=None) -> bool:
    """Replaces Tensor.is_pinned."""
    return tensor.device.type == "cpu" and _storage(tensor) in _PINNED


def pin_memory(tensor, device=None):
    """Replaces Tensor.pin_memory, which needs a GPU."""
    return tensor if is_pinned(tensor) else pinned(tensor.clone())


class Waits(Exception):
    """Error raised when the host waits for the device, which leaves the device idle.

    Raised for reading a value (item(), bool(), tolist()), shapes that depend on values (nonzero, reading or writing
    with a mask, repeat_interleave, bincount), copies between host and device without non_blocking or without pinned
    memory, indexing with a list or an index on the host, writing a number to positions given by an index, new_tensor,
    synchronization with the device or a stream, empty_cache, and synchronization with an event that was followed by
    fewer than LEAD kernels.
    """


LEAD = 50
"""Minimum number of kernels issued after an event, so that waiting for it doesn't leave the device idle."""


class NotDeterministic(Exception):
    """Error raised for operators without a deterministic kernel."""


class _Issued:
    """Counters shared by the modes in `refuse_waits`."""

    modes = 0
    """Number of active modes."""
    kernels = 0


@functools.cache
def _mode_that_refuses_waits() -> type:
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    from support.nondeterministic import raises

    aten = torch.ops.aten
    reads = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.nonzero.default}
    reads |= {
        aten.masked_select.default,
        aten._unique2.default,
        aten.unique_consecutive.default,
        aten.unique_dim.default,
    }
    reads |= {aten.masked_scatter.default, aten.masked_scatter_.default, aten.bincount.default}
    by_index = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
    by_index |= {aten._unsafe_index.Tensor, aten._unsafe_index_put.default}
    copies = {aten._to_copy.default: "non_blocking", aten.copy_.default: "non_blocking"}

    def reason_to_wait(indices, value=None, accumulate=False) -> str | None:
        """Returns why indexing waits, or None. `value` is the tensor to write, or None for reading.

        The rules are from torch 2.13's TensorAdvancedIndexingUtils.h and IndexingUtils.h, and _index_put_impl_.
        """
        indices = [index for index in indices if index is not None]
        masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
        is_number = value is not None and value.device.type == "cpu" and value.numel() == 1
        if is_number and not accumulate and len(indices) == len(masks) == 1 and masks[0].device.type == "cuda":
            return None  # torch uses masked_fill_, but only if the value is on the host
        if masks:
            return "with a mask reads the number of true elements"
        if any(index.device.type == "cpu" for index in indices):
            return "copies the index to the device"  # this blocks even if the index is pinned
        return "copies the value to the device" if is_number else None

    class RefusesWaits(TorchDispatchMode):
        @classmethod
        def is_infra_mode(cls) -> bool:
            return True  # otherwise compiled code would run uncompiled

        def __enter__(self):
            _Issued.modes += 1
            return super().__enter__()

        def __exit__(self, *exception):
            _Issued.modes -= 1
            return super().__exit__(*exception)

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if DTensor in types:
                return NotImplemented  # torch calls this again with the local tensors
            kwargs = kwargs or {}
            device = args[0].device.type if args and isinstance(args[0], torch.Tensor) else None
            _Issued.kernels += device == "cuda"
            if device == "cuda" and raises(func, args, kwargs):
                raise NotDeterministic(f"{func} has no deterministic kernel")
            if func in reads and device == "cuda":
                raise Waits(f"{func} reads a value from the device")
            if func is aten.repeat_interleave.Tensor and device == "cuda" and kwargs.get("output_size") is None:
                raise Waits(f"{func} without output_size reads the output's size")
            if func in by_index and device == "cuda" and (reason := reason_to_wait(*args[1:4])):
                raise Waits(f"{func} {reason}")
            if func in copies:
                is_write = func is aten.copy_.default
                other = args[1].device if is_write else kwargs.get("device") or args[0].device
                blocks = not (kwargs.get("non_blocking") or (is_write and len(args) > 2 and args[2]))
                if {device, torch.device(other).type} == {"cpu", "cuda"}:
                    if blocks:
                        raise Waits(f"{func} between host and device without non_blocking")
                    if device == "cuda" and not is_write:
                        return pinned(func(*args, **kwargs))  # torch allocates pinned memory for the copy
                    if not any(map(is_pinned, args[:2] if is_write else args[:1])):
                        raise Waits(f"{func} between the device and host memory that is not pinned")
            return func(*args, **kwargs)

    return RefusesWaits


def refuse_waits():
    """Returns a context manager that raises `Waits` if the host waits for the device."""
    return _mode_that_refuses_waits()()


@contextlib.contextmanager
def torch_cuda_with(devices: int) -> Iterator[None]:
    """Patches torch.cuda to report this number of H100s."""
    import torch

    properties = {"name": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "total_memory": 80 << 30}
    properties |= {"multi_processor_count": 132, "max_threads_per_multi_processor": 2048, "warp_size": 32}
    properties |= {"regs_per_multiprocessor": 65536, "shared_memory_per_block": 48 << 10, "gcnArchName": ""}
    properties |= {
        "shared_memory_per_block_optin": 227 << 10,
        "L2_cache_size": 50 << 20,
        "max_threads_per_block": 1024,
    }
    replaced = {
        "Stream": _Stream,
        "Event": _Event,
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "current_stream": _Stream.now,
        "default_stream": _Stream.now,
        "device_count": lambda: devices,
        "get_device_capability": _capability,
        "get_device_name": lambda *_: properties["name"],
        "get_device_properties": lambda *_: type("Properties", (), properties),
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "is_initialized": lambda: True,
        "set_device": lambda *_: None,
        "stream": _in_stream,
        "synchronize": lambda *_: _wait("torch.cuda.synchronize"),
        "empty_cache": lambda: _wait("torch.cuda.empty_cache"),
    }
    with mock.patch.multiple(torch.cuda, **replaced):
        yield


def _capability(*_) -> tuple[int, int]:
    """Replaces torch.cuda.get_device_capability. Always the same function, because compiled graphs may call it."""
    return 9, 0


def _wait(function: str) -> None:
    """Raises Waits in a `refuse_waits` context."""
    if _Issued.modes:
        raise Waits(function)


class _Inert:
    """Stand-in for a stream or event whose methods do nothing."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


class _Stream(_Inert):
    """Named stream that works with torch.cuda.stream."""

    current: ClassVar[list[str]] = ["compute"]

    def __init__(self, *_, **__):
        self.name = f"stream {id(self)}"

    @classmethod
    def now(cls, *_) -> "_Stream":
        stream = cls()
        stream.name = cls.current[-1]
        return stream

    def synchronize(self) -> None:
        _wait("Stream.synchronize")


@contextlib.contextmanager
def _in_stream(stream: _Stream | None) -> Iterator[None]:
    _Stream.current.append(_Stream.current[-1] if stream is None else stream.name)
    try:
        yield
    finally:
        _Stream.current.pop()


class _Event(_Inert):
    recorded = None

    def record(self, *_) -> None:
        self.recorded = _Issued.kernels

    def synchronize(self) -> None:
        if self.recorded is None or _Issued.kernels - self.recorded < LEAD:
            _wait("Event.synchronize while the device has no other work")


def _support() -> str | None:
    """Returns the error if autograd doesn't work on fake CUDA tensors, else None."""
    import torch

    try:
        with fake_cuda():
            weight = torch.empty(2, 2, device="cuda", requires_grad=True)
            (weight @ weight).sum().backward()
            assert weight.grad.device.type == "cuda"
    except Exception as error:
        if torch.version.cuda is None:
            raise
        return f"{type(error).__name__}: {error}"


def _where(error: Exception) -> str:
    """Formats an error and its traceback without torch's frames."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
    lines = [f"  {f.filename.rpartition('site-packages/')[2]}:{f.lineno} {f.line}" for f in frames[-6:]]
    cause = [_where(error.__cause__)] if error.__cause__ else []
    return "\n".join([f"{type(error).__name__}: {str(error)[:2000]}", *lines, *cause])


def _main(module: str, results: str, library: str) -> None:
    import torch

    ctypes.CDLL(library).take_over()
    torch.set_num_threads(1)

    with open(results, "w", buffering=1) as out:
        if problem := _support():
            out.write(json.dumps({"name": SUPPORT, "error": problem}) + "\n")
            return
        for name, case in importlib.import_module(module).CASES.items():
            began, outcome = time.perf_counter(), {}
            try:
                outcome["result"] = case()
            except Exception as error:
                outcome["error"] = _where(error)
            out.write(json.dumps({"name": name, "seconds": time.perf_counter() - began, **outcome}) + "\n")


if __name__ == "__main__":
    here = Path(__file__).parents[1]
    sys.path[:1] = [str(here), str(here.parent)]
    sys.modules["support.fake_cuda"] = sys.modules["__main__"]
    _main(*sys.argv[1:])
