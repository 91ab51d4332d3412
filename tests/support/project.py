"""Helpers for running the project's scripts and reading metrics."""

import contextlib
import functools
import itertools
import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.warm_python import WarmPopen

ROOT = Path(__file__).parents[2]
FIRST_PORT = 12_000 + 1000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PORTS = (FIRST_PORT + number % 1000 for number in itertools.count(os.getpid()))


def start_script(*arguments, fresh=False, **settings) -> subprocess.Popen:
    """Starts a script from the project root or from `cwd`.

    fresh: start a new interpreter instead of forking a warm one.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **settings.pop("env", {})}
    start = subprocess.Popen if fresh else WarmPopen
    settings = {"cwd": ROOT, "text": True, **settings}
    return start([sys.executable, *map(str, arguments)], env=environment, **settings)


def run_script(
    *arguments, check=True, timeout=600, fresh=False, cwd=ROOT, **environment
) -> subprocess.CompletedProcess:
    """Runs a script from the project root or from `cwd`. With `check`, a nonzero exit status fails the test."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_script(*arguments, fresh=fresh, cwd=cwd, env=environment, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    result = subprocess.CompletedProcess(process.args, process.returncode, output, errors)
    if check and result.returncode:
        pytest.fail(f"{' '.join(map(str, arguments))} exited {result.returncode}\n{result.stdout}\n{result.stderr}")
    return result


NEXT = "=== next ==="
IN_TURN = f"""
import json, os, runpy, sys
exit_at_once = os._exit  # distributed processes exit with it
os._exit = sys.exit
for words in json.loads(sys.argv[1]):
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        assert not end.code, end.code
    for file in (sys.stdout, sys.stderr):
        print("{NEXT}", file=file, flush=True)
exit_at_once(0)
"""


def run_in_turn(*commands, **environment) -> list[tuple[str, str]]:
    """Runs scripts one after another in a new interpreter and returns (stdout, stderr) for each."""
    words = json.dumps([[str(word) for word in command] for command in commands])
    done = run_script("-c", IN_TURN, words, fresh=True, **environment)
    return list(zip(done.stdout.split(NEXT)[:-1], done.stderr.split(NEXT)[:-1], strict=True))


@functools.cache
def cpu_seconds(*arguments, tries=3) -> float:
    """Returns a script's CPU time, including imports, as the minimum of several tries."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    seconds = []
    for _ in range(tries):
        before = used()
        run_script(*arguments, fresh=True)
        seconds.append(used() - before)
    return min(seconds)


def free_port() -> int:
    """Returns a free port.

    Each xdist worker has its own range, below the ports that Linux assigns automatically (32768 and higher).
    """
    while True:
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("", port := next(PORTS)))
            return port


def launch(strategy: str | Path, processes: int, *arguments, **settings) -> subprocess.CompletedProcess:
    """Runs a script under `accelerate launch`.

    strategy: name of a file in accelerate_configs/, or the path of another config. settings: as in `run_script`.
    """
    file = strategy if isinstance(strategy, Path) else f"accelerate_configs/{strategy}.yaml"
    return run_script(
        "-m", "accelerate.commands.launch", "--config_file", file,
        "--num_processes", processes, "--main_process_port", free_port(), *arguments, **settings,
    )  # fmt: skip


def events(run: Path, name: str) -> list[dict]:
    """Returns the events with this name in a run's metrics.jsonl."""
    # The last line may be incomplete.
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()]
    return [line for line in lines if line["event"] == name]


def nearly_equal(found, expected, tolerance: float, relative: float = 0.0) -> bool:
    """Returns True if two tensors differ by at most `tolerance`, except for one element in 1,000 (ten times as much).

    Adam amplifies rounding errors in gradients close to zero. Which weights this affects depends on the training text,
    the standard library, and therefore on the Python version.

    relative: additional tolerance, times the expected value.
    """
    apart = (found - expected).abs() - relative * expected.abs()
    return int((apart > tolerance).sum()) <= max(1, apart.numel() // 1000) and float(apart.max()) <= 10 * tolerance


def losses(run: Path) -> dict[int, float]:
    """Returns {step: loss} for a run. For repeated steps, the last loss is used."""
    return {line["step"]: line["loss"] for line in events(run, "train")}
