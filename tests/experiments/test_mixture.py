"""Tests for runs.py mixture: near-optimal weights, realistic uncertainty estimates, and real runs."""

import shutil

import numpy as np
import pytest
import yaml

from pretrain.errors import InputError
from pretrain.recipe import pair_up, read_run_config
from pretrain_tools.experiments.mixture import candidate_weights, propose, run_mixture
from support.recorded_runs import record_instead_of_training

OWN = np.array([0.8, 0.1, 0.1])
LEARNED = np.array([[1.2, 0.1, 0.3], [0.1, 0.9, 0.1], [0.2, 0.1, 0.6]])
"""Benefit of each training source (columns) for each validation source (rows)."""


def losses_of(weights):
    """Returns losses, shape (n, 3), from a different formula than the fitted one, with diminishing returns."""
    return 2.0 + np.exp(-2 * np.sqrt(weights) @ LEARNED.T)


def best_of_many():
    tried = np.random.default_rng(5).dirichlet(np.ones(3), 50_000)
    return tried[np.argmin(losses_of(tried).mean(axis=1))]


def test_candidates_are_mixtures_and_the_recipes_own_comes_first():
    weights = candidate_weights(np.array([8.0, 1.0, 1.0]), 20)
    assert weights[0] == pytest.approx(OWN, abs=1e-3)
    assert np.allclose(weights.sum(axis=1), 1) and weights.min() > 0.009
    assert (weights == candidate_weights(np.array([8.0, 1.0, 1.0]), 20)).all()
    assert weights.max(axis=0).min() > 0.4, "every source must dominate some candidate"


def test_candidates_differ_even_if_most_draws_fall_below_the_minimum_weight():
    weights = candidate_weights(np.array([999.0, 1.0]), 64)
    assert len({tuple(mixture) for mixture in weights.round(4)}) == 64


def test_the_proposal_is_near_the_optimum_and_reports_its_gain():
    weights = candidate_weights(OWN, 24)
    noise = np.exp(0.002 * np.random.default_rng(2).standard_normal((24, 3)))
    found = propose(weights, losses_of(weights) * noise)
    at_best, own = losses_of(best_of_many()[None]).mean(), losses_of(OWN[None]).mean()
    reached = losses_of(found.weights[None]).mean()
    assert reached - at_best < 0.15 * (own - at_best), "the proposal must reach most of the possible gain"
    assert found.gain_interval[0] > 0 and found.gain == pytest.approx(own - reached, abs=0.4 * (own - reached))
    assert found.agreement > 0.9 and found.error < 0.01
    assert found.losses == pytest.approx(losses_of(found.weights[None])[0], rel=0.02)
    assert propose(weights, losses_of(weights)[:, :1]).losses.shape == (1,), "one validation source is enough"


def test_no_gain_is_claimed_if_weights_do_not_matter():
    weights, random = candidate_weights(OWN, 16), np.random.default_rng(4)
    claims = [propose(weights, 3 * np.exp(0.01 * random.standard_normal((16, 3)))) for _ in range(5)]
    assert sum(found.gain_interval[0] > 0 for found in claims) <= 1
    assert all(found.gain < 0.05 and found.agreement < 0.7 for found in claims)


def test_small_runs_propose_a_recipe_and_bad_requests_are_refused(recipe, shards, tmp_path, monkeypatch, capsys):
    other = tmp_path / "other"
    shutil.copytree(shards, other)
    values = yaml.safe_load(recipe.read_text())
    values["data"]["train"].append({"shards": str(other), "weight": 3, "max_epochs": 2})
    mixed = recipe.with_name("mixed.yaml")
    mixed.write_text(yaml.safe_dump(values))
    output = tmp_path / "mixtures"

    def losses(config):
        share = config.data.train[1].weight / sum(source.weight for source in config.data.train)
        return {"source": 2 + share, "other": 2 + (1 - share) ** 2}

    trained = record_instead_of_training(monkeypatch, losses)

    def mixture(count, *more):
        changes = pair_up(["--budget.steps", "3", "--validation.sequences", "2", *more])
        return run_mixture(mixed, changes, count=count, seeds=1, output=output)

    assert mixture(6) == 0
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines()[:8]]
    own = rows[1]
    assert own == ["recipe", "25.0%", "75.0%", "2.0625", "2.7500", "2.4062"] and "interval" in said
    proposed = read_run_config(output / "mixture.yaml")
    assert rows[7][:3] == ["proposed", *(f"{source.weight:.1%}" for source in proposed.data.train)]
    assert proposed.data.train[1].max_epochs == 2 and proposed.budget.steps == 3
    assert sorted(trained) == [f"train={number:03d}" for number in range(6)]
    assert mixture(6) == 0 and capsys.readouterr().out == said and len(trained) == 6, (
        "a second call must not train again"
    )
    assert mixture(7) == 0 and trained[6:] == ["train=006"], "more mixtures can be added"
    for count, more, problem in (
        (5, [], "isn't enough to fit 2 sources; use at least 6"),
        (7, ["--optim.weight_decay", "0"], "optim.weight_decay was 0.1, but is now 0.0"),
        (6, ["--data.train", f"[{{shards: {other}}}]"], "a mixture needs at least two sources, got 1"),
    ):
        with pytest.raises(InputError, match=problem):
            mixture(count, *more)
