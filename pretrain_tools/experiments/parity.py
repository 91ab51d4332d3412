"""Trains a recipe with several strategies and compares the losses at every step.

A strategy is a file in accelerate_configs/, or a mesh such as dp_shard2-tp2.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from torch.distributed.elastic.utils.distributed import get_free_port

from pretrain.config import Budget, RunConfig
from pretrain.data.vocabulary import planned_model_config
from pretrain.errors import EXIT_BAD_INPUT, InputError, Problems, did_you_mean
from pretrain.files import ROOT, write_durably
from pretrain.hardware import missing_bf16
from pretrain.mesh_sizes import DIMENSIONS, Sizes, setting
from pretrain.optim.optimizers import OPTIMIZERS
from pretrain.parallel.launcher import python_path
from pretrain.parallel.strategy import device_type
from pretrain.processes import status_after
from pretrain.recipe import as_yaml, read_run_config
from pretrain.runs.event_log import read_metrics
from pretrain.runs.run_folder import read_json
from pretrain.training.auto_settings import resolve_auto
from pretrain.training.metrics import finite
from pretrain.units import counted, table
from pretrain_tools.planning.layouts import products
from pretrain_tools.planning.memory import sizes_of
from pretrain_tools.planning.smoke import short_config
from pretrain_tools.runs.child_processes import signal_tree, signals_handled
from pretrain_tools.runs.history import require_output

REFERENCE = "single"
SCRIPT = str(ROOT / "train.py")
TOLERANCES = {"fp32": (1e-5, 1e-4), "bf16": (2e-2, None), "fp16": (2e-2, None), "fp8": (3e-2, None)}
"""{precision: (absolute tolerance for the loss, relative tolerance for the gradient norm)}. Strategies round
differently, so in half precision gradient norms can differ by a few percent even if the losses agree. fp8 has 3
mantissa bits, and bf16 has 7."""


@dataclass(frozen=True)
class Curve:
    """A run's losses and gradient norms, as {step: value}."""

    loss: dict[int, float]
    grad_norm: dict[int, float]


@dataclass(frozen=True)
class StrategyOutcome:
    """Outcome of training with one strategy."""

    curve: Curve | None
    """Losses and gradient norms; None if training failed."""
    refusals: tuple[str, ...] = ()
    """Error messages if the strategy can't run this recipe on this machine."""


def strategy_names() -> list[str]:
    """Returns the names of the files in accelerate_configs/."""
    return sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml"))


def named(sizes: Sizes) -> str:
    """Returns a mesh's name, such as dp_shard2-tp2."""
    return "-".join(f"{dimension}{size}" for dimension, size in sizes.named().items())


def sizes_called(name: str) -> Sizes | None:
    """Parses a mesh's name. Returns None for other names."""
    found = [re.fullmatch(rf"({'|'.join(DIMENSIONS)})([1-9]\d*)", word) for word in name.split("-")]
    return Sizes(**{match[1]: int(match[2]) for match in found}) if all(found) else None


def products_asked_for(mesh: str, processes: int, has_experts: bool) -> list[str]:
    """Resolves --mesh to the names of all meshes for this number of processes, or to a single name.

    dp_shard defaults to the remaining factor, as in accelerate_configs/mesh.yaml. Raises InputError for invalid sizes.
    """
    if mesh == "all":
        return [named(each.sizes) for each in products(processes) if each.ep == 1 or has_experts]
    given = sizes_called(mesh.replace(" ", "").replace("=", "").replace(",", "-"))
    if given is None:
        raise InputError(
            f"--mesh: {mesh} is invalid; use all, or sizes for {', '.join(DIMENSIONS)}, such as dp_shard=2,tp=2"
        )
    if "dp_shard" not in mesh and processes % given.world == 0:
        given.dp_shard = processes // given.world
    if given.world != processes or given.fsdp * given.tp % given.ep:
        raise InputError(
            f"--mesh: {mesh} doesn't fit --processes {processes}; use sizes whose product is the number of processes "
            "(ep isn't part of the product, but must divide dp_shard x cp x tp), or all"
        )
    return [named(given)]


