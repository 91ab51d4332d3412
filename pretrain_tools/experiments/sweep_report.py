"""Reports a sweep: a table, results.json, a figure of the loss by each setting, and the best recipe."""

import json
import math
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.files import write_durably
from pretrain.recipe import as_yaml, parse_yaml, read_run_config
from pretrain.units import count_text, duration_text, table
from pretrain_tools.experiments.small_runs import RunOutcome
from pretrain_tools.experiments.sweep_plan import SweepRequest, is_number_text
from pretrain_tools.runs.plots import axis_text, color_of, save_figure, style_panel

SWEEP_RESULTS = "results.json"
SWEEP_PICTURE = "results.png"
BEST_RECIPE = "best.yaml"
RATIO_FOR_LOG = 4.0
"""Ratio of the largest to the smallest value from which the axis is logarithmic."""
MOST_LINES = 8
"""Number of lines above which a panel has no legend."""
MOST_TICKS = 10
PANEL_CHARACTERS = 64
"""Width of a panel in characters, shared by the labels under it."""
LONGEST_LABEL = 40
"""Characters of a value in the figure, about; longer ones are cut in the middle."""


@dataclass(frozen=True)
class PointResult:
    """The result of one combination of settings."""

    settings: dict[str, str]
    tokens: int
    """Token budget of one run."""
    outcomes: list[RunOutcome]
    """One outcome per seed."""

    @property
    def losses(self) -> list[float]:
        """Final losses of the seeds that finished, in nats per token."""
        return [outcome.loss for outcome in self.outcomes if outcome.state == "finished"]

    @property
    def mean_loss(self) -> float:
        """Mean final loss over the seeds; infinite unless all finished."""
        return statistics.fmean(outcome.loss for outcome in self.outcomes)

    @property
    def spread(self) -> float | None:
        """Standard deviation over the seeds; None for fewer than two."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 else None

    @property
    def state(self) -> str:
        """finished, failed, diverged, or 'ended at step 120'."""
        states = {outcome.state for outcome in self.outcomes}
        if states == {"finished"}:
            return "finished"
        last = max(outcome.step for outcome in self.outcomes)
        return next((state for state in ("failed", "diverged") if state in states), f"ended at step {last:,}")

    @property
    def last_loss(self) -> float:
        """Mean loss over the seeds at the last step that all have reached, finished or not."""
        shared = set.intersection(*(set(outcome.losses) for outcome in self.outcomes))
        return statistics.fmean(outcome.loss_at(max(shared)) for outcome in self.outcomes) if shared else math.inf


def report_sweep(request: SweepRequest, results: Sequence[PointResult]) -> int:
    """Prints the table and writes the files; returns the exit status, 1 if no setting finished."""
    # Unfinished results have an infinite mean loss, so they come last, sorted by their last common loss.
    results = sorted(results, key=lambda result: (result.mean_loss, result.last_loss))
    print(sweep_table(request, results))
    write_durably(request.output / SWEEP_RESULTS, json.dumps(as_values(request, results), indent=1) + "\n")
    finished = [result for result in results if math.isfinite(result.mean_loss)]
    if not finished:
        print(f"\nNo setting has finished; see {request.output / 'logs'}. The same command tries again what failed.")
        return 1
    draw_sweep(request, results, request.output / SWEEP_PICTURE)
    write_durably(request.output / BEST_RECIPE, best_recipe(request, finished[0]))
    print(f"\n{verdict_of_sweep(finished)}")
    for line in at_the_edge(request, results):
        print(line)
    if failed := [result for result in results if result.state == "failed"]:
        print(f"{len(failed)} of {len(results)} settings failed; the same command tries them again.")
    for name in (SWEEP_RESULTS, SWEEP_PICTURE, BEST_RECIPE):
        print(request.output / name)
    return 0


def sweep_table(request: SweepRequest, results: Sequence[PointResult]) -> str:
    """Formats one row per combination, best first. A loss from before the end is in parentheses."""
    paths = [axis.path for axis in request.axes]
    rows = [[*paths, "loss", "spread", "seeds", "tokens", "time", ""]]
    for result in results:
        loss = f"{result.mean_loss:.4f}" if math.isfinite(result.mean_loss) else f"({result.last_loss:.4f})"
        why = next((outcome.reason for outcome in result.outcomes if outcome.state == "failed"), "")
        state = "" if result.state == "finished" else result.state + (f": {why[:60]}" if why else "")
        rows.append(
            [
                *(result.settings[path] for path in paths),
                loss if math.isfinite(min(result.mean_loss, result.last_loss)) else "-",
                f"{result.spread:.4f}" if result.spread is not None else "-",
                str(len(result.losses)),
                count_text(max(outcome.tokens for outcome in result.outcomes)),
                duration_text(statistics.fmean(outcome.seconds for outcome in result.outcomes)),
                state,
            ]
        )
    return table(rows, right=set(range(len(paths) + 5)))


def verdict_of_sweep(finished: Sequence[PointResult]) -> str:
    """Formats the best combination and how certain it is."""
    best = finished[0]
    named = ", ".join(f"{path} {value}" for path, value in best.settings.items())
    text = f"Best: {named}, validation loss {best.mean_loss:.4f}"
    if len(finished) == 1:
        return f"{text}."
    second = finished[1]
    gap = second.mean_loss - best.mean_loss
    if len(best.losses) == 1:
        return f"{text}, {gap:.4f} below the next; one seed does not tell how much of that is chance (--seeds 3)."
    # Use paired differences: runs with the same seed share initial weights and data order, so their differences vary
    # less than the losses.
    differences = [worse - better for worse, better in zip(second.losses, best.losses, strict=True)]
    half = t_of(len(differences)) * statistics.stdev(differences) / math.sqrt(len(differences))
    sure = "" if gap > half else ", which shows no difference"
    over = f"90 % interval {gap - half:.4f} to {gap + half:.4f} by {len(differences)} seeds"
    return f"{text}, {gap:.4f} below the next ({over}){sure}."


def at_the_edge(request: SweepRequest, results: Sequence[PointResult]) -> list[str]:
    """Returns a note for each numeric setting whose best value is the smallest or largest tried.

    results: the best first. Values that diverged count as tried.
    """
    lines = []
    for axis in request.axes:
        best = results[0].settings[axis.path]
        tried = {result.settings[axis.path] for result in results}
        # Seeds, names and a single value do not form a range.
        if axis.path == "seed" or len(tried) < 2 or not all(is_number_text(text) for text in tried):
            continue
        values = sorted(tried, key=lambda text: float(parse_yaml(text)))
        if best in (values[0], values[-1]) and parse_yaml(best) != 0:  # most settings cannot go below 0
            side, beyond = ("smallest", "lower") if best == values[0] else ("largest", "higher")
            lines.append(
                f"{axis.path}: {best} is the {side} value tried, so the best may be {beyond}; try some {beyond} ones"
            )
    return lines


def t_of(count: int) -> float:
    """Returns the two-sided 90% quantile of Student's t for the mean of `count` values."""
    return {2: 6.31, 3: 2.92, 4: 2.35, 5: 2.13, 6: 2.02}.get(count, 1.9 if count < 12 else 1.75)


