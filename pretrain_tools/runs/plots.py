"""Pictures of runs: one PNG for a paper or a message, one HTML page that works from a file, without a network."""

import itertools
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pretrain.files import write_durably
from pretrain.runs.history import is_number
from pretrain_tools.runs.curves import MARKS, RunCurves, differing_settings

# Okabe and Ito's colours, which the colour-blind tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("-", "--", ":", "-.")
POSITION_LABELS = {"step": "step", "tokens": "tokens", "hours": "hours of running", "flops": "FLOPs"}
PAGE = Path(__file__).with_name("plots_page.html")
MOST_SCORE_PANELS = 15
MARK_HEIGHT = 0.035
"""Of a run's line of event marks, as a share of the panel."""
SMOOTHED_SHARE = 0.04
FEW = 12
"""Values of a curve up to which each is a dot, and the first ones count as much as the rest."""
SHARE_LEFT_OUT_OF_RANGE = 0.02
"""Share of a run that does not decide the range of the loss."""


def write_png(runs: list[RunCurves], path: Path) -> None:
    """One panel per quantity, all runs in each, with a legend of runs and of event marks on top."""
    from matplotlib.figure import Figure

    panels = picture_panels(runs)
    rows = math.ceil(len(panels) / 3)
    figure = Figure(figsize=(16, 4.1 * rows + 0.9), layout="constrained")
    axes = figure.subplots(rows, 3, squeeze=False)
    for axis, (title, position, draw) in zip(axes.flat, panels, strict=False):
        axis.set_title(title, fontsize=11, loc="left", fontweight="bold")
        axis.set_xlabel(POSITION_LABELS.get(position, ""))
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        draw(axis, position)
        if position in POSITION_LABELS:
            axis.xaxis.set_major_formatter(axis_text)
            axis.margins(x=0.01)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    handles = [_line_handle(COLOURS[n % len(COLOURS)], f"{run.name} ({run.state})") for n, run in enumerate(runs)]
    happened = {mark["event"] for run in runs for mark in run.marks}
    handles += [
        _line_handle(colour, label, "none", marker=shape, markersize=6)
        for kind, (shape, colour, label) in MARKS.items()
        if kind in happened
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=5, frameon=False, fontsize=10)
    unfinished = path.with_name(f".{path.name}.unfinished")
    figure.savefig(unfinished, dpi=110, format="png")
    unfinished.replace(path)


def picture_panels(runs: list[RunCurves]) -> list[tuple[str, str, Any]]:
    """(title, position, function that draws it) of each panel that has data."""

    def measure(title: str, name: str, **options: bool) -> tuple[str, str, Any]:
        return title, "step", lambda axis, at: _draw_measure(axis, runs, at, name, **options)

    loss = measure("Training loss (bold: smoothed)", "loss", marks=True)
    # By tokens or FLOPs a single curve only has other numbers below it.
    positions = ("tokens", "hours", "flops") if len(runs) > 1 else ("hours",)
    losses = [
        (f"Training loss by {POSITION_LABELS[at]}", at, lambda axis, at: _draw_measure(axis, runs, at, "loss"))
        for at in positions
        if any(is_number(value) for run in runs for value in run.train[at])
    ]
    panels = []
    if any(run.validation for run in runs):
        panels.append(("Validation loss", "step", lambda axis, at: _draw_validation(axis, runs, at)))
    if any(run.by_position for run in runs):
        title = "Validation loss by position, at the end of each stage"
        panels.append((title, "position", lambda axis, _: _draw_by_position(axis, runs)))
    panels += [
        measure("Learning rate", "learning_rate", smooth=False),
        measure("Gradient norm, before clipping", "grad_norm", log=True),
        measure("Tokens per second", "tokens_per_second"),
    ]
    panels = [loss, *losses, *panels] if len(runs) > 1 else [loss, *panels, *losses]
    names = dict.fromkeys(name for run in runs for name in run.scores if not name.endswith("perplexity"))
    # Means of sets first, then what moves first: a small model's accuracies stay at chance.
    names = sorted(names, key=lambda name: (not name.startswith(("core ·", "small ·")), not name.endswith("_byte")))
    return panels + [panel for name in names for panel in _score_panels(runs, name)][:MOST_SCORE_PANELS]


