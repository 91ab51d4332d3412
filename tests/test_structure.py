"""What holds the project together: sizes, import direction, settings that are read, a README that tells the truth."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, cpu_seconds, run_script

from pretrain.model_config import load_model_config
from pretrain.recipe import list_fields, read_run_config

SCRIPTS = sorted(path.name for path in ROOT.glob("*.py"))
MODULES = sorted((ROOT / "pretrain").rglob("*.py"))
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
# huggingface_hub comes with transformers, which imports it itself.
LIGHT = {"torch", "transformers", "accelerate", "safetensors", "numpy", "pydantic", "yaml", "tqdm", "pretrain"}
LIGHT |= {"huggingface_hub"}


def imports_at_top(path: Path) -> set[str]:
    """Full names of the modules that a file imports when it is imported."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return names


def test_the_loop_can_be_read_in_five_minutes():
    assert (ROOT / "train.py").read_text().count("\n") <= 300


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_modules_are_short_and_named_by_a_noun(path):
    assert path.read_text().count("\n") <= 400
    assert path.stem not in ("utils", "common", "helpers", "misc")


def test_scripts_import_the_package_and_never_the_other_way_round():
    for path in MODULES:
        names = {name.split(".")[0] for name in imports_at_top(path)}
        assert not names & {Path(script).stem for script in SCRIPTS}, path
    for script in SCRIPTS:
        names = {name.split(".")[0] for name in imports_at_top(ROOT / script)}
        assert not names & ({Path(other).stem for other in SCRIPTS} - {"evaluate"}), script


def test_architectures_know_nothing_of_distribution():
    for path in (ROOT / "pretrain/architectures").glob("[a-z]*.py"):
        assert {name.split(".")[0] for name in imports_at_top(path)} <= {"torch", "transformers", "math", "typing"}
        assert "torch.distributed" not in path.read_text()


def test_training_on_shards_imports_nothing_heavy():
    """deepspeed, datasets, gigatoken, lm_eval, wandb and matplotlib are imported where they are used."""
    todo, seen = ["train"], set()
    while todo:
        name = todo.pop()
        path = ROOT / (name.replace(".", "/") + ".py")
        if name in seen or not path.exists():
            continue
        seen.add(name)
        for imported in imports_at_top(path):
            top = imported.split(".")[0]
            assert top in LIGHT | set(sys.stdlib_module_names), f"{name} imports {imported} at the top"
            todo.append(imported)


def test_every_setting_is_read_somewhere():
    source = "\n".join(path.read_text() for path in [*MODULES, *ROOT.glob("*.py")] if path.name != "config.py")
    # Read by the config itself: Data.mixtures merges them, Ramp.start is called `from` in a recipe.
    internal = {"stages": "mixtures", "from": r"ramp\.start"}
    for path, _, _ in list_fields():
        name = path.split(".")[-1].removesuffix("[]")
        assert re.search(rf"\.{internal.get(name, name)}\b", source), f"{path} is read nowhere"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_parse_and_name_models_that_exist(path):
    config = read_run_config(path)
    assert config.output == Path("runs") / path.stem
    if config.model.endswith(".json"):
        model = load_model_config(str(ROOT / config.model))
        assert config.data.sequence_length <= model.max_position_embeddings
    else:
        assert config.init == "pretrained"
    sequences, rest = divmod(config.batch.tokens_per_step, config.data.sequence_length)
    levels = round(1 / config.batch.ramp.start) if config.batch.ramp else 1
    assert rest == 0 and sequences % (levels * config.batch.sequences_per_micro_batch) == 0


@pytest.mark.parametrize("path", sorted((ROOT / "accelerate_configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_launcher_files_hold_no_setting_of_the_recipe(path):
    values = yaml.safe_load(path.read_text())
    assert not set(values) & {"mixed_precision", "gradient_accumulation_steps", "gradient_clipping", "use_cpu"}


def readme() -> str:
    return (ROOT / "README.md").read_text()


def test_the_design_names_every_module_and_no_other():
    table = (ROOT / "docs/design.md").read_text().split("| module | noun |")[1].split("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in row.split("|")[1].strip().split(", ")]
    there = [path.stem for path in (ROOT / "pretrain").glob("*.py") if path.stem != "__init__"]
    assert sorted(named) == sorted([*there, "architectures/"])


def test_paths_in_the_readme_exist():
    made_by_commands = ("runs/", "data/", "tokenizers/", "mine", ".venv", "config.yaml")
    for path in re.findall(r"`([\w./-]+/[\w./-]*|[\w-]+\.(?:py|md|txt|yaml|json))`", readme()):
        if not path.startswith(made_by_commands):
            assert (ROOT / path).exists(), path


def test_commands_in_the_readme_name_real_scripts_and_settings():
    settings = {re.sub(r"\[\]", "", path) for path, _, _ in list_fields()}
    for command in re.findall(r"^ {4}(.*\.py .*|make \w+)$", readme().replace("\\\n", ""), re.MULTILINE):
        if command.startswith("make "):
            assert re.search(rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
            continue
        script = re.search(r"(\w+\.py)", command)[1]
        assert (ROOT / script).exists(), command
        flags = re.findall(r"--([\w.]+)", command.split(script)[1])
        known = subprocess.run([sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True).stdout
        for flag in flags:
            assert flag in settings or f"--{flag}" in known, f"{command}: --{flag}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_quick(script):
    assert "--" in run_script(script, "--help").stdout
    # 0.2 s at most, where an import of torch takes 1.5.
    assert cpu_seconds(script, "--help") < cpu_seconds("-c", "import torch") / 2


@pytest.mark.parametrize("path", [*MODULES, *(ROOT / name for name in SCRIPTS)], ids=lambda path: path.stem)
def test_the_project_speaks_of_itself_only(path):
    text = path.read_text()
    assert not re.search(r"/work/|/root/|/home/\w+", text)
    assert "TODO" not in text and "FIXME" not in text
