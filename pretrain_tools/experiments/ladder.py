"""Fits a scaling law to runs of several sizes, predicts the loss of larger runs, and reports both (runs.py ladder)."""

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.data_record import DATA_FILE
from pretrain.errors import InputError, Problems, one_line, read_small_file
from pretrain.files import write_durably
from pretrain.recipe import read_run_config
from pretrain.runs.run_folder import read_config, read_json, setting
from pretrain.units import count_text, counted, parse_count, table
from pretrain_tools.experiments.scaling_law import ScalingLaw, fit_scaling_law, law_of, law_values
from pretrain_tools.experiments.small_runs import losses_by_step
from pretrain_tools.runs.comparison import flatten_settings
from pretrain_tools.runs.history import end_of, find_runs, read_history, require_output
from pretrain_tools.runs.plots import COLORS, save_figure, style_panel

LEAST_SIZES = 4
"""Minimum number of model sizes for a prediction."""
SIZES_DIFFER = 1.1
"""Two model sizes count as distinct if their ratio exceeds this."""
MOST_NOISE = 0.02
"""Maximum relative noise around the scaling law for a prediction."""
FAR_COMPUTE = 8.0
"""Predictions beyond this multiple of the largest run's compute get a warning."""
MOSTLY_PRIOR = 0.5
"""An exponent isn't determined by the runs if its standard deviation exceeds this fraction of the prior's."""
IRRELEVANT = ("seed", "output", "branch_from", "model", "budget", "samples", "diagnostics", "benchmarks", "checkpoint",
              "logging", "interval_scale", "energy", "export", "publish", "hub", "trackers", "tracking", "guard",
              "validation.every", "batch.sequences_per_micro_batch", "compile", "attention",
              "activation_checkpointing")  # fmt: skip
"""Settings that barely affect the final loss. They are ignored when runs are compared. The model is read from
model.json."""
LADDER_FORMAT = {"format": "groundwork-ladder", "version": 1, "count": "matrix"}


def compute_of(parameters: float, tokens: float) -> float:
    """Estimates training FLOPs as 6 N D (Kaplan et al., arXiv 2001.08361)."""
    return 6.0 * parameters * tokens


@dataclass(frozen=True)
class LadderRun:
    """A finished run's size, token count and validation loss."""

    folder: Path
    parameters: int
    tokens: int
    loss: float
    settings: Mapping[str, Any]
    """Settings that affect the loss, keyed by dotted path."""


@dataclass(frozen=True)
class Rung:
    """A data point for the fit, averaged over runs that differ only in their seed."""

    parameters: int
    tokens: int
    loss: float
    """Mean validation loss, in nats per token."""
    spread: float | None
    """Standard deviation across seeds; None with a single seed."""
    folders: tuple[Path, ...]
    left_out: int
    """Number of runs with the same size and token count, but worse settings."""
    tokens_per_step: int | None = None
    """Global batch size in tokens; None if not recorded."""

    @property
    def compute(self) -> float:
        return compute_of(self.parameters, self.tokens)


@dataclass(frozen=True)
class Prediction:
    """Predicted loss of a run."""

    name: str
    parameters: int
    tokens: int
    loss: float
    interval: tuple[float, float]
    times_compute: float
    """Compute relative to the largest run."""
    measured: float | None = None
    """Measured loss, for a back-test."""

    @property
    def is_far(self) -> bool:
        """True if the prediction extrapolates to much more compute than the runs'."""
        return self.times_compute > FAR_COMPUTE


