"""Derives a run's plan from the recipe, and checks the recipe as a whole before anything is built."""

import hashlib
import itertools
import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from pretrain.checkpoint.run_state import RunState
from pretrain.config import (
    Budget,
    Cadence,
    CurriculumStage,
    ModelSource,
    Optim,
    RunConfig,
    WindowSpec,
)
from pretrain.data.batches import Batches, open_training
from pretrain.data.vocabulary import planned_model_config
from pretrain.errors import InputError, Problems
from pretrain.hardware import DTYPES
from pretrain.mesh_sizes import requested_sizes
from pretrain.model.attention import choose_attention, classes_in_rows
from pretrain.model.build import (
    active_parameters,
    check_vocabulary,
    count_parameters,
    flops_per_token,
    set_end_of_document,
    shape_changes,
    shared_meta_model,
)
from pretrain.model.compile import checkpointing_problems, compiler_problems
from pretrain.model.model_config import VOCABULARY_KEY, load_model_config
from pretrain.model.routers import RouterLosses, router_losses
from pretrain.optim.averaging import averaging_problems
from pretrain.optim.batch_ramp import BatchRamp, batch_ramp
from pretrain.optim.learning_rate import (
    Annealing,
    Schedule,
    cooldown_steps_of_infinite,
)
from pretrain.optim.optimizers import optimizer_problems
from pretrain.parallel.registry import parts_of_micro_batch
from pretrain.parallel.strategy import device_type, resolve_precision
from pretrain.registry import LOADED_CODE
from pretrain.runs.run_folder import checkpoint_folders, output_problem, setting, trunk_checkpoint
from pretrain.terminal import say_stage
from pretrain.training.auto_settings import peak_learning_rate, resolve_auto
from pretrain.training.probe import Probe, probe

BUDGET = ("budget.tokens_per_parameter", "budget.tokens", "budget.steps", "budget.minutes")
"""Settings that determine the length of a run."""
CLOCK = ("optim.schedule", "optim.warmup_steps")
"""Changing one of these settings starts a new schedule at the checkpoint."""
SHAPE = (
    "optim.min_lr_ratio",
    "optim.decay_fraction",
    "optim.decay_type",
    "optim.cooldown_fraction",
    "optim.min_cooldown_tokens",
    "optim.constant_ratio",
    "optim.anneal_fraction",
)
KEPT = (
    *(*BUDGET, *CLOCK, *SHAPE, "optim.learning_rate", "optim.learning_rate_per_sequence"),
    *("batch.tokens_per_step", "batch.ramp", "optim.options", "loss.terms", "data.transformations"),
    *("data.document_mask", "precision", "averaging.kind", "averaging.half_life_fraction"),
    *("averaging.tail_fraction", "optim.group_learning_rates", "optim.weight_decay", "optim.betas", "optim.eps"),
    *("optim.max_grad_norm", "optim.muon.split_matrices", "optim.muon.qk_clip"),
    *("loss.z_loss", "loss.router_balance", "loss.router_z_loss", "loss.router_bias_rate"),
    *("checkpoint.keep_every", "checkpoint.keep_best"),
)
"""Settings recorded in checkpoints, as set by the user, to detect changes when a run continues."""


@dataclass(frozen=True)
class ModelPlan(Probe):
    """The model-related part of a run's plan, including the probe's results."""

    model_config: Any
    parameters: int
    active_parameters: int
    """Number of parameters used per token."""
    router_losses: RouterLosses
    flops_per_token: float


@dataclass(frozen=True)
class StagePlan:
    """Settings that a curriculum stage may change, besides the data."""

    number: int
    """Stage number, from 1."""
    window: WindowSpec
    model_config: Any
    """The model config with this stage's positions."""
    flops_per_token: float
    sequences_per_micro_batch: int

    def differs_from(self, other: "StagePlan") -> bool:
        """Returns True if the stages have different windows or positions."""
        return self.window != other.window or self.model_config is not other.model_config


