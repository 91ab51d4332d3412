"""Runs a few steps of a recipe as train.py does, but without the rest of a run, and measures their peak memory."""

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
"""Mean document length in the random data that replaces missing shards."""
LEARNING_RATE = 1e-4
FIRST_STEPS = 2
"""Number of initial steps, which compile and create the optimizer state."""


class Steps:
    """train.py's steps without the rest of a run: a model, its optimizer and its batches with the launched strategy.

    Raises the same InputErrors as the start of a run.
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
            model_config = planned_model_config(config)
            choose_attention(
                config.attention,
                device_type=strategy.device.type,
                dtype=DTYPES[strategy.precision],
                window=config.data.window,
            )
            losses_of_routers = router_losses(config.loss, build_meta_model(model_config))
            return plan_model(config, model_config, losses_of_routers)

    def _read(self, step: int, micro_step: int) -> dict[str, Any]:
        """Returns the model's inputs for a micro-step, which are random if the data is missing."""
        config = self.config
        if isinstance(self.plan, RunPlan):
            return self.read_ahead.micro_batch(self.plan, step, micro_step % self.plan.micro_steps(step))
        generator = np.random.default_rng((step, micro_step))
        rows = config.batch.sequences_per_micro_batch * self.strategy.micro_batches_per_call
        shape = (rows, config.data.sequence_length + 1)
        # 0 ends a document, so it must not occur anywhere else.
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
        """Runs one optimizer step and waits for the device to finish it."""
        self.strategy.begin_step(LEARNING_RATE, micro_steps)
        for micro_step in range(micro_steps):
            batch = self._read(number, micro_step)
            with self.strategy.accumulate(is_last=micro_step == micro_steps - 1):
                loss, _ = self.model(**batch)
                self.strategy.backward(loss / micro_steps)
            # A reference to the last loss would keep its graph in memory during the update and increase the peak.
            del loss, batch, _
        self.strategy.update(self.config.optim.max_grad_norm)
        if self.strategy.device.type == "cuda":
            torch.cuda.synchronize()


class PeakBytes:
    """Peak size of a process's live tensors.

    On a GPU, torch's allocator reports it. On a CPU, the profiler reports every allocation, because resident memory
    would include the interpreter and malloc's free memory.
    """

    def __init__(self, device_type: str):
        self.is_cuda = device_type == "cuda"
        self.bytes = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Wraps all code that creates tensors, including code before the measured step."""
        if self.is_cuda:
            yield
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler logs to stderr
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            yield
        # The profiler's public tables sum allocations per operator. Only its raw events have timestamps.
        events = profiler.profiler.kineto_results.events()
        begin, end = next((e.start_ns(), e.end_ns()) for e in events if e.name() == "peak_bytes")
        # Earlier allocations also count, because weights and optimizer state stay in memory during the step.
        live = 0.0
        for when, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
            live += size
            if begin <= when <= end:
                self.bytes = max(self.bytes, live)

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Wraps the measured step. Collects cyclic garbage first, as train.py does."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            yield
            self.bytes = float(torch.cuda.max_memory_allocated())
            return
        with torch.profiler.record_function("peak_bytes"):
            yield


def measure_peak(config: RunConfig, strategy: Strategy, micro_steps: int) -> float:
    """Measures the peak bytes of live tensors in a step, after FIRST_STEPS other steps."""
    peak = PeakBytes(strategy.device.type)
    with peak.counting():
        run = Steps(config, strategy)
        for number in range(FIRST_STEPS + 1):
            with peak.marked() if number == FIRST_STEPS else nullcontext():
                run.step(number, micro_steps)
            # In a run, the average's buffers exist from the first update on, so they count toward the peak.
            if number == 0 and config.averaging.kind != "none":
                strategy.update_average(1.0)
    return peak.bytes
