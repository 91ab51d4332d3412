"""Draws runs as PNG panels, and holds the plotting helpers that the project's other figures share."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain_tools.runs.curves import Columns, RunCurves, curves_of
from pretrain_tools.runs.history import History, is_number
from pretrain_tools.runs.status import RunStatus

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Colors of runs: the Okabe-Ito palette, which is safe for color-blind readers."""
DASHES = ("-", "--", ":", "-.")
MARKS = {
    "resume": (">", "#009e73", "resumed"),
    "checkpoint": ("|", "#888888", "checkpoint"),
    "spike": ("^", "#d62728", "loss spike"),
    "skip": ("x", "#d62728", "step skipped"),
    "rollback": ("<", "#d62728", "rolled back"),
    "control": ("D", "#9467bd", "control command"),
    "divergence": ("P", "#d62728", "diverges"),
    "explosion": ("*", "#d62728", "gradient exploded"),
    "warning": ("v", "#e69f00", "warning"),
    "end": ("s", "#555555", "ended"),
}
"""Events marked in the loss panel: (matplotlib marker, color, name in the legend)."""
POSITION_LABELS = {"step": "step", "tokens": "tokens", "hours": "hours of running", "flops": "FLOPs"}
MOST_SCORE_PANELS = 15
MARK_HEIGHT = 0.035
"""Height of a run's line of event marks, as a share of the panel."""
SMOOTHED_SHARE = 0.04
FEW = 12
"""Points up to which a curve shows each as a dot, and its first ones count for the range of the axis."""
SHARE_LEFT_OUT_OF_RANGE = 0.02
"""Share of a run, from its start, that is ignored when choosing the range of the loss axis."""


@dataclass(frozen=True)
class PlottedRun:
    """A run with everything that a picture or page shows of it."""

    name: str
    history: History
    status: RunStatus
    curves: RunCurves

    @classmethod
    def of(cls, name: str, history: History, status: RunStatus) -> "PlottedRun":
        return cls(name, history, status, curves_of(history))


Panel = tuple[str, str, Callable[[Any, str], None]]
"""Title, x-axis (a key of POSITION_LABELS or a name of its own), and function that draws into a matplotlib axis."""


def write_png(runs: Sequence[PlottedRun], path: Path) -> None:
    """Writes a PNG with one panel per quantity, all runs in each, and a legend of runs and event marks on top."""
    # Figure instead of pyplot, which keeps global state and may need a display.
    from matplotlib.figure import Figure

    panels = picture_panels(runs)
    rows = math.ceil(len(panels) / 3)
    figure = Figure(figsize=(16, 4.1 * rows + 0.9), layout="constrained")
    axes = figure.subplots(rows, 3, squeeze=False)
    for axis, (title, position, draw) in zip(axes.flat, panels, strict=False):
        style_panel(axis, title)
        axis.set_xlabel(POSITION_LABELS.get(position, ""))
        draw(axis, position)
        if position in POSITION_LABELS:
            axis.xaxis.set_major_formatter(axis_text)
            axis.margins(x=0.01)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    handles = [line_handle(color_of(n), f"{run.name} ({run.status.state})") for n, run in enumerate(runs)]
    happened = {event["event"] for run in runs for event in run.curves.happened}
    handles += [
        line_handle(color, label, "none", marker=shape, markersize=6)
        for kind, (shape, color, label) in MARKS.items()
        if kind in happened
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=5, frameon=False, fontsize=10)
    save_figure(figure, path)


def picture_panels(runs: Sequence[PlottedRun]) -> list[Panel]:
    """Returns the panels that have data."""

    def measure(title: str, name: str, **options: bool) -> Panel:
        return title, "step", lambda axis, at: draw_measure(axis, runs, at, name, **options)

    curves = [run.curves for run in runs]
    loss = measure("Training loss (bold: smoothed)", "loss", marks=True)
    # For a single run, a plot by tokens or FLOPs has the same shape as the plot by step.
    positions = ("tokens", "hours", "flops") if len(runs) > 1 else ("hours",)
    losses = [
        (f"Training loss by {POSITION_LABELS[at]}", at, lambda axis, at: draw_measure(axis, runs, at, "loss"))
        for at in positions
        if any(is_number(value) for run in curves for value in run.train[at])
    ]
    panels = []
    if any(run.validation for run in curves):
        panels.append(("Validation loss", "step", lambda axis, at: draw_validation(axis, runs, at)))
    if any(run.by_position for run in curves):
        title = "Validation loss by position, at the end of each stage"
        panels.append((title, "position", lambda axis, _: draw_by_position(axis, runs)))
    panels += [
        measure("Learning rate", "learning_rate", smooth=False),
        measure("Gradient norm, before clipping", "grad_norm", log=True),
        measure("Tokens per second", "tokens_per_second"),
    ]
    # For several runs, put the panels that compare losses first.
    panels = [loss, *losses, *panels] if len(runs) > 1 else [loss, *panels, *losses]
    names = dict.fromkeys(name for run in curves for name in run.scores if not name.endswith("perplexity"))
    # Averages of task sets first, then bits per byte, which improve early; a small model's accuracies stay at chance.
    names = sorted(names, key=lambda name: (not name.startswith(("core ·", "small ·")), not name.endswith("_byte")))
    return panels + [panel for name in names for panel in score_panels(runs, name)][:MOST_SCORE_PANELS]


