"""Plots runs as a PNG with several panels. The project's other figures use the same helpers."""

import io
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pretrain.errors import InputError
from pretrain.files import write_durably
from pretrain.runs.event_log import Event
from pretrain.terminal import printable
from pretrain_tools.runs.history import (
    MEASURES,
    History,
    count_flops,
    is_number,
    read_history,
    require_output,
    require_runs,
)

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Run colors, from the colorblind-safe Okabe-Ito palette."""
DASHES = ("-", "--", ":", "-.")
MARKS = {
    "resume": (">", "#009e73"),
    "checkpoint": ("|", "#888888"),
    "spike": ("^", "#d62728"),
    "skip": ("x", "#d62728"),
    "rollback": ("<", "#d62728"),
    "control": ("D", "#9467bd"),
    "divergence": ("P", "#d62728"),
    "explosion": ("*", "#d62728"),
    "warning": ("v", "#e69f00"),
    "end": ("s", "#555555"),
}
"""Events marked in the first panel: (matplotlib marker, color)."""
MARK_HEIGHT = 0.035
"""Height of a row of event markers, as a fraction of the panel."""
BUDGETS = {"tokens": "tokens", "hours": "running hours", "flops": "FLOPs"}
"""{key of a train event: axis label}. With several runs, the training loss is also plotted against these."""
MOST_SCORE_PANELS = 60
SMOOTHED_SHARE = 0.04
FEWEST_SMOOTHED = 20
MOST_DOTS = 50
"""Maximum number of points in a curve with point markers."""
FEW = 12
"""If no curve has more points than this, the loss axis shows all of them."""
SHARE_LEFT_OUT_OF_RANGE = 0.02
"""Fraction of the x-axis at the start that doesn't affect the range of the loss axis."""


@dataclass(frozen=True)
class Line:
    """A curve in a panel."""

    points: NDArray
    """[x, y], or [x, y, standard error]."""
    color: str | tuple[float, ...]
    dash: str = "-"
    label: str | None = None
    """Label in the panel's legend; None for no entry."""


@dataclass(frozen=True)
class Panel:
    """A plot of one quantity for all runs."""

    title: str
    lines: list[Line]
    x_label: str = "step"
    is_training_loss: bool = False
    is_smoothed: bool = False
    is_log: bool = False
    """Makes the y-axis logarithmic."""
    has_ranges: bool = False
    """True if x is the end of ranges that double in size."""


def plot_runs(folders: Sequence[Path], output: Path | None) -> Path:
    """Plots runs as a PNG and returns its path, by default in the run folder or the runs' common parent.

    Raises InputError if a folder isn't a run, if no step has been logged yet, or if the path isn't writable.
    """
    runs = require_runs(folders)
    folder = runs[0] if len(runs) == 1 else Path(os.path.commonpath([run.resolve().parent for run in runs]))
    path = require_output("--output", output or folder / "plot.png", "plot.png")
    path = path.with_name(f"{path.name.removesuffix('.png')}.png")
    histories = {str(run): read_history(run) for run in runs}
    if not any(history.of("train") for history in histories.values()):
        raise InputError(f"{', '.join(map(str, runs))}: no steps logged yet")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_png(histories, path)
    return path


