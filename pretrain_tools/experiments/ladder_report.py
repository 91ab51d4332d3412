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
    LEAST_SIZES,
    MOST_NOISE,
    Ladder,
    cautions_of,
    compute_of,
    distinct_sizes,
    make_ladder,
    read_ladder_runs,
    read_predictions,
    rungs_of,
)
from pretrain_tools.experiments.scaling_law import (
    EXPONENT,
    EXPONENT_SD,
    LOG_BALANCE_SD,
    LOG_E_SD,
    REFITS,
    SHARE_OF_E,
    law_of,
    law_values,
)
from pretrain_tools.runs.plots import COLORS, save_figure, style_panel

LADDER_FORMAT = {"format": "groundwork-ladder", "version": 1}
MOSTLY_PRIOR = 0.5
"""An estimate is marked "mostly the prior" if its standard deviation exceeds this fraction of the prior's."""
COUNTED = {
    "matrix": "N: parameters in matmuls, including the head but not the embedding tables",
    "total": "N: all parameters (active parameters in an MoE model)",
}
HOW = (
    f"90% intervals come from {REFITS} refits with resampled losses, noise levels and priors. Priors: alpha and "
    f"beta are {EXPONENT} +- {EXPONENT_SD}; E is {SHARE_OF_E:.0%} of the lowest loss, within a factor of "
    f"{math.exp(LOG_E_SD):.1f}; the size and token terms are equal, within a factor of {math.exp(LOG_BALANCE_SD):.1f}."
)


def report_ladder(folders: Sequence[Path], *, predict: Sequence[str], count: str, output: Path | None) -> None:
    """Fits a scaling law to the runs in these folders, prints it, and writes it as JSON and PNG.

    Raises InputError listing all problems.

    Args:
        predict: arguments to predict; see `read_predictions`.
        count: how N is counted: matrix (non-embedding parameters) or total.
        output: path without a suffix. None means `ladder` in the runs' folder, or in the current folder if several
            are passed.
    """
    base = output or (folders[0] if len(folders) == 1 else Path()) / "ladder"
    problems = Problems()
    asked = problems.attempt(read_predictions, predict, count)
    found = problems.attempt(read_ladder_runs, folders, count)
    if problem := output_problem(base.parent):
        problems.append(f"--{problem}")
    problems.stop_if_any()
    base.parent.mkdir(parents=True, exist_ok=True)
    runs, left_out = found
    ladder = make_ladder(rungs_of(runs), asked, count)
    print(ladder_text(ladder, left_out))
    values, picture = (base.with_name(f"{base.name}{ending}") for ending in (".json", ".png"))
    write_durably(values, json.dumps(ladder_values(ladder), indent=1) + "\n")
    draw_ladder(ladder, picture)
    print(values, picture, sep="\n")


def ladder_text(ladder: Ladder, left_out: list[str]) -> str:
    """Formats the fit, residuals, back-test, predictions and warnings as text."""
    law = ladder.law
    rows = [["N", "tokens", "D/N", "loss", "spread", "seeds", "law", "residual"]]
    for rung, residual in zip(ladder.rungs, law.residuals, strict=True):
        rows.append(
            [
                count_text(rung.parameters),
                count_text(rung.tokens),
                f"{rung.tokens / rung.parameters:.3g}",
                f"{rung.loss:.4f}",
                f"{rung.spread:.4f}" if rung.spread is not None else "-",
                str(len(rung.folders)),
                f"{float(law.loss(rung.parameters, rung.tokens)):.4f}",
                f"{residual:+.2%}",
            ]
        )
    fits = [["", "fit", "90% interval", ""]]
    for name, value in law.coefficients.items():
        low, high = law.coefficient_intervals[name]
        note = "mostly the prior" if law.prior_shares.get(name, 0.0) > MOSTLY_PRIOR else ""
        fits.append([name, f"{value:.4g}", f"{low:.4g} to {high:.4g}", note])
    lines = ["L(N, D) = E + A / N^alpha + B / D^beta", COUNTED[ladder.count], "", table(rows, right=set(range(8))), ""]
    lines += [table(fits), "", f"noise around the scaling law: {law.noise:.2%}"]
    if told := ladder.backtest:
        low, high = told.interval
        lines.append(
            f"back-test: a fit without the largest size predicts {told.loss:.4f} ({low:.4f} to {high:.4f}) at "
            f"{told.times_compute:.3g} times the compute. The measured loss is {ladder.measured:.4f} "
            f"({ladder.measured / told.loss - 1:+.2%}), {'within' if told.holds(ladder.measured) else 'OUTSIDE'} the "
            "interval."
        )
    if ladder.predictions:
        rows = [["prediction", "N", "tokens", "compute", "loss", "90% interval", ""]]
        for one in ladder.predictions:
            low, high = one.interval
            sizes = [count_text(one.parameters), count_text(one.tokens), f"{one.times_compute:.3g} x"]
            half = f"+- {(high - low) / 2 / one.loss:.1%}"
            rows.append([one.name, *sizes, f"{one.loss:.4f}", f"{low:.4f} to {high:.4f}", half])
        lines += ["", table(rows, right={1, 2, 3, 4})]
    lines += ["", HOW, *left_out]
    if worse := sum(rung.left_out for rung in ladder.rungs):
        lines.append(f"skipped: {counted(worse, 'run')} with worse settings at the same size and token count")
    return "\n".join([*lines, *(f"warning: {caution}" for caution in cautions_of(ladder))])


