"""Makes a recipe for a budget in hours, dollars or FLOPs, and reports each choice as a table and in the recipe.

Chooses the model size, token count, batch size and strategy. Starts with the best size at the assumed MFU, then tries
smaller sizes as long as they are better at their planned speed.
"""

import functools
import math
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pretrain.config import MOST, Budget, Optim, RunConfig
from pretrain.data.vocabulary import planned_model_config
from pretrain.errors import InputError
from pretrain.model.model_config import padded_vocabulary
from pretrain.optim.scaling_laws import scaling_law_batch
from pretrain.terminal import say
from pretrain.training.auto_settings import resolve_auto
from pretrain.units import count_text, duration_text
from pretrain_tools.planning.candidates import (
    Candidate,
    Case,
    auto_precision,
    command_of,
    consider,
    reason_of,
    recommend,
    search_checkpointing,
    work_of_run,
)
from pretrain_tools.planning.families import FAMILIES, Family, Shape
from pretrain_tools.planning.judgement import FEWEST_STEPS
from pretrain_tools.planning.memory import PlannedRun
from pretrain_tools.planning.plan_options import BudgetRequest
from pretrain_tools.planning.sizing import MOST_EPOCHS, best_shape, nearest_shape
from pretrain_tools.planning.step_time import Hardware, RunWork, mfu_of_size
from pretrain_tools.planning.texts import MADE_BY, RecipePlace, as_comment, lines_of, render

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
SAVES = 10
"""Minimum number of checkpoints and validations per run. They are at most SECONDS_BETWEEN_SAVES apart."""
SECONDS_BETWEEN_SAVES = 1800
SHARE_FOR_VALIDATION = 0.02
"""Validation FLOPs as a fraction of the training FLOPs."""


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
    def optim(self) -> Optim:
        """Muon's `auto` settings for this model, batch size and number of tokens."""
        optim = Optim(name="muon", learning_rate="auto", weight_decay="auto", warmup_steps="auto")
        update = {"budget": Budget(tokens=self.tokens), "optim": optim}
        return resolve_auto(self.config.model_copy(update=update), processes=1).optim


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
        case = case.changed(batch=run.config.with_batch(sequences_per_micro_batch=best.micro_batch).batch)
    return Sized(budget, shape, case, candidates, best)


@functools.cache
def scratch() -> tempfile.TemporaryDirectory:
    """Creates a temporary folder for model JSONs, because strategies read a recipe's model from a file."""
    return tempfile.TemporaryDirectory()


def planned_run(budget: RunBudget, shape: Shape) -> PlannedRun:
    """Creates a shape's run with at most ENOUGH_TOKENS per micro-batch.

    Raises InputError if the budget allows more tokens than a recipe.
    """
    hardware = budget.hardware
    is_cpu = hardware.device_type == "cpu"
    tokens = budget.tokens_at_mfu(shape)
    if tokens > MOST:
        raise InputError(
            f"budget: {budget.in_words()} allows {tokens:.3g} tokens, but the maximum is {MOST:.3g}; use a smaller "
            "budget"
        )
    model = Path(scratch().name, f"{shape.family.name}_{shape.layers}_{shape.width}_{shape.vocabulary}.json")
    model.write_text(shape.json_text)
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
            # A placeholder. `Sized.optim` depends on the number of tokens.
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


def recipe_of_budget(
    request: BudgetRequest, hardware: Hardware, command: str, predict: Callable[..., Any] | None = None
) -> None:
    """Chooses a run, writes its recipe if requested, and prints the result.

    Args:
        command: the user's command, which becomes the recipe's first line.
        predict: `Ladder.predict` of the ladder passed with --ladder.

    Raises InputError if no model fits the budget.
    """
    options = request.options
    hours = options.hours
    if options.dollars:
        hours = options.dollars / hardware.gpus / hardware.gpu.price_per_hour
    budget = RunBudget(
        hardware=hardware,
        family=FAMILIES[options.family or "llama"],
        vocabulary=padded_vocabulary(request.vocabulary),
        hours=hours,
        flops=options.flops,
        unique_tokens=request.unique_tokens,
        tokens_per_parameter=options.tokens_per_parameter,
        mfu=options.mfu,
    )
    run = choose_run(budget)
    expected = predict and predict(str(options.ladder), run.work.non_embedding, run.tokens)
    reasons = choices(run, expected)
    if warning := unusual_ratio(run):
        reasons.append(f"warning: {warning}")
    place = request.place
    # Enough data for one epoch and validation.
    preparation = (
        f"python prepare_data.py --input 'mine/*.jsonl' --tokenizer {shlex.quote(place.tokenizer or 'TOKENIZER')} "
        f"--max_tokens {math.ceil(1.02 * run.tokens / 1e6)}M --validation_fraction 0.01 "
        f"--output {shlex.quote(str(place.shards))}"
    )
    launch = command_of(run.best, str(place.recipe), [], hardware, run.config)
    lines = ["To write the recipe and the model's JSON, pass --write recipes/mine.yaml."]
    if options.write:
        commands = {"command": command, "preparation": preparation, "launch": launch}
        place.write(run.shape.json_text, recipe_text(run, reasons, place, **commands))
        lines = [
            f"Wrote {place.model} and {place.recipe}",
            *([] if place.is_prepared else [f"Prepare the data:\n  {preparation}"]),
            f"Check the recipe:\n  python train.py --config {shlex.quote(str(place.recipe))} --check",
            f"Start the run:\n  {launch}",
        ]
    say("\n".join(reasons))
    # Paths and commands must stay on one line, so that they can be pasted.
    print("", *lines, sep="\n")


def choices(run: Sized, expected: Any) -> list[str]:
    """Lists every choice with its reason. expected: the predicted loss, or None."""
    lines = lines_of(
        "choices.j2",
        "choices",
        run,
        reason_of(run.best, run.candidates),
        expected=expected,
        enough_tokens=ENOUGH_TOKENS,
        seconds_to_start=SECONDS_TO_START,
        share_for_steps=SHARE_FOR_STEPS,
    )
    rows = (line.split(" | ", 2) for line in lines)
    return [f"{name:<14} {value}: {reason}" for name, value, reason in rows]


def recipe_text(run: Sized, reasons: list[str], place: RecipePlace, **commands: str) -> str:
    """Formats the recipe with a comment for each choice."""
    # In long runs, a crash should cost at most half an hour.
    every = max(1, min(run.steps // SAVES, round(SECONDS_BETWEEN_SAVES / run.best.step_seconds)))
    sequences = SHARE_FOR_VALIDATION * every * run.batch * 3 / run.shape.sequence_length
    return render(
        "budget.yaml.j2",
        made_by=MADE_BY,
        place=place,
        reasons=as_comment(reasons),
        run=run,
        every=every,
        validation_sequences=int(min(max(sequences, 4), 512)),
        **commands,
    )
