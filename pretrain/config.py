"""Defines all settings of a run. recipe.py reads them from YAML and the command line.

A recipe is self-contained, without inheritance or interpolation, so a `diff` of two recipes shows every difference.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    model_serializer,
    model_validator,
)

from pretrain.errors import shortened
from pretrain.files import is_url
from pretrain.registry import (
    LOSS_TERMS,
    OPTIMIZERS,
    SAMPLERS,
    SCHEDULES,
    TRANSFORMATIONS,
    check_entries,
    check_options,
    load_extensions,
)
from pretrain.units import parse_count


def parse_fraction(value: Any) -> Any:
    """Converts '20%' and '1/5' to 0.2. Leaves numbers unchanged."""
    if not isinstance(value, str):
        return value
    number, slash, divisor = value.partition("/")
    try:
        if slash:
            return float(number) / float(divisor)
        return float(value.strip()[:-1]) / 100 if value.strip().endswith("%") else value
    except (ValueError, ZeroDivisionError):
        return value


def parse_names(value: Any) -> Any:
    """Converts 'base' to ['base'] and 'a,b' to ['a', 'b']. Leaves lists unchanged."""
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


def refuse_boolean(value: Any) -> Any:
    """Raises ValueError for booleans. Python treats them as numbers, so `every_steps: true` would mean every step."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not true or false (got {str(value).lower()})")
    return value


MOST = 10**18
"""Largest allowed count: a thousand times the number of tokens in the largest corpora. It fits in 64 bits."""

NotBoolean = BeforeValidator(refuse_boolean)
Count = Annotated[int, BeforeValidator(parse_count), NotBoolean, Field(ge=1, le=MOST)]
# By convention, a context of 2k is 2,048 tokens and a batch of 512k is 2^19 tokens, but 2k steps are 2,000.
BinaryCount = Annotated[Count, BeforeValidator(lambda value: parse_count(value, thousand=1024))]
CountFromZero = Annotated[int, BeforeValidator(parse_count), NotBoolean, Field(ge=0, le=MOST)]
Names = Annotated[list[str], BeforeValidator(parse_names)]
_Share = Annotated[float, BeforeValidator(parse_fraction), NotBoolean]
Fraction = Annotated[_Share, Field(ge=0, le=1)]
PositiveFraction = Annotated[_Share, Field(gt=0, le=1)]
Share = Annotated[_Share, Field(gt=0, lt=1)]
PositiveFloat = Annotated[float, NotBoolean, Field(gt=0)]
NonNegativeFloat = Annotated[float, NotBoolean, Field(ge=0)]
FactorAboveOne = Annotated[float, NotBoolean, Field(gt=1)]

Number = TypeVar("Number")
# With a plain union, pydantic would report every mistake twice: not a number, and not auto.
OrAuto = Annotated[
    Annotated[Number, Tag("number")] | Annotated[Literal["auto"], Tag("auto")],
    Discriminator(lambda value: "auto" if value == "auto" else "number"),
]


class Section(BaseModel):
    # extra=forbid rejects misspelled keys. frozen guarantees that the recorded config is the one that ran.
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class MemoryBudget(Section):
    """Partial recomputation within each layer, chosen by torch.compile."""

    memory_budget: Share
    """Share of a compiled layer's activations to keep. The compiler recomputes the cheapest operations first. At
    0.8, it usually doesn't recompute any matmul."""

    def __str__(self) -> str:
        return f"{{memory_budget: {self.memory_budget:g}}}"


def _kind_of_checkpointing(value: Any) -> str:
    if isinstance(value, dict | MemoryBudget):
        return "function-budget"
    return "function-word" if isinstance(value, str) and value[:1].isalpha() else "function-share"


# pydantic adds the tags to an error's path; recipe.describe drops those that begin with "function-".
Checkpointing = Annotated[
    Annotated[Share, Tag("function-share")]
    | Annotated[MemoryBudget, Tag("function-budget")]
    | Annotated[Literal["none", "full"], Tag("function-word")],
    Discriminator(_kind_of_checkpointing),
]


@dataclass(frozen=True)
class WindowSpec:
    """Shape of a window of tokens."""

    sequence_length: int
    """Number of predicted tokens. A window in a shard contains one more token, the last target."""
    document_mask: bool
    """True if attention and positions restart at every end-of-document ID."""

    def count_in(self, tokens: int) -> int:
        """Returns the number of whole windows in a token stream. Consecutive windows share one token."""
        return max(0, tokens - 1) // self.sequence_length


