"""Runs with faults put into them (tests/support/train_with_faults.py), and what they leave behind."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from support.project import ROOT, events, free_port, start_script

EVERYTHING = os.environ.get("FAULTS") == "all"
"""make test-faults: the long sweep."""
TABLE: list[tuple[str, str, str, str]] = []
"""What was injected and came out as it must: numbers in docs/faults.md, fault, outcome, recovery."""


def tell(fault: str, injected: str, outcome: str, recovery: str = "") -> None:
    """One line of the table."""
    TABLE.append((fault, injected, outcome, recovery))


@dataclass
class FaultyRun:
    """A launch that has ended."""

    folder: Path
    """What the faults wrote down."""
    output: str
    code: int
    seconds: float
    left: list[int]
    """Processes that the launcher left behind."""
    seconds_to_start: float
    """From the launch until the first of the processes began: how slow the machine is just now."""

    def struck(self, number: int = 0) -> float:
        """When a fault struck."""
        return float((self.folder / f"fault-{number}").read_text())

    def seconds_to_restart(self, number: int = 0) -> float:
        """From a fault until all processes had ended and the first of the next attempt had begun."""
        return min(start for start in self.starts() if start > self.struck(number)) - self.struck(number)

    def seconds_to_first_step(self, number: int = 0) -> float:
        """From a fault until data was read again: the first new step."""
        times = [note["time"] for rank in (0, 1) for note in self.notes(rank) if note["event"] == "first read"]
        return min(time for time in times if time > self.struck(number)) - self.struck(number)

    def recovery(self, numbers: Iterable[int] = (0,)) -> str:
        """How long the run took, at most, to be down after these faults, and to do a new step."""
        down = max(self.seconds_to_restart(number) for number in numbers)
        first_step = max(self.seconds_to_first_step(number) for number in numbers)
        return f"down in {down:.1f} s, a new step after {first_step:.0f} s"

    def starts(self) -> list[float]:
        """When each process began."""
        return [note["began"] for path in self.folder.glob("rank-*.jsonl") for note in notes(path) if "pid" in note]

    def notes(self, rank: int) -> list[dict]:
        """What a rank wrote down."""
        return notes(self.folder / f"rank-{rank}.jsonl")

    def windows(self) -> dict[int, list[tuple[int, int]]]:
        """{step: (source, first token) read by all ranks}; where a step was repeated, the last time."""
        steps: dict[int, list] = {}
        for path in self.folder.glob("rank-*.jsonl"):
            of_rank, last = {}, None
            for note in notes(path):
                if note["event"] == "read":
                    if note["step"] != last:  # begun, or begun again
                        of_rank[note["step"]] = []
                    of_rank[note["step"]] += [tuple(window) for window in note["windows"]]
                last = note.get("step")
            for step, windows in of_rank.items():
                steps.setdefault(step, []).extend(windows)
        return {step: sorted(windows) for step, windows in sorted(steps.items())}


def notes(path: Path) -> list[dict]:
    """What a rank wrote down; SIGKILL may have cut the last line short."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def launch_with_faults(
    folder: Path,
    strategy: str,
    processes: int,
    *arguments,
    faults: list[dict] | None = None,
    launcher: list | None = None,
    meanwhile: Callable[[subprocess.Popen], None] = lambda process: None,
    timeout: float = 500,
    fresh: bool = False,
    architecture: str | None = None,
    constants: dict | None = None,
    cwd: Path = ROOT,
    **environment,
) -> FaultyRun:
    """Trains with these faults.

    strategy: a launcher file, or torchrun. folder: where they write, a new one or that of the launch before. launcher:
    more arguments of the launcher. meanwhile: called with its process while it runs. fresh: new interpreters, with all
    their imports. architecture: a module with a local one. constants: {module.NAME: value} of the product. cwd: where
    relative paths begin. One process has no launcher.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment["FAULTS_TO_INJECT"] = json.dumps(
        {"folder": str(folder), "faults": faults or [], "constants": constants or {}}
        | ({"architecture": architecture} if architecture else {})
    )
    launches = [
        "-m", "accelerate.commands.launch", "--config_file", ROOT / f"accelerate_configs/{strategy}.yaml",
        "--num_processes", processes, "--main_process_port", free_port(), *(launcher or []),
    ]  # fmt: skip
    if strategy == "torchrun":
        launches = ["-m", "torch.distributed.run", "--nproc_per_node", processes, "--master_port", free_port()]
    command = [*(launches if processes > 1 else []), ROOT / "tests/support/train_with_faults.py", *arguments]
    begun, launched = time.monotonic(), time.time()
    with open(folder / "output.txt", "w+") as output:
        process = start_script(
            *command,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            fresh=fresh,
            cwd=cwd,
        )
        try:
            meanwhile(process)
            code = process.wait(timeout)
        finally:
            seconds, left = time.monotonic() - begun, alive(folder)
            kill_everything(process, folder)
        output.seek(0)
        run = FaultyRun(folder, output.read(), code, seconds, left, 0.0)
        run.seconds_to_start = min((start for start in run.starts() if start > launched), default=launched) - launched
        return run


def alive(folder: Path) -> list[int]:
    """The ranks' processes that still run, of all attempts; the launcher gives each a session of its own."""
    found = []
    for note in [note for path in folder.glob("rank-*.jsonl") for note in notes(path) if "pid" in note]:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(note["pid"])
            # Each process derives this from a clock that may be set meanwhile.
            if abs(process.create_time() - note["time"]) < 5 and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def kill_everything(process: subprocess.Popen, folder: Path) -> None:
    """SIGKILL to the launcher and all ranks."""
    pids = alive(folder)
    process.kill()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def short_source(shards: Path, folder: Path, windows: int, sequence_length: int = 64) -> Path:
    """A copy of prepared shards with so many training windows, for runs of several epochs."""
    shutil.copytree(shards, folder)
    tokens = windows * sequence_length + 1
    path = folder / "train-00000.bin"
    path.write_bytes(path.read_bytes()[: 2 * tokens])
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0] |= {"tokens": tokens, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def wait_until(condition: Callable[[], bool], process: subprocess.Popen, timeout: float = 300.0) -> None:
    """Polls until the condition holds; fails if the process ends first."""
    deadline = time.monotonic() + timeout
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail("the run ended or stalled before what was waited for")
        time.sleep(0.01)


def reached(run: Path, step: int) -> bool:
    """Whether a run has logged this step."""
    return (run / "metrics.jsonl").exists() and any(event["step"] >= step for event in events(run, "train"))


def end_of(run: Path) -> dict:
    """The last `end` event of a run."""
    return events(run, "end")[-1]


def same_tensors(one: Path, other: Path, step: int) -> bool:
    """Whether two runs' checkpoints of a step have the same weights and moments to the last bit."""
    for file in ("model.safetensors", "optimizer.safetensors"):
        first, second = (load_file(run / f"checkpoints/step-{step:08d}" / file) for run in (one, other))
        if first.keys() != second.keys() or not all(torch.equal(first[name], second[name]) for name in first):
            return False
    return True
