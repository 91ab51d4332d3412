"""runs.py sweep: trains a recipe under every combination of settings, or those that a search picks, and compares.

FOLDER/plan.json      what was asked for, written before anything starts; the same command continues it
FOLDER/trials.json    the settings that a search has picked so far
and the runs, see small_runs
"""

import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence

from pretrain.errors import InputError
from pretrain.files import write_durably
from pretrain.processes import folder_lock
from pretrain.units import counted, duration_text
from pretrain_tools.experiments.small_runs import (
    Progress,
    SmallRun,
    device_slots,
    failure_text,
    read_outcome,
    train_runs,
)
from pretrain_tools.experiments.sweep_plan import (
    SweepPoint,
    SweepRequest,
    cautions_of_sweep,
    check_points,
    make_point,
    name_problems,
    request_problems,
    seal_plan,
)
from pretrain_tools.experiments.sweep_report import PointResult, RunResult, report_sweep

LOCK_OF_SWEEP = ".sweep.lock"
TRIALS_FILE = "trials.json"


def run_sweep(
    request: SweepRequest,
    parallel: int | None,
    report: Callable[[SweepRequest, Sequence[PointResult]], int] = report_sweep,
) -> int:
    """Trains what is left of a sweep and reports all of it; returns the exit status: 1 if no setting was finished.

    Raises InputError with everything that cannot work, before anything starts.
    """
    problems = request_problems(request)
    problems.stop_if_any()
    grid = request.grid  # of a search its corners: what works there is taken to work between them
    checked = problems.attempt(check_points, request, grid)
    problems += name_problems(request, grid)
    problems.stop_if_any()
    request.output.mkdir(parents=True, exist_ok=True)
    with folder_lock(request.output / LOCK_OF_SWEEP):
        seal_plan(request, [config for _, config, _ in checked], [plan for _, _, plan in checked])
        slots = device_slots(parallel)
        sweep = (
            Search(request, checked[0])
            if request.search
            else Grid(request, [make_point(request, *c) for c in checked])
        )
        for caution in cautions_of_sweep(request, sweep.planned, checked[-1][2].parameters):
            print(f"warning: {caution}", file=sys.stderr)
        runs = counted(sweep.most_runs, "run")
        print(f"{request.output}: {runs}, {counted(len(slots), 'run')} at a time", file=sys.stderr, flush=True)
        sweep.progress = Progress(sweep.runs, sweep.work)
        if status := train_runs(sweep.runs, slots, sweep.next_run, sweep.ended, sweep.progress):
            print(f"interrupted; give the same command to continue {request.output}", file=sys.stderr)
            return status
        return report(request, sweep.results())


class Sweep:
    """The order of the runs, decided from their folders alone: after a kill it is the same."""

    progress: Progress

    def __init__(self, request: SweepRequest, points: Sequence[SweepPoint]):
        self.request, self.planned = request, list(points)
        self.runs = {run.name: run for point in points for run in point.runs}
        self.failures: dict[str, str] = {}
        """{name: why it failed now}; the same command tries it again."""
        self._ended = 0

    @property
    def most_runs(self) -> int:
        """Runs that are begun."""
        return len(self.runs)

    @property
    def work(self) -> float:
        """FLOPs of all that is to be trained."""
        return sum(run.flops for run in self.runs.values())

    def ended(self, run: SmallRun, status: int | None) -> None:
        """Says what became of a run."""
        outcome = read_outcome(run)
        self._ended += 1
        took = f" after {duration_text(outcome.seconds)}" if outcome.seconds else ""
        if outcome.state == "finished":
            text = f"validation loss {outcome.loss:.4f}{took}"
        elif outcome.state == "diverged":
            text = f"diverged at step {outcome.step:,}: {outcome.reason.splitlines()[0]}"
        elif self.is_reached(run):
            text = f"validation loss {outcome.losses.get(outcome.step, math.nan):.4f} at step {outcome.step:,}{took}"
        else:
            self.failures[run.name] = failure_text(run, status)
            text = (
                self.failures[run.name] if outcome.was_stopped else f"FAILED: {self.failures[run.name]}; see {run.log}"
            )
        left = self.progress.left_text()
        print(f"{run.name}: {text}{f' · {left}' if left else ''}", file=sys.stderr, flush=True)

    def is_reached(self, run: SmallRun) -> bool:
        """Whether a run is where it was to get to."""
        return read_outcome(run).has_reached(None)

    def first_open(
        self, runs: Sequence[SmallRun], pause_at: dict[str, int | None], active: set[str]
    ) -> SmallRun | None:
        """The first that is neither done, nor being trained, nor has failed."""
        for run in runs:
            open_now = run.name not in active and run.name not in self.failures
            if open_now and not read_outcome(run).has_reached(pause_at.get(run.name)):
                return run
        return None

    def results(self) -> list[PointResult]:
        """Of every point that was planned."""
        return [
            PointResult(
                point.settings,
                point.tokens,
                [RunResult(run, read_outcome(run), self.failures.get(run.name)) for run in point.runs],
            )
            for point in self.planned
        ]


