"""Run config: every setting of a run, typed, documented and frozen. recipe.py reads it from YAML and argv.

A recipe is self-contained: no inheritance, no interpolation, so `diff` of two recipes shows the experiment.
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
    """Converts '20%' to 0.2; leaves numbers unchanged."""
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            return float(value.strip()[:-1]) / 100
        except ValueError:
            return value
    return value


def parse_names(value: Any) -> Any:
    """Converts 'base' to ['base'] and 'a,b' to ['a', 'b']; leaves lists unchanged."""
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


def refuse_boolean(value: Any) -> Any:
    """Raises ValueError for booleans: Python counts them as numbers, so `every_steps: true` would be every step."""
    if isinstance(value, bool):
        raise ValueError(f"a number is needed here, not true or false (got {str(value).lower()})")
    return value


MOST = 10**18
"""Largest count allowed: a thousand times the tokens of the largest corpora, well within 64 bits."""

NotBoolean = BeforeValidator(refuse_boolean)
Count = Annotated[int, BeforeValidator(parse_count), NotBoolean, Field(ge=1, le=MOST)]
# By convention, 2k of context are 2,048 tokens and a batch of 512k is 2^19 tokens, but 2k steps are 2,000.
BinaryCount = Annotated[Count, BeforeValidator(lambda value: parse_count(value, thousand=1024))]
CountFromZero = Annotated[int, BeforeValidator(parse_count), NotBoolean, Field(ge=0, le=MOST)]
Fraction = Annotated[float, BeforeValidator(parse_fraction), NotBoolean, Field(ge=0, le=1)]
Names = Annotated[list[str], BeforeValidator(parse_names)]
PositiveFraction = Annotated[float, BeforeValidator(parse_fraction), NotBoolean, Field(gt=0, le=1)]
PositiveFloat = Annotated[float, NotBoolean, Field(gt=0)]
NonNegativeFloat = Annotated[float, NotBoolean, Field(ge=0)]
FactorAboveOne = Annotated[float, NotBoolean, Field(gt=1)]

Number = TypeVar("Number")
# By a discriminator: a plain union would report every mistake twice, once as no number and once as not auto.
OrAuto = Annotated[
    Annotated[Number, Tag("number")] | Annotated[Literal["auto"], Tag("auto")],
    Discriminator(lambda value: "auto" if value == "auto" else "number"),
]

Share = Annotated[float, BeforeValidator(parse_fraction), NotBoolean, Field(gt=0, lt=1)]


class Section(BaseModel):
    # extra=forbid: a misspelled key is an error, not ignored. frozen: the saved record is what ran.
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class MemoryBudget(Section):
    """Recomputation that torch.compile chooses within each layer."""

    memory_budget: Share
    """Share of a compiled layer's activations to keep, 0 being its input alone. The compiler recomputes the cheapest
    operations first. 0.7 recomputes hardly any matmul."""

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
    """Shape of a window of tokens, for all code that reads, masks, computes or measures one."""

    sequence_length: int
    """Predicted tokens; as read from shards a window has one more, the last one's target."""
    document_mask: bool
    """True if attention and positions restart at every end-of-document ID."""

    def count_in(self, tokens: int) -> int:
        """Counts whole windows in a stream of tokens: the last token of each is the first of the next."""
        return max(0, tokens - 1) // self.sequence_length


# Not a Path: that would drop one of a URL's slashes.
Place = Annotated[
    Annotated[str, Tag("URL")] | Annotated[Path, Tag("path")],
    Discriminator(lambda value: "URL" if isinstance(value, str) and is_url(value) else "path"),
]


class Shards(Section):
    shards: Place
    """Folder or URL written by prepare_data.py; nanoGPT's .bin or folder; or Megatron's .bin with its .idx."""
    tokenizer: str | None = None
    """Tokenizer (folder or Hub ID) for shards made by other tools; prepare_data.py's folders contain their own."""
    _found: Any = PrivateAttr(None)
    """Contents of the folder as the first rank found them (data/shards.py), if it reads for all; None: look there."""


class Source(Shards):
    weight: PositiveFloat = 1.0
    """Sampling weight of this source, relative to the other sources."""
    max_epochs: PositiveFloat | None = None
    """Stop sampling this source after this many epochs; the other sources make up the difference. null: no limit."""


