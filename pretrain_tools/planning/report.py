"""Builds a run's plan and formats it as tables, JSON or a recipe comment."""

import dataclasses
import json
import math
import sys
from dataclasses import dataclass
from typing import Any

from pretrain.config import MemoryBudget, RunConfig
from pretrain.data.vocabulary import planned_model_config, vocabulary_of
from pretrain.errors import Problems
from pretrain.gpus import GIB
from pretrain.model.build import FORMULA
from pretrain.model.model_config import load_recipe_model_config
from pretrain.parallel.registry import STRATEGIES
from pretrain.terminal import say, width_of
from pretrain.training.auto_settings import resolve_auto
from pretrain.units import co2_text, table
from pretrain_tools.planning.candidates import (
    Candidate,
    Case,
    Storage,
    command_of,
    consider,
    planned_precision,
    reason_of,
    recommend,
    refuse_what_training_rejects,
    search_checkpointing,
    search_products,
    shares_of,
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
    default_mfu,
)
from pretrain_tools.planning.texts import as_comment, lines_of

PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers", "total")
"""Fields of `Memory` shown as table columns."""
COLUMNS = ("strategy", *PARTS, "fits", "largest micro-batch", "tokens/s", "hours")
NARROW_COLUMNS = ("strategy", "total", "fits", "largest micro-batch", "tokens/s", "hours")
"""Columns in terminals with fewer than TABLE_WIDTH columns."""
TABLE_WIDTH = 142


@dataclass(frozen=True)
class Proposal:
    """Activation checkpointing for a run whose micro-batch doesn't fit without it."""

    option: tuple[str, str]
    """Name and value of the setting on the command line."""
    candidate: Candidate
    """The strategy and micro-batch to use with it."""
    repeated: float
    """Fraction of the forward FLOPs that the backward pass repeats."""
    hours: float
    command: str


@dataclass(frozen=True)
class Plan:
    """Everything that plan.py reports."""

    config: RunConfig
    hardware: Hardware
    precision: str
    work: RunWork
    mfu: float
    candidates: list[Candidate]
    recommended: Candidate | None
    command: str | None
    storage: Storage
    sources: list[dict[str, Any]]
    source_problems: list[str]
    proposal: Proposal | None

    @property
    def hours(self) -> float | None:
        """Hours with the recommended strategy, excluding validation, checkpoints and restarts."""
        return None if self.recommended is None else self.work.full_steps * self.recommended.step_seconds / 3600

    @property
    def gpu_hours(self) -> float | None:
        return self.hours and self.hours * self.hardware.gpus

    @property
    def cost(self) -> float | None:
        """Cost in US dollars."""
        return self.gpu_hours and self.gpu_hours * self.hardware.gpu.price_per_hour

    @property
    def kilowatt_hours(self) -> float | None:
        """GPU energy at rated power. The rest of the machines adds about a third."""
        return self.gpu_hours and self.gpu_hours * self.hardware.gpu.watts / 1000


def build_plan(
    config: RunConfig,
    config_path: str,
    overrides: list[tuple[str, str]],
    hardware: Hardware,
    *,
    mfu: float | None = None,
) -> Plan:
    """Plans a recipe with every strategy and the best meshes. Raises InputError for an invalid recipe."""
    # Resolve auto settings for one process, as in --check.
    config = resolve_auto(config, processes=1)
    model_config = planned_model_config(config)
    precision = planned_precision(config, hardware.gpu)
    work = work_of_run(config, model_config)
    refuse_what_training_rejects(config, model_config, work.steps, hardware.device_type)
    mfu = mfu or default_mfu(work.active, hardware.device_type, hardware.gpu.peak_flops(precision))
    case = Case(
        PlannedRun(config, model_config, precision, hardware.device_type, hardware.gpu.memory_bytes),
        work,
        hardware,
        mfu,
    )
    named = [consider(name, case) for name in STRATEGIES if name != "mesh"]
    candidates = [*named, *search_products(case)]
    recommended = recommend(candidates)
    command = command_of(recommended, config_path, overrides, hardware, config) if recommended else None
    proposal = propose(case, candidates, config_path, overrides)
    # Missing data doesn't prevent planning. It is reported below the table.
    problems = Problems(assumed_vocabulary(config, model_config))
    sources = problems.attempt(sources_of, config, work) or []
    return Plan(
        config, hardware, precision, work, mfu, candidates, recommended, command, storage_of(config, work), sources,
        problems, proposal,
    )  # fmt: skip


