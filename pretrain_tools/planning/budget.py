"""Chooses the model size, token count, batch size and strategy for a budget in hours, dollars or FLOPs.

Starts with the best size at the assumed MFU, then tries smaller sizes as long as they are better at their planned
speed.
"""

import functools
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from pretrain.config import RunConfig
from pretrain.data.vocabulary import planned_model_config
from pretrain.errors import InputError
from pretrain.optim.optimizers import OPTIMIZERS
from pretrain.optim.scaling_laws import scaling_law_batch, scaling_law_warmup, scaling_law_weight_decay
from pretrain.units import count_text, duration_text
from pretrain_tools.planning.candidates import (
    Candidate,
    Case,
    auto_precision,
    consider,
    recommend,
    search_checkpointing,
    work_of_run,
)
from pretrain_tools.planning.families import Family, Shape
from pretrain_tools.planning.judgement import FEWEST_STEPS
from pretrain_tools.planning.memory import Memory, PlannedRun
from pretrain_tools.planning.sizing import MOST_EPOCHS, best_shape, nearest_shape
from pretrain_tools.planning.step_time import Hardware, RunWork, mfu_of_size

SHARE_FOR_STEPS = {"cuda": 0.95, "cpu": 0.85}
"""Fraction of the time spent on training steps. The rest is for validation and checkpoints."""
SECONDS_TO_START = {"cuda": 60.0, "cpu": 5.0}
"""Startup time in seconds, including compilation."""
LARGEST_BATCH_CHOSEN = 2**22
"""Maximum tokens per step, as in Llama."""
ENOUGH_TOKENS = {"cuda": 16_384, "cpu": 1024}
"""Target number of tokens per micro-batch. Larger matmuls are barely faster."""
COMPARED = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3", "hsdp", "tp", "pp", "ep")
"""Strategies to compare. Offloading is a last resort and depends on the machine's memory and disk."""
COMPUTE_OPTIMAL = 20.0
"""Tokens per parameter (Hoffmann et al., arXiv 2203.15556)."""
FAR_FROM_ASKED = 2.5
"""A warning appears if the tokens per parameter differ from the requested ratio by more than this factor."""


@dataclass(frozen=True)
class RunBudget:
    """A run's time or compute budget, with the requested model family and data."""

    hardware: Hardware
    family: Family
    vocabulary: int
    """Number of rows in the embedding."""
    hours: float | None = None
    flops: float | None = None
    """Training FLOPs. Exactly one of `hours` and `flops` is set."""
    unique_tokens: float = math.inf
    """Number of tokens in the data."""
    tokens_per_parameter: float | None = None
    """Requested ratio, or None to use the scaling law."""
    mfu: float | None = None
    """Requested MFU, or None to assume one for each size."""

    @property
    def seconds(self) -> float:
        """Seconds available for training steps."""
        kind = self.hardware.device_type
        return SHARE_FOR_STEPS[kind] * 3600 * self.hours - SECONDS_TO_START[kind]

    @property
    def precision(self) -> str:
        return auto_precision(self.hardware.gpu)

    @property
    def shapes(self) -> list[Shape]:
        """The family's models with this vocabulary size, smallest first."""
        return [Shape(*rung, self.vocabulary, self.family) for rung in self.family.rungs]

    def mfu_of(self, shape: Shape) -> float:
        return self.mfu or mfu_of_size(shape.active, self.hardware.device_type, self.hardware.gpu.bf16_flops)

    def tokens(self, shape: Shape, tokens_per_second: float) -> float:
        """Returns the number of training tokens that the budget allows, up to MOST_EPOCHS of the data."""
        affordable = self.flops / shape.flops_per_token if self.flops else self.seconds * tokens_per_second
        return min(affordable, MOST_EPOCHS * self.unique_tokens)

    def tokens_at_mfu(self, shape: Shape) -> float:
        """Returns the number of training tokens at the assumed MFU, ignoring communication."""
        flops = self.hardware.gpus * self.hardware.gpu.bf16_flops * self.mfu_of(shape)
        return self.tokens(shape, flops / shape.flops_per_token)

    def best(self, tokens: dict[Shape, float]) -> Shape:
        """Chooses the shape nearest to the requested tokens per parameter (default 20).

        If no ratio is requested and the data would repeat, uses the scaling law for repeated data.
        """
        nearest = nearest_shape(tokens, self.tokens_per_parameter or COMPUTE_OPTIMAL)
        if self.tokens_per_parameter or tokens[nearest] <= self.unique_tokens:
            return nearest
        return best_shape(tokens, self.unique_tokens)

    def in_words(self) -> str:
        given = f"{self.flops:.3g} FLOPs" if self.flops else duration_text(3600 * self.hours)
        return f"{given} on {self.hardware.gpus} x {self.hardware.gpu.name}"