class CurriculumStage(Section):
    train: Annotated[list[Source], Field(min_length=1)]
    """The mixture of this stage."""
    until: PositiveFraction | None = None
    """Fraction of the run at which the stage ends, such as 20% or 0.2; null only in the last stage."""
    sequence_length: BinaryCount | None = None
    """Tokens per training sequence from this stage on, a multiple of data.sequence_length; null: as before. The tokens
    per step do not change; the micro-batch shrinks with the length."""
    rope_parameters: dict[str, Any] | None = None
    """Rotary positions from this stage on, with the keys of the model's JSON: {rope_theta: 500000}, or
    {rope_type: yarn, factor: 8, original_max_position_embeddings: 4096}; null: as before."""


class ValidationSource(Shards):
    split: Literal["validation", "train"] = "validation"
    """The split to evaluate."""


class DataCache(Section):
    folder: Path
    """Folder on a disk of the machine, shared by its processes."""
    size: Annotated[Count, Field(ge=10**6)]
    """Its size in bytes, such as 256M."""


class Data(Section):
    train: Annotated[list[Source], Field(min_length=1)] | None = None
    """The data mixture, for runs with a single stage."""
    stages: Annotated[list[CurriculumStage], Field(min_length=1)] | None = None
    """A curriculum: a sequence of mixtures. Replaces `train`."""
    validation: list[ValidationSource] | None = None
    """Validation sets; null: the validation split of every training folder that has one."""
    sequence_length: BinaryCount = 2048
    """Tokens per training sequence; 2k is 2,048."""
    document_mask: bool = True
    """Tokens attend within their own document only, however documents are packed into sequences."""
    sampling: Annotated[str, AfterValidator(SAMPLERS.checked)] = "epochs"
    """epochs: each window once per epoch, in a seeded order. best_fit: the same with windows of whole documents.
    random_windows: windows at random offsets. Or one of an extension."""
    transformations: dict[str, dict[str, Any] | None] = {}
    """Transformations of extensions that change the tokens of training windows, in this order: {NAME: {OPTION:
    VALUE}}; see docs/own_data.md."""
    dispatch_batches: bool = False
    """The first process of the run reads the shards for all; the others need no access to them."""
    cache: DataCache | None = None
    """Keeps what is read from shards at a URL on a disk, for later epochs and starts; null: in memory only."""

    @property
    def mixtures(self) -> list[CurriculumStage]:
        """Stages of the run; a plain mixture is a run of one stage."""
        return self.stages or [CurriculumStage(train=self.train)]

    @property
    def window(self) -> WindowSpec:
        """Windows for validation, and for training in stages that set no others."""
        return WindowSpec(self.sequence_length, self.document_mask)

    @property
    def windows(self) -> list[WindowSpec]:
        """Windows of each stage."""
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
            raise ValueError("give either train (one mixture) or stages (a curriculum)")
        ends = [stage.until for stage in self.mixtures]
        inner = ends[:-1]
        if None in inner or inner != sorted(set(inner)) or ends[-1] not in (None, 1.0) or 1.0 in inner:
            raise ValueError(f"stages[].until must rise, below 100%, with null or 100% in the last stage (got {ends})")
        lengths = [stage.sequence_length or self.sequence_length for stage in self.mixtures]
        if any(length % self.sequence_length for length in lengths):
            raise ValueError(
                f"stages[].sequence_length must be multiples of sequence_length, {self.sequence_length:,} (got "
                f"{lengths}); give data.sequence_length the shortest of them, or one that divides them all"
            )
        return self


class Budget(Section):
    tokens_per_parameter: PositiveFloat | None = None
    """Training tokens per parameter (active parameter for MoE models); 20 is the compute-optimal ratio of Hoffmann et
    al. (arXiv 2203.15556)."""
    tokens: Count | None = None
    """Total training tokens."""
    steps: Count | None = None
    """Total optimizer steps."""
    minutes: PositiveFloat | None = None
    """Wall-clock minutes, over all starts of the run: its final decay begins early enough to end within them. The run
    is over sooner if its tokens or steps are; null: no limit."""

    @model_validator(mode="after")
    def one_budget(self):
        given = [name for name in ("tokens_per_parameter", "tokens", "steps") if getattr(self, name) is not None]
        if len(given) != 1:
            names = f" (got {', '.join(given)})" if given else ""
            raise ValueError(f"give exactly one of tokens_per_parameter, tokens, steps{names}")
        return self


