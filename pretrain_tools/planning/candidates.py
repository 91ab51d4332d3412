"""Plans a run's memory, time and disk usage with every strategy, and recommends one. Needs no GPU."""

import bisect
import collections
import itertools
import math
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pretrain.config import MemoryBudget, RunConfig
from pretrain.data.batches import Batches
from pretrain.data.manifest import MANIFEST_FILE
from pretrain.errors import InputError, Problems
from pretrain.gpus import CPU, Gpu
from pretrain.model.build import active_parameters, flops_per_token, matrix_parameters, shared_meta_model
from pretrain.model.compile import checkpointing_problems
from pretrain.model.positions import configs_of_stages
from pretrain.optim.averaging import averaging_problems
from pretrain.parallel.context_parallel import heads_problem
from pretrain.parallel.pipeline import STAGE_LAYOUTS
from pretrain.parallel.registry import STRATEGIES, parts_of_micro_batch, strategy_named
from pretrain.parallel.tensor_parallel import plan_problem
from pretrain.training.run_plan import length_problems, model_problems, ramp_of, sequences_of, steps_between
from pretrain_tools.planning.footprints import largest_footprint
from pretrain_tools.planning.layouts import Layout, layouts, products
from pretrain_tools.planning.memory import FP32, Memory, PlannedRun, optimizer_elements, sizes_of, with_terms
from pretrain_tools.planning.step_time import Hardware, RunWork, StepTime
from pretrain_tools.planning.traffic import Step, flows, idle, offload_seconds, uneven

AS_FAST = 0.03
"""Relative difference in step time below which two strategies count as equally fast."""
BEST_PRODUCTS = 3
"""Number of meshes that a plan lists in addition to the accelerate configs."""
CHECKPOINTING = (MemoryBudget(memory_budget=0.5), "full")
"""Activation checkpointing to try if a run doesn't fit without it."""


