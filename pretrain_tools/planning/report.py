"""Builds the plan of a run and prints it: tables for terminals, JSON for programs, a comment for recipes."""

import dataclasses
import json
import math
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pretrain.config import RunConfig
from pretrain.data.vocabulary import assumed_vocabulary, planned_model_config
from pretrain.errors import Problems
from pretrain.gpus import GIB
from pretrain.model.build import FORMULA, flops_per_token
from pretrain.parallel.auto_settings import settled
from pretrain.parallel.registry import STRATEGIES
from pretrain.terminal import width_of, wrapped
from pretrain.units import bytes_text, co2_text, count_text, duration_text
from pretrain_tools.planning.calibration import Calibration, calibrate
from pretrain_tools.planning.candidates import (
    Candidate,
    Storage,
    command_of,
    consider,
    planned_precision,
    reason_of,
    recommend,
    sources_of,
    storage_of,
    work_of_run,
)
from pretrain_tools.planning.memory import PlannedRun
from pretrain_tools.planning.step_time import (
    COMMUNICATION_BYTES,
    CONTEXT_BYTES,
    FRAGMENTATION,
    Hardware,
    RunWork,
    Speed,
    default_mfu,
)

TABLE_WIDTH = 132
PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers", "total")
"""Parts of a `Memory` that are columns of the table."""


@dataclass(frozen=True)
class Plan:
    """Everything that plan.py reports."""

    config: RunConfig
    hardware: Hardware
    precision: str
    work: RunWork
    speed: Speed
    candidates: list[Candidate]
    recommended: Candidate | None
    command: str | None
    storage: Storage
    sources: list[dict[str, Any]]
    source_problems: list[str]
    calibration: Calibration | None

    @property
    def hours(self) -> float | None:
        """Hours under the recommended strategy, without validation, checkpoints and restarts."""
        return None if self.recommended is None else self.work.steps * self.recommended.step_seconds / 3600

    @property
    def gpu_hours(self) -> float | None:
        return None if self.hours is None else self.hours * self.hardware.gpus

    @property
    def cost(self) -> float | None:
        """US dollars."""
        return None if self.gpu_hours is None else self.gpu_hours * self.hardware.gpu.price_per_hour

    @property
    def kilowatt_hours(self) -> float | None:
        """Energy of the GPUs at their rated power; the rest of the machines adds about a third."""
        return None if self.gpu_hours is None else self.gpu_hours * self.hardware.gpu.watts / 1000


def build_plan(
    config: RunConfig,
    config_path: str,
    overrides: list[tuple[str, str]],
    hardware: Hardware,
    *,
    mfu: float | None = None,
    with_calibration: bool = False,
) -> Plan:
    """Plans a recipe under every strategy. Raises InputError with what cannot be planned."""
    # auto settings are resolved for one process, as for --check; strategies divide the batch later.
    config = settled(config, processes=1)
    model_config = planned_model_config(config.model, config.data)
    precision = planned_precision(config, hardware.gpu)
    work = work_of_run(config, model_config)
    # A run with stages is calibrated in its first one, which is what the machine sees first.
    first = config if config.data.windows[0] == config.data.window else config.as_stage(0)
    at_first = flops_per_token(model_config, config.data.windows[0].sequence_length)
    calibration = calibrate(first, at_first) if with_calibration else None
    if calibration:
        # Only windows of the first stage were measured.
        rate = calibration.tokens_per_second * at_first / work.flops_per_token
        speed = Speed(calibration.mfu or 0.0, "measured on this machine", rate)
    else:
        speed = Speed(mfu, "stated") if mfu else Speed(*default_mfu(work.active, hardware.device_type))
    run = PlannedRun(config, model_config, precision, hardware.device_type)
    candidates = [consider(name, run, work, hardware, speed) for name in STRATEGIES]
    recommended = recommend(candidates)
    command = command_of(recommended, config_path, overrides, hardware, config) if recommended else None
    # Missing data is no reason not to plan: it is a remark below the table.
    problems = Problems(assumed_vocabulary(config.model, config.data, model_config))
    sources = problems.attempt(sources_of, config, work) or []
    return Plan(
        config, hardware, precision, work, speed, candidates, recommended, command, storage_of(config, work), sources,
        problems, calibration,
    )  # fmt: skip


