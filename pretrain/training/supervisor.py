"""Supervision of a run's steps: agreement of the ranks, the guard, signals, and commands of runs.py."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from pretrain.checkpoint.run_state import RunStoppedError
from pretrain.errors import CRASHED, EXIT_INTERRUPTED, EXIT_PREEMPTED
from pretrain.parallel.replicas import replica_differences
from pretrain.runs.control import Control
from pretrain.runs.run_folder import LOCK_FILE
from pretrain.training.guard import Finding, StepGuard
from pretrain.training.resume import Continuation
from pretrain.training.run_plan import RunPlan
from pretrain.training.step_reports import Consensus, Request, StepReport
from pretrain.training.time_budget import TimeBudget
from pretrain.training.watchdog import Watch

ENDS = {
    Request.PREEMPT: "preempted",
    Request.INTERRUPT: "interrupted",
    Request.PAUSE: "paused as checkpoint.pause_at says",
    Request.STOP: "stopped",
    Request.ABORT: "aborted",
}
"""Reasons for a requested end, as logged."""
COMMANDED = (Request.PROFILE, Request.SAVE, Request.SHORTEN, Request.ANNEAL, Request.STOP, Request.ABORT)
"""What runs.py or the clock asks for, and is answered."""


class CopiesDifferError(RunStoppedError):
    """Ranks that should hold the same weights do not; restarting from the last checkpoint fixes that."""

    exit_code = CRASHED


class CutShortError(Exception):
    """The run is stopping; all ranks abandon the work between two steps at the same place."""


@dataclass
class StepOutcome:
    """What all ranks know and decide after a step; identical on all ranks."""

    reports: list[StepReport]
    """Of the steps whose figures have arrived; including this one if it was settled."""
    bad: Finding | None = None
    """Why training must not simply continue."""
    skipped_steps: int = 0

    @property
    def report(self) -> StepReport:
        """The last step's."""
        return self.reports[-1]