def write_png(runs: dict[str, History], path: Path) -> None:
    """Writes a PNG with one panel per quantity, and a legend for the runs and event markers."""
    # pyplot has global state and may need a display.
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    panels = panels_of(runs)
    rows = math.ceil(len(panels) / 3)
    figure = Figure(figsize=(16, 4.1 * rows + 0.9), layout="constrained")
    axes = figure.subplots(rows, 3, squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        draw_panel(axis, panel)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    marks = draw_marks(axes.flat[0], runs.values())
    lines = [Line2D([], [], color=color_of(number), linewidth=2) for number in range(len(runs))]
    names = [*map(literal, runs), *marks]
    figure.legend([*lines, *marks.values()], names, loc="outside upper left", ncols=5, frameon=False, fontsize=10)
    save_figure(figure, path)


def panels_of(runs: dict[str, History]) -> list[Panel]:
    """Returns all panels with data."""
    trained = [history.of("train") for history in runs.values()]

    def training(title: str, measure: str, position: str = "step", **options: Any) -> Panel:
        lines = [Line(points_of(events, position, measure), color_of(n)) for n, events in enumerate(trained)]
        return Panel(title, lines, BUDGETS.get(position, position), **options)

    loss = {"is_training_loss": True, "is_smoothed": True}
    panels = [training("Training loss (bold: smoothed)", "loss", **loss)]
    if len(runs) > 1:
        for history in runs.values():
            count_flops(history)
        panels += [training(f"Training loss against {label}", "loss", key, **loss) for key, label in BUDGETS.items()]
    panels += [
        Panel("Validation loss", validation_lines(runs.values())),
        Panel(
            "Validation loss by position, at the end of each stage",
            lines_by_position(runs),
            "position in the document (end of range)",
            has_ranges=True,
        ),
        training("Learning rate", "learning_rate"),
        training("Gradient norm, before clipping", "grad_norm", is_smoothed=True, is_log=True),
        training("Tokens per second", "tokens_per_second", is_smoothed=True),
        *score_panels(runs.values()),
    ]
    if len(runs) == 1:
        panels += diagnostics_panels(*runs.values())
    return [panels[0], *(panel for panel in panels[1:] if any(line.points.size for line in panel.lines))]


def validation_lines(runs: Iterable[History]) -> list[Line]:
    """Returns a line per run and source, with a dash pattern per source."""
    dashes: dict[str, str] = {}
    lines = []
    for number, history in enumerate(runs):
        for source, events in history.validation().items():
            losses = {
                source: "loss",
                f"{source}, average": "average_loss",
                f"{source}, stage's length": "stage_loss",
            }
            for name, measure in losses.items():
                points = points_of(events, "step", measure)
                if points.size:
                    # Colors identify runs, so a source needs only one legend entry.
                    label = None if name in dashes else name
                    dash = dashes.setdefault(name, DASHES[len(dashes) % len(DASHES)])
                    lines.append(Line(points, color_of(number), dash, label))
    return lines


def lines_by_position(runs: dict[str, History]) -> list[Line]:
    """Returns a line per run, source and stage. Omits losses with only one position range."""
    lines: list[Line] = []
    for name, history in runs.items():
        for source, events in history.validation().items():
            measured = [event for event in events if len(event.get("loss_by_position") or {}) > 1]
            last_of_stage = {event.get("stage_sequence_length"): event for event in measured}
            for event in last_of_stage.values():
                losses = event["loss_by_position"]
                ends = [int(positions.partition("-")[2]) + 1 for positions in losses]
                points = np.array([ends, list(losses.values())], float)
                label = f"{source}, step {event['step']:,}"
                if len(runs) > 1:
                    label = f"{name}: {label}"
                lines.append(Line(points, color_of(len(lines)), label=label))
    return lines


def score_panels(runs: Iterable[History]) -> list[Panel]:
    """Returns a panel for each score with more than one point."""
    panels: dict[str, Panel] = {}
    for number, history in enumerate(runs):
        for name, scores in history.scores().items():
            if not name.endswith("perplexity"):
                rows = [{**vars(score), "error": score.standard_error or 0.0} for score in scores]
                line = Line(points_of(rows, "step", "value", "error"), color_of(number))
                panels.setdefault(name, Panel(f"Evaluation: {name}", [])).lines.append(line)
    found = [panel for panel in panels.values() if sum(line.points.shape[1] for line in panel.lines) > 1]
    return found[:MOST_SCORE_PANELS]


def diagnostics_panels(history: History) -> list[Panel]:
    """Returns a panel per diagnostic, with a line per layer, from dark (first layer) to light (last layer)."""
    from matplotlib import colormaps

    panels = []
    events = history.of("diagnostics")
    layers = dict.fromkeys(name for event in events for name in event["layers"])
    for measure, title in MEASURES.items():
        rows = [{"step": event["step"], **dict(zip(event["layers"], event[measure], strict=True))} for event in events]
        points = {name: points_of(rows, "step", name) for name in layers}
        measured = [name for name in layers if points[name].size]
        lines = [
            Line(
                points[name],
                colormaps["viridis"](0.9 * place / len(measured)),
                label=name if name in (measured[0], measured[-1]) else None,
            )
            for place, name in enumerate(measured)
        ]
        panels.append(Panel(f"{title}, per layer", lines, is_log=measure in ("gradient_rms", "update_rms")))
    return panels


def points_of(events: Iterable[Event], position: str, *measures: str) -> NDArray:
    """Returns an array [x, y, ...] of the events in which all these values are finite numbers."""
    names = (position, *measures)
    rows = [[event.get(name) for name in names] for event in events]
    finite = [row for row in rows if all(map(is_number, row))]
    return np.array(finite, float).reshape(-1, len(names)).T


def draw_panel(axis: Any, panel: Panel) -> None:
    style_panel(axis, panel.title)
    for line in panel.lines:
        draw_line(axis, line, is_smoothed=panel.is_smoothed)
    axis.set_xlabel(panel.x_label)
    axis.margins(x=0.01)
    if panel.has_ranges:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:,.0f}")
    if panel.is_log:
        axis.set_yscale("log")
    if panel.is_training_loss:
        fit_to_later_loss(axis, panel)
    if any(line.label for line in panel.lines):
        axis.legend(frameon=False, fontsize=9)