def plan_json(plan: Plan) -> str:
    """Formats the plan as JSON, in bytes, seconds, hours and US dollars."""
    recommended = plan.recommended
    values = {
        "parameters": plan.work.sizes.total,
        "active_parameters": plan.work.active,
        "embedding_parameters": plan.work.sizes.embedding,
        "non_embedding_parameters": plan.work.non_embedding,
        "tokens": plan.work.tokens,
        "steps": plan.work.steps,
        "tokens_per_step": plan.work.tokens_per_step,
        "flops_per_token": plan.work.flops_per_token,
        "flops": plan.work.flops,
        "precision": plan.precision,
        "gpu": dataclasses.asdict(plan.hardware.gpu),
        "gpus": plan.hardware.gpus,
        "machines": plan.hardware.machines,
        "usable_bytes": plan.hardware.usable_bytes,
        "mfu": plan.speed.mfu,
        "mfu_source": plan.speed.source,
        "strategies": [candidate_values(candidate) for candidate in plan.candidates],
        "recommended": recommended.name if recommended else None,
        "sequences_per_micro_batch": recommended.micro_batch if recommended else None,
        "command": plan.command,
        "hours": plan.hours,
        "gpu_hours": plan.gpu_hours,
        "cost": plan.cost,
        "kilowatt_hours": plan.kilowatt_hours,
        "checkpoint_bytes": plan.storage.checkpoint,
        "checkpoints_kept": plan.storage.kept,
        "disk_bytes": plan.storage.total,
        "sources": plan.sources,
        "source_problems": plan.source_problems,
        "calibration": plan.calibration and dataclasses.asdict(plan.calibration),
    }
    return json.dumps(values, indent=1)


def candidate_values(candidate: Candidate) -> dict[str, Any]:
    values = dataclasses.asdict(candidate)
    if candidate.memory is not None:
        values["memory"]["total"] = candidate.memory.total
    # JSON has no infinity.
    seconds = candidate.step_seconds if math.isfinite(candidate.step_seconds) else None
    return {"strategy": values.pop("name"), **values, "step_seconds": seconds}


