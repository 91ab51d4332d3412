"""Writes a fitted scaling law as text, JSON and a plot, and reads the JSON file for predictions."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.errors import InputError, Problems, one_line, read_small_file
from pretrain.files import write_durably
from pretrain.runs.run_folder import output_problem
from pretrain.units import count_text, counted, table
from pretrain_tools.experiments.ladder import (
    LEAST_SIZES,
    Ladder,
    Prediction,
    Rung,
    cautions_of,
    compute_of,
    distinct_sizes,
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
    rungs = rungs_of(runs)
    if len(distinct_sizes(rungs)) < 2:
        raise InputError(
            f"all runs have the same size, {count_text(rungs[0].parameters)} parameters; a ladder needs several "
            f"sizes, and a prediction needs at least {LEAST_SIZES}"
        )
    ladder = Ladder.fitted(rungs)
    if asked and ladder.problem:
        raise InputError(f"--predict: {ladder.problem}")
    predictions = [ladder.predict(*one) for one in asked]
    base.parent.mkdir(parents=True, exist_ok=True)
    backtest = ladder.backtest()
    print(ladder_text(ladder, backtest, predictions, left_out))
    values = ladder_values(ladder, backtest, predictions)
    files = [base.with_name(f"{base.name}{ending}") for ending in (".json", ".png")]
    write_durably(files[0], json.dumps(values, indent=1) + "\n")
    draw_ladder(ladder, predictions, files[1])
    print(*files, sep="\n")


def ladder_text(
    ladder: Ladder, backtest: Prediction | None, predictions: Sequence[Prediction], left_out: Sequence[str]
) -> str:
    """Formats the fit, residuals, back-test, predictions and warnings as text."""
    law = ladder.law
    rows = [["N", "tokens", "loss", "spread", "seeds", "residual"]]
    for rung, residual in zip(ladder.rungs, law.residuals, strict=True):
        spread = "-" if rung.spread is None else f"{rung.spread:.4f}"
        sizes = [count_text(rung.parameters), count_text(rung.tokens)]
        rows.append([*sizes, f"{rung.loss:.4f}", spread, str(len(rung.folders)), f"{residual:+.2%}"])
    fit = ", ".join(f"{name} = {value:.4g}" for name, value in law.coefficients.items())
    lines = [
        f"L(N, D) = E + A / N^alpha + B / D^beta with {fit}",
        "N: parameters in matmuls, including the head but not the embedding tables",
        "",
        table(rows, right=set(range(6))),
        "",
        f"noise around the scaling law: {law.noise:.2%}",
    ]
    if backtest:
        low, high = backtest.interval
        measured = backtest.measured
        verdict = "within" if low <= measured <= high else "OUTSIDE"
        lines.append(
            f"back-test: a fit without the largest size predicts {backtest.loss:.4f} ({low:.4f} to {high:.4f}) at "
            f"{backtest.times_compute:.3g} times the compute. The measured loss is {measured:.4f} "
            f"({measured / backtest.loss - 1:+.2%}), {verdict} the interval."
        )
    if predictions:
        rows = [["prediction", "N", "tokens", "compute", "loss", "90% interval"]]
        for one in predictions:
            low, high = one.interval
            sizes = [count_text(one.parameters), count_text(one.tokens), f"{one.times_compute:.3g} x"]
            rows.append([one.name, *sizes, f"{one.loss:.4f}", f"{low:.4f} to {high:.4f}"])
        lines += ["", table(rows, right={1, 2, 3, 4})]
    lines += ["", *left_out]
    if worse := sum(rung.left_out for rung in ladder.rungs):
        lines.append(f"skipped: {counted(worse, 'run')} with worse settings at the same size and token count")
    return "\n".join([*lines, *(f"warning: {caution}" for caution in cautions_of(ladder, predictions))])


def ladder_values(ladder: Ladder, backtest: Prediction | None, predictions: Sequence[Prediction]) -> dict[str, Any]:
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
        "backtest": vars(backtest) if backtest else None,
        "predictions": list(map(vars, predictions)),
        "cautions": cautions_of(ladder, predictions),
        "law": law_values(law),
    }


def read_ladder(path: Path) -> Ladder:
    """Reads a ladder.json. Raises InputError if the file is invalid or its fit doesn't allow predictions."""
    try:
        values = json.loads(read_small_file(path, most_bytes=1 << 24))
        if {name: values.get(name) for name in LADDER_FORMAT} != LADDER_FORMAT:
            raise ValueError("unknown format or version")
        rungs = [Rung(**{name: rung.get(name) for name in Rung.__annotations__}) for rung in values["rungs"]]
        ladder = Ladder(rungs, law_of(values["law"]))
        problem = ladder.problem
    except InputError as error:
        raise InputError(f"--ladder {path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(f"--ladder {path}: wasn't written by runs.py ladder ({one_line(error)})") from None
    if problem:
        raise InputError(f"--ladder {path}: {problem}")
    return ladder


def draw_ladder(ladder: Ladder, predictions: Sequence[Prediction], path: Path) -> None:
    """Plots loss against compute: the runs, the scaling law with its interval, and the predictions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    panel = figure.add_subplot()
    law = ladder.law
    logs = np.log([[rung.parameters, rung.tokens] for rung in ladder.rungs]).T
    # Along the curve, the token count is a power law in N, fitted to the rungs.
    slope, offset = np.polyfit(*logs, 1)
    shown = [point.parameters for point in (*ladder.rungs, *predictions)]
    sizes = np.geomspace(min(shown), max(shown), 60)
    tokens = np.exp(slope * np.log(sizes) + offset)
    low, high = np.array([law.interval(n, d) for n, d in zip(sizes, tokens, strict=True)]).T
    compute = compute_of(sizes, tokens)
    panel.fill_between(compute, low, high, color=COLORS[0], alpha=0.15, linewidth=0, label="90% interval for one run")
    panel.plot(compute, law.loss(sizes, tokens), color=COLORS[0], linewidth=1.5, label="scaling law, along the ladder")
    for points, form, color, size, label in (
        (ladder.rungs, "o", "#000000", 5, "measured"),
        (predictions, "*", COLORS[1], 11, "predicted"),
    ):
        if points:
            at, losses = zip(*((point.compute, point.loss) for point in points), strict=True)
            panel.plot(at, losses, form, color=color, markersize=size, label=label)
    style_panel(panel, "Validation loss (nats per token) against compute")
    panel.set_xscale("log")
    panel.set_xlabel("FLOPs (6 N D)")
    panel.legend(frameon=False, fontsize=9)
    save_figure(figure, path)
