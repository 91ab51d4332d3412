"""Finds lines of code that wait for the GPU: `.item()`, `if tensor:`, `.tolist()`, `.cpu()`, boolean masks.

Each such line drains the GPU's queue, so the GPU idles until the CPU has launched more kernels. To find these lines,
the module intercepts torch's synchronization warnings. The profiler's stack traces would slow down every call.
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

# In Python 3.14, the functions of warnings are in another file.
PASSED_OVER = (str(Path(torch.__file__).parent), __file__, warnings.formatwarning.__code__.co_filename)
"""Files and folders whose stack frames are skipped to find the responsible line."""
PHASES = (WAITING_FOR_DATA, FORWARD, BACKWARD, UPDATE)
# Threads started by C++ code, such as autograd's, have this private class.
OF_THE_PASSES = type(threading.main_thread()), threading._DummyThread
"""Classes of the main thread and autograd's threads. Other threads write checkpoints or prefetch data."""
WARNING = "called a synchronizing CUDA operation"


class SyncLines:
    """Counts how often each line waits for the GPU between `begin` and `end`.

    Args:
        phase: returns the current phase of the step. Waits between steps aren't counted.
        on_device: True for a run on a GPU. Otherwise, torch doesn't warn.
    """

    def __init__(self, phase: Callable[[], str], on_device: bool):
        self._phase = phase
        self._on_device = on_device
        self._counts = Counter()
        self._undo = ExitStack()

    def begin(self) -> None:
        self._undo.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("always", message=WARNING)
        self._shown = warnings.showwarning
        warnings.showwarning = self._warned
        if self._on_device:
            self._undo.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            torch.cuda.set_sync_debug_mode("warn")

    def end(self) -> None:
        """Restores torch's warnings."""
        self._undo.close()

    def forget(self) -> None:
        """Clears the counts."""
        self._counts.clear()

    def found(self) -> list[dict[str, Any]]:
        """Returns a list of {place ('file:line'), phase, count}, most frequent first."""
        return [
            {"place": place, "phase": phase, "count": count} for (place, phase), count in self._counts.most_common()
        ]

    def _warned(self, message: Any, *about: Any, **named: Any) -> None:
        if WARNING not in str(message):
            return self._shown(message, *about, **named)
        # Don't count waits between steps or in other threads.
        if self._phase() not in PHASES or not isinstance(threading.current_thread(), OF_THE_PASSES):
            return None
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(PASSED_OVER):
            frame = frame.f_back
        if frame is not None:
            self._counts[f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}", self._phase()] += 1


def short_path(path: str) -> str:
    """Makes a path relative to the project's root, or to site-packages for libraries."""
    inside = Path(path)
    if inside.is_relative_to(PACKAGES) and ".venv" not in inside.parts:
        return str(inside.relative_to(PACKAGES))
    _, packages, rest = path.rpartition("site-packages/")
    return rest if packages else path
