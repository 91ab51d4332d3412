"""Tests for counting lines that read a tensor's value, and for restoring torch afterwards."""

import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch

from pretrain_tools.profiling import sync_lines
from pretrain_tools.profiling.recording import compilations_since
from pretrain_tools.profiling.sync_lines import METHODS, SyncLines

PLACE = f"tests/profiling/{__file__.rpartition('/')[2]}"


def line_of(text):
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, start=1) if line.rstrip().endswith(f"# {text}"))


def test_lines_are_counted_only_in_the_forward_and_backward_pass():
    phase, tensor = "forward", torch.ones(3)
    before = {name: getattr(torch.Tensor, name) for name in METHODS}
    lines = SyncLines(lambda: phase, "cpu")
    lines.begin()
    for _ in range(3):
        if tensor.sum() > 0:  # first
            phase = "backward"
            tensor.max().item()  # second
            phase = "between"
            tensor.tolist()
            phase = "forward"
    with ThreadPoolExecutor() as beside:
        beside.submit(tensor.tolist).result()
    lines.end()
    tensor.tolist()
    found = {(row["place"], row["call"], row["phase"]): row["count"] for row in lines.found()}
    assert found == {
        (f"{PLACE}:{line_of('first')}", "bool()", "forward"): 3,
        (f"{PLACE}:{line_of('second')}", ".item()", "backward"): 3,
    }
    assert {name: getattr(torch.Tensor, name) for name in METHODS} == before
    assert not {"item", "tolist"} & vars(torch.Tensor).keys()
    lines.forget()
    assert lines.found() == []


def test_on_a_gpu_only_torchs_warnings_count(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    shown = warnings.showwarning
    lines = SyncLines(lambda: "forward", "cuda")
    lines.begin()
    torch.ones(3).sum().item()
    for _ in range(2):
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1)  # masked
    lines.end()
    (row,) = lines.found()
    assert (row["place"], row["count"]) == (f"{PLACE}:{line_of('masked')}", 2)
    assert modes == ["warn", 0] and warnings.showwarning is shown


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