class Ramp(Section):
    start: Annotated[PositiveFraction, Field(alias="from")] = 0.25
    """Initial batch as a fraction of the full batch: 1/2, 1/3, 1/4, ...; the batch grows in steps of this size."""
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
    """Global batch in tokens, for any number of processes; 512k is 2^19. auto: chosen from the run's tokens."""
    sequences_per_micro_batch: Count = 8
    """Sequences per forward pass and process; affects speed and memory, not results. At most this, if
    tokens_per_step is auto."""
    ramp: Ramp | None = None
    """Start with a smaller batch; null: full batch from the first step."""
    no_sync: bool = False
    """fsdp2, hsdp, cp and, in fp32, ZeRO-2 and 3: keep gradients unsharded and reduce them once per step, not in every
    micro-step, for 4 bytes per parameter. The other strategies reduce once anyway."""


class MuonSettings(Section):
    """Used only by optim.name: muon."""

    ns_coefficients: Literal["jordan", "polar_express"] = "jordan"
    """Polynomials of the Newton-Schulz iterations; see docs/optimizers.md."""
    ns_steps: Count = 5
    """Newton-Schulz iterations of each update."""
    split_matrices: dict[str, Count | list[Count]] = {}
    """Weights that hold several matrices to orthogonalize separately: {pattern of the weight's name: how many, or the
    size of each} along the outputs, as {"*.c_attn.weight": 3} for q, k and v, or a number of heads."""
    qk_clip: PositiveFloat | None = None
    """Largest attention logit of a head; one that exceeds it in a step has its query and key weights scaled down after
    the update. null: no limit. Kimi K2 used 100."""


class Optim(Section):
    name: Annotated[str, AfterValidator(OPTIMIZERS.checked)] = "adamw"
    """adamw, adafactor, muon, adamw_8bit, or one of an extension; see docs/optimizers.md."""
    options: dict[str, Any] = {}
    """Options of an extension's optimizer, by the names that it gives them."""
    learning_rate: OrAuto[PositiveFloat] | None = None
    """Peak learning rate, or auto: chosen from the number of parameters, the batch and the optimizer."""
    learning_rate_per_sequence: PositiveFloat | None = None
    """Peak learning rate for a global batch of one sequence; scaled by the square root of the global batch."""
    group_learning_rates: dict[Literal["embedding", "head", "matrices", "scalars"], PositiveFloat] = {}
    """Peak learning rates per group of parameters, with every optimizer: embeddings and
    heads tied to them, other heads, hidden matrices, and everything else, such as norms, biases and convolutions."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW: decay rates of the running means of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """AdamW: added to the denominator of an update."""
    weight_decay: OrAuto[NonNegativeFloat] = 0.1
    """Applied to matrices only: never to embeddings, norms or biases. auto: by model, tokens, batch, learning rate."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Clip gradients to this global norm; null: no clipping."""
    stochastic_rounding: bool = False
    """adafactor only: keep parameters in bf16 and apply updates with unbiased stochastic rounding."""
    muon: MuonSettings = MuonSettings()
    parametrization: Literal["standard", "mup"] = "standard"
    """mup: a learning rate tuned at mup_base_width holds at the model's own width; see docs/learning_rate.md."""
    mup_base_width: Count | None = None
    """mup: the hidden size at which learning_rate was tuned, where initial weights are the architecture's own."""
    schedule: Annotated[str, AfterValidator(SCHEDULES.checked)] = "cosine"
    """cosine, linear, constant, wsd, infinite, or one of an extension; see docs/learning_rate.md."""
    warmup_steps: OrAuto[CountFromZero] = 500
    """Steps of linear warmup to the peak. auto: a token per parameter, at most 5% of the run."""
    min_lr_ratio: Fraction = 0.1
    """Learning rate at the end of the decay, relative to the peak."""
    decay_fraction: PositiveFraction = 0.2
    """wsd: final fraction of the run over which the learning rate decays."""
    decay_type: Literal["linear", "cosine", "sqrt"] = "sqrt"
    """wsd: shape of the decay; sqrt is 1 - sqrt (arXiv 2405.18392)."""
    cooldown_fraction: PositiveFraction = 0.7
    """infinite: fraction of the run over which the learning rate falls from the peak to the constant one."""
    min_cooldown_tokens: CountFromZero = 0
    """infinite: minimum length of the cooldown in tokens, however short the run."""
    constant_ratio: PositiveFraction = 0.536
    """infinite: the constant learning rate, relative to the peak."""
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
            raise ValueError("give either learning_rate (a number or auto) or learning_rate_per_sequence")
        if (self.parametrization == "mup") != (self.mup_base_width is not None):
            raise ValueError(
                "parametrization: mup and mup_base_width, the hidden size at which the learning rate was found, "
                "go together"
            )
        if self.parametrization == "mup" and self.learning_rate == "auto":
            raise ValueError(
                "learning_rate: auto is for this model's size; parametrization: mup needs the one for mup_base_width"
            )
        if self.stochastic_rounding and self.name != "adafactor":
            raise ValueError(f"stochastic_rounding works with name: adafactor (got {self.name})")
        return self


