"""Starts the run and each step. After a step, all ranks agree on metrics, findings and requests."""

import gc
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import torch

from pretrain.checkpoint.run_state import Request, RunStoppedError
from pretrain.data.shards import ShardReader
from pretrain.errors import CRASHED, EXIT_BAD_INPUT, is_first_on_machine
from pretrain.hardware import name_machines, peak_flops, threads_beside
from pretrain.optim.averaging import average_after_step
from pretrain.parallel.replicas import replica_differences
from pretrain.runs.control import Control
from pretrain.runs.run_folder import EVALUATIONS, LOCK_FILE
from pretrain.training.guard import Finding, SpeedGuard, StepGuard
from pretrain.training.metrics import Throughput
from pretrain.training.probe import no_gradient
from pretrain.training.run import Run
from pretrain.training.run_plan import due_after
from pretrain.training.run_records import announce, machine_warnings
from pretrain.training.step_reports import Consensus, StepReport
from pretrain.training.time_budget import TimeBudget
from pretrain.training.watchdog import Watch

ANSWERED = (Request.SAVE, Request.SHORTEN, Request.ANNEAL, Request.STOP, Request.ABORT)
"""Requests from runs.py or the clock, which get a reply."""


class ReplicasDifferError(RunStoppedError):
    """Raised if the replicas' weights differ. Restart from the last checkpoint."""

    exit_code = CRASHED


class FirstStepError(RunStoppedError):
    """Raised after the first step if a parameter isn't trained, or the optimizer's state couldn't be resumed."""

    exit_code = EXIT_BAD_INPUT


class WorkInterruptedError(Exception):
    """Raised on all ranks at the same point to interrupt work between two steps when the run is stopping."""


def begin(run: Run, validation_readers: dict[str, ShardReader]) -> None:
    """Announces the run, and sets up everything that the training loop needs. A collective call."""
    config = run.config
    device = run.strategy.device
    run.validation_readers = validation_readers
    run.peak_flops, peak_source = peak_flops(device, run.plan.precision)
    start_id = announce(run, peak_source)
    watch_over(run, start_id)
    if run.state.step < run.plan.total_steps:
        run.log.expect("First step" if config.compile == "none" else "First step, which compiles the model")
    run.tokenizer = run.whole_plan.batches.manifest.tokenizer_folder
    run.stage = run.plan.stage(max(run.state.step - 1, 0))
    if config.data.stages:
        _take_positions(run)
    if config.checkpoint.mirror is not None and run.strategy.ranks.is_main:
        from pretrain.training.background_jobs import MirrorCopies

        run.mirror = MirrorCopies(config.output, config.checkpoint, run.log)
    benchmarks = config.benchmarks
    if benchmarks.is_set and benchmarks.where == "in_loop":
        from pretrain.training.benchmarks import Benchmarks

        run.benchmarks = Benchmarks(config.output, benchmarks, run.tokenizer)
        if run.strategy.ranks.is_main:
            run.benchmarks.begin()
    elif benchmarks.is_set or (config.output / EVALUATIONS).exists():  # a crash may have left folders to remove
        from pretrain.training.background_jobs import Evaluations

        run.evaluations = Evaluations(config.output, run.log, threads_beside(device))
    if config.diagnostics.is_set:
        from pretrain.training.diagnostics import Diagnostics

        run.diagnostics = Diagnostics(run.strategy)
        run.diagnostics.attach()
    run.throughput = Throughput()
    run.speed_guard = SpeedGuard(config.guard.throughput_drop)
    run.logged_step = run.state.step
    run.watch.start()  # from here on, signals are handled after the step


def watch_over(run: Run, start_id: str) -> None:
    """Creates the guard, control, clock and watch, and warns about the machines. A collective call.

    Args:
        start_id: ID of this launch, used by commands from runs.py.
    """
    ranks = run.strategy.ranks
    output = run.config.output
    guard = run.config.guard
    run.consensus = Consensus(run.strategy)
    run.guard = new_guard(run)
    run.control = Control(output, start_id, warn=run.log.warn)
    run.clock = TimeBudget(run.config.budget.minutes, run.state.seconds, run.log.started)
    here = (socket.gethostname(), pid_namespace())
    # The first process on each machine judges it.
    own_warnings = machine_warnings(run.plan, run.strategy.device) if is_first_on_machine() else None
    processes = ranks.gather((here, os.getpid(), own_warnings))
    machines = [(host, warnings) for (host, _), _, warnings in processes if warnings is not None]
    for warning in name_machines(machines):
        run.log.warn(warning, step=run.state.step)
    run.watch = Watch(
        output,
        ranks.rank,
        [pid for rank, (place, pid, _) in enumerate(processes) if place == here and rank != ranks.rank],
        step_timeout_seconds=guard.step_timeout_seconds,
        first_step_timeout_seconds=guard.first_step_timeout_seconds,
        held=output / LOCK_FILE if ranks.is_main else None,
        on_end=run.log.end,
    )
    run.checkpoints.beat = run.watch.beat


