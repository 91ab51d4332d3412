"""Measures how much time the guards take per step. Prints Markdown.

    python bench/guards.py                                   # two processes, the 14M Llama from bench/cpu.py
    python bench/guards.py --shape small --processes 1

The guards are rank agreement, checks of loss and gradient norm, control commands, heartbeats, and the comparison of
replicas every 1,000 steps. Runs train.py and times the calls in its loop. Waiting for a step that is logged or saved
isn't counted, because logging and saving require it.
"""

import argparse
import itertools
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.cpu import SHARD_TOKENS, recipe  # noqa: E402
from bench.shapes import CPU_SHAPES, Shape, write_model, write_shards  # noqa: E402
from pretrain.errors import InputError, did_you_mean, run_script  # noqa: E402

REPORT = "GUARDS_REPORT"
"""Environment variable for launched processes: the report's path and the number of steps, as JSON."""
WARM_UP_STEPS = 5
COMPARE_EVERY_STEPS = 1000
"""Default of guard.replica_check_every_steps."""
MOST = 0.01
"""Maximum fraction of a step's time that the guards may take."""


@dataclass(frozen=True)
class GuardCost:
    """Cost of the guards on the main rank, in seconds."""

    step: float
    """Median time of a step, including the guards."""
    after_step: float
    """Median time of `after_step`."""
    watch: float
    """CPU time of the watchdog thread, per step."""
    compare: float
    """Time to compare the replicas' weights once; 0 for a single process."""

    @property
    def share(self) -> float:
        """Fraction of a step's time that all guards take together."""
        return (self.after_step + self.watch + self.compare / COMPARE_EVERY_STEPS) / self.step


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line. Raises InputError for an unknown shape or a number below 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama", help=f"one of {', '.join(CPU_SHAPES)}")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help=f"measured steps, after {WARM_UP_STEPS} warmup steps")
    given = parser.parse_args(arguments)
    problems = (
        [] if given.shape in CPU_SHAPES else [f"--shape: {given.shape!r}{did_you_mean(given.shape, CPU_SHAPES)}"]
    )
    problems += [f"--{name}: must be at least 1" for name in ("processes", "steps") if getattr(given, name) < 1]
    if problems:
        raise InputError(*problems)
    return given


def measure(shape: Shape, processes: int, steps: int) -> GuardCost:
    """Trains the shape for `steps` steps in separate processes. Raises InputError if training fails."""
    with tempfile.TemporaryDirectory(prefix="groundwork-bench-") as name:
        folder = Path(name)
        shards = write_shards(folder / "shards", shape.vocabulary_size, SHARD_TOKENS)
        text = recipe(shape, write_model(shape, folder), shards, folder / "run", report_every=10)
        (folder / "recipe.yaml").write_text(text)
        strategy = "ddp" if processes > 1 else "single"
        command = [
            sys.executable, "-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{strategy}.yaml",
            "--num_processes", str(processes), "--main_process_port", "0", "bench/guards.py",
            "--config", str(folder / "recipe.yaml"), "--compile", "none",
            "--batch.sequences_per_micro_batch", str(max(1, shape.sequences // processes)),
        ]  # fmt: skip
        settings = {REPORT: json.dumps({"file": str(folder / "report.json"), "steps": steps})}
        result = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True)
        if result.returncode or not (folder / "report.json").exists():
            raise InputError(f"train.py exited with status {result.returncode}: {result.stderr.strip()[-2000:]}")
        return GuardCost(**json.loads((folder / "report.json").read_text()))


def train_and_time(report: Path, steps: int) -> None:
    """Runs train.py in a launched process, stops it after `steps` steps, and writes the costs to `report`."""
    from pretrain.training import steps as steps_module

    after_step = steps_module.after_step
    begun: list[float] = []
    seconds: list[float] = []

    def timed(run, *arguments, settle, **named):
        begun.append(time.perf_counter())
        outcome = after_step(run, *arguments, settle=settle, **named)
        # With settle, the call waits for a step that is logged or saved. That time isn't counted.
        if not settle:
            seconds.append(time.perf_counter() - begun[-1])
        if len(begun) == WARM_UP_STEPS + steps + 1:
            cost = cost_of(run, begun, seconds)
            if run.strategy.ranks.is_main:
                report.write_text(json.dumps(vars(cost)))
            run.strategy.ranks.exit(0)
        return outcome

    # Patch this before train.py runs, so that its loop calls the timed version.
    steps_module.after_step = timed
    sys.argv[0] = str(ROOT / "train.py")
    runpy.run_path(sys.argv[0], run_name="__main__")


def cost_of(run, begun: list[float], seconds: list[float]) -> GuardCost:
    """Computes the costs from when the loop called the guards and how long each call took."""
    import psutil

    from pretrain.training.steps import compare_replicas

    measured = begun[WARM_UP_STEPS:]
    thread = next(thread.native_id for thread in threading.enumerate() if thread.name == "watch")
    watch = next(times.user_time + times.system_time for times in psutil.Process().threads() if times.id == thread)
    compare_replicas(run)
    compares = []
    for _ in range(3):
        run.strategy.ranks.barrier()
        start = time.perf_counter()
        compare_replicas(run)
        compares.append(time.perf_counter() - start)
    return GuardCost(
        step=statistics.median(after - before for before, after in itertools.pairwise(measured)),
        after_step=statistics.median(seconds[WARM_UP_STEPS:]),
        watch=watch / len(begun),
        # Use the minimum, because other load only adds time.
        compare=min(compares) if run.strategy.ranks.count > 1 else 0.0,
    )


def table(name: str, processes: int, cost: GuardCost) -> str:
    """Formats the costs as Markdown."""
    rows = {
        "a step": f"{cost.step * 1e3:,.1f} ms",
        "agreement, checks, commands": f"{cost.after_step * 1e6:,.0f} µs",
        "watchdog thread": f"{cost.watch * 1e6:,.0f} µs",
        f"comparing replicas, every {COMPARE_EVERY_STEPS:,} steps": f"{cost.compare * 1e3:,.1f} ms",
        "share of a step's time": f"{cost.share:.3%}",
    }
    lines = [f"| guards, {name}, {processes} process{'es' if processes > 1 else ''} | |", "|---|---|"]
    return "\n".join([*lines, *(f"| {label} | {value} |" for label, value in rows.items())])


def main() -> int:
    """Prints the table. Returns 1 if the guards take more than MOST of a step's time."""
    given = parse_arguments()
    cost = measure(CPU_SHAPES[given.shape], given.processes, given.steps)
    print(table(given.shape, given.processes, cost))
    return int(cost.share > MOST)


if __name__ == "__main__":
    if REPORT in os.environ:
        settings = json.loads(os.environ[REPORT])
        train_and_time(Path(settings["file"]), settings["steps"])
    else:
        run_script(main)
