"""Fits L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al., arXiv 2203.15556, approach 3).

As in the paper, the fit minimizes a Huber loss on log L from many starting points. A few runs can't determine all
five parameters: in a compute-optimal ladder, tokens grow with model size, so alpha and beta can't be separated.
Therefore, the fit uses weak priors based on published fits. Intervals come from refits with resampled losses and prior
means.

All refits are vectorized in numpy. Shapes: R refits, n runs, 5 parameters.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import huber

EXPONENT = 0.35
"""Prior mean of alpha and beta. Published: 0.34 and 0.28 (Hoffmann), 0.35 and 0.37 (Besiroglu, arXiv 2404.10102)."""
EXPONENT_SD = 0.1
"""Prior standard deviation of alpha and beta."""
SHARE_OF_E = 0.5
"""Prior median of E, as a fraction of the lowest loss."""
LOG_E_SD = 0.5
"""Prior standard deviation of log E, a factor of 1.6."""
LOG_BALANCE_SD = 1.0
"""Prior standard deviation of log(size term / token term) at the reference, a factor of 2.7.

The prior mean is 0, because the two terms are equal at the compute-optimal point if alpha equals beta.
"""
ASSUMED_NOISE = 0.003
"""Initial estimate of the relative noise of a loss."""
ASSUMED_COUNT = 2
"""Weight of the initial noise estimate, as a number of residuals."""
HUBER_WIDTH = 1.345
"""Huber threshold in units of the noise; 1.345 is 95% efficient for Gaussian noise."""
REFITS = 500
QUANTILES = (0.05, 0.95)
"""Bounds of the 90% intervals."""
MOST_ITERATIONS = 60


@dataclass(frozen=True)
class ScalingLaw:
    """A fitted scaling law, with refits for its confidence intervals."""

    theta: NDArray[np.float64]
    """Fitted parameters, shape (5,): log E, logs of the size and token terms at the reference, alpha, beta."""
    refits: NDArray[np.float64]
    """Parameters of the refits, shape (R, 5)."""
    refit_noise: NDArray[np.float64]
    """Sampled noise of each refit, shape (R,)."""
    reference: tuple[float, float]
    """Geometric means of N and D."""
    noise: float
    """Relative standard deviation of measured losses around the fit."""
    residuals: NDArray[np.float64]
    """log(measured loss / fitted loss), shape (n,)."""

    def loss(self, parameters: ArrayLike, tokens: ArrayLike) -> NDArray[np.float64]:
        """Predicts the loss in nats per token. Broadcasts its arguments."""
        return np.exp(log_loss(self.theta, *self._scaled(parameters, tokens)))

    def interval(self, parameters: float, tokens: float) -> tuple[float, float]:
        """Returns the 90% interval for a single run's loss."""
        logs = log_loss(self.refits.T, *self._scaled(parameters, tokens))
        logs = logs + self.refit_noise * np.random.default_rng(1).standard_normal(len(logs))
        low, high = np.quantile(np.exp(logs), QUANTILES).tolist()
        return low, high

    @property
    def coefficients(self) -> dict[str, float]:
        """Coefficients E, A, alpha, B and beta."""
        e, p, q, alpha, beta = map(float, self.theta)
        log_n, log_d = map(math.log, self.reference)
        a = math.exp(p + alpha * log_n)
        b = math.exp(q + beta * log_d)
        return {"E": math.exp(e), "A": a, "alpha": alpha, "B": b, "beta": beta}

    @property
    def prior_shares(self) -> list[float]:
        """Posterior / prior standard deviation of alpha and beta; near 1 if the runs don't determine them."""
        return (self.refits[:, 3:].std(axis=0) / EXPONENT_SD).tolist()

    def _scaled(self, parameters: ArrayLike, tokens: ArrayLike) -> tuple[NDArray, NDArray]:
        return np.log(np.asarray(parameters) / self.reference[0]), np.log(np.asarray(tokens) / self.reference[1])