@dataclass(frozen=True)
class RunPlan(ModelPlan):
    """The plan for a run. Steps are counted from 0."""

    precision: str
    ranks: int
    stages: tuple[StagePlan, ...]
    ramp: BatchRamp
    ramp_steps: tuple[int, ...]
    """First step of each level of batch.ramp, as for a new run."""
    schedule: Schedule | Annealing
    peak_learning_rate: float
    batches: Batches
    identity: dict[str, Any]
    """See `identity_of`."""

    @property
    def total_steps(self) -> int:
        return self.ramp.total_steps

    @property
    def total_tokens(self) -> int:
        return self.tokens_before(self.total_steps)

    @property
    def total_flops(self) -> float:
        return self.flops_before(self.total_steps)

    def tokens_before(self, step: int) -> int:
        """Returns the number of tokens before `step`, over all ranks."""
        return self.ramp.sequences_before(step) * self.batches.window.sequence_length

    def tokens_in(self, step: int) -> int:
        """Returns the number of tokens in `step`, over all ranks."""
        return self.ramp.sequences_at(step) * self.batches.window.sequence_length

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step at the full batch size."""
        return self.ramp.sequences_per_level[-1] * self.batches.window.sequence_length

    def flops_before(self, step: int) -> float:
        """Returns the number of forward and backward FLOPs before `step`, over all ranks."""
        starts = [min(start, step) for start in self.batches.first_steps]
        tokens = [self.tokens_before(step) for step in (*starts, step)]
        return sum(
            stage.flops_per_token * (end - begin)
            for stage, (begin, end) in zip(self.stages, itertools.pairwise(tokens), strict=True)
        )

    def stage(self, step: int) -> StagePlan:
        """Returns the stage that `step` belongs to."""
        return self.stages[self.batches.stage_at(step)]

    def micro_steps(self, step: int) -> int:
        """Returns the number of micro-steps per rank in `step`."""
        stage = self.stage(step)
        return self.tokens_in(step) // (stage.window.sequence_length * stage.sequences_per_micro_batch * self.ranks)

    def learning_rate(self, step: int) -> float:
        return self.schedule.learning_rate(step, self.peak_learning_rate)

    def in_effect(self, state: RunState) -> "RunPlan":
        """Returns the plan without skipped samples, which later ones replace, and with a requested final decay."""
        plan = self
        if state.left_out:
            plan = replace(plan, batches=plan.batches.changed(skipped=state.left_out))
        if state.anneal_from is not None:
            schedule = Annealing(plan.schedule, state.anneal_from, state.anneal_steps)
            plan = replace(plan, schedule=schedule).with_steps(state.anneal_from + state.anneal_steps)
        return plan

    def cut(self, steps: int | None) -> "RunPlan":
        """Returns the plan truncated to `steps` steps. The schedule doesn't change."""
        return self if steps is None or steps >= self.total_steps else self.with_steps(steps)

    def with_steps(self, steps: int) -> "RunPlan":
        return replace(self, ramp=replace(self.ramp, total_steps=steps))

    def planned(self) -> dict[str, Any]:
        """Returns the values recorded in checkpoints."""
        schedule = self.schedule
        is_annealing = isinstance(schedule, Annealing)
        return {
            "total_steps": self.total_steps,
            "schedule": asdict(schedule.schedule if is_annealing else schedule),
            "stable_until": schedule.from_step if is_annealing else schedule.decays_from,
            "stage_starts": self.batches.stage_starts,
            "ramp": asdict(self.ramp),
            "ramp_steps": self.ramp_steps,
            "origin": asdict(self.batches.origin) if self.batches.origin else None,
        }


@dataclass(frozen=True)
class Due:
    """Work due after a step."""

    logs: bool
    validates: bool
    saves: bool
    evaluates: bool
    samples: bool
    diagnoses: bool
    compares_replicas: bool
    pauses: bool
    is_last: bool

    @property
    def settles(self) -> bool:
        """True if this step's metrics are needed immediately.

        Evaluation and sampling may be interrupted by a request, which saves a checkpoint.
        """
        return self.logs or self.validates or self.saves or self.evaluates or self.samples


def steps_between(cadence: Cadence, plan: RunPlan, factor: float) -> int | None:
    """Returns an interval in steps, multiplied by `factor`; None means never."""
    steps = cadence.every_tokens / plan.tokens_per_step if cadence.every_tokens else cadence.every_steps
    return max(1, round(steps * factor)) if steps else None