# A str, because a Path would drop one of a URL's slashes.
Place = Annotated[
    Annotated[str, Tag("URL")] | Annotated[Path, Tag("path")],
    Discriminator(lambda value: "URL" if isinstance(value, str) and is_url(value) else "path"),
]


class Shards(Section):
    shards: Place
    """Folder or URL with shards from prepare_data.py, a nanoGPT .bin or folder, or a Megatron .bin with its .idx."""
    tokenizer: str | None = None
    """Tokenizer (folder or Hub ID) for shards made by other tools. Shards from prepare_data.py include theirs."""
    _found: Any = PrivateAttr(None)
    """The first rank's check results (data/shards.py) if that rank reads for all ranks, otherwise None."""


class Source(Shards):
    weight: PositiveFloat = 1.0
    """Sampling weight relative to the other sources."""
    max_epochs: PositiveFloat | None = None
    """Maximum epochs of this source; after that, only the other sources are sampled. null: no limit."""


class CurriculumStage(Section):
    train: Annotated[list[Source], Field(min_length=1)]
    """Data mixture of this stage."""
    until: PositiveFraction | None = None
    """Fraction of the run at which the stage ends, such as 20% or 0.2. Only the last stage may use null."""
    sequence_length: BinaryCount | None = None
    """Tokens per training sequence, starting with this stage. Must be a multiple of data.sequence_length. null: as in
    the previous stage. The number of tokens per step doesn't change, so micro-batches have fewer sequences."""
    rope_parameters: dict[str, Any] | None = None
    """RoPE parameters, starting with this stage, with the same keys as in the model's JSON: {rope_theta: 500000}, or
    {rope_type: yarn, factor: 8, original_max_position_embeddings: 4096}. null: same as in the previous stage."""


class ValidationSource(Shards):
    split: Literal["validation", "train"] = "validation"
    """Split to evaluate."""


class DataCache(Section):
    folder: Path
    """Folder on a local disk. All processes on the machine share it."""
    size: Annotated[Count, Field(ge=10**6)]
    """Cache size in bytes, such as 256M."""


class Data(Section):
    train: Annotated[list[Source], Field(min_length=1)] | None = None
    """Data mixture of a run with a single stage."""
    stages: Annotated[list[CurriculumStage], Field(min_length=1)] | None = None
    """Curriculum: a sequence of data mixtures. Use it instead of `train`."""
    validation: list[ValidationSource] | None = None
    """Validation sets. null: the validation split of every training folder that has one."""
    sequence_length: BinaryCount = 2048
    """Tokens per training sequence; 2k is 2,048."""
    document_mask: bool = True
    """Tokens attend only within their own document, even if several documents are packed into a sequence."""
    sampling: Annotated[str, AfterValidator(SAMPLERS.checked)] = "epochs"
    """epochs: use each window once per epoch, in a seeded order. best_fit: like epochs, but windows contain whole
    documents. random_windows: sample windows at random offsets. Extensions can add more."""
    transformations: dict[str, dict[str, Any] | None] = {}
    """Transformations from extensions to apply to training windows, in this order: {NAME: {OPTION: VALUE}}. See
    docs/own_data.md."""
    dispatch_batches: bool = False
    """The run's first process reads the shards for all processes, so the others don't need access to them."""
    cache: DataCache | None = None
    """Disk cache for shards at a URL, so that later epochs and resumed runs can reuse the data. null: memory only."""

    @property
    def mixtures(self) -> list[CurriculumStage]:
        """The run's stages. A single mixture counts as one stage."""
        return self.stages or [CurriculumStage(train=self.train)]

    @property
    def window(self) -> WindowSpec:
        """Windows for validation, and for stages without their own sequence_length."""
        return WindowSpec(self.sequence_length, self.document_mask)

    @property
    def windows(self) -> list[WindowSpec]:
        """Window shape of each stage."""
        lengths = [self.sequence_length]
        for stage in self.mixtures:
            lengths.append(stage.sequence_length or lengths[-1])
        return [WindowSpec(length, self.document_mask) for length in lengths[1:]]

    @property
    def longest_window(self) -> WindowSpec:
        """Longest window of the run."""
        return max([self.window, *self.windows], key=lambda window: window.sequence_length)

    @model_validator(mode="after")
    def known_transformations(self):
        check_entries("transformations", TRANSFORMATIONS, self.transformations)
        return self

    @model_validator(mode="after")
    def one_way_to_mix(self):
        if (self.train is None) == (self.stages is None):
            raise ValueError("set either train (one mixture) or stages (a curriculum), but not both")
        ends = [stage.until for stage in self.mixtures]
        inner = ends[:-1]
        if None in inner or inner != sorted(set(inner)) or ends[-1] not in (None, 1.0) or 1.0 in inner:
            raise ValueError(f"stages[].until must increase, and end with null or 100% in the last stage (got {ends})")
        lengths = [stage.sequence_length or self.sequence_length for stage in self.mixtures]
        if any(length % self.sequence_length for length in lengths):
            raise ValueError(
                f"each stages[].sequence_length must be a multiple of sequence_length, {self.sequence_length:,} (got "
                f"{lengths}); set data.sequence_length to the shortest length, or to a common divisor"
            )
        return self