def law_values(law: ScalingLaw) -> dict[str, Any]:
    """Converts a scaling law to JSON values. Omits the residuals."""
    fields = {"theta": law.theta, "refits": law.refits, "refit_noise": law.refit_noise}
    values = {name: np.round(array, 6).tolist() for name, array in fields.items()}
    return {"reference": list(law.reference), "noise": law.noise, **values}


def law_of(values: Mapping[str, Any]) -> ScalingLaw:
    """Restores a scaling law from the output of `law_values`."""
    arrays = {name: np.array(values[name], float) for name in ("theta", "refits", "refit_noise")}
    return ScalingLaw(**arrays, reference=tuple(values["reference"]), noise=values["noise"], residuals=np.zeros(0))


def log_loss(theta: NDArray, n: NDArray, d: NDArray) -> NDArray:
    """Computes log(exp(e) + exp(p - alpha n) + exp(q - beta d)).

    Args:
        theta: e, p, q, alpha, beta, shape (5, ...).
        n: log N relative to the reference.
        d: log D relative to the reference.
    """
    e, p, q, alpha, beta = theta
    return np.logaddexp(np.logaddexp(e, p - alpha * n), q - beta * d)


def fit_scaling_law(
    parameters: Sequence[float], tokens: Sequence[float], losses: Sequence[float], *, least_noise: float = 0.0
) -> ScalingLaw:
    """Fits the scaling law to n runs.

    Args:
        least_noise: lower bound for the relative noise, such as the spread across seeds.
    """
    n, d, y = (np.log(np.asarray(values, float)) for values in (parameters, tokens, losses))
    reference = float(np.exp(n.mean())), float(np.exp(d.mean()))
    n = n - n.mean()
    d = d - d.mean()
    assumed = max(ASSUMED_NOISE, least_noise)
    centers = np.array([math.log(SHARE_OF_E) + y.min(), 0.0, EXPONENT, EXPONENT])
    starts = starting_points(float(np.exp(y.min())))
    noise = assumed
    for _ in range(3):  # the fit and the noise depend on each other
        fits, objectives = _fit(starts, n, d, y, np.full(len(starts), noise), centers)
        theta = fits[np.argmin(objectives)]
        starts = theta[None]
        residuals = y - log_loss(theta, n, d)
        freedom = ASSUMED_COUNT + max(0.0, len(y) - _parameters_used(theta, n, d, noise))
        # Use Huber weights, so that outliers don't inflate the noise.
        counted = np.minimum(np.abs(residuals), HUBER_WIDTH * noise) * np.abs(residuals)
        noise = math.sqrt((ASSUMED_COUNT * assumed**2 + np.sum(counted)) / freedom)
    random = np.random.default_rng(1)
    # With few residuals, the noise is uncertain, so sample it from a scaled inverse chi-square distribution.
    refit_noise = noise * np.sqrt(freedom / random.chisquare(freedom, REFITS))
    # With few degrees of freedom, the tail of this distribution would dominate the intervals.
    refit_noise = np.minimum(refit_noise, 10 * noise)
    noisy = y + refit_noise[:, None] * random.standard_normal((REFITS, len(y)))
    moved = centers + PRIOR_SDS * random.standard_normal((REFITS, 4))
    refits, _ = _fit(np.tile(theta, (REFITS, 1)), n, d, noisy, refit_noise, moved)
    return ScalingLaw(theta, refits, refit_noise, reference, noise, residuals)


def starting_points(lowest: float) -> NDArray:
    """Returns a grid of starting points, shape (R, 5)."""
    shares = (0.2, 0.5, 0.8)
    exponents = (0.15, 0.35, 0.6)
    share, balance, alpha, beta = np.array(list(itertools.product(shares, shares, exponents, exponents))).T
    rest = (1 - share) * lowest
    terms = np.log([share * lowest, balance * rest, (1 - balance) * rest])
    return np.stack([*terms, alpha, beta], axis=1)


