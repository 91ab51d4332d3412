"""Requests between steps must reach all ranks, and must not be lost before they are executed."""

import json
import os
import time
from types import SimpleNamespace

import pytest
import torch

from pretrain.checkpoint.run_state import Request
from pretrain.config import Guard
from pretrain.runs.event_log import read_metrics
from pretrain.training import ending, resuming, steps
from pretrain.training.between_steps import decay
from pretrain.training.guard import StepGuard
from pretrain.training.metrics import Metrics, Throughput
from pretrain.training.resuming import roll_back
from pretrain.training.run import Run
from pretrain.training.step_reports import StepReport
from pretrain.training.steps import (
    WorkInterruptedError,
    after_step,
    answer,
    interruptible,
    poll_or_interrupt,
    rank_request,
    watch_over,
)
from support.save_and_die import strategy_of

START = "start-1"


def run_of(folder, rank=0, ranks=1) -> Run:
    """Returns one rank's run, which doesn't train."""
    run = object.__new__(Run)
    run.config = SimpleNamespace(output=folder, guard=Guard(), budget=SimpleNamespace(minutes=None))
    run.strategy = strategy_of(rank, ranks, folder.with_name("meeting_point"))
    run.log = Metrics(folder, is_main=rank == 0)
    run.state = SimpleNamespace(step=1, tokens=0, seconds=0.0, skipped_steps=0)
    run.whole_plan = SimpleNamespace(precision="fp32")
    batches = SimpleNamespace(begins_segment=lambda step: False)
    run.plan = SimpleNamespace(precision="fp32", total_steps=100, batches=batches, flops_before=lambda step: 0.0)
    run.checkpoints = SimpleNamespace(last_step=1)
    run.throughput = Throughput()
    watch_over(run, START)
    return run


def ask(run, command):
    (run / "control").mkdir(parents=True, exist_ok=True)
    (run / "control/request.json").write_text(json.dumps({"id": command, "command": command, "start_id": START}))


def step(run, number):
    run.state.step = number
    one = torch.ones(())
    return after_step(run, one, one, torch.zeros(()), settle=True)


@pytest.fixture(autouse=True)
def nothing_to_load(monkeypatch):
    monkeypatch.setattr(resuming, "_restore_earlier", lambda run, finding: None)


def answered(run) -> dict:
    path = run / "control/answer.json"
    return json.loads(path.read_text()) if path.exists() else {}


def test_a_command_during_a_rollback_is_done_afterwards(tmp_path):
    run = run_of(tmp_path)
    step(run, 1)
    assert run.request == Request.NONE
    ask(tmp_path, "save")
    step(run, 2)
    roll_back(run, None)  # the request is still pending
    step(run, 1)
    assert run.request == Request.SAVE and answered(tmp_path) == {}
    answer(run)
    assert run.request == Request.NONE
    assert (answered(tmp_path)["command"], answered(tmp_path)["step"]) == ("save", 1)
    step(run, 2)
    assert run.request == Request.NONE, "the command must run only once"


def test_a_command_in_a_pending_report_survives_a_rollback(tmp_path):
    """On a GPU, a step's report arrives during the next step."""
    run = run_of(tmp_path)
    ask(tmp_path, "stop")
    figures = torch.tensor([1.0, 1.0, 0.0, 1.0])
    run.consensus._arriving.append((1, figures, None, rank_request(run)))  # still being copied from the GPU
    assert run.request == Request.NONE
    roll_back(run, None)
    assert run.request == Request.STOP


def reports_of_a_gpu(run, *steps, request=Request.NONE, settle=False):
    """Finishes a step on a GPU, where only the first report has arrived. steps: (loss, skipped) of each."""
    reports = [StepReport(n, loss, 1.0, bool(skipped), request) for n, (loss, skipped) in enumerate(steps, start=1)]
    run.consensus.exchange = lambda *_: reports[:1]
    for report in reports[1:]:
        figures = torch.tensor([report.loss, 1.0, float(report.skipped), 1.0])
        run.consensus._arriving.append((report.step, figures, None, Request.NONE))
    run.state.step = len(steps)
    return after_step(run, *(torch.zeros(()) for _ in range(3)), settle=settle)


def test_a_checkpoint_on_request_includes_the_steps_still_being_reported(tmp_path):
    run = run_of(tmp_path)
    reports, bad = reports_of_a_gpu(run, (1.0, 0), (1.0, 1), (1.0, 1))
    assert [report.step for report in reports] == [1] and bad is None, "without a request, no step waits"
    run = run_of(tmp_path)
    reports, bad = reports_of_a_gpu(run, (1.0, 0), (1.0, 1), (1.0, 1), request=Request.PREEMPT)
    assert [report.step for report in reports] == [1, 2, 3] and bad is None
    assert run.guard.state()["strikes"] == [2, 3] and run.state.skipped_steps == 2


