"""Resumes runs from checkpoints and rolls them back."""

from collections import ChainMap
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pretrain.checkpoint.checkpoints import Checkpoints, SaveError, load_saved
from pretrain.checkpoint.run_state import NumericStopError, RunState, record_rollbacks, recorded_rollbacks
from pretrain.config import RunConfig
from pretrain.errors import Problems
from pretrain.files import SEAL_FILE
from pretrain.model.published_names import JoinedTensors, PublishedNames
from pretrain.optim.averaging import averages_after, can_continue
from pretrain.parallel.strategy import Strategy
from pretrain.recipe import CommandLine
from pretrain.runs.run_folder import step_of, trunk_checkpoint
from pretrain.training.guard import Finding
from pretrain.training.metrics import Metrics
from pretrain.training.run import Run
from pretrain.training.run_plan import RunPlan
from pretrain.training.starting import refuse_crash_loop
from pretrain.training.steps import new_guard

if TYPE_CHECKING:
    from pretrain.training.continued_plan import Continuation


def open_run(
    config: RunConfig,
    plan: RunPlan,
    asked: CommandLine,
    strategy: Strategy,
    log: Metrics,
    last_step: int | None,
) -> Run:
    """Opens a run at its newest valid checkpoint, or at the checkpoint in branch_from, or at step 0.

    Doesn't load any tensors (see `load_checkpoint`). A collective call.

    Raises InputError if the recipe doesn't match the checkpoint, NoValidCheckpointError if all checkpoints are
    damaged, and CrashLoopError if the run keeps crashing at this step.

    Args:
        plan: the recipe's plan, as for a new run.
        asked: the command line.
        last_step: step to stop at; None for the whole run.
    """
    checkpoints = Checkpoints(config.output, strategy.ranks, config.checkpoint)
    run = Run(config, asked, strategy, log, checkpoints, plan, last_step)
    run.loaded_from = checkpoints.newest_valid(run.log.warn)
    run.is_new = run.loaded_from is None
    if run.is_new and config.branch_from is not None:
        run.loaded_from = checkpoints.valid(trunk_checkpoint(config.branch_from))
    has_final = strategy.ranks.gather((config.output / "final" / SEAL_FILE).exists())[0]
    if run.loaded_from:
        run.saved = load_saved(run.loaded_from)
        _resume(run, has_final)
    step = run.state.step
    log.set_position(step, run.state.tokens)
    run.is_complete = step >= run.plan.total_steps and has_final
    if not run.is_complete:
        refuse_crash_loop(config.output, step, strategy.ranks)
    if config.hub.repository is not None:
        from pretrain.training.background_jobs import resume_publishing

        resume_publishing(config, log)
    return run


def _resume(run: Run, has_final: bool) -> None:
    """Continues from the checkpoint, or from one before the final decay if the budget was raised afterwards."""
    from pretrain.training.continued_plan import describe_continuation, no_stable_checkpoint

    continuation = _restore_state(run, is_finished=has_final)
    stable = None
    if continuation.stable_until is not None:
        _fetch_earlier(run, continuation.stable_until)
        stable = run.checkpoints.newest_valid(run.log.warn, at_most=continuation.stable_until)
        if stable is None:
            raise no_stable_checkpoint(run.saved.contents["plan"])
    if has_final and (stable or run.plan.total_steps > run.saved.contents["plan"]["total_steps"]):
        _keep_final_of_shorter_run(run)
    if stable:
        run.strategy.ranks.print(f"resuming from {stable.name}, the last checkpoint before the learning-rate decay")
        run.checkpoints.discard_after(step_of(stable))
        run.loaded_from = stable
        run.saved = load_saved(stable)
        continuation = _restore_state(run, is_finished=has_final)
    run.continues = describe_continuation(run.plan, run.state, continuation.changes, run.loaded_from)


def _keep_final_of_shorter_run(run: Run) -> None:
    """Renames final/. Otherwise, it would count as this run's after a kill before the export."""
    final = run.config.output / "final"
    with run.strategy.ranks.together(SaveError):
        if run.strategy.ranks.is_main:
            name = f"final-{run.loaded_from.name}"
            kept = len(list(final.parent.glob(f"{name}*")))  # the run may have ended at this step before
            final.rename(final.with_name(f"{name}-{kept + 1}" if kept else name))


def _restore_state(run: Run, *, is_finished: bool = False, rolls_back: bool = False) -> "Continuation":
    """Sets the run's state and plan from the recipe and `run.saved`."""
    from pretrain.training.continued_plan import continue_from

    asked = run.command_line
    if rolls_back:  # possibly to before a change of the recipe that was accepted at an earlier start
        asked = replace(asked, overridden=asked.overridden | run.whole_plan.identity.keys())
    continuation = continue_from(
        run.config,
        run.recipe_plan,
        asked,
        run.loaded_from,
        run.saved.contents,
        rollbacks=_recorded_rollbacks(run),
        begins_branch=run.is_new,
        is_finished=is_finished,
    )
    run.state = continuation.state
    run.whole_plan = continuation.plan
    run.replan()
    return continuation