@dataclass(frozen=True)
class Ladder:
    """Rungs and the scaling law fitted to them."""

    rungs: Sequence[Rung]
    law: ScalingLaw

    @classmethod
    def fitted(cls, rungs: Sequence[Rung]) -> "Ladder":
        """Fits the scaling law. The noise across seeds is a lower bound for the fit's noise."""
        relative = [(rung.spread / rung.loss) ** 2 / len(rung.folders) for rung in rungs if rung.spread is not None]
        law = fit_scaling_law(
            [rung.parameters for rung in rungs],
            [rung.tokens for rung in rungs],
            [rung.loss for rung in rungs],
            least_noise=math.sqrt(statistics.fmean(relative)) if relative else 0.0,
        )
        return cls(rungs, law)

    @property
    def problem(self) -> str | None:
        """Returns the reason why the fit doesn't allow predictions, or None if it does."""
        sizes = len(distinct_sizes(self.rungs))
        if sizes < LEAST_SIZES:
            return (
                f"{sizes} model sizes aren't enough for a prediction; train at least {LEAST_SIZES} sizes, for example "
                "by doubling the size each time"
            )
        if self.law.noise > MOST_NOISE:
            return (
                f"the noise around the scaling law is {self.law.noise:.1%}, but must be at most {MOST_NOISE:.0%}; "
                "remove outliers (run without --predict to see the residuals), or train more seeds"
            )
        return None

    def predict(self, name: str, parameters: int, tokens: int, measured: float | None = None) -> Prediction:
        """Predicts the loss of a run."""
        times = compute_of(parameters, tokens) / max(rung.compute for rung in self.rungs)
        loss = float(self.law.loss(parameters, tokens))
        return Prediction(name, parameters, tokens, loss, self.law.interval(parameters, tokens), times, measured)

    def backtest(self) -> Prediction | None:
        """Predicts the largest rung from a fit to the smaller sizes. None with fewer than LEAST_SIZES sizes."""
        sizes = distinct_sizes(self.rungs)
        if len(sizes) < LEAST_SIZES:
            return None
        # Hold out all rungs close to the largest size, because they would leak its loss.
        smaller = [rung for rung in self.rungs if rung.parameters * SIZES_DIFFER < sizes[-1]]
        last = max((rung for rung in self.rungs if rung not in smaller), key=lambda rung: rung.compute)
        return Ladder.fitted(smaller).predict("backtest", last.parameters, last.tokens, last.loss)


def read_ladder_runs(folders: Iterable[Path]) -> tuple[list[LadderRun], list[str]]:
    """Reads the finished runs in these folders. Also returns a message for each run it skips.

    Raises InputError if no run is usable, or if the runs aren't comparable.
    """
    problems = Problems()
    runs = []
    for folder in folders:
        found = find_runs(folder)
        if not found:
            problems.append(f"{folder}: contains no runs; pass run folders or sweep folders")
        runs += found
    problems.stop_if_any()
    points = []
    said = []
    # Deduplicate: a run may be passed both directly and as part of a sweep.
    for run in dict.fromkeys(path.resolve() for path in runs):
        found = problems.attempt(ladder_run, run)
        if isinstance(found, str):
            said.append(f"{run}: skipped: {found}")
        else:
            points.append(found)
    problems.stop_if_any()
    if not points:
        raise InputError(*said, "no usable runs; a ladder needs finished runs with a validation loss")
    problems += comparability_problems(points)
    problems.stop_if_any()
    return points, said


def ladder_run(folder: Path) -> LadderRun | str:
    """Reads a run's size, token count and final loss, or returns why it can't be used for the fit."""
    from pretrain.model.build import matrix_parameters
    from pretrain.model.model_config import load_model_config

    history = read_history(folder)
    losses = losses_by_step(history.events)
    tokens = {event["step"]: event.get("tokens") for event in history.of("train")}
    if end_of(history.events).get("code") != 0:
        return "it hasn't finished"
    if not losses:
        return "it has no validation loss"
    last = max(losses)
    loss = statistics.fmean(losses[last].values())
    if not math.isfinite(loss):
        return "its last validation loss is infinite or NaN"
    if last not in tokens:
        return f"metrics.jsonl has no training event for step {last}, its last validation"
    config = flatten_settings(read_config(folder))
    if config.get("init") == "pretrained":
        return "it started from pretrained weights"
    parameters = matrix_parameters(load_model_config(str(folder / "model.json")))
    settings = {key: value for key, value in config.items() if not key.startswith(IRRELEVANT)}
    data = read_json(folder / DATA_FILE)
    tokenizers = {setting(source, "tokenizer.sha256") for source in data.values() if isinstance(source, dict)}
    # Stored with the settings so that they are compared as well. Different models may have the same size.
    settings |= {"the tokenizer": sorted(map(str, tokenizers)), "the validation sources": sorted(losses[last])}
    settings["the model"] = read_json(folder / "model.json") | {"transformers_version": None}
    return LadderRun(folder, parameters, tokens[last], loss, settings)


