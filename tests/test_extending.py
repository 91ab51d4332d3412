"""Tests that each row in README's "Extending" table names all necessary files. The edits are made in a copy."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from support.pages import registrations
from support.project import ROOT, events, launch, run_script
from support.tiny_models import TINY_LLAMA

IN_COPY = ROOT / "tests/support/in_copy.py"
COPIED = ("pretrain", "pretrain_tools", "accelerate_configs", "ds_configs", "model_configs")
ARCHITECTURE = '''"""Llama under another name."""

from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel


class MineConfig(LlamaConfig):
    model_type = "mine"


class MineModel(LlamaModel):
    config_class = MineConfig


class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
'''
EXTENSION = """
from pathlib import Path

import torch
from accelerate.tracking import GeneralTracker

from pretrain.model.loss_terms import LossTerm
from pretrain.optim.optimizers import OptimizerSpec
from pretrain.registry import ARCHITECTURES, LOSS_TERMS, OPTIMIZERS, SCHEDULES, TRACKERS

from .modeling_mine import MineBesideForCausalLM


@SCHEDULES.register("staircase")
def staircase(schedule, step):
    return 0.5**step


@OPTIMIZERS.register("sgd")
class SGDSpec(OptimizerSpec):
    def make(self, parameters, settings, learning_rate, seed, device_type):
        return torch.optim.SGD(self.groups(parameters, settings.weight_decay), lr=learning_rate)

    def state_shapes(self, name):
        return {}


@LOSS_TERMS.register("hidden")
class Hidden(LossTerm):
    def __call__(self, seen):
        return seen.hidden_BTD.square().mean(-1)


ARCHITECTURES.register("mine_beside")(MineBesideForCausalLM)


@TRACKERS.register("list")
class ListTracker(GeneralTracker):
    name = "list"
    requires_logging_directory = True

    def __init__(self, run_name, logging_dir, **_):
        super().__init__()
        self.path = Path(logging_dir) / "list.txt"

    @property
    def tracker(self):
        return self.path

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None, **_):
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{step} {sorted(values)}\\n")
"""
STRATEGY = '''"""DDP under another name."""

from accelerate.utils import patch_environment

from pretrain.parallel.strategy import Strategy


class Mine(Strategy):
    """DDP that its own size asks for."""

    def make_accelerator(self):
        with patch_environment(ACCELERATE_USE_PARALLELISM_CONFIG="false"):
            return super().make_accelerator()
'''
LAUNCHER_FILE = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
parallelism_config: {parallelism_config_cp_size: 2}
num_machines: 1
machine_rank: 0
rdzv_backend: static
same_network: true
"""

EDITS: dict[str, dict[str, str | list[tuple[str, str]]]] = {
    "a model from transformers": {"model_configs/mine_too.json": json.dumps(TINY_LLAMA)},
    "a model with custom code": {},
    "a built-in architecture": {
        "pretrain/model/architectures/mine.py": ARCHITECTURE,
        "model_configs/mine.json": json.dumps(
            TINY_LLAMA | {"model_type": "mine", "architectures": ["MineForCausalLM"]}
        ),
    },
    "a strategy": {
        "pretrain/parallel/mine.py": STRATEGY,
        "pretrain/parallel/registry.py": [
            ('    "fsdp2":', '    "mine": "pretrain.parallel.mine:Mine",\n    "fsdp2":')
        ],
        "pretrain/parallel/launcher.py": [
            ('    ("MULTI_GPU", ("tp",))', '    ("MULTI_GPU", ("cp",)): "mine",\n    ("MULTI_GPU", ("tp",))')
        ],
        "accelerate_configs/mine.yaml": LAUNCHER_FILE,
    },
    "an optimizer, schedule, loss term, data transformation, sampler, document format, task, "
    "architecture or tracker": {},
}
"""{row: {file: text of a new file, or (old text, replacement) pairs}}"""


def rows() -> dict[str, list[str]]:
    """Returns {what to add: files or folders named in the row}."""
    table = (ROOT / "README.md").read_text().partition("## Extending")[2].partition("\n\n[")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    return {name: re.findall(r"`([\w./]+/[\w./]*)`", how) for name, how, _ in cells[1:]}


@pytest.mark.parametrize("row", EDITS)
def test_a_row_names_every_file(row):
    named = rows()[row]
    for path in EDITS[row]:
        assert any(path == name or (name.endswith("/") and path.startswith(name)) for name in named), path
    for name in named:
        assert any(path.startswith(name) for path in EDITS[row]), f"{name} isn't needed"


def test_every_row_is_followed():
    assert list(rows()) == list(EDITS)


@pytest.fixture(scope="module")
def extended(tmp_path_factory) -> Path:
    """A copy of the project with all EDITS applied."""
    copy = tmp_path_factory.mktemp("extended")
    for name in COPIED:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for script in ("train.py", "prepare_data.py", "evaluate.py"):
        shutil.copyfile(ROOT / script, copy / script)
    for edits in EDITS.values():
        for path, edit in edits.items():
            if isinstance(edit, str):
                assert not (copy / path).exists()
                (copy / path).write_text(edit)
                continue
            text = (copy / path).read_text()
            for there, instead in edit:
                assert text.count(there) == 1, f"{path}: {there}"
                text = text.replace(there, instead)
            (copy / path).write_text(text)
    (copy / "own_ideas.py").write_text(EXTENSION)
    (copy / "modeling_mine.py").write_text(ARCHITECTURE.replace("mine", "mine_beside").replace("Mine", "MineBeside"))
    (copy / "from_the_page.py").write_text("\n\n".join(registrations()))
    return copy