def as_values(request: SweepRequest, results: Sequence[PointResult]) -> dict[str, Any]:
    """Returns the contents of results.json; losses in nats per token, averaged over the validation sources."""

    def number(value: float | None) -> float | None:
        # JSON has no infinity.
        return value if value is not None and math.isfinite(value) else None

    return {
        **request.described,
        "results": [
            {
                "settings": result.settings,
                "state": result.state,
                "loss": number(result.mean_loss),
                "spread": number(result.spread),
                "budget_tokens": result.tokens,
                "runs": [
                    {
                        "folder": str(outcome.folder),
                        "state": outcome.state,
                        "step": outcome.step,
                        "tokens": outcome.tokens,
                        "seconds": round(outcome.seconds, 1),
                        "losses": {str(step): number(outcome.loss_at(step)) for step in outcome.losses},
                        **({"failure": outcome.reason} if outcome.state == "failed" else {}),
                    }
                    for outcome in result.outcomes
                ],
            }
            for result in results
        ],
    }


def best_recipe(request: SweepRequest, best: PointResult) -> str:
    """Returns the complete recipe with the best settings, as YAML, with its own output folder."""
    config = read_run_config(request.recipe, [*request.changes, *best.settings.items()])
    config = config.model_copy(update={"output": config.output.with_name(f"{config.output.name}_best")})
    spread = f" +- {best.spread:.4f}" if best.spread is not None else ""
    named = "".join(f"#   {path}: {value}\n" for path, value in best.settings.items())
    return (
        f"# {request.recipe} with the best settings of the sweep in {request.output}:\n{named}"
        f"# validation loss {best.mean_loss:.4f}{spread} over {len(best.losses)} seeds\n{as_yaml(config)}"
    )


