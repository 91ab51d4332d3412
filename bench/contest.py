"""Contestants side by side: each trains in a separate process, and they take turns.

All are started one after the other and stopped (SIGSTOP) at their first steps. Then, round after round, each is let
run for some steps while the others stand still, so that whatever else the machine does hits all alike. A contestant
is anything that writes the time after every step, or every few, to a file of JSON lines.

A machine's speed changes by a fifth for seconds on end, so a ratio is taken within each round, and the median of those
is what counts: short turns and many rounds.

Where the machine is busy, the CPU seconds that a step takes say more than its wall time; with one thread, which waits
for no other (OMP_NUM_THREADS=1), they hardly depend on the load.
"""

import contextlib
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

POLL_SECONDS = 0.02
START_SECONDS = 600
LINE_SECONDS = 180


@dataclass
class Contestant:
    """One process that trains.

    Args:
        command: arguments to the Python interpreter, run in the project's root.
        steps_file: where it writes {"event": "train", "step": n, "time": seconds since the epoch} per line.
    """

    name: str
    command: list[str]
    steps_file: Path
    tokens_per_step: int
    start_seconds: float = 0.0
    """From the command to the end of the first reported step, compilation included."""
    peak_memory_bytes: int = 0
    turns: list[list[float]] = field(default_factory=list)
    """Tokens per second of each interval between two reports, turn by turn."""
    cpu_seconds_per_step: list[float] = field(default_factory=list)
    """Of each turn, all threads together."""
    process: subprocess.Popen | None = None
    lines: list[dict] = field(default_factory=list)
    bytes_read: int = 0

    @property
    def tokens_per_second(self) -> list[float]:
        """Of each interval that was measured."""
        return [speed for turn in self.turns for speed in turn]

    def start(self, root: Path, warm_up: int) -> None:
        """Starts it, waits until it has reported `warm_up` times, and stops it."""
        self.steps_file.unlink(missing_ok=True)
        began = time.time()
        log = self.steps_file.with_suffix(".log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, *self.command],
            cwd=root,
            env={**os.environ, "WANDB_MODE": "offline"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()
        self.start_seconds = self._wait_for(1, START_SECONDS)[0]["time"] - began
        self._wait_for(warm_up, START_SECONDS)
        self._signal(signal.SIGSTOP)

    def run(self, reports: int) -> None:
        """Lets it run for this many reported intervals, after the one that includes the pause."""
        known = len(self._lines())
        self._signal(signal.SIGCONT)
        self._wait_for(known + 1, LINE_SECONDS)
        cpu_seconds = cpu_seconds_of(self.process.pid)
        lines = self._wait_for(known + 1 + reports, LINE_SECONDS)[known:]
        cpu_seconds = cpu_seconds_of(self.process.pid) - cpu_seconds
        self._signal(signal.SIGSTOP)
        self.turns.append(speeds(lines, self.tokens_per_step))
        self.cpu_seconds_per_step.append(cpu_seconds / (lines[-1]["step"] - lines[0]["step"]))

    def end(self) -> None:
        """Reads its peak memory (the device's, where its lines tell) and kills it with all its children."""
        if self.process is None:
            return
        lines = self._lines()
        told = lines[-1].get("peak_memory_bytes") if lines else None
        self.peak_memory_bytes = told or peak_memory_bytes(self.process.pid)
        with contextlib.suppress(ProcessLookupError):  # it died, and that is already told
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            self._refuse()

    def _wait_for(self, count: int, seconds: float) -> list[dict]:
        end = time.monotonic() + seconds
        while len(lines := self._lines()) < count:
            if self.process.poll() is not None or time.monotonic() > end:
                self._refuse()
            time.sleep(POLL_SECONDS)
        return lines

    def _lines(self) -> list[dict]:
        """What it has reported; only what is new is read, for it computes on the same cores."""
        if self.steps_file.exists():
            with self.steps_file.open("rb") as file:
                file.seek(self.bytes_read)
                complete = file.read().rpartition(b"\n")[0]
            self.bytes_read += len(complete) + bool(complete)
            self.lines += [line for line in map(json.loads, complete.splitlines()) if line["event"] == "train"]
        return self.lines

    def _refuse(self) -> None:
        status = self.process.poll()
        what = "stood still" if status is None else f"ended with status {status}"
        said = self.steps_file.with_suffix(".log").read_text().strip().splitlines()[-8:]
        raise InputError(f"{self.name} {what} before it was measured; its last words:", *said)


def speeds(lines: list[dict], tokens_per_step: int) -> list[float]:
    """Tokens per second between each two reports."""
    return [
        (after["step"] - before["step"]) * tokens_per_step / (after["time"] - before["time"])
        for before, after in itertools.pairwise(lines)
    ]


def peak_memory_bytes(pid: int) -> int:
    """Peak resident memory of a process (Linux); 0 where unknown."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0)


def cpu_seconds_of(pid: int) -> float:
    """CPU seconds used by a process so far (Linux); 0 where unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def hold(contestants: list[Contestant], root: Path, *, rounds: int, reports: int, warm_up: int = 3) -> None:
    """Runs the contest; afterwards every contestant holds its figures, and no process is left."""
    # An end from outside: end them too.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for contestant in contestants:
            print(f"starts {contestant.name} ...", file=sys.stderr, flush=True)
            contestant.start(root, warm_up)
        for number in range(rounds):
            for contestant in contestants[:: -1 if number % 2 else 1]:  # a drift within rounds cancels out
                contestant.run(reports)
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    finally:
        for contestant in contestants:
            contestant.end()
        signal.signal(signal.SIGTERM, before)


def faster_by(one: Contestant, other: Contestant) -> float:
    """Ratio of their speeds: the median of the rounds', each of the medians of both turns."""
    rounds = zip(one.turns, other.turns, strict=True)
    return statistics.median(statistics.median(mine) / statistics.median(theirs) for mine, theirs in rounds)


def cheaper_by(one: Contestant, other: Contestant) -> float:
    """Ratio of the CPU seconds that a token takes the other and the first; the median of the rounds'."""
    steps = one.tokens_per_step / other.tokens_per_step
    rounds = zip(one.cpu_seconds_per_step, other.cpu_seconds_per_step, strict=True)
    return statistics.median(theirs * steps / max(mine, 1e-9) for mine, theirs in rounds)


def table(contestants: list[Contestant], flops_per_token: float, peak_flops: float | None) -> list[str]:
    """Markdown: medians of all intervals, and of the rounds' ratios of the first contestant's speed to each one's.

    Steps are as long as the first's.
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
