"""What the tests share: text that every machine has, shards of it, a tiny recipe, the scripts run as a user would."""

import contextlib
import functools
import itertools
import json
import os
import resource
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
# Several processes of a test share two cores. Before anything imports torch, so that it counts here as well: a process
# that is forked from one with threads of its own may wait for them for ever.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"  # servers of tests are no proxy's business
FIRST_PORT = 12_000 + 1000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PORTS = (FIRST_PORT + number % 1000 for number in itertools.count(os.getpid()))
TINY_LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def pytest_terminal_summary(terminalreporter):
    """The faults that the fault tests have injected, as a table."""
    if rows := getattr(sys.modules.get("faults"), "TABLE", None):
        terminalreporter.section("faults")
        header = ("#", "injected", "what happened", "recovery")
        for row in (header, ("---",) * 4, *sorted(rows, key=lambda row: int(row[0].split(",")[0]))):
            terminalreporter.write_line(f"| {' | '.join(row)} |")


def run_script(*arguments, check=True, timeout=600, **environment) -> subprocess.CompletedProcess:
    """Runs a script of the project from its root; fails with its output unless it may fail."""
    result = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if check and result.returncode:
        pytest.fail(f"{' '.join(map(str, arguments))} exited {result.returncode}\n{result.stdout}\n{result.stderr}")
    return result


@functools.cache
def cpu_seconds(*arguments, tries=3) -> float:
    """The least that a script of the project needs of a processor, whatever else the machine does."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    seconds = []
    for _ in range(tries):
        before = used()
        run_script(*arguments)
        seconds.append(used() - before)
    return min(seconds)


def free_port() -> int:
    """A port that nobody else takes until it is used: the system gives out others by itself (on Linux from 32768 on),
    and the processes that run tests side by side have ranges of their own.
    """
    while True:
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("", port := next(PORTS)))
            return port


def launch(strategy: str, processes: int, *arguments, check=True, **environment) -> subprocess.CompletedProcess:
    """Runs a script under `accelerate launch` with a shipped strategy file."""
    return run_script(
        "-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{strategy}.yaml",
        "--num_processes", processes, "--main_process_port", free_port(), *arguments, check=check, **environment,
    )  # fmt: skip


@pytest.fixture(scope="session")
def text_files(tmp_path_factory) -> Path:
    """A folder with forty files of the standard library's source."""
    folder = tmp_path_factory.mktemp("text")
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]:
        (folder / path.name).write_bytes(path.read_bytes()[:20_000].decode("utf-8", "ignore").encode())
    return folder


@pytest.fixture(scope="session")
def tokenizer(text_files, tmp_path_factory) -> Path:
    """A byte-level BPE of 512 ids."""
    folder = tmp_path_factory.mktemp("tokenizers") / "tiny"
    run_script("prepare_data.py", "--input", f"{text_files}/*.py", "--train_tokenizer", "512", "--output", folder)
    return folder


@pytest.fixture(scope="session")
def shards(text_files, tokenizer, tmp_path_factory) -> Path:
    """The text files as shards, a fifth of them for validation."""
    folder = tmp_path_factory.mktemp("shards") / "source"
    run_script(
        "prepare_data.py", "--input", f"{text_files}/*.py", "--tokenizer", tokenizer, "--validation_fraction", "0.2",
        "--output", folder,
    )  # fmt: skip
    return folder


@pytest.fixture
def recipe(tmp_path, shards) -> Path:
    """A recipe that trains in seconds: 12 steps of 4 x 64 tokens, a checkpoint every 4."""
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


def events(run: Path, name: str) -> list[dict]:
    """The events of one name in a run's metrics.jsonl."""
    # A line without its end is still being written.
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()]
    return [line for line in lines if line["event"] == name]


def losses(run: Path) -> dict[int, float]:
    """{step: loss} of a run; where a step was repeated after a resume, the last."""
    return {line["step"]: line["loss"] for line in events(run, "train")}
