"""Plots runs as a PNG with several panels. The project's other figures use the same helpers."""

import io
import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pretrain.errors import InputError
from pretrain.files import write_durably
from pretrain_tools.runs.comparison import names_of, require_writable
from pretrain_tools.runs.curves import Columns, RunCurves, curves_of
from pretrain_tools.runs.history import MEASURES, read_history, require_runs
from pretrain_tools.runs.status import read_status

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Run colors, from the colorblind-safe Okabe-Ito palette."""
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
"""Events marked in the loss panel: (matplotlib marker, color, legend label)."""
POSITION_LABELS = {"step": "step", "tokens": "tokens", "hours": "running hours", "flops": "FLOPs",
                   "position": "position in the document (end of range)"}  # fmt: skip
MOST_SCORE_PANELS = 15
MARK_HEIGHT = 0.035
"""Height of a row of event markers, as a fraction of the panel."""
SMOOTHED_SHARE = 0.04
FEWEST_SMOOTHED = 20
MOST_DOTS = 50
"""Maximum number of points in a curve with point markers."""
FEW = 12
"""If no curve has more points than this, the loss axis shows all of them."""
SCORES = {"marker": "o", "markersize": 4, "capsize": 3}
"""Style of scores and their standard errors, for matplotlib's `errorbar`."""
SHARE_LEFT_OUT_OF_RANGE = 0.02
"""Fraction of the x-axis at the start that doesn't affect the range of the loss axis."""


@dataclass(frozen=True)
class PlottedRun:
    """A run's data for plotting."""

    name: str
    state: str
    curves: RunCurves
    color: str

    @classmethod
    def read(cls, folder: Path, name: str, number: int = 0) -> "PlottedRun":
        """Reads a run. `number` selects the color.

        Raises InputError if the folder isn't a run or has no events yet.
        """
        return cls(name, read_status(folder).state, curves_of(read_history(folder)), color_of(number))


@dataclass(frozen=True)
class Line:
    """A curve in a panel."""

    color: str | tuple[float, ...]
    columns: Columns
    measure: str
    """Column to plot. A `standard_error` column adds error bars."""
    dash: str = "-"
    label: str | None = None
    """Label in the panel's legend; None for no entry."""


@dataclass(frozen=True)
class Panel:
    """A plot of one quantity for all runs."""

    title: str
    lines: list[Line]
    position: str = "step"
    """x-axis: a key of POSITION_LABELS."""
    is_smoothed: bool = False
    is_log: bool = False
    begins_at_zero: bool = False
    is_training_loss: bool = False
    has_marks: bool = False


def plot_runs(folders: Sequence[Path], output: Path | None) -> Path:
    """Plots runs as a PNG and returns its path, by default in the run folder or the runs' common parent.

    Raises InputError if a folder isn't a run, if no step has been logged yet, or if the path isn't writable.
    """
    runs = require_runs(folders)
    folder = runs[0] if len(runs) == 1 else Path(os.path.commonpath([run.resolve().parent for run in runs]))
    folder = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    path = output or folder / "plot.png"
    require_writable(path)
    path = path.with_name(f"{path.name.removesuffix('.png')}.png")
    plotted = [PlottedRun.read(*of_run) for of_run in zip(runs, names_of(runs), itertools.count())]
    if not any(run.curves.train["step"].size for run in plotted):
        raise InputError(f"{', '.join(map(str, runs))}: no steps logged yet")
    write_png(plotted, path)
    return path


