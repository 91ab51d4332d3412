"""A ladder as text, JSON and picture."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.errors import InputError, one_line, read_small_file
from pretrain.files import write_durably
from pretrain.units import count_text, counted, table
from pretrain_tools.experiments.ladder import (
    FAR_COMPUTE,
    LEAST_SIZES,
    MOST_NOISE,
    Ladder,
    Prediction,
    Rung,
    sizes_of_ladder,
)
from pretrain_tools.experiments.scaling_law import (
    EXPONENT,
    EXPONENT_SD,
    LOG_BALANCE_SD,
    LOG_E_SD,
    REFITS,
    SHARE_OF_E,
    ScalingLaw,
    law_of,
    law_values,
)
from pretrain_tools.runs.plots import COLOURS, axis_text

LADDER_FORMAT = {"format": "groundwork-ladder", "version": 1}
MOSTLY_PRIOR = 0.5
"""Share of the prior's spread from which on a parameter counts as the prior's."""
COUNTED = {
    "matrix": "N: parameters in matrix products, the head among them, without embeddings that are looked up",
    "total": "N: all parameters, of a mixture of experts the active ones",
}
HOW = (
    f"Intervals are 90 %, from {REFITS} refits to the losses with fresh noise, its size as uncertain as so few "
    f"residuals leave it, and to priors drawn anew: alpha and beta {EXPONENT} +- {EXPONENT_SD}, E {SHARE_OF_E:.0%} of "
    f"the lowest loss within a factor of {math.exp(LOG_E_SD):.1f}, equal terms within {math.exp(LOG_BALANCE_SD):.1f}."
)


def ladder_text(ladder: Ladder, left_out: list[str]) -> str:
    """The fit, its residuals, the back-test, the predictions, and what not to believe."""
    law, shares = ladder.law, ladder.law.prior_shares
    rows = [["N", "tokens", "D/N", "loss", "spread", "seeds", "law", "residual"]]
    for rung, residual in zip(ladder.rungs, law.residuals, strict=True):
        rows.append([*rung_cells(rung), f"{float(law.loss(rung.parameters, rung.tokens)):.4f}", f"{residual:+.2%}"])
    lines = ["L(N, D) = E + A / N^alpha + B / D^beta", COUNTED[ladder.count], "", table(rows, right=set(range(8))), ""]
    fits = [["", "fit", "90 % interval", ""]]
    for name, value in law.coefficients.items():
        low, high = law.coefficient_intervals[name]
        note = "mostly the prior" if shares.get(name, 0.0) > MOSTLY_PRIOR else ""
        fits.append([name, f"{value:.4g}", f"{low:.4g} to {high:.4g}", note])
    lines += [table(fits), "", f"noise around the law: {law.noise:.2%}"]
    if ladder.backtest is not None:
        lines.append(backtest_text(ladder))
    if ladder.predictions:
        rows = [["prediction", "N", "tokens", "compute", "loss", "90 % interval", ""]]
        rows += [prediction_cells(one) for one in ladder.predictions]
        lines += ["", table(rows, right={1, 2, 3, 4})]
    worse = sum(rung.left_out for rung in ladder.rungs)
    notes = [*left_out]
    notes += [f"{counted(worse, 'run')} of the same size and tokens with worse settings left out"] if worse else []
    return "\n".join([*lines, "", HOW, *notes, *(f"warning: {caution}" for caution in ladder.cautions)])


def rung_cells(rung: Rung) -> list[str]:
    """What was measured."""
    spread = f"{rung.spread:.4f}" if rung.spread is not None else "-"
    cells = [count_text(rung.parameters), count_text(rung.tokens), f"{rung.tokens / rung.parameters:.3g}"]
    return [*cells, f"{rung.loss:.4f}", spread, str(len(rung.folders))]


def backtest_text(ladder: Ladder) -> str:
    """How well the smaller sizes would have predicted the largest."""
    told = ladder.backtest
    measured = next(rung for rung in ladder.rungs if (rung.parameters, rung.tokens) == (told.parameters, told.tokens))
    held = told.interval[0] <= measured.loss <= told.interval[1]
    return (
        f"back-test: without the largest size the law says {told.loss:.4f} ({told.interval[0]:.4f} to "
        f"{told.interval[1]:.4f}) at {told.times_compute:.3g} times the compute; measured {measured.loss:.4f}, "
        f"{measured.loss / told.loss - 1:+.2%}, {'within' if held else 'OUTSIDE'} the interval"
    )


def prediction_cells(one: Prediction) -> list[str]:
    """A row of the table."""
    low, high = one.interval
    half = (high - low) / 2 / one.loss
    sizes = [count_text(one.parameters), count_text(one.tokens), f"{one.times_compute:.3g} x"]
    return [one.name, *sizes, f"{one.loss:.4f}", f"{low:.4f} to {high:.4f}", f"+- {half:.1%}"]


def ladder_values(ladder: Ladder) -> dict[str, Any]:
    """ladder.json: losses in nats per token; `law` is what predictions are made of."""
    law = ladder.law

    def prediction(one: Prediction) -> dict[str, Any]:
        return {**vars(one), "interval": list(one.interval)}

    return {
        **LADDER_FORMAT,
        "count": ladder.count,
        "coefficients": law.coefficients,
        "intervals": {name: list(ends) for name, ends in law.coefficient_intervals.items()},
        "prior_shares": law.prior_shares,
        "noise": law.noise,
        "rungs": [
            {**vars(rung), "folders": list(map(str, rung.folders)), "residual": round(float(residual), 6)}
            for rung, residual in zip(ladder.rungs, law.residuals, strict=True)
        ],
        "backtest": prediction(ladder.backtest) if ladder.backtest else None,
        "predictions": [prediction(one) for one in ladder.predictions],
        "cautions": ladder.cautions,
        "interval_method": HOW,
        "law": law_values(law),
    }


@dataclass(frozen=True)
class WrittenLadder:
    """What a ladder.json says of other runs."""

    path: Path
    law: ScalingLaw
    count: str
    largest_compute: float
    """FLOPs of its largest run, as 6 N D."""

    def expect(self, matrix_parameters: int, parameters: int, tokens: int) -> tuple[float, float, float, str]:
        """(loss, low, high, what to know of it) of a run."""
        counted = matrix_parameters if self.count == "matrix" else parameters
        times = 6.0 * counted * tokens / self.largest_compute
        far = f", {times:.3g} times the compute of its largest run" + (
            ": if the law holds so far" * (times > FAR_COMPUTE)
        )
        known = f"90 % by {self.path}{far}; on its text, with its tokenizer and settings"
        return float(self.law.loss(counted, tokens)), *self.law.interval(counted, tokens), known


def read_ladder(path: Path) -> WrittenLadder:
    """Raises InputError for a file that runs.py ladder did not write, and for a ladder too poor to predict from."""
    try:
        values = json.loads(read_small_file(path, most_bytes=1 << 24))
        if {name: values.get(name) for name in LADDER_FORMAT} != LADDER_FORMAT:
            raise ValueError("another format")
        law, rungs = law_of(values["law"]), [Rung(**{**rung, "spread": None}) for rung in without_residuals(values)]
        sizes = sizes_of_ladder(rungs)
        found = WrittenLadder(path, law, values["count"], max(rung.compute for rung in rungs))
    except InputError as error:
        raise InputError(f"--ladder {path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"--ladder {path}: is not what runs.py ladder writes ({one_line(error)})") from None
    if len(sizes) < LEAST_SIZES:
        raise InputError(f"--ladder {path}: has {len(sizes)} sizes; {LEAST_SIZES} are needed to predict others")
    if law.noise > MOST_NOISE:
        raise InputError(
            f"--ladder {path}: its losses scatter by {law.noise:.1%} around the law; at most {MOST_NOISE:.0%}"
        )
    return found


def without_residuals(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: value for name, value in rung.items() if name != "residual"} for rung in values["rungs"]]


def write_ladder(ladder: Ladder, base: Path) -> list[Path]:
    """Writes base.json and base.png."""
    paths = [base.with_name(f"{base.name}{ending}") for ending in (".json", ".png")]
    write_durably(paths[0], json.dumps(ladder_values(ladder), indent=1) + "\n")
    draw_ladder(ladder, paths[1])
    return paths


def draw_ladder(ladder: Ladder, path: Path) -> None:
    """The loss by compute, with the law and its interval along the ladder's own line of tokens; the residuals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    curve, rest = figure.subplots(1, 2, width_ratios=(3, 2))
    rungs, law = ladder.rungs, ladder.law
    logs = np.log([[rung.parameters, rung.tokens] for rung in rungs]).T
    slope, offset = np.polyfit(*logs, 1) if len(rungs) > 1 else (1.0, 0.0)
    largest = max([logs[0].max(), *(math.log(one.parameters) for one in ladder.predictions)])
    sizes = np.exp(np.linspace(logs[0].min(), largest, 60))
    tokens = np.exp(slope * np.log(sizes) + offset)
    low, high = np.array([law.interval(n, d) for n, d in zip(sizes, tokens, strict=True)]).T
    compute = 6 * sizes * tokens
    curve.fill_between(compute, low, high, color=COLOURS[0], alpha=0.15, linewidth=0, label="90 % interval of a run")
    curve.plot(compute, law.loss(sizes, tokens), color=COLOURS[0], linewidth=1.5, label="law, along the ladder")
    shared = {"linestyle": "none", "zorder": 3}
    at, losses = [rung.compute for rung in rungs], [rung.loss for rung in rungs]
    spreads = [rung.spread or 0.0 for rung in rungs]
    curve.errorbar(at, losses, yerr=spreads, color="#000000", marker="o", markersize=5, label="measured", **shared)
    for one in ladder.predictions:
        ends = [[one.loss - one.interval[0]], [one.interval[1] - one.loss]]
        look = {"color": COLOURS[1], "marker": "*", "markersize": 11, "capsize": 4}
        curve.errorbar([6.0 * one.parameters * one.tokens], [one.loss], yerr=ends, **look, **shared)
        curve.annotate(
            f"{one.loss:.3f}", (6.0 * one.parameters * one.tokens, one.loss), xytext=(8, 6),
            textcoords="offset points", fontsize=9,
        )  # fmt: skip
    if ladder.predictions:
        curve.plot([], [], color=COLOURS[1], marker="*", linestyle="none", label="predicted")
    curve.set_title("Validation loss (nats per token) by compute (6 N D)", fontsize=11, loc="left", fontweight="bold")
    curve.legend(frameon=False, fontsize=9)
    rest.axhspan(-100 * law.noise, 100 * law.noise, color=COLOURS[0], alpha=0.12, linewidth=0)
    rest.axhline(0, color=COLOURS[0], linewidth=1)
    rest.plot(at, 100 * law.residuals, "o", color="#000000", markersize=5)
    rest.set_title("Measured beside the law (%); band: the noise", fontsize=11, loc="left", fontweight="bold")
    for panel in (curve, rest):
        panel.set_xscale("log")
        panel.set_xlabel("FLOPs")
        panel.yaxis.set_major_formatter(axis_text)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    unfinished = path.with_name(f".{path.name}.unfinished")
    figure.savefig(unfinished, dpi=110, format="png")
    unfinished.replace(path)