class Averaging(Section):
    """A running mean of the weights, kept next to the training weights; see docs/averages.md."""

    kind: Literal["none", "ema", "tail"] = "none"
    """ema: exponential moving average. tail: uniform mean over the end of the run."""
    half_life_fraction: PositiveFraction = 0.05
    """ema: steps in which the share of older weights halves, as a fraction of the run."""
    tail_fraction: PositiveFraction = 0.2
    """tail: final fraction of the run over which weights are averaged."""
    every_steps: Count = 10
    """Add the weights to the average every N steps; ema's decay is adjusted for N."""


class Pipeline(Section):
    """Used only by the pipeline strategy (accelerate_configs/pp.yaml)."""

    schedule: Literal["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"] = (
        "Interleaved1F1B"
    )
    """Pipeline schedule; see docs/pipelines.md. GPipe and 1F1B have one stage per process, the others two."""
    microbatches_per_stage: Count = 1
    """Pipeline microbatches per stage: higher values shrink the pipeline bubble and the matmuls."""


class Loss(Section):
    backend: Literal["auto", "chunked", "chunked_compiled", "torch", "logits"] = "auto"
    """How the loss is computed from the last hidden states; see pretrain/model/loss.py."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of mean(logsumexp(logits)^2), which keeps logits from drifting (arXiv 2204.02311); 0: off."""
    router_balance: NonNegativeFloat | None = None
    """MoE models: coefficient of the loss that balances the experts over the global batch (arXiv 2501.11873);
    null: the model's own, such as router_aux_loss_coef."""
    router_z_loss: NonNegativeFloat | None = None
    """MoE models: coefficient of mean(logsumexp(router logits)^2) (ST-MoE, arXiv 2202.08906); null: the
    model's own router_z_loss_coef, else 0."""
    router_bias_rate: NonNegativeFloat = 0.0
    """MoE models whose routers choose with a bias (deepseek_v3, glm4_moe, ...): how far each step moves an
    expert's bias, up if it got less than its share of the global batch, else down (arXiv 2408.15664); DeepSeek-V3
    uses 0.001; 0: the bias does not change."""

    terms: dict[str, dict[str, Any] | None] = {}
    """Terms of extensions that are added to the loss: {NAME: {coefficient: 0.1, OPTION: VALUE}}; see
    docs/own_loss.md."""

    @model_validator(mode="after")
    def known_terms(self):
        check_entries("terms", LOSS_TERMS, self.terms)
        return self


class Cadence(Section):
    every_steps: Count | None = None
    """At multiples of this many steps. If neither this nor every_tokens is set: validation and checkpoints only at the
    end of the run, no samples, no benchmarks."""
    every_tokens: Count | None = None
    """The same in training tokens, instead of every_steps."""

    @model_validator(mode="after")
    def at_most_one_cadence(self):
        if self.every_steps and self.every_tokens:
            raise ValueError("give every_steps or every_tokens, not both")
        return self


class Validation(Cadence):
    """Without every_steps or every_tokens: only at the end of the run."""

    sequences: Count = 512
    """Sequences per source: a fixed set, spread evenly over the split."""