class Supervisor:
    """Called by all ranks after every step, and regularly during work between steps.

    Args:
        start_id: names this start of the run, to which commands of runs.py are addressed.
    """

    def __init__(self, continuation: Continuation, start_id: str):
        self.continuation, self.config = continuation, continuation.config
        self.strategy, self.metrics = continuation.strategy, continuation.metrics
        self.request = Request.NONE
        """The pending request, known to all ranks."""
        self.refusal: str | None = None
        """Why it cannot be carried out."""
        strategy, guard = self.strategy, self.config.guard
        self.consensus = Consensus(strategy)
        self.guard = self._new_guard()
        self.control = Control(self.config.output, start_id, warn=self._warn)
        here = socket.gethostname(), pid_namespace()
        self.time = TimeBudget(self.config.budget.minutes, continuation.state.seconds, self.metrics.started)
        processes = strategy.ranks.gather((here, os.getpid()))
        self.watch = Watch(
            self.config.output,
            strategy.ranks.rank,
            [pid for rank, (host, pid) in enumerate(processes) if host == here and rank != strategy.ranks.rank],
            step_timeout_seconds=guard.step_timeout_seconds,
            first_step_timeout_seconds=guard.first_step_timeout_seconds,
            held=self.config.output / LOCK_FILE if strategy.ranks.is_main else None,
            on_end=lambda reason, code: self.metrics.end(code, reason),
        )

    def _new_guard(self) -> StepGuard:
        """A guard with the memory stored in the checkpoint that the run continues from."""
        scales_loss = self.continuation.plan.precision == "fp16"
        return StepGuard(self.config.guard, self.continuation.guard_state, scales_loss=scales_loss)

    def after_step(
        self, step: int, figures: tuple[torch.Tensor, torch.Tensor, torch.Tensor], run: RunPlan, *, settle: bool
    ) -> StepOutcome:
        """Submits (loss, gradient norm, skipped) of `step`, on the device; returns what all ranks know and decide.

        settle: wait for this step's own figures.
        """
        self.watch.beat(step)
        self.time.step_taken()
        outcome = StepOutcome(self.consensus.exchange(step, *figures, self._asked()))
        if settle:
            outcome.reports += self.consensus.settle()
        for report in outcome.reports:
            self._judge(report, run, outcome)
        return outcome

    def _asked(self) -> Request:
        """This rank's request: a command once, a signal for as long as the process lives."""
        if not self.strategy.ranks.is_main:
            return self.watch.request
        command = self.control.poll()
        asked = Request[command.upper()] if command else Request.NONE
        if self.time.is_limited and not self.continuation.decays:
            late = self.time.asks_for_decay(self.continuation.steps_of_decay)
            asked = max(asked, Request.ANNEAL if late else Request.NONE)
        elif self.time.is_limited and self.time.asks_to_shorten(self.continuation.steps_of_annealing_left):
            asked = max(asked, Request.SHORTEN)
        return max(self.watch.request, asked)

    def listen(self) -> None:
        """Checks for requests during long work between steps; all ranks together."""
        self.watch.beat()
        self.request = max(self.request, self.consensus.agree(self._asked()))

    def listen_or_leave(self) -> None:
        """Raises CutShortError on all ranks at the same call if the run is stopping: schedulers do not wait long."""
        self.listen()
        if self.ends:
            raise CutShortError

    @contextmanager
    def leaving(self, work: str) -> Iterator[None]:
        """Around work that may be cut short: the run continues after it without its results."""
        try:
            yield
        except CutShortError:
            self._warn(f"{work} skipped: the run is stopping")

    @property
    def ends(self) -> bool:
        """Whether the run was asked to end."""
        return self.request > Request.ANNEAL

    @property
    def wants_save(self) -> bool:
        """Whether the run was asked for a checkpoint, and goes on."""
        return self.request in (Request.SAVE, Request.SHORTEN, Request.ANNEAL)

    def _judge(self, report: StepReport, run: RunPlan, outcome: StepOutcome) -> None:
        self.request = max(self.request, report.request)
        if report.skipped:
            outcome.skipped_steps += 1
            self.metrics.write("skip", step=report.step, steps=1, loss=report.loss, grad_norm=report.grad_norm)
        if run.batches.begins_segment(report.step - 1):
            self.guard.forget()
        for finding in self.guard.judge(report):
            if finding.roll_back or finding.stop:
                outcome.bad = finding
            self.metrics.write(finding.event, step=finding.step, message=finding.message, **finding.values)

    def answer(self) -> None:
        """Clears the request; if it was carried out, the sender of a command gets an answer."""
        if self.request == Request.ANNEAL and self.continuation.state.anneal_from is None and not self.refusal:
            return  # heard after the loop had looked for it: the next step's turn
        done = self.request != Request.SAVE or self.continuation.is_saved
        if done and self.request in COMMANDED:
            step, total_steps = self.continuation.state.step, self.continuation.run.total_steps
            if self.refusal is None:
                by = "runs.py" if self.control.asked else "budget.minutes"
                command = self.request.name.lower()
                self.metrics.write("control", step=step, command=command, by=by, total_steps=total_steps)
            self.control.acknowledge(step, self.refusal)
        self.request, self.refusal = Request.NONE, None

    def end(self) -> int:
        """Ends the run on request; returns the exit status."""
        code = EXIT_PREEMPTED if self.request == Request.PREEMPT else EXIT_INTERRUPTED
        saved = "nothing saved" if self.request == Request.ABORT else f"saved at step {self.continuation.state.step:,}"
        how = "give it a later step, or null, to" if self.request == Request.PAUSE else "run the same command to"
        reason = f"{ENDS[self.request]}, {saved}; {how} resume"
        self.answer()
        self.watch.close()
        self.metrics.end(code, reason)
        return code

    def go_back(self, finding: Finding) -> None:
        """Rolls back before the finding: pending figures of later steps are discarded, requests are kept.

        Raises NumericStopError as `Continuation.go_back` does.
        """
        self.continuation.go_back(finding, self.watch.beat)
        self.request = max([self.request, *(report.request for report in self.consensus.settle())])
        self.guard = self._new_guard()

    def compare_copies(self) -> None:
        """Raises CopiesDifferError on all ranks if some ranks' weights differ."""
        if found := replica_differences(self.strategy.replicas(), self.strategy.device):
            raise CopiesDifferError(f"copies of the weights differ: {'; '.join(found)}")

    def _warn(self, text: str) -> None:
        self.metrics.write("warning", message=text)


def pid_namespace() -> str | None:
    """The namespace of process ids: containers with the same host name may each count their own."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return None