def score_panels(runs: Sequence[PlottedRun], name: str) -> list[Panel]:
    """Returns a panel by step if a run was evaluated several times, else one point per run; [] for a single point."""
    points = [len(run.curves.scores[name]["step"]) for run in runs if name in run.curves.scores]
    if max(points) > 1:
        return [(f"Evaluation: {name}", "step", lambda axis, at: draw_score(axis, runs, at, name))]
    if len(points) > 1:
        return [(f"Evaluation: {name}", "run", lambda axis, _: draw_score_by_run(axis, runs, name))]
    return []


def points_of(columns: Columns, position: str, *measures: str) -> list[list[float]]:
    """Returns the columns [x, y, ...] of the points at which all of them are known."""
    rows = zip(*(columns[name] for name in (position, *measures)), strict=True)
    known = [row for row in rows if None not in row]
    return [list(column) for column in zip(*known, strict=True)] or [[] for _ in (position, *measures)]


def draw_measure(
    axis: Any, runs: Sequence[PlottedRun], position: str, measure: str, *, smooth=True, log=False, marks=False
) -> None:
    """Draws a measure by step: its moving average in bold, and the range within each point as a faint band."""
    for number, run in enumerate(runs):
        train = run.curves.train
        color = color_of(number)
        x, y = points_of(train, position, measure)
        dots = {"marker": "o" if len(y) <= FEW else None, "markersize": 3}
        if smooth and len(y) >= 20:
            low, high = (f"{measure}_{end}" if f"{measure}_low" in train else measure for end in ("low", "high"))
            x, low, high = points_of(train, position, low, high)
            both = list(itertools.chain.from_iterable(zip(low, high, strict=True)))
            # A zigzag between minimum and maximum, so that a spike in a long run stays visible.
            axis.plot([at for at in x for _ in range(2)], both, color=color, linewidth=0.8, alpha=0.35)
            x, y = points_of(train, position, measure)
            axis.plot(x, smoothed(y), color=color, linewidth=1.8)
        else:
            axis.plot(x, y, color=color, linewidth=1.6, **dots)
    if log:
        axis.set_yscale("log")
        axis.yaxis.set_minor_formatter(axis_text)
    elif measure in ("tokens_per_second", "learning_rate"):
        axis.set_ylim(bottom=0)
    if measure == "loss":
        fit_to_later_loss(axis, runs, position, marks=marks)
    axis.yaxis.set_major_formatter(axis_text)
    if marks:
        draw_marks(axis, runs, position)