class Grid(Sweep):
    """Every point; with halving the better half goes on from each rung."""

    def __init__(self, request: SweepRequest, points: Sequence[SweepPoint]):
        super().__init__(request, points)
        self.alive, self.rung = list(points), 0

    @property
    def work(self) -> float:
        total, before, alive = 0.0, 0.0, len(self.planned)
        mean = statistics.fmean(run.flops for run in self.runs.values()) * self.request.seeds
        for share in self.request.rungs:
            total += alive * (share - before) * mean
            before, alive = share, math.ceil(alive / 2)
        return total

    def pause_at(self, run: SmallRun) -> int | None:
        """The step of the rung; None: to the end."""
        share = self.request.rungs[self.rung]
        return None if share == 1.0 else max(1, round(share * run.total_steps))

    def is_reached(self, run: SmallRun) -> bool:
        return read_outcome(run).has_reached(self.pause_at(run))

    def next_run(self, active: set[str]) -> tuple[SmallRun, int | None] | None:
        """See `train_runs`; a rung ends when all its runs have."""
        while True:
            runs = [run for point in self.alive for run in point.runs]
            pause_at = {run.name: self.pause_at(run) for run in runs}
            if run := self.first_open(runs, pause_at, active):
                return run, pause_at[run.name]
            if active or self.rung == len(self.request.rungs) - 1:
                return None
            self._halve()

    def _halve(self) -> None:
        """The mean loss over the seeds decides, at the same share of each run's steps."""
        losses = [statistics.fmean(self._loss_at_rung(run) for run in point.runs) for point in self.alive]
        order = sorted(range(len(self.alive)), key=lambda number: losses[number])
        best = sorted(order[: math.ceil(len(order) / 2)])
        if len(best) < len(self.alive):
            share = self.request.rungs[self.rung]
            print(
                f"{share:.0%} of the budget: {len(best)} of {len(order)} settings go on", file=sys.stderr, flush=True
            )
        self.alive, self.rung = [self.alive[number] for number in best], self.rung + 1

    def _loss_at_rung(self, run: SmallRun) -> float:
        outcome = read_outcome(run)
        if outcome.state == "diverged" or run.name in self.failures:
            return math.inf
        return outcome.losses.get(self.pause_at(run), math.inf)


class Search(Sweep):
    """Settings picked by optuna's TPE sampler from ranges and lists, each from what has finished before it.

    The sampler has no state of its own: it is made anew for each trial, from the trials' folders and the trial's
    number, so a killed search goes on as it would have.
    """

    def __init__(self, request: SweepRequest, example: tuple):
        super().__init__(request, [])
        self._example = example
        for settings in self._recorded():
            self._add(settings)

    def _recorded(self) -> list[dict[str, str]]:
        path = self.request.output / TRIALS_FILE
        return json.loads(path.read_text()) if path.is_file() else []

    def _add(self, settings: dict[str, str]) -> None:
        (checked,) = check_points(self.request, [settings])
        point = make_point(self.request, *checked)
        self.planned.append(point)
        self.runs |= {run.name: run for run in point.runs}

    @property
    def most_runs(self) -> int:
        return self.request.search * self.request.seeds

    @property
    def work(self) -> float:
        plan = self._example[2]
        return self.most_runs * plan.total_flops

    def next_run(self, active: set[str]) -> tuple[SmallRun, int | None] | None:
        """See `train_runs`."""
        while True:
            if run := self.first_open(list(self.runs.values()), {}, active):
                return run, None
            if len(self.planned) >= self.request.search:
                return None
            self._pick(active)

    def _pick(self, active: set[str]) -> None:
        settings = pick_settings(self.request, self.results(), active)
        recorded = [*self._recorded(), settings]
        try:
            self._add(settings)
        except InputError as error:
            raise InputError(f"trial {len(recorded)}, {settings}: {error}; narrow the range") from None
        write_durably(self.request.output / TRIALS_FILE, json.dumps(recorded, indent=1))
        self.progress.runs = self.runs
        for run in self.planned[-1].runs:
            self.progress.shares[run.name] = self.progress.share(run, read_outcome(run).step)


def pick_settings(request: SweepRequest, results: Sequence[PointResult], active: set[str]) -> dict[str, str]:
    """The settings of the next trial, as they would be written, none of them tried before."""
    import optuna
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    distributions = {}
    for axis in request.axes:
        if not axis.is_range:
            distributions[axis.path] = CategoricalDistribution(axis.values)
        elif axis.is_whole:
            distributions[axis.path] = IntDistribution(*map(int, axis.ends))
        else:
            low, high = map(float, axis.ends)
            distributions[axis.path] = FloatDistribution(low, high, log=low > 0)
    sampler = optuna.samplers.TPESampler(seed=len(results), n_startup_trials=4, constant_liar=True)
    study = optuna.create_study(sampler=sampler)
    for result in results:
        running = any(one.run.name in active for one in result.runs)
        params = {
            axis.path: distributions[axis.path].to_internal_repr(value_of(axis, result.settings))
            if axis.is_range
            else result.settings[axis.path]
            for axis in request.axes
        }
        state = TrialState.RUNNING if running else TrialState.COMPLETE
        value = None if running else result.mean_loss
        study.add_trial(create_trial(state=state, params=params, distributions=distributions, value=value))
    tried = [result.settings for result in results]
    settings = {}
    for _ in range(100):
        trial = study.ask(distributions)
        settings = {
            path: f"{value:.3g}" if isinstance(value, float) else str(value) for path, value in trial.params.items()
        }
        if settings not in tried:
            break
    return settings


def value_of(axis, settings: dict[str, str]) -> float:
    """A range's value within its ends, whatever rounding for its name has made of it."""
    low, high = axis.ends
    value = float(settings[axis.path])
    return int(value) if axis.is_whole else min(max(value, float(low)), float(high))
