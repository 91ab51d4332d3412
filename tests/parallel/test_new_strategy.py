"""A new strategy needs only a class, entries in STRATEGIES and LAUNCHES, and a launcher file.

A new mesh dimension needs only a class and a row in DIMENSIONS, and can be combined with all others.
"""

import json

import pytest

from pretrain.mesh_sizes import DIMENSIONS, Sizes, launched_sizes
from pretrain.parallel.launcher import LAUNCHES, launched_strategy
from pretrain.parallel.registry import STRATEGIES
from pretrain.recipe import read_run_config
from pretrain_tools.planning.footprints import STATES
from pretrain_tools.planning.plan_options import find_gpu
from pretrain_tools.planning.report import build_plan
from pretrain_tools.planning.step_time import Hardware
from support.launcher_environment import launcher_environment
from support.project import events, launch, losses
from support.toy_dimension import ROW
from support.toy_strategy import TOY_FILE, TOY_LAUNCH, toy_states


@pytest.fixture
def toy_file(tmp_path):
    path = tmp_path / "toy.yaml"
    path.write_text(TOY_FILE)
    return path


def test_a_plan_lists_it_with_its_memory(recipe, monkeypatch):
    monkeypatch.setitem(STRATEGIES, "toy", "support.toy_strategy:Toy")
    monkeypatch.setitem(STATES, "toy", toy_states)

    def candidates(*overrides):
        config = read_run_config(recipe, list(overrides))
        plan = build_plan(config, str(recipe), [], Hardware(find_gpu("h100"), 2, 1), mfu=0.4)
        return {candidate.name: candidate for candidate in plan.candidates}

    found = candidates()
    assert found["toy"].runs and found["toy"].memory.total == found["ddp"].memory.total + 1
    assert found["toy"].step_seconds == found["ddp"].step_seconds
    (problem,) = candidates(("optim.name", "adamw_8bit"))["toy"].problems
    # Optimizers from loaded extensions are listed between the two fragments.
    assert problem.startswith("optim.name: adamw_8bit is not supported with toy; use adamw or adafactor or muon")
    assert problem.endswith(", or a strategy that supports it, such as ddp")


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


def test_sizes_know_a_dimension(monkeypatch):
    monkeypatch.setitem(DIMENSIONS, "toy", ROW)
    environment = {"WORLD_SIZE": "8", "ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
    sizes = {f"PARALLELISM_CONFIG_{name}_SIZE": size for name, size in (("TOY", "2"), ("TP", "2"), ("PP", "1"))}
    for name, value in {**environment, **sizes, "PARALLELISM_CONFIG_EP_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    found = launched_sizes()
    assert found == Sizes(toy=2, dp_shard=2, tp=2, ep=4) and (found.world, found.batch, found.fsdp) == (8, 4, 2)
    assert found.named() == {"dp_shard": 2, "tp": 2, "ep": 4, "toy": 2}


def test_a_new_dimension_matches_one_process(recipe, tmp_path):
    options = ("--budget.steps", "2", "--validation.every_steps", "2", "--optim.max_grad_norm", "0.5")

    def train(processes, program, runs):
        listed = [
            {"strategy": strategy, "arguments": ["--output", str(tmp_path / name), *options], "environment": sizes}
            for name, (strategy, sizes) in runs.items()
        ]
        (tmp_path / "runs.json").write_text(json.dumps(listed))
        name = "single" if processes == 1 else "ddp"
        launch(name, processes, f"tests/support/{program}.py", recipe, tmp_path / "runs.json")

    toy = {"PARALLELISM_CONFIG_TOY_SIZE": "2"}
    train(1, "train_strategies", {"alone": ("single", {})})
    train(2, "toy_dimension", {"toy": ("mesh", toy)})
    assert json.loads((tmp_path / "toy/strategy.json").read_text())["mesh"] == {"toy": 2}
    assert losses(tmp_path / "toy") == pytest.approx(losses(tmp_path / "alone"), rel=1e-6)
    for kind, figure in (("train", "grad_norm"), ("validation", "loss")):
        of_runs = [[event[figure] for event in events(tmp_path / name, kind)] for name in ("alone", "toy")]
        assert of_runs[1] == pytest.approx(of_runs[0], rel=2e-6)
    equal, changed = json.loads((tmp_path / "toy/replicas.json").read_text())
    assert equal == [] and len(changed) == 1