def smoothed(values: list[float]) -> list[float]:
    """Computes a centered moving average over about 4% of the points.

    A trailing average would lag behind a falling loss. The window is shorter near the steep start.
    """
    sums = [0.0, *itertools.accumulate(values)]
    means = []
    for number in range(len(values)):
        reach = min(round(SMOOTHED_SHARE * len(values) / 2), number // 4)
        first = number - reach
        end = min(number + reach + 1, len(values))
        means.append((sums[end] - sums[first]) / (end - first))
    return means


def draw_marks(axis: Any, runs: Sequence[PlottedRun], position: str) -> None:
    """Draws event markers along the bottom, one row per run, and a dotted line at each resume or rollback."""
    for number, run in enumerate(runs):
        for kind, (shape, color, _) in MARKS.items():
            events = [event for event in run.curves.happened if event["event"] == kind]
            at = [event[position] for event in events if event[position] is not None]
            height = [0.02 + MARK_HEIGHT * number] * len(at)
            look = {"marker": shape, "s": 26, "c": color, "linewidths": 1.1, "zorder": 3}
            axis.scatter(at, height, **look, transform=axis.get_xaxis_transform())
            for x in at if kind in ("resume", "rollback") else ():
                axis.axvline(x, color=color, linestyle=":", linewidth=1)


def fit_to_later_loss(axis: Any, runs: Sequence[PlottedRun], position: str, *, marks: bool) -> None:
    """Fits the axis to the loss after the first 2% of the run; the initial drop would flatten everything else."""
    curves = [points_of(run.curves.train, position, "loss_low", "loss_high") for run in runs]
    if all(len(x) <= FEW for x, _, _ in curves):
        return
    end = max((x[-1] for x, _, _ in curves if x), default=0)
    later = [
        value
        for x, low, high in curves
        for at, *both in zip(x, low, high, strict=True)
        for value in both
        if at >= SHARE_LEFT_OUT_OF_RANGE * end
    ]
    if later:
        spread = (max(later) - min(later)) or 1.0
        below = MARK_HEIGHT * (len(curves) + 0.5) if marks else 0.0
        axis.set_ylim(min(later) - (0.03 + below) * spread, max(later) + 0.03 * spread)


def draw_validation(axis: Any, runs: Sequence[PlottedRun], position: str) -> None:
    """Draws the validation loss, with one dash pattern per source."""
    sources = list(dict.fromkeys(source for run in runs for source in run.curves.validation))
    for number, run in enumerate(runs):
        for source, columns in run.curves.validation.items():
            look = {"color": color_of(number), "marker": "o", "markersize": 3, "linewidth": 1.5}
            axis.plot(*points_of(columns, position, "loss"), DASHES[sources.index(source) % len(DASHES)], **look)
    handles = [line_handle("#444444", source, DASHES[n % len(DASHES)]) for n, source in enumerate(sources)]
    axis.legend(handles=handles, frameon=False, fontsize=9, title="source", title_fontsize=9)


def draw_by_position(axis: Any, runs: Sequence[PlottedRun]) -> None:
    """Draws the loss by position: a point at the end of each range, a line per source and stage."""
    ends = set()
    handles = []
    for number, run in enumerate(runs):
        for place, (name, columns) in enumerate(run.curves.by_position.items()):
            color = color_of(number if len(runs) > 1 else place)
            dash = DASHES[place % len(DASHES)]
            axis.plot(*points_of(columns, "position", "loss"), dash, color=color, marker="o", markersize=4)
            ends |= set(columns["position"])
            handles.append(line_handle(color, f"{run.name}: {name}" if len(runs) > 1 else name, dash))
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(ends), [f"{end:,}" for end in sorted(ends)])
    axis.minorticks_off()
    axis.set_xlabel("position in the document, up to")
    axis.legend(handles=handles, frameon=False, fontsize=9)


def draw_score(axis: Any, runs: Sequence[PlottedRun], position: str, name: str) -> None:
    """Draws a score by step, with a band of one standard error."""
    for number, run in enumerate(runs):
        if name in run.curves.scores:
            columns = run.curves.scores[name]
            errors = [error or 0.0 for error in columns["standard_error"]]
            points = points_of({**columns, "errors": errors}, position, "value", "errors")
            draw_with_band(axis, *points, color=color_of(number))


def draw_with_band(
    axis: Any, x: Sequence[float], values: Sequence[float], errors: Sequence[float], **look: Any
) -> None:
    """Draws a line through the values with a band of one standard error on each side."""
    (line,) = axis.plot(x, values, marker="o", markersize=4, **look)
    low = [value - error for value, error in zip(values, errors, strict=True)]
    high = [value + error for value, error in zip(values, errors, strict=True)]
    axis.fill_between(x, low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def draw_score_by_run(axis: Any, runs: Sequence[PlottedRun], name: str) -> None:
    """Draws the last score of each run, with its standard error."""
    measured = [(n, run.name, run.curves.scores[name]) for n, run in enumerate(runs) if name in run.curves.scores]
    for place, (number, _, columns) in enumerate(measured):
        value = columns["value"][-1]
        error = columns["standard_error"][-1]
        axis.errorbar([place], [value], yerr=[error or 0.0], color=color_of(number), marker="o", capsize=4)
        offset = {"textcoords": "offset points", "xytext": (8, 0), "va": "center", "fontsize": 9}
        axis.annotate(f"{value:.4g}", (place, value), **offset)
    axis.set_xticks(range(len(measured)), [label for _, label, _ in measured])
    axis.set_xlim(-0.7, len(measured) - 0.3)


def axis_text(value: float, _position: int | None = None) -> str:
    """Formats a tick label: 1500000 becomes '1.5M', 3.2e18 stays as it is. Matplotlib passes the second argument."""
    if not value:
        return "0"
    if abs(value) >= 1e15 or abs(value) < 1e-5:
        return f"{value:.3g}".replace("e+", "e").replace("e-0", "e-")
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def color_of(number: int) -> str:
    """Returns the color of the run or line with this number."""
    return COLORS[number % len(COLORS)]


def line_handle(color: str, label: str, dash: str = "-", **mark: Any) -> Any:
    """Returns a legend entry."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=color, label=label, **{"linestyle": dash, "linewidth": 2, **mark})


def style_panel(axis: Any, title: str) -> None:
    """Applies the project's style to a panel."""
    axis.set_title(title, fontsize=11, loc="left", fontweight="bold")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def save_figure(figure: Any, path: Path) -> None:
    """Writes a PNG under a temporary name and renames it, so that readers never see half a file."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    figure.savefig(unfinished, dpi=110, format="png")
    unfinished.replace(path)
