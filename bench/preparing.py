"""Runs prepare_data.py and datatrove, and measures time, peak memory and tokens."""

import contextlib
import importlib.util
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
POLL_SECONDS = 0.1
SHARE_OF_LOOKS = 0.02
"""Maximum fraction of time spent reading the processes' memory usage."""
TIMES_AS_FAST_AS_DATATROVE = 10
SLOWEST_NEAR_DUPLICATES_MB_PER_S = 60
SLOWEST_CLEANING_MB_PER_CORE_SECOND = 25
TIMES_A_PREPARATION = 2
LARGEST_MEMORY = 2_000_000_000


@dataclass(frozen=True)
class Measured:
    """Measurements from one round: tokens, seconds for the timed part, and the processes' combined peak bytes.

    cpu_seconds: CPU time of all processes, including startup. This is least affected by other load.
    """

    tokens: int
    seconds: float
    peak: int
    cpu_seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Speed in million tokens per second."""
        return self.tokens / self.seconds / 1e6


def run_measured(command: list[str]) -> tuple[float, int, str]:
    """Runs a command. Returns (seconds, peak bytes, output). Exits with the output if the command fails.

    Peak memory is the sum of all processes' proportional set sizes (PSS), which count shared pages once.
    """
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, text=True)
        peak = 0
        while process.poll() is None:
            looked = time.perf_counter()
            peak = max(peak, memory_of(process.pid))
            # Reading the PSS of a process with a gigabyte of memory blocks it for tens of milliseconds.
            _wait_for(process, max(POLL_SECONDS, (time.perf_counter() - looked) / SHARE_OF_LOOKS))
        seconds = time.perf_counter() - began
        output.seek(0)
        told = output.read()
    if process.returncode:
        sys.exit(f"{' '.join(command)} exited with status {process.returncode}\n{told}")
    return seconds, peak, told


def _wait_for(process: subprocess.Popen, seconds: float) -> None:
    """Waits up to `seconds` for the process to end."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def memory_of(pid: int) -> int:
    """Returns the memory (PSS) of a process and its descendants, in bytes."""
    total = 0
    try:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            total += process.memory_full_info().pss
    # A process may exit after it was listed.
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return total
    return total


def prepare(files: list[str], tokenizer: str, *options: str, folder: str | None = None) -> Measured:
    """Runs prepare_data.py once. If you pass an empty folder, the output is kept in `folder`/out."""
    with tempfile.TemporaryDirectory() as passing:
        output = Path(folder or passing, "out")
        command = [sys.executable, "prepare_data.py", "--input", *files, "--tokenizer", tokenizer]
        before = cpu_seconds_of_children()
        seconds, peak, _ = run_measured([*command, "--output", str(output), *options])
        used = cpu_seconds_of_children() - before
        totals = json.loads((output / "manifest.json").read_text())["totals"]
    tokens = sum(split["tokens"] for split in totals.values())
    return Measured(tokens, seconds, peak, used)


def cpu_seconds_of_children() -> float:
    """Returns the CPU seconds of all finished child processes and their descendants."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def rounds(contestants: dict[str, Callable[[], Measured]], repeat: int) -> dict[str, list[Measured]]:
    """Measures all programs `repeat` times, alternating between them. Returns the measurements by name."""
    measured: dict[str, list[Measured]] = {name: [] for name in contestants}
    for _ in range(repeat):
        for name, contestant in contestants.items():
            measured[name].append(contestant())
    return measured


def has_datatrove() -> bool:
    """Checks if datatrove is installed."""
    return importlib.util.find_spec("datatrove") is not None