class Samples(Cadence):
    """Without every_steps or every_tokens: no samples."""

    prompts: Annotated[list[str], Field(min_length=1)] = [""]
    """Prompts for the model to continue; an empty prompt starts a new document."""
    max_new_tokens: Count = 64
    """Maximum tokens of each sample."""
    temperature: NonNegativeFloat = 0.8
    """Sampling temperature; 0: greedy decoding."""
    top_k: Count | None = None
    """Sample from the k most likely tokens; null: all."""
    top_p: PositiveFraction | None = None
    """Sample from the fewest tokens whose probabilities reach this sum; null: all."""


class Diagnostics(Cadence):
    """RMS of activations, weights, gradients and updates, largest attention logits and units that are off, by layer;
    without every_steps or every_tokens: none."""


class Benchmarks(Cadence):
    """Benchmarks during training; without every_steps or every_tokens: none."""

    tasks: Annotated[Names, Field(min_length=1)] = ["base"]
    """Tasks of lm-evaluation-harness, as evaluate.py takes them; sets: base, for models below 1B small, and core."""
    where: Literal["background", "blocking", "in_loop"] = "background"
    """background: in a separate process while training continues. blocking: training waits for it. in_loop: on all
    training processes, by the model as it is; tasks that score answers by their likelihood."""
    device: Annotated[str, Field(pattern=r"^(cpu|cuda:[0-9]+)$")] = "cpu"
    """cpu, or cuda:7, a GPU that the training leaves free (or shares, with where: blocking); not used in_loop."""
    limit: PositiveFloat | None = None
    """Documents per task; null: all."""
    include_path: Path | None = None
    """Folder with your own task .yaml files."""
    eval_bundle: Path | None = None
    """Folder of DCLM's evaluation bundle, with the tasks of `core`; see docs/benchmarks.md."""


class Checkpoint(Cadence):
    """Without every_steps or every_tokens: only at the end of the run."""

    keep_last: Count = 3
    """Number of most recent checkpoints to keep."""
    keep_best: CountFromZero = 0
    """Number of best checkpoints by validation loss to keep."""
    keep_every: Count | None = None
    """Checkpoints at multiples of this many steps are never deleted."""
    stop_at_step: Count | None = None
    """Save and stop after this step, on the schedule of the whole run; a later step, or null, continues."""
    save_final: bool = True
    """false: the run ends without a last checkpoint and without final/, for benchmarks."""
    async_save: bool = True
    """Keep training while a checkpoint is written; needs CPU memory for a copy of weights and optimizer."""
    mirror: str | None = None
    """Folder or URL (s3://..., hf://buckets/...) where a copy of the run is kept, under the name of `output`; a start
    without checkpoints resumes from it. See docs/spot.md."""
    mirror_wait_seconds: Annotated[NonNegativeFloat, Field(le=1500)] = 300.0
    """Maximum time that the end of the run waits for the mirror, and a start that needs it."""


class Guard(Section):
    """Detection of bad steps and hangs, and the response; see docs/failures.md."""

    loss_window: Count = 128
    """Number of recent losses that a new loss is compared with."""
    spike_warn_factor: FactorAboveOne = 2.0
    """A loss above this multiple of their mean is reported as a spike."""
    spike_factor: FactorAboveOne = 3.0
    """A loss above this multiple of their mean triggers a rollback (see patience)."""
    spike_sigma: PositiveFloat = 6.0
    """So does a loss this many standard deviations above their mean, if it is also 10% above it."""
    patience: Count = 3
    """Roll back after this many such steps, or steps with non-finite gradients, in a row."""
    on_spike: Literal["skip_data", "halve_learning_rate", "off"] = "skip_data"
    """What changes after a rollback: the data of those steps is skipped, or the learning rate is halved. off: stop
    instead of rolling back."""
    rollback_steps: CountFromZero = 100
    """Roll back to a checkpoint at least this many steps before the first bad step, if there is one."""
    max_rollbacks: CountFromZero = 3
    """Maximum number of rollbacks; the next one stops the run with exit status 16."""
    alert_grad_norm: PositiveFloat = 100.0
    """Gradient norms above this are reported."""
    divergence_threshold: PositiveFloat = 1.0
    """Report divergence when the mean loss of the last 16 steps exceeds that of the last 256 by this many nats."""
    on_divergence: Literal["warn", "stop"] = "warn"
    """stop: exit status 16."""
    throughput_drop: PositiveFraction = 0.3
    """Report throughput that is this fraction below the run's median."""
    step_timeout_seconds: PositiveFloat = 300.0
    """A micro-step, or an update, that takes longer counts as a hang: the stacks of all processes are written and the
    run exits for a restart."""
    first_step_timeout_seconds: PositiveFloat = 1800.0
    """The timeout within the first step, which compiles kernels."""
    replica_check_every_steps: Count = 1000
    """How often to compare the replicas of the weights bit by bit."""


