"""Trains a recipe with every combination of settings, or with settings chosen by a search (runs.py sweep).

FOLDER contains the runs (see small_runs), results.json, the best recipe and, for a search, trials.json: the settings
to vary, and those that it has chosen so far. The same command resumes a sweep.
"""

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pretrain.errors import InputError
from pretrain.files import write_durably
from pretrain.processes import folder_lock, is_held, status_after
from pretrain.recipe import as_yaml, read_run_config
from pretrain.runs.run_folder import read_json
from pretrain.training.metrics import finite
from pretrain.units import count_text, counted, duration_text, table
from pretrain_tools.experiments.small_runs import (
    RunOutcome,
    SmallRun,
    device_slots,
    failure_text,
    read_outcome,
    start_training,
)
from pretrain_tools.experiments.sweep_plan import (
    TRIALS_FILE,
    Axis,
    SweepPoint,
    SweepRequest,
    cautions_of_sweep,
    check_points,
    refuse_duplicates,
    request_problems,
)
from pretrain_tools.runs.child_processes import signals_passed_on

LOCK_OF_SWEEP = ".sweep.lock"
SWEEP_RESULTS = "results.json"
BEST_RECIPE = "best.yaml"
POLL_SECONDS_OF_RUNS = 0.2


@dataclass(frozen=True)
class PointResult:
    """Results for one combination of settings."""

    settings: dict[str, str]
    tokens: int
    """Token budget of each run."""
    outcomes: list[RunOutcome]
    """One outcome per seed."""

    @property
    def losses(self) -> list[float]:
        """Final losses of the finished seeds, in nats per token."""
        return [outcome.loss for outcome in self.outcomes if outcome.state == "finished"]

    @property
    def mean_loss(self) -> float:
        """Mean final loss over seeds; inf if any seed hasn't finished."""
        return statistics.fmean(outcome.loss for outcome in self.outcomes)

    @property
    def spread(self) -> float | None:
        """Standard deviation across seeds; None with fewer than two."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 else None

    @property
    def state(self) -> str:
        """finished, failed, diverged or unfinished."""
        states = {outcome.state for outcome in self.outcomes}
        if states == {"finished"}:
            return "finished"
        return next((state for state in ("failed", "diverged") if state in states), "unfinished")


def report_sweep(request: SweepRequest, results: Sequence[PointResult]) -> int:
    """Prints the table and writes the files. Returns the exit status: 1 if no combination finished."""
    # Unfinished combinations have an infinite mean loss and come last.
    results = sorted(results, key=lambda result: result.mean_loss)
    print(sweep_table(request, results))
    write_durably(request.output / SWEEP_RESULTS, json.dumps(as_values(request, results), indent=1) + "\n")
    finished = [result for result in results if math.isfinite(result.mean_loss)]
    if not finished:
        print(
            f"\nNo combination finished; see {request.output / 'logs'}. Run the same command again to retry failed "
            "runs."
        )
        return 1
    write_durably(request.output / BEST_RECIPE, best_recipe(request, finished[0]))
    print(f"\n{verdict_of_sweep(finished)}")
    if failed := [result for result in results if result.state == "failed"]:
        print(f"{len(failed)} of {len(results)} combinations failed; run the same command again to retry them.")
    for name in (SWEEP_RESULTS, BEST_RECIPE):
        print(request.output / name)
    return 0


def sweep_table(request: SweepRequest, results: Sequence[PointResult]) -> str:
    """Formats one row per combination, best first."""
    paths = [axis.path for axis in request.axes]
    rows = [[*paths, "loss", "spread", "seeds", "tokens", "time", ""]]
    for result in results:
        why = next((outcome.reason for outcome in result.outcomes if outcome.state == "failed"), "")
        state = "" if result.state == "finished" else result.state + (f": {why[:60]}" if why else "")
        rows.append(
            [
                *(result.settings[path] for path in paths),
                f"{result.mean_loss:.4f}" if math.isfinite(result.mean_loss) else "-",
                f"{result.spread:.4f}" if result.spread is not None else "-",
                str(len(result.losses)),
                count_text(max(outcome.tokens for outcome in result.outcomes)),
                duration_text(statistics.fmean(outcome.seconds for outcome in result.outcomes)),
                state,
            ]
        )
    return table(rows, right=set(range(len(paths) + 5)))


def verdict_of_sweep(finished: Sequence[PointResult]) -> str:
    """Describes the best combination, and whether it is significantly better than the next."""
    from scipy.stats import ttest_rel

    best = finished[0]
    named = ", ".join(f"{path} {value}" for path, value in best.settings.items())
    text = f"Best: {named}, validation loss {best.mean_loss:.4f}"
    if len(finished) == 1:
        return f"{text}."
    second = finished[1]
    gap = second.mean_loss - best.mean_loss
    if len(best.losses) == 1:
        return f"{text}, {gap:.4f} below the next best. With one seed, this may be noise; try --seeds 3."
    # Runs with the same seed share initial weights and data order, so use paired differences, which vary less.
    low, high = ttest_rel(second.losses, best.losses).confidence_interval(0.9)
    sure = "" if low > 0 else ", not significant"
    over = f"90% interval {low:.4f} to {high:.4f} over {len(best.losses)} seeds"
    return f"{text}, {gap:.4f} below the next best ({over}){sure}."


def as_values(request: SweepRequest, results: Sequence[PointResult]) -> dict[str, Any]:
    """Returns the contents of results.json, with losses in nats per token, averaged over the validation sources."""
    points = [
        {
            "settings": result.settings,
            "state": result.state,
            "loss": result.mean_loss,
            "spread": result.spread,
            "budget_tokens": result.tokens,
            "runs": [values_of_run(outcome) for outcome in result.outcomes],
        }
        for result in results
    ]
    return finite({**request.described, "results": points})


def values_of_run(outcome: RunOutcome) -> dict[str, Any]:
    return {
        "folder": str(outcome.folder),
        "state": outcome.state,
        "step": outcome.step,
        "tokens": outcome.tokens,
        "seconds": round(outcome.seconds, 1),
        "losses": {step: outcome.loss_at(step) for step in outcome.losses},
        "failure": outcome.reason if outcome.state == "failed" else None,
    }


def best_recipe(request: SweepRequest, best: PointResult) -> str:
    """Returns the recipe with the best settings as YAML, with a separate output folder."""
    config = read_run_config(request.recipe, [*request.changes, *best.settings.items()])
    config = config.model_copy(update={"output": config.output.with_name(f"{config.output.name}_best")})
    spread = f" +- {best.spread:.4f}" if best.spread is not None else ""
    named = "".join(f"#   {path}: {value}\n" for path, value in best.settings.items())
    return (
        f"# {request.recipe} with the best settings from the sweep in {request.output}:\n{named}"
        f"# validation loss {best.mean_loss:.4f}{spread} over {len(best.losses)} seeds\n{as_yaml(config)}"
    )


def run_sweep(
    request: SweepRequest,
    parallel: int | None,
    report: Callable[[SweepRequest, list[PointResult]], int] = report_sweep,
) -> int:
    """Trains a sweep's unfinished runs and reports all results. Returns the exit status: 1 if no combination finished.

    Raises InputError listing all problems before any run starts.
    """
    request_problems(request).stop_if_any()
    # For a search, check only the corners of the ranges.
    points = check_points(request, request.grid)
    refuse_duplicates(points)
    request.output.mkdir(parents=True, exist_ok=True)
    with folder_lock(request.output / LOCK_OF_SWEEP):
        sweep = Sweep(request, [] if request.search else points)
        refuse_to_lose_results(request, sweep.points)
        slots = device_slots(parallel)
        for caution in cautions_of_sweep(request, points):
            print(f"warning: {caution}", file=sys.stderr)
        runs = counted((request.search or len(points)) * request.seeds, "run")
        print(f"{request.output}: {runs}, {counted(len(slots), 'run')} at a time", file=sys.stderr)
        if status := sweep.train(slots):
            print(f"interrupted; run the same command to resume {request.output}", file=sys.stderr)
            return status
        return report(request, sweep.results())


class Sweep:
    """Trains a sweep's runs. The state is read from the run folders, so a killed sweep can resume."""

    def __init__(self, request: SweepRequest, points: Sequence[SweepPoint]):
        self.request = request
        self.points = list(points)
        self.failures: dict[str, str] = {}
        """{run that failed in this call: reason}"""
        self.is_exhausted = False
        """True if a search found no settings that it hasn't tried."""
        if request.search and (trials := recorded_trials(request)):
            self.points = check_points(request, trials)

    @property
    def runs(self) -> list[SmallRun]:
        return [run for point in self.points for run in point.runs]

    def train(self, slots: list[dict[str, str]]) -> int:
        """Trains all runs that haven't finished, one per slot at a time.

        Forwards Ctrl-C, SIGTERM and SIGHUP to the runs, which then save and stop. Returns 0, or the exit status for
        the signal.
        """
        training: dict[int, tuple[SmallRun, subprocess.Popen]] = {}
        with signals_passed_on() as received:
            for run in self.runs:
                if is_held(run.log):
                    text = "started by an earlier command and still training; waiting for it to finish"
                    print(f"{run.name}: {text}", file=sys.stderr)
                while is_held(run.log) and not received:
                    time.sleep(POLL_SECONDS_OF_RUNS)
            while True:
                for slot, (run, process) in list(training.items()):
                    if process.poll() is not None:
                        del training[slot]
                        self._ended(run, process.returncode)
                for slot, environment in enumerate(slots):
                    if slot not in training and not received:
                        run = self._next_run({run.name for run, _ in training.values()})
                        # Slots are interchangeable, so no other slot can start a run either.
                        if run is None:
                            break
                        print(f"{run.name}: training", file=sys.stderr)
                        training[slot] = run, start_training(run, environment)
                if not training:
                    return status_after(received[0]) if received else 0
                time.sleep(POLL_SECONDS_OF_RUNS)

    def _next_run(self, active: set[str]) -> SmallRun | None:
        """Returns the next run to start, or None if none can start now. active: names of the runs in training."""
        while True:
            for run in self.runs:
                is_open = run.name not in active and run.name not in self.failures
                if is_open and read_outcome(run).state not in ("finished", "diverged"):
                    return run
            # A search chooses settings while other runs train, so that no device is idle.
            if self.is_exhausted or len(self.points) >= (self.request.search or 0):
                return None
            self._pick(active)

    def _pick(self, active: set[str]) -> None:
        settings = pick_settings(self.request, self.results(), active)
        if settings is None:
            self.is_exhausted = True
            print(f"stopping after {counted(len(self.points), 'trial')}: found no untried settings", file=sys.stderr)
            return
        recorded = [*(point.settings for point in self.points), settings]
        try:
            (point,) = check_points(self.request, [settings])
        except InputError as error:
            raise InputError(f"trial {len(recorded)} with {settings}: {error}; narrow the range") from None
        # Recorded before the runs start so that a killed search can resume them.
        values = {"vary": self.request.described["vary"], "trials": recorded}
        write_durably(self.request.output / TRIALS_FILE, json.dumps(values, indent=1))
        self.points.append(point)

    def outcome(self, run: SmallRun) -> RunOutcome:
        """Returns a run's outcome, including a failure in this call."""
        outcome = read_outcome(run)
        failure = self.failures.get(run.name)
        return outcome if failure is None else replace(outcome, state="failed", reason=failure)

    def _ended(self, run: SmallRun, status: int) -> None:
        """Prints a run's outcome and records a failure."""
        outcome = read_outcome(run)
        if outcome.state == "finished":
            text = f"validation loss {outcome.loss:.4f}"
        elif outcome.state == "diverged":
            text = f"diverged at step {outcome.step:,}: {outcome.reason.splitlines()[0]}"
        else:
            self.failures[run.name] = failure_text(run, outcome, status)
            text = f"ended early: {self.failures[run.name]}; see {run.log}"
        print(f"{run.name}: {text}", file=sys.stderr)

    def results(self) -> list[PointResult]:
        """Returns the results of all points."""
        return [
            PointResult(point.settings, point.tokens, [self.outcome(run) for run in point.runs])
            for point in self.points
        ]