class Budget(Section):
    tokens_per_parameter: PositiveFloat | None = None
    """Training tokens per parameter (per active parameter for MoE models). 20 is the compute-optimal ratio from
    Hoffmann et al. (arXiv 2203.15556)."""
    tokens: Count | None = None
    """Total training tokens."""
    steps: Count | None = None
    """Total optimizer steps."""
    minutes: PositiveFloat | None = None
    """Maximum wall-clock minutes in total, including resumed sessions. The final decay starts early enough to finish
    in time. The run ends sooner if it reaches its token or step budget. null: no limit."""

    @model_validator(mode="after")
    def one_budget(self):
        given = [name for name in ("tokens_per_parameter", "tokens", "steps") if getattr(self, name) is not None]
        if len(given) != 1:
            names = f" (got {', '.join(given)})" if given else ""
            raise ValueError(f"set exactly one of tokens_per_parameter, tokens and steps{names}")
        return self


class Ramp(Section):
    start: Annotated[PositiveFraction, Field(alias="from")] = 0.25
    """Initial batch size as a fraction of the full size: 1/2, 1/3, 1/4, ... The batch grows in steps of this size."""
    over: PositiveFraction = 0.05
    """Fraction of the run's tokens over which the batch grows."""

    model_config = ConfigDict(serialize_by_alias=True)

    @model_validator(mode="after")
    def whole_levels(self):
        if abs(1 / self.start - round(1 / self.start)) > 1e-6 or self.start >= 1:
            raise ValueError(f"from must be 1/2, 1/3, 1/4, ... (got {self.start})")
        return self


class Batch(Section):
    tokens_per_step: OrAuto[BinaryCount]
    """Global batch size in tokens, for any number of processes. 512k is 2^19. auto: based on the run's token count."""
    sequences_per_micro_batch: Count = 8
    """Sequences per forward pass on each process. Affects speed and memory, not results. With tokens_per_step: auto,
    this is an upper limit."""
    ramp: Ramp | None = None
    """Batch size warmup. null: use the full batch size from the first step."""
    no_sync: bool = False
    """Keep gradients unsharded and reduce them once per step instead of after every micro-step. Needs 4 bytes per
    parameter. Applies to strategies that shard with FSDP2 and, in fp32, to ZeRO-2 and ZeRO-3; the others always reduce
    once per step."""

    @property
    def ramp_levels(self) -> int:
        """Number of batch sizes in the ramp, including the full size."""
        return round(1 / self.ramp.start) if self.ramp else 1


class MuonSettings(Section):
    """Used only with optim.name: muon."""

    ns_coefficients: Literal["jordan", "polar_express"] = "jordan"
    """Coefficients for the Newton-Schulz iterations; see docs/optimizers.md."""
    ns_steps: Count = 5
    """Newton-Schulz iterations per update."""
    split_matrices: dict[str, Count | list[Count]] = {}
    """Fused weights to orthogonalize block by block: {weight name pattern: number of blocks, or list of block sizes}.
    Blocks split the output dimension. {"*.c_attn.weight": 3} splits q, k and v. The number of heads splits it by
    head."""
    qk_clip: PositiveFloat | None = None
    """Maximum attention logit. If a head exceeds it in a step, the head's query and key weights are scaled down after
    the update. null: no limit. Kimi K2 used 100."""


