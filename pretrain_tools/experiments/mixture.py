"""Proposes data mixture weights based on small runs with many mixtures (runs.py mixture).

Follows RegMix (Liu et al., arXiv 2407.01492) with a simpler regression: the log of each validation loss is linear in
the logs of the weights. Increasing a source's weight therefore has diminishing returns, and the optimum lies inside
the simplex. The ridge penalty is chosen by leave-one-out error.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pretrain.config import RunConfig, Source
from pretrain.errors import InputError
from pretrain.files import write_durably
from pretrain.recipe import as_yaml, parse_yaml, read_run_config
from pretrain.units import table
from pretrain_tools.experiments.sweep import PointResult, run_sweep
from pretrain_tools.experiments.sweep_plan import Axis, SweepRequest

LEAST_WEIGHT = 0.01
"""Minimum weight of a source in a candidate, because log(0) is undefined."""
LEAST_RUNS_PER_SOURCE = 3
STRENGTHS = 10.0 ** np.arange(-4, 2)
"""Candidate ridge penalties, per run. Smaller ones are singular if a resample contains too few distinct runs."""
MOST_DRAWS = 100
"""Maximum number of draws per candidate."""
PROPOSALS = 20_000
"""Number of random mixtures to choose the best from."""
RESAMPLES = 300
"""Number of bootstrap resamples for the confidence interval."""


@dataclass(frozen=True)
class Proposal:
    """Proposed weights and their expected gain."""

    weights: NDArray[np.float64]
    losses: NDArray[np.float64]
    """Predicted loss on each validation source."""
    gain: float
    """Predicted reduction of the mean loss relative to the recipe's own weights."""
    gain_interval: tuple[float, float]
    """90% bootstrap interval of the gain."""
    error: float
    """Relative RMS error of the mean loss in leave-one-out predictions."""
    agreement: float
    """Spearman correlation between leave-one-out predictions and measured losses."""


def run_mixture(
    recipe: Path,
    changes: Sequence[tuple[str, str]],
    *,
    count: int,
    seeds: int,
    output: Path,
    parallel: int | None = None,
) -> int:
    """Trains the unfinished runs of `count` mixtures and proposes weights. The first mixture is the recipe's own.

    Returns the exit status. Raises InputError if the recipe's sources can't be mixed, or if `count` is too small.
    """
    sources = sources_to_mix(read_run_config(recipe, changes), count)
    own = np.array([source.weight for source in sources])
    for source, share in zip(sources, own / own.sum(), strict=True):
        if share < LEAST_WEIGHT:
            print(
                f"warning: {source.shards}: has {share:.2%} of the weight, but gets at least {LEAST_WEIGHT:.0%} in "
                "all runs, including the one with the recipe's own weights",
                file=sys.stderr,
            )
    texts = tuple(as_setting(sources, weights) for weights in candidate_weights(own, count))
    labels = {text: f"{number:03d}" for number, text in enumerate(texts)}
    request = SweepRequest(recipe, (Axis("data.train", texts),), tuple(changes), seeds, None, output, labels)
    return run_sweep(request, parallel, report_mixture)


def sources_to_mix(config: RunConfig, count: int) -> list[Source]:
    """Returns the recipe's training sources. Raises InputError if they can't be mixed, or if `count` is too small."""
    if config.data.stages:
        raise InputError(
            "data.stages: runs.py mixture can only optimize one mixture at a time; use a recipe that sets data.train "
            "to the sources of one stage"
        )
    sources = config.data.train
    if len(sources) < 2:
        raise InputError(f"data.train: a mixture needs at least two sources, got {len(sources)}")
    least = LEAST_RUNS_PER_SOURCE * len(sources)
    if count < least:
        raise InputError(f"--runs {count}: isn't enough to fit {len(sources)} sources; use at least {least}")
    return sources


def candidate_weights(own: NDArray, count: int) -> NDArray[np.float64]:
    """Returns weights of shape (count, k): the recipe's own, then random ones from a fixed seed."""
    # A resumed command must generate the same mixtures.
    random = np.random.default_rng(0)
    own = own / own.sum()
    candidates: dict[tuple, NDArray] = {}
    # With the minimum weight and four digits, some mixtures are equal. These are drawn again.
    for number in range(MOST_DRAWS * count):
        # Half are uniform on the simplex, half near the recipe's own weights.
        spread = np.ones(len(own)) if number % 2 else 2 * len(own) * own + 0.5
        floored = np.maximum(random.dirichlet(spread) if number else own, LEAST_WEIGHT)
        weights = floored / floored.sum()
        candidates.setdefault(tuple(weights.round(4)), weights)
        if len(candidates) == count:
            break
    return np.array(list(candidates.values()))


def reweighted(sources: Sequence[Source], weights: NDArray) -> list[Source]:
    """Copies the sources with new weights, rounded to four digits."""
    return [
        source.model_copy(update={"weight": round(float(weight), 4)})
        for source, weight in zip(sources, weights, strict=True)
    ]


def as_setting(sources: Sequence[Source], weights: NDArray) -> str:
    """Formats data.train as a command-line value."""
    mixed = reweighted(sources, weights)
    return json.dumps([one.model_dump(mode="json", exclude_defaults=True) | {"weight": one.weight} for one in mixed])


