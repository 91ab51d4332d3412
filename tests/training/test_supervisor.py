"""What was asked for is heard between steps too, by all ranks alike, and is not forgotten before it is done."""

import json
import os
import time
from types import SimpleNamespace

import pytest
import torch

from pretrain.checkpoint.run_state import Request
from pretrain.config import Guard
from pretrain.training.metrics import Metrics
from pretrain.training.supervisor import CutShortError, Supervisor
from support.save_and_die import strategy_of

START = "start-1"


def supervisor_of(run, rank=0, ranks=1) -> Supervisor:
    """Of a rank that trains nothing, in a folder of its own."""
    strategy = strategy_of(rank, ranks, run.with_name("meeting_point"))
    continuation = SimpleNamespace(
        config=SimpleNamespace(output=run, guard=Guard(), budget=SimpleNamespace(minutes=None)),
        strategy=strategy,
        metrics=Metrics(run, is_main=rank == 0),
        guard_state=None,
        plan=SimpleNamespace(precision="fp32"),
        run=SimpleNamespace(total_steps=100),
        state=SimpleNamespace(step=1, seconds=0.0),
        is_saved=True,
        go_back=lambda finding, beat: None,
    )
    return Supervisor(continuation, START)


def ask(run, command):
    (run / "control").mkdir(parents=True, exist_ok=True)
    (run / "control/request.json").write_text(json.dumps({"id": command, "command": command, "start_id": START}))


def step(supervisor, number):
    one, zero = torch.ones(()), torch.zeros(())
    no_segments = SimpleNamespace(batches=SimpleNamespace(begins_segment=lambda step: False))
    return supervisor.after_step(number, (one, one, zero), no_segments, settle=True)


def answered(run) -> dict:
    path = run / "control/answer.json"
    return json.loads(path.read_text()) if path.exists() else {}


def test_a_command_on_the_step_that_goes_back_is_done_after_it(tmp_path):
    supervisor = supervisor_of(tmp_path)
    step(supervisor, 1)
    assert supervisor.request == Request.NONE
    ask(tmp_path, "save")
    step(supervisor, 2)
    supervisor.go_back(None)  # nothing was done about it
    step(supervisor, 1)
    assert supervisor.request == Request.SAVE and answered(tmp_path) == {}
    supervisor.answer()
    assert supervisor.request == Request.NONE
    assert (answered(tmp_path)["command"], answered(tmp_path)["step"]) == ("save", 1)
    step(supervisor, 2)
    assert supervisor.request == Request.NONE, "done once"


def test_a_command_whose_report_is_under_way_while_the_run_goes_back_is_not_lost(tmp_path):
    """As on a GPU, where the report of a step comes with the next."""
    supervisor = supervisor_of(tmp_path)
    figures = torch.ones(()), torch.ones(()), torch.zeros(())
    ask(tmp_path, "stop")
    supervisor.consensus.exchange(1, *figures, supervisor._asked())
    assert supervisor.request == Request.NONE
    supervisor.go_back(None)
    assert supervisor.request == Request.STOP


def test_a_save_that_failed_is_not_answered_and_not_tried_for_ever(tmp_path):
    supervisor = supervisor_of(tmp_path)
    ask(tmp_path, "save")
    step(supervisor, 1)
    supervisor.continuation.is_saved = False
    supervisor.answer()
    assert supervisor.request == Request.NONE and answered(tmp_path) == {}


def test_a_save_is_no_reason_to_leave_validation(tmp_path):
    supervisor = supervisor_of(tmp_path)
    ask(tmp_path, "save")
    supervisor.listen_or_leave()
    assert supervisor.request == Request.SAVE, "and is done after it"
    ask(tmp_path, "stop")
    with pytest.raises(CutShortError):
        supervisor.listen_or_leave()


def leave(tmp_path, rank) -> list:
    """Rank 1 alone is told to end while the main rank computes for a long time, and both wait for it."""
    supervisor = supervisor_of(tmp_path / "run", rank, 2)
    heard, begun = 0, time.monotonic()

    def listen():
        nonlocal heard
        heard += 1
        if rank == 1 and heard == 3:
            supervisor.watch.request = Request.PREEMPT
        supervisor.listen_or_leave()

    with supervisor.leaving("the work"):
        supervisor.strategy.ranks.by_main(lambda: time.sleep(600), listen)
    return [heard, supervisor.request.name, supervisor.ends, time.monotonic() - begun < 300]


def test_all_ranks_leave_long_work_at_the_same_place_whoever_was_told(tmp_path):
    children = []
    for rank in (0, 1):
        if (child := os.fork()) == 0:
            try:
                (tmp_path / f"{rank}.json").write_text(json.dumps(leave(tmp_path, rank)))
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)] == [[3, "PREEMPT", True, True]] * 2
    (warning,) = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert warning["message"] == "the work skipped: the run is stopping"