def due_after(step: int, config: RunConfig, plan: RunPlan) -> Due:
    """Returns the work due after `step`, counted from 1."""

    def is_at(cadence: Cadence) -> bool:
        every = steps_between(cadence, plan, config.interval_scale)
        return every is not None and step % every == 0

    is_last = step == plan.total_steps
    pauses = step == config.checkpoint.stop_at_step and not is_last
    evaluates = is_at(config.benchmarks)
    return Due(
        logs=step % max(1, round(config.logging.every_steps * config.interval_scale)) == 0 or is_last or pauses,
        validates=is_at(config.validation) or is_last or pauses,
        # Evaluation in a separate process needs a checkpoint.
        saves=is_at(config.checkpoint)
        or (is_last and config.checkpoint.save_final)
        or (evaluates and config.benchmarks.where != "in_loop"),
        evaluates=evaluates,
        samples=config.samples.is_set and (is_last or is_at(config.samples)),
        diagnoses=is_at(config.diagnostics),
        compares_replicas=step % config.guard.replica_check_every_steps == 0,
        pauses=pauses,
        is_last=is_last,
    )


def derive(config: RunConfig, ranks: int) -> RunPlan:
    """Plans a run. Raises InputError with all problems of the recipe."""
    config = resolve_auto(config)
    problems = reference_problems(config)
    data = config.data
    model_config = problems.attempt(planned_model_config, config)
    if config.init == "pretrained":
        from pretrain.model.pretrained import find_weights

        problems.attempt(find_weights, config.model.config)
        if config.model.changes and model_config is not None:
            problems.attempt(require_fitting_weights, config.model, model_config)
    of_data = Problems()
    readers = of_data.attempt(open_training, data)
    device = problems.attempt(device_type) or "cpu"
    precision = problems.attempt(resolve_precision, config.precision) or "fp32"
    problems.attempt(
        choose_attention, config.attention, device_type=device, dtype=DTYPES[precision], window=data.window
    )
    problems += compiler_problems(config.compile, device)
    parts = parts_of_micro_batch(config)
    sequences_per_step = problems.attempt(sequences_of, config, ranks, parts)
    if model_config is not None and readers:
        manifest = next(iter(readers.values())).manifest
        problems += check_vocabulary(model_config, manifest.vocabulary_size, has_weights=config.init == "pretrained")
        if config.init == "pretrained":
            from pretrain.data.new_tokens import new_tokens

            problems.attempt(new_tokens, config, model_config)
        set_end_of_document(model_config, manifest.end_of_document_id)
    losses_of_routers = None
    if model_config is not None:
        stage_configs = [model_config]
        if data.stages:
            from pretrain.model.positions import configs_of_stages

            stage_configs = problems.attempt(configs_of_stages, model_config, data)
        meta_model = problems.attempt(shared_meta_model, model_config)
        if meta_model is not None:
            losses_of_routers = problems.attempt(router_losses, config.loss, meta_model)
            problems += model_problems(config, meta_model, device)
    if problems:
        raise InputError(*dict.fromkeys([*problems, *of_data]))
    say_stage("Testing the architecture")
    model = of_data.attempt(plan_model, config, model_config, losses_of_routers)  # even if the data has problems
    if model is None:
        raise InputError(*of_data)
    of_data += probed_problems(config, model)
    ramp = problems.attempt(ramp_of, config, sequences_per_step, model.active_parameters)
    if ramp is not None:
        schedule = problems.attempt(schedule_of, config.optim, config.batch.tokens_per_step, ramp.total_steps)
        if schedule is not None:
            problems.attempt(check_factors, schedule)
        problems += averaging_problems(
            config.averaging,
            total_steps=ramp.total_steps,
            exports_average=config.export.weights == "average",
            rounds_stochastically=config.optim.stochastic_rounding,
        )
    problems += of_data
    problems.stop_if_any()
    batches = Batches(data, seed=config.seed, ramp=ramp)
    stages = [
        StagePlan(
            number=number + 1,
            window=window,
            model_config=stage_config,
            flops_per_token=flops_per_token(stage_config, window.sequence_length),
            sequences_per_micro_batch=micro_batch_of(config, number, ranks, parts),
        )
        for number, (window, stage_config) in enumerate(zip(data.windows, stage_configs, strict=True))
    ]
    return RunPlan(
        **vars(model),
        precision=precision,
        ranks=ranks,
        stages=tuple(stages),
        ramp=ramp,
        ramp_steps=ramp.first_steps,
        schedule=schedule,
        peak_learning_rate=peak_learning_rate(config.optim, sequences_per_step),
        batches=batches,
        identity=identity_of(config, model_config, batches),
    )


