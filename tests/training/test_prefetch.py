"""The next micro-batch must be prefetched correctly and only once; read errors must be raised when it is needed."""

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pretrain.config import WindowSpec
from pretrain.errors import InputError
from pretrain.model.attention import IGNORED, host_batch, model_inputs
from pretrain.training import prefetch
from pretrain.training.prefetch import ReadAhead

CPU = torch.device("cpu")
WAIT_SECONDS = 120


@dataclass
class Run:
    """Run with 3 steps of 2 micro-steps. Token IDs identify the step and micro-step."""

    name: int = 0
    total_steps: int = 3
    attention: str = "groundwork_sdpa"
    end_of_document_id: int = 0
    dtype: type = np.uint16
    damaged: tuple[int, int] | None = None
    reads: list[tuple[int, int]] = field(default_factory=list)
    is_read: threading.Event = field(default_factory=threading.Event)

    @property
    def batches(self):
        return self

    def micro_steps(self, step):
        return 2

    def stage(self, step):
        return SimpleNamespace(window=WindowSpec(8, False), sequences_per_micro_batch=1)

    def read(self, step, micro_step, rank, *, ranks, sequences):
        assert (rank, ranks, sequences) == (1, 4, 2)
        self.reads.append((step, micro_step))
        if (step, micro_step) == self.damaged:
            raise InputError("the shards are damaged")
        if len(self.reads) == 4:
            self.is_read.set()
        return np.full((2, 9), 100 * self.name + 10 * step + micro_step, np.uint16)


@pytest.fixture(autouse=True)
def every_read_is_slow(monkeypatch):
    monkeypatch.setattr(prefetch, "QUICK_READ_SECONDS", 0.0)


def reader(dispatcher=None):
    of_ranks = {"data_rank": 1, "data_ranks": 4, "micro_batches_per_call": 2}
    return ReadAhead(SimpleNamespace(device=CPU, dispatcher=dispatcher, **of_ranks))


def token(batch):
    return batch["input_ids_BT"].unique().item()


def test_every_batch_is_read_once_in_training_order():
    run, ahead = Run(), reader()
    places = [(step, micro_step) for step in range(3) for micro_step in range(2)]
    assert [token(ahead.micro_batch(run, *place)) for place in places] == [10 * s + m for s, m in places]
    assert run.reads == places


def test_the_next_step_is_read_before_it_is_requested():
    run, ahead = Run(), reader()
    ahead.micro_batch(run, 0, 0)
    assert run.is_read.wait(WAIT_SECONDS) and run.reads == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_quick_reads_stay_in_the_training_thread(monkeypatch):
    monkeypatch.setattr(prefetch, "QUICK_READ_SECONDS", float("inf"))
    run, ahead = Run(), reader()
    ahead.micro_batch(run, 0, 0)
    ahead._thread.shutdown()  # starting another read in the thread would fail
    assert token(ahead.micro_batch(run, 1, 1)) == 11 and run.reads == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_after_a_rollback_the_new_runs_batch_is_returned():
    first, second, ahead = Run(), Run(name=1), reader()
    ahead.micro_batch(first, 0, 0)
    assert token(ahead.micro_batch(second, 0, 1)) == 101
    assert token(ahead.micro_batch(second, 0, 0)) == 100, "any other micro-batch can be read, too"


def test_a_read_error_is_raised_in_the_step_that_needs_the_batch():
    run, ahead = Run(damaged=(1, 1)), reader()
    assert [token(ahead.micro_batch(run, 0, number)) for number in range(2)] == [0, 1]
    with pytest.raises(InputError, match="damaged"):
        ahead.micro_batch(run, 1, 0)


class FirstProcess:
    """Dispatcher that immediately reads for all processes."""

    def __init__(self):
        self.steps = []

    def take(self, step, read, then):
        self.steps.append(step)
        future = Future()
        future.set_result(then(read(1)))
        return future


def test_dispatched_steps_are_requested_once_and_one_step_ahead(monkeypatch):
    monkeypatch.setattr(prefetch, "QUICK_READ_SECONDS", float("inf"))
    run, other, first = Run(), Run(name=1), FirstProcess()
    ahead = reader(first)
    assert [token(ahead.micro_batch(run, 0, number)) for number in range(2)] == [0, 1] and first.steps == [0, 1]
    assert [token(ahead.micro_batch(run, 1, number)) for number in range(2)] == [10, 11]
    assert token(ahead.micro_batch(other, 1, 0)) == 110, "after a rollback, the data is different"
    assert token(ahead.micro_batch(other, 2, 1)) == 121
    assert first.steps == [0, 1, 2, 1, 2], "each step needs one exchange, and none may follow the last step"


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int64])
def test_inputs_and_targets_are_int64_and_contiguous_for_any_shard_dtype(dtype):
    ids = np.arange(30, dtype=dtype).reshape(3, 10)
    inputs = model_inputs(
        ids, WindowSpec(9, True), end_of_document_id=12, device=CPU, attention="groundwork_sdpa", rows=2
    )
    assert inputs["input_ids_BT"].tolist() == ids[:, :-1].tolist()
    assert inputs["targets_BT"][:2].tolist() == ids[:2, 1:].tolist() and (inputs["targets_BT"][2] == IGNORED).all()
    assert all(inputs[name].dtype == torch.int64 for name in ("input_ids_BT", "targets_BT", "position_ids"))
    assert all(inputs[name].is_contiguous() for name in ("input_ids_BT", "targets_BT"))
    assert inputs["position_ids"][1].tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 6]
    assert ids[2, 3] == 23, "the batch must not be modified"


def test_ignored_rows_do_not_change_the_inputs():
    ids = np.arange(10).reshape(1, 10)
    inputs = model_inputs(
        ids, WindowSpec(9, False), end_of_document_id=0, device=CPU, attention="groundwork_sdpa", rows=0
    )
    assert inputs["input_ids_BT"].tolist() == [list(range(9))] and ids.tolist() == [list(range(10))]
    assert (inputs["targets_BT"] == IGNORED).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_for_a_gpu_are_in_pinned_memory():
    ids = np.arange(30, dtype=np.uint16).reshape(3, 10)
    batch = host_batch(ids, WindowSpec(9, True), end_of_document_id=12, device=torch.device("cuda"))
    assert batch.ids.is_pinned() and all(tensor.is_pinned() for tensor in batch.layout.values())
    assert batch.on_device(torch.device("cuda"), "groundwork_sdpa")["input_ids_BT"].tolist() == ids[:, :-1].tolist()