def refuse_to_lose_results(request: SweepRequest, points: Sequence[SweepPoint]) -> None:
    """Raises InputError if the folder's results.json has combinations or seeds that this sweep doesn't include."""
    found = read_json(request.output / SWEEP_RESULTS)
    if (seeds := found.get("seeds", 1)) > request.seeds:
        raise InputError(
            f"--seeds {request.seeds}: {request.output} contains a sweep with {seeds} seeds; use --seeds {seeds} or "
            "more, or a different --output"
        )
    settings = [point.settings for point in points]
    if any(result["settings"] not in settings for result in found.get("results", [])):
        raise other_sweep(request, found["vary"])


def other_sweep(request: SweepRequest, varied: object) -> InputError:
    return InputError(
        f"{request.output}: contains a sweep with --vary {json.dumps(varied)}, but got --vary "
        f"{json.dumps(request.described['vary'])}; use the same --vary, or a different --output"
    )


def recorded_trials(request: SweepRequest) -> list[dict[str, str]]:
    """Reads the settings that a search has chosen so far. Raises InputError if the search varied other settings."""
    found = read_json(request.output / TRIALS_FILE)
    if found and found["vary"] != request.described["vary"]:
        raise other_sweep(request, found["vary"])
    trials = found.get("trials", [])
    return [trial for number, trial in enumerate(trials) if trial not in trials[:number]]


