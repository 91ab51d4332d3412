"""Tests for creating a recipe from a budget with plan.py: the recipe passes --check, and all problems are reported at
once."""

import sys
from types import SimpleNamespace

import pytest

import plan as plan_script
from pretrain.errors import InputError
from pretrain.model.build import flops_per_token
from pretrain.model.model_config import load_model_config
from pretrain.recipe import read_run_config
from support.project import ROOT, run_script


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Returns a function that runs plan.py and returns the problems it reports."""
    monkeypatch.chdir(tmp_path)

    def refused(*arguments) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["plan.py", *map(str, arguments)])
        with pytest.raises(InputError) as caught:
            plan_script.main()
        return caught.value.problems

    return refused


def test_a_recipe_of_a_budget_passes_the_check(tmp_path, shards, refused):
    asked = ("--flops", "2e12", "--gpu", "cpu", "--family", "qwen3_moe", "--data", shards)
    written = (*asked, "--write", "recipes/mine.yaml")
    printed = run_script(ROOT / "plan.py", *written, cwd=tmp_path).stdout
    config = read_run_config(tmp_path / "recipes/mine.yaml")
    assert config.budget.steps >= 100
    flops = flops_per_token(load_model_config(str(tmp_path / config.model.config)), config.data.sequence_length)
    assert config.batch.tokens_per_step * config.budget.steps * flops == pytest.approx(2e12, rel=0.02)
    text = (tmp_path / "recipes/mine.yaml").read_text()
    assert text.startswith("# Made by: python plan.py --flops 2e12")
    for choice in ("model", "tokens", "batch", "strategy", "learning rate"):
        assert f"\n# {choice}" in text and f"\n{choice}" in printed
    checked = run_script(ROOT / "train.py", "--config", "recipes/mine.yaml", "--check", cwd=tmp_path)
    assert "start the run with:" in checked.stdout
    assert "\n".join(refused(*written)).count("already exists") == 2


def test_data_without_training_tokens_is_rejected(monkeypatch, refused):
    empty = SimpleNamespace(vocabulary_size=512, totals=lambda split: (0, 0, 0))
    monkeypatch.setattr("pretrain.data.shards.read_manifest", lambda folder: empty)
    said = refused("--hours", "1", "--gpu", "h100", "--data", "data/x")
    assert said == ["--data data/x: contains no training tokens; use shards with a train split"]


def test_all_problems_are_reported_at_once(refused):
    said = refused(
        "--hours", "1", "--flops", "1e19", "--dollars", "-3", "--gpu", "cpu", "--family", "lama", "--vocabulary",
        "tokenizers/none", "--data", "data/none", "--write", "x.txt", "--config", "a.yaml",
        "--mfu", "40", "--seed", "3",
    )  # fmt: skip
    for part in (
        "use exactly one of --hours, --dollars and --flops (got --hours 1 and --dollars -3 and --flops 1e+19)",
        "--dollars -3: must be positive",
        "--dollars: the price of cpu is unknown; set --price_per_gpu_hour",
        "--family lama: must be one of llama, qwen3, gpt2, nanochat, deepone, qwen3_moe; did you mean llama?",
        "tokenizers/none",
        "data/none: no such folder of prepared shards",
        "--write x.txt: recipe names must end in .yaml",
        "--config: can't be combined with a budget",
        "--mfu 40.0",
        "--seed",
    ):
        assert any(part in problem for problem in said), part


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--hours", "0.0003", "--vocabulary", "32000"), "startup alone takes about 60 s"),
        (("--hours", "1"), "use either --data (prepared shards) or --vocabulary"),
        (("--hours", "1", "--vocabulary", "500", "--json"), "--json: can't be combined with a budget"),
        (("--family", "llama"), "use exactly one of --hours, --dollars and --flops"),
        ((), "--config: pass the recipe to plan, or use --hours"),
    ],
)
def test_budgets_that_make_no_recipe(arguments, said, refused):
    assert said in "\n".join(refused(*arguments))