def compare_strategies(
    recipe: Path,
    output: Path,
    *,
    steps: int,
    processes: int,
    precision: str,
    strategies: str | None = None,
    mesh: str | None = None,
    changes: Sequence[tuple[str, str]] = (),
) -> int:
    """Trains with each strategy in output/NAME, and compares the losses with those of `single`.

    Returns 0 if at least one strategy ran and all that ran are within tolerance, otherwise 1. Raises InputError for an
    invalid request, for existing output folders, or if `single` can't train the recipe.

    Args:
        strategies: comma-separated names. None means all files in accelerate_configs/, or none if `mesh` is set.
        mesh: see `products_asked_for`.
        changes: recipe overrides as (dotted path, value).
    """
    config = read_run_config(recipe, changes)
    names = strategies.split(",") if strategies else [] if mesh else strategy_names()
    if mesh and processes > 1:
        experts = sizes_of(planned_model_config(config)).experts
        names += products_asked_for(mesh, processes, has_experts=experts > 0)
    names = list(dict.fromkeys([REFERENCE, *names]))
    known = strategy_names()
    problems = Problems(
        f"--strategies: {name} is unknown{did_you_mean(name, known)}"
        for name in names
        if name not in known and sizes_called(name) is None
    )
    problems.attempt(require_output, "--output", output)
    if processes < 2:
        problems.append(
            f"--processes: must be at least 2, got {processes}; with one process, all strategies train as {REFERENCE}"
        )
    elif names == [REFERENCE]:
        problems.append(f"--strategies: {REFERENCE} is the reference; name at least one other strategy")
    problems += [
        f"{output / name} already exists; remove it, or use a different --output"
        for name in names
        if (output / name).exists()
    ]
    problems.stop_if_any()
    # All launches need the same recipe, because `auto` settings may depend on the number of processes.
    short = output / "parity.yaml"
    output.mkdir(parents=True, exist_ok=True)
    write_durably(short, as_yaml(parity_config(resolve_auto(config, processes), steps, precision)))

    def end(number: int, _frame: object) -> None:
        print(f"interrupted; remove {output} before you run the command again", file=sys.stderr)
        sys.exit(status_after(number))  # `run_together` then kills its processes

    outcomes: dict[str, StrategyOutcome] = {}
    for number, name in enumerate(names, start=1):
        count = 1 if name == REFERENCE else processes
        on = counted(count, "process")
        print(f"[{number}/{len(names)}] {name}, {on}, {steps} steps ...", file=sys.stderr)
        with signals_handled(end):
            outcomes[name] = train_under(name, count, short, output / name)
        if outcomes[REFERENCE].curve is None:
            raise InputError(
                *(outcomes[REFERENCE].refusals or [f"training {recipe} failed; see {output / REFERENCE}.log"])
            )
    optimizer = config.optim.name
    if precision == "fp32" and OPTIMIZERS[optimizer].updates_in_bf16 and missing_bf16(device_type()) is None:
        print(f"{optimizer} computes its updates in bf16 on this machine, so the bf16 tolerances apply.\n")
        precision = "bf16"
    return 0 if report_parity(outcomes, TOLERANCES[precision], output) else 1