def new_guard(run: Run) -> StepGuard:
    """Creates the guard, with its state from the checkpoint if there is one."""
    memory = run.saved.contents["guard"] if run.saved else None
    return StepGuard(run.config.guard, memory, scales_loss=run.whole_plan.precision == "fp16")


def pid_namespace() -> str | None:
    """Identifies the PID namespace. Containers with the same host name may have different ones."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return None


def begin_step(run: Run) -> int:
    """Starts a step and returns its number, from 0. Switches the model if a new stage begins."""
    step = run.state.step
    if run.steps_begun == 1:
        # Excludes long-lived objects from later garbage collections.
        gc.collect()
        gc.freeze()
    run.steps_begun += 1
    if run.built.terms is not None:
        run.built.terms.step = step
    before = run.stage
    run.stage = run.plan.stage(step)
    if run.stage.differs_from(before):
        _enter_stage(run)
    if run.diagnostics is not None:
        run.diagnostics.is_due = due_after(step + 1, run.config, run.plan).diagnoses
    return step


def _take_positions(run: Run) -> None:
    from pretrain.model.positions import use_positions

    use_positions(run.built.model, run.stage.model_config, run.strategy.causal_lm)


def _enter_stage(run: Run) -> None:
    """Switches the model to the new stage."""
    stage = run.stage
    length = stage.window.sequence_length
    _take_positions(run)
    run.watch.allow_compiling()
    run.speed_guard = SpeedGuard(run.config.guard.throughput_drop)
    run.log.write(
        "stage",
        step=run.state.step,
        flops_per_token=stage.flops_per_token,
        stage=stage.number,
        sequence_length=length,
        max_position_embeddings=getattr(stage.model_config, "max_position_embeddings", None),
        rope_parameters=getattr(stage.model_config, "rope_parameters", None),
        sequences_per_step=run.plan.tokens_in(run.state.step) // length,
        sequences_per_micro_batch=stage.sequences_per_micro_batch,
    )
    if run.config.compile != "none":
        run.throughput.expect_compiling()
        run.log.expect("First step of the stage, which compiles the model again")


def count_step(run: Run) -> None:
    """Advances the step count and, if due, updates the weight average.

    After the first step, raises FirstStepError on all ranks if any parameter has no gradient, which the probe can
    miss, or if the optimizer's state doesn't match its `state_shapes`.
    """
    strategy = run.strategy
    if run.steps_begun == 1:
        of_ranks = strategy.ranks.gather((strategy.untrained, strategy.state_problem()))
        if untrained := list(dict.fromkeys(name for names, _ in of_ranks for name in names)):
            raise FirstStepError(f"model: {run.plan.model_config.model_type}: {no_gradient(untrained)}")
        for _, problem in of_ranks:
            if problem:
                raise FirstStepError(problem)
    state = run.state
    settings = run.config.averaging
    state.step += 1
    state.tokens = run.plan.tokens_before(state.step)
    state.validation_loss = None  # outdated after the update
    if settings.kind == "none" or state.step % settings.every_steps:
        return
    state.average, share = average_after_step(settings, state.average, state.step, run.plan.total_steps)
    if state.average is None:
        strategy.average = None
    else:
        strategy.update_average(share)


def after_step(
    run: Run, loss: torch.Tensor, grad_norm: torch.Tensor, skipped: torch.Tensor, *, settle: bool
) -> tuple[list[StepReport], Finding | None]:
    """Submits this rank's metrics for the step. Returns (new reports, finding that requires a rollback or stop).

    The finding is None if training can continue. Both values are identical on all ranks.

    settle: also wait for this step's report, as after a request.
    """
    step = run.state.step
    run.watch.beat(step)
    run.clock.step_taken()
    reports = run.consensus.exchange(step, loss, grad_norm, skipped, rank_request(run))
    # A request saves a checkpoint, whose guard state must include the steps still being reported by a GPU.
    if settle or max([run.request, *(report.request for report in reports)]) != Request.NONE:
        reports += run.consensus.settle()
    bad = None
    for report in reports:
        found = _judge(run, report)
        bad = bad or found  # the first one, because a rollback to before it also undoes later steps
    return reports, bad


def _judge(run: Run, report: StepReport) -> Finding | None:
    """Logs a report's findings. Returns a finding that requires a rollback or stop, if any."""
    run.request = max(run.request, report.request)
    if report.skipped:
        run.state.skipped_steps += 1
        run.log.write("skip", step=report.step, steps=1, loss=report.loss, grad_norm=report.grad_norm)
    if run.plan.batches.begins_segment(report.step - 1):
        run.guard.forget()
    bad = None
    for finding in run.guard.judge(report):
        if finding.roll_back or finding.stop:
            bad = finding
        run.log.write(finding.event, step=finding.step, message=finding.message, **finding.values)
    return bad


