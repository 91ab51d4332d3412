"""Loss by size and tokens: L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al., arXiv 2203.15556, approach 3).

Fitted as there: a Huber loss on log L, from many starts. Few runs cannot tell five numbers, least of all where tokens
grow with size, as they do along a compute-optimal ladder: there alpha and beta have the same effect. So weak priors
from published fits hold what the runs leave open, and the intervals show it: each refit draws the priors' centers
again, so where the runs say nothing, an interval is as wide as the prior.

All refits are made together, in numpy. Shapes: R refits, n points, 5 parameters.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

EXPONENT = 0.35
EXPONENT_SD = 0.1
"""alpha and beta: 0.34 and 0.28 (Hoffmann), 0.35 and 0.37 (Besiroglu et al., arXiv 2404.10102)."""
SHARE_OF_E = 0.5
LOG_E_SD = 0.5
"""E beside the lowest loss: a half, within a factor of 1.6."""
LOG_BALANCE_SD = 1.0
"""The terms of size and tokens are equal at the compute-optimal point, within a factor of 2.7."""
ASSUMED_NOISE = 0.003
ASSUMED_COUNT = 2
"""Relative noise of a loss before any is seen, and for how many runs it counts."""
HUBER_WIDTH = 1.345
"""Deviations in units of the noise beyond which a run counts less: 95 % efficient for Gaussian noise."""
REFITS = 500
QUANTILES = (0.05, 0.95)
MOST_ITERATIONS = 60
LAW_COEFFICIENTS = ("E", "A", "alpha", "B", "beta")


@dataclass(frozen=True)
class ScalingLaw:
    """A fit, and its refits."""

    theta: NDArray[np.float64]
    """Shape (5,): log E, log of the size's term and of the tokens' term at the reference, alpha, beta."""
    refits: NDArray[np.float64]
    """Shape (R, 5)."""
    refit_noise: NDArray[np.float64]
    """Shape (R,): the noise of each refit, as uncertain as few residuals leave it."""
    reference: tuple[float, float]
    """The geometric means of N and D, where the terms are as theta says."""
    noise: float
    """Relative standard deviation of a loss around the law."""
    residuals: NDArray[np.float64]
    """Shape (n,): log of the measured over the fitted loss."""

    def loss(self, parameters: ArrayLike, tokens: ArrayLike) -> NDArray[np.float64]:
        """Nats per token, of the shape of the arguments together."""
        return np.exp(log_loss(self.theta, *self._scaled(parameters, tokens)))

    def interval(self, parameters: float, tokens: float) -> tuple[float, float]:
        """The range in which the loss of one run is with 90 %, by the refits and a run's own noise."""
        logs = log_loss(self.refits.T, *self._scaled(parameters, tokens))
        logs = logs + self.refit_noise * np.random.default_rng(1).standard_normal(len(logs))
        low, high = np.quantile(np.exp(logs), QUANTILES)
        return float(low), float(high)

    @cached_property
    def coefficients(self) -> dict[str, float]:
        """E, A, alpha, B, beta of the formula."""
        return dict(zip(LAW_COEFFICIENTS, map(float, self._as_formula(self.theta)), strict=True))

    @cached_property
    def coefficient_intervals(self) -> dict[str, tuple[float, float]]:
        """90 % of the refits."""
        low, high = np.quantile(self._as_formula(self.refits.T), QUANTILES, axis=-1)
        return {name: (float(a), float(b)) for name, a, b in zip(LAW_COEFFICIENTS, low, high, strict=True)}

    @property
    def prior_shares(self) -> dict[str, float]:
        """The refits' spread beside the prior's, of the exponents: near 1, the runs say nothing of them."""
        spreads = self.refits.std(axis=0) / EXPONENT_SD
        return {"alpha": float(spreads[3]), "beta": float(spreads[4])}

    def _scaled(self, parameters: ArrayLike, tokens: ArrayLike) -> tuple[NDArray, NDArray]:
        return np.log(np.asarray(parameters) / self.reference[0]), np.log(np.asarray(tokens) / self.reference[1])

    def _as_formula(self, theta: NDArray) -> NDArray:
        e, p, q, alpha, beta = theta
        log_n, log_d = map(math.log, self.reference)
        return np.stack([np.exp(e), np.exp(p + alpha * log_n), alpha, np.exp(q + beta * log_d), beta])


