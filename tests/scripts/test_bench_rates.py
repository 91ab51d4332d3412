"""Tests for learning-rate sweeps: the next rate to try, the optimum, and that `auto` is close to it."""

import math

import pytest

from bench import auto_rates, width_rates
from bench.auto_rates import (
    SIZES,
    Point,
    auto_learning_rate,
    best_of,
    centre,
    loss_at,
    next_rate,
    next_share,
    read_points,
    steps_needed,
    sweep_of,
)

SWEEPS = sorted({(point.size, point.optimizer) for point in read_points()})


def parabola(rates, best=1e-2, size="1M"):
    """Returns points on a parabola with the lowest loss, 4, at `best`."""
    return [Point(size, "adamw", r, 4 + 0.1 * math.log(r / best) ** 2, 1, SIZES[size].tokens, 1) for r in rates]


def test_the_best_rate_is_that_of_the_parabola():
    rate, loss = best_of(parabola([3e-3, 8e-3, 2e-2]))
    assert rate == pytest.approx(1e-2) and loss == pytest.approx(4)
    assert best_of(parabola([2e-2, 4e-2]))[0] == 2e-2, "at an end of the range, the best tested rate must be returned"


def test_between_rates_the_loss_is_linear_and_outside_it_is_unknown():
    points = [Point("1M", "adamw", rate, loss, 1, 1, 1) for rate, loss in ((1e-3, 5.0), (1e-1, 6.0))]
    assert loss_at(points, 1e-2) == pytest.approx(5.5)
    assert loss_at(points, 1e-4) is None


def test_a_sweep_continues_until_the_best_rate_has_worse_neighbors():
    points, best = [], 4 * centre(SIZES["1M"])
    while (rate := next_rate("1M", "adamw", points)) is not None:
        points += parabola([rate], best)
        assert len(points) < 12
    rates = [point.learning_rate for point in points]
    assert min(rates) < best < max(rates) and best_of(points)[0] == pytest.approx(best, rel=1e-2)


def test_muon_gets_fewer_steps_until_it_ends_above_adamw():
    tokens = SIZES["1M"].tokens
    points = [*parabola([3e-3, 8e-3, 2e-2]), Point("1M", "muon", 1e-2, 3.5, 1, tokens, 1)]
    for share, loss in ((0.6, 3.8), (0.4, 4.2)):
        assert next_share("1M", points) == (1e-2, share)
        points.append(Point("1M", "muon", 1e-2, loss, 1, round(share * tokens), 1))
    assert next_share("1M", points) is None
    assert steps_needed("1M", points) == pytest.approx(math.sqrt(0.6 * 0.4), rel=1e-3)


def test_widths_are_swept_outwards():
    found = {}
    while (rate := width_rates.next_rate(found, 2**-6)) is not None:
        found[rate] = math.log(rate / 2**-9) ** 2
    assert min(found, key=found.get) == 2**-9 and set(found) == {2.0**-n for n in (5, 6, 7, 8, 9, 10)}


def test_the_sizes_match_their_names():
    for size in SIZES.values():
        parameters = auto_rates.VOCABULARY * size.width + size.width
        parameters += size.layers * (4 * size.width**2 + 3 * size.width * size.intermediate + 2 * size.width)
        assert size.parameters == parameters


@pytest.mark.parametrize(("size", "optimizer"), SWEEPS)
def test_auto_is_within_a_percent_of_the_sweeps_best(size, optimizer):
    points = sweep_of(size, optimizer, read_points())
    if next_rate(size, optimizer, points) is None:
        assert loss_at(points, auto_learning_rate(SIZES[size], optimizer)) < 1.01 * best_of(points)[1]
