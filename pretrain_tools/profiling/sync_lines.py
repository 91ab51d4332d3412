"""Finds lines of code that wait for the device: `.item()`, `if tensor:`, `.tolist()`, `.cpu()`, boolean masks.

Each such line drains the GPU's queue, so the GPU idles until the CPU has launched more kernels. To find these lines,
the module wraps tensor methods and, on a GPU, intercepts torch's synchronization warnings. The profiler's stack traces
would slow down every call.
"""

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from pretrain.files import PACKAGES
from pretrain_tools.profiling.trace_events import BACKWARD, FORWARD, UPDATE, WAITING_FOR_DATA

METHODS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
"""Tensor methods that copy values to Python."""
SPELLED = {"__bool__": "bool()", "__int__": "int()", "__float__": "float()", "__index__": "an index"}
PASSED_OVER = (str(Path(torch.__file__).parent), __file__, warnings.__file__)
"""Files and folders whose stack frames are skipped to find the responsible line."""
READS_OF_THE_HOST = tuple(
    str(PACKAGES / "pretrain" / name) for name in ("model/cpu_attention", "parallel/pipeline_stages")
)
"""Code that reads CPU tensors even in GPU runs. It isn't counted."""
PHASES = (WAITING_FOR_DATA, FORWARD, BACKWARD, UPDATE)
# Threads started by C++ code, such as autograd's, have this private class.
OF_THE_PASSES = type(threading.main_thread()), threading._DummyThread
"""Classes of the main thread and autograd's threads. Other threads write checkpoints or prefetch data."""
WARNING = "called a synchronizing CUDA operation"


class SyncLines:
    """Counts how often each line waits for the device between `begin` and `end`.

    Args:
        phase: returns the current phase of the step. Waits between steps aren't counted.
        device_type: 'cuda' or 'cpu'.
    """

    def __init__(self, phase: Callable[[], str], device_type: str):
        self._phase = phase
        self._device_type = device_type
        self._counts = Counter()
        self._undo = ExitStack()
        self._is_inside = False

    def begin(self) -> None:
        for name in METHODS:
            self._replace(name)
        if self._device_type == "cuda":
            self._undo.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("always", message=WARNING)
            shown = warnings.showwarning
            warnings.showwarning = self._warned
            self._undo.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            torch.cuda.set_sync_debug_mode("warn")
            self._shown = shown

    def end(self) -> None:
        """Restores the tensor methods and torch's warnings."""
        self._undo.close()

    def forget(self) -> None:
        """Clears the counts."""
        self._counts.clear()

    def found(self) -> list[dict[str, Any]]:
        """Returns a list of {place ('file:line'), call, phase, count}, most frequent first."""
        return [
            {"place": place, "call": call, "phase": phase, "count": count}
            for (place, call, phase), count in self._counts.most_common()
        ]

    def _replace(self, name: str) -> None:
        method = getattr(torch.Tensor, name)
        # Restore inherited methods by deletion. Setting them would shadow the parent's permanently.
        if own := vars(torch.Tensor).get(name):
            self._undo.callback(setattr, torch.Tensor, name, own)
        else:
            self._undo.callback(delattr, torch.Tensor, name)
        called = SPELLED.get(name, f".{name}()")

        def counted_method(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            was = self._is_inside
            self._is_inside = True
            try:
                if not was and tensor.device.type == self._device_type:  # a CPU tensor needs no wait
                    self._count(called)
                return method(tensor, *arguments, **named)
            finally:
                self._is_inside = was

        # Dynamo must not trace the wrapper.
        compiles = "torch._dynamo" in sys.modules
        setattr(torch.Tensor, name, torch.compiler.disable(counted_method) if compiles else counted_method)

    def _warned(self, message: Any, *about: Any, **named: Any) -> None:
        if WARNING not in str(message):
            self._shown(message, *about, **named)
        elif not self._is_inside:
            self._count("an operation that waits for the device")

    def _count(self, called: str) -> None:
        # Don't count waits between steps or in other threads.
        if self._phase() not in PHASES or not isinstance(threading.current_thread(), OF_THE_PASSES):
            return
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(PASSED_OVER):
            frame = frame.f_back
        if frame is not None and not frame.f_code.co_filename.startswith(READS_OF_THE_HOST):
            self._counts[f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}", called, self._phase()] += 1


def short_path(path: str) -> str:
    """Makes a path relative to the project's root, or to site-packages for libraries."""
    inside = Path(path)
    if inside.is_relative_to(PACKAGES) and ".venv" not in inside.parts:
        return str(inside.relative_to(PACKAGES))
    _, packages, rest = path.rpartition("site-packages/")
    return rest if packages else path
