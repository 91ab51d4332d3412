"""Measures the memory of the tensors of a step at its peak."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from pretrain.config import RunConfig
from pretrain.parallel.strategy import Strategy
from pretrain_tools.planning.real_steps import FIRST_STEPS, Steps


class PeakBytes:
    """The peak of the tensors alive in a process, counted from before the first one is made.

    On a GPU torch's allocator counts. On a CPU the profiler reports every allocation, and those of the marked time
    are added to all before it: resident memory would count the interpreter and what malloc keeps.
    """

    def __init__(self, device_type: str):
        self.is_cuda = device_type == "cuda"
        self.bytes = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Stands around everything that makes tensors."""
        if self.is_cuda:
            yield
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler talks on stderr
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            yield
        # The profiler's public tables sum allocations per operator; only its raw events have the time of each.
        events = profiler.profiler.kineto_results.events()
        begin, end = next((e.start_ns(), e.end_ns()) for e in events if e.name() == "peak_bytes")
        # Allocations before the mark count too: weights and optimizer states live through the step.
        live = 0.0
        for when, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
            live += size
            if begin <= when <= end:
                self.bytes = max(self.bytes, live)

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Stands around the step whose peak counts. Garbage in cycles is collected first, as train.py does."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            yield
            self.bytes = float(torch.cuda.max_memory_allocated())
            return
        with torch.profiler.record_function("peak_bytes"):
            yield


def measure_peak(config: RunConfig, strategy: Strategy, micro_steps: int) -> float:
    """Measures the bytes of tensors at the peak of a step, after FIRST_STEPS others."""
    peak = PeakBytes(strategy.device.type)
    with peak.counting():
        run = Steps(config, strategy)
        for number in range(FIRST_STEPS + 1):
            with peak.marked() if number == FIRST_STEPS else nullcontext():
                run.step(number, micro_steps)
            # The average's buffers are made at the first update of a run, and are there at the peak.
            if number == 0 and config.averaging.kind != "none":
                strategy.update_average(1.0)
    return peak.bytes