class Optim(Section):
    name: Annotated[str, AfterValidator(OPTIMIZERS.checked)] = "adamw"
    """adamw, adafactor, muon, adamw_8bit, or an optimizer from an extension; see docs/optimizers.md."""
    options: dict[str, Any] = {}
    """Options for an optimizer from an extension."""
    learning_rate: OrAuto[PositiveFloat] | None = None
    """Peak learning rate. auto: based on parameter count, batch size and optimizer."""
    learning_rate_per_sequence: PositiveFloat | None = None
    """Peak learning rate for a global batch of one sequence. Scales with the square root of the global batch size."""
    group_learning_rates: dict[Literal["embedding", "head", "matrices", "scalars"], PositiveFloat] = {}
    """Peak learning rates per parameter group, for any optimizer. embedding: embeddings and tied heads. head: untied
    heads. matrices: hidden matrices. scalars: everything else, such as norms, biases and convolutions."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW: decay rates for the running means of the gradient and the squared gradient."""
    eps: PositiveFloat = 1e-8
    """AdamW: constant added to the update's denominator."""
    weight_decay: OrAuto[NonNegativeFloat] = 0.1
    """Applied only to matrices, never to embeddings, norms or biases. auto: computed from model size, tokens, batch
    size and learning rate."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Clip gradients to this global norm; null: no clipping."""
    stochastic_rounding: bool = False
    """adafactor only: keep parameters in bf16 and apply updates with unbiased stochastic rounding."""
    muon: MuonSettings = MuonSettings()
    parametrization: Literal["standard", "mup"] = "standard"
    """mup: transfer a learning rate tuned at mup_base_width to the model's width; see docs/learning_rate.md."""
    mup_base_width: Count | None = None
    """mup: hidden size at which learning_rate was tuned. At this width, mup doesn't change the initial weights."""
    schedule: Annotated[str, AfterValidator(SCHEDULES.checked)] = "cosine"
    """cosine, linear, constant, wsd, infinite, or a schedule from an extension; see docs/learning_rate.md."""
    warmup_steps: OrAuto[CountFromZero] = 500
    """Linear warmup steps. auto: one token per parameter, but at most 5% of the run."""
    min_lr_ratio: Fraction = 0.1
    """Learning rate at the end of the decay, as a fraction of the peak."""
    decay_fraction: PositiveFraction = 0.2
    """wsd: final fraction of the run over which the learning rate decays."""
    decay_type: Literal["linear", "cosine", "sqrt"] = "sqrt"
    """wsd: shape of the decay; sqrt is 1 - sqrt (arXiv 2405.18392)."""
    cooldown_fraction: PositiveFraction = 0.7
    """infinite: fraction of the run over which the learning rate falls from the peak to the constant rate."""
    min_cooldown_tokens: CountFromZero = 0
    """infinite: minimum length of the cooldown in tokens, even in short runs."""
    constant_ratio: PositiveFraction = 0.536
    """infinite: constant learning rate, as a fraction of the peak."""
    anneal_fraction: Fraction = 0.0
    """infinite: final fraction of the run over which the learning rate anneals to min_lr_ratio."""

    @model_validator(mode="after")
    def known_options(self):
        if self.options:
            check_options(f"options: {self.name}", OPTIMIZERS[self.name].Options, self.options)
        return self

    @model_validator(mode="after")
    def one_learning_rate(self):
        if (self.learning_rate is None) == (self.learning_rate_per_sequence is None):
            raise ValueError("set either learning_rate (a number or auto) or learning_rate_per_sequence")
        if (self.parametrization == "mup") != (self.mup_base_width is not None):
            raise ValueError(
                "set both parametrization: mup and mup_base_width (the hidden size at which the learning rate was "
                "tuned), or neither"
            )
        if self.parametrization == "mup" and self.learning_rate == "auto":
            raise ValueError(
                "learning_rate: auto computes a learning rate for this model's size, but parametrization: mup needs "
                "one for mup_base_width; set learning_rate to a number"
            )
        if self.stochastic_rounding and self.name != "adafactor":
            raise ValueError(f"stochastic_rounding requires name: adafactor (got {self.name})")
        return self