def _recorded_rollbacks(run: Run) -> list[dict[str, Any]]:
    """Returns the rollbacks that the main rank reads. Raises InputError on all ranks if its file is damaged."""
    problems = Problems()
    recorded = problems.attempt(recorded_rollbacks, run.config.output)
    problems, recorded = run.strategy.ranks.gather((problems, recorded))[0]
    problems.stop_if_any()
    return recorded


def _fetch_earlier(run: Run, at_most: int) -> None:
    """Fetches an earlier checkpoint from the mirror, if there is a mirror."""
    if run.config.checkpoint.mirror is None:
        return
    from pretrain.checkpoint.mirror_fetch import fetch_earlier

    run.checkpoints.wait()
    fetch_earlier(run.config.output, run.config.checkpoint, run.strategy.ranks, at_most, run.checkpoints.beat)


def load_checkpoint(run: Run) -> None:
    """Loads the checkpoint, if any, into the model, optimizer, weight average and expert counters."""
    strategy = run.strategy
    state = run.state
    saved = run.saved
    if run.built.experts:
        run.built.experts.load(state.expert_counts)
    if not saved:
        return
    from pretrain.training.continued_plan import refuse_other_terms

    names = PublishedNames(strategy.causal_lm.config)
    refuse_other_terms(strategy.term_tensors().shapes, saved.loss_terms.shapes())
    model = JoinedTensors(saved.model, names)
    strategy.load(ChainMap(saved.loss_terms, model) if saved.loss_terms else model, saved.optimizer)
    strategy.load_state(saved.contents["strategy"])
    settings = run.config.averaging
    total_steps = run.plan.total_steps
    if settings.kind != "none" and can_continue(settings, state.average, total_steps):
        strategy.load_average(saved.average)
        return
    # The saved average can't be continued.
    state.average = None
    strategy.average = None
    if settings.kind != "none" and state.step > averages_after(settings, total_steps):
        message = f"averaging: the checkpoint contains no {settings.kind} average; starting a new one from its weights"
        run.log.warn(message, step=state.step)


def roll_back(run: Run, finding: Finding) -> None:
    """Rolls back to a checkpoint before the bad steps, then skips their data or halves the learning rate.

    Raises NumericStopError if the recipe doesn't allow another rollback or there is no earlier checkpoint.
    """
    with run.pausing("rolling back"):
        _restore_earlier(run, finding)
        run.request = max([run.request, *(report.request for report in run.consensus.settle())])
        run.guard = new_guard(run)
    run.logged_step = run.state.step


def _restore_earlier(run: Run, finding: Finding) -> None:
    from pretrain.training.continued_plan import rollback_entry

    guard = run.config.guard
    ranks = run.strategy.ranks
    earlier_rollbacks = run.state.rollbacks
    if not finding.roll_back or guard.on_spike == "off" or len(earlier_rollbacks) >= guard.max_rollbacks:
        raise NumericStopError(f"{finding.message} ({len(earlier_rollbacks)} earlier rollbacks)")
    first, last = finding.roll_back
    skips = guard.on_spike == "skip_data"
    # Skipped ranges refer to the current data, so don't roll back to before a change of data.
    origin = run.whole_plan.batches.origin if skips else None
    at_least = origin.step if origin is not None else 0
    distant = max(first - 1 - guard.rollback_steps, at_least)
    _fetch_earlier(run, distant)
    target = run.checkpoints.newest_valid(ranks.print, at_most=distant)
    target = target or run.checkpoints.newest_valid(ranks.print, at_most=first - 1)
    if target is None or step_of(target) < at_least:
        since = f" since the data changed at step {at_least:,}" if at_least else ""
        raise NumericStopError(f"{finding.message}; there is no earlier checkpoint to roll back to{since}")
    run.loaded_from = target
    run.saved = load_saved(target, run.watch.beat)
    run.is_new = False
    to_step = RunState(**run.saved.contents["state"]).step
    rollback = {
        "to_step": to_step,
        **rollback_entry(run.whole_plan, run.plan, run.state, (first, last), skips=skips),
        "reason": finding.message,
    }
    # Before recording the rollback. If the run is killed in between, it repeats these steps and rolls back again. In
    # the opposite order, it could resume from a checkpoint after the data to skip.
    run.checkpoints.discard_after(to_step)
    if ranks.is_main:
        record_rollbacks(run.config.output, [*earlier_rollbacks, rollback])
    ranks.barrier()  # until the main rank has written the record
    _restore_state(run, rolls_back=True)
    load_checkpoint(run)
    change = f"skipping the data of steps {first:,} to {last:,}" if skips else "halving the learning rate"
    run.log.write("rollback", step=run.state.step, **rollback, change=change)
