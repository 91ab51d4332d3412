"""Draws runs as PNG panels, and holds the plotting helpers that the project's other figures share."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pretrain_tools.runs.curves import Columns, RunCurves, curves_of
from pretrain_tools.runs.history import History, is_number, read_history
from pretrain_tools.runs.status import RunStatus, read_status

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
FEWEST_SMOOTHED = 20
FEW = 12
"""Points up to which a curve shows each as a dot, and its first ones count for the range of the axis."""
SCORES = {"marker": "o", "markersize": 4, "capsize": 3}
"""Look of scores with their standard errors, for matplotlib's `errorbar`."""
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
    def read(cls, folder: Path, name: str) -> "PlottedRun":
        """Reads a run's folder. Raises InputError if it is not a run or has no events yet."""
        history = read_history(folder)
        return cls(name, history, read_status(folder), curves_of(history))


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

    def measure(title: str, name: str, at: str = "step", **options: bool) -> Panel:
        return title, at, lambda axis, position: draw_measure(axis, runs, position, name, **options)

    curves = [run.curves for run in runs]
    loss = measure("Training loss (bold: smoothed)", "loss", marks=True)
    # For a single run, a plot by tokens or FLOPs has the same shape as the plot by step.
    positions = ("tokens", "hours", "flops") if len(runs) > 1 else ("hours",)
    losses = [
        measure(f"Training loss by {POSITION_LABELS[at]}", "loss", at)
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
    # A single point is no picture.
    names = [name for name in names if sum(len(run.scores[name]["step"]) for run in curves if name in run.scores) > 1]
    # Averages of task sets first, then bits per byte, which improve early; a small model's accuracies stay at chance.
    names.sort(key=lambda name: (not name.startswith(("core ·", "small ·")), not name.endswith("_byte")))
    panels += [
        (f"Evaluation: {name}", "step", lambda axis, at, name=name: draw_score(axis, runs, at, name))
        for name in names[:MOST_SCORE_PANELS]
    ]
    return panels


def points_of(columns: Columns, position: str, *measures: str) -> NDArray:
    """Returns an array [x, y, ...] of the points at which all of these columns are known."""
    points = np.array([columns[name] for name in (position, *measures)], dtype=float)  # None becomes NaN
    return points[:, np.isfinite(points).all(axis=0)]


def draw_measure(
    axis: Any, runs: Sequence[PlottedRun], position: str, measure: str, *, smooth=True, log=False, marks=False
) -> None:
    """Draws a measure by step: its moving average in bold, and the range within each point as a faint band."""
    for number, run in enumerate(runs):
        train = run.curves.train
        color = color_of(number)
        x, y = points_of(train, position, measure)
        if smooth and len(y) >= FEWEST_SMOOTHED:
            low, high = (f"{measure}_{end}" if f"{measure}_low" in train else measure for end in ("low", "high"))
            at, *ends = points_of(train, position, low, high)
            # A zigzag between minimum and maximum, so that a spike in a long run stays visible.
            axis.plot(np.repeat(at, 2), np.stack(ends, axis=1).ravel(), color=color, linewidth=0.8, alpha=0.35)
            axis.plot(x, smoothed(y), color=color, linewidth=1.8)
        else:
            axis.plot(x, y, color=color, linewidth=1.6, marker="o" if len(y) <= FEW else None, markersize=3)
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


def smoothed(values: ArrayLike) -> NDArray:
    """Computes a centered moving average over about 4% of the points.

    A trailing average would lag behind a falling loss. The window is shorter near the steep start.
    """
    number = np.arange(len(values))
    reach = np.minimum(round(SMOOTHED_SHARE * len(values) / 2), number // 4)
    first = number - reach
    end = np.minimum(number + reach + 1, len(values))
    sums = np.append(0.0, np.cumsum(values))
    return (sums[end] - sums[first]) / (end - first)


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
    if all(points.shape[1] <= FEW for points in curves):
        return
    points = np.concatenate(curves, axis=1)
    _, low, high = points[:, points[0] >= SHARE_LEFT_OUT_OF_RANGE * points[0].max()]
    spread = (high.max() - low.min()) or 1.0
    below = MARK_HEIGHT * (len(curves) + 0.5) if marks else 0.0
    axis.set_ylim(low.min() - (0.03 + below) * spread, high.max() + 0.03 * spread)


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
    """Draws a score by step, with its standard errors."""
    for number, run in enumerate(runs):
        if name in run.curves.scores:
            columns = run.curves.scores[name]
            errors = [error or 0.0 for error in columns["standard_error"]]
            points = points_of({**columns, "errors": errors}, position, "value", "errors")
            axis.errorbar(*points, color=color_of(number), **SCORES)


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
