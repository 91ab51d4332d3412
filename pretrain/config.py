"""The run config: every setting of a run, typed, documented and frozen. recipe.py reads it from YAML and argv.

A recipe is whole: no inheritance, no interpolation, so `diff` of two recipes is the experiment.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from pretrain.units import parse_count


def parse_fraction(value: Any) -> Any:
    """'20%' -> 0.2; numbers stay."""
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            return float(value.strip()[:-1]) / 100
        except ValueError:
            return value
    return value


def parse_names(value: Any) -> Any:
    """'base' -> ['base'], 'a,b' -> ['a', 'b']; lists stay."""
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


def refuse_boolean(value: Any) -> Any:
    """Python counts with true and false, so that `every_steps: true` would be every step."""
    if isinstance(value, bool):
        raise ValueError(f"a number is needed here, not true or false (got {str(value).lower()})")
    return value


MOST = 10**18
"""No count of a run is larger: a thousand times the tokens of the largest corpora, and far within 64 bits."""

NotBoolean = BeforeValidator(refuse_boolean)
Count = Annotated[int, BeforeValidator(parse_count), NotBoolean, Field(ge=1, le=MOST)]
# 2k of context is 2,048 tokens and a batch of 512k is 2^19 tokens to everyone in the field; 2k steps are 2,000.
BinaryCount = Annotated[
    int, BeforeValidator(lambda value: parse_count(value, thousand=1024)), NotBoolean, Field(ge=1, le=MOST)
]
CountFromZero = Annotated[int, BeforeValidator(parse_count), NotBoolean, Field(ge=0, le=MOST)]
Fraction = Annotated[float, BeforeValidator(parse_fraction), NotBoolean, Field(ge=0, le=1)]
Names = Annotated[list[str], BeforeValidator(parse_names)]
PositiveFraction = Annotated[float, BeforeValidator(parse_fraction), NotBoolean, Field(gt=0, le=1)]
PositiveFloat = Annotated[float, NotBoolean, Field(gt=0)]
NonNegativeFloat = Annotated[float, NotBoolean, Field(ge=0)]
FactorAboveOne = Annotated[float, NotBoolean, Field(gt=1)]


class Section(BaseModel):
    # extra=forbid: a misspelt key is an error, not a default. frozen: the record that is saved is what ran.
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class Source(Section):
    shards: Path
    """Folder written by prepare_data.py; or nanoGPT's .bin or folder, or Megatron's .bin beside its .idx."""
    tokenizer: str | None = None
    """Of ids that others prepared: the folder or Hub id. A folder of prepare_data.py has its own."""
    weight: PositiveFloat = 1.0
    """Share of the training sequences drawn from here, relative to the other sources."""
    max_epochs: PositiveFloat | None = None
    """Stop drawing from here after so many passes; the other sources share what it leaves. null: no limit."""


class CurriculumStage(Section):
    train: Annotated[list[Source], Field(min_length=1)]
    """The mixture of this stage."""
    until: PositiveFraction | None = None
    """The stage ends at this part of the run, as 20% or 0.2; null in the last stage alone."""


class ValidationSource(Section):
    shards: Path
    """Folder written by prepare_data.py; or nanoGPT's .bin or folder, or Megatron's .bin beside its .idx."""
    tokenizer: str | None = None
    """Of ids that others prepared: the folder or Hub id. A folder of prepare_data.py has its own."""
    split: Literal["validation", "train"] = "validation"
    """Which of the folder's splits to measure."""


