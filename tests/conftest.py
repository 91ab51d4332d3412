"""Shared fixtures: text files, a tokenizer, shards and a tiny recipe."""

import gc
import json
import os
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

import prepare_data
from support.project import run_script
from support.tiny_models import TINY_LLAMA
from support.warm_python import read_by_imports, server, start_server

# Set before torch is imported: a process forked from a multithreaded one may hang.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads would slow down other tests
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # each compile worker spends half a minute on imports
for variable in ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"):  # they would hide faults that users see without them
    os.environ.pop(variable, None)
gc.set_threshold(10_000)  # with Python's default of 700, garbage collection takes a tenth of the time
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"  # reach test servers without a proxy

LONGEST = (
    "scripts/test_slurm.py", "test_pages.py", "parallel/test_mesh.py", "parallel/test_strategies.py",
    "parallel/test_communication.py", "parallel/test_products.py", "parallel/test_model_parallel.py",
    "training/test_expert_strategies.py", "scripts/test_train.py", "scripts/test_evaluate.py",
    "preparation/cleaning/test_near_duplicates.py", "parallel/test_muon_and_adafactor.py",
    "experiments/test_parity.py", "parallel/test_kill_strategies.py", "scripts/test_publish.py", "test_extending.py",
    "test_closure.py", "model/test_gpu_traffic.py",
)  # fmt: skip
"""The slowest test files, which run first."""


def runs_others(config) -> bool:
    """Returns True in the process that distributes tests to xdist workers."""
    return bool(getattr(config.option, "numprocesses", None)) and not hasattr(config, "workerinput")


def pytest_configure(config):
    """Starts one warm interpreter for all xdist workers."""
    if runs_others(config):
        start_server()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    if runs_others(session.config):
        server()


def pytest_collection_modifyitems(items):
    """Puts the slowest files first, so that all workers finish at about the same time.

    xdist keeps this order only with --no-loadscope-reorder.
    """
    place = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))


def pytest_terminal_summary(terminalreporter):
    """Prints a table of the injected faults."""
    if rows := getattr(sys.modules.get("support.faults"), "TABLE", None):
        terminalreporter.section("faults")
        header = ("#", "injected", "what happened", "recovery")
        for row in (header, ("---",) * 4, *sorted(rows, key=lambda row: int(row[0].split(",")[0]))):
            terminalreporter.write_line(f"| {' | '.join(row)} |")


@pytest.fixture(autouse=True)
def variables_that_imports_read():
    """Restores variables that are read during imports. Otherwise, scripts couldn't be forked from the warm
    interpreter."""
    before = read_by_imports(os.environ)
    yield
    after = read_by_imports(os.environ)
    for name in after.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def text_files(tmp_path_factory) -> Path:
    """Returns a folder with 40 source files from the standard library."""
    folder = tmp_path_factory.mktemp("text")
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]:
        (folder / path.name).write_bytes(path.read_bytes()[:20_000].decode("utf-8", "ignore").encode())
    return folder


@pytest.fixture(scope="session")
def tokenizer(text_files, tmp_path_factory) -> Path:
    """Trains a byte-level BPE tokenizer with 512 token IDs."""
    folder = tmp_path_factory.mktemp("tokenizers") / "tiny"
    run_script("prepare_data.py", "--input", f"{text_files}/*.py", "--train_tokenizer", "512", "--output", folder)
    return folder


@pytest.fixture(scope="session")
def shards(text_files, tokenizer, tmp_path_factory) -> Path:
    """Prepares the text files as shards, with 20% for validation."""
    folder = tmp_path_factory.mktemp("shards") / "source"
    run_script(
        "prepare_data.py", "--input", f"{text_files}/*.py", "--tokenizer", tokenizer, "--validation_fraction", "0.2",
        "--output", folder,
    )  # fmt: skip
    return folder


@pytest.fixture
def recipe(tmp_path, shards) -> Path:
    """Writes a recipe for 12 steps of 4 x 64 tokens, with a checkpoint every 4 steps."""
    model = tmp_path / "tiny_llama.json"
    model.write_text(json.dumps(TINY_LLAMA))
    path = tmp_path / "recipe.yaml"
    values = {
        "model": str(model),
        "output": str(tmp_path / "run"),
        "seed": 1,
        "precision": "fp32",
        "data": {"train": [{"shards": str(shards)}], "sequence_length": 64},
        "budget": {"steps": 12},
        "batch": {"tokens_per_step": 256, "sequences_per_micro_batch": 1},
        "optim": {"learning_rate": 0.003, "warmup_steps": 2},
        "compile": "none",
        "validation": {"every_steps": 6, "sequences": 8},
        "checkpoint": {"every_steps": 4, "keep_last": 2},
        "logging": {"every_steps": 1},
    }
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def run(tokenizer, monkeypatch, capsys):
    """Returns a function that runs prepare_data.py in this process and returns its output."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*arguments, with_tokenizer=True):
        given = ["--tokenizer", str(tokenizer)] if with_tokenizer else []
        monkeypatch.setattr(sys, "argv", ["prepare_data.py", *map(str, arguments), *given])
        assert prepare_data.main() == 0
        return capsys.readouterr().out

    return run