def _score_panels(runs: list[RunCurves], name: str) -> list[tuple[str, str, Any]]:
    """Over steps where a run was evaluated several times; else one point per run; none for one point in all."""
    points = [len(run.scores[name]["step"]) for run in runs if name in run.scores]
    if max(points) > 1:
        return [(f"Evaluation: {name}", "step", lambda axis, at: _draw_score(axis, runs, at, name))]
    if len(points) > 1:
        return [(f"Evaluation: {name}", "run", lambda axis, _: _draw_score_by_run(axis, runs, name))]
    return []


def _points(columns: dict, position: str, measure: str) -> tuple[list[float], list[float]]:
    pairs = zip(columns[position], columns[measure], strict=True)
    points = [(x, y) for x, y in pairs if x is not None and y is not None]
    return [x for x, _ in points], [y for _, y in points]


def _draw_measure(
    axis: Any, runs: list[RunCurves], position: str, measure: str, *, smooth=True, log=False, marks=False
) -> None:
    for number, run in enumerate(runs):
        x, y = _points(run.train, position, measure)
        colour = COLOURS[number % len(COLOURS)]
        smooth_here = smooth and len(y) >= 20
        look = {"linewidth": 0.8, "alpha": 0.35} if smooth_here else {"linewidth": 1.6}
        axis.plot(x, y, color=colour, marker="o" if len(y) <= FEW else None, markersize=3, **look)
        if smooth_here:
            x, y = _points(run.train | run.train_means, position, measure)
            axis.plot(x, smoothed(y), color=colour, linewidth=1.8)
    if log:
        axis.set_yscale("log")
        axis.yaxis.set_minor_formatter(axis_text)
    elif measure in ("tokens_per_second", "learning_rate"):
        axis.set_ylim(bottom=0)
    if measure == "loss":
        _leave_out_beginning(axis, [_points(run.train, position, measure) for run in runs], marks=marks)
    axis.yaxis.set_major_formatter(axis_text)
    if marks:
        _draw_marks(axis, runs, position)


def smoothed(values: list[float]) -> list[float]:
    """Means over windows of about 4 % of the points around each.

    Centred, since a mean of what came before lags behind a falling loss; and shorter near the steep beginning.
    """
    sums = [0.0, *itertools.accumulate(values)]
    means = []
    for number in range(len(values)):
        reach = min(round(SMOOTHED_SHARE * len(values) / 2), number // 4)
        first, end = number - reach, min(number + reach + 1, len(values))
        means.append((sums[end] - sums[first]) / (end - first))
    return means


def _draw_marks(axis: Any, runs: list[RunCurves], position: str) -> None:
    """Symbols along the bottom, one line of them per run; a dotted line where training went back or on."""
    for number, run in enumerate(runs):
        for kind, (shape, colour, _) in MARKS.items():
            at = [mark[position] for mark in run.marks if mark["event"] == kind and mark[position] is not None]
            height = [0.02 + MARK_HEIGHT * number] * len(at)
            look = {"marker": shape, "s": 26, "c": colour, "linewidths": 1.1, "zorder": 3}
            axis.scatter(at, height, **look, transform=axis.get_xaxis_transform())
            if kind in ("resume", "rollback"):
                for x in at:
                    axis.axvline(x, color=colour, linestyle=":", linewidth=1)


def _leave_out_beginning(axis: Any, curves: list[tuple[list[float], list[float]]], *, marks: bool) -> None:
    """The axis fits what comes after the first 2 %: the fall from the initial loss would flatten all the rest."""
    if all(len(x) <= FEW for x, _ in curves):
        return
    end = max((x[-1] for x, _ in curves if x), default=0)
    later = [value for x, y in curves for at, value in zip(x, y, strict=True) if at >= SHARE_LEFT_OUT_OF_RANGE * end]
    if later:
        spread = (max(later) - min(later)) or 1.0
        below = MARK_HEIGHT * (len(curves) + 0.5) if marks else 0.0
        axis.set_ylim(min(later) - (0.03 + below) * spread, max(later) + 0.03 * spread)


def _draw_validation(axis: Any, runs: list[RunCurves], position: str) -> None:
    sources = list(dict.fromkeys(source for run in runs for source in run.validation))
    for number, run in enumerate(runs):
        for source, columns in run.validation.items():
            x, y = _points(columns, position, "loss")
            dash = DASHES[sources.index(source) % len(DASHES)]
            axis.plot(x, y, dash, color=COLOURS[number % len(COLOURS)], marker="o", markersize=3, linewidth=1.5)
    handles = [_line_handle("#444444", source, DASHES[n % len(DASHES)]) for n, source in enumerate(sources)]
    axis.legend(handles=handles, frameon=False, fontsize=9, title="source", title_fontsize=9)


def _draw_by_position(axis: Any, runs: list[RunCurves]) -> None:
    """A point for each range of positions, at its end; a line for each source and stage."""
    ends, handles = set(), []
    for number, run in enumerate(runs):
        for place, (name, columns) in enumerate(run.by_position.items()):
            colour = COLOURS[(number if len(runs) > 1 else place) % len(COLOURS)]
            dash = DASHES[place % len(DASHES)]
            axis.plot(*_points(columns, "position", "loss"), dash, color=colour, marker="o", markersize=4)
            ends |= set(columns["position"])
            handles.append(_line_handle(colour, f"{run.name}: {name}" if len(runs) > 1 else name, dash))
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(ends), [f"{end:,}" for end in sorted(ends)])
    axis.minorticks_off()
    axis.set_xlabel("position in the document, up to")
    axis.legend(handles=handles, frameon=False, fontsize=9)