def law_values(law: ScalingLaw) -> dict[str, Any]:
    """JSON from which `law_of` makes the law again, without its residuals."""
    fields = {"theta": law.theta, "refits": law.refits, "refit_noise": law.refit_noise}
    values = {name: np.round(array, 6).tolist() for name, array in fields.items()}
    return {"reference": list(law.reference), "noise": law.noise, **values}


def law_of(values: Mapping[str, Any]) -> ScalingLaw:
    """The inverse of `law_values`."""
    arrays = {name: np.array(values[name], float) for name in ("theta", "refits", "refit_noise")}
    return ScalingLaw(**arrays, reference=tuple(values["reference"]), noise=values["noise"], residuals=np.zeros(0))


def log_loss(theta: NDArray, n: NDArray, d: NDArray) -> NDArray:
    """log of exp(e) + exp(p - alpha n) + exp(q - beta d); theta of shape (5, ...), n and d relative logs."""
    e, p, q, alpha, beta = theta
    return np.logaddexp(np.logaddexp(e, p - alpha * n), q - beta * d)


def fit_scaling_law(
    parameters: Sequence[float], tokens: Sequence[float], losses: Sequence[float], *, least_noise: float = 0.0
) -> ScalingLaw:
    """Fits the law to n runs.

    Args:
        least_noise: relative, as different seeds of the same run show it.
    """
    n, d, y = (np.log(np.asarray(values, float)) for values in (parameters, tokens, losses))
    reference = float(np.exp(n.mean())), float(np.exp(d.mean()))
    n = n - n.mean()
    d = d - d.mean()
    assumed = max(ASSUMED_NOISE, least_noise)
    centers = np.array([math.log(SHARE_OF_E) + y.min(), 0.0, EXPONENT, EXPONENT])
    starts = starting_points(float(np.exp(y.min())))
    noise = assumed
    for _ in range(3):  # the noise decides what the priors weigh, and the fit what is noise
        rows = len(starts)
        fits, objectives = _fit(starts, n, d, np.tile(y, (rows, 1)), np.full(rows, noise), np.tile(centers, (rows, 1)))
        theta = fits[np.argmin(objectives)]
        starts = theta[None]
        residuals = y - log_loss(theta, n, d)
        freedom = max(0.0, len(y) - _parameters_used(theta, n, d, noise))
        counted = np.minimum(np.abs(residuals), HUBER_WIDTH * noise) * np.abs(residuals)  # an outlier is no noise
        noise = math.sqrt((ASSUMED_COUNT * assumed**2 + np.sum(counted)) / (ASSUMED_COUNT + freedom))
    random = np.random.default_rng(1)
    count = ASSUMED_COUNT + freedom
    # Few residuals leave their own size uncertain: a scaled inverse chi-square says by how much.
    refit_noise = noise * np.sqrt(count / random.chisquare(count, REFITS))
    # With few degrees of freedom its tail has no mean, and would decide the intervals alone.
    refit_noise = np.minimum(refit_noise, 10 * noise)
    drawn = y + refit_noise[:, None] * random.standard_normal((REFITS, len(y)))
    moved = centers + PRIOR_SDS * random.standard_normal((REFITS, 4))
    refits, _ = _fit(np.tile(theta, (REFITS, 1)), n, d, drawn, refit_noise, moved)
    return ScalingLaw(theta, refits, refit_noise, reference, noise, residuals)


def starting_points(lowest: float) -> NDArray:
    """Shape (R, 5): every combination of a few shares of E and of the size's term, and exponents."""
    starts = []
    for share, balance, alpha, beta in itertools.product((0.2, 0.5, 0.8), (0.2, 0.5, 0.8), *[(0.15, 0.35, 0.6)] * 2):
        rest = (1 - share) * lowest
        starts.append(
            [math.log(share * lowest), math.log(balance * rest), math.log((1 - balance) * rest), alpha, beta]
        )
    return np.array(starts)


