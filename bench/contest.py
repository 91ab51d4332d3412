"""Compares training programs by running them alternately, each in a separate process.

The programs are started one after the other and paused (SIGSTOP) after their first steps. In each round, each of them
then runs for a few steps while the others are paused, so that other load on the machine affects all of them equally. A
contestant is any program that logs the time to a JSON Lines file after every step, or every few steps.

A machine's speed can change by 20% for several seconds, so ratios are computed within each round, and the result is
the median over rounds. Short turns and many rounds give the best results.

On a busy machine, CPU seconds per step are more reliable than wall time. With one thread (OMP_NUM_THREADS=1), they
hardly depend on the load.
"""

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from pretrain.errors import InputError
from pretrain_tools.runs.child_processes import signal_tree

POLL_SECONDS = 0.02
START_SECONDS = 600
LINE_SECONDS = 180


@dataclass
class Contestant:
    """Training program to measure.

    Args:
        command: arguments to the Python interpreter, which runs in the project root.
        steps_file: file to which the program writes lines {"event": "train", "step": n, "time": seconds since 1970}.
    """

    name: str
    command: list[str]
    steps_file: Path
    tokens_per_step: int
    start_seconds: float = 0.0
    """Time from launch to the end of the first reported step, including compilation."""
    peak_memory_bytes: int = 0
    turns: list[list[float]] = field(default_factory=list)
    """Tokens per second in each interval between reports, per turn."""
    cpu_seconds_per_step: list[float] = field(default_factory=list)
    """CPU seconds per step in each turn, summed over all threads."""
    process: subprocess.Popen | None = None
    lines: list[dict] = field(default_factory=list)
    bytes_read: int = 0

    @property
    def tokens_per_second(self) -> list[float]:
        """Tokens per second in each measured interval."""
        return [speed for turn in self.turns for speed in turn]

    def start(self, root: Path, warm_up: int) -> None:
        """Starts the program, waits for `warm_up` reports, and pauses it."""
        self.steps_file.unlink(missing_ok=True)
        began = time.time()
        log = self.steps_file.with_suffix(".log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, *self.command],
            cwd=root,
            env={**os.environ, "WANDB_MODE": "offline"},
            stdout=log,
            stderr=log,
            start_new_session=True,  # so that Ctrl-C doesn't reach it
        )
        log.close()
        self.start_seconds = self._wait_for(1, START_SECONDS)[0]["time"] - began
        self._wait_for(warm_up, START_SECONDS)
        self._signal(signal.SIGSTOP)

    def run(self, reports: int) -> None:
        """Resumes the program, measures `reports` intervals, and pauses it again."""
        known = len(self._lines())
        self._signal(signal.SIGCONT)
        # The first interval includes the pause, so start measuring after it.
        self._wait_for(known + 1, LINE_SECONDS)
        cpu_seconds = cpu_seconds_of(self.process.pid)
        lines = self._wait_for(known + 1 + reports, LINE_SECONDS)[known:]
        cpu_seconds = cpu_seconds_of(self.process.pid) - cpu_seconds
        self._signal(signal.SIGSTOP)
        self.turns.append(speeds(lines, self.tokens_per_step))
        self.cpu_seconds_per_step.append(cpu_seconds / (lines[-1]["step"] - lines[0]["step"]))

    def end(self) -> None:
        """Reads the program's peak memory (on the GPU, if it reports that) and kills it with all its children."""
        if self.process is None:
            return
        lines = self._lines()
        told = lines[-1].get("peak_memory_bytes") if lines else None
        self.peak_memory_bytes = told or peak_memory_bytes(self.process.pid)
        signal_tree(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None

    def _signal(self, number: signal.Signals) -> None:
        if self.process.poll() is not None:
            self._refuse()
        signal_tree(self.process.pid, number)

    def _wait_for(self, count: int, seconds: float) -> list[dict]:
        end = time.monotonic() + seconds
        while len(lines := self._lines()) < count:
            if self.process.poll() is not None or time.monotonic() > end:
                self._refuse()
            time.sleep(POLL_SECONDS)
        return lines

    def _lines(self) -> list[dict]:
        """Returns all reports. Only reads new lines, because the program shares the cores with this process."""
        if self.steps_file.exists():
            with self.steps_file.open("rb") as file:
                file.seek(self.bytes_read)
                complete = file.read().rpartition(b"\n")[0]
            self.bytes_read += len(complete) + bool(complete)
            self.lines += [line for line in map(json.loads, complete.splitlines()) if line["event"] == "train"]
        return self.lines

    def _refuse(self) -> None:
        status = self.process.poll()
        what = "hung" if status is None else f"exited with status {status}"
        said = self.steps_file.with_suffix(".log").read_text().strip().splitlines()[-8:]
        raise InputError(f"{self.name} {what} before it was measured. Last output:", *said)


def speeds(lines: list[dict], tokens_per_step: int) -> list[float]:
    """Returns the tokens per second between consecutive reports."""
    return [
        (after["step"] - before["step"]) * tokens_per_step / (after["time"] - before["time"])
        for before, after in itertools.pairwise(lines)
    ]


def peak_memory_bytes(pid: int) -> int:
    """Returns a process's peak resident memory in bytes (Linux), or 0 if it is unknown."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0)


def cpu_seconds_of(pid: int) -> float:
    """Returns the CPU seconds that a process has used so far (Linux), or 0 if they are unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def hold(contestants: list[Contestant], root: Path, *, rounds: int, reports: int, warm_up: int = 3) -> None:
    """Measures all programs and stores the results in them. Leaves no process running."""
    # Paused processes would survive a SIGTERM to this process, so exit through `finally`, which kills them.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for contestant in contestants:
            print(f"starting {contestant.name} ...", file=sys.stderr, flush=True)
            contestant.start(root, warm_up)
        for number in range(rounds):
            # Alternate the order, so that drift within rounds cancels out.
            for contestant in contestants[:: -1 if number % 2 else 1]:
                contestant.run(reports)
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    finally:
        for contestant in contestants:
            contestant.end()
        signal.signal(signal.SIGTERM, before)


def faster_by(one: Contestant, other: Contestant) -> float:
    """Returns the speed of `one` relative to `other`: the median over rounds of the ratio of median speeds."""
    rounds = zip(one.turns, other.turns, strict=True)
    return statistics.median(statistics.median(mine) / statistics.median(theirs) for mine, theirs in rounds)


def cheaper_by(one: Contestant, other: Contestant) -> float:
    """Returns the CPU seconds per token of `other` relative to `one`, as the median over rounds."""
    steps = one.tokens_per_step / other.tokens_per_step
    rounds = zip(one.cpu_seconds_per_step, other.cpu_seconds_per_step, strict=True)
    return statistics.median(theirs * steps / max(mine, 1e-9) for mine, theirs in rounds)


def table(contestants: list[Contestant], flops_per_token: float, peak_flops: float | None) -> list[str]:
    """Formats the results as Markdown: medians over intervals, and the first program's speed relative to each.

    CPU seconds are per step with the first program's batch size.
    """
    first = contestants[0]
    rows = [
        f"| | tokens/s | MFU | {first.name} is faster by | CPU s per step | by CPU s | peak memory "
        "| start to first step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for contestant in contestants:
        speed = statistics.median(contestant.tokens_per_second)
        seconds = (
            statistics.median(contestant.cpu_seconds_per_step) * first.tokens_per_step / contestant.tokens_per_step
        )
        mfu = f"{flops_per_token * speed / peak_flops:.1%}" if peak_flops else "peak unknown"
        rows.append(
            f"| {contestant.name} | {speed:,.0f} | {mfu} | {faster_by(first, contestant):.3f} x "
            f"| {seconds:.3f} | {cheaper_by(first, contestant):.3f} x "
            f"| {contestant.peak_memory_bytes / 2**30:.2f} GiB | {contestant.start_seconds:.1f} s |"
        )
    return rows
