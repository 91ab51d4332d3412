"""Does a recipe train to the same losses under every strategy? Runs it under each and compares step by step."""

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pretrain.problems import InputError, did_you_mean
from pretrain.recipe import read_run_config

ROOT = Path(__file__).parents[1]
REFERENCE = "single"
NEEDS_A_DISK = "zero3_offload_nvme"
TOLERANCES = {"fp32": (1e-5, 1e-4), "bf16": (2e-2, None), "fp16": (2e-2, None)}
"""{precision: (largest difference of the loss, largest relative difference of the gradient norm)}. In half precision
strategies round in other places, and a gradient norm may differ by some percent where losses agree."""


@dataclass(frozen=True)
class Curve:
    """What a run logged, by step."""

    loss: dict[int, float]
    grad_norm: dict[int, float]


def strategy_names() -> list[str]:
    """The strategies there are files for, the reference first, less the one that needs a fast disk."""
    names = sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml"))
    return [REFERENCE, *(name for name in names if name not in (REFERENCE, NEEDS_A_DISK))]


def measure_parity(
    recipe: Path, output: Path, *, steps: int, strategies: list[str], processes: int, precision: str
) -> int:
    """Trains under each strategy into output/NAME, prints the curves; returns 0 if all agree with `single`, else 1.

    Raises InputError for a strategy without a file, and for an output folder that holds runs already.
    """
    known = [*strategy_names(), NEEDS_A_DISK]
    problems = [f"--strategies: {n} is unknown{did_you_mean(n, known)}" for n in strategies if n not in known]
    strategies = [REFERENCE, *(name for name in strategies if name != REFERENCE)]
    problems += [
        f"{output / name} exists; remove it or choose another --output"
        for name in strategies
        if (output / name).exists()
    ]
    if problems:
        raise InputError(*problems)
    overrides = run_overrides(recipe, steps, precision)
    curves: dict[str, Curve | None] = {}
    for number, name in enumerate(strategies, start=1):
        count = 1 if name == REFERENCE else processes
        print(
            f"[{number}/{len(strategies)}] {name}, {count} processes, {steps} steps ...", file=sys.stderr, flush=True
        )
        curves[name] = train_under(name, count, recipe, output / name, overrides)
    if curves[REFERENCE] is None:
        raise InputError(f"{recipe} does not train under {REFERENCE}; see {output / REFERENCE}.log")
    print(table(curves))
    return report(curves, TOLERANCES[precision], output)


def run_overrides(recipe: Path, steps: int, precision: str) -> list[str]:
    """What a short run sets differently from the recipe; its batch, data, model and optimizer stay."""
    config = read_run_config(recipe, [])
    return [
        *("--budget", f"{{steps: {steps}}}", "--precision", precision, "--trackers", "[]", "--cadence", "1"),
        *("--optim.warmup_steps", str(min(config.optim.warmup_steps, steps // 10)), "--logging.every_steps", "1"),
        *("--checkpoint", f"{{every_steps: {steps}, keep_last: 1}}", "--validation.every_steps", str(steps)),
    ]


def train_under(name: str, processes: int, recipe: Path, output: Path, overrides: list[str]) -> Curve | None:
    """The curve of one run; None if it did not end well. What it said is in output.log."""
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", f"accelerate_configs/{name}.yaml"),
        *("--num_processes", str(processes), "--main_process_port", "0", "train.py"),
        *("--config", str(recipe.absolute()), "--output", str(output.absolute()), *overrides),
    ]
    output.parent.mkdir(parents=True, exist_ok=True)
    with open(output.with_suffix(".log"), "w", encoding="utf-8") as log:
        status = subprocess.run(command, cwd=ROOT, env=os.environ, stdout=log, stderr=subprocess.STDOUT).returncode
    return read_curve(output / "metrics.jsonl") if status == 0 else None


def read_curve(metrics: Path) -> Curve:
    """Losses and gradient norms of a metrics.jsonl; what was not finite is NaN."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    train = [line for line in lines if line["event"] == "train"]

    def by_step(key: str) -> dict[int, float]:
        return {line["step"]: math.nan if line[key] is None else line[key] for line in train}

    return Curve(by_step("loss"), by_step("grad_norm"))


def table(curves: dict[str, Curve | None]) -> str:
    """Loss and gradient norm of every step, a pair of columns for each strategy."""
    ran = {name: curve for name, curve in curves.items() if curve is not None}
    lines = ["  step " + "".join(f"{name:>22}" for name in ran)]
    lines.append("       " + "".join(f"{'loss':>12}{'norm':>10}" for _ in ran))
    for step in ran[REFERENCE].loss:
        pairs = [(curve.loss.get(step, math.nan), curve.grad_norm.get(step, math.nan)) for curve in ran.values()]
        lines.append(f"{step:6,} " + "".join(f"{loss:12.6f}{norm:10.5f}" for loss, norm in pairs))
    return "\n".join(lines)


def differences(curve: Curve, reference: Curve) -> tuple[float, float]:
    """(largest difference of the loss, largest relative difference of the gradient norm) over the reference's steps.

    inf where one of the two has a step that the other lacks, or is not finite alone.
    """

    def largest(found: dict[int, float], expected: dict[int, float], relative: bool) -> float:
        worst = 0.0 if found.keys() == expected.keys() else math.inf
        for step in found.keys() & expected.keys():
            if math.isnan(found[step]) and math.isnan(expected[step]):
                continue
            difference = abs(found[step] - expected[step]) / (abs(expected[step]) if relative else 1.0)
            worst = max(worst, math.inf if math.isnan(difference) else difference)
        return worst

    return largest(curve.loss, reference.loss, False), largest(curve.grad_norm, reference.grad_norm, True)


def report(curves: dict[str, Curve | None], tolerances: tuple[float, float | None], output: Path) -> int:
    """Prints how far each strategy is from the reference, writes it to parity.json; 0 if all are near enough."""
    loss_tolerance, norm_tolerance = tolerances
    results, failed = {}, 0
    print(f"\nLargest difference from {REFERENCE} (allowed: loss {loss_tolerance:g}, norm {norm_tolerance or 'any'}):")
    for name, curve in curves.items():
        if name == REFERENCE:
            continue
        if curve is None:
            print(f"  {name:<20} did not run; see {output / name}.log")
            results[name], failed = None, 1
            continue
        loss, norm = differences(curve, curves[REFERENCE])
        good = loss <= loss_tolerance and (norm_tolerance is None or norm <= norm_tolerance)
        print(f"  {name:<20} loss {loss:.2e}   norm {norm:.2e} relative   {'the same' if good else 'DIFFERENT'}")
        results[name], failed = {"loss": loss, "grad_norm": norm, "same": good}, failed or int(not good)
    (output / "parity.json").write_text(json.dumps(results, indent=1, default=str), encoding="utf-8")
    return failed