PRIORS = np.array([[1.0, 0, 0, 0, 0], [0, 1.0, -1.0, 0, 0], [0, 0, 0, 1.0, 0], [0, 0, 0, 0, 1.0]])
PRIOR_SDS = np.array([LOG_E_SD, LOG_BALANCE_SD, EXPONENT_SD, EXPONENT_SD])
"""Prior standard deviations of PRIORS @ theta, shape (4,): log E, log ratio of the terms, alpha, beta."""
SCALED_PRIORS = PRIORS / PRIOR_SDS[:, None]


def _fit(
    theta: NDArray, n: NDArray, d: NDArray, y: NDArray, noise: NDArray, centers: NDArray
) -> tuple[NDArray, NDArray]:
    """Minimizes the objective with Levenberg-Marquardt. Returns the fits (R, 5) and their objectives (R,).

    Args:
        theta: starting points, shape (R, 5).
        n: log N relative to the reference, shape (n,).
        d: log D relative to the reference, shape (n,).
        y: log L, shape (n,) or (R, n).
        noise: shape (R,).
        centers: prior means, shape (4,) or (R, 4).
    """

    def evaluated(theta: NDArray) -> tuple[NDArray, NDArray, NDArray]:
        """Returns the objective (R,), and the gradient (R, 5) and curvature (R, 5, 5) of its quadratic approximation.

        Iteratively reweighted least squares converges to the minimum of the Huber loss.
        """
        deviation = (log_loss(theta.T[:, :, None], n, d) - y) / noise[:, None]
        from_priors = (theta @ PRIORS.T - centers) / PRIOR_SDS
        objective = huber(HUBER_WIDTH, deviation).sum(axis=1) + (from_priors**2).sum(axis=1) / 2
        weights = np.minimum(1.0, HUBER_WIDTH / np.maximum(np.abs(deviation), 1e-12))
        slopes = _slopes(theta, n, d) / noise[:, None, None]
        gradient = np.einsum("rni,rn,rn->ri", slopes, weights, deviation) + from_priors @ SCALED_PRIORS
        curvature = np.einsum("rni,rn,rnj->rij", slopes, weights, slopes) + SCALED_PRIORS.T @ SCALED_PRIORS
        return objective, gradient, curvature

    damping = np.full(len(theta), 1e-2)
    for _ in range(MOST_ITERATIONS):
        objective, gradient, curvature = evaluated(theta)
        diagonal = np.einsum("rii->ri", curvature)
        damped = curvature + damping[:, None, None] * np.eye(5) * (diagonal[:, None] + 1e-9)
        tried = theta - np.linalg.solve(damped, gradient[..., None])[..., 0]
        # Without bounds, an overshooting step could make an exponent negative; the fit wouldn't recover.
        tried[:, 3:] = np.clip(tried[:, 3:], 0.01, 2.0)
        gained = objective - evaluated(tried)[0]
        better = gained > 0
        # Each refit accepts or rejects its own step, so the results don't depend on the batch.
        theta = np.where(better[:, None], tried, theta)
        damping = np.clip(np.where(better, damping / 5, damping * 4), 1e-9, 1e9)
        if 0 < np.nanmax(gained) < 1e-9:
            break
    return theta, evaluated(theta)[0]


def _slopes(theta: NDArray, n: NDArray, d: NDArray) -> NDArray:
    """Computes the derivatives of log L with respect to theta, shape (R, n, 5)."""
    e, p, q, alpha, beta = theta.T[:, :, None]
    model = log_loss(theta.T[:, :, None], n, d)
    of_size = np.exp(p - alpha * n - model)
    of_tokens = np.exp(q - beta * d - model)
    return np.stack([np.exp(e - model), of_size, of_tokens, -n * of_size, -d * of_tokens], axis=-1)


def _parameters_used(theta: NDArray, n: NDArray, d: NDArray, noise: float) -> float:
    """Returns the effective number of parameters determined by the runs: the trace of the hat matrix."""
    slopes = _slopes(theta[None], n, d)[0] / noise
    information = slopes.T @ slopes
    # No prior determines the sum of the two terms, so if both vanish, the matrix is singular.
    inverse = np.linalg.pinv(information + SCALED_PRIORS.T @ SCALED_PRIORS, hermitian=True)
    return float(np.trace(inverse @ information))