def comparability_problems(runs: Sequence[LadderRun]) -> list[str]:
    """Lists differences between the runs that make their losses incomparable."""
    problems = []
    for name in ("the tokenizer", "the validation sources", "data.sequence_length", "optim.schedule"):
        found = {json.dumps(run.settings.get(name)): run.folder for run in runs}
        if len(found) > 1:
            shown = "; ".join(f"{value} in {folder}" for value, folder in found.items())
            problems.append(
                f"the runs differ in {name}, so losses aren't comparable: {shown}; use the same value for all runs"
            )
    return problems


def rungs_of(runs: Iterable[LadderRun]) -> list[Rung]:
    """Groups runs of the same size and token count into rungs, sorted by N and D."""
    groups: list[list[LadderRun]] = []
    for run in sorted(runs, key=lambda run: (run.parameters, run.tokens)):
        # Budgets are rounded to whole steps, so token counts within 2% count as equal.
        first = groups[-1][0] if groups else None
        if first is None or run.parameters != first.parameters or run.tokens > 1.02 * first.tokens:
            groups.append([])
        groups[-1].append(run)
    return [rung_of(group) for group in groups]


def rung_of(runs: Sequence[LadderRun]) -> Rung:
    """Averages the runs with the best settings, because worse ones would bias the scaling law upward."""
    by_settings: dict[str, list[LadderRun]] = {}
    for run in runs:
        by_settings.setdefault(json.dumps(run.settings, sort_keys=True, default=str), []).append(run)
    best = min(by_settings.values(), key=lambda seeds: statistics.fmean(run.loss for run in seeds))
    losses = [run.loss for run in best]
    return Rung(
        best[0].parameters,
        round(statistics.fmean(run.tokens for run in best)),
        statistics.fmean(losses),
        statistics.stdev(losses) if len(losses) > 1 else None,
        tuple(run.folder for run in best),
        len(runs) - len(best),
        best[0].settings.get("batch.tokens_per_step"),
    )


def distinct_sizes(rungs: Iterable[Rung]) -> list[int]:
    """Returns the distinct model sizes in ascending order. Merges sizes within a factor of SIZES_DIFFER."""
    sizes: list[int] = []
    for size in sorted(rung.parameters for rung in rungs):
        if not sizes or size > SIZES_DIFFER * sizes[-1]:
            sizes.append(size)
    return sizes


def cautions_of(ladder: Ladder, predictions: Iterable[Prediction]) -> list[str]:
    """Returns warnings about the fit and the predictions."""
    said = [ladder.problem] if ladder.problem else []
    if max(ladder.law.prior_shares) > MOSTLY_PRIOR:
        said.append(
            "the runs don't determine alpha and beta separately, for example because tokens grow with model size, so "
            "they mostly reflect the priors. This affects all predictions except those at the same number of tokens "
            "per parameter"
        )
    smallest, largest = (end(ladder.rungs, key=lambda rung: rung.compute) for end in (min, max))
    if largest.loss >= smallest.loss:
        said.append(
            f"the loss of the run with the most compute, {largest.loss:.4f}, isn't below the {smallest.loss:.4f} of "
            "the run with the least, so the fit shows no benefit from compute; tune the learning rate of each size"
        )
    by_compute = sorted((rung for rung in ladder.rungs if rung.tokens_per_step), key=lambda rung: rung.compute)
    for less, more in itertools.pairwise(by_compute):
        fewer, steps = (round(rung.tokens / rung.tokens_per_step) for rung in (more, less))
        if fewer < steps:
            said.append(
                f"the {count_text(more.parameters)} model trained for only {fewer:,} steps of "
                f"{more.tokens_per_step:,} tokens, but the {count_text(less.parameters)} model, which used less "
                f"compute, trained for {steps:,} steps of {less.tokens_per_step:,} tokens. This distorts the scaling "
                "law; use the same --batch.tokens_per_step for all sizes"
            )
    said += [
        f"{one.name}: needs {one.times_compute:.3g} times the compute of the largest run. Beyond {FAR_COMPUTE:g} "
        "times, the interval is only valid if the scaling law still holds"
        for one in predictions
        if one.is_far
    ]
    return said