def model_problems(config: RunConfig, meta_model: PreTrainedModel, device_type: str) -> list[str]:
    """Lists settings that don't work with this model, whatever the data and the strategy are."""
    problems = Problems(length_problems(meta_model.config, config.data.sequence_length))
    problems += problems.attempt(optimizer_problems, config.optim, meta_model, device_type) or []
    if config.loss.terms:
        from pretrain.model.loss_terms import term_problems

        scales_width = config.optim.parametrization != "standard"
        problems += problems.attempt(term_problems, config.loss, config.compile, scales_width=scales_width) or []
    if config.samples.is_set and not meta_model.can_generate():
        problems.append(
            f"samples: {type(meta_model).__name__} has no generate(); inherit from transformers' GenerationMixin as "
            "well, or omit samples"
        )
    problems += checkpointing_problems(config, meta_model)
    return problems


def micro_batch_of(config: RunConfig, number: int, ranks: int, parts: int) -> int:
    """Returns the largest micro-batch, in sequences, that divides the stage's batch evenly.

    ranks, parts: see `sequences_of`.
    """
    length = config.data.windows[number].sequence_length
    most = config.as_stage(number).batch.sequences_per_micro_batch
    per_rank = config.batch.tokens_per_step // (length * ranks * config.batch.ramp_levels)
    return max(n for n in range(parts, most + 1, parts) if per_rank % n == 0)


def require_fitting_weights(source: ModelSource, model_config: Any) -> None:
    """Raises InputError if config changes don't fit the pretrained weights. The vocabulary may grow."""
    own = load_model_config(source.config)
    rows = model_config.get_text_config().vocab_size
    if rows > own.get_text_config().vocab_size:  # new rows are initialized
        own = load_model_config(source.config, changes={VOCABULARY_KEY: rows})
    if changes := shape_changes(own, model_config):
        raise InputError(
            f"model: {source}: init: pretrained uses the weights of {source.config}, but their shapes do not match "
            f"the model ({changes}); omit changes that affect shapes, or train from scratch with init: scratch"
        )


def plan_model(config: RunConfig, model_config: Any, losses_of_routers: RouterLosses) -> ModelPlan:
    """Probes the architecture and plans the model. Raises InputError if no attention works."""
    found = probe(
        model_config,
        attention=config.attention,
        window=config.data.window,
        balances=losses_of_routers.balance > 0,
    )
    if config.optim.muon.qk_clip:
        from pretrain.training.qk_clip import qk_clip_problem

        if problem := qk_clip_problem(model_config, found.attention):
            raise InputError(problem)
    return ModelPlan(
        **vars(found),
        model_config=model_config,
        parameters=count_parameters(model_config),
        active_parameters=active_parameters(model_config),
        router_losses=losses_of_routers,
        flops_per_token=flops_per_token(model_config, config.data.sequence_length),
    )


def probed_problems(config: RunConfig, model: ModelPlan) -> list[str]:
    """Lists settings that don't work with what the probe found, such as documents in rows (model/document_rows.py)."""
    problems = []
    model_type = model.model_config.model_type
    mixers = classes_in_rows(model.attention)
    how = f"each document is a separate row in {' and '.join(mixers)}"
    if config.loss.terms and not model.from_hidden_states:
        problems.append(
            f"loss.terms: {model_type} does not compute its logits from the last hidden states alone, but loss terms "
            "have no access to anything else; use a model that does, such as llama or qwen3"
        )
    if mixers and config.compile == "full":
        problems.append(
            f"compile: full does not work with data.document_mask and {model_type}: {how}, so shapes change with "
            "every batch; use regional, or data.document_mask: false"
        )
    if mixers and (split := requested_sizes().keys() & {"pp", "cp"}):
        problems.append(
            f"model: {model_type} does not work with {' and '.join(split)} and data.document_mask: {how}, but these "
            "dimensions split micro-batches or sequences; use fsdp2, or data.document_mask: false with pp"
        )
    return problems