def _draw_score(axis: Any, runs: list[RunCurves], position: str, name: str) -> None:
    for number, run in enumerate(runs):
        columns = run.scores.get(name)
        if columns is None:
            continue
        x, y = _points(columns, position, "value")
        errors = [error or 0.0 for error in columns["standard_error"]]
        _, errors = _points(columns | {"errors": errors}, position, "errors")
        draw_with_band(axis, x, y, errors, color=COLOURS[number % len(COLOURS)])


def draw_with_band(
    axis: Any, x: Sequence[float], values: Sequence[float], errors: Sequence[float], **look: Any
) -> None:
    """A line through the values, and around it a band of one standard error to each side."""
    (line,) = axis.plot(x, values, marker="o", markersize=4, **look)
    low, high = zip(
        *((value - error, value + error) for value, error in zip(values, errors, strict=True)), strict=True
    )
    axis.fill_between(x, low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def _draw_score_by_run(axis: Any, runs: list[RunCurves], name: str) -> None:
    measured = [(n, run.name, run.scores[name]) for n, run in enumerate(runs) if name in run.scores]
    for place, (number, _, columns) in enumerate(measured):
        value, error = columns["value"][-1], columns["standard_error"][-1]
        colour = COLOURS[number % len(COLOURS)]
        axis.errorbar([place], [value], yerr=[error or 0.0], color=colour, marker="o", capsize=4)
        beside = {"textcoords": "offset points", "xytext": (8, 0), "va": "center", "fontsize": 9}
        axis.annotate(f"{value:.4g}", (place, value), **beside)
    axis.set_xticks(range(len(measured)), [label for _, label, _ in measured])
    axis.set_xlim(-0.7, len(measured) - 0.3)


def axis_text(value: float, _position: int | None = None) -> str:
    """1500000 -> '1.5M'; where counts have no unit, 3.2e18. The second argument is matplotlib's."""
    if not value:
        return "0"
    if abs(value) >= 1e15 or abs(value) < 1e-5:
        return f"{value:.3g}".replace("e+", "e").replace("e-0", "e-")
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def _line_handle(colour: str, label: str, dash: str = "-", **mark: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, label=label, **({"linestyle": dash, "linewidth": 2} | mark))


def write_page(runs: list[RunCurves], path: Path) -> None:
    """Writes `page_text`."""
    write_durably(path, page_text(runs))


def page_text(runs: list[RunCurves]) -> str:
    """A page with the same curves to hover over, zoom into and choose the x-axis of; everything is in the one file."""
    page = {
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "runs": [{**asdict(run), "settings": None, "colour": COLOURS[n % len(COLOURS)]} for n, run in enumerate(runs)],
        "differences": differing_settings(runs) if len(runs) > 1 else {},
        "marks": {kind: {"colour": colour, "label": label} for kind, (_, colour, label) in MARKS.items()},
    }
    # In a script element nothing may look like the end of one, whatever a run's names and messages say.
    data = json.dumps(page, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    title = ", ".join(run.name for run in runs).replace("&", "&amp;").replace("<", "&lt;")
    return PAGE.read_text(encoding="utf-8").replace("{{TITLE}}", title, 1).replace("{{DATA}}", data, 1)
