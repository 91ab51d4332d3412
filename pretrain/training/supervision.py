"""Agreement of all ranks after a step: its metrics, the guard's findings, requests of users and schedulers."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from pretrain.checkpoint.run_state import Request, RunStoppedError
from pretrain.errors import CRASHED
from pretrain.parallel.replicas import replica_differences
from pretrain.runs.control import Control
from pretrain.runs.run_folder import LOCK_FILE
from pretrain.training.guard import Finding, StepGuard
from pretrain.training.run import Run
from pretrain.training.step_reports import Consensus, StepReport
from pretrain.training.time_budget import TimeBudget
from pretrain.training.watchdog import Watch

ANSWERED = (Request.PROFILE, Request.SAVE, Request.SHORTEN, Request.ANNEAL, Request.STOP, Request.ABORT)
"""Requests of runs.py or of the clock, whose sender gets an answer."""


class CopiesDifferError(RunStoppedError):
    """Raised if ranks that should hold the same weights do not; restarting from the last checkpoint fixes that."""

    exit_code = CRASHED


class CutShortError(Exception):
    """Raised on all ranks at the same point to abandon work between two steps, because the run is stopping."""


@dataclass
class StepOutcome:
    """Knowledge and decision after a step, identical on all ranks."""

    reports: list[StepReport]
    """Reports of the steps whose metrics have arrived, including this step if it was waited for."""
    bad: Finding | None = None
    """Finding that prevents continuing as planned."""
    skipped_steps: int = 0

    @property
    def report(self) -> StepReport:
        """Report of the last step."""
        return self.reports[-1]


def watch_over(run: Run, start_id: str) -> None:
    """Starts listening for signals and commands, and watching for hangs. A collective call.

    Args:
        start_id: ID of this start of the run; commands of runs.py are addressed to it.
    """
    ranks = run.strategy.ranks
    run.consensus = Consensus(run.strategy)
    run.guard = new_guard(run)
    run.control = Control(run.config.output, start_id, warn=run.warn)
    run.clock = TimeBudget(run.config.budget.minutes, run.state.seconds, run.log.started)
    here = (socket.gethostname(), pid_namespace())
    processes = ranks.gather((here, os.getpid()))
    run.watch = Watch(
        run.config.output,
        ranks.rank,
        [pid for rank, (host, pid) in enumerate(processes) if host == here and rank != ranks.rank],
        step_timeout_seconds=run.config.guard.step_timeout_seconds,
        first_step_timeout_seconds=run.config.guard.first_step_timeout_seconds,
        held=run.config.output / LOCK_FILE if ranks.is_main else None,
        on_end=lambda reason, code: run.log.end(code, reason),
    )


def new_guard(run: Run) -> StepGuard:
    """Creates a guard with the memory of the checkpoint that the run continues from."""
    return StepGuard(run.config.guard, run.guard_state, scales_loss=run.whole_plan.precision == "fp16")


def after_step(
    run: Run, loss: torch.Tensor, grad_norm: torch.Tensor, skipped: torch.Tensor, *, settle: bool
) -> StepOutcome:
    """Submits this rank's metrics of the step, on the device; returns what all ranks know and decide.

    settle: wait for this step's own metrics.
    """
    step = run.state.step
    run.watch.beat(step)
    run.clock.step_taken()
    outcome = StepOutcome(run.consensus.exchange(step, loss, grad_norm, skipped, _asked(run)))
    if settle:
        outcome.reports += run.consensus.settle()
    for report in outcome.reports:
        _judge(run, report, outcome)
    run.state.skipped_steps += outcome.skipped_steps
    return outcome


def _judge(run: Run, report: StepReport, outcome: StepOutcome) -> None:
    run.request = max(run.request, report.request)
    if report.skipped:
        outcome.skipped_steps += 1
        run.log.write("skip", step=report.step, steps=1, loss=report.loss, grad_norm=report.grad_norm)
    if run.plan.batches.begins_segment(report.step - 1):
        run.guard.forget()
    for finding in run.guard.judge(report):
        if finding.roll_back or finding.stop:
            outcome.bad = finding
        run.log.write(finding.event, step=finding.step, message=finding.message, **finding.values)


def _asked(run: Run) -> Request:
    """Returns this rank's request: a command once, a signal for as long as the process lives."""
    if not run.strategy.ranks.is_main:
        return run.watch.request
    command = run.control.poll()
    asked = Request[command.upper()] if command else Request.NONE
    if run.clock.is_limited:
        if not has_begun_to_decay(run):
            by_clock = Request.ANNEAL if run.clock.asks_for_decay(steps_of_decay(run)) else Request.NONE
        else:
            by_clock = Request.SHORTEN if run.clock.asks_to_shorten(steps_of_decay_left(run)) else Request.NONE
        asked = max(asked, by_clock)
    return max(run.watch.request, asked)


def listen(run: Run) -> None:
    """Checks for requests during long work between steps; a collective call."""
    run.watch.beat()
    run.request = max(run.request, run.consensus.agree(_asked(run)))


def listen_or_leave(run: Run) -> None:
    """Raises CutShortError on all ranks at the same call if the run is stopping: schedulers do not wait long."""
    listen(run)
    if run.ends:
        raise CutShortError


@contextmanager
def may_be_cut_short(run: Run, work: str) -> Iterator[None]:
    """Lets work between steps be abandoned when the run is stopping; the run continues without its results."""
    try:
        yield
    except CutShortError:
        run.warn(f"{work} skipped: the run is stopping")


def answer(run: Run) -> None:
    """Clears the request; if it was carried out, the sender of a command gets an answer."""
    if run.request == Request.ANNEAL and run.state.anneal_from is None and not run.refusal:
        return  # the request came after the loop's check: the next step handles it
    done = run.request != Request.SAVE or run.is_saved
    if done and run.request in ANSWERED:
        step = run.state.step
        if run.refusal is None:
            by = "runs.py" if run.control.asked else "budget.minutes"
            command = run.request.name.lower()
            run.log.write("control", step=step, command=command, by=by, total_steps=run.plan.total_steps)
        run.control.acknowledge(step, run.refusal)
    run.request = Request.NONE
    run.refusal = None


def has_begun_to_decay(run: Run) -> bool:
    """Tells if the final decay has begun: the schedule's own, or a requested one."""
    return run.state.anneal_from is not None or run.state.step >= run.plan.schedule.decays_from


def steps_of_decay(run: Run) -> float:
    """Counts the steps that a final decay takes if it begins now."""
    return min(run.plan.total_steps - run.state.step, run.config.optim.decay_fraction * run.state.step)


def steps_of_decay_left(run: Run) -> int:
    """Counts the remaining steps of a requested final decay; 0 if there is none."""
    state = run.state
    return 0 if state.anneal_from is None else state.anneal_from + state.anneal_steps - state.step


def compare_copies(run: Run) -> None:
    """Raises CopiesDifferError on all ranks if the weights of some ranks differ."""
    if found := replica_differences(run.strategy.replicas(), run.strategy.device):
        raise CopiesDifferError(f"copies of the weights differ: {'; '.join(found)}")


def pid_namespace() -> str | None:
    """Names the namespace of process IDs: containers with the same host name may number their own processes."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return None