def reference_problems(config: RunConfig) -> Problems:
    """Lists problems with output, branch_from, the mirror, benchmarks, trackers and the Hub repository."""
    problems = Problems()
    benchmarks = config.benchmarks
    hub = config.hub
    output = output_problem(config.output) or output_problem(config.output / "checkpoints")
    problems += [output] if output else []
    if config.checkpoint.mirror is not None:
        from pretrain.checkpoint.mirror_store import mirror_problems

        problems += mirror_problems(config.output, config.checkpoint)
    if config.branch_from is not None and (output or not checkpoint_folders(config.output)):
        problems.attempt(trunk_checkpoint, config.branch_from)
    if benchmarks.is_set:
        from pretrain.training.background_jobs import evaluation_problems

        problems += evaluation_problems(benchmarks)
    if config.trackers:
        from pretrain.training.trackers import tracker_problems

        problems += tracker_problems(config.trackers)
    if hub.repository is not None:
        from pretrain.runs.hub import login_problems, offer_problems

        problems += offer_problems(hub.repository, config.publish.license, config.publish.language)
        problems += login_problems()
        if hub.every == "milestones" and config.checkpoint.keep_every is None:
            problems.append(
                "hub.every: milestones, but checkpoint.keep_every is null; set it to a number of steps, or set "
                "hub.every to end"
            )
    return problems


