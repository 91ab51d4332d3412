"""Tests for counting lines that wait for the GPU, and for restoring torch afterwards."""

import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch

from pretrain_tools.profiling import sync_lines
from pretrain_tools.profiling.recording import compilations_since
from pretrain_tools.profiling.sync_lines import SyncLines

PLACE = f"tests/profiling/{__file__.rpartition('/')[2]}"


def line_of(text):
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, start=1) if line.rstrip().endswith(f"# {text}"))


WARNING = "called a synchronizing CUDA operation (Triggered internally at ...)"


def test_lines_are_counted_only_in_the_forward_and_backward_pass(monkeypatch):
    modes, phase = [], "forward"
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    shown = warnings.showwarning
    lines = SyncLines(lambda: phase, on_device=True)
    lines.begin()
    for _ in range(3):
        warnings.warn(WARNING, stacklevel=1)  # first
        phase = "backward"
        warnings.warn(WARNING, stacklevel=1)  # second
        phase = "between"
        warnings.warn(WARNING, stacklevel=1)
        phase = "forward"
    with ThreadPoolExecutor() as executor:
        executor.submit(lambda: warnings.warn(WARNING, stacklevel=1)).result()
    lines.end()
    found = {(row["place"], row["phase"]): row["count"] for row in lines.found()}
    assert found == {
        (f"{PLACE}:{line_of('first')}", "forward"): 3,
        (f"{PLACE}:{line_of('second')}", "backward"): 3,
    }
    assert modes == ["warn", 0] and warnings.showwarning is shown
    lines.forget()
    assert lines.found() == []


def test_places_are_short():
    assert sync_lines.short_path(sync_lines.__file__) == "pretrain_tools/profiling/sync_lines.py"
    assert sync_lines.short_path(torch.__file__) == "torch/__init__.py"


def test_recompilations_are_reported_with_their_reason():
    import time

    began = time.time()
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    double(torch.ones(2))
    between = time.time()
    double(torch.ones(3))
    assert "torch._dynamo" in sys.modules
    assert len(compilations_since(began)) == 2
    (again,) = compilations_since(between)
    assert PLACE in again["place"] and "size mismatch at index 0" in again["reason"] and again["seconds"] > 0