PRIORS = np.array([[1.0, 0, 0, 0, 0], [0, 1.0, -1.0, 0, 0], [0, 0, 0, 1.0, 0], [0, 0, 0, 0, 1.0]])
PRIOR_SDS = np.array([LOG_E_SD, LOG_BALANCE_SD, EXPONENT_SD, EXPONENT_SD])
"""Shape (4,): of log E, the log of the terms' ratio, alpha, beta, which PRIORS makes of theta."""


def _fit(
    theta: NDArray, n: NDArray, d: NDArray, y: NDArray, noise: NDArray, centers: NDArray
) -> tuple[NDArray, NDArray]:
    """Levenberg and Marquardt's method from theta (R, 5), for y (R, n); Huber weights by iteration.

    Returns the fits and their objectives, (R,).
    """
    damping = np.full(len(theta), 1e-2)
    objective = _objective(theta, n, d, y, noise, centers)
    for _ in range(MOST_ITERATIONS):
        model = log_loss(theta.T[:, :, None], n, d)
        deviation = (model - y) / noise[:, None]
        # Reweighted least squares: the fixed point is the minimum of the Huber loss.
        weights = np.minimum(1.0, HUBER_WIDTH / np.maximum(np.abs(deviation), 1e-12))
        slopes = _slopes(theta, n, d, model) / noise[:, None, None]
        of_priors = (theta @ PRIORS.T - centers) / PRIOR_SDS
        scaled = PRIORS / PRIOR_SDS[:, None]
        gradient = np.einsum("rni,rn,rn->ri", slopes, weights, deviation) + of_priors @ scaled
        curvature = np.einsum("rni,rn,rnj->rij", slopes, weights, slopes) + scaled.T @ scaled
        diagonal = np.einsum("rii->ri", curvature)
        damped = curvature + damping[:, None, None] * np.eye(5) * (diagonal[:, None] + 1e-9)
        tried = theta - np.linalg.solve(damped, gradient[..., None])[..., 0]
        # A step that overshoots could turn an exponent negative, from where the fit does not return.
        tried[:, 3:] = np.clip(tried[:, 3:], 0.01, 2.0)
        then = _objective(tried, n, d, y, noise, centers)
        better = then < objective
        gained = np.where(better, objective - then, 0.0)
        # Each refit goes on or stays by itself, so one fit among many ends where it would alone.
        theta = np.where(better[:, None], tried, theta)
        objective = np.where(better, then, objective)
        damping = np.clip(np.where(better, damping / 5, damping * 4), 1e-9, 1e9)
        if better.any() and gained.max() < 1e-9:
            break
    return theta, objective


def _objective(theta: NDArray, n: NDArray, d: NDArray, y: NDArray, noise: NDArray, centers: NDArray) -> NDArray:
    deviation = np.abs(log_loss(theta.T[:, :, None], n, d) - y) / noise[:, None]
    huber = np.where(deviation <= HUBER_WIDTH, deviation**2 / 2, HUBER_WIDTH * (deviation - HUBER_WIDTH / 2))
    return huber.sum(axis=1) + (((theta @ PRIORS.T - centers) / PRIOR_SDS) ** 2).sum(axis=1) / 2


def _slopes(theta: NDArray, n: NDArray, d: NDArray, model: NDArray) -> NDArray:
    """Shape (R, n, 5): of log L by theta."""
    e, p, q, alpha, beta = theta.T[:, :, None]
    of_size = np.exp(p - alpha * n - model)
    of_tokens = np.exp(q - beta * d - model)
    return np.stack([np.exp(e - model), of_size, of_tokens, -n * of_size, -d * of_tokens], axis=-1)


def _parameters_used(theta: NDArray, n: NDArray, d: NDArray, noise: float) -> float:
    """Counts the parameters that the runs have decided and not the priors: the trace of the hat matrix."""
    slopes = _slopes(theta[None], n, d, log_loss(theta[:, None, None], n, d))[0] / noise
    scaled = PRIORS / PRIOR_SDS[:, None]
    information = slopes.T @ slopes
    return float(np.trace(np.linalg.solve(information + scaled.T @ scaled, information)))