class Data(Section):
    train: Annotated[list[Source], Field(min_length=1)] | None = None
    """The mixture, for runs of one stage."""
    stages: Annotated[list[CurriculumStage], Field(min_length=1)] | None = None
    """A curriculum: mixtures one after the other. Instead of `train`."""
    validation: list[ValidationSource] | None = None
    """What validation measures; null: the validation split of every training folder that has one."""
    sequence_length: BinaryCount = 2048
    """Tokens per training sequence; 2k is 2,048."""
    document_mask: bool = True
    """Tokens attend within their own document only, however documents are packed into sequences."""
    sampling: Literal["epochs", "random_windows"] = "epochs"
    """epochs: every window once per pass, in a seeded order. random_windows: windows at random offsets."""

    @property
    def mixtures(self) -> list[CurriculumStage]:
        """The stages of the run; a plain mixture is a run of one stage."""
        return self.stages or [CurriculumStage(train=self.train)]

    @model_validator(mode="after")
    def one_way_to_mix(self):
        if (self.train is None) == (self.stages is None):
            raise ValueError("give either train (one mixture) or stages (a curriculum)")
        ends = [stage.until for stage in self.mixtures]
        inner = ends[:-1]
        if None in inner or inner != sorted(set(inner)) or ends[-1] not in (None, 1.0) or 1.0 in inner:
            raise ValueError(f"stages[].until must rise, below 100%, with null or 100% in the last stage (got {ends})")
        return self


class Budget(Section):
    tokens_per_parameter: PositiveFloat | None = None
    """Training tokens per parameter, of a mixture of experts per active parameter; 20 is the compute-optimal ratio of
    Hoffmann et al. (arXiv 2203.15556)."""
    tokens: Count | None = None
    """Training tokens in all."""
    steps: Count | None = None
    """Optimizer steps in all."""

    @model_validator(mode="after")
    def one_budget(self):
        given = [name for name in ("tokens_per_parameter", "tokens", "steps") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                "give exactly one of tokens_per_parameter, tokens, steps"
                + (f" (got {', '.join(given)})" if given else "")
            )
        return self


class Ramp(Section):
    start: Annotated[PositiveFraction, Field(alias="from")] = 0.25
    """The first batch as a part of the full one: 1/2, 1/3, 1/4, ...; the batch grows in steps of this size."""
    over: PositiveFraction = 0.05
    """Part of the run's tokens over which the batch grows."""

    model_config = ConfigDict(serialize_by_alias=True)

    @model_validator(mode="after")
    def whole_levels(self):
        if abs(1 / self.start - round(1 / self.start)) > 1e-6 or self.start >= 1:
            raise ValueError(f"from must be 1/2, 1/3, 1/4, ... (got {self.start})")
        return self


class Batch(Section):
    tokens_per_step: BinaryCount
    """Global batch in tokens, whatever the number of processes; 512k is 2^19."""
    sequences_per_micro_batch: Count = 8
    """Sequences per forward pass and process: changes speed and memory, never results."""
    ramp: Ramp | None = None
    """Start with a smaller batch; null: the full batch from the first step."""


class Optim(Section):
    name: Literal["adamw", "adafactor", "muon", "adamw_8bit"] = "adamw"
    """The optimizer; see docs/schedules.md and pretrain/optim/optimizers.py."""
    learning_rate: PositiveFloat | Literal["auto"] | None = None
    """Peak learning rate, or auto: chosen from the number of parameters and the optimizer."""
    base_learning_rate: PositiveFloat | None = None
    """Peak learning rate for a global batch of one sequence; scaled by the square root of the global batch."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    """Applied to matrices only: never to embeddings, norms or biases."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Global gradient norm to clip at; null: no clipping."""
    stochastic_rounding: bool = False
    """adafactor only: parameters are kept in bf16 and updates are rounded up or down at random, without bias."""
    schedule: Literal["cosine", "linear", "constant", "wsd", "infinite"] = "cosine"
    """Learning rate over the run; see pretrain/optim/learning_rate.py."""
    warmup_steps: CountFromZero = 500
    """Steps of linear warmup to the peak."""
    final_ratio: Fraction = 0.1
    """Learning rate at the end of the decay, relative to the peak."""
    decay_fraction: PositiveFraction = 0.2
    """wsd: last part of the run, over which the learning rate decays."""
    decay_shape: Literal["linear", "cosine", "sqrt"] = "sqrt"
    """wsd: shape of the decay; sqrt is 1 - sqrt (arXiv 2405.18392)."""
    cooldown_fraction: PositiveFraction = 0.7
    """infinite: part of the run over which the learning rate falls from the peak to the constant rate."""
    min_cooldown_tokens: CountFromZero = 0
    """infinite: the cooldown takes at least so many tokens, however short the run."""
    constant_ratio: PositiveFraction = 0.536
    """infinite: the constant learning rate, relative to the peak."""
    anneal_fraction: Fraction = 0.0
    """infinite: last part of the run, over which the learning rate anneals to final_ratio."""

    @model_validator(mode="after")
    def one_learning_rate(self):
        if (self.learning_rate is None) == (self.base_learning_rate is None):
            raise ValueError("give either learning_rate (a number or auto) or base_learning_rate")
        if self.stochastic_rounding and self.name != "adafactor":
            raise ValueError(f"stochastic_rounding works with name: adafactor (got {self.name})")
        return self


