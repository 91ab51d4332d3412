"""Reads this rank's micro-batches, the next one in a thread while the model computes.

A slow disk then does not delay the step. With data.dispatch_batches the first rank reads for all, a step ahead.
"""

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from pretrain.model.attention import HostBatch, host_batch
from pretrain.parallel.strategy import Strategy
from pretrain.training.run_plan import RunPlan

QUICK_READ_SECONDS = 1e-3
"""Prefetching pauses while none of the last READS_JUDGED reads took longer: on a CPU whose cores are all busy, waking
another thread costs a step ten times as much as such a read."""
READS_JUDGED = 64


class ReadAhead:
    """Source of micro-batches, in any order; those in the order of training are prefetched if reading is slow."""

    def __init__(self, strategy: Strategy):
        self.strategy = strategy
        # A single thread for all reads: the state that a run's `Batches` keeps between reads then needs no lock.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read_ahead")
        self._begun: tuple[RunPlan, int, int, Future[HostBatch]] | None = None
        self._step: tuple[RunPlan, int, list[HostBatch]] | None = None
        self._next_step: tuple[RunPlan, int, Future[list[HostBatch]]] | None = None
        self.last_seconds: deque[float] = deque(maxlen=READS_JUDGED)
        """Duration of the last reads, in whichever thread."""

    def micro_batch(self, run: RunPlan, step: int, micro_step: int) -> dict[str, Any]:
        """Returns the model's arguments for one call on this rank, on its device; starts reading the next micro-batch.

        Raises InputError for shards that have been damaged since the start.
        """
        if self.strategy.dispatcher is None:
            batch = self._prefetched(run, step, micro_step)
        else:
            batch = self._dispatched(run, step)[micro_step]
        return batch.on_device(self.strategy.device, run.attention)

    def _prefetched(self, run: RunPlan, step: int, micro_step: int) -> HostBatch:
        begun = self._begun
        self._begun = None
        # `is`: a run that rolled back, or that ends earlier, has a different plan, whose steps have other samples.
        if begun is not None and begun[0] is run and begun[1:3] == (step, micro_step):
            batch = begun[3].result()
        else:
            batch = self._read(run, step, micro_step)
        following = (step, micro_step + 1) if micro_step + 1 < run.micro_steps(step) else (step + 1, 0)
        if following[0] < run.total_steps and max(self.last_seconds) > QUICK_READ_SECONDS:
            self._begun = (run, *following, self._thread.submit(self._read, run, *following))
        return batch

    def _dispatched(self, run: RunPlan, step: int) -> list[HostBatch]:
        """Returns the micro-batches of a step, which the first rank reads for all while the previous step computes.

        The loop alone decides which steps are requested, and when, so all ranks take part in the same exchanges.
        """
        if self._step is None or self._step[0] is not run or self._step[1] != step:
            begun = self._next_step
            if begun is None or begun[0] is not run or begun[1] != step:
                begun = (run, step, self._request(run, step))
            self._step = (run, step, begun[2].result())
            following = step + 1 < run.total_steps
            self._next_step = (run, step + 1, self._request(run, step + 1)) if following else None
        return self._step[2]

    def _request(self, run: RunPlan, step: int) -> Future[list[HostBatch]]:
        """Requests this rank's part of a step from the first rank; all ranks request the same steps."""
        micro_steps = range(run.micro_steps(step))
        return self.strategy.dispatcher.take(
            step,
            lambda data_rank: np.stack([self._ids(run, step, number, data_rank) for number in micro_steps]),
            lambda ids: [self._host_batch(run, step, part) for part in ids],
        )

    def _read(self, run: RunPlan, step: int, micro_step: int) -> HostBatch:
        start = time.perf_counter()
        batch = self._host_batch(run, step, self._ids(run, step, micro_step, self.strategy.data_rank))
        self.last_seconds.append(time.perf_counter() - start)
        return batch

    def _ids(self, run: RunPlan, step: int, micro_step: int, data_rank: int) -> np.ndarray:
        rows = self._rows(run, step)
        return run.batches.read(step, micro_step, data_rank, ranks=self.strategy.data_ranks, sequences=rows)

    def _host_batch(self, run: RunPlan, step: int, ids: np.ndarray) -> HostBatch:
        end = run.batches.end_of_document_id
        return host_batch(ids, run.stage(step).window, end_of_document_id=end, device=self.strategy.device)

    def _rows(self, run: RunPlan, step: int) -> int:
        """Returns the number of sequences in one call of the model."""
        return run.stage(step).sequences_per_micro_batch * self.strategy.micro_batches_per_call
