"""Runs a few steps of a recipe like train.py, without the rest of a run, and measures their peak memory."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from pretrain.config import RunConfig
from pretrain.data.vocabulary import planned_model_config
from pretrain.errors import InputError
from pretrain.hardware import DTYPES
from pretrain.model.attention import choose_attention, model_inputs
from pretrain.model.build import build_meta_model
from pretrain.model.routers import router_losses
from pretrain.parallel.strategy import Strategy
from pretrain.training.build import build_training
from pretrain.training.prefetch import ReadAhead
from pretrain.training.run_plan import ModelPlan, RunPlan, derive, plan_model

TOKENS_PER_DOCUMENT = 600
"""Mean length of documents in the random text that replaces missing shards."""
LEARNING_RATE = 1e-4
FIRST_STEPS = 2
"""Steps that compile, and create the optimizer's state."""


class Steps:
    """train.py's steps without the rest: a model, its optimizer and its batches under the launched strategy.

    Raises InputError like the start of a run.
    """

    def __init__(self, config: RunConfig, strategy: Strategy):
        self.config = config
        self.strategy = strategy
        self.plan = self._plan()
        self.read_ahead = ReadAhead(strategy)
        built = build_training(config, self.plan, strategy, learning_rate=LEARNING_RATE)
        self.model = built.model
        self.model.train()

    def _plan(self) -> ModelPlan:
        """Plans the run, or only the model if the data is missing."""
        config = self.config
        strategy = self.strategy
        try:
            return derive(config, strategy.data_ranks * strategy.micro_batches_per_call)
        except InputError:
            model_config = planned_model_config(config.model, config.data)
            choose_attention(
                config.attention,
                device_type=strategy.device.type,
                dtype=DTYPES[strategy.precision],
                window=config.data.window,
            )
            losses_of_routers = router_losses(config.loss, build_meta_model(model_config))
            return plan_model(config, model_config, losses_of_routers)

    def _read(self, step: int, micro_step: int) -> dict[str, Any]:
        """Reads or generates the model's arguments."""
        config = self.config
        if isinstance(self.plan, RunPlan):
            return self.read_ahead.micro_batch(self.plan, step, micro_step % self.plan.micro_steps(step))
        generator = np.random.default_rng((step, micro_step))
        rows = config.batch.sequences_per_micro_batch * self.strategy.micro_batches_per_call
        shape = (rows, config.data.sequence_length + 1)
        # 0 ends a document, so no other position may have it.
        ids = generator.integers(1, self.plan.model_config.vocab_size, shape).astype(np.uint32)
        ids[generator.random(shape) < 1 / TOKENS_PER_DOCUMENT] = 0
        return model_inputs(
            ids,
            config.data.window,
            end_of_document_id=0,
            device=self.strategy.device,
            attention=self.plan.attention,
        )

    def step(self, number: int, micro_steps: int) -> None:
        """Runs one optimizer step to its end on the device."""
        self.strategy.begin_step(LEARNING_RATE, micro_steps)
        for micro_step in range(micro_steps):
            batch = self._read(number, micro_step)
            with self.strategy.accumulate(is_last=micro_step == micro_steps - 1):
                loss, _ = self.model(**batch)
                self.strategy.backward(loss / micro_steps)
            # A reference to the last loss would keep its graph alive during the update, and add to the peak.
            del loss, batch, _
        self.strategy.update(self.config.optim.max_grad_norm)
        if self.strategy.device.type == "cuda":
            torch.cuda.synchronize()


class PeakBytes:
    """Peak of a process's live tensors, counted from the first one.

    On a GPU, torch's allocator counts. On a CPU, the profiler reports every allocation, because resident memory would
    include the interpreter and malloc's free memory.
    """

    def __init__(self, device_type: str):
        self.is_cuda = device_type == "cuda"
        self.bytes = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Wraps all code that creates tensors."""
        if self.is_cuda:
            yield
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler logs to stderr
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            yield
        # The profiler's public tables sum allocations per operator; only its raw events have the time of each.
        events = profiler.profiler.kineto_results.events()
        begin, end = next((e.start_ns(), e.end_ns()) for e in events if e.name() == "peak_bytes")
        # Allocations before the mark count too, because weights and optimizer states live through the step.
        live = 0.0
        for when, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
            live += size
            if begin <= when <= end:
                self.bytes = max(self.bytes, live)

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Wraps the measured step. Collects cyclic garbage first, like train.py."""
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
            # The average's buffers exist from a run's first update on, also at the peak.
            if number == 0 and config.averaging.kind != "none":
                strategy.update_average(1.0)
    return peak.bytes