def parity_config(config: RunConfig, steps: int, precision: str) -> RunConfig:
    """Returns a short version of a recipe without `auto` settings."""
    # Warm up for at most 10% of the short run, so that most steps use the full learning rate.
    warmup = min(config.optim.warmup_steps, steps // 10)
    update = {
        "budget": Budget(steps=steps),
        "precision": precision,
        "optim": config.optim.model_copy(update={"warmup_steps": warmup}),
    }
    return short_config(config, every=steps).model_copy(update=update)


def train_under(
    name: str, processes: int, recipe: Path, output: Path, overrides: Sequence[str] = ()
) -> StrategyOutcome:
    """Trains with one strategy. Redirects its console output to `output` with the suffix .log.

    On a machine with one GPU, all processes share it. This is slow, because NCCL then uses the loopback interface.
    """
    command = launch_command(name, processes, recipe, output, overrides)
    output.parent.mkdir(parents=True, exist_ok=True)
    log = output.with_suffix(".log")
    with open(log, "w", encoding="utf-8") as file:
        if processes > 1 and torch.cuda.device_count() == 1:
            status = run_on_one_gpu(command, processes, file)
        else:
            status = run_together([(command, {})], file)
        if status:
            text = log.read_text(encoding="utf-8", errors="replace")
            return StrategyOutcome(None, tuple(refusals(text, status)))
        # A launch that silently falls back to one process would match the reference.
        if mistake := mistaken_launch(output, name, processes):
            for place in (file, sys.stderr):
                print(mistake, file=place, flush=True)
            return StrategyOutcome(None)
    return StrategyOutcome(read_curve(output))


def launch_command(name: str, processes: int, recipe: Path, output: Path, overrides: Sequence[str]) -> list[str]:
    """Builds the command that trains a recipe with a strategy."""
    sizes = sizes_called(name)
    given = sizes.named() if sizes else {}
    return [
        *(sys.executable, "-P", "-m", "pretrain.launch" if sizes else "accelerate.commands.launch"),
        *("--config_file", str(ROOT / f"accelerate_configs/{'mesh' if sizes else name}.yaml")),
        *(f"--{setting(dimension)}={size}" for dimension, size in given.items()),
        *("--num_processes", str(processes), "--main_process_port", "0", SCRIPT),
        *("--config", str(recipe.absolute()), "--output", str(output.absolute()), *overrides),
    ]


def run_on_one_gpu(command: list[str], processes: int, log: TextIO) -> int:
    """Launches all processes on one GPU. Returns the first nonzero exit status, or 0.

    NCCL rejects two ranks on one GPU of the same machine, so each process is launched as a separate machine.
    """
    together = f"--num_machines {processes} --main_process_ip 127.0.0.1 --main_process_port {get_free_port()}"
    script = command.index(SCRIPT)
    launches = []
    for rank in range(processes):
        options = f"{together} --machine_rank {rank}".split()
        # NCCL treats ranks with different host IDs as different machines.
        environment = {"NCCL_HOSTID": f"machine-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
        launches.append(([*command[:script], *options, *command[script:]], environment))
    return run_together(launches, log)


def run_together(launches: Sequence[tuple[list[str], dict[str, str]]], log: TextIO) -> int:
    """Runs commands, each with its variables. Returns the first nonzero exit status, or 0, and kills the others."""
    environment = os.environ | {"PYTHONPATH": python_path()}
    launched = []
    try:
        for command, variables in launches:
            launched.append(
                subprocess.Popen(
                    command,
                    env=environment | variables,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        while True:
            statuses = [process.poll() for process in launched]
            if any(statuses) or None not in statuses:
                return next(filter(None, statuses), 0)
            time.sleep(0.2)
    finally:
        for process in launched:
            if process.poll() is None:
                signal_tree(process.pid, signal.SIGKILL)
                process.wait()


def mistaken_launch(run: Path, name: str, processes: int) -> str | None:
    """Returns an error message if a run used a different strategy or number of processes, otherwise None."""
    record = read_json(run / "strategy.json")
    trained = named(Sizes(**record.get("mesh", {}))) if sizes_called(name) else record.get("strategy")
    ranks = record.get("ranks")
    recorded = name.removesuffix("_nvme").removesuffix("_offload")  # runs don't record where DeepSpeed offloads to
    recorded = "fsdp2" if recorded == "mesh" else recorded  # mesh.yaml's own sizes are those of fsdp2
    # With one process, the run always records `single`.
    if processes == 1 or (trained, ranks) == (recorded, processes):
        return None
    return f"{run}: trained with {trained} on {ranks} processes instead of {name} on {processes}"


def refusals(log: str, status: int) -> list[str]:
    """Extracts input error messages from a failed run's log. Returns [] for other failures.

    Launchers exit with their own status, and print the run's status at the end of the log.
    """
    stated = re.search(rf"(?:exit ?code *:|non-zero exit status) {EXIT_BAD_INPUT}\b", log)
    if status != EXIT_BAD_INPUT and not stated:
        return []
    # The run's messages are followed by the launcher's own traceback.
    before_launcher = re.split(r"^(?:E\d{4} |Traceback)", log, maxsplit=1, flags=re.MULTILINE)[0]
    # Drop output from libraries (starts with a location, time or spaces) and progress lines (end with dots).
    of_others = r"\s|\[|$|[WI]\d{4} |.*Warning: |.* \.\.\.$"
    return [line for line in before_launcher.splitlines() if not re.match(of_others, line)]


def read_curve(run: Path) -> Curve:
    """Reads a run's losses and gradient norms, with non-finite values as NaN."""
    train = [event for event in read_metrics(run) if event["event"] == "train"]

    def by_step(key: str) -> dict[int, float]:
        return {line["step"]: math.nan if line[key] is None else line[key] for line in train}

    return Curve(by_step("loss"), by_step("grad_norm"))


def largest_distance(curve: Mapping[int, float], reference: Mapping[int, float], relative: bool) -> float:
    """Returns the largest |value - reference| over all steps, divided by |reference| if relative.

    Two NaNs are equal. Returns inf if only one value is NaN, or if the curves have different steps.
    """
    if curve.keys() != reference.keys():
        return math.inf
    found = np.array([curve[step] for step in reference])
    expected = np.array(list(reference.values()))
    with np.errstate(divide="ignore", invalid="ignore"):
        difference = np.abs(found - expected) / (np.abs(expected) if relative else 1.0)
    difference[(found == expected) | (np.isnan(found) & np.isnan(expected))] = 0.0
    return float(np.nan_to_num(difference, nan=math.inf, posinf=math.inf).max(initial=0.0))


def report_parity(
    outcomes: Mapping[str, StrategyOutcome], tolerances: tuple[float, float | None], output: Path
) -> bool:
    """Prints a table with one row per strategy, and writes parity.json as {strategy: result}.

    A result contains either the largest distances (loss, grad_norm) and `same`, or `refused` (error messages), or
    `failed` (path of the log). Returns True if any strategy ran, and all that ran are within the tolerances.
    """
    loss_tolerance, norm_tolerance = tolerances
    reference = outcomes[REFERENCE].curve
    results: dict[str, dict] = {}
    rows = [["strategy", "loss", "norm", ""]]
    for name, outcome in outcomes.items():
        if name == REFERENCE:
            continue
        if outcome.curve is not None:
            loss = largest_distance(outcome.curve.loss, reference.loss, relative=False)
            norm = largest_distance(outcome.curve.grad_norm, reference.grad_norm, relative=True)
            same = loss <= loss_tolerance and (norm_tolerance is None or norm <= norm_tolerance)
            results[name] = {"loss": loss, "grad_norm": norm, "same": same}
            rows.append([name, f"{loss:.1e}", f"{norm:.1e}", "the same" if same else "DIFFERENT"])
        elif outcome.refusals:
            results[name] = {"refused": outcome.refusals}
            rows.append([name, "-", "-", "refused: " + "; ".join(outcome.refusals)])
        else:
            results[name] = {"failed": f"{output / name}.log"}
            rows.append([name, "-", "-", f"FAILED: see {output / name}.log"])
    print(f"Largest differences from {REFERENCE}: loss (absolute), gradient norm (relative)")
    print(table(rows, right={1, 2}))
    (output / "parity.json").write_text(json.dumps(finite(results), indent=1), encoding="utf-8")
    same = sum(result.get("same", False) for result in results.values())
    refused = sum("refused" in result for result in results.values())
    ran = len(results) - refused
    bounds = f"loss within {loss_tolerance:g}" + (f", norm within {norm_tolerance:g}" if norm_tolerance else "")
    end = f"; {refused} can't run it." if refused else "."
    print(f"\n{same} of the {ran} strategies that can run this recipe here match {REFERENCE} ({bounds}){end}")
    if not ran:
        print("Nothing was compared.")
    known = sum(map(math.isfinite, reference.loss.values()))
    if known < len(reference.loss):
        print(f"warning: {REFERENCE} has a finite loss in only {known} of {len(reference.loss)} steps")
    return ran > 0 and same == ran