def rank_request(run: Run) -> Request:
    """Returns this rank's request from signals, runs.py commands and the clock. Each command is returned only once."""
    asked = run.watch.request
    if not run.strategy.ranks.is_main:  # commands and the clock are handled on the main rank
        return asked
    if command := run.control.poll():
        asked = max(asked, Request[command.upper()])
    if not run.clock.is_limited:
        return asked
    has_begun_to_decay = run.state.anneal_from is not None or run.state.step >= run.plan.schedule.decays_from
    if not has_begun_to_decay and run.clock.asks_for_decay(steps_of_decay(run)):
        asked = max(asked, Request.ANNEAL)
    if has_begun_to_decay and run.clock.asks_to_shorten(steps_of_decay_left(run)):
        asked = max(asked, Request.SHORTEN)
    return asked


def poll_requests(run: Run) -> None:
    """Checks for new requests during long work between steps. A collective call."""
    run.watch.beat()
    run.request = max(run.request, run.consensus.agree(rank_request(run)))


def poll_or_interrupt(run: Run) -> None:
    """Raises WorkInterruptedError on all ranks if the run is stopping. A collective call."""
    poll_requests(run)
    if run.ends:
        raise WorkInterruptedError


@contextmanager
def interruptible(run: Run, work: str) -> Iterator[Callable[[], None]]:
    """Runs interruptible work between steps. A request to stop interrupts it.

    Yields a collective function to call regularly during the work.
    """
    with run.pausing(work):
        try:
            yield partial(poll_or_interrupt, run)
        except WorkInterruptedError:
            run.log.warn(f"{work} skipped because the run is stopping")


def answer(run: Run) -> None:
    """Clears the request, and replies to it if it was carried out."""
    request = run.request
    if request == Request.ANNEAL and run.state.anneal_from is None:
        return  # arrived late; the next step handles it
    done = request != Request.SAVE or run.is_saved
    if done and request in ANSWERED:
        # A repeated request doesn't restart the decay.
        step = run.state.anneal_from if request == Request.ANNEAL else run.state.step
        by = "runs.py" if run.control.asked else "budget.minutes"
        command = request.name.lower()
        run.log.write("control", step=step, command=command, by=by, total_steps=run.plan.total_steps)
        run.control.acknowledge(step)
    run.request = Request.NONE


def steps_of_decay(run: Run) -> float:
    """Returns the number of steps in a final decay that starts now: 0 after the last step, otherwise at least 1."""
    return min(run.plan.total_steps - run.state.step, max(1, run.config.optim.decay_fraction * run.state.step))


def steps_of_decay_left(run: Run) -> int:
    """Returns the number of steps left in a requested final decay; 0 if there is none."""
    state = run.state
    return 0 if state.anneal_from is None else state.anneal_from + state.anneal_steps - state.step


def compare_replicas(run: Run) -> None:
    """Raises ReplicasDifferError on all ranks if any replicas' weights differ."""
    if found := replica_differences(run.strategy.replicas(), run.strategy.device):
        raise ReplicasDifferError(f"the replicas' weights differ: {'; '.join(found)}")
