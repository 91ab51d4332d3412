"""Reports a sweep: a table, results.json and the best recipe."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pretrain.files import write_durably
from pretrain.recipe import as_yaml, read_run_config
from pretrain.units import count_text, duration_text, table
from pretrain_tools.experiments.small_runs import RunOutcome
from pretrain_tools.experiments.sweep_plan import SweepRequest

SWEEP_RESULTS = "results.json"
BEST_RECIPE = "best.yaml"


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
    from scipy.stats import t

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
    differences = [worse - better for worse, better in zip(second.losses, best.losses, strict=True)]
    half = t.ppf(0.95, len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
    sure = "" if gap > half else ", not significant"
    over = f"90% interval {gap - half:.4f} to {gap + half:.4f} over {len(differences)} seeds"
    return f"{text}, {gap:.4f} below the next best ({over}){sure}."


def as_values(request: SweepRequest, results: Sequence[PointResult]) -> dict[str, Any]:
    """Returns the contents of results.json, with losses in nats per token, averaged over the validation sources."""
    points = [
        {
            "settings": result.settings,
            "state": result.state,
            "loss": finite(result.mean_loss),
            "spread": finite(result.spread),
            "budget_tokens": result.tokens,
            "runs": [values_of_run(outcome) for outcome in result.outcomes],
        }
        for result in results
    ]
    return {**request.described, "results": points}


def values_of_run(outcome: RunOutcome) -> dict[str, Any]:
    return {
        "folder": str(outcome.folder),
        "state": outcome.state,
        "step": outcome.step,
        "tokens": outcome.tokens,
        "seconds": round(outcome.seconds, 1),
        "losses": {str(step): finite(outcome.loss_at(step)) for step in outcome.losses},
        "failure": outcome.reason if outcome.state == "failed" else None,
    }


def finite(value: float | None) -> float | None:
    """Replaces infinity with None, because JSON can't represent it."""
    return value if value is not None and math.isfinite(value) else None


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