class Logging(Section):
    every_steps: Count = 10
    """Log every N steps; only these steps wait for the device."""


class Energy(Section):
    carbon_grams_per_kwh: NonNegativeFloat | None = 473.0
    """CO2 equivalent of a kilowatt-hour, in grams; null: unknown, and only energy is reported. 473: the world in 2024
    (Ember, Global Electricity Review 2025)."""


class Export(Section):
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Dtype of the weights in final/."""
    weights: Literal["raw", "average"] = "raw"
    """The weights in final/: as trained, or their average."""


class Publish(Section):
    license: str | None = None
    """The model's license as a Hub ID, such as apache-2.0; required for publishing."""
    language: Names = []
    """Languages of the text, ISO 639 codes."""


class Hub(Section):
    """Uploads to the Hub during training, in a separate process; see docs/publish.md."""

    repository: str | None = None
    """owner/name; null: no uploads."""
    every: Literal["milestones", "end"] = "end"
    """milestones: each checkpoint that checkpoint.keep_every keeps, and final/ at the end. end: only final/."""
    private: bool = True
    """Create the repository as private."""


class Tracking(Section):
    """Where trackers file the run, and under which name; see docs/trackers.md for what each of them accepts."""

    project: str | None = None
    """Project, or experiment; null: the environment's WANDB_PROJECT (for other trackers their own variable first),
    else groundwork."""
    entity: str | None = None
    """Team, user or workspace that the project belongs to; null: your account's."""
    name: str | None = None
    """Name of the run; null: that of its folder."""
    tags: Names = []
    """Tags of the run."""
    group: str | None = None
    """Name under which runs are grouped."""