class Pipeline(Section):
    """Read where a pipeline runs (accelerate_configs/pp.yaml) and nowhere else."""

    schedule: Literal["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"] = (
        "Interleaved1F1B"
    )
    """In which order microbatches go through the stages; see docs/pipeline.md. GPipe and 1F1B have one stage per
    process, the others two."""
    microbatch_scale: Count = 1
    """Pipeline microbatches per stage: more of them leave processes idle for less time, in smaller matrix products."""


class Loss(Section):
    backend: Literal["auto", "chunked", "chunked_compiled", "torch", "logits"] = "auto"
    """How the loss is computed from the last hidden states; see pretrain/model/loss.py."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of mean(logsumexp(logits)^2), which keeps logits from drifting (arXiv 2204.02311); 0: off."""
    router_balance: NonNegativeFloat | None = None
    """Mixtures of experts: coefficient of the loss that balances the experts over the global batch (arXiv 2501.11873);
    null: the model's own, such as router_aux_loss_coef."""
    router_z_loss: NonNegativeFloat | None = None
    """Mixtures of experts: coefficient of mean(logsumexp(router logits)^2) (ST-MoE, arXiv 2202.08906); null: the
    model's own router_z_loss_coef, else 0."""


class Cadence(Section):
    every_steps: Count | None = None
    every_tokens: Count | None = None

    @model_validator(mode="after")
    def at_most_one_cadence(self):
        if self.every_steps and self.every_tokens:
            raise ValueError("give every_steps or every_tokens, not both")
        return self


class Validation(Cadence):
    """Neither every_steps nor every_tokens: at the end of the run only."""

    sequences: Count = 512
    """Sequences per source: always the same ones, spread over the whole split."""


class Samples(Cadence):
    """Neither every_steps nor every_tokens: no samples."""

    prompts: Annotated[list[str], Field(min_length=1)] = [""]
    """Texts that the model continues; an empty one begins a document."""
    max_new_tokens: Count = 64
    temperature: PositiveFloat | None = 0.8
    """Tokens are drawn at this temperature; null: the likeliest token."""
    top_k: Count | None = None
    """Draw among so many of the likeliest tokens; null: all."""


class Evaluation(Cadence):
    """Benchmarks beside the training; neither every_steps nor every_tokens: none."""

    tasks: Annotated[Names, Field(min_length=1)] = ["base"]
    """Tasks of lm-evaluation-harness, as evaluate.py takes them."""
    where: Literal["background", "same"] = "background"
    """background: a process beside the training. same: training waits for it."""
    device: Annotated[str, Field(pattern=r"^(cpu|cuda:[0-9]+)$")] = "cpu"
    """cpu, or cuda:7, a GPU that the training leaves free (or shares, with where: same)."""
    limit: PositiveFloat | None = None
    """Documents per task; null: all."""
    include_path: Path | None = None
    """Folder of your own task .yaml files."""


class Checkpoint(Cadence):
    """Neither every_steps nor every_tokens: at the end of the run only."""

    keep_last: Count = 3
    """How many of the newest checkpoints stay."""
    keep_best: CountFromZero = 0
    """How many of the best by validation loss stay."""
    milestones_every: Count | None = None
    """Checkpoints at multiples of so many steps stay for ever."""
    in_background: bool = True
    """Training goes on while a checkpoint is written; costs the host's memory a copy of weights and optimizer."""