def print_plan(plan: Plan) -> None:
    """Prints tables with rich, which omits colors outside a terminal; a narrow terminal has fewer columns."""
    console = Console(soft_wrap=True, highlight=False)
    columns = width_of(sys.stdout)
    console.width = columns or TABLE_WIDTH
    rows = facts(plan)
    width = max(map(len, rows))
    for name, value in rows.items():
        line = wrapped(f"{name:<{width}}  {value}", columns)
        console.print(f"[bold]{escape(line[:width])}[/]{escape(line[width:])}")
    hardware = plan.hardware
    config = plan.config
    lengths = {window.sequence_length for window in config.data.windows} - {config.data.sequence_length}
    longest = f", or their tokens in sequences of {', '.join(f'{n:,}' for n in sorted(lengths))}" if lengths else ""
    heading = (
        f"Memory of one {hardware.unit} in GB (2^30 bytes), {config.batch.sequences_per_micro_batch} sequences of "
        f"{config.data.sequence_length:,} tokens per micro-batch{longest}; {hardware.usable_bytes / GIB:.1f} GB of "
        f"{hardware.gpu.memory_bytes / GIB:.1f} can be used"
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    parts = PARTS if console.width >= TABLE_WIDTH else ("total",)
    for column in ("strategy", *parts, "fits", "largest micro-batch", "tokens/s", "hours"):
        table.add_column(column, justify="left" if column in ("strategy", "fits") else "right", no_wrap=True)
    for candidate in plan.candidates:
        if candidate.memory is not None:
            style = "green" if candidate is plan.recommended else None
            table.add_row(*memory_row(candidate, plan.work, parts), style=style)
    console.print("", wrapped(heading, columns), table, "", sep="\n", markup=False)
    for line in remarks(plan):  # a command stays in one line, to be pasted
        console.print(line if line.startswith("  ") else wrapped(line, columns), markup=False)


def memory_row(candidate: Candidate, work: RunWork, parts: Sequence[str]) -> list[str]:
    seconds = candidate.step_seconds
    is_timed = math.isfinite(seconds)
    return [
        candidate.name,
        *(f"{getattr(candidate.memory, part) / GIB:.1f}" for part in parts),
        "yes" if candidate.fits else "no",
        str(candidate.largest_micro_batch or "-"),
        f"{work.tokens_per_step / seconds:,.0f}" if is_timed else "-",
        f"{work.steps * seconds / 3600:,.1f}" if is_timed else "-",
    ]


def facts(plan: Plan) -> dict[str, str]:
    """Lists what does not depend on the strategy: {name: value}."""
    work = plan.work
    hardware = plan.hardware
    gpu = hardware.gpu
    rate = gpu.bf16_flops / 1e12
    machines = f" in {hardware.machines} machines" if hardware.machines > 1 else ""
    active = f"{work.active:,} active of " if work.active < work.sizes.total else ""
    rows = {
        "model": f"{plan.config.model}, {active}{work.sizes.total:,} parameters: {work.sizes.embedding:,} in "
        "embeddings, "
        f"{work.non_embedding:,} in matrix products and norms" + (" (head tied)" if work.sizes.is_tied else ""),
        "budget": f"{count_text(work.tokens)} tokens, {work.steps:,} steps of {work.tokens_per_step:,}, "
        f"{work.tokens / work.active:.1f} tokens per {'active ' if active else ''}parameter",
        "work": f"{work.flops:.3g} FLOPs = tokens x ({FORMULA})",
        "GPUs": f"{hardware.gpus} x {gpu.name}{machines}, {rate:,.{0 if rate >= 10 else 2}f} TFLOP/s "
        f"{'measured' if hardware.device_type == 'cpu' else 'dense bf16'}, "
        f"{gpu.memory_bytes / GIB:.0f} GB",
        "speed": speed_text(plan),
        "checkpoints": f"{bytes_text(plan.storage.checkpoint)} each, {plan.storage.kept} kept: "
        f"{bytes_text(plan.storage.total)} of disk with one being written and the final model",
    }
    for row in plan.sources:
        rows[f"data {row['source']}"] = f"{count_text(row['tokens'])} tokens will be drawn: " + (
            "not prepared yet"
            if row["epochs"] is None
            else f"{row['epochs']:.2f} epochs of {count_text(row['available'])}"
        )
    return rows


def speed_text(plan: Plan) -> str:
    if found := plan.calibration:
        mfu = f", MFU {found.mfu:.1%} of {found.peak_source}" if found.mfu else ""
        return f"{found.tokens_per_second:,.0f} tokens/s per process, measured here{mfu}"
    recompute = "; activation checkpointing adds a third of the time" if plan.work.recompute > 1 else ""
    return f"MFU {plan.speed.mfu:.0%} ({plan.speed.source}; --mfu or --calibrate for yours){recompute}"


def remarks(plan: Plan) -> list[str]:
    """Lists what cannot run and why, the margin, the verdict and the command."""
    names_of: dict[str, list[str]] = {}
    for candidate in plan.candidates:
        for problem in candidate.problems:
            names_of.setdefault(problem, []).append(candidate.name)
    lines = [f"{', '.join(names)}: {problem}" for problem, names in names_of.items()]
    lines += sorted({note for candidate in plan.candidates for note in candidate.notes})
    lines += plan.source_problems
    for candidate in plan.candidates:
        memory = candidate.memory
        if memory is not None and (memory.host or memory.disk):
            disk = f" and {memory.disk / GIB:,.1f} GB of disk (disk for each GPU)" if memory.disk else ""
            host = memory.host * plan.hardware.gpus_per_machine / GIB
            lines.append(f"{candidate.name}: needs {host:,.1f} GB additional host memory per machine{disk}")
    context = "CUDA" if plan.hardware.device_type == "cuda" else "the system"
    lines.append(
        f"Not counted as usable: {FRAGMENTATION:.0%} for fragmentation, {CONTEXT_BYTES / GIB:.0f} GB for {context}"
        + (f", {COMMUNICATION_BYTES / GIB:.0f} GB for NCCL." if plan.hardware.gpus > 1 else ".")
    )
    if found := plan.calibration:
        difference = found.predicted_peak_bytes / found.measured_peak_bytes - 1
        lines.append(
            f"Measured here ({found.data}): {found.step_seconds:.3f} s per step in one process; peak of tensors "
            f"{bytes_text(found.measured_peak_bytes)}, predicted {bytes_text(found.predicted_peak_bytes)} "
            f"({difference:+.1%})."
        )
        if found.device != plan.hardware.device_type:
            lines.append(
                f"warning: the speed is that of this machine's {found.device}, memory and price are those of "
                f"{plan.hardware.gpu.name}; leave out --gpu to plan for this machine"
            )
    return [*lines, "", *plan_verdict(plan)]


def plan_verdict(plan: Plan) -> list[str]:
    chosen = plan.recommended
    gpu = plan.hardware.gpu
    micro = plan.config.batch.sequences_per_micro_batch
    if chosen is None:
        return [
            f"Nothing fits on {plan.hardware.gpus} x {gpu.name}: use more GPUs, --activation_checkpointing full, a "
            "shorter sequence, or a smaller model."
        ]
    cost = ""
    if gpu.price_per_hour:
        cost = f", ${plan.cost:,.0f} at ${gpu.price_per_hour:.2f} per {plan.hardware.unit}-hour"
    if gpu.watts:
        cost += f", {plan.kilowatt_hours:,.0f} kWh at rated power"
        cost += co2_text(plan.kilowatt_hours, plan.config.energy.grid_grams_per_kwh)
    change = f", with {chosen.micro_batch} sequences per micro-batch instead of {micro}"
    change = change if chosen.micro_batch != micro else ""
    if chosen.reduces_once:
        change += ", gradients reduced once per step, for which there is memory"
    return [
        f"Recommended: {chosen.name}{change}: "
        f"{duration_text(plan.hours * 3600)}, {plan.gpu_hours:,.1f} {plan.hardware.unit}-hours{cost}; validation "
        "and checkpoints not included.",
        reason_of(chosen, plan.candidates),
        f"  {plan.command}",
    ]


def comment_of(plan: Plan, command: str) -> str:
    """Formats the plan in a few lines, for the top of a recipe."""
    chosen = plan.recommended
    found = plan.calibration
    work = plan.work
    disk = f"{bytes_text(plan.storage.total)} of disk"
    lines = [
        f"Plan, by {command}:",
        f"{count_text(work.sizes.total)} parameters, {count_text(work.tokens)} tokens, {work.steps:,} steps, "
        f"{work.flops:.2g} FLOPs",
    ]
    if found:
        lines.append(
            f"one process, measured: {found.tokens_per_second:,.0f} tokens/s, "
            f"{duration_text(work.steps * found.step_seconds)}, {bytes_text(found.measured_peak_bytes)} of tensors "
            f"(predicted {bytes_text(found.predicted_peak_bytes)}); {disk}"
        )
    elif chosen is not None:
        need = f"{chosen.memory.total / GIB:.1f} GB per GPU, " if chosen.fits else ""
        lines.append(
            f"{chosen.name} on {plan.hardware.gpus} x {plan.hardware.gpu.name}: {need}{plan.hours:,.1f} hours at "
            f"{plan.speed.mfu:.0%} MFU, {plan.gpu_hours:,.0f} GPU-hours, ${plan.cost:,.0f}; {disk}"
        )
    return "\n".join(textwrap.fill(line, 117, initial_indent="# ", subsequent_indent="#   ") for line in lines)