def sequences_of(config: RunConfig, ranks: int, parts: int = 1) -> int:
    """Returns the number of sequences per optimizer step, over all ranks.

    Raises InputError if the batch isn't divisible in every stage, or the micro-batch isn't divisible by `parts`.

    Args:
        ranks: number of micro-batches per micro-step, over all ranks.
        parts: see `parts_of_micro_batch`.
    """
    problems = Problems()
    tokens = config.batch.tokens_per_step
    micro_batch = config.batch.sequences_per_micro_batch
    length = config.data.sequence_length
    levels = config.batch.ramp_levels
    if micro_batch % parts:
        below = micro_batch // parts * parts
        above = below + parts
        raise InputError(
            f"batch.sequences_per_micro_batch: {micro_batch} is not a multiple of {parts}, the number of "
            f"microbatches that each pipeline process splits it into (stages per process of "
            f"{config.pipeline.schedule} x pipeline.microbatches_per_stage "
            f"{config.pipeline.microbatches_per_stage}); nearest: "
            f"{f'{below} or ' if below else ''}{above}"
        )
    group = levels * micro_batch * length * ranks
    groups_of_stages = [levels * parts * window.sequence_length * ranks for window in config.data.windows]
    common = math.lcm(group, *groups_of_stages)
    nearest = " or ".join(f"{n:,}" for n in (tokens // common * common, math.ceil(tokens / common) * common) if n)
    ramp = f" x {levels} ramp levels" if levels > 1 else ""
    if tokens % group:
        unit = group // micro_batch  # tokens per step with one sequence per micro-batch
        smaller = [n for n in range(micro_batch - 1, 0, -1) if n % parts == 0 and tokens % (unit * n) == 0]
        other = f", or use batch.sequences_per_micro_batch {smaller[0]}" if smaller else ""
        problems.append(
            f"batch.tokens_per_step: {tokens:,} is not a multiple of {micro_batch} sequences per micro-batch x "
            f"data.sequence_length {length:,} x {ranks} processes{ramp} = {group:,}; nearest: {nearest}{other}"
        )
    for number, (window, of_stage) in enumerate(zip(config.data.windows, groups_of_stages, strict=True)):
        setting = f"data.stages[{number}].sequence_length"
        longer = window.sequence_length
        left = config.as_stage(number).batch.sequences_per_micro_batch
        if left < parts:
            problems.append(
                f"{setting}: {micro_batch} sequences per micro-batch become {left} of {longer:,} tokens, but the "
                f"pipeline needs at least {parts} per process; use "
                f"batch.sequences_per_micro_batch {parts * config.data.longest_window.sequence_length // length}"
            )
        if tokens % of_stage and not tokens % group:
            sequences = f"{parts} sequences x " if parts > 1 else ""
            problems.append(
                f"{setting}: batch.tokens_per_step {tokens:,} is not a multiple of {sequences}{longer:,} tokens x "
                f"{ranks} processes{ramp} = {of_stage:,}; nearest: {nearest}"
            )
    problems.stop_if_any()
    return tokens // length


def target_sequences(budget: Budget, length: int, active: int) -> int | None:
    """Returns the budget in sequences of `length` tokens; None if the budget is in steps.

    active: number of active parameters, for tokens_per_parameter.
    """
    if budget.steps:
        return None
    tokens = round(budget.tokens_per_parameter * active) if budget.tokens_per_parameter else budget.tokens
    return math.ceil(tokens / length)


def ramp_of(config: RunConfig, sequences_per_step: int, active: int) -> BatchRamp:
    """Plans the batch size for each step. active: see `target_sequences`."""
    ramp = config.batch.ramp
    return batch_ramp(
        sequences_per_step,
        total_sequences=target_sequences(config.budget, config.data.sequence_length, active),
        total_steps=config.budget.steps,
        ramp_from=ramp.start if ramp else 1.0,
        ramp_over=ramp.over if ramp else 0.0,
    )


def schedule_of(
    optim: Optim, tokens_per_step: int, total_steps: int, *, first_step: int = 0, warmup_steps: int | None = None
) -> Schedule:
    """Returns the schedule from `first_step` to the end. warmup_steps: None for the recipe's setting."""
    steps = total_steps - first_step
    return Schedule(
        name=optim.schedule,
        total_steps=total_steps,
        warmup_steps=optim.warmup_steps if warmup_steps is None else warmup_steps,
        final_ratio=optim.min_lr_ratio,
        decay_steps=round(optim.decay_fraction * steps) if optim.schedule == "wsd" else None,
        decay_shape=optim.decay_type,
        cooldown_steps=cooldown_steps_of_infinite(
            steps, tokens_per_step, optim.min_cooldown_tokens, optim.cooldown_fraction
        ),
        constant_ratio=optim.constant_ratio,
        anneal_steps=round(optim.anneal_fraction * steps) if optim.schedule == "infinite" else 0,
        first_step=first_step,
    )


def check_factors(schedule: Schedule) -> None:
    """Computes up to 1,000 learning rates of the run. Raises InputError if an extension's schedule has an error."""
    for step in range(0, schedule.total_steps, -(-schedule.total_steps // 1000)):
        schedule.factor(step)


def length_problems(model_config: Any, sequence_length: int) -> list[str]:
    """Checks that the sequences fit max_position_embeddings. Returns a list of problems."""
    longest = getattr(model_config, "max_position_embeddings", None)
    if longest is None or sequence_length <= longest:
        return []
    return [
        f"data.sequence_length: {sequence_length:,} is more than the model's max_position_embeddings, {longest:,}; "
        "use shorter sequences, or raise it in the model's JSON"
    ]


def identity_of(config: RunConfig, model_config: Any, batches: Batches) -> dict[str, Any]:
    """Returns the settings that must not change for an exact continuation, as {dotted path: JSON value}."""
    data = config.data
    architecture = {k: v for k, v in model_config.to_diff_dict().items() if k not in ("transformers_version", "dtype")}
    data_of = {folder: reader.manifest.sha256[:16] for folder, reader in batches.readers.items()}

    def identity_of_stage(stage: CurriculumStage) -> dict[str, Any]:
        return {
            "until": stage.until,
            "train": [(str(s.shards), data_of[str(s.shards)], s.weight, s.max_epochs) for s in stage.train],
            **stage.model_dump(include={"sequence_length", "rope_parameters"}, exclude_none=True),
        }

    identity = {
        "model": hashlib.sha256(json.dumps(architecture, sort_keys=True, default=str).encode()).hexdigest()[:16],
        "seed": config.seed,
        "data.stages" if data.stages else "data.train": [identity_of_stage(s) for s in data.mixtures],
        "data.sequence_length": data.sequence_length,
        "data.document_mask": data.document_mask,
        "data.sampling": data.sampling,
        "batch.tokens_per_step": config.batch.tokens_per_step,
        "batch.ramp": config.batch.ramp.model_dump(by_alias=True) if config.batch.ramp else None,
        "optim.name": config.optim.name,
    }
    return json.loads(json.dumps(identity))  # tuples become lists, as in a checkpoint


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Returns the settings in KEPT, and the hashes of custom code."""
    values = config.model_dump(mode="json", by_alias=True)
    return {path: setting(values, path) for path in KEPT} | LOADED_CODE