class Guard(Section):
    """What is watched, and what happens; see docs/failures.md."""

    window: Count = 128
    """Steps whose losses a new loss is compared with."""
    alert_above: FactorAboveOne = 2.0
    """A loss of more than so many times their mean is reported as a spike."""
    roll_back_above: FactorAboveOne = 3.0
    """A loss of more than so many times their mean is one to go back before."""
    roll_back_sigmas: PositiveFloat = 6.0
    """So is one of so many standard deviations above their mean, if it is also 10 % above it."""
    patience: Count = 3
    """So many such steps in a row, or steps whose gradient is not finite, and the run goes back."""
    roll_back: Literal["skip_data", "halve_learning_rate", "off"] = "skip_data"
    """What changes after going back: the data of those steps is left out, or the learning rate is halved. off: the run
    stops instead."""
    distance: CountFromZero = 100
    """Go back to a checkpoint at least so many steps before the first bad step, where there is one."""
    max_rollbacks: CountFromZero = 3
    """After so many rollbacks the next one is a stop, with exit status 16."""
    alert_grad_norm: PositiveFloat = 100.0
    """A gradient norm above this is reported."""
    divergence: PositiveFloat = 1.0
    """The average loss of the last 16 steps may be so many nats above that of the last 256."""
    on_divergence: Literal["warn", "stop"] = "warn"
    """stop: exit status 16."""
    speed_drop: PositiveFraction = 0.3
    """Tokens per second so far below the run's median are reported."""
    step_timeout_seconds: PositiveFloat = 300.0
    """A step that takes longer hangs: the stacks of all processes are written and the run ends, to be restarted."""
    first_step_timeout_seconds: PositiveFloat = 1800.0
    """The same for the first step, in which kernels are compiled."""
    compare_copies_every_steps: Count = 1000
    """Copies of the same weights on different processes are compared bit by bit."""


class Logging(Section):
    every_steps: Count = 10
    """Only these steps wait for the device."""


class Export(Section):
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Dtype of the model in final/."""


class Publish(Section):
    license: str | None = None
    """Licence of the model, by the Hub's name for it, such as apache-2.0; nothing is published without one."""
    language: Names = []
    """Languages of the text, ISO 639 codes."""


class Hub(Section):
    """What goes to the Hub while the run trains, in a process of its own; see docs/publishing.md."""

    repository: str | None = None
    """owner/name; null: nothing."""
    every: Literal["milestones", "end"] = "end"
    """milestones: each checkpoint that checkpoint.milestones_every keeps, and final/ at the end. end: final/ alone."""
    private: bool = True
    """Whether the repository is made private."""


class RunConfig(Section):
    model: str
    """Architecture: a JSON file in model_configs/, a folder with a config.json, or a Hub id."""
    init: Literal["scratch", "pretrained"] = "scratch"
    """pretrained: continue from the weights of `model`."""
    output: Path
    """Folder of the run. The same command again continues it."""
    branch_from: str | None = None
    """RUN@STEP: begin with that checkpoint of another run, and decay the learning rate from there to the end."""
    seed: CountFromZero = 42
    """Initial weights and the order of the data."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "bf16"
    """Arithmetic of forward and backward; weights and optimizer stay in fp32. auto: bf16 where the device has it."""
    data: Data
    budget: Budget = Budget(tokens_per_parameter=20)
    batch: Batch
    optim: Optim
    loss: Loss = Loss()
    pipeline: Pipeline = Pipeline()
    attention: Literal[
        "auto", "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "varlen"
    ] = "auto"
    """Attention kernel; auto: the fastest that the device and document_mask allow."""
    compile: Literal["none", "regional", "full"] = "regional"
    """torch.compile: regional compiles one layer and reuses it; full compiles the whole model (single and ddp)."""
    activation_checkpointing: Literal["none", "full"] = "none"
    """full: keep only each layer's input and recompute the rest in the backward pass."""
    validation: Validation = Validation()
    checkpoint: Checkpoint = Checkpoint()
    samples: Samples = Samples()
    evaluation: Evaluation = Evaluation()
    logging: Logging = Logging()
    guard: Guard = Guard()
    cadence: PositiveFloat = 1.0
    """Factor on the intervals of logging, validation and checkpoints."""
    export: Export = Export()
    publish: Publish = Publish()
    hub: Hub = Hub()
    trackers: list[Literal["wandb", "tensorboard", "trackio"]] = []
    """Where metrics go besides metrics.jsonl and the console."""
    group: str | None = None
    """Name under which trackers show several runs together."""
