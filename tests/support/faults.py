"""Training runs with injected faults (tests/support/train_with_faults.py)."""

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
"""True for the long sweep (make test-faults)."""
TABLE: list[tuple[str, str, str, str]] = []
"""Rows of the fault table: numbers in docs/faults.md, injected fault, outcome, recovery."""


def tell(fault: str, injected: str, outcome: str, recovery: str = "") -> None:
    """Adds a row to the table."""
    TABLE.append((fault, injected, outcome, recovery))


@dataclass
class FaultyRun:
    """A finished launch."""

    folder: Path
    """Folder where the ranks write their notes."""
    output: str
    code: int
    seconds: float
    left: list[int]
    """PIDs of processes that were still running after the launcher exited."""
    seconds_to_start: float
    """Time from the launch to the first process start, which shows how busy the machine is."""

    def struck(self, number: int = 0) -> float:
        """Returns the time at which a fault was injected."""
        return float((self.folder / f"fault-{number}").read_text())

    def seconds_to_restart(self, number: int = 0) -> float:
        """Returns how long after a fault the next attempt's first process started."""
        return min(start for start in self.starts() if start > self.struck(number)) - self.struck(number)

    def seconds_to_first_step(self, number: int = 0) -> float:
        """Returns how long after a fault the next attempt read its first batch."""
        times = [note["time"] for rank in (0, 1) for note in self.notes(rank) if note["event"] == "first read"]
        return min(time for time in times if time > self.struck(number)) - self.struck(number)

    def recovery(self, numbers: Iterable[int] = (0,)) -> str:
        """Describes the longest downtime and the longest time to a new step after these faults."""
        down = max(self.seconds_to_restart(number) for number in numbers)
        first_step = max(self.seconds_to_first_step(number) for number in numbers)
        return f"down in {down:.1f} s, a new step after {first_step:.0f} s"

    def starts(self) -> list[float]:
        """Returns the start time of each process."""
        return [note["began"] for path in self.folder.glob("rank-*.jsonl") for note in notes(path) if "pid" in note]

    def notes(self, rank: int) -> list[dict]:
        """Returns a rank's notes."""
        return notes(self.folder / f"rank-{rank}.jsonl")

    def windows(self) -> dict[int, list[tuple[int, int]]]:
        """Returns {step: [(source, first token)]} for all ranks. For a repeated step, the last attempt counts."""
        steps: dict[int, list] = {}
        for path in self.folder.glob("rank-*.jsonl"):
            of_rank, last = {}, None
            for note in notes(path):
                if note["event"] == "read":
                    if note["step"] != last:  # a new or repeated step
                        of_rank[note["step"]] = []
                    of_rank[note["step"]] += [tuple(window) for window in note["windows"]]
                last = note.get("step")
            for step, windows in of_rank.items():
                steps.setdefault(step, []).extend(windows)
        return {step: sorted(windows) for step, windows in sorted(steps.items())}


def notes(path: Path) -> list[dict]:
    """Reads a rank's notes, ignoring a last line that was truncated by SIGKILL."""
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
    """Trains with injected faults.

    Args:
        folder: where the ranks write their notes; can be an earlier launch's folder.
        strategy: name of an accelerate config, or torchrun.
        processes: number of processes. A single process runs without a launcher.
        arguments: arguments for train.py.
        faults: see train_with_faults.py.
        launcher: additional launcher arguments.
        meanwhile: function to call with the running process.
        fresh: start new interpreters instead of forking a warm one.
        architecture: module with a local architecture.
        constants: {module.NAME: value} to override in the product.
        cwd: working folder.
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
    """Returns the PIDs of ranks from any attempt that are still running."""
    found = []
    for note in [note for path in folder.glob("rank-*.jsonl") for note in notes(path) if "pid" in note]:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(note["pid"])
            # create_time changes if the system clock is adjusted.
            if abs(process.create_time() - note["time"]) < 5 and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def kill_everything(process: subprocess.Popen, folder: Path) -> None:
    """Kills the launcher and all ranks with SIGKILL."""
    pids = alive(folder)
    process.kill()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def short_source(shards: Path, folder: Path, windows: int, sequence_length: int = 64) -> Path:
    """Copies prepared shards, but keeps only the first `windows` training windows, for runs with several epochs."""
    shutil.copytree(shards, folder)
    tokens = windows * sequence_length + 1
    path = folder / "train-00000.bin"
    path.write_bytes(path.read_bytes()[: 2 * tokens])
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0] |= {"tokens": tokens, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def wait_until(condition: Callable[[], bool], process: subprocess.Popen, timeout: float = 300.0) -> None:
    """Waits until the condition holds. Fails if the process exits first."""
    deadline = time.monotonic() + timeout
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail("the run exited or timed out before the condition was met")
        time.sleep(0.01)


def reached(run: Path, step: int) -> bool:
    """Returns True if a run has logged this step."""
    return (run / "metrics.jsonl").exists() and any(event["step"] >= step for event in events(run, "train"))


def end_of(run: Path) -> dict:
    """Returns the last `end` event of a run."""
    return events(run, "end")[-1]


def same_tensors(one: Path, other: Path, step: int) -> bool:
    """Returns True if two runs' checkpoints contain bit-identical weights and optimizer state."""
    for file in ("model.safetensors", "optimizer.safetensors"):
        first, second = (load_file(run / f"checkpoints/step-{step:08d}" / file) for run in (one, other))
        if first.keys() != second.keys() or not all(torch.equal(first[name], second[name]) for name in first):
            return False
    return True
