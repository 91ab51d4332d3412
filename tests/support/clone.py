"""Fresh clone of the project for tests that run shell commands with tiny budgets.

Its .venv/bin contains `python` and `accelerate` wrappers, which run scripts in the warm interpreter with two tiny
layers, four steps and two processes. Every command runs this file, so its imports must be fast.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from support.warm_python import ROOT, WarmPopen, server

LINKED = (
    "pretrain",
    "pretrain_tools",
    "accelerate_configs",
    "ds_configs",
    "slurm",
    "bench",
    "examples",
    "Makefile",
    "requirements.txt",
)
LINKED += tuple(path.name for path in ROOT.glob("*.py"))
COPIED = ("recipes", "model_configs")  # train.py --text writes to them
SET_BY_SHELLS = ("PATH", "MPLBACKEND", "TERM", "COLUMNS")
"""Variables that shells and notebooks change. `main` restores the test's values."""
BUDGET = {
    "data.sequence_length": 64, "batch.tokens_per_step": 512, "batch.sequences_per_micro_batch": 1,
    "optim.warmup_steps": 1, "compile": "none", "validation.every_steps": 2, "validation.sequences": 4,
    "checkpoint.every_steps": 2, "checkpoint.keep_every": 2, "logging.every_steps": 1,
    "precision": "auto",  # emulated bf16 takes seconds
}  # fmt: skip
SHAPES = {
    "llama": {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
              "num_key_value_heads": 2},
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 2},
    "qwen3_moe": {"num_hidden_layers": 2, "hidden_size": 32},
    "deepseek_v3": {"num_hidden_layers": 2, "hidden_size": 32},
}  # fmt: skip
"""{model_type: overrides for the model's JSON}"""
MINUTES = "0.03"


def make_clone(folder: Path) -> Path:
    """Creates a clone with a virtual environment and no prepared data."""
    (folder / ".venv/bin").mkdir(parents=True)
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name)
    for name in ("python", "accelerate"):
        script = folder / ".venv/bin" / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} {name} "$@"\n')
        script.chmod(0o755)
    (folder / ".venv/requirements").touch()  # make's stamp file
    return folder


def copy_clone(clone: Path, folder: Path) -> Path:
    """Copies a clone, including all files created in it."""
    shutil.copytree(clone, folder, symlinks=True)
    return folder


def environment_in(clone: Path) -> dict[str, str]:
    """Returns environment variables for a shell with the clone's virtual environment activated."""
    server()
    own = {f"OWN_{name}": os.environ[name] for name in SET_BY_SHELLS if name in os.environ}
    path = f"{clone}/.venv/bin{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **own, "HF_HUB_OFFLINE": "1", "PATH": path, "MAKEFLAGS": f"-- STDLIB={clone}/text"}


def type_in(clone: Path, command: str, timeout: float = 120) -> subprocess.CompletedProcess:
    """Runs a shell command in the clone. `make demo` uses the text in the clone's text/ folder."""
    return subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", command], cwd=clone, env=environment_in(clone),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


def shortened(words: list[str]) -> list[str]:
    """Returns the command with options that make it finish within seconds."""
    script, *arguments = words
    if script == "train.py" and "--help" in arguments:
        return words
    if script == "train.py" and "--check" in arguments:
        # Tracing compiled layers and measuring emulated bf16 take seconds.
        return [*words, "--compile", "none", "--precision", "auto"]
    if script == "train.py" and "--text" in arguments:
        return [*words, "--minutes", MINUTES]
    if script == "train.py":
        words = replaced(words, "--budget.steps", "4", "--budget.tokens", "2k")
        return [*words, *(word for key, value in tiny(words).items() for word in (f"--{key}", str(value)))]
    if script == "evaluate.py" and "--tasks" in arguments:
        mine = [] if "--include_path" in arguments else ["--include_path", "stand_in_tasks"]
        return [*words, *mine, "--limit", "2"]
    if script == "publish.py" and "--dry_run" not in arguments and "--gguf" not in arguments:
        return [*words, "--dry_run", "--output", "published"]
    if script == "plan.py" and "--write" in arguments:
        return [*words, "--gpus", "1", "--gpu", "cpu"]
    if script == "plan.py":
        return [*words, "--compile", "none"]  # tracing compiled layers takes seconds
    if script == "prepare_data.py":
        return replaced(words, "--slice", "0/1", "--merge_slices", "1")
    return replaced(words, "--step", "1") if script == "runs.py" else words


def tiny(words: list[str]) -> dict[str, object]:
    """Returns settings for a tiny training run. Pretrained models keep their size."""
    budget = BUDGET | ({} if "--budget.tokens" in words else {"budget.steps": 4})
    if "--init" in words:
        return budget
    place = "--model" if "--model" in words else "--config"
    text = Path(words[words.index(place) + 1]).read_text()
    for number, stage in enumerate(
        re.split(r"\n +- ", text.partition("stages:")[2].partition("\n  sequence_length:")[0])[1:]
    ):
        budget |= {f"data.stages.{number}.sequence_length": 128} if "sequence_length:" in stage else {}
    if place == "--config":
        text = Path(re.search(r"model_configs/[\w.]+\.json", text)[0]).read_text()
    return budget | {f"model.{key}": value for key, value in SHAPES[json.loads(text)["model_type"]].items()}


def replaced(words: list[str], *pairs: str) -> list[str]:
    """Replaces the values of options that the command uses."""
    values = dict(zip(pairs[::2], pairs[1::2], strict=True))
    return [values.get(before, word) for before, word in zip(["", *words], words, strict=False)]


def launched(words: list[str]) -> list[str]:
    """Returns arguments for `accelerate launch` with at most two processes."""
    from support.project import free_port  # slow: imports pytest

    place = next(number for number, word in enumerate(words) if word.endswith(".py"))
    options, asked = words[:place], words[place:]
    if "--num_processes" in options and options[options.index("--num_processes") + 1] != "1":
        options = replaced(options, "--num_processes", "2")
    return [*options, "--main_process_port", str(free_port()), *shortened(asked)]


def main(name: str, words: list[str]) -> int:
    """Runs the clone's `python` or `accelerate` with these arguments."""
    environment = {key: value for key, value in os.environ.items() if key not in SET_BY_SHELLS}
    environment |= {key: os.environ[f"OWN_{key}"] for key in SET_BY_SHELLS if f"OWN_{key}" in os.environ}
    if name == "accelerate":
        words = ["-m", "accelerate.commands.launch", *launched(words[1:])]
    elif words[0].endswith(".py"):
        words = shortened(words)
    elif words[:2] == ["-m", "pretrain.launch"]:
        words = [*words[:2], *launched(words[2:])]
    return WarmPopen([sys.executable, *words], env=environment).wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