def propose(weights: NDArray, losses: NDArray) -> Proposal:
    """Fits the losses and returns the random mixture with the lowest predicted mean loss.

    Args:
        weights: shape (n, k), starting with the recipe's own weights.
        losses: shape (n, v), one column per validation source.
    """
    from scipy.stats import spearmanr
    from sklearn.linear_model import Ridge, RidgeCV
    from sklearn.model_selection import LeaveOneOut, cross_val_predict

    def as_losses(logs: NDArray) -> NDArray:
        # For a single validation source, scikit-learn returns vectors.
        return np.exp(logs).reshape(-1, losses.shape[1])

    x = np.log(weights)
    y = np.log(losses)
    # Scale the penalty by the number of runs, so that the best strength doesn't depend on it.
    ridge = Ridge(alpha=RidgeCV(alphas=STRENGTHS * len(x)).fit(x, y).alpha_)
    measured = losses.mean(axis=1)
    unseen = as_losses(cross_val_predict(ridge, x, y, cv=LeaveOneOut())).mean(axis=1)
    random = np.random.default_rng(1)
    tried = np.concatenate([weights, random.dirichlet(np.ones(weights.shape[1]), PROPOSALS)])
    # Don't extrapolate beyond the range of the trained weights.
    tried = tried[((tried >= weights.min(axis=0)) & (tried <= weights.max(axis=0))).all(axis=1)]
    predicted = as_losses(ridge.fit(x, y).predict(np.log(tried)))
    best = np.argmin(predicted.mean(axis=1))
    both = np.log([weights[0], tried[best]])
    gains = []
    for _ in range(RESAMPLES):
        rows = random.integers(0, len(weights), len(weights))
        own, found = as_losses(ridge.fit(x[rows], y[rows]).predict(both)).mean(axis=1)
        gains.append(own - found)
    low, high = np.quantile(gains, (0.05, 0.95))
    return Proposal(
        weights=tried[best],
        losses=predicted[best],
        gain=float((predicted[0] - predicted[best]).mean()),
        gain_interval=(float(low), float(high)),
        error=float(np.sqrt(np.mean((unseen / measured - 1) ** 2))),
        agreement=float(spearmanr(unseen, measured).statistic),
    )


def losses_by_source(result: PointResult) -> dict[str, float]:
    """Returns the final validation loss per source, averaged over all seeds."""
    last = [outcome.losses[outcome.step] for outcome in result.outcomes]
    shared = set.intersection(*map(set, last))
    return {source: float(np.mean([losses[source] for losses in last])) for source in shared}


def report_mixture(request: SweepRequest, results: list[PointResult]) -> int:
    """Prints all mixtures and the proposal, and writes mixture.yaml.

    Returns the exit status: 1 if too few runs finished.
    """
    finished = [result for result in results if math.isfinite(result.mean_loss)]
    config = read_run_config(request.recipe, request.changes)
    sources = config.data.train
    named = [Path(source.shards).name for source in sources]
    # The gain is relative to the recipe's own mixture, so that run must have finished.
    if finished[:1] != results[:1] or len(finished) < LEAST_RUNS_PER_SOURCE * len(sources):
        print(
            f"{len(finished)} of {len(results)} mixtures finished. To propose weights, the recipe's own mixture and "
            f"at least {LEAST_RUNS_PER_SOURCE * len(sources)} mixtures in total must have finished. Run the same "
            "command again to retry failed runs."
        )
        return 1
    weights = np.array([[s["weight"] for s in parse_yaml(r.settings["data.train"])] for r in finished])
    weights = weights / weights.sum(axis=1, keepdims=True)
    measured = [losses_by_source(result) for result in finished]
    validation = sorted(set.intersection(*map(set, measured)))
    losses = np.array([[of_run[source] for source in validation] for of_run in measured])
    found = propose(weights, losses)
    print(mixture_text(named, validation, weights, losses, found))
    proposed = config.data.model_copy(update={"train": reweighted(sources, found.weights)})
    folder = config.output.with_name(f"{config.output.name}_mixture")
    recipe = request.output / "mixture.yaml"
    header = f"# {request.recipe} with the weights proposed from the mixtures in {request.output}\n"
    write_durably(recipe, header + as_yaml(config.model_copy(update={"data": proposed, "output": folder})))
    print(recipe)
    return 0


def mixture_text(
    named: Sequence[str], validation: Sequence[str], weights: NDArray, losses: NDArray, found: Proposal
) -> str:
    """Formats the table of mixtures, best first, and the proposal with its expected gain and error."""

    def row(name: str, weights: NDArray, losses: NDArray) -> list[str]:
        return [name, *(f"{weight:.1%}" for weight in weights), *(f"{x:.4f}" for x in losses), f"{losses.mean():.4f}"]

    rows = [["", *named, *(f"loss {source}" for source in validation), "mean"], row("recipe", weights[0], losses[0])]
    rows += [row("", weights[n], losses[n]) for n in np.argsort(losses.mean(axis=1)) if n]
    rows.append(row("proposed", found.weights, found.losses))
    low, high = found.gain_interval
    sure = (
        "so it is better than the recipe's own mixture at this model size"
        if low > 0
        else "so it may not be better; train more mixtures or more seeds"
    )
    return "\n".join(
        [
            table(rows, right=set(range(1, len(rows[0])))),
            "",
            f"The predicted mean loss of the proposed mixture is {found.gain:.4f} below the recipe's own (90% "
            f"interval {low:.4f} to {high:.4f}), {sure}.",
            f"Leave-one-out predictions have an error of {found.error:.2%} and a rank correlation of "
            f"{found.agreement:.2f}. Small runs repeat small sources less often than large runs, so compare both "
            "mixtures at full size before you rely on this.",
        ]
    )