def test_the_first_of_several_bad_steps_is_rolled_back(tmp_path):
    run = run_of(tmp_path)
    run.guard = StepGuard(Guard(patience=1))
    _, bad = reports_of_a_gpu(run, (1.0, 1), (1.0, 1), (1.0, 0), settle=True)
    assert bad.roll_back == (1, 1)


def test_a_failed_save_is_not_answered_or_retried_forever(tmp_path):
    run = run_of(tmp_path)
    ask(tmp_path, "save")
    step(run, 1)
    run.checkpoints.last_step = 0
    answer(run)
    assert run.request == Request.NONE and answered(tmp_path) == {}


def test_a_second_anneal_is_answered_with_the_start_of_the_decay(tmp_path):
    run = run_of(tmp_path)
    run.state.anneal_from = 22
    ask(tmp_path, "anneal")
    step(run, 23)
    assert run.request == Request.ANNEAL
    answer(run)
    assert answered(tmp_path)["step"] == 22


@pytest.mark.parametrize(("now", "steps"), [(2, 1), (50, 10), (99, 1), (100, 0)])
def test_a_decay_never_lengthens_the_run(tmp_path, now, steps):
    run = run_of(tmp_path)
    run.config.optim = SimpleNamespace(decay_fraction=0.2)
    run.state.step, run.state.anneal_from, run.request = now, None, Request.ANNEAL
    run.replan = lambda: None
    decay(run)
    assert (run.state.anneal_from, run.state.anneal_steps) == (now, steps)


def test_a_save_request_does_not_interrupt_validation(tmp_path):
    run = run_of(tmp_path)
    ask(tmp_path, "save")
    poll_or_interrupt(run)
    assert run.request == Request.SAVE, "the request must stay pending until validation is done"
    ask(tmp_path, "stop")
    with pytest.raises(WorkInterruptedError):
        poll_or_interrupt(run)


def test_a_check_of_the_export_that_fails_does_not_end_the_run(tmp_path, monkeypatch):
    run = run_of(tmp_path)
    run.config.export, run.config.data = SimpleNamespace(dtype="bf16"), SimpleNamespace(window=None)
    run.checkpoints.folder, run.validation_readers = tmp_path, {}
    monkeypatch.setattr(ending, "export_final", lambda *_: tmp_path / "final")
    monkeypatch.setattr(ending, "model_describer", lambda run: None)
    monkeypatch.setattr(ending, "losses_of_sources", lambda *_: {})
    monkeypatch.setattr(ending, "verify_export", lambda *_, **__: {}["eager"])
    assert ending._export(run, "raw") == tmp_path / "final"
    assert read_metrics(tmp_path)[-1]["problems"] == ["the check failed (KeyError: 'eager')"]


def leave(tmp_path, rank) -> list:
    """Tells only rank 1 to stop while the main rank is busy."""
    run = run_of(tmp_path / "run", rank, 2)
    heard, begun = 0, time.monotonic()

    def listen():
        nonlocal heard
        heard += 1
        if rank == 1 and heard == 3:
            run.watch.request = Request.PREEMPT
        leave_if_asked()

    with interruptible(run, "the work") as leave_if_asked:
        run.strategy.ranks.by_main(lambda: time.sleep(600), listen)
    return [heard, run.request.name, run.ends, time.monotonic() - begun < 300]


def in_processes(count, function) -> None:
    """Calls the function with each rank in a separate process."""
    children = []
    for rank in range(count):
        if (child := os.fork()) == 0:
            try:
                function(rank)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def test_all_ranks_leave_long_work_together(tmp_path):
    in_processes(2, lambda rank: (tmp_path / f"{rank}.json").write_text(json.dumps(leave(tmp_path, rank))))
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)] == [[3, "PREEMPT", True, True]] * 2
    (warning,) = read_metrics(tmp_path / "run")
    assert warning["message"] == "the work skipped because the run is stopping"


def test_the_first_process_on_each_machine_judges_it(tmp_path, monkeypatch):
    """Simulates a machine with one process, and one with two."""

    def start(rank):
        host, local_rank = (("node0", 0), ("node1", 0), ("node1", 1))[rank]
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.setattr(steps.socket, "gethostname", lambda: host)
        found = {0: ["cores: too few"], 1: ["cores: too few", "network: TCP"], 2: ["must not be judged"]}
        monkeypatch.setattr(steps, "machine_warnings", lambda plan, device: found[rank])
        run_of(tmp_path / "run", rank, 3)

    in_processes(3, start)
    warnings = [(event["event"], event["message"]) for event in read_metrics(tmp_path / "run")]
    assert warnings == [
        ("warning", "2 of 2 machines (node0, node1): cores: too few"),
        ("warning", "1 of 2 machines (node1): network: TCP"),
    ]


def test_warnings_of_a_single_process_name_no_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "machine_warnings", lambda plan, device: ["cores: too few"])
    run_of(tmp_path)
    (warning,) = read_metrics(tmp_path)
    assert (warning["message"], warning["step"]) == ("cores: too few", 1)