class Averaging(Section):
    """Running average of the weights, kept in addition to the training weights; see docs/averages.md."""

    kind: Literal["none", "ema", "tail"] = "none"
    """ema: exponential moving average. tail: uniform mean over the end of the run."""
    half_life_fraction: PositiveFraction = 0.05
    """ema: half-life as a fraction of the run."""
    tail_fraction: PositiveFraction = 0.2
    """tail: final fraction of the run over which weights are averaged."""
    every_steps: Count = 10
    """Update the average every N steps. The ema decay is adjusted for N."""


class Pipeline(Section):
    """Used only by the pipeline strategy (accelerate_configs/pp.yaml)."""

    schedule: Literal["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"] = (
        "Interleaved1F1B"
    )
    """Pipeline schedule; see docs/pipelines.md. GPipe and 1F1B use one stage per process; the others use two."""
    microbatches_per_stage: Count = 1
    """Pipeline microbatches per stage. Higher values shrink the pipeline bubble, but also the matmuls."""


class Loss(Section):
    backend: Literal["auto", "chunked", "chunked_compiled", "logits"] = "auto"
    """Loss implementation; see pretrain/model/loss.py."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of mean(logsumexp(logits)^2), which keeps logits from drifting (arXiv 2204.02311). 0: off."""
    router_balance: NonNegativeFloat | None = None
    """MoE models: coefficient of the load-balancing loss over the global batch (arXiv 2501.11873). null: the model's
    own coefficient, such as router_aux_loss_coef."""
    router_z_loss: NonNegativeFloat | None = None
    """MoE models: coefficient of mean(logsumexp(router logits)^2) (ST-MoE, arXiv 2202.08906). null: the model's
    router_z_loss_coef, or 0 if it has none."""
    router_bias_rate: NonNegativeFloat = 0.0
    """MoE models with a router bias (deepseek_v3, glm4_moe, ...): how much to change an expert's bias per step: up if
    the expert got less than its share of the global batch, otherwise down (arXiv 2408.15664). DeepSeek-V3 uses 0.001.
    0: don't update the bias."""

    terms: dict[str, dict[str, Any] | None] = {}
    """Loss terms from extensions: {NAME: {coefficient: 0.1, OPTION: VALUE}}; see docs/own_loss.md."""

    @model_validator(mode="after")
    def known_terms(self):
        check_entries("terms", LOSS_TERMS, self.terms)
        return self


class Cadence(Section):
    every_steps: Count | None = None
    """Interval in steps. If neither this nor every_tokens is set, validation and checkpoints happen only at the end of
    the run, and samples and benchmarks don't run."""
    every_tokens: Count | None = None
    """Interval in training tokens, converted to steps of the full batch size. Use it instead of every_steps."""

    @property
    def is_set(self) -> bool:
        """True if there is an interval."""
        return bool(self.every_steps or self.every_tokens)

    @model_validator(mode="after")
    def at_most_one_cadence(self):
        if self.every_steps and self.every_tokens:
            raise ValueError("set either every_steps or every_tokens, not both")
        return self


class Validation(Cadence):
    """The run always ends with a validation. Set every_steps or every_tokens to also validate during training."""

    sequences: Count = 512
    """Number of sequences per source. They are fixed and evenly spread over the split."""


class Samples(Cadence):
    """Set every_steps or every_tokens to generate samples."""

    prompts: Annotated[list[str], Field(min_length=1)] = [""]
    """Prompts to continue. An empty prompt starts a new document."""
    max_new_tokens: Count = 64
    """Maximum number of tokens per sample."""
    temperature: NonNegativeFloat = 0.8
    """Sampling temperature. 0: greedy decoding."""
    top_k: Count | None = None
    """Sample from the k most likely tokens. null: all."""
    top_p: PositiveFraction | None = None
    """Sample from the smallest set of tokens with at least this total probability. null: all."""


class Diagnostics(Cadence):
    """Per-layer RMS of activations, weights, gradients and updates, maximum attention logits, and dead units. Not
    computed without every_steps or every_tokens."""