def ladder_values(ladder: Ladder) -> dict[str, Any]:
    """Returns the contents of ladder.json, with losses in nats per token."""
    law = ladder.law
    return {
        **LADDER_FORMAT,
        "count": ladder.count,
        "coefficients": law.coefficients,
        "intervals": law.coefficient_intervals,
        "prior_shares": law.prior_shares,
        "noise": law.noise,
        "rungs": [
            {**vars(rung), "folders": list(map(str, rung.folders)), "residual": round(float(residual), 6)}
            for rung, residual in zip(ladder.rungs, law.residuals, strict=True)
        ],
        "backtest": vars(ladder.backtest) if ladder.backtest else None,
        "predictions": [vars(one) for one in ladder.predictions],
        "cautions": cautions_of(ladder),
        "interval_method": HOW,
        "law": law_values(law),
    }


def read_ladder(path: Path) -> Callable[[int, int, int], tuple[float, float, float, str]]:
    """Reads a ladder.json. Raises InputError if the file is invalid or its fit doesn't allow predictions.

    Returns a function (matrix parameters, total parameters, tokens) -> (loss, low, high, note), with the 90% interval
    in nats per token.
    """
    try:
        values = json.loads(read_small_file(path, most_bytes=1 << 24))
        if {name: values.get(name) for name in LADDER_FORMAT} != LADDER_FORMAT:
            raise ValueError("unknown format or version")
        law = law_of(values["law"])
        rungs = values["rungs"]
        sizes = distinct_sizes(rung["parameters"] for rung in rungs)
        largest_compute = max(compute_of(rung["parameters"], rung["tokens"]) for rung in rungs)
        counts_matrices = values["count"] == "matrix"
    except InputError as error:
        raise InputError(f"--ladder {path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(f"--ladder {path}: wasn't written by runs.py ladder ({one_line(error)})") from None
    if len(sizes) < LEAST_SIZES:
        raise InputError(
            f"--ladder {path}: contains only {len(sizes)} model sizes; a prediction needs at least {LEAST_SIZES}"
        )
    if law.noise > MOST_NOISE:
        raise InputError(
            f"--ladder {path}: the noise around the scaling law is {law.noise:.1%}, but must be at most "
            f"{MOST_NOISE:.0%}"
        )

    def expect(matrix_parameters: int, parameters: int, tokens: int) -> tuple[float, float, float, str]:
        size = matrix_parameters if counts_matrices else parameters
        times = compute_of(size, tokens) / largest_compute
        far = " if the scaling law still holds there" if times > FAR_COMPUTE else ""
        known = (
            f"90% interval from {path}, at {times:.3g} times the compute of its largest run; valid for the same data, "
            f"tokenizer and settings{far}"
        )
        return float(law.loss(size, tokens)), *law.interval(size, tokens), known

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
    measured = [(rung.compute, rung.loss, rung.spread or 0.0) for rung in ladder.rungs]
    panel.errorbar(*zip(*measured, strict=True), fmt="o", color="#000000", markersize=5, label="measured")
    for number, one in enumerate(ladder.predictions):
        place = (compute_of(one.parameters, one.tokens), one.loss)
        ends = [[one.loss - one.interval[0]], [one.interval[1] - one.loss]]
        label = "predicted" if number == 0 else None
        panel.errorbar(*place, ends, fmt="*", color=COLORS[1], markersize=11, capsize=4, label=label)
        panel.annotate(f"{one.loss:.3f}", place, xytext=(8, 6), textcoords="offset points", fontsize=9)
    style_panel(panel, "Validation loss (nats per token) against compute")
    panel.set_xscale("log")
    panel.set_xlabel("FLOPs (6 N D)")
    panel.legend(frameon=False, fontsize=9)
    save_figure(figure, path)
