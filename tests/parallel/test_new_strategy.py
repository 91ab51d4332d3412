"""A strategy is one class, a line in STRATEGIES and in LAUNCHES, and a launcher file: plan and train then know it."""

import json

import pytest

from pretrain.gpus import find_gpu
from pretrain.parallel.launcher import LAUNCHES, launched_strategy
from pretrain.parallel.registry import STRATEGIES
from pretrain.recipe import read_run_config
from pretrain_tools.planning.footprints import STATES
from pretrain_tools.planning.report import build_plan
from pretrain_tools.planning.step_time import Hardware
from support.launcher_environment import launcher_environment
from support.project import events, launch
from support.toy_strategy import TOY_FILE, TOY_LAUNCH, toy_states


@pytest.fixture
def toy_file(tmp_path):
    path = tmp_path / "toy.yaml"
    path.write_text(TOY_FILE)
    return path


def test_a_plan_lists_it_with_its_own_memory(recipe, monkeypatch):
    monkeypatch.setitem(STRATEGIES, "toy", "support.toy_strategy:Toy")
    monkeypatch.setitem(STATES, "toy", toy_states)

    def candidates(*overrides):
        config = read_run_config(recipe, list(overrides))
        plan = build_plan(config, str(recipe), [], Hardware(find_gpu("h100"), 2, 1), mfu=0.4)
        return {candidate.name: candidate for candidate in plan.candidates}

    found = candidates()
    assert found["toy"].runs and found["toy"].memory.total == found["ddp"].memory.total + 1
    assert found["toy"].step_seconds == found["ddp"].step_seconds
    assert candidates(("optim.name", "adamw_8bit"))["toy"].problems == [
        "optim.name: adamw_8bit does not run under toy; choose adamw or adafactor or muon, or a strategy that runs "
        "it, as ddp does"
    ]


def test_the_launchers_environment_selects_it(toy_file, monkeypatch):
    monkeypatch.setitem(LAUNCHES, TOY_LAUNCH, "toy")
    for name, value in launcher_environment(toy_file, 2).items():
        monkeypatch.setenv(name, value)
    assert launched_strategy() == "toy"


def test_a_run_trains_under_it(recipe, toy_file, tmp_path):
    launch(toy_file, 2, "tests/support/toy_strategy.py", "--config", recipe, "--budget.steps", "2")
    record = json.loads((tmp_path / "run/strategy.json").read_text())
    assert (record["strategy"], record["ranks"]) == ("toy", 2)
    assert [event["code"] for event in events(tmp_path / "run", "end")] == [0]