class Benchmarks(Cadence):
    """Benchmarks during training. They don't run without every_steps or every_tokens."""

    tasks: Annotated[Names, Field(min_length=1)] = ["base"]
    """lm-evaluation-harness tasks, as in evaluate.py. Task sets: base, small (for models below 1B) and core."""
    where: Literal["background", "blocking", "in_loop"] = "background"
    """background: in a separate process while training continues. blocking: training waits for it. in_loop: on all
    training processes, with the current model; only for tasks scored by likelihood."""
    device: Annotated[str, Field(pattern=r"^(cpu|cuda:[0-9]+)$")] = "cpu"
    """cpu, or a GPU that training doesn't use, such as cuda:7. With where: blocking, it may also be a training GPU.
    Ignored with where: in_loop."""
    limit: PositiveFloat | None = None
    """Maximum number of documents per task. null: all."""
    include_path: Path | None = None
    """Folder with .yaml files for your own tasks."""
    eval_bundle: Path | None = None
    """Folder with DCLM's evaluation bundle, for the `core` tasks; see docs/benchmarks.md."""


class Checkpoint(Cadence):
    """Set every_steps or every_tokens to save checkpoints during training, not only at the end of the run."""

    keep_last: Count = 3
    """Number of most recent checkpoints to keep."""
    keep_best: CountFromZero = 0
    """Number of checkpoints with the lowest validation loss to keep, among those saved at a step with a validation."""
    keep_every: Count | None = None
    """Never delete checkpoints at multiples of this many steps."""
    stop_at_step: Count | None = None
    """Save and stop after this step, without changing the schedule. Set a later step, or null, to continue."""
    save_final: bool = True
    """false: write neither a last checkpoint nor final/ at the end of the run (for benchmarking)."""
    async_save: bool = True
    """Keep training while a checkpoint is written. Needs CPU memory for a copy of the weights and optimizer state."""
    mirror: str | None = None
    """Folder or URL (s3://..., hf://buckets/...) for a copy of the run, named after the `output` folder. A run without
    local checkpoints resumes from the copy. See docs/spot.md."""
    mirror_wait_seconds: Annotated[NonNegativeFloat, Field(le=1500)] = 300.0
    """Maximum time to wait for the mirror at the end of the run, or at startup if the run needs the mirror."""


class Guard(Section):
    """Detects bad steps and hangs, and reacts to them; see docs/failures.md."""

    loss_window: Annotated[Count, Field(ge=8)] = 128
    """Number of recent losses in the reference mean. spike_sigma needs at least 64."""
    spike_warn_factor: FactorAboveOne = 2.0
    """Report a loss above this multiple of the mean as a spike."""
    spike_factor: FactorAboveOne = 3.0
    """Roll back after losses above this multiple of the mean (see patience)."""
    spike_sigma: PositiveFloat = 6.0
    """Also roll back after losses that are at least 10% and this many standard deviations above the mean."""
    patience: Count = 3
    """Roll back after this many bad steps in a row. Steps with non-finite gradients count as bad."""
    on_spike: Literal["skip_data", "halve_learning_rate", "off"] = "skip_data"
    """Change made after a rollback: skip the bad steps' data, or halve the learning rate. off: stop instead of rolling
    back."""
    rollback_steps: CountFromZero = 100
    """Roll back to a checkpoint at least this many steps before the first bad step, if possible."""
    max_rollbacks: CountFromZero = 3
    """Maximum number of rollbacks. The next one stops the run with exit status 16."""
    alert_grad_norm: PositiveFloat = 100.0
    """Report gradient norms above this value."""
    divergence_threshold: PositiveFloat = 1.0
    """Report divergence if the mean loss of the last 16 steps exceeds the mean of the last 256 by this many nats."""
    on_divergence: Literal["warn", "stop"] = "warn"
    """stop: exit with status 16."""
    throughput_drop: PositiveFraction = 0.3
    """Report if throughput is this fraction below the run's median."""
    step_timeout_seconds: PositiveFloat = 300.0
    """A micro-step or update that takes longer counts as a hang. The run writes the stack traces of all processes
    and exits so that it can be restarted. On GPUs, NCCL ends processes that wait for another one for 10 minutes."""
    first_step_timeout_seconds: PositiveFloat = 1800.0
    """Timeout for the first step, which includes compiling kernels."""
    replica_check_every_steps: Count = 1000
    """How often to compare the replicas' weights bit by bit, in steps."""


class Logging(Section):
    every_steps: Count = 10
    """Log every N steps. Training waits for the device only at these steps."""


