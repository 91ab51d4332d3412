"""Tests for the budget report: command, prices and reasons."""

import argparse
import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from pretrain.config import Loss
from pretrain.errors import InputError
from pretrain.gpus import GIB
from pretrain.model.build import active_parameters, build_meta_model, count_parameters
from pretrain.model.model_config import load_model_config
from pretrain.model.routers import router_losses
from pretrain.units import count_text
from pretrain_tools.experiments.ladder import Ladder, Rung, ladder_values, read_ladder
from pretrain_tools.planning.budget import recipe_of_budget
from pretrain_tools.planning.plan_options import BudgetRequest, find_gpu
from pretrain_tools.planning.step_time import Hardware
from pretrain_tools.planning.texts import RecipePlace
from support.quick_traces import use_quick_traces

PLACE = RecipePlace(Path("recipes/a.yaml"), Path("data/a"), Path("runs/a"), "tokenizers/a")


def asked(unique_tokens=math.inf, place=PLACE, **options) -> BudgetRequest:
    """Returns a request as plan.py reads it from its command line."""
    given = {
        "hours": None, "dollars": 100.0, "flops": None, "family": "llama", "tokens_per_parameter": None,
        "mfu": 0.4, "write": str(place.recipe), "ladder": None, **options,
    }  # fmt: skip
    return BudgetRequest(argparse.Namespace(**given), 32_001, unique_tokens, place)


MACHINES = Hardware(find_gpu("h100"), 16, 2)


@pytest.fixture
def made(tmp_path, monkeypatch, capsys):
    """Returns a function that runs a request and returns (recipe, printed report)."""
    use_quick_traces(monkeypatch)
    monkeypatch.chdir(tmp_path)

    def make(request: BudgetRequest):
        predict = read_ladder(request.options.ladder).predict if request.options.ladder else None
        recipe_of_budget(request, MACHINES, "plan.py ...", predict)
        text = request.place.recipe.read_text() if request.options.write else ""
        return text, capsys.readouterr().out

    return make


def test_for_many_gpus_the_command_names_strategy_and_machines(made):
    text, printed = made(asked())
    values = yaml.safe_load(text)
    model = json.loads(Path(values["model"]).read_text())
    assert model["model_type"] == "llama" and model["vocab_size"] == 32_128, (
        "the vocabulary size must be padded to a multiple of 128"
    )
    assert values["optim"]["name"] == "muon" and values["precision"] == "bf16"
    for shown in (printed, text):
        assert "--num_processes 16" in shown and "--num_machines 2 --machine_rank RANK" in shown
    assert "--tokenizer tokenizers/a" in printed and "--output data/a" in printed
    cost = next(line for line in printed.splitlines() if line.startswith("cost"))
    assert 95 < float(cost.split()[1].strip("$:")) <= 100


def test_names_with_spaces_can_be_pasted_and_read(made):
    place = RecipePlace(Path("recipes/my #1.yaml"), Path("data/my #1"), Path("runs/my #1"), "tokenizers/my #1")
    text, printed = made(asked(place=place))
    assert yaml.safe_load(text)["model"] == "model_configs/my #1.json"
    preparation, check, _ = (shlex.split(line) for line in printed.splitlines() if line.startswith("  "))
    assert "tokenizers/my #1" in preparation and preparation[-1] == "data/my #1"
    assert check[-2:] == ["recipes/my #1.yaml", "--check"]


def test_a_recipe_sets_the_memory_budget_that_it_needs(made, monkeypatch):
    small = find_gpu("h100", memory_bytes=24 * GIB)
    monkeypatch.setattr(f"{__name__}.MACHINES", Hardware(small, 1, 1))
    text, _ = made(asked(dollars=None, flops=2e20))
    assert yaml.safe_load(text)["activation_checkpointing"] == {"memory_budget": 0.5}
    assert "micro-batch 1, activation_checkpointing: {memory_budget: 0.5}:" in " ".join(text.replace("#", "").split())


def test_a_budget_beyond_the_largest_model_is_reported(made):
    text, printed = made(asked(dollars=1e6))
    for shown in (printed, text):
        assert re.search(
            r"warning: \d+ tokens per parameter are far more than 20, because this is the largest llama", shown
        )
    assert "warning" not in made(asked())[1]


def test_a_mixture_of_experts_is_sized_by_what_a_token_meets(made):
    text, printed = made(asked(family="qwen3_moe"))
    values = yaml.safe_load(text)
    config = load_model_config(values["model"])
    active = active_parameters(config)
    assert count_parameters(config) > 4 * active and f"{count_text(active)} active of" in printed
    tokens = values["budget"]["steps"] * values["batch"]["tokens_per_step"]
    assert 10 < tokens / active < 32, "the ratio must be as close to 20 as the available sizes allow"
    assert router_losses(Loss(**values["loss"]), build_meta_model(config)).balance == 0.01


def test_insufficient_data_is_reported(made):
    text, printed = made(asked(2e8, replace(PLACE, is_prepared=True)))
    assert "repeated tokens are worth less, so 5 is the maximum" in printed
    assert "not all of the time" in printed
    assert "Prepare the data" not in text
    values = yaml.safe_load(text)
    assert values["budget"]["steps"] * values["batch"]["tokens_per_step"] <= 1e9


def ladder_of_law(path: Path, sizes) -> Path:
    """Writes a ladder.json, as runs.py ladder would, with losses from a scaling law."""
    rungs = [Rung(n, 20 * n, 1.7 + 400 / n**0.34 + 1200 / (20 * n) ** 0.34, None, (Path("x"),), 0) for n in sizes]
    path.write_text(json.dumps(ladder_values(Ladder.fitted(rungs), None, [])))
    return path


def test_a_ladder_predicts_the_loss(made, tmp_path):
    ladder = ladder_of_law(tmp_path / "l.json", [10**7, 2 * 10**7, 4 * 10**7, 8 * 10**7, 10**8])
    text, printed = made(asked(ladder=ladder))
    values = yaml.safe_load(text)
    parameters = count_parameters(load_model_config(values["model"]))
    tokens = values["budget"]["steps"] * values["batch"]["tokens_per_step"]
    truth = 1.7 + 400 / parameters**0.34 + 1200 / tokens**0.34
    loss, low, high = map(
        float, re.search(r"^loss +([\d.]+) \(([\d.]+) to ([\d.]+)\)", printed, re.MULTILINE).groups()
    )
    assert low < truth < high and loss == pytest.approx(truth, rel=0.05)
    assert "settings if the scaling law still holds there" in " ".join(printed.split())


def test_ladders_that_predict_nothing_are_refused(tmp_path):
    with pytest.raises(InputError, match="3 model sizes aren't enough for a prediction"):
        read_ladder(ladder_of_law(tmp_path / "l.json", [10**7, 2 * 10**7, 4 * 10**7]))
    (tmp_path / "x.json").write_text("[1]")
    for name in ("x.json", "none.json"):
        with pytest.raises(InputError, match=f"--ladder .*{name}"):
            read_ladder(tmp_path / name)