@dataclass(frozen=True)
class Sized:
    """A planned run of one shape within a budget."""

    budget: RunBudget
    shape: Shape
    case: Case
    """The recipe, with the best strategy's settings."""
    candidates: list[Candidate]
    """One candidate per strategy."""
    best: Candidate | None
    """The recommended candidate; None if nothing fits."""

    @property
    def work(self) -> RunWork:
        return self.case.work

    @property
    def config(self) -> RunConfig:
        return self.case.run.config

    @property
    def memory(self) -> Memory:
        """Peak memory over all processes."""
        return self.case.memory(self.best.layout, self.best.micro_batch)

    @property
    def batch(self) -> int:
        return self.work.tokens_per_step

    @property
    def tokens_per_second(self) -> float:
        return self.batch / self.best.step_seconds if self.best else 0.0

    @property
    def affordable(self) -> float:
        """Number of training tokens that the budget allows at the planned speed; 0 if nothing fits."""
        return self.budget.tokens(self.shape, self.tokens_per_second) if self.best else 0.0

    @property
    def steps(self) -> int:
        return int(self.affordable / self.batch)

    @property
    def tokens(self) -> int:
        return self.steps * self.batch

    @property
    def billed_hours(self) -> float:
        """Duration in hours, including startup, validation and checkpoints."""
        kind = self.budget.hardware.device_type
        hours = self.steps * self.best.step_seconds / 3600
        return (hours + SECONDS_TO_START[kind] / 3600) / SHARE_FOR_STEPS[kind]

    @property
    def cost(self) -> float:
        """Cost in US dollars."""
        return self.billed_hours * self.budget.hardware.gpus * self.budget.hardware.gpu.price_per_hour

    @property
    def mfu(self) -> float:
        """Effective MFU, including the overhead of communication and recomputation."""
        hardware = self.budget.hardware
        return self.tokens_per_second * self.work.flops_per_token / (hardware.gpus * hardware.gpu.bf16_flops)

    @property
    def learning_rate(self) -> float:
        return float(f"{OPTIMIZERS['muon'].auto_learning_rate(self.work.sizes.total, self.batch):.3g}")

    @property
    def weight_decay(self) -> float:
        decay = scaling_law_weight_decay(self.work.sizes.total, self.tokens, self.batch, self.learning_rate)
        return float(f"{decay:.2g}")

    @property
    def warmup_steps(self) -> int:
        return scaling_law_warmup(self.work.sizes.total, self.tokens, self.batch)


def choose_run(budget: RunBudget) -> Sized:
    """Chooses the model size and strategy. Raises InputError if no model fits the budget."""
    found: dict[Shape, Sized] = {}
    chosen = None
    for shape in reversed(shapes_within(budget)):
        found = {shape: size(budget, shape), **found}
        # Avoids zero tokens. refuse_few_steps reports runs that are too short.
        tokens = {shape: max(sized.affordable, 1.0) for shape, sized in found.items() if sized.best}
        if tokens:
            chosen = found[budget.best(tokens)]
        # Stop when a smaller size is no longer better.
        if chosen and chosen.shape != shape:
            break
    if chosen is None:
        raise InputError(
            f"budget: no {budget.family.name} model fits on {budget.hardware.gpus} x {budget.hardware.gpu.name}, not "
            f"even the smallest ({count_text(shape.parameters)} parameters with a vocabulary of "
            f"{budget.vocabulary:,}); use GPUs with more memory or a smaller vocabulary"
        )
    refuse_few_steps(chosen)
    return chosen


def shapes_within(budget: RunBudget) -> list[Shape]:
    """Lists the shapes up to the best one at the assumed MFU, smallest first.

    Raises InputError if the budget is shorter than startup.
    """
    if budget.hours is not None and budget.seconds <= 0:
        start = SECONDS_TO_START[budget.hardware.device_type]
        raise InputError(
            f"budget: {budget.in_words()} is too short, because startup alone takes about {start:.0f} s; use a larger "
            "budget"
        )
    shapes = budget.shapes
    tokens = {shape: budget.tokens_at_mfu(shape) for shape in shapes}
    return shapes[: shapes.index(budget.best(tokens)) + 1]