class Energy(Section):
    carbon_grams_per_kwh: NonNegativeFloat | None = 473.0
    """Grams of CO2 equivalent per kilowatt-hour. null: report only energy. 473 is the 2024 world average (Ember,
    Global Electricity Review 2025)."""


class Export(Section):
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Weight dtype in final/."""
    weights: Literal["raw", "average"] = "raw"
    """Weights to write to final/: raw (as trained) or their average."""


class Publish(Section):
    license: str | None = None
    """The model's Hub license ID, such as apache-2.0. Required for publishing."""
    language: Names = []
    """ISO 639 codes of the training text's languages."""


class Hub(Section):
    """Uploads to the Hub during training, in a separate process; see docs/publish.md."""

    repository: str | None = None
    """Hub repository, as owner/name. null: no uploads."""
    every: Literal["milestones", "end"] = "end"
    """milestones: each checkpoint kept by checkpoint.keep_every, and final/ at the end. end: only final/."""
    private: bool = True
    """Create the repository as private."""


class Tracking(Section):
    """The run's project and names in trackers; docs/trackers.md lists each tracker's options."""

    project: str | None = None
    """Project or experiment. null: for mlflow MLFLOW_EXPERIMENT_NAME, otherwise WANDB_PROJECT, otherwise
    groundwork."""
    entity: str | None = None
    """Team, user or workspace that owns the project. null: your own account."""
    name: str | None = None
    """Run name. null: the run folder's name."""
    tags: Names = []
    """Run tags."""
    group: str | None = None
    """Run group."""


class ModelSource(BaseModel):
    """A model config, and the recipe's changes to it.

    Keys other than `config` override keys in the model's JSON and are checked with it (model/model_config.py).
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    config: str
    """A .json file, a folder with a config.json, or a Hub ID."""
    _trusts_code: bool = PrivateAttr(False)
    """The recipe's trust_remote_code."""

    @property
    def trusts_code(self) -> bool:
        """True if the code in the model's folder may run."""
        return self._trusts_code

    @model_validator(mode="before")
    @classmethod
    def path_or_mapping(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"config": value}
        if not isinstance(value, dict):
            raise ValueError(
                "must be a model's .json file, folder or Hub ID, or a mapping {config: FILE, num_hidden_layers: 8} "
                f"(got {shortened(repr(value), 60)})"
            )
        if not isinstance(value.get("config"), str):
            raise ValueError(
                "to override a model's keys, also set config to a model's .json file, folder or Hub ID (got "
                f"{shortened(repr(value.get('config')), 60)})"
            )
        return value

    @property
    def changes(self) -> dict[str, Any]:
        """{overridden key in the model config: value}"""
        return dict(self.model_extra)

    @model_serializer
    def as_written(self) -> str | dict[str, Any]:
        return {"config": self.config, **self.changes} if self.changes else self.config

    def __str__(self) -> str:
        changes = {key: value for key, value in self.changes.items() if value != "auto"}
        changes = ", ".join(f"{key} {json.dumps(value)}" for key, value in changes.items())
        return f"{self.config} with {changes}" if changes else self.config


