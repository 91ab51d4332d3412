"""The project from its root: its scripts run as a user would, its launcher, and what a run has written down."""

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
    """Starts a script of the project, from its root or from `cwd`.

    fresh: in a new interpreter, not a fork of a warm one.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **settings.pop("env", {})}
    start = subprocess.Popen if fresh else WarmPopen
    settings = {"cwd": ROOT, "text": True, **settings}
    return start([sys.executable, *map(str, arguments)], env=environment, **settings)


def run_script(
    *arguments, check=True, timeout=600, fresh=False, cwd=ROOT, **environment
) -> subprocess.CompletedProcess:
    """Runs a script of the project, from its root or from `cwd`; fails with its output unless it may fail."""
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
exit_at_once = os._exit  # by which a process of a group ends
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
    """Runs scripts in one new interpreter, whose imports take seconds: (stdout, stderr) of each. None may fail."""
    words = json.dumps([[str(word) for word in command] for command in commands])
    done = run_script("-c", IN_TURN, words, fresh=True, **environment)
    return list(zip(done.stdout.split(NEXT)[:-1], done.stderr.split(NEXT)[:-1], strict=True))


@functools.cache
def cpu_seconds(*arguments, tries=3) -> float:
    """The least that a script of the project needs of a processor, with its imports, whatever else runs."""

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
    """A port that nobody else takes until it is used: the system gives out others by itself (on Linux from 32768 on),
    and the processes that run tests side by side have ranges of their own.
    """
    while True:
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("", port := next(PORTS)))
            return port


def launch(strategy: str | Path, processes: int, *arguments, **settings) -> subprocess.CompletedProcess:
    """Runs a script under `accelerate launch` with a shipped launcher file or another; settings as of `run_script`."""
    file = strategy if isinstance(strategy, Path) else f"accelerate_configs/{strategy}.yaml"
    return run_script(
        "-m", "accelerate.commands.launch", "--config_file", file,
        "--num_processes", processes, "--main_process_port", free_port(), *arguments, **settings,
    )  # fmt: skip


def events(run: Path, name: str) -> list[dict]:
    """The events of one name in a run's metrics.jsonl."""
    # A line without its end is still being written.
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()]
    return [line for line in lines if line["event"] == name]


def losses(run: Path) -> dict[int, float]:
    """{step: loss} of a run; where a step was repeated after a resume, the last."""
    return {line["step"]: line["loss"] for line in events(run, "train")}