def write_png(runs: Sequence[PlottedRun], path: Path) -> None:
    """Writes a PNG with one panel per quantity, and a legend for the runs and event markers."""
    # pyplot has global state and may need a display.
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    panels = picture_panels(runs)
    rows = math.ceil(len(panels) / 3)
    figure = Figure(figsize=(16, 4.1 * rows + 0.9), layout="constrained")
    axes = figure.subplots(rows, 3, squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        draw_panel(axis, panel)
        if panel.has_marks:
            draw_marks(axis, runs, panel.position)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    handles = [Line2D([], [], color=run.color, linewidth=2, label=f"{run.name} ({run.state})") for run in runs]
    happened = {name for run in runs for name in run.curves.happened}
    handles += [
        Line2D([], [], color=color, linestyle="none", marker=shape, markersize=6, label=label)
        for kind, (shape, color, label) in MARKS.items()
        if kind in happened
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=5, frameon=False, fontsize=10)
    save_figure(figure, path)


def picture_panels(runs: Sequence[PlottedRun]) -> list[Panel]:
    """Returns all panels with data."""

    def training(title: str, measure: str, **options: Any) -> Panel:
        return Panel(title, [Line(run.color, run.curves.train, measure) for run in runs], **options)

    look = {"is_smoothed": True, "is_training_loss": True}
    loss = training("Training loss (bold: smoothed)", "loss", has_marks=True, **look)
    # For a single run, plots against tokens or FLOPs look the same as against steps.
    positions = ("tokens", "hours", "flops") if len(runs) > 1 else ("hours",)
    losses = [
        training(f"Training loss against {POSITION_LABELS[at]}", "loss", position=at, **look)
        for at in positions
        if any(np.isfinite(run.curves.train[at]).any() for run in runs)
    ]
    panels = [
        Panel("Validation loss", validation_lines(runs)),
        Panel("Validation loss by position, at the end of each stage", lines_by_position(runs), "position"),
        training("Learning rate", "learning_rate", begins_at_zero=True),
        training("Gradient norm, before clipping", "grad_norm", is_smoothed=True, is_log=True),
        training("Tokens per second", "tokens_per_second", is_smoothed=True, begins_at_zero=True),
    ]
    panels = [panel for panel in panels if panel.lines]
    panels = [loss, *losses, *panels] if len(runs) > 1 else [loss, *panels, *losses]
    return [*panels, *score_panels(runs)[:MOST_SCORE_PANELS], *diagnostics_panels(runs)]


def validation_lines(runs: Sequence[PlottedRun]) -> list[Line]:
    """Returns a line per run and source, with a dash pattern per source."""
    sources = list(dict.fromkeys(source for run in runs for source in run.curves.validation))
    lines = []
    for run in runs:
        for source, columns in run.curves.validation.items():
            # Colors identify runs, so a source needs only one legend entry.
            label = None if source in [line.label for line in lines] else source
            lines.append(Line(run.color, columns, "loss", DASHES[sources.index(source) % len(DASHES)], label))
    return lines


def lines_by_position(runs: Sequence[PlottedRun]) -> list[Line]:
    """Returns a line per run, source and stage."""
    lines = []
    for run in runs:
        for place, (name, columns) in enumerate(run.curves.by_position.items()):
            color, label = (run.color, f"{run.name}: {name}") if len(runs) > 1 else (color_of(place), name)
            lines.append(Line(color, columns, "loss", DASHES[place % len(DASHES)], label))
    return lines


def score_panels(runs: Sequence[PlottedRun]) -> list[Panel]:
    """Returns a panel for each score with more than one point."""
    names = dict.fromkeys(name for run in runs for name in run.curves.scores if not name.endswith("perplexity"))
    panels = []
    # Averages over tasks come first, then bits per byte, which improves before accuracies do.
    for name in sorted(
        names, key=lambda name: (not name.startswith(("core ·", "small ·")), not name.endswith("_byte"))
    ):
        lines = [Line(run.color, run.curves.scores[name], "value") for run in runs if name in run.curves.scores]
        if sum(len(line.columns["step"]) for line in lines) > 1:
            panels.append(Panel(f"Evaluation: {name}", lines))
    return panels


def diagnostics_panels(runs: Sequence[PlottedRun]) -> list[Panel]:
    """Returns a panel per diagnostic: every layer for a single run, or the median over layers for several runs."""
    panels = []
    for measure, title in MEASURES.items():
        lines = []
        for run in runs:
            layers = {
                name: columns
                for name, columns in run.curves.diagnostics.items()
                if np.isfinite(columns[measure]).any()
            }
            if len(runs) == 1:
                ends = (0, len(layers) - 1)
                lines += [
                    Line(color_of_depth(place, len(layers)), columns, measure, label=name if place in ends else None)
                    for place, (name, columns) in enumerate(layers.items())
                ]
            elif layers:
                columns = next(iter(layers.values()))
                median = np.median([of_layer[measure] for of_layer in layers.values()], axis=0)
                lines.append(Line(run.color, {**columns, measure: median}, measure))
        if lines:
            about = "per layer" if len(runs) == 1 else "median over layers"
            is_log = measure in ("gradient_rms", "update_rms")
            panels.append(Panel(f"{title}, {about}", lines, is_log=is_log))
    return panels


def color_of_depth(place: int, layers: int) -> tuple[float, ...]:
    """Returns a layer's color, from dark (first layer) to light (last layer)."""
    from matplotlib import colormaps

    return colormaps["viridis"](0.9 * place / max(1, layers - 1))


def points_of(columns: Columns, position: str, *measures: str) -> NDArray:
    """Returns an array [x, y, ...] of the points that are finite in all columns."""
    points = np.array([columns[name] for name in (position, *measures)])
    return points[:, np.isfinite(points).all(axis=0)]


def draw_panel(axis: Any, panel: Panel) -> None:
    from matplotlib.ticker import LogLocator

    style_panel(axis, panel.title)
    for line in panel.lines:
        draw_line(axis, panel, line)
    axis.set_xlabel(POSITION_LABELS[panel.position])
    axis.xaxis.set_major_formatter(axis_text)
    axis.margins(x=0.01)
    if panel.position == "position":
        ends = np.unique(np.concatenate([line.columns["position"] for line in panel.lines]))
        axis.set_xscale("log", base=2)
        axis.set_xticks(ends, [f"{end:,.0f}" for end in ends])
        axis.minorticks_off()
    if panel.is_log:
        axis.set_yscale("log")
        axis.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))  # more labels would overlap
        axis.yaxis.set_minor_formatter(axis_text)
    if panel.begins_at_zero:
        axis.set_ylim(bottom=0)
    if panel.is_training_loss:
        fit_to_later_loss(axis, panel)
    axis.yaxis.set_major_formatter(axis_text)
    if any(line.label for line in panel.lines):
        axis.legend(frameon=False, fontsize=9)


