"""Prefetches the next step's micro-batches in a background thread.

With data.dispatch_batches, the first rank prefetches for all ranks.
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
"""Prefetching is off while each of the last READS_JUDGED reads took less time than this.

On a busy CPU, waking the thread takes ten times as long as such a read.
"""
READS_JUDGED = 64


class ReadAhead:
    """Reads micro-batches, and prefetches those of the next step."""

    def __init__(self, strategy: Strategy):
        self.strategy = strategy
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read_ahead")
        self._step: tuple[RunPlan, int, list[HostBatch]] | None = None
        self._next_step: tuple[RunPlan, int, Future[list[HostBatch]]] | None = None
        self.last_seconds: deque[float] = deque(maxlen=READS_JUDGED)
        """Duration of the last reads, in seconds per micro-batch."""

    def micro_batch(self, plan: RunPlan, step: int, micro_step: int) -> dict[str, Any]:
        """Returns the arguments for a forward pass, on the device. A step's first call starts prefetching the next.

        Raises InputError if a shard is damaged.
        """
        # Compared by identity, because a rollback or an earlier end creates a new plan with different samples.
        if self._step is None or self._step[0] is not plan or self._step[1] != step:
            self._step = (plan, step, self._batches_of(plan, step))
            self._begin_next(plan, step + 1)
        return self._step[2][micro_step].on_device(self.strategy.device, plan.attention)

    def _batches_of(self, plan: RunPlan, step: int) -> list[HostBatch]:
        begun = self._next_step
        self._next_step = None
        if begun is not None:
            wait([begun[2]])  # another plan may share the same `Batches`, which isn't thread-safe
            if begun[0] is plan and begun[1] == step:
                return begun[2].result()
        return self._read(plan, step) if self.strategy.dispatcher is None else self._request(plan, step).result()

    def _begin_next(self, plan: RunPlan, step: int) -> None:
        if step >= plan.total_steps:
            return
        if self.strategy.dispatcher is not None:
            # Regardless of read times, so that all ranks take part in the same exchanges.
            self._next_step = (plan, step, self._request(plan, step))
        elif max(self.last_seconds) > QUICK_READ_SECONDS:
            self._next_step = (plan, step, self._thread.submit(self._read, plan, step))

    def _request(self, plan: RunPlan, step: int) -> Future[list[HostBatch]]:
        """Requests this rank's batches for a step from the first rank. All ranks must request the same steps."""
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
        rows = plan.stage(step).sequences_per_micro_batch * self.strategy.micro_batches_per_call
        return plan.batches.read(step, micro_step, data_rank, ranks=self.strategy.data_ranks, sequences=rows)

    def _host_batch(self, plan: RunPlan, step: int, ids: np.ndarray) -> HostBatch:
        end = plan.batches.end_of_document_id
        return host_batch(ids, plan.stage(step).window, end_of_document_id=end, device=self.strategy.device)