class ModelSource(BaseModel):
    """A model's configuration, and the recipe's changes to it.

    Keys other than `config` belong to the architecture, so they are checked with the JSON (model/model_config.py).
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
                "a model's .json file, folder or Hub id is needed, or a mapping {config: FILE, num_hidden_layers: 8} "
                f"(got {shortened(repr(value), 60)})"
            )
        if not isinstance(value.get("config"), str):
            raise ValueError(
                "config is needed next to the keys that change it: a model's .json file, folder or Hub id (got "
                f"{shortened(repr(value.get('config')), 60)})"
            )
        return value

    @property
    def changes(self) -> dict[str, Any]:
        """{key of the model's configuration: its value in this run}."""
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
    """Architecture: a JSON file in model_configs/, a folder with a config.json, or a Hub ID. `model.KEY` changes one
    of its keys: --model.num_hidden_layers 8, --model.vocab_size auto (the tokenizer's size); in a recipe {config:
    FILE, num_hidden_layers: 8}."""
    extensions: Names = []
    """Python files of your own that register optimizers, schedules, loss terms, trackers; see docs/own_ideas.md."""
    trust_remote_code: bool = False
    """Run the code in the model's folder that auto_map in its config.json names; see docs/own_code.md."""
    init: Literal["scratch", "pretrained"] = "scratch"
    """pretrained: continue from the weights of `model`."""
    output: Path
    """Folder of the run. Running the same command again resumes it. A URL, such as s3://BUCKET/runs/NAME: the run
    lives there, and runs/NAME is its folder on this machine (`checkpoint.mirror` becomes s3://BUCKET/runs)."""
    branch_from: str | None = None
    """RUN@STEP: start from that checkpoint of another run and decay the learning rate from there to the end."""
    seed: CountFromZero = 42
    """Seed for initial weights, data order and dropout."""
    deterministic: bool = False
    """Use only deterministic kernels: on a GPU too, the same run gives the same bits, at some cost in speed. If torch
    lacks one, the first step fails and names the operator. CPU kernels are deterministic anyway."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "bf16"
    """Precision of forward and backward; weights and optimizer stay in fp32. auto: bf16 if the device has it;
    else fp32, or fp16 on GPUs with fp16 tensor cores, under single and ddp."""
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
    """Attention implementation; auto: the fastest that is correct for the model, device and document_mask."""
    compile: Literal["auto", "none", "regional", "full"] = "auto"
    """torch.compile: regional compiles one layer and reuses it; full compiles the whole model (single and ddp); auto
    is full for at most four layers in one process on a CPU, else regional."""
    activation_checkpointing: Checkpointing = "none"
    """full: keep only each layer's input and recompute the rest in the backward pass. A share, such as 50% or 0.5: do
    so in that share of the layers, spread evenly; each costs a third of its time and frees its activations.
    {memory_budget: 0.5}: keep half of the activations in every compiled layer; the compiler recomputes the cheapest
    operations."""
    validation: Validation = Validation()
    checkpoint: Checkpoint = Checkpoint()
    samples: Samples = Samples()
    diagnostics: Diagnostics = Diagnostics()
    benchmarks: Benchmarks = Benchmarks()
    logging: Logging = Logging()
    guard: Guard = Guard()
    interval_scale: PositiveFloat = 1.0
    """Multiplier for the intervals of logging, validation and checkpoints."""
    energy: Energy = Energy()
    export: Export = Export()
    publish: Publish = Publish()
    hub: Hub = Hub()
    trackers: Names = []
    """Where to send metrics in addition to metrics.jsonl and the console, by accelerate's names: wandb, tensorboard,
    trackio, mlflow, comet_ml, swanlab, clearml, aim, dvclive."""
    tracking: Tracking = Tracking()

    @model_validator(mode="before")
    @classmethod
    def extensions_first(cls, values: Any) -> Any:
        """Loads the extensions, before what they register is looked up."""
        files = parse_names(values.get("extensions") or []) if isinstance(values, dict) else []
        if isinstance(files, list):
            load_extensions(map(str, files))
        return values

    @model_validator(mode="before")
    @classmethod
    def group_was_beside_trackers(cls, values: Any) -> Any:
        """Reads recipes and runs from before `tracking`."""
        if not isinstance(values, dict) or "group" not in values:
            return values
        group = values["group"]
        tracking = values.get("tracking") or {}
        rest = {key: value for key, value in values.items() if key != "group"}
        if group is None or not isinstance(tracking, dict):
            return rest
        if tracking.get("group", group) != group:
            raise ValueError("group is tracking.group now, and both are given: leave out group")
        return {**rest, "tracking": {**tracking, "group": group}}

    @model_validator(mode="before")
    @classmethod
    def lives_at_url(cls, values: Any) -> Any:
        """Reads an `output` that is a URL as the run's mirror, and a folder of that name here."""
        output = values.get("output") if isinstance(values, dict) else None
        if not isinstance(output, str) or not is_url(output):
            return values
        home, _, name = output.rstrip("/").rpartition("/")
        if not name or home.endswith(":/"):
            raise ValueError(f"output: {output}: give a place and the run's name, as in s3://BUCKET/runs/NAME")
        checkpoint = values.get("checkpoint") or {}
        if not isinstance(checkpoint, dict):
            return values
        if checkpoint.get("mirror") not in (None, home):
            raise ValueError(f"output: {output}: is where the run lives, so leave out checkpoint.mirror")
        return {**values, "output": f"runs/{name}", "checkpoint": {**checkpoint, "mirror": home}}

    @model_validator(mode="after")
    def tell_model_of_trust(self):
        self.model._trusts_code = self.trust_remote_code
        return self

    def with_batch(self, **settings: Any) -> "RunConfig":
        """Returns the same run with these settings of its batch."""
        return self.model_copy(update={"batch": self.batch.model_copy(update=settings)})

    def as_stage(self, number: int) -> "RunConfig":
        """Returns the run as if that stage, with its sequences and micro-batch, were the whole run."""
        length = self.data.windows[number].sequence_length
        stage = CurriculumStage(train=self.data.mixtures[number].train)
        data = self.data.model_copy(update={"train": None, "stages": [stage], "sequence_length": length})
        sequences = max(1, self.batch.sequences_per_micro_batch * self.data.sequence_length // length)
        return self.model_copy(update={"data": data}).with_batch(sequences_per_micro_batch=sequences)
