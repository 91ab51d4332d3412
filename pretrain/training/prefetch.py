"""Reads the next micro-batch in a thread while the model computes, so that a slow disk does not delay the step."""

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pretrain.model.inputs import HostBatch
from pretrain.parallel.strategy import Strategy
from pretrain.training.run_plan import RunPlan

QUICK_READ_SECONDS, READS_JUDGED = 1e-3, 64
"""If none of the last READS_JUDGED took longer, they stay in the main thread: on a CPU whose cores all compute, waking
another costs a step ten times what such a read takes."""


class ReadAhead:
    """The micro-batches of this process, in any order; those asked for in the order of training are prefetched where
    reading is slow."""

    def __init__(self, strategy: Strategy):
        self.strategy = strategy
        # One thread reads them all: what a run's `Batches` remembers between reads needs no lock then.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read_ahead")
        self._begun: tuple[RunPlan, int, int, Future[HostBatch]] | None = None
        self._step: tuple[RunPlan, int, list[HostBatch]] | None = None
        self._next_step: tuple[RunPlan, int, Future[list[HostBatch]]] | None = None
        self.last_seconds: deque[float] = deque(maxlen=READS_JUDGED)
        """How long the last reads took, whoever waited for them."""

    def micro_batch(self, run: RunPlan, step: int, micro_step: int) -> dict[str, Any]:
        """The model's arguments for one call of this process, on its device; begins to read what comes after.

        Raises InputError for shards that have been damaged since the start.
        """
        if self.strategy.dispatcher is not None:
            return self._dispatched(run, step)[micro_step].on_device(self.strategy.device, run.attention)
        begun, self._begun = self._begun, None
        # A run that went back, or that ends earlier, is a different one: its steps have other samples.
        prefetched = begun is not None and begun[0] is run and begun[1:3] == (step, micro_step)
        batch = begun[3].result() if prefetched else self._read(run, step, micro_step)
        following = (step, micro_step + 1) if micro_step + 1 < run.micro_steps(step) else (step + 1, 0)
        if following[0] < run.total_steps and max(self.last_seconds) > QUICK_READ_SECONDS:
            self._begun = (run, *following, self._thread.submit(self._read, run, *following))
        return batch.on_device(self.strategy.device, run.attention)

    def _dispatched(self, run: RunPlan, step: int) -> list[HostBatch]:
        """Of a step that the first process reads for all, while they compute the one before it.

        Which steps are asked for, and when, follows from the loop alone: all ranks take part in the same exchanges.
        """
        if self._step is None or self._step[0] is not run or self._step[1] != step:
            begun = self._next_step
            if begun is None or begun[0] is not run or begun[1] != step:
                begun = (run, step, run.dispatched_step(step, self.strategy))
            self._step = (run, step, begun[2].result())
            following = step + 1 < run.total_steps
            self._next_step = (run, step + 1, run.dispatched_step(step + 1, self.strategy)) if following else None
        return self._step[2]

    def _read(self, run: RunPlan, step: int, micro_step: int) -> HostBatch:
        start = time.perf_counter()
        batch = run.micro_batch(step, micro_step, self.strategy)
        self.last_seconds.append(time.perf_counter() - start)
        return batch
