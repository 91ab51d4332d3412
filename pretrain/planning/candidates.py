"""What a run will need: work, memory under every strategy, time, disk, data; and which strategy to choose.

Nothing here touches a GPU. Memory is pretrain/memory/footprint.py's, time pretrain/planning/step_time.py's.
"""

import importlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.utils import patch_environment

from pretrain.config import RunConfig
from pretrain.data.batches import Batches
from pretrain.data.manifest import MANIFEST_FILE
from pretrain.errors import InputError
from pretrain.gpus import Gpu
from pretrain.memory.footprint import LAUNCHER_FILES, Layout, data_ranks, footprint, layout_of
from pretrain.memory.parts import FP32, Memory, optimizer_elements, sizes_of
from pretrain.model.flops import active_parameters, flops_per_token, matrix_parameters
from pretrain.optim.batch_ramp import BatchRamp
from pretrain.parallel.pipeline import STAGE_LAYOUTS
from pretrain.parallel.strategy import STRATEGIES
from pretrain.planning.step_time import ALONE, Hardware, RunWork, Speed
from pretrain.training.run_plan import ramp_of, sequences_of, too_long

SIMPLEST_FIRST = {name: place for place, name in enumerate(LAUNCHER_FILES)}


@dataclass(frozen=True)
class Candidate:
    """A run under one strategy."""

    name: str
    """File in accelerate_configs/."""
    problems: list[str]
    """Why it cannot run."""
    memory: Memory | None = None
    """At the recipe's micro-batch."""
    fits: bool = False
    largest_micro_batch: int | None = None
    """The largest that fits and divides the batch; None if none does."""
    micro_batch: int | None = None
    """What the plan uses: the recipe's if it fits, else the largest."""
    step_seconds: float = math.inf
    communication_seconds: float = 0.0
    """Of the step, not hidden behind computing."""
    notes: list[str] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        return not self.problems and self.largest_micro_batch is not None


def planned_precision(config: RunConfig, gpu: Gpu) -> str:
    """The recipe's precision as it will be on this GPU. Raises InputError for one that it does not compute in."""
    precision = config.precision
    if precision == "auto":
        precision = "bf16" if gpu.has_bf16 else "fp32"
    if precision == "fp8" and gpu.fp8_flops is None:
        raise InputError(f"precision: fp8 does not run on {gpu.name}; use bf16, or a GPU that has it, such as h100")
    if precision == "bf16" and not gpu.has_bf16:
        raise InputError(f"precision: bf16 does not run on {gpu.name}; use --precision fp16, or another GPU")
    return precision


def work_of_run(config: RunConfig, model_config: Any) -> RunWork:
    """Parameters, tokens, steps and FLOPs. Raises InputError where the budget or the batch cannot be."""
    if problems := too_long(model_config, config.data.sequence_length):
        raise InputError(*problems)
    sizes = sizes_of(model_config)
    length = config.data.sequence_length
    sequences = config.batch.tokens_per_step // length
    if config.batch.tokens_per_step % length:
        raise InputError(
            f"batch.tokens_per_step: {config.batch.tokens_per_step:,} is not a multiple of data.sequence_length "
            f"{length:,}; nearest: {max(1, sequences) * length:,} or {(sequences + 1) * length:,}"
        )
    active = active_parameters(model_config)
    ramp = planned_ramp(config, active)
    return RunWork(
        sizes=sizes,
        active=active,
        non_embedding=matrix_parameters(model_config),
        tokens=ramp.total_sequences * length,
        steps=ramp.total_steps,
        tokens_per_step=config.batch.tokens_per_step,
        flops_per_token=flops_per_token(model_config, length),
        recompute=4 / 3 if config.activation_checkpointing != "none" else 1.0,
    )


def planned_ramp(config: RunConfig, active: int) -> BatchRamp:
    """The batch over the run, whatever the number of processes. active: see `ramp_of`."""
    sequences = config.batch.tokens_per_step // config.data.sequence_length
    return ramp_of(config.with_batch(sequences_per_micro_batch=1), sequences, 1, active)


