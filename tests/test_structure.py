"""Tests for the project's structure: sizes, import order, unused settings, and paths in the README."""

import ast
import re
import sys
from pathlib import Path

import pytest
import yaml

from pretrain.model.model_config import load_model_config
from pretrain.recipe import read_run_config
from support.project import ROOT, run_script
from support.setting_reads import fields_of, settings_read

SCRIPTS = sorted(path.name for path in ROOT.glob("*.py"))
MODULES = sorted(ROOT.glob("pretrain*/**/*.py"))
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
# huggingface_hub is a dependency of transformers, which imports it itself.
LIGHT = {
    "torch",
    "transformers",
    "accelerate",
    "safetensors",
    "numpy",
    "pydantic",
    "yaml",
    "tqdm",
    "pretrain",
    "pretrain_tools",
}
LIGHT |= {"huggingface_hub"}


def imports_at_top(path: Path) -> set[str]:
    """Returns the full names of modules and members that a file imports at module level."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_modules_are_named_by_a_noun(path):
    assert path.stem not in ("utils", "common", "helpers", "misc")


def test_scripts_import_the_package_and_never_the_other_way_round():
    for path in MODULES:
        names = {name.split(".")[0] for name in imports_at_top(path)}
        assert not names & {Path(script).stem for script in SCRIPTS}, path
    for script in SCRIPTS:
        names = {name.split(".")[0] for name in imports_at_top(ROOT / script)}
        assert not names & ({Path(other).stem for other in SCRIPTS} - {"evaluate"}), script


def test_architectures_do_not_import_distributed_code():
    for path in (ROOT / "pretrain/model/architectures").glob("[a-z]*.py"):
        assert {name.split(".")[0] for name in imports_at_top(path)} <= {"torch", "transformers", "math", "typing"}
        assert "torch.distributed" not in path.read_text()


def test_training_on_shards_imports_nothing_heavy():
    """deepspeed, datasets, gigatoken, lm_eval, wandb and matplotlib are only imported where they are used."""
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


def unread_settings(modules: dict[Path, str]) -> set[tuple[str, str]]:
    read = set().union(*(settings_read(source) for path, source in modules.items() if path.name != "config.py"))
    settings = {(section, field) for section, fields in fields_of().items() for field in fields}
    merged = {("Data", "train"), ("CurriculumStage", "sequence_length")}  # read by Data.mixtures and Data.windows
    return settings - read - merged


def test_every_setting_is_read_somewhere():
    modules = {path: path.read_text() for path in [*MODULES, *ROOT.glob("*.py")]}
    assert any(".mixtures" in source for source in modules.values())
    assert unread_settings(modules) == set()


@pytest.mark.parametrize(
    ("module", "reader", "unread"),
    [
        ("pretrain/training/background_jobs.py", "settings.device", ("Benchmarks", "device")),
        ("pretrain/training/run_plan.py", "is_at(config.samples)", ("Samples", "every_steps")),
        ("pretrain/training/resuming.py", "guard.on_spike ==", ("Guard", "on_spike")),
    ],
)
def test_an_unused_setting_is_detected(module, reader, unread):
    """A setting's name, such as `device`, may also be an attribute of other objects."""
    modules = {path: path.read_text() for path in [*MODULES, *ROOT.glob("*.py")]}
    assert reader in modules[ROOT / module]
    modules[ROOT / module] = modules[ROOT / module].replace(reader, "None ==" if reader.endswith("==") else "None")
    assert unread in unread_settings(modules)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_parse_and_name_models_that_exist(path):
    config = read_run_config(path)
    assert config.output == Path("runs") / path.stem
    if config.model.config.endswith(".json"):
        model = load_model_config(str(ROOT / config.model.config), changes=config.model.changes)
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


PACKAGES = (
    "pretrain",
    "pretrain/model/architectures",
    "pretrain/model",
    "pretrain/optim",
    "pretrain/data",
    "pretrain/parallel",
    "pretrain/runs",
    "pretrain/checkpoint",
    "pretrain/training",
    "pretrain_tools/preparation/documents",
    "pretrain_tools/preparation/cleaning",
    "pretrain_tools/preparation",
    "pretrain_tools/runs",
    "pretrain_tools/publishing",
    "pretrain_tools/planning",
    "pretrain_tools/profiling",
    "pretrain_tools/evaluation",
    "pretrain_tools/experiments",
)
"""Both packages' folders in import order: a folder imports only from itself and from earlier folders."""


def package_of(module: str) -> str:
    """Returns a module's folder: pretrain_tools.publishing.card -> pretrain_tools/publishing"""
    return "/".join(module.split(".")[:-1])