def unusual_ratio(sized: Sized) -> str | None:
    """Returns a warning if no model has about the requested number of tokens per parameter."""
    budget = sized.budget
    asked = budget.tokens_per_parameter or COMPUTE_OPTIMAL
    ratio = sized.tokens / sized.shape.active
    shapes = budget.shapes
    if ratio > FAR_FROM_ASKED * asked:
        which = f"this is the largest {budget.family.name} model"
        remedy = "use a smaller budget"
        if sized.shape != shapes[-1]:
            which = "larger models don't fit in memory"
            remedy = "use more GPUs or GPUs with more memory"
        return (
            f"{ratio:,.0f} tokens per parameter are far more than {asked:g}, because {which}; {remedy}, or pass "
            f"--tokens_per_parameter {ratio:.0f} if you want to train this model for so long"
        )
    if ratio < asked / FAR_FROM_ASKED and sized.shape == shapes[0]:
        return (
            f"{ratio:.3g} tokens per parameter are far fewer than {asked:g}, because this is the smallest "
            f"{budget.family.name} model; use a larger budget, more data or a smaller vocabulary"
        )
    return None


def refuse_few_steps(sized: Sized) -> None:
    """Raises InputError if the run has fewer than FEWEST_STEPS steps."""
    if sized.steps >= FEWEST_STEPS:
        return
    budget = sized.budget
    shape = sized.shape
    remedy = "use a larger budget, fewer GPUs or a smaller vocabulary"
    if budget.unique_tokens * MOST_EPOCHS <= sized.affordable:
        remedy = f"add more text to the data, which contains only {count_text(budget.unique_tokens)} tokens"
    raise InputError(
        f"budget: {budget.in_words()} allows only {sized.steps:,} steps of {sized.batch:,} tokens with the best "
        f"model size ({budget.family.name} {shape.layers} x {shape.width}, {count_text(shape.parameters)} "
        f"parameters). A model learns little in fewer than {FEWEST_STEPS} steps; {remedy}"
    )


def size(budget: RunBudget, shape: Shape) -> Sized:
    """Plans a shape's run and picks the recommended strategy."""
    run = planned_run(budget, shape)
    # Use the shape's FLOPs, like `RunBudget.tokens`.
    work = replace(work_of_run(run.config, run.model_config), flops_per_token=shape.flops_per_token)
    case = Case(run, work, budget.hardware, budget.mfu_of(shape))
    candidates = [consider(name, case) for name in COMPARED]
    best = recommend(candidates)
    if changed := search_checkpointing(case, candidates):
        case, candidates, best = changed
    if best is not None:
        case = case.with_batch(sequences_per_micro_batch=best.micro_batch)
    return Sized(budget, shape, case, candidates, best)


@functools.cache
def scratch() -> tempfile.TemporaryDirectory:
    """Creates a temporary folder for model JSONs, because strategies read a recipe's model from a file."""
    return tempfile.TemporaryDirectory()


def planned_run(budget: RunBudget, shape: Shape) -> PlannedRun:
    """Creates a shape's run with at most ENOUGH_TOKENS per micro-batch."""
    hardware = budget.hardware
    is_cpu = hardware.device_type == "cpu"
    model = Path(scratch().name, f"{shape.family.name}_{shape.layers}_{shape.width}_{shape.vocabulary}.json")
    model.write_text(shape.json_text)
    tokens = budget.tokens_at_mfu(shape)
    batch = batch_of(budget, shape, tokens)
    enough = ENOUGH_TOKENS[hardware.device_type] // shape.sequence_length
    micro_batch = max(1, min(enough, batch // (hardware.gpus * shape.sequence_length)))
    config = RunConfig.model_validate(
        {
            "model": str(model),
            "output": "run",
            "precision": budget.precision,
            "data": {"train": [{"shards": "shards"}], "sequence_length": shape.sequence_length},
            "budget": {"tokens": max(1, int(tokens))},
            "batch": {"tokens_per_step": batch, "sequences_per_micro_batch": micro_batch},
            # A placeholder. `Sized.learning_rate` depends on the batch.
            "optim": {"name": "muon", "learning_rate": 1e-3},
            "compile": "none" if is_cpu else "regional",
        }
    )
    model_config = planned_model_config(config)
    return PlannedRun(config, model_config, budget.precision, hardware.device_type, hardware.gpu.memory_bytes)


def batch_of(budget: RunBudget, shape: Shape, tokens: float) -> int:
    """Chooses the tokens per step with the scaling law: a power of two times one sequence per GPU."""
    one_each = budget.hardware.gpus * shape.sequence_length
    wanted = min(scaling_law_batch(tokens), LARGEST_BATCH_CHOSEN, tokens / FEWEST_STEPS)
    return one_each * 2 ** max(0, round(math.log2(max(wanted, 1) / one_each)))