class RunConfig(Section):
    model: ModelSource
    """Architecture: a JSON file in model_configs/, a folder with a config.json, or a Hub ID. Override its keys with
    `model.KEY`, such as --model.num_hidden_layers 8 or --model.vocab_size auto (the tokenizer's size). In a recipe,
    write {config: FILE, num_hidden_layers: 8}."""
    extensions: Names = []
    """Your own Python files that register optimizers, schedules, loss terms or trackers; see docs/own_ideas.md."""
    trust_remote_code: bool = False
    """Run the Python code in the model's folder that config.json lists under auto_map; see docs/own_code.md."""
    init: Literal["scratch", "pretrained"] = "scratch"
    """pretrained: continue from the weights of `model`."""
    output: Path
    """Run folder. Run the same command again to resume. If this is a URL, such as s3://BUCKET/runs/NAME, the run is
    stored there, and the local folder is runs/NAME (`checkpoint.mirror` becomes s3://BUCKET/runs)."""
    branch_from: str | None = None
    """RUN@STEP: start from this checkpoint of a different run and decay the learning rate from there to the end."""
    seed: CountFromZero = 42
    """Seed for initial weights, data order and dropout."""
    deterministic: bool = False
    """Use only deterministic kernels, which make GPU runs bitwise reproducible but somewhat slower. If torch lacks
    one, the first step fails with an error that shows the operator. CPU kernels are always deterministic."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "bf16"
    """Precision of the forward and backward passes. Weights and optimizer state stay in fp32. auto: bf16 if the device
    supports it, otherwise fp32, or fp16 with single and ddp on GPUs with fp16 tensor cores."""
    data: Data
    budget: Budget = Budget(tokens_per_parameter=20)
    batch: Batch
    optim: Optim
    averaging: Averaging = Averaging()
    loss: Loss = Loss()
    pipeline: Pipeline = Pipeline()
    attention: Literal[
        "auto", "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "varlen"
    ] = "auto"
    """Attention implementation. auto: the fastest that is correct for the model, device and document_mask."""
    compile: Literal["auto", "none", "regional", "full"] = "auto"
    """torch.compile. regional: compile one layer and reuse it. full: compile the whole model (single and ddp). auto:
    full for models with up to four layers in one process on a CPU, otherwise regional."""
    activation_checkpointing: Checkpointing = "none"
    """full: keep only each layer's input and recompute the rest in the backward pass. A share, such as 50% or 0.5:
    recompute this share of the layers, spread evenly. Each recomputed layer takes a third more time.
    {memory_budget: 0.5}: keep about half of the activations in every compiled layer. The compiler
    recomputes the cheapest operations first."""
    validation: Validation = Validation()
    checkpoint: Checkpoint = Checkpoint()
    samples: Samples = Samples()
    diagnostics: Diagnostics = Diagnostics()
    benchmarks: Benchmarks = Benchmarks()
    logging: Logging = Logging()
    guard: Guard = Guard()
    interval_scale: PositiveFloat = 1.0
    """Multiplier for the intervals of logging, validation, checkpoints, samples, diagnostics and benchmarks."""
    energy: Energy = Energy()
    export: Export = Export()
    publish: Publish = Publish()
    hub: Hub = Hub()
    trackers: Names = []
    """Additional trackers, by their accelerate names: wandb, tensorboard, trackio, mlflow, comet_ml,
    swanlab, clearml, aim, dvclive. metrics.jsonl and the console are always written."""
    tracking: Tracking = Tracking()

    @model_validator(mode="before")
    @classmethod
    def extensions_first(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Loads extensions first, because other settings may refer to their entries."""
        files = parse_names(values.get("extensions") or [])
        if isinstance(files, list):
            load_extensions(map(str, files))
        return values

    @model_validator(mode="before")
    @classmethod
    def lives_at_url(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Converts a URL in `output` to a mirror and a local folder with the run's name."""
        output = values.get("output")
        if not isinstance(output, str) or not is_url(output):
            return values
        home, _, name = output.rstrip("/").rpartition("/")
        if not name or home.endswith(":/"):
            raise ValueError(f"output: {output}: must contain a location and a run name, as in s3://BUCKET/runs/NAME")
        checkpoint = values.get("checkpoint") or {}
        if not isinstance(checkpoint, dict):
            return values
        if checkpoint.get("mirror") not in (None, home):
            raise ValueError(f"output: {output}: the run is stored at this URL; remove checkpoint.mirror")
        return {**values, "output": f"runs/{name}", "checkpoint": {**checkpoint, "mirror": home}}

    @model_validator(mode="after")
    def tell_model_of_trust(self):
        self.model._trusts_code = self.trust_remote_code
        return self

    def with_batch(self, **settings: Any) -> "RunConfig":
        """Returns a copy with changed batch settings."""
        return self.model_copy(update={"batch": self.batch.model_copy(update=settings)})

    def as_stage(self, number: int) -> "RunConfig":
        """Returns a copy with this stage as the only one, with its sequence length and micro-batch size."""
        length = self.data.windows[number].sequence_length
        stage = CurriculumStage(train=self.data.mixtures[number].train)
        data = self.data.model_copy(update={"train": None, "stages": [stage], "sequence_length": length})
        sequences = max(1, self.batch.sequences_per_micro_batch * self.data.sequence_length // length)
        return self.model_copy(update={"data": data}).with_batch(sequences_per_micro_batch=sequences)