def pick_settings(request: SweepRequest, results: Sequence[PointResult], active: set[str]) -> dict[str, str] | None:
    """Chooses the next trial's settings with Optuna's TPE sampler. Values are formatted as on the command line.

    Returns None if it finds no settings that weren't tried.

    Rebuilds the sampler from the results each time, so a killed search resumes unchanged.
    """
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
    # Without constant_liar, parallel trials would be nearly the same.
    sampler = optuna.samplers.TPESampler(seed=len(results), n_startup_trials=4, constant_liar=True)
    study = optuna.create_study(sampler=sampler)
    for result in results:
        running = any(outcome.folder.name in active for outcome in result.outcomes)
        params = {axis.path: value_of(axis, result.settings[axis.path]) for axis in request.axes}
        state = TrialState.RUNNING if running else TrialState.COMPLETE
        value = None if running else result.mean_loss
        study.add_trial(create_trial(state=state, params=params, distributions=distributions, value=value))
    tried = [result.settings for result in results]
    # Rounding may produce settings that were already tried, and a range of integers may be used up.
    for _ in range(100):
        params = study.ask(distributions).params
        settings = {path: f"{value:.3g}" if isinstance(value, float) else str(value) for path, value in params.items()}
        if settings not in tried:
            return settings
    return None


def value_of(axis: Axis, text: str) -> float | str:
    """Parses a value for Optuna, clamped to the range because rounding may have moved it outside."""
    if not axis.is_range:
        return text
    low, high = axis.ends
    return int(text) if axis.is_whole else min(max(float(text), float(low)), float(high))