def read_prediction(text: str) -> tuple[str, int, int]:
    """Parses 'parameters=30M,tokens=600M', or reads a recipe. The recipe's shards don't have to exist."""
    if text.endswith((".yaml", ".yml")):
        from pretrain.data.vocabulary import planned_model_config
        from pretrain_tools.planning.candidates import work_of_run

        config = read_run_config(Path(text))
        work = work_of_run(config, planned_model_config(config))
        return text, work.non_embedding, work.tokens
    given = dict(part.partition("=")[::2] for part in text.split(","))
    numbers = {key.strip(): parse_count(value) for key, value in given.items()}
    if set(numbers) != {"parameters", "tokens"} or not all(isinstance(n, int) and n > 0 for n in numbers.values()):
        raise InputError(f"--predict {text}: must be a recipe, or sizes such as parameters=30M,tokens=600M")
    return text, numbers["parameters"], numbers["tokens"]


def report_ladder(folders: Sequence[Path], *, predict: Sequence[str], output: Path | None) -> None:
    """Fits a scaling law to the runs in these folders, prints it, and writes it as JSON and PNG.

    Raises InputError listing all problems.

    Args:
        predict: arguments to predict; see `read_prediction`.
        output: path without a suffix. None means `ladder` in the runs' folder, or in the current folder if several
            are passed.
    """
    base = output or (folders[0] if len(folders) == 1 else Path()) / "ladder"
    problems = Problems()
    asked = [problems.attempt(read_prediction, text) for text in predict]
    found = problems.attempt(read_ladder_runs, folders)
    if base.name in ("", ".."):
        problems.append(f"--output {base}: is a folder; use a path such as {base / 'ladder'}")
    elif output:
        problems.attempt(require_output, "--output", base.parent)
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
    files = [base.with_name(f"{base.name}{ending}") for ending in (".json", ".png")]
    write_durably(files[0], json.dumps(ladder_values(ladder, backtest, predictions), indent=1) + "\n")
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
        if ladder.problem:
            raise InputError(ladder.problem)
        return ladder
    except InputError as error:
        raise InputError(f"--ladder {path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(f"--ladder {path}: wasn't written by runs.py ladder ({one_line(error)})") from None


def draw_ladder(ladder: Ladder, predictions: Sequence[Prediction], path: Path) -> None:
    """Plots loss against compute: the runs, the scaling law with its interval, and the predictions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    panel = figure.add_subplot()
    law = ladder.law
    logs = np.log([[rung.parameters, rung.tokens] for rung in ladder.rungs]).T
    # Along the curve, the token count is a power law in N, fitted to the rungs.
    shown = [point.parameters for point in (*ladder.rungs, *predictions)]
    sizes = np.geomspace(min(shown), max(shown), 60)
    tokens = np.exp(np.polyval(np.polyfit(*logs, 1), np.log(sizes)))
    low, high = np.array([law.interval(n, d) for n, d in zip(sizes, tokens, strict=True)]).T
    compute = compute_of(sizes, tokens)
    panel.fill_between(compute, low, high, color=COLORS[0], alpha=0.15, linewidth=0, label="90% interval for one run")
    panel.plot(compute, law.loss(sizes, tokens), color=COLORS[0], linewidth=1.5, label="scaling law, along the ladder")
    for points, form, color, size, label in (
        (ladder.rungs, "o", "#000000", 5, "measured"),
        (predictions, "*", COLORS[1], 11, "predicted"),
    ):
        if points:
            at = [compute_of(point.parameters, point.tokens) for point in points]
            panel.plot(at, [point.loss for point in points], form, color=color, markersize=size, label=label)
    style_panel(panel, "Validation loss (nats per token) against compute")
    panel.set_xscale("log")
    panel.set_xlabel("FLOPs (6 N D)")
    panel.legend(frameon=False, fontsize=9)
    save_figure(figure, path)