@dataclass(frozen=True)
class Case:
    """A run on specific hardware, independent of the strategy."""

    run: PlannedRun
    work: RunWork
    hardware: Hardware
    mfu: float

    def changed(self, **settings: Any) -> "Case":
        """Returns a copy with changed recipe settings."""
        return replace(self, run=self.run.changed(**settings))

    def in_precision_of(self, layout: Layout) -> "Case":
        """Returns the case in fp32 if `auto` resolves to fp16 and the layout's strategy doesn't support it."""
        is_fp16 = self.run.config.precision == "auto" and self.run.precision == "fp16"
        if is_fp16 and "fp16" not in strategy_named(layout.name).precisions:
            return replace(self, run=replace(self.run, precision="fp32"))
        return self

    def memory(self, layout: Layout, sequences: int) -> Memory:
        """Returns the highest peak memory of any process.

        sequences: number of sequences per micro-batch.
        """
        return largest_footprint(self.run, layout, sequences)

    def step(self, layout: Layout, sequences: int) -> StepTime:
        """Estimates the step time.

        sequences: number of sequences per micro-batch.
        """
        work = self.work
        hardware = self.hardware
        config = self.run.config
        # Recomputation takes time but doesn't count toward MFU. A forward pass is a third of a step.
        part = self.run.work(layout, sequences)
        flops = work.flops_per_token * work.tokens_per_step * (1 + part.repeated_flops / 3)
        compute = flops / (hardware.gpus * hardware.gpu.peak_flops(self.run.precision) * self.mfu)
        slowest = compute * uneven(layout, work.sizes.layers)
        micro_batch = sequences * config.data.sequence_length * layout.micro_batches
        micro_steps = max(1, work.tokens_per_step // micro_batch)
        sending = flows(Step(part, micro_steps, hardware.links))
        return StepTime(
            compute,
            slowest * (1 + idle(config, layout)) - compute,
            {flow.name: flow.exposed(compute) for flow in sending},
            offload_seconds(layout, work.sizes.total),
            {flow.name: flow.sent for flow in sending},
        )


@dataclass(frozen=True)
class Candidate:
    """A run planned with one strategy."""

    layout: Layout
    problems: list[str]
    """Reasons why the strategy can't run."""
    memory: Memory | None = None
    """Memory with the recipe's micro-batch."""
    fits: bool = False
    largest_micro_batch: int | None = None
    """Largest micro-batch that fits and divides the batch, or None."""
    micro_batch: int | None = None
    """The plan's micro-batch: the recipe's if it fits, otherwise the largest."""
    planned_memory: Memory | None = None
    """Memory with the plan's micro-batch; None if none fits."""
    time: StepTime | None = None
    """Step time with the plan's micro-batch; None if none fits."""
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the file in accelerate_configs/."""
        return self.layout.name

    @property
    def step_seconds(self) -> float:
        return self.time.seconds if self.time else math.inf

    @property
    def label(self) -> str:
        """Name of the accelerate config, or the mesh sizes if they differ from the config's."""
        return self.name if self.layout.is_planned else self.layout.product

    @property
    def runs(self) -> bool:
        return not self.problems and self.largest_micro_batch is not None


def auto_precision(gpu: Gpu) -> str:
    """Resolves `auto` precision for this GPU."""
    return "bf16" if gpu.has_bf16 else "fp32" if gpu.name == CPU else "fp16"


def planned_precision(config: RunConfig, gpu: Gpu) -> str:
    """Resolves the recipe's precision for this GPU. Raises InputError if the GPU doesn't support it."""
    precision = auto_precision(gpu) if config.precision == "auto" else config.precision
    if precision == "fp8" and gpu.fp8_flops is None:
        raise InputError(f"precision: {gpu.name} doesn't support fp8; use bf16, or a GPU with fp8, such as h100")
    if precision == "bf16" and not gpu.has_bf16:
        other = auto_precision(gpu)
        raise InputError(f"precision: {gpu.name} doesn't support bf16; use --precision {other}, or another GPU")
    return precision


def work_of_run(config: RunConfig, model_config: Any) -> RunWork:
    """Computes parameters, tokens, steps and FLOPs. Raises InputError for an invalid budget or batch."""
    length = config.data.sequence_length
    if problems := length_problems(model_config, length):
        raise InputError(*problems)
    sequences, rest = divmod(config.batch.tokens_per_step, length)
    if rest:
        raise InputError(
            f"batch.tokens_per_step: {config.batch.tokens_per_step:,} is not a multiple of data.sequence_length "
            f"{length:,}; use {max(1, sequences) * length:,} or {(sequences + 1) * length:,}"
        )
    active = active_parameters(model_config)
    sizes = with_terms(sizes_of(model_config), config, model_config)
    ramp = ramp_of(config, sequences, active)
    return RunWork(
        sizes=sizes,
        active=active,
        non_embedding=matrix_parameters(model_config),
        ramp=ramp,
        tokens=ramp.total_sequences * length,
        tokens_per_step=config.batch.tokens_per_step,
        flops_per_token=mean_flops_per_token(config, model_config) + 6 * sizes.terms,
    )


def refuse_what_training_rejects(config: RunConfig, model_config: Any, total_steps: int, device_type: str) -> None:
    """Raises InputError for settings that no strategy supports, using the trainer's checks."""
    problems = [
        *model_problems(config, shared_meta_model(model_config), device_type),
        *averaging_problems(
            config.averaging,
            total_steps=total_steps,
            exports_average=config.export.weights == "average",
            rounds_stochastically=config.optim.stochastic_rounding,
        ),
    ]
    if problems:
        raise InputError(*problems)


def mean_flops_per_token(config: RunConfig, model_config: Any) -> float:
    """Averages the FLOPs per token over the run's stages, which may have different sequence lengths.

    Raises InputError (see `configs_of_stages`).
    """
    configs_of_stages(model_config, config.data)
    flops = [flops_per_token(model_config, window.sequence_length) for window in config.data.windows]
    if len(set(flops)) == 1:  # avoids rounding errors
        return flops[0]
    return sum(share * of_stage for share, of_stage in zip(stage_shares(config), flops, strict=True))


def stage_shares(config: RunConfig) -> list[float]:
    """Returns each stage's fraction of the run."""
    ends = [0.0, *(stage.until or 1.0 for stage in config.data.mixtures)]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def micro_batches(config: RunConfig, ranks: int, parts: int = 1) -> list[int]:
    """Lists the valid values of batch.sequences_per_micro_batch, in ascending order."""
    per_rank = config.batch.tokens_per_step // (config.data.sequence_length * ranks)
    divisors = [n for n in range(parts, per_rank + 1, parts) if per_rank % n == 0]
    return [n for n in divisors if not batch_problems(config.with_batch(sequences_per_micro_batch=n), ranks, parts)]


def consider(name: str, case: Case) -> Candidate:
    """Plans the run with one strategy, using its first layout in which the recipe's micro-batch fits."""
    found: list[Candidate] = []
    for layout in layouts(name, case.hardware.gpus, case.hardware.machines):
        found.append(consider_layout(layout, case))
        if found[-1].runs and found[-1].fits:
            return found[-1]
    return min(reversed(found), key=lambda each: (bool(each.problems), not each.runs, each.step_seconds))


def consider_layout(layout: Layout, case: Case, problems: list[str] | None = None) -> Candidate:
    """Plans the run with one layout.

    problems: the strategy's problems, if already known.
    """
    name = layout.name
    case = case.in_precision_of(layout)
    config = case.run.config
    if problems := strategy_problems(case.run, layout) if problems is None else problems:
        return Candidate(layout, problems)
    ranks = layout.micro_batches
    with layout.launched():
        parts = parts_of_micro_batch(config)
    possible = micro_batches(config, ranks, parts)
    notes = batch_problems(config, ranks, parts)
    if not possible:
        return Candidate(layout, notes)
    micro_batch = config.batch.sequences_per_micro_batch
    memory = case.memory(layout, micro_batch)
    usable = case.hardware.usable_bytes
    fits = memory.total <= usable
    largest = possible[-1]
    # Memory grows with the micro-batch, except that the largest may need no accumulated gradients.
    if case.memory(layout, largest).total > usable:
        count = bisect.bisect_right(possible[:-1], usable, key=lambda n: case.memory(layout, n).total)
        largest = possible[count - 1] if count else None
    if name == "cp":
        notes.append(f"{name}: {layout.cp} of {layout.ranks} processes share each sequence")
    used = micro_batch if fits and micro_batch in possible else largest
    planned = used and case.memory(layout, used)
    time = used and case.step(layout, used)
    return Candidate(layout, [], memory, fits, largest, used, planned, time, notes)


def search_products(case: Case) -> list[Candidate]:
    """Finds the fastest meshes that fit, in addition to those listed in every plan. Returns the fastest first.

    Meshes are planned in ascending order of a lower bound on the step time: the time with the largest micro-batch that
    divides the batch, even if it doesn't fit. The search stops when no remaining mesh can be faster by more than the
    estimate's error.
    """
    hardware = case.hardware
    bounded = []
    for layout in products(hardware.gpus, hardware.machines):
        if layout.is_planned or not could_run(case.run, layout):
            continue
        most = case.run.config.batch.tokens_per_step // (case.run.config.data.sequence_length * layout.micro_batches)
        if most:
            least = case.step(layout, most).seconds
            bounded.append((least, len(layout.sizes.named()), layout))
    bounded.sort(key=lambda each: each[:2])
    found: list[Candidate] = []
    known: dict[tuple, list[str]] = {}
    for least, _, layout in bounded:
        if len(found) >= BEST_PRODUCTS and found[BEST_PRODUCTS - 1].step_seconds <= (1 + AS_FAST) * least:
            break
        sizes = layout.sizes
        key = (sizes.pp, sizes.cp, sizes.tp, sizes.ep, sizes.fsdp > 1, sizes.efsdp > 1, layout.name)
        if key not in known:
            known[key] = strategy_problems(case.in_precision_of(layout).run, layout)
        candidate = consider_layout(layout, case, known[key])
        if candidate.runs:
            found.append(candidate)
            found.sort(key=lambda each: (each.step_seconds, len(each.layout.sizes.named())))
    return found[:BEST_PRODUCTS]


def search_checkpointing(case: Case, candidates: list[Candidate]) -> tuple[Case, list[Candidate], Candidate] | None:
    """Finds activation checkpointing for a run whose micro-batch doesn't fit without it.

    Tries the layouts in which at least the weights and the optimizer state fit, in ascending order of a lower bound on
    the step time. For a memory budget, this is the time without recomputation, because tracing takes seconds.

    Returns (case, its candidates, the recommended one) with the fastest setting. Returns None if no setting fits or if
    a smaller micro-batch is as fast.
    """
    config = case.run.config
    before = recommend(candidates)
    if config.activation_checkpointing != "none" or (before and before.fits):
        return None
    limit = before.step_seconds / (1 + AS_FAST) if before else math.inf
    usable = case.hardware.usable_bytes
    unfit = [each for each in candidates if each.memory and not each.fits]
    able = [each.layout for each in unfit if each.memory.parameters + each.memory.optimizer <= usable]
    found = None
    for setting in CHECKPOINTING:
        changed = case.changed(activation_checkpointing=setting)
        if checkpointing_problems(changed.run.config, shared_meta_model(case.run.model_config)):
            continue
        bounding = changed if setting == "full" else case
        bounds = [
            bounding.in_precision_of(layout).step(layout, config.batch.sequences_per_micro_batch).seconds
            for layout in able
        ]
        goal = limit
        tried = []
        for least, layout in sorted(zip(bounds, able, strict=True), key=lambda pair: pair[0]):
            if least < limit:
                tried.append(consider_layout(layout, changed))
                limit = min(limit, tried[-1].step_seconds)
        best = recommend(tried)
        if best and best.step_seconds < goal:
            found = (changed, tried, best)
    return found


def could_run(run: PlannedRun, layout: Layout) -> bool:
    """Checks sequence length, layers per stage, heads and experts without building the model."""
    config = run.model_config
    sizes = sizes_of(config)
    stages = len(STAGE_LAYOUTS[run.config.pipeline.schedule].owners(layout.pp))
    experts = sizes.stacked_experts
    return (
        run.config.data.sequence_length % layout.cp == 0
        and (layout.pp == 1 or stages <= sizes.layers)
        and (layout.ep == 1 or (experts > 0 and experts % layout.ep == 0))
        and (layout.tp == 1 or plan_problem(config, layout.tp, splits_experts=layout.ep == 1) is None)
        and (layout.cp == 1 or heads_problem(config, layout.cp, layout.tp) is None)
    )


def batch_problems(config: RunConfig, ranks: int, parts: int) -> list[str]:
    """Explains why the batch can't be divided among the processes, using the trainer's check."""
    problems = Problems()
    problems.attempt(sequences_of, config, ranks, parts)
    return problems


def strategy_problems(run: PlannedRun, layout: Layout) -> list[str]:
    """Explains why a strategy can't run the recipe on this many GPUs."""
    if layout.problem:
        return [layout.problem]
    strategy = strategy_named(layout.name)
    # Strategies would check whether this machine supports fp8 or fp16. The planned precision is checked below.
    portable = run.config.model_copy(update={"precision": "bf16" if run.is_half else "fp32"})
    # Strategies read the number of processes from the launcher's environment variables.
    with layout.launched():
        problems = strategy.problems(portable, layout.name)
    if run.precision not in strategy.precisions:
        allowed = " or ".join(strategy.precisions)
        problems.append(f"precision: {layout.name} doesn't support {run.precision}; use {allowed}")
    return problems


def recommend(candidates: list[Candidate]) -> Candidate | None:
    """Chooses the simplest of the fastest candidates, preferring the recipe's micro-batch; None if none fits."""
    order = list(STRATEGIES)
    return min(
        fastest_of(candidates),
        key=lambda candidate: (not candidate.fits, order.index(candidate.name), not candidate.layout.is_planned),
        default=None,
    )


def fastest_of(candidates: list[Candidate]) -> list[Candidate]:
    """Lists the candidates that fit and are fastest within the estimate's error."""
    able = [candidate for candidate in candidates if candidate.runs]
    least = min((candidate.step_seconds for candidate in able), default=math.inf)
    return [candidate for candidate in able if candidate.step_seconds <= (1 + AS_FAST) * least]


def reason_of(chosen: Candidate, candidates: list[Candidate]) -> str:
    """Explains the choice of `recommend` in one sentence."""
    same = [candidate for candidate in fastest_of(candidates) if candidate is not chosen]
    if not same:
        if sum(candidate.runs for candidate in candidates) > 1:
            return f"{chosen.label} is the fastest that fits."
        could_run = any(candidate.memory for candidate in candidates if candidate is not chosen)
        return f"Only {chosen.label} {'fits' if could_run else 'can run this recipe'}."
    with_batch = " with the recipe's micro-batch" if chosen.fits else ""
    names = ", ".join(candidate.label for candidate in same)
    return (
        f"Of the fastest strategies, {chosen.label} is the simplest{with_batch}; within the estimate's error "
        f"({AS_FAST:.0%}), it is as fast as {names}."
    )


def shares_of(candidate: Candidate) -> str:
    """Formats the breakdown of a step in percent, largest first. Omits parts below 0.5%."""
    parts = sorted(candidate.time.parts.items(), key=lambda part: -part[1])
    shares = [(name, seconds / candidate.step_seconds) for name, seconds in parts]
    return ", ".join(f"{share:.0%} {name}" for name, share in shares if share >= 0.005)


def command_of(
    candidate: Candidate, config_path: str, overrides: list[tuple[str, str]], hardware: Hardware, config: RunConfig
) -> str:
    """Formats the launch command."""
    # The plan's micro-batch overrides the one on the command line.
    kept = [(key, value) for key, value in overrides if key != "batch.sequences_per_micro_batch"]
    settings = [word for key, value in kept for word in (f"--{key}", value)]
    if candidate.micro_batch != config.batch.sequences_per_micro_batch or len(kept) != len(overrides):
        settings += ["--batch.sequences_per_micro_batch", str(candidate.micro_batch)]
    layout = candidate.layout
    launch = f"{layout.launcher} --config_file accelerate_configs/{layout.name}.yaml --num_processes {hardware.gpus}"
    launch += layout.options
    if hardware.machines > 1:
        launch += f" --num_machines {hardware.machines} --machine_rank RANK --main_process_ip ADDRESS"
    return f"{launch} {shlex.join(['train.py', '--config', config_path, *settings])}"


@dataclass(frozen=True)
class Storage:
    """Disk usage in bytes."""

    checkpoint: float
    """Size of a checkpoint: weights, optimizer state and averaged weights, in fp32."""
    kept: int
    """Number of checkpoints kept at the end, including milestones."""
    total: float
    """Peak usage, including a checkpoint being written and the final model."""


def storage_of(config: RunConfig, work: RunWork) -> Storage:
    """Computes the disk usage of checkpoints with the recipe's retention settings."""
    settings = config.checkpoint
    model = FP32 * work.sizes.total
    checkpoint = model + FP32 * optimizer_elements(config.optim.name, work.sizes)
    checkpoint += model if config.averaging.kind != "none" else 0
    every = steps_between(settings, work, config.interval_scale)
    # plus one at the end
    saves = work.steps // every + 1 if every else 1
    milestones = work.steps // math.lcm(every, settings.keep_every) if every and settings.keep_every else 0
    kept = min(saves, settings.keep_last + settings.keep_best) + milestones
    export = 4 if config.export.dtype == "fp32" else 2
    return Storage(checkpoint, kept, checkpoint * (kept + 1) + export * (work.sizes.total - work.sizes.terms))


def sources_of(config: RunConfig, work: RunWork) -> list[dict[str, Any]]:
    """Lists the number of tokens that the run reads from each source, and the epochs if the shards exist.

    Raises InputError if the shards are damaged, too small for max_epochs, or from different tokenizers.
    """
    shares = collections.Counter()
    for stage, share in zip(config.data.mixtures, stage_shares(config), strict=True):
        weights = sum(source.weight for source in stage.train)
        for source in stage.train:
            shares[str(source.shards)] += share * source.weight / weights
    rows = [{"source": folder, "tokens": share * work.tokens, "epochs": None} for folder, share in shares.items()]
    if not all((Path(folder) / MANIFEST_FILE).is_file() for folder in shares):
        return rows
    batches = Batches(config.data, seed=config.seed, ramp=work.ramp)
    epochs = batches.epochs_at(work.steps)
    readers = batches.readers
    return [{**row, "epochs": epochs[row["source"]], "available": readers[row["source"]].tokens} for row in rows]
