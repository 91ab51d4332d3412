"""Tests for fitting scaling laws: known laws are recovered, and intervals have their nominal coverage."""

import numpy as np
import pytest

from pretrain_tools.experiments.scaling_law import (
    HUBER_WIDTH,
    PRIOR_SDS,
    _fit,
    fit_scaling_law,
    law_of,
    law_values,
    log_loss,
)

HOFFMANN = (1.69, 406.4, 0.34, 410.7, 0.28)
OTHERS = ((1.2, 60.0, 0.25, 300.0, 0.3), (2.0, 3000.0, 0.5, 4000.0, 0.45))
LADDER = [(size, 20 * size) for size in (1e6, 2e6, 4e6, 8e6)]
GRID = [(size, ratio * size) for size in (1e6, 4e6, 16e6, 64e6, 256e6) for ratio in (5, 20, 80, 320)]


def loss_of(law, parameters, tokens):
    e, a, alpha, b, beta = law
    return e + a / np.asarray(parameters) ** alpha + b / np.asarray(tokens) ** beta


def fit(law, points, noise=0.0, seed=0):
    sizes, tokens = map(np.array, zip(*points, strict=True))
    factors = np.exp(noise * np.random.default_rng(seed).standard_normal(len(points)))
    return fit_scaling_law(sizes, tokens, loss_of(law, sizes, tokens) * factors)


def test_many_exact_runs_recover_the_law():
    """The law is recovered even if the priors are wrong."""
    found = fit(OTHERS[1], GRID)
    assert found.coefficients["alpha"] == pytest.approx(0.5, abs=0.02)
    assert found.coefficients["beta"] == pytest.approx(0.45, abs=0.02)
    assert found.coefficients["E"] == pytest.approx(2.0, rel=0.01)
    assert max(found.prior_shares) < 0.3 and found.noise < 0.0015


@pytest.mark.parametrize("law", [HOFFMANN, *OTHERS])
def test_four_sizes_predict_a_fifth_with_four_times_the_compute(law):
    for seed in range(5):
        found = fit(law, LADDER, noise=0.001, seed=seed)
        assert float(found.loss(16e6, 320e6)) == pytest.approx(loss_of(law, 16e6, 320e6), rel=0.0075)
        assert min(found.prior_shares) > 0.5, "four sizes at a constant ratio can't separate alpha from beta"


def test_ninety_percent_intervals_contain_nine_of_ten_runs():
    held, runs, random = 0, 30, np.random.default_rng(7)
    for seed in range(runs):
        law = (HOFFMANN, *OTHERS)[seed % 3]
        low, high = fit(law, LADDER, noise=0.003, seed=seed).interval(16e6, 320e6)
        held += low <= loss_of(law, 16e6, 320e6) * np.exp(0.003 * random.standard_normal()) <= high
        assert (high - low) / low < 0.06, "the interval must be narrow enough to be useful"
    assert held >= 23, "at 90% coverage, fewer than 23 of 30 has a probability of 1 in 125"


def test_an_outlier_moves_the_law_little():
    sizes, tokens = map(np.array, zip(*GRID, strict=True))
    losses = loss_of(HOFFMANN, sizes, tokens)
    losses[7] *= 1.2
    found = fit_scaling_law(sizes, tokens, losses)
    assert float(found.loss(1e9, 20e9)) == pytest.approx(loss_of(HOFFMANN, 1e9, 20e9), rel=0.02)
    assert found.residuals[7] == pytest.approx(np.log(1.2), abs=0.015)


@pytest.mark.parametrize("losses", [[5, 6, 7, 8, 9], [3, 3.1, 3.2, 3.3, 3.4]])
def test_losses_that_rise_with_size_are_noise(losses):
    sizes = [10**4, 10**5, 10**6, 10**7, 10**8]
    law = fit_scaling_law(sizes, [20 * size for size in sizes], losses)
    low, high = law.interval(10**9, 2 * 10**10)
    assert law.noise > 0.02 and high - low > 0.05 * law.loss(10**9, 2 * 10**10)


def test_fits_reach_a_minimum():
    """No small random step away from the optimum lowers the objective, and a fit is the same alone and in a batch."""
    random = np.random.default_rng(3)
    n, d = random.standard_normal((2, 6))
    theta = np.array([0.5, 0.0, 0.1, 0.3, 0.4])
    y = log_loss(theta, n, d) + 0.01 * random.standard_normal((4, 6))
    noise = np.full(4, 0.01)
    centers = [0.0, 0.0, 0.35, 0.35]

    def objective(theta):
        e, p, q, alpha, beta = theta.T
        deviation = np.abs(log_loss(theta.T[:, :, None], n, d) - y) / 0.01
        huber = np.where(deviation <= HUBER_WIDTH, deviation**2 / 2, HUBER_WIDTH * (deviation - HUBER_WIDTH / 2))
        from_priors = (np.stack([e, p - q, alpha, beta], axis=1) - centers) / PRIOR_SDS
        return huber.sum(axis=1) + (from_priors**2).sum(axis=1) / 2

    found, least = _fit(np.tile(theta, (4, 1)) + 0.3, n, d, y, noise, np.array(centers))
    assert np.allclose(objective(found), least)
    for _ in range(200):
        assert (objective(found + 1e-3 * random.standard_normal(found.shape)) > least).all()
    alone, _ = _fit(theta[None] + 0.3, n, d, y[:1], noise[:1], np.array(centers))
    assert np.allclose(alone[0], found[0], atol=1e-4)


def test_a_law_survives_a_json_round_trip():
    found = fit(HOFFMANN, LADDER)
    again = law_of(law_values(found))
    assert again.interval(1e8, 2e9) == pytest.approx(found.interval(1e8, 2e9), rel=1e-4)
    assert float(again.loss(1e8, 2e9)) == pytest.approx(float(found.loss(1e8, 2e9)), rel=1e-5)
