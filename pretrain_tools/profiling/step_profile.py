"""Profiles several steps of a run while it trains, on request of --profile or `runs.py profile`."""

from pathlib import Path

from pretrain.checkpoint.run_state import Request
from pretrain.errors import InputError, one_line
from pretrain.runs.run_folder import PROFILE_FOLDER
from pretrain.training.prefetch import ReadAhead
from pretrain.training.run import Run
from pretrain_tools.profiling.causes import Evidence, RankSteps, find_causes
from pretrain_tools.profiling.expected_step import expected_step
from pretrain_tools.profiling.recording import Recording
from pretrain_tools.profiling.report import verdict_of, write_json, write_profile
from pretrain_tools.profiling.trace_events import StepRecord

STEPS_OF_BLOCK = 5
"""Steps whose events are in memory together: a step of a large model has 100,000, about 30 MB of trace as JSON."""
WARM_UP_STEPS = 5
"""Steps after the start that are not profiled, because they compile and create the optimizer's state."""
USUAL_STEPS = 20
"""Profiled steps unless the request gives a number."""
MOST_STEPS = 100
"""Maximum number of steps that a request may ask for."""


def profile_problem(steps: int, begins_at: int, total_steps: int) -> str | None:
    """Returns the reason why `steps` steps cannot be profiled; None if they can.

    The first step after `begins_at` only warms up the profiler and does not count.
    """
    if not isinstance(steps, int) or not 1 <= steps <= MOST_STEPS:
        return f"{steps!r} steps cannot be profiled; give 1 to {MOST_STEPS}"
    left = max(0, total_steps - begins_at - 1)
    if steps <= left:
        return None
    remedy = f"give {left} or fewer" if left else "nothing is left to profile"
    return (
        f"{steps} steps from step {begins_at + 2:,} on are more than the {left} that the run of {total_steps:,} has; "
        f"{remedy}"
    )


def refuse_profile(steps: int | None, first_step: int, total_steps: int) -> None:
    """Raises InputError if --profile asks for more steps than the run has left."""
    if steps is not None and (problem := profile_problem(steps, first_step + WARM_UP_STEPS, total_steps)):
        raise InputError(f"--profile: {problem}")


class StepProfile:
    """Plans, takes and reports profiles. All ranks must call its methods at the same steps.

    Args:
        steps: number of steps from --profile, checked by `refuse_profile`; None: profile only on request of runs.py.
        first_step: step at which this process started to train.
    """

    def __init__(self, run: Run, read_ahead: ReadAhead, steps: int | None, first_step: int):
        self.run = run
        self.read_ahead = read_ahead
        self.strategy = run.strategy
        self.log = run.log
        self._warm_at = first_step + WARM_UP_STEPS
        self._begins_at: int | None = None
        self._request_id: str | None = None
        self._steps = 0
        self._recording: Recording | None = None
        if steps is not None:
            self._plan(steps)

    def _plan(self, steps: int) -> str | None:
        """Plans a profile; returns the reason if that is not possible."""
        if self._begins_at is not None:
            return f"a profile is being taken already, up to step {self._begins_at + 1 + self._steps:,}; ask after it"
        begins_at = max(self._warm_at, self.run.state.step)
        problem = profile_problem(steps, begins_at, self.run.plan.total_steps)
        if problem is None:
            self._begins_at = begins_at
            self._steps = steps
        return problem

    def after_step(self) -> None:
        """Begins, continues or ends a profile between two steps; does nothing if none is requested."""
        if self._recording is not None:
            self._go_on()
        if self.run.request == Request.PROFILE:
            self._take_request()
        if self._begins_at == self.run.state.step and self._recording is None:
            self._begin()

    def _take_request(self) -> None:
        # Only rank 0 has read the request, and all ranks must plan the same steps.
        asked = self.strategy.ranks.gather(self.run.control.asked)[0]
        self.run.refusal = self._plan(asked.get("steps", USUAL_STEPS))
        if self.run.refusal is None:
            self._request_id = asked["id"]

    @property
    def folder(self) -> Path:
        """Output folder, named after the first profiled step."""
        return self.run.config.output / PROFILE_FOLDER / f"step-{self._begins_at + 2:08d}"

    def _begin(self) -> None:
        step = self.run.state.step
        self.log.say(f"profiling {self._steps} steps from step {step + 2:,} on; training goes on")
        self._recording = Recording(self.run, self.read_ahead, self.folder)
        self._next = step + 1
        self._recording.begin_block(step + 1)

    def _go_on(self) -> None:
        step = self.run.state.step
        if step != self._next:  # the run rolled back
            self._recording.abandon()
            return self._finish({"problem": f"given up: the run went back to step {step:,} in the profiled steps"})
        self._next = step + 1
        recorded = step - self._begins_at - 1  # without the first, which warms the profiler up
        is_last = recorded == self._steps
        if recorded % STEPS_OF_BLOCK and not is_last:
            return self._recording.end_step(following=step + 1)
        self._recording.end_step(following=None)
        with self.run.pausing("the profile"):
            self._recording.end_block(is_first=recorded == 0, is_last=is_last)
            # Reading a trace takes seconds; without a heartbeat the watchdog would report a hang.
            self.run.watch.beat()
            if not is_last:
                return self._recording.begin_block(step + 1)
            self._recording.close()
            summaries = self.strategy.ranks.gather(self._recording.summary())
            return self._finish(self._report(summaries) if self.strategy.ranks.is_main else {})

    def _report(self, summaries: list[dict]) -> dict:
        """Writes the report and returns the verdict, or the problem; no failure here ends the run."""
        config = self.run.config
        plan = self.run.plan
        last_step = self._begins_at + self._steps
        stage = plan.stage(last_step)
        batches = plan.batches
        width = batches.readers[batches.folders[0]].manifest.bytes_per_id
        sequences = stage.sequences_per_micro_batch * self.strategy.micro_batches_per_call
        # If a rank lacks steps, its median would be over other steps than those of the other ranks.
        if short := [summary for summary in summaries if len(summary["steps"]) < self._steps]:
            return {"problem": f"cannot be read: {'; '.join(short[0]['problems']) or 'steps are missing'}"}
        try:
            expected = expected_step(config, plan, self.strategy, last_step, self.run.peak_flops)
            evidence = Evidence(
                [RankSteps(summary, [StepRecord(**step) for step in summary["steps"]]) for summary in summaries],
                plan.micro_steps(last_step),
                self.strategy.device.type == "cuda",
                expected,
                read_bytes=sequences * (stage.window.sequence_length + 1) * width,
                compile_mode=config.compile,
            )
            causes = find_causes(evidence)
            text = write_profile(self.folder, config.output, evidence, causes, request_id=self._request_id)
        except Exception as error:  # a failed report must not end the run
            return {"problem": f"no report: {one_line(error)}"}
        self.log.say(text)
        return {"verdict": verdict_of(evidence, causes), "causes": [cause.name for cause in causes]}

    def _finish(self, outcome: dict) -> None:
        folder = self.folder
        if self.strategy.ranks.is_main:
            if "problem" in outcome:
                self.log.write("warning", step=self.run.state.step, message=f"profile {outcome['problem']}")
                self._try_to_answer(folder, outcome)
            else:
                self.log.write("profile", step=self.run.state.step, path=str(folder), **outcome)
        self._recording = self._begins_at = self._request_id = None

    def _try_to_answer(self, folder: Path, outcome: dict) -> None:
        """Writes the problem to report.json, for the `runs.py profile` that waits for it."""
        try:
            write_json(folder, {"request": self._request_id, **outcome})
        except OSError as error:
            self.log.say(f"{folder} cannot be written: {error}")