def run(project: Path, script: str, *arguments: object) -> None:
    """Runs one of the copy's scripts."""
    run_script(IN_COPY, project / script, *arguments, cwd=project)


@pytest.fixture(scope="module")
def runs(extended, shards, tmp_path_factory) -> tuple[Path, Path]:
    """Two two-step runs: one with all extensions, and one with transformers' Llama and no loss term."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = {
        "seed": 1,
        "precision": "fp32",
        "data": {"train": [{"shards": str(shards)}], "sequence_length": 64},
        "budget": {"steps": 2},
        "batch": {"tokens_per_step": 256, "sequences_per_micro_batch": 1},
        "compile": "none",
        "logging": {"every_steps": 1},
        "optim": {"name": "sgd", "schedule": "staircase", "learning_rate": 0.01, "warmup_steps": 0},
        "trackers": ["list"],
        "extensions": ["own_ideas.py", "from_the_page.py"],
    }
    found = []
    terms = {"hidden": {"coefficient": 0.5}, "small_hidden": {"coefficient": 0.01}, "probe": {"coefficient": 0.1}}
    for name, model, loss in (("own", "mine", {"terms": terms}), ("plain", "mine_too", {})):
        values = recipe | {"model": f"model_configs/{model}.json", "output": str(folder / name), "loss": loss}
        values["checkpoint"] = {"save_final": name == "own"}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))
        run(extended, "train.py", "--config", folder / f"{name}.yaml")
        found.append(folder / name)
    return tuple(found)


def test_a_custom_architecture_trains_like_its_original(runs):
    own, plain = (events(folder, "train")[0] for folder in runs)
    assert own["loss"] == plain["loss"]
    assert json.loads((runs[0] / "final/config.json").read_text())["model_type"] == "mine"
    assert (runs[0] / "final/mine.py").exists()


def test_a_custom_schedule_sets_the_learning_rate(runs):
    assert [event["learning_rate"] for event in events(runs[0], "train")] == [0.01, 0.005]


def test_a_custom_optimizer_updates_the_weights(runs):
    assert "SGD" in (runs[0] / "train.log").read_text()


def test_a_custom_loss_term_has_gradients(runs):
    own, plain = (events(folder, "train")[0] for folder in runs)
    assert own["grad_norm"] != plain["grad_norm"]


def test_a_custom_tracker_gets_the_metrics(runs):
    lines = (runs[0] / "list.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines if "train/loss" in line] == ["1", "2"]


def test_extensions_on_the_page_train(extended, runs, shards, tmp_path):
    recipe = runs[1].with_suffix(".yaml")
    words = ("--data.transformations", "{noise: {rate: 0.5}}", "--data.sampling", "in_order", "--optim.name", "my_sgd")
    words += ("--checkpoint.save_final", "true")
    given = ("--optim.options.momentum", "0.5", "--output", tmp_path / "run", "--model", tmp_path / "mine_beside.json")
    keys = TINY_LLAMA | {"model_type": "mine_beside", "architectures": ["MineBesideForCausalLM"]}
    (tmp_path / "mine_beside.json").write_text(json.dumps(keys))
    run(extended, "train.py", "--config", recipe, *words, *given)
    first, before = (events(folder, "train")[0] for folder in (tmp_path / "run", runs[1]))
    assert first["loss"] != before["loss"], "the custom sampler must choose different windows"
    final = tmp_path / "run/final"
    assert (final / "modeling_mine.py").exists()
    evaluate = ("evaluate.py", "--model", tmp_path / "run", "--tasks", "counting", "--output", tmp_path / "found.json")
    run(extended, *evaluate, "--extensions", "own_ideas.py", "from_the_page.py")
    (model,) = json.loads((tmp_path / "found.json").read_text())["models"]
    assert 0 < model["tasks"]["counting"]["loss"] < 10 and len(model["tasks"]["counting"]["version"]) == 16
    assert [event["task"] for event in events(tmp_path / "run", "evaluation")] == ["counting"]


def test_a_document_format_of_the_page_is_prepared(extended, shards, tmp_path):
    (tmp_path / "texts.percent").write_text("one text%another text%a third one")
    words = ("--input", tmp_path / "*.percent", "--tokenizer", shards / "tokenizer", "--output", tmp_path / "prepared")
    run(extended, "prepare_data.py", *words, "--extensions", "from_the_page.py", "--workers", "2")
    manifest = json.loads((tmp_path / "prepared/manifest.json").read_text())
    assert sum(shard["documents"] for shard in manifest["shards"]) == 3
    assert [*manifest["options"]["extensions"]] == ["from_the_page.py"]


def test_a_custom_strategy_trains(extended, shards, runs, tmp_path):
    recipe = yaml.safe_load((runs[1].with_suffix(".yaml")).read_text())
    recipe |= {"output": str(tmp_path / "run"), "checkpoint": {}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    script = (IN_COPY, extended / "train.py", "--config", tmp_path / "recipe.yaml")
    launch(extended / "accelerate_configs/mine.yaml", 2, *script, cwd=extended)
    record = json.loads((tmp_path / "run/strategy.json").read_text())
    assert (record["strategy"], record["ranks"]) == ("mine", 2)
    assert (tmp_path / "run/checkpoints/step-00000002").exists()
    assert not events(tmp_path / "run", "export")[0]["problems"]
    losses = [[event["loss"] for event in events(folder, "train")] for folder in (tmp_path / "run", runs[1])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
