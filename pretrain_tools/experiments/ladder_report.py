"""Writes a fitted scaling law as text, JSON and a plot, and reads the JSON file for predictions."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.errors import InputError, Problems, one_line, read_small_file
from pretrain.files import write_durably
from pretrain.runs.run_folder import output_problem
from pretrain.units import count_text, counted, table
from pretrain_tools.experiments.ladder import (
    FAR_COMPUTE,
    Ladder,
    cautions_of,
    compute_of,
    distinct_sizes,
    make_ladder,
    prediction_problem,
    read_ladder_runs,
    read_predictions,
    rungs_of,
)
from pretrain_tools.experiments.scaling_law import law_of, law_values
from pretrain_tools.runs.plots import COLORS, save_figure, style_panel

LADDER_FORMAT = {"format": "groundwork-ladder", "version": 1, "count": "matrix"}


def report_ladder(folders: Sequence[Path], *, predict: Sequence[str], output: Path | None) -> None:
    """Fits a scaling law to the runs in these folders, prints it, and writes it as JSON and PNG.

    Raises InputError listing all problems.

    Args:
        predict: arguments to predict; see `read_predictions`.
        output: path without a suffix. None means `ladder` in the runs' folder, or in the current folder if several
            are passed.
    """
    base = output or (folders[0] if len(folders) == 1 else Path()) / "ladder"
    problems = Problems()
    asked = problems.attempt(read_predictions, predict)
    found = problems.attempt(read_ladder_runs, folders)
    if problem := output_problem(base.parent):
        problems.append(f"--{problem}")
    problems.stop_if_any()
    runs, left_out = found
    ladder = make_ladder(rungs_of(runs), asked)
    base.parent.mkdir(parents=True, exist_ok=True)
    print(ladder_text(ladder, left_out))
    values, picture = (base.with_name(f"{base.name}{ending}") for ending in (".json", ".png"))
    write_durably(values, json.dumps(ladder_values(ladder), indent=1) + "\n")
    draw_ladder(ladder, picture)
    print(values, picture, sep="\n")


def ladder_text(ladder: Ladder, left_out: list[str]) -> str:
    """Formats the fit, residuals, back-test, predictions and warnings as text."""
    law = ladder.law
    rows = [["N", "tokens", "loss", "spread", "seeds", "residual"]]
    for rung, residual in zip(ladder.rungs, law.residuals, strict=True):
        rows.append(
            [
                count_text(rung.parameters),
                count_text(rung.tokens),
                f"{rung.loss:.4f}",
                f"{rung.spread:.4f}" if rung.spread is not None else "-",
                str(len(rung.folders)),
                f"{residual:+.2%}",
            ]
        )
    fit = ", ".join(f"{name} = {value:.4g}" for name, value in law.coefficients.items())
    counted_as = "N: parameters in matmuls, including the head but not the embedding tables"
    lines = [
        f"L(N, D) = E + A / N^alpha + B / D^beta with {fit}",
        counted_as,
        "",
        table(rows, right=set(range(6))),
        "",
        f"noise around the scaling law: {law.noise:.2%}",
    ]
    if told := ladder.backtest:
        low, high = told.interval
        verdict = "within" if low <= told.measured <= high else "OUTSIDE"
        lines.append(
            f"back-test: a fit without the largest size predicts {told.loss:.4f} ({low:.4f} to {high:.4f}) at "
            f"{told.times_compute:.3g} times the compute. The measured loss is {told.measured:.4f} "
            f"({told.measured / told.loss - 1:+.2%}), {verdict} the interval."
        )
    if ladder.predictions:
        rows = [["prediction", "N", "tokens", "compute", "loss", "90% interval"]]
        for one in ladder.predictions:
            low, high = one.interval
            sizes = [count_text(one.parameters), count_text(one.tokens), f"{one.times_compute:.3g} x"]
            rows.append([one.name, *sizes, f"{one.loss:.4f}", f"{low:.4f} to {high:.4f}"])
        lines += ["", table(rows, right={1, 2, 3, 4})]
    lines += ["", *left_out]
    if worse := sum(rung.left_out for rung in ladder.rungs):
        lines.append(f"skipped: {counted(worse, 'run')} with worse settings at the same size and token count")
    return "\n".join([*lines, *(f"warning: {caution}" for caution in cautions_of(ladder))])


def ladder_values(ladder: Ladder) -> dict[str, Any]:
    """Returns the contents of ladder.json, with losses in nats per token."""
    law = ladder.law
    return {
        **LADDER_FORMAT,
        "coefficients": law.coefficients,
        "noise": law.noise,
        "rungs": [
            {**vars(rung), "folders": list(map(str, rung.folders)), "residual": round(float(residual), 6)}
            for rung, residual in zip(ladder.rungs, law.residuals, strict=True)
        ],
        "backtest": vars(ladder.backtest) if ladder.backtest else None,
        "predictions": [vars(one) for one in ladder.predictions],
        "cautions": cautions_of(ladder),
        "law": law_values(law),
    }


def read_ladder(path: Path) -> Callable[[int, int], tuple[float, float, float, str]]:
    """Reads a ladder.json. Raises InputError if the file is invalid or its fit doesn't allow predictions.

    Returns a function (parameters in matmuls, tokens) -> (loss, low, high, note), with the 90% interval in nats per
    token.
    """
    try:
        values = json.loads(read_small_file(path, most_bytes=1 << 24))
        if {name: values.get(name) for name in LADDER_FORMAT} != LADDER_FORMAT:
            raise ValueError("unknown format or version")
        law = law_of(values["law"])
        rungs = values["rungs"]
        sizes = distinct_sizes(rung["parameters"] for rung in rungs)
        largest_compute = max(compute_of(rung["parameters"], rung["tokens"]) for rung in rungs)
    except InputError as error:
        raise InputError(f"--ladder {path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(f"--ladder {path}: wasn't written by runs.py ladder ({one_line(error)})") from None
    if problem := prediction_problem(len(sizes), law.noise):
        raise InputError(f"--ladder {path}: {problem}")

    def expect(parameters: int, tokens: int) -> tuple[float, float, float, str]:
        times = compute_of(parameters, tokens) / largest_compute
        far = " if the scaling law still holds there" if times > FAR_COMPUTE else ""
        known = (
            f"90% interval from {path}, at {times:.3g} times the compute of its largest run; valid for the same data, "
            f"tokenizer and settings{far}"
        )
        return float(law.loss(parameters, tokens)), *law.interval(parameters, tokens), known

    return expect


def draw_ladder(ladder: Ladder, path: Path) -> None:
    """Plots loss against compute: the runs, the scaling law with its interval, and the predictions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    panel = figure.add_subplot()
    law = ladder.law
    logs = np.log([[rung.parameters, rung.tokens] for rung in ladder.rungs]).T
    # Along the curve, the token count is a power law in N, fitted to the rungs.
    slope, offset = np.polyfit(*logs, 1)
    largest = max([logs[0].max(), *(math.log(one.parameters) for one in ladder.predictions)])
    sizes = np.exp(np.linspace(logs[0].min(), largest, 60))
    tokens = np.exp(slope * np.log(sizes) + offset)
    low, high = np.array([law.interval(n, d) for n, d in zip(sizes, tokens, strict=True)]).T
    compute = compute_of(sizes, tokens)
    panel.fill_between(compute, low, high, color=COLORS[0], alpha=0.15, linewidth=0, label="90% interval for one run")
    panel.plot(compute, law.loss(sizes, tokens), color=COLORS[0], linewidth=1.5, label="scaling law, along the ladder")
    measured = [(rung.compute, rung.loss) for rung in ladder.rungs]
    panel.plot(*zip(*measured, strict=True), "o", color="#000000", markersize=5, label="measured")
    predicted = [(compute_of(one.parameters, one.tokens), one.loss) for one in ladder.predictions]
    if predicted:
        panel.plot(*zip(*predicted, strict=True), "*", color=COLORS[1], markersize=11, label="predicted")
    style_panel(panel, "Validation loss (nats per token) against compute")
    panel.set_xscale("log")
    panel.set_xlabel("FLOPs (6 N D)")
    panel.legend(frameon=False, fontsize=9)
    save_figure(figure, path)