def draw_line(axis: Any, line: Line, *, is_smoothed: bool) -> None:
    """Plots a curve. A smoothed curve is drawn over a faint line through all points."""
    x, y, *errors = line.points
    label = line.label and literal(line.label)
    look = {"color": line.color, "linestyle": line.dash, "label": label, "linewidth": 1.6}
    if errors:
        axis.errorbar(x, y, *errors, marker="o", markersize=4, capsize=3, **look)
    elif is_smoothed and len(y) >= FEWEST_SMOOTHED:
        axis.plot(x, y, color=line.color, linewidth=0.8, alpha=0.35)
        axis.plot(x, smoothed(y), **look)
    else:
        axis.plot(x, y, marker="o" if len(y) <= MOST_DOTS else None, markersize=3, **look)


def smoothed(values: ArrayLike) -> NDArray:
    """Computes a centered moving average over about 4% of the points. A trailing one would lag behind."""
    from scipy.ndimage import uniform_filter1d

    return uniform_filter1d(np.asarray(values), 2 * round(SMOOTHED_SHARE * len(values) / 2) + 1, mode="nearest")


def draw_marks(axis: Any, runs: Iterable[History]) -> dict[str, Any]:
    """Draws event markers along the bottom, one row per run. Returns {event name: marker} for the legend."""
    drawn = {}
    for number, history in enumerate(runs):
        for kind, (shape, color) in MARKS.items():
            (steps,) = points_of(history.of(kind), "step")
            if steps.size:
                heights = np.full(len(steps), 0.02 + MARK_HEIGHT * number)
                look = {"linewidths": 1.1, "zorder": 3, "transform": axis.get_xaxis_transform()}
                drawn[kind] = axis.scatter(steps, heights, 26, color, marker=shape, **look)
    return drawn


def fit_to_later_loss(axis: Any, panel: Panel) -> None:
    """Scales the axis to the loss after the first 2% of the run, so that the initial drop doesn't flatten the rest."""
    curves = [line.points for line in panel.lines]
    if all(points.shape[1] <= FEW for points in curves):
        return
    x, losses = np.concatenate(curves, axis=1)
    later = losses[x >= SHARE_LEFT_OUT_OF_RANGE * x.max()]
    margin = 0.03 + MARK_HEIGHT * len(curves)
    spread = np.ptp(later) or 1.0
    axis.set_ylim(later.min() - margin * spread, later.max() + margin * spread)


def color_of(number: int) -> str:
    return COLORS[number % len(COLORS)]


def style_panel(axis: Any, title: str) -> None:
    axis.set_title(literal(title), fontsize=11, loc="left", fontweight="bold")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def literal(text: str) -> str:
    """Escapes dollar signs, between which matplotlib expects a formula, and control characters."""
    return printable(text).replace("$", r"\$")


def save_figure(figure: Any, path: Path) -> None:
    """Writes a PNG atomically."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    write_durably(path, picture.getvalue())