def micro_batches(config: RunConfig, ranks: int) -> list[int]:
    """Every batch.sequences_per_micro_batch with which the global batch divides evenly, ascending."""
    levels = round(1 / config.batch.ramp.start) if config.batch.ramp else 1
    per_rank, rest = divmod(config.batch.tokens_per_step, config.data.sequence_length * ranks * levels)
    return [] if rest else [n for n in range(1, per_rank + 1) if per_rank % n == 0]


def consider(
    name: str, config: RunConfig, model_config: Any, work: RunWork, hardware: Hardware, precision: str, speed: Speed
) -> Candidate:
    """The run under one strategy: what keeps it from running, memory, the largest micro-batch, seconds per step."""
    layout = layout_of(name, hardware.gpus, hardware.machines)
    problems = strategy_problems(name, config, hardware, layout, precision)
    if problems:
        return Candidate(name, problems)
    ranks = data_ranks(name, layout)
    possible = micro_batches(config, ranks)
    if not possible:
        return Candidate(name, [batch_problem(config, ranks)])

    def need(sequences: int) -> Memory:
        return footprint(config, model_config, name, layout, precision=precision, sequences=sequences)

    micro_batch = config.batch.sequences_per_micro_batch
    memory = need(micro_batch)
    parts = pipeline_parts(config) if name == "pp" else 1
    fitting = largest_that_fits(
        [n for n in possible if n % parts == 0], lambda n: need(n).total <= hardware.usable_bytes
    )
    fits = memory.total <= hardware.usable_bytes
    notes = [] if micro_batch in possible else [batch_problem(config, ranks)]
    used = micro_batch if fits and micro_batch in possible else fitting
    if used is None:
        return Candidate(name, [], memory, fits, None, None, notes=notes)
    if config.activation_checkpointing != "none":
        whole = config.model_copy(update={"activation_checkpointing": "none"})
        without = footprint(whole, model_config, name, layout, precision=precision, sequences=used)
        if without.total <= hardware.usable_bytes:
            notes.append(f"{name}: fits with --activation_checkpointing none too, which takes a quarter less time")
    seconds, exposed = speed.step_seconds(name, config, work, hardware, layout, used)
    return Candidate(name, [], memory, fits, fitting, used, seconds, exposed, notes)


def largest_that_fits(ascending: list[int], fits) -> int | None:
    """The last of these that fits, where each needs more than the one before."""
    low, high = 0, len(ascending)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if fits(ascending[middle]) else (low, middle)
    return ascending[low - 1] if low else None


def batch_problem(config: RunConfig, ranks: int) -> str:
    """tokens_per_step and the processes do not go together: the words of the check at the start of a run."""
    try:
        sequences_of(config, ranks)
    except InputError as error:
        return error.problems[0]
    return ""


def pipeline_parts(config: RunConfig) -> int:
    """What sequences_per_micro_batch must be a multiple of under a pipeline."""
    return STAGE_LAYOUTS[config.pipeline.schedule].stages_per_rank * config.pipeline.microbatch_scale


def strategy_problems(name: str, config: RunConfig, hardware: Hardware, layout: Layout, precision: str) -> list[str]:
    """Why this strategy cannot run the recipe on this many GPUs, with the strategy's own messages."""
    if (name == "single") != (hardware.gpus == 1):
        return ["runs on one GPU" if name == "single" else "needs more than one GPU"] if name not in ALONE else []
    if name == "hsdp" and layout.per_group < 2:
        return ["needs at least two GPUs in each of its groups; use ddp"]
    module, _, class_name = STRATEGIES[name.split("_")[0]].rpartition(".")
    strategy = getattr(importlib.import_module(module), class_name)
    environment = {"WORLD_SIZE": str(hardware.gpus)}
    if name == "tp":
        environment |= {
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            "PARALLELISM_CONFIG_TP_SIZE": str(layout.per_group),
        }
    if name == "pp":
        environment |= {"ACCELERATE_USE_MEGATRON_LM": "true", "MEGATRON_LM_PP_DEGREE": str(layout.per_group)}
    parts = pipeline_parts(config) if name == "pp" else 1
    micro_batch = math.ceil(config.batch.sequences_per_micro_batch / parts) * parts
    # What this machine lacks says nothing of the one planned for: precision is asked about here.
    batch = config.batch.model_copy(update={"sequences_per_micro_batch": micro_batch})
    portable = config.model_copy(update={"precision": "fp32", "batch": batch})
    with patch_environment(**environment):
        problems = strategy.problems(portable)
    problems = [
        problem.replace(f"under {'ddp' if hardware.gpus > 1 else 'single'};", f"under {name};") for problem in problems
    ]
    if precision not in strategy.precisions:
        problems.append(f"precision: {precision} does not run under {name}; choose {' or '.join(strategy.precisions)}")
    return problems