def assumed_vocabulary(config: RunConfig, model_config: Any) -> list[str]:
    """Lists notes on the vocabulary assumed in a plan whose shards don't exist yet.

    Returns [] if the model config sets vocab_size.
    """
    if vocabulary_of(config.data) is not None:
        return []
    if len({load_recipe_model_config(config.model, size).vocab_size for size in (64, 128)}) == 1:
        return []
    return [
        f"vocabulary: depends on the data, which is not prepared yet. Planned with {model_config.vocab_size:,} "
        "rows; use --model.vocab_size N to plan with a different size"
    ]


def propose(
    case: Case, candidates: list[Candidate], config_path: str, overrides: list[tuple[str, str]]
) -> Proposal | None:
    """Proposes activation checkpointing if the micro-batch doesn't fit without it and a smaller one is slower."""
    found = search_checkpointing(case, candidates)
    if found is None:
        return None
    changed, _, best = found
    config = changed.run.config
    setting = config.activation_checkpointing
    option = ("activation_checkpointing", str(setting))
    if isinstance(setting, MemoryBudget):
        option = ("activation_checkpointing.memory_budget", f"{setting.memory_budget:g}")
    kept = [(key, value) for key, value in overrides if key != "activation_checkpointing"]
    return Proposal(
        option=option,
        candidate=best,
        repeated=changed.run.work(best.layout, best.micro_batch).repeated_flops,
        hours=case.work.full_steps * best.step_seconds / 3600,
        command=command_of(best, config_path, [*kept, option], case.hardware, config),
    )


def plan_json(plan: Plan) -> str:
    """Formats the plan as JSON, in bytes, seconds, hours and US dollars."""
    recommended = plan.recommended
    work = plan.work
    sizes = work.sizes
    values = {
        "parameters": sizes.total - sizes.terms,
        "term_parameters": sizes.terms,
        "active_parameters": work.active,
        "embedding_parameters": sizes.embedding,
        "non_embedding_parameters": work.non_embedding,
        "tokens": work.tokens,
        "steps": work.steps,
        "tokens_per_step": work.tokens_per_step,
        "flops_per_token": work.flops_per_token,
        "flops": work.flops,
        "precision": plan.precision,
        "gpu": dataclasses.asdict(plan.hardware.gpu),
        "gpus": plan.hardware.gpus,
        "machines": plan.hardware.machines,
        "usable_bytes": plan.hardware.usable_bytes,
        "mfu": plan.mfu,
        "strategies": [candidate_values(candidate) for candidate in plan.candidates],
        "recommended": recommended.name if recommended else None,
        "sequences_per_micro_batch": recommended.micro_batch if recommended else None,
        "command": plan.command,
        "proposal": plan.proposal and proposal_values(plan.proposal),
        "hours": plan.hours,
        "gpu_hours": plan.gpu_hours,
        "cost": plan.cost,
        "kilowatt_hours": plan.kilowatt_hours,
        "checkpoint_bytes": plan.storage.checkpoint,
        "checkpoints_kept": plan.storage.kept,
        "disk_bytes": plan.storage.total,
        "sources": plan.sources,
        "source_problems": plan.source_problems,
    }
    return json.dumps(values, indent=1)


def proposal_values(proposal: Proposal) -> dict[str, Any]:
    name, value = proposal.option
    return {
        name: value,
        "repeated": proposal.repeated,
        "strategy": candidate_values(proposal.candidate),
        "hours": proposal.hours,
        "command": proposal.command,
    }


def candidate_values(candidate: Candidate) -> dict[str, Any]:
    layout = candidate.layout
    values = dataclasses.asdict(candidate)
    for name in ("memory", "planned_memory"):
        if memory := getattr(candidate, name):
            values[name]["total"] = memory.total
    # JSON has no infinity.
    seconds = candidate.step_seconds if math.isfinite(candidate.step_seconds) else None
    values |= {"layout": layout.sizes.named(), "options": layout.options, "step_seconds": seconds}
    return {"strategy": layout.name, **values}


