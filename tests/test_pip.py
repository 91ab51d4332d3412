"""Tests for `pip install .`: the installed commands work in an empty folder, without the repository."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.project import ROOT, launch, run_script

IN_COPY = ROOT / "tests/support/in_copy.py"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> dict[str, str]:
    """Environment variables that make the installed wheel importable."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--disable-pip-version-check", "--target", folder, ROOT], check=True)
    return {**os.environ, "PYTHONPATH": str(folder), "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def test_commands_train_and_evaluate_in_an_empty_folder(installed, shards, tmp_path):
    """Starts the first commands as a user does, and the others in forked interpreters."""

    def run(*words) -> str:
        done = subprocess.run(list(map(str, words)), cwd=tmp_path, env=installed, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run_forked(command, *words) -> str:
        script = Path(installed["PYTHONPATH"]) / "bin" / command
        return run_script(IN_COPY, script, *words, cwd=tmp_path, PYTHONPATH=installed["PYTHONPATH"]).stdout

    files = Path(run("groundwork-files").strip())
    assert files.is_relative_to(installed["PYTHONPATH"]) and (files / "accelerate_configs/ddp.yaml").is_file()
    settings = ("--data", f"{{train: [{{shards: {shards}}}], sequence_length: 64}}", "--output", "run")
    settings += ("--model.hidden_size", 32, "--model.num_hidden_layers", 1)
    settings += ("--compile", "none", "--optim.warmup_steps", 1)
    settings += ("--batch", "{tokens_per_step: 256, sequences_per_micro_batch: 2}")
    run("groundwork-train", "--config", "recipes/demo.yaml", *settings, "--budget", "{steps: 2}")
    resumed = (files / "train.py", "--config", "recipes/demo.yaml", *settings, "--budget", "{steps: 4}")
    environment = {"cwd": tmp_path, "PYTHONPATH": installed["PYTHONPATH"]}
    launch(files / "accelerate_configs/ddp.yaml", 2, IN_COPY, *resumed, **environment)
    assert "finished" in run_forked("groundwork-runs", "status", "run")
    assert "loss" in run_forked("groundwork-evaluate", "--model", "run/final", "--data", shards)