def modules_by_name() -> dict[str, Path]:
    """Returns {dotted name: path} for all modules, and for the architecture registry, which is in an __init__.py."""
    named = {}
    for path in MODULES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if path.name != "__init__.py":
            named[".".join(parts)] = path
        elif path.parent.name == "architectures":
            named[".".join(parts[:-1]) + ".__init__"] = path
    return named


def imports_anywhere(path: Path) -> set[str]:
    """Returns the package's modules that a file imports at module level, in functions or for type checking."""
    known, found = modules_by_name(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            found |= {known_name for known_name in (name, f"{name}.__init__") if known_name in known}
    return found


def cycles_in(arrows: dict[str, set[str]]) -> list[str]:
    """Returns the modules that are part of a cycle or import from one, by repeatedly removing those without
    imports."""
    left = dict(arrows)
    while free := [name for name, needed in left.items() if not needed & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


def test_packages_import_one_way():
    arrows = {name: imports_anywhere(path) - {name} for name, path in modules_by_name().items()}
    assert {package_of(name) for name in arrows} == set(PACKAGES)
    backwards = [
        f"{name} imports {other}"
        for name, needed in arrows.items()
        for other in needed
        if PACKAGES.index(package_of(other)) > PACKAGES.index(package_of(name))
    ]
    assert backwards == []
    assert cycles_in(arrows) == []


def test_an_import_cycle_is_detected():
    assert cycles_in({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]
    assert "pretrain.config" in imports_anywhere(ROOT / "pretrain/recipe.py")
    assert "pretrain.data.foreign_shards" in imports_anywhere(ROOT / "pretrain/data/shards.py")  # inside a function


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_names_its_modules(package):
    said = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text()))
    assert said, f"{package} has no docstring"
    if package.endswith("architectures"):  # every file there is an architecture
        return
    rows = [row.split(":")[0].strip() for row in said.splitlines() if row.startswith("    ")]
    named = [name for row in rows for name in row.split(", ") if not name.endswith("/")]
    there = [path.stem for path in (ROOT / package).glob("*.py") if path.stem != "__init__"]
    assert sorted(named) == sorted(there)


def test_paths_in_the_readme_exist():
    made_by_commands = ("runs/", "data/", "tokenizers/", "mine", ".venv", "config.yaml")
    for path in re.findall(r"`([\w./-]+/[\w./-]*|[\w-]+\.(?:py|md|txt|yaml|json))`", readme()):
        if not path.startswith(made_by_commands):
            assert (ROOT / path).exists(), path


COMPARED = {
    "nanoGPT, nanochat": {"nanoGPT", "nanochat"},
    "litgpt": {"litgpt"},
    "torchtitan": {"torchtitan"},
    "OLMo-core": {"OLMo-core"},
    "NeMo AutoModel": {"NeMo AutoModel"},
    "run_clm, Trainer": {"run_clm", "Trainer"},
}
"""{column of the comparison: project names in its sections}"""


def test_every_cell_of_the_comparison_has_a_source():
    """Each row has a section with sources, and each empty cell is listed there as not found."""
    page = (ROOT / "docs/comparison.md").read_text()
    rows = page.partition("\n\nAn empty cell")[0].splitlines()
    head, _, *rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows if row.startswith("|")]
    assert head[2:] == list(COMPARED)
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    sources = dict(section.split("\n", 1) for section in sections)
    assert len(rows) >= 11
    for name, *cells in rows:
        (source,) = [text for title, text in sources.items() if name.lower().startswith(title.lower())]
        entries = re.findall(r"^- (.*(?:\n  .*)*)", source, re.MULTILINE)
        missing = " ".join(entry for entry in entries if "not found" in entry and not entry.startswith("**"))
        for column, cell in zip(head[2:], cells[1:], strict=True):
            found = any(f"**{project}" in source for project in COMPARED[column])
            named = "Others" in missing or any(project in missing for project in COMPARED[column])
            assert found or (named and cell in ("", "no")), f"{name}, {column}: {cell or 'empty'} has no source"


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_quick(script):
    """--help takes at most 0.2 s. Importing torch would take 1.5 s."""
    shown = run_script("-X", "importtime", script, "--help", fresh=True)
    assert "--" in shown.stdout
    imported = {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()}
    assert "pretrain.errors" in imported and not imported & {"torch", "numpy", "transformers", "accelerate"}


@pytest.mark.parametrize("path", [*MODULES, *(ROOT / name for name in SCRIPTS)], ids=lambda path: path.stem)
def test_the_project_speaks_of_itself_only(path):
    text = path.read_text()
    assert not re.search(r"/work/|/root/|/home/\w+", text)
    assert "TODO" not in text and "FIXME" not in text


def anchors_of(page: Path) -> set[str]:
    """Returns a page's anchors, as GitHub generates them from headings."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")], ids=lambda page: page.stem)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if not path.startswith("http"):
            there = page.parent / path if path else page
            assert there.exists(), target
            assert not anchor or anchor in anchors_of(there), target