def print_plan(plan: Plan) -> None:
    """Prints the plan, with fewer table columns in narrow terminals."""
    rows = facts(plan)
    width = max(map(len, rows))
    for name, value in rows.items():
        say(f"{name:<{width}}  {value}")
    say(
        f"\nMemory per {plan.hardware.unit} in GB (2^30 bytes) with {plan.config.batch.sequences_per_micro_batch} "
        f"sequences of {plan.config.data.sequence_length:,} tokens per micro-batch; "
        f"{plan.hardware.usable_bytes / GIB:.1f} of {plan.hardware.gpu.memory_bytes / GIB:.1f} GB usable"
    )
    columns = COLUMNS if (width_of(sys.stdout) or TABLE_WIDTH) >= TABLE_WIDTH else NARROW_COLUMNS
    shown = [candidate for candidate in plan.candidates if candidate.memory]
    rows = [memory_row(candidate, plan.work) for candidate in shown]
    cells = [[row[column] for column in columns] for row in rows]
    titles, *lines = table([[*columns], *cells], right=set(range(1, len(columns)))).splitlines()
    say(titles)
    for candidate, line in zip(shown, lines, strict=True):
        say(line, color="green" if candidate is plan.recommended else None)
    print()
    for line in remarks(plan):
        if line.startswith("  "):
            print(line)  # a command must stay on one line, so that it can be pasted
        else:
            say(line)


def memory_row(candidate: Candidate, work: RunWork) -> dict[str, str]:
    """Returns the cell for each of COLUMNS."""
    seconds = candidate.step_seconds
    is_timed = math.isfinite(seconds)
    return {
        "strategy": candidate.label,
        **{part: f"{getattr(candidate.memory, part) / GIB:.1f}" for part in PARTS},
        "fits": "yes" if candidate.fits else "no",
        "largest micro-batch": str(candidate.largest_micro_batch or "-"),
        "tokens/s": f"{work.tokens_per_step / seconds:,.0f}" if is_timed else "-",
        "hours": f"{work.full_steps * seconds / 3600:,.1f}" if is_timed else "-",
    }


def facts(plan: Plan) -> dict[str, str]:
    """Returns {name: value} for the facts that don't depend on the strategy."""
    return dict(line.split(" | ", 1) for line in lines_of("plan.j2", "facts", plan, formula=FORMULA))


def remarks(plan: Plan) -> list[str]:
    """Lists the strategies that can't run, notes, problems with the data, reserved memory and the verdict."""
    names_of: dict[str, list[str]] = {}
    for candidate in plan.candidates:
        for problem in candidate.problems:
            names_of.setdefault(problem, []).append(candidate.name)
    margins = lines_of(
        "plan.j2",
        "margins",
        plan,
        fragmentation=FRAGMENTATION,
        context_bytes=CONTEXT_BYTES,
        communication_bytes=COMMUNICATION_BYTES,
    )
    return [
        *(f"{', '.join(names)}: {problem}" for problem, names in names_of.items()),
        *sorted({note for candidate in plan.candidates for note in candidate.notes}),
        *plan.source_problems,
        *margins,
        "",
        *plan_verdict(plan),
    ]


def plan_verdict(plan: Plan) -> list[str]:
    """Describes the recommended strategy with time, cost, reasons and the launch command."""
    if plan.recommended is None:
        return lines_of("plan.j2", "verdict", plan)
    chosen = plan.recommended
    co2 = co2_text(plan.kilowatt_hours, plan.config.energy.carbon_grams_per_kwh)
    reasons = [reason_of(chosen, plan.candidates), f"A step takes {chosen.step_seconds:.3g} s: {shares_of(chosen)}."]
    return lines_of("plan.j2", "verdict", plan, reasons, co2)


def comment_of(plan: Plan, command: str) -> str:
    """Formats the plan as a header comment for a recipe."""
    return as_comment(lines_of("plan.j2", "comment", plan, command))