def draw_sweep(request: SweepRequest, results: Sequence[PointResult], path: Path) -> None:
    """Draws a panel per setting: the loss by its values, a line through runs that agree otherwise, a dot per seed."""
    from matplotlib.figure import Figure

    finished = [result for result in results if result.losses]
    columns = min(3, len(request.axes))
    rows = math.ceil(len(request.axes) / columns)
    figure = Figure(figsize=(5.6 * columns, 4.2 * rows), layout="constrained")
    for number, axis in enumerate(request.axes, start=1):
        draw_axis(figure.add_subplot(rows, columns, number), axis.path, finished)
    figure.axes[0].set_ylabel("validation loss (nats per token)")
    save_figure(figure, path)


def short_label(text: str) -> str:
    """Cuts the middle of a long value out: those of data.train differ at both ends."""
    return text if len(text) <= LONGEST_LABEL else f"{text[: LONGEST_LABEL // 2]}...{text[-LONGEST_LABEL // 2 :]}"


def draw_axis(panel: Any, path: str, finished: Sequence[PointResult]) -> None:
    """Draws one setting's panel, with a ring around the best result, which is the first."""
    texts = list(dict.fromkeys(result.settings[path] for result in finished))
    place = {text: float(number) for number, text in enumerate(texts)}
    if all(is_number_text(text) for text in texts):
        place = {text: float(parse_yaml(text)) for text in texts}
        if min(place.values()) > 0 and max(place.values()) >= RATIO_FOR_LOG * min(place.values()):
            panel.set_xscale("log")
            panel.xaxis.set_minor_formatter("")
    if len(texts) <= MOST_TICKS:
        width = max(7, PANEL_CHARACTERS // len(texts))
        panel.set_xticks(list(place.values()), [textwrap.fill(short_label(text), width) for text in texts])
    lines: dict[str, list[PointResult]] = {}
    for result in finished:
        others = [f"{other.rpartition('.')[2]} {value}" for other, value in result.settings.items() if other != path]
        lines.setdefault(", ".join(others), []).append(result)
    for number, (named, points) in enumerate(lines.items()):
        points = sorted(points, key=lambda result: place[result.settings[path]])
        means = [statistics.fmean(result.losses) for result in points]
        look = {"color": color_of(number), "marker": "o", "markersize": 4, "capsize": 3, "linewidth": 1.5}
        x = [place[result.settings[path]] for result in points]
        panel.errorbar(x, means, [result.spread or 0.0 for result in points], label=short_label(named), **look)
        for at, result in zip(x, points, strict=True):
            panel.scatter([at] * len(result.losses), result.losses, s=9, color=color_of(number), alpha=0.5)
    best = finished[0]
    ring = {"s": 90, "facecolors": "none", "edgecolors": "#000000", "linewidths": 1.4, "zorder": 4}
    panel.scatter(place[best.settings[path]], statistics.fmean(best.losses), **ring)
    style_panel(panel, path)
    panel.yaxis.set_major_formatter(axis_text)
    if 1 < len(lines) <= MOST_LINES:
        panel.legend(frameon=False, fontsize=8)
