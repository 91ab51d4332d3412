"""Where a run continues: resuming, saving, rolling back, annealing early."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pretrain.checkpoint.checkpoints import Checkpoints, SavedRun, SaveError, load_saved
from pretrain.checkpoint.mirror_fetch import fetch_earlier
from pretrain.checkpoint.run_state import NumericStopError, RunState, record_rollbacks, recorded_rollbacks
from pretrain.config import RunConfig
from pretrain.errors import InputError, Problems
from pretrain.files import SEAL_FILE
from pretrain.model.published_names import JoinedTensors, PublishedNames
from pretrain.optim.averaging import average_after_step, averages_after, can_continue
from pretrain.parallel.strategy import Strategy
from pretrain.recipe import CommandLine
from pretrain.runs.addresses import trunk_checkpoint
from pretrain.runs.run_folder import checkpoint_name, step_of
from pretrain.training.attempt import refuse_crash_loop
from pretrain.training.background_jobs import publish_beside, publish_cut_short
from pretrain.training.continued_plan import (
    FoundCheckpoint,
    Standing,
    no_stable_checkpoint,
    rollback_entry,
    stand,
    standing_in_words,
    standing_to_save,
)
from pretrain.training.guard import Finding
from pretrain.training.metrics import Metrics
from pretrain.training.run_plan import RunPlan


class Continuation:
    """The state of a run: where it resumes, what it saves. All ranks call together.

    Args:
        plan: of the recipe alone, as for a new run.
        asked: the command line, with settings that may differ from the checkpoint's.
        steps: end after so many; None trains to the end.

    Raises InputError if the checkpoint has other settings, NoValidCheckpointError if all are damaged, and
    CrashLoopError if the run has failed here too often.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: RunPlan,
        asked: CommandLine,
        strategy: Strategy,
        metrics: Metrics,
        steps: int | None = None,
    ):
        self.config, self.strategy, self.metrics = config, strategy, metrics
        self.asked, self.overridden, self.steps = asked, asked.overridden, steps
        self.recipe_plan = plan
        """Of the recipe alone."""
        self.plan = plan
        """Of the whole run, without rollbacks or annealing."""
        self.checkpoints = Checkpoints(config.output, strategy.ranks, config.checkpoint)
        self.found: Path | None = self.checkpoints.newest_valid(log=self._warn)
        self.is_new = self.found is None
        """Whether nothing was trained in this folder before."""
        if self.is_new and config.branch_from is not None:
            self.found = self.checkpoints.valid(trunk_checkpoint(config.branch_from))
        self.saved: SavedRun | None = load_saved(self.found) if self.found else None
        self.state = RunState()
        self.standing = ""
        """How the run goes on from its checkpoint, in words."""
        has_final = strategy.ranks.gather((config.output / "final" / SEAL_FILE).exists())[0]
        if self.saved:
            self._resume(has_final)
        metrics.stands_at(self.state.step, self.state.tokens)
        self.is_done: bool = self.state.step >= self.run.total_steps and has_final
        pause_at = config.checkpoint.pause_at
        if not self.is_done and pause_at is not None and self.state.step >= pause_at:
            raise InputError(
                f"checkpoint.pause_at: {pause_at:,}, but the run is at step {self.state.step:,}; give a later step, "
                "or null, to continue"
            )
        if not self.is_done:
            refuse_crash_loop(config.output, self.state.step, strategy.ranks)
        publish_cut_short(config, metrics)

    def _resume(self, has_final: bool) -> None:
        """Goes on from the checkpoint found, or from an earlier one if the budget was raised after the final decay."""
        config, ranks = self.config, self.strategy.ranks
        standing = self._stand(is_finished=has_final)
        if standing.stable_until is not None:
            self._fetch_earlier(standing.stable_until)
            stable = self.checkpoints.newest_valid(self._warn, at_most=standing.stable_until)
            if stable is None:
                raise no_stable_checkpoint(self.saved.contents["plan"])
            final = config.output / "final"
            with ranks.together(SaveError):
                if ranks.is_main and final.exists():
                    final.rename(final.with_name(f"final-{self.found.name}"))
            ranks.print(f"resuming from {stable.name}, the last checkpoint before the learning-rate decay")
            self.checkpoints.discard_after(step_of(stable))
            self.found, self.saved = stable, load_saved(stable)
            standing = self._stand(is_finished=has_final)
        self.standing = standing_in_words(self.run, self.state, standing.changes, self.found)

    def _stand(self, *, is_finished: bool = False) -> Standing:
        """Takes state and plan from the checkpoint in `saved` and from the recipe."""
        recorded = self._recorded_rollbacks()
        standing = stand(
            self.config,
            self.recipe_plan,
            self.asked,
            FoundCheckpoint(self.found, self.saved.contents),
            rollbacks=recorded,
            begins_branch=self.is_new,
            is_finished=is_finished,
        )
        self.plan, self.state = standing.plan, standing.state
        return standing

    def _warn(self, message: str) -> None:
        self.metrics.write("warning", message=message)

    def _recorded_rollbacks(self) -> list[dict[str, Any]]:
        """Those that the main rank reads. Raises InputError on all ranks if the file is damaged."""
        problems = Problems()
        recorded = problems.attempt(recorded_rollbacks, self.config.output) if self.strategy.ranks.is_main else None
        problems, recorded = self.strategy.ranks.gather((problems, recorded))[0]
        problems.stop_if_any()
        return recorded

    def _fetch_earlier(self, at_most: int, beat: Callable[[], None] = lambda: None) -> None:
        """A run that came from its mirror has one checkpoint: an earlier one is there."""
        self.checkpoints.wait(beat)
        fetch_earlier(self.config.output, self.config.checkpoint, self.strategy.ranks, at_most, beat)

    @property
    def run(self) -> RunPlan:
        """The plan in effect: without skipped data, and with the requested end."""
        run = self.plan.leaving_out(self.state.left_out)
        return run.annealing(self.state.anneal_from, self.state.anneal_steps).cut(self.steps)

    @property
    def newest(self) -> Path:
        """The checkpoint that was written last."""
        return self.checkpoints.folder / checkpoint_name(self.checkpoints.last_step)

    @property
    def is_saved(self) -> bool:
        """Whether this step's checkpoint is written; the same on all ranks once `finish_saving` has returned."""
        return self.checkpoints.last_step == self.state.step

    @property
    def guard_state(self) -> dict[str, Any] | None:
        """The guard's state in the checkpoint that the run resumes from."""
        return self.saved.contents["guard"] if self.saved else None

    def load(self) -> None:
        """Loads the checkpoint into the model, the optimizer and the average."""
        if not self.saved:
            return
        names = PublishedNames.of(self.strategy.causal_lm.config)
        self.strategy.load(JoinedTensors(self.saved.model, names), self.saved.optimizer)
        self.strategy.load_state(self.saved.contents["strategy"])
        settings, state, total_steps = self.config.averaging, self.state, self.run.total_steps
        if settings.kind == "none" or not can_continue(settings, state.average, total_steps):
            state.average = self.strategy.average = None
            if settings.kind != "none" and state.step > averages_after(settings, total_steps):
                message = (
                    f"averaging: the checkpoint has no average of kind {settings.kind}; one begins from its weights"
                )
                self.metrics.write("warning", step=state.step, message=message)
            return
        self.strategy.load_average(self.saved.average)

    def step_taken(self, run: RunPlan) -> None:
        """After an update: counts the step, and takes its weights into their average if it is the step's turn."""
        settings, state = self.config.averaging, self.state
        state.step += 1
        state.tokens, state.validation_loss = run.tokens_before(state.step), None
        if settings.kind == "none" or state.step % settings.every_steps:
            return
        state.average, share = average_after_step(settings, state.average, state.step, run.total_steps)
        if state.average is None:
            self.strategy.average = None
        else:
            self.strategy.update_average(share)

    def save(self, guard_state: Mapping[str, Any], describe: Callable[[Path], None], beat: Callable[[], None]) -> None:
        """Starts saving a checkpoint of this step, if there is none.

        Args:
            describe: writes the rest of a HF model folder into the folder given.
            beat: called after every tensor.
        """
        if self.checkpoints.begun_step == self.state.step:
            return
        groups = {"model": self.strategy.model_tensors(), "optimizer": self.strategy.optimizer_tensors()}
        if self.state.average is not None:
            groups["average"] = self.strategy.average_tensors()
        contents = standing_to_save(self.asked.config, self.plan, self.run, self.state)
        contents |= {"strategy": self.strategy.state()}
        contents |= {"guard": guard_state, "validation_loss": self.state.validation_loss}
        self.checkpoints.save(self.state.step, contents, groups, describe, beat)
        self.report_saves()

    def finish_saving(self, beat: Callable[[], None], required: bool) -> None:
        """Waits for the save of this step; required: raises SaveError on all ranks if it failed."""
        self.checkpoints.wait(beat)
        self.report_saves()
        if required and not self.is_saved:
            raise SaveError(f"the checkpoint of step {self.state.step:,} could not be written: see train.log")

    def report_saves(self) -> None:
        """Logs the saves that have finished since the last call; ranks need not call in the same step."""
        while (save := self.checkpoints.finished()) is not None:
            if save.problem is not None:
                what = f"the checkpoint of step {save.step:,} was not saved: {save.problem}"
                what_now = "training continues; earlier checkpoints are unaffected"
                self.metrics.write("warning", step=save.step, message=f"{what}; {what_now}")
                continue
            figures = {"bytes": save.bytes, "seconds": save.seconds, "stall_seconds": save.stall_seconds}
            self.metrics.write("checkpoint", step=save.step, path=save.folder.name, **figures)
            milestones = self.config.checkpoint.milestones_every
            if self.config.hub.every == "milestones" and milestones and save.step % milestones == 0:
                publish_beside(self.config, save.step, self.metrics)

    def anneal(self, *, shorten: bool = False) -> RunPlan:
        """Starts the final decay now; returns the changed plan. shorten: halves what is left of it instead."""
        state, left = self.state, self.steps_of_annealing_left
        if shorten and left > 1:
            state.anneal_steps = state.step + left // 2 - state.anneal_from
        elif state.anneal_from is None and not shorten:
            self._anneal(self.steps_of_decay)
        return self.run

    @property
    def steps_of_annealing_left(self) -> int:
        """Steps left of a final decay that was asked for; 0 without one."""
        state = self.state
        return 0 if state.anneal_from is None else state.anneal_from + state.anneal_steps - state.step

    @property
    def steps_of_decay(self) -> float:
        """Steps that a final decay takes if it begins now."""
        return min(self.run.total_steps - self.state.step, self.config.optim.decay_fraction * self.state.step)

    @property
    def decays(self) -> bool:
        """Whether the final decay has begun: the schedule's own, or one that was asked for."""
        return self.state.anneal_from is not None or self.state.step >= self.run.schedule.decays_from

    def _anneal(self, steps: float) -> None:
        self.state.anneal_from, self.state.anneal_steps = self.state.step, max(1, round(steps))

    def go_back(self, finding: Finding, beat: Callable[[], None] = lambda: None) -> None:
        """Rolls back to a checkpoint before the finding, and changes the data or the rate from there.

        Raises NumericStopError if the recipe, the number of rollbacks or the lack of a checkpoint rules that out.
        """
        guard, state = self.config.guard, self.state
        if not finding.roll_back or guard.roll_back == "off" or len(state.rollbacks) >= guard.max_rollbacks:
            raise NumericStopError(f"{finding.message}; {len(state.rollbacks)} earlier rollbacks")
        first, last = finding.roll_back
        log = self.strategy.ranks.print
        skips = guard.roll_back == "skip_data"
        # What is skipped is counted in the samples of this data: a checkpoint from before has others.
        origin = self.plan.batches.origin if skips else None
        at_least = origin.step if origin is not None else 0
        self._fetch_earlier(max(first - 1 - guard.distance, at_least), beat)
        target = self.checkpoints.newest_valid(log, at_most=max(first - 1 - guard.distance, at_least), beat=beat)
        target = target or self.checkpoints.newest_valid(log, at_most=first - 1, beat=beat)
        if target is None or step_of(target) < at_least:
            since = f" since its data changed at step {at_least:,}" if at_least else ""
            raise NumericStopError(f"{finding.message}; there is no earlier checkpoint{since} to roll back to")
        self.found, self.saved = target, load_saved(target)
        self.is_new = False
        earlier = RunState(**self.saved.contents["state"])
        rollback = {
            "to_step": earlier.step,
            **rollback_entry(self.plan, self.run, state, (first, last), skips=skips),
            "reason": finding.message,
        }
        rollbacks = [*state.rollbacks, rollback]
        # In this order: if killed in between, the run gets here again by the same steps. In the other order it could
        # resume from a checkpoint after the data that it claims to skip.
        self.checkpoints.discard_after(earlier.step)
        if self.strategy.ranks.is_main:
            record_rollbacks(self.config.output, rollbacks)
        self.strategy.ranks.barrier()  # all read what the main rank has recorded
        self._stand()
        self.load()
        change = f"skipping the data of steps {first:,} to {last:,}" if skips else "halving the learning rate"
        self.metrics.write("rollback", step=state.step, **rollback, change=change)
