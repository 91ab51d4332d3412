"""Reads this rank's micro-batches one step ahead, in a thread, while the model computes.

As a result, a slow disk doesn't delay the step. With data.dispatch_batches, the first rank reads ahead for all ranks.
"""

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from pretrain.model.attention import HostBatch, host_batch
from pretrain.parallel.strategy import Strategy
from pretrain.training.run_plan import RunPlan

QUICK_READ_SECONDS = 1e-3
"""Reading ahead pauses if each of the last READS_JUDGED reads took less time than this.

On a busy CPU, waking another thread costs ten times as much as such a read.
"""
READS_JUDGED = 64


class ReadAhead:
    """Reads micro-batches in training order, and reads the next step's in advance."""

    def __init__(self, strategy: Strategy):
        self.strategy = strategy
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read_ahead")
        self._step: tuple[RunPlan, int, list[HostBatch]] | None = None
        self._next_step: tuple[RunPlan, int, Future[list[HostBatch]]] | None = None
        self.last_seconds: deque[float] = deque(maxlen=READS_JUDGED)
        """Durations of the last reads of a micro-batch, in seconds, in the main thread or the read-ahead thread."""

    def micro_batch(self, plan: RunPlan, step: int, micro_step: int) -> dict[str, Any]:
        """Returns the model's arguments for one call, on this rank's device. A step's first call starts reading the
        next step.

        Raises InputError if shards were damaged since the start.
        """
        # `is`, because a run that rolled back or that ends earlier has a different plan with different samples.
        if self._step is None or self._step[0] is not plan or self._step[1] != step:
            self._step = (plan, step, self._batches_of(plan, step))
            self._begin_next(plan, step + 1)
        return self._step[2][micro_step].on_device(self.strategy.device, plan.attention)

    def _batches_of(self, plan: RunPlan, step: int) -> list[HostBatch]:
        begun = self._next_step
        self._next_step = None
        if begun is not None:
            wait([begun[2]])  # another plan may share its `Batches`, which only one thread may read
            if begun[0] is plan and begun[1] == step:
                return begun[2].result()
        return self._read(plan, step) if self.strategy.dispatcher is None else self._request(plan, step).result()

    def _begin_next(self, plan: RunPlan, step: int) -> None:
        if step >= plan.total_steps:
            return
        if self.strategy.dispatcher is not None:
            # Always, so that only the loop decides about requests, and all ranks take part in the same exchanges.
            self._next_step = (plan, step, self._request(plan, step))
        elif max(self.last_seconds) > QUICK_READ_SECONDS:
            self._next_step = (plan, step, self._thread.submit(self._read, plan, step))

    def _request(self, plan: RunPlan, step: int) -> Future[list[HostBatch]]:
        """Requests this rank's part of a step from the first rank. All ranks must request the same steps."""
        micro_steps = range(plan.micro_steps(step))
        return self.strategy.dispatcher.take(
            step,
            lambda data_rank: np.stack([self._ids(plan, step, number, data_rank) for number in micro_steps]),
            lambda ids: [self._host_batch(plan, step, part) for part in ids],
        )

    def _read(self, plan: RunPlan, step: int) -> list[HostBatch]:
        batches = []
        for micro_step in range(plan.micro_steps(step)):
            start = time.perf_counter()
            ids = self._ids(plan, step, micro_step, self.strategy.data_rank)
            batches.append(self._host_batch(plan, step, ids))
            self.last_seconds.append(time.perf_counter() - start)
        return batches

    def _ids(self, plan: RunPlan, step: int, micro_step: int, data_rank: int) -> np.ndarray:
        rows = self._rows(plan, step)
        return plan.batches.read(step, micro_step, data_rank, ranks=self.strategy.data_ranks, sequences=rows)

    def _host_batch(self, plan: RunPlan, step: int, ids: np.ndarray) -> HostBatch:
        end = plan.batches.end_of_document_id
        return host_batch(ids, plan.stage(step).window, end_of_document_id=end, device=self.strategy.device)

    def _rows(self, plan: RunPlan, step: int) -> int:
        """Returns the number of sequences per call of the model."""
        return plan.stage(step).sequences_per_micro_batch * self.strategy.micro_batches_per_call
