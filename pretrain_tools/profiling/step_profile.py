"""Profiles several steps during training: train.py --profile."""

from pathlib import Path

from pretrain.errors import InputError, one_line
from pretrain.runs.run_folder import PROFILE_FOLDER
from pretrain.training.prefetch import ReadAhead
from pretrain.training.run import Run
from pretrain_tools.profiling.causes import Evidence, RankSteps, find_causes
from pretrain_tools.profiling.recording import Recording
from pretrain_tools.profiling.report import verdict_of, write_profile
from pretrain_tools.profiling.trace_events import StepRecord

STEPS_OF_BLOCK = 5
"""Steps per block. A large model's step has 100,000 events, which are about 30 MB as JSON."""
WARM_UP_STEPS = 5
"""Number of steps to skip after the start, because they include compilation and the optimizer's initialization."""
MOST_STEPS = 100
"""Maximum number of profiled steps."""


def refuse_profile(steps: int, first_step: int, total_steps: int) -> None:
    """Raises InputError if --profile exceeds MOST_STEPS or the run's remaining steps."""
    if not 1 <= steps <= MOST_STEPS:
        raise InputError(f"--profile: must be from 1 to {MOST_STEPS} steps, got {steps}")
    begins_at = first_step + WARM_UP_STEPS
    left = max(0, total_steps - begins_at - 1)
    if steps > left:
        remedy = f"use {left} or fewer" if left else "omit --profile"
        raise InputError(
            f"--profile: got {steps} steps, but profiling starts at step {begins_at + 2:,} and only {left} of "
            f"{total_steps:,} steps are left; {remedy}"
        )


class StepProfile:
    """Profiles several steps once. All ranks must call its methods after the same steps.

    Args:
        steps: number of steps to profile. An additional step warms up the profiler.
    """

    def __init__(self, run: Run, read_ahead: ReadAhead, steps: int):
        self.run = run
        self.read_ahead = read_ahead
        self.strategy = run.strategy
        self.log = run.log
        self._steps = steps
        self._begins_at: int | None = run.state.step + WARM_UP_STEPS
        """Step after which the recording begins; None once it has ended."""
        self._recording: Recording | None = None

    def after_step(self) -> None:
        """Starts, continues or ends the profile. Called between steps."""
        if self._recording is not None:
            self._go_on()
        elif self._begins_at == self.run.state.step:
            self._begin()

    @property
    def folder(self) -> Path:
        """Output folder, named after the first profiled step."""
        return self.run.config.output / PROFILE_FOLDER / f"step-{self._begins_at + 2:08d}"

    def _begin(self) -> None:
        step = self.run.state.step
        self.log.say(f"profiling {self._steps} steps, starting with step {step + 2:,}; training continues")
        self._recording = Recording(self.run, self.read_ahead, self.folder)
        self._next = step + 1
        self._recording.begin_block(step + 1)

    def _go_on(self) -> None:
        step = self.run.state.step
        if step != self._next:  # the run rolled back
            self._recording.abandon()
            return self._finish({"problem": f"canceled: the run rolled back to step {step:,} during the profile"})
        self._next = step + 1
        recorded = step - self._begins_at - 1  # without the warm-up step
        is_last = recorded == self._steps
        if recorded % STEPS_OF_BLOCK and not is_last:
            return self._recording.end_step(following=step + 1)
        self._recording.end_step(following=None)
        with self.run.pausing("the profile"):
            self._recording.end_block(is_first=recorded == 0, is_last=is_last)
            # Reading a trace takes seconds. Without a heartbeat, the watchdog would report a hang.
            self.run.watch.beat()
            if not is_last:
                return self._recording.begin_block(step + 1)
            self._recording.close()
            summaries = self.strategy.ranks.gather(self._recording.summary())
            return self._finish(self._report(summaries) if self.strategy.ranks.is_main else {})

    def _report(self, summaries: list[dict]) -> dict:
        """Writes the report and returns the verdict or the problem. A failure here doesn't end the run."""
        config = self.run.config
        plan = self.run.plan
        last_step = self._begins_at + self._steps
        # If steps are missing, medians aren't comparable across ranks.
        if short := [summary for summary in summaries if len(summary["steps"]) < self._steps]:
            return {"problem": f"cannot be read: {'; '.join(short[0]['problems']) or 'steps are missing'}"}
        try:
            evidence = Evidence(
                [RankSteps(summary, [StepRecord(**step) for step in summary["steps"]]) for summary in summaries],
                plan.micro_steps(last_step),
                self.strategy.device.type == "cuda",
                compile_mode=config.compile,
            )
            causes = find_causes(evidence)
            text = write_profile(self.folder, config.output, evidence, causes)
        except Exception as error:  # a failed report must not end the run
            return {"problem": f"report failed: {one_line(error)}"}
        self.log.say(text)
        return {"verdict": verdict_of(evidence, causes), "causes": [cause.name for cause in causes]}

    def _finish(self, outcome: dict) -> None:
        if self.strategy.ranks.is_main:
            if "problem" in outcome:
                self.log.warn(f"profile {outcome['problem']}", step=self.run.state.step)
            else:
                self.log.write("profile", step=self.run.state.step, path=str(self.folder), **outcome)
        self._recording = None
        self._begins_at = None