def recommend(candidates: list[Candidate]) -> Candidate | None:
    """The fastest that fits, and of those within 3 % of it the simplest; None if none fits."""
    able = [candidate for candidate in candidates if candidate.runs]
    if not able:
        return None
    fastest = min(candidate.step_seconds for candidate in able)
    near = [candidate for candidate in able if candidate.step_seconds <= 1.03 * fastest]
    return min(near, key=lambda candidate: (not candidate.fits, SIMPLEST_FIRST[candidate.name]))


def command_of(
    candidate: Candidate, config_path: str, overrides: list[tuple[str, str]], hardware: Hardware, config: RunConfig
) -> str:
    """The command that starts the run, ready to paste; one for each machine where there are several."""
    settings = [f"--{key} {value}" for key, value in overrides if key != "batch.sequences_per_micro_batch"]
    if candidate.micro_batch != config.batch.sequences_per_micro_batch or len(settings) != len(overrides):
        settings.append(f"--batch.sequences_per_micro_batch {candidate.micro_batch}")
    launch = (
        f"accelerate launch --config_file accelerate_configs/{candidate.name}.yaml --num_processes {hardware.gpus}"
    )
    layout = layout_of(candidate.name, hardware.gpus, hardware.machines)
    if candidate.name == "hsdp" and layout.groups != 2:  # 2 is what the file says
        launch += f" --parallelism_config_dp_replicate_size {layout.groups}"
    if candidate.name == "tp" and layout.groups > 1:
        launch += f" --parallelism_config_tp_size {layout.per_group}"
    if hardware.machines > 1:
        launch += f" --num_machines {hardware.machines} --machine_rank RANK --main_process_ip ADDRESS"
    return " ".join([f"{launch} train.py --config {config_path}", *settings])


@dataclass(frozen=True)
class Storage:
    """Bytes on disk."""

    checkpoint: float
    """Weights and optimizer state in fp32."""
    kept: int
    """Checkpoints that stay at the end, milestones included."""
    total: float
    """At most, with one being written and the final model."""


def storage_of(config: RunConfig, work: RunWork) -> Storage:
    """Disk that checkpoints take under the recipe's retention."""
    settings = config.checkpoint
    model = FP32 * work.sizes.total
    checkpoint = model + FP32 * optimizer_elements(config.optim.name, work.sizes)
    every = settings.every_steps
    if settings.every_tokens:
        every = max(1, round(settings.every_tokens / work.tokens_per_step))
    saves = work.steps // every + 1 if every else 1
    milestones = work.steps // settings.milestones_every if settings.milestones_every else 0
    kept = min(saves, settings.keep_last + settings.keep_best) + milestones
    export = 4 if config.export.dtype == "fp32" else 2
    return Storage(checkpoint, kept, checkpoint * (kept + 1) + export * work.sizes.total)


def sources_of(config: RunConfig, work: RunWork) -> list[dict[str, Any]]:
    """For each source: the tokens drawn from it, and epochs where its shards exist.

    Raises InputError where the shards cannot serve the run: max_epochs used up, damaged, of different tokenizers.
    """
    shares, begin = {}, 0.0
    for stage in config.data.mixtures:
        end, weights = stage.until or 1.0, sum(source.weight for source in stage.train)
        for source in stage.train:
            share = (end - begin) * source.weight / weights
            shares[str(source.shards)] = shares.get(str(source.shards), 0.0) + share
        begin = end
    rows = [{"source": folder, "tokens": share * work.tokens, "epochs": None} for folder, share in shares.items()]
    if not all((Path(folder) / MANIFEST_FILE).is_file() for folder in shares):
        return rows
    batches = Batches(config.data, seed=config.seed, ramp=planned_ramp(config, work.active))
    epochs, readers = batches.epochs_at(work.steps), batches.readers
    return [row | {"epochs": epochs[row["source"]], "available": readers[row["source"]].tokens} for row in rows]
