"""Profiles several steps during training: train.py --profile."""

from collections.abc import Iterator
from pathlib import Path

from pretrain.errors import InputError, one_line
from pretrain.runs.run_folder import PROFILE_FOLDER
from pretrain.training.prefetch import ReadAhead
from pretrain.training.run import Run
from pretrain_tools.profiling.causes import Evidence, RankSteps, find_causes
from pretrain_tools.profiling.recording import Recording
from pretrain_tools.profiling.report import verdict_of, write_profile

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
        self._steps = steps
        self._first = run.state.step + WARM_UP_STEPS + 2
        """First profiled step."""
        self._last = self._first + steps - 1
        self._progress = self._record()

    def after_step(self) -> None:
        """Starts, continues or ends the profile. Called between steps."""
        next(self._progress, None)

    @property
    def folder(self) -> Path:
        """Output folder, named after the first profiled step."""
        return self.run.config.output / PROFILE_FOLDER / f"step-{self._first:08d}"

    def _record(self) -> Iterator[None]:
        """Records the steps and writes the report. Each `yield` waits for the end of a step."""
        step = self._first - 2
        while self.run.state.step != step:
            yield
        self.run.log.say(f"profiling {self._steps} steps, starting with step {self._first:,}; training continues")
        recording = Recording(self.run, self.read_ahead, self.folder)
        recording.begin_block()
        warm_up = self._first - 1
        for end in (warm_up, *range(warm_up + STEPS_OF_BLOCK, self._last, STEPS_OF_BLOCK), self._last):
            while step < end:
                step += 1
                recording.begin_step(step)
                yield
                if self.run.state.step != step:
                    recording.abandon()
                    back_at = self.run.state.step
                    return self._warn(f"canceled: the run rolled back to step {back_at:,} during the profile")
                recording.end_step()
            with self.run.pausing("the profile"):
                recording.end_block(is_first=end == warm_up, is_last=end == self._last)
                # Reading a trace takes seconds. Without a heartbeat, the watchdog would report a hang.
                self.run.watch.beat()
                if end != self._last:
                    recording.begin_block()
                else:
                    recording.close()
                    self._report(self.run.strategy.ranks.gather(recording.summary()))

    def _report(self, ranks: list[RankSteps]) -> None:
        """Writes the report and logs its verdict. A failure here doesn't end the run."""
        if not self.run.strategy.ranks.is_main:
            return
        config = self.run.config
        # If steps are missing, medians aren't comparable across ranks.
        if short := [rank for rank in ranks if len(rank.steps) < self._steps]:
            return self._warn(f"cannot be read: {'; '.join(short[0].problems) or 'steps are missing'}")
        try:
            evidence = Evidence(
                ranks,
                self.run.plan.micro_steps(self._last - 1),
                self.run.strategy.device.type == "cuda",
                compile_mode=config.compile,
            )
            causes = find_causes(evidence)
            text = write_profile(self.folder, config.output, evidence, causes)
        except Exception as error:  # a failed report must not end the run
            return self._warn(f"report failed: {one_line(error)}")
        self.run.log.say(text)
        names = [cause.name for cause in causes]
        outcome = {"path": str(self.folder), "verdict": verdict_of(evidence, causes), "causes": names}
        self.run.log.write("profile", step=self.run.state.step, **outcome)

    def _warn(self, problem: str) -> None:
        if self.run.strategy.ranks.is_main:
            self.run.log.warn(f"profile {problem}", step=self.run.state.step)