def draw_line(axis: Any, panel: Panel, line: Line) -> None:
    """Plots a curve. A smoothed curve is drawn over a faint line through all points."""
    x, y = points_of(line.columns, panel.position, line.measure)
    look = {"color": line.color, "linestyle": line.dash, "label": line.label, "linewidth": 1.6}
    if "standard_error" in line.columns:
        columns = {**line.columns, "error": np.nan_to_num(line.columns["standard_error"])}
        axis.errorbar(*points_of(columns, panel.position, line.measure, "error"), **look, **SCORES)
    elif panel.is_smoothed and len(y) >= FEWEST_SMOOTHED:
        axis.plot(x, y, color=line.color, linewidth=0.8, alpha=0.35)
        axis.plot(x, smoothed(y), **look)
    else:
        axis.plot(x, y, marker="o" if len(y) <= MOST_DOTS else None, markersize=3, **look)


def smoothed(values: ArrayLike) -> NDArray:
    """Computes a centered moving average over about 4% of the points.

    A trailing average would lag behind a falling loss. The window shrinks near the start, where the loss falls
    steeply.
    """
    number = np.arange(len(values))
    reach = np.minimum(round(SMOOTHED_SHARE * len(values) / 2), number // 4)
    first, end = number - reach, np.minimum(number + reach + 1, len(values))
    sums = np.append(0.0, np.cumsum(values))
    return (sums[end] - sums[first]) / (end - first)


def draw_marks(axis: Any, runs: Sequence[PlottedRun], position: str) -> None:
    """Draws event markers along the bottom, one row per run, and a dotted line at each resume or rollback."""
    for number, run in enumerate(runs):
        for kind, (shape, color, _) in MARKS.items():
            at = points_of(run.curves.happened.get(kind, {position: []}), position)[0]
            height = [0.02 + MARK_HEIGHT * number] * len(at)
            look = {"linewidths": 1.1, "zorder": 3, "transform": axis.get_xaxis_transform()}
            axis.scatter(at, height, 26, color, marker=shape, **look)
            for x in at if kind in ("resume", "rollback") else ():
                axis.axvline(x, color=color, linestyle=":", linewidth=1)


def fit_to_later_loss(axis: Any, panel: Panel) -> None:
    """Scales the axis to the loss after the first 2% of the run, so that the initial drop doesn't flatten the rest."""
    curves = [points_of(line.columns, panel.position, "loss") for line in panel.lines]
    if all(points.shape[1] <= FEW for points in curves):
        return
    points = np.concatenate(curves, axis=1)
    losses = points[1, points[0] >= SHARE_LEFT_OUT_OF_RANGE * points[0].max()]
    spread = np.ptp(losses) or 1.0
    below = MARK_HEIGHT * (len(curves) + 0.5) if panel.has_marks else 0.0
    axis.set_ylim(losses.min() - (0.03 + below) * spread, losses.max() + 0.03 * spread)


def axis_text(value: float, _position: int | None = None) -> str:
    """Formats a tick label for matplotlib: 1500000 becomes '1.5M', 3.2e18 stays unchanged."""
    if not value:
        return "0"
    if abs(value) >= 1e15 or abs(value) < 1e-5:
        return f"{value:.3g}".replace("e+", "e").replace("e-0", "e-")
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def color_of(number: int) -> str:
    return COLORS[number % len(COLORS)]


def style_panel(axis: Any, title: str) -> None:
    axis.set_title(title, fontsize=11, loc="left", fontweight="bold")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def save_figure(figure: Any, path: Path) -> None:
    """Writes a PNG atomically."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    write_durably(path, picture.getvalue())
