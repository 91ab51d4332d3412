"""Chooses a run for hours, dollars or FLOPs: size, tokens, batch, and the fastest way to train it that fits.

Every size of a family near the one that the budget would buy at the assumed MFU is searched over strategies,
micro-batches and activation checkpointing; the size with the lowest expected loss is taken, at its own speed. Memory
of those sizes is scaled from one that is traced, so that a search takes seconds; the one chosen is traced itself.
"""

import functools
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pretrain.config import RunConfig
from pretrain.data.vocabulary import planned_model_config
from pretrain.errors import InputError
from pretrain.model.build import active_parameters, matrix_parameters
from pretrain.optim.optimizers import OPTIMIZERS
from pretrain.optim.scaling_laws import batch_by_law, warmup_by_law, weight_decay_by_law
from pretrain.parallel.registry import strategy_named
from pretrain.units import count_text, counted, duration_text
from pretrain_tools.planning.activations import Activations, ForwardPass, Line
from pretrain_tools.planning.candidates import (
    SIMPLEST_FIRST,
    Candidate,
    consider,
    micro_batches,
    planned_precision,
    reduced_once,
)
from pretrain_tools.planning.families import Family, Shape
from pretrain_tools.planning.footprints import footprint
from pretrain_tools.planning.judgement import FEWEST_STEPS
from pretrain_tools.planning.layouts import layout
from pretrain_tools.planning.memory import PlannedRun, sizes_of
from pretrain_tools.planning.sizing import MOST_EPOCHS, best_shape, expected_loss, nearest_shape
from pretrain_tools.planning.step_time import Hardware, RunWork, Speed, mfu_of_size

SHARE_FOR_STEPS = {"cuda": 0.95, "cpu": 0.85}
"""Share of the time given for steps; validation and checkpoints take the rest."""
SECONDS_TO_START = {"cuda": 60.0, "cpu": 5.0}
"""Seconds of a start, with compiling."""
LARGEST_BATCH_CHOSEN = 2**22
"""Tokens per step: those of Llama's training."""
ENOUGH_TOKENS = {"cuda": 16_384, "cpu": 1024}
"""Tokens of a micro-batch from which larger matmuls are hardly faster."""
ABOUT_AS_FAST = 1.01
"""Ratio of step times up to which a smaller micro-batch is preferred."""
WORTH_A_STRATEGY = 1.03
"""Ratio of step times up to which a simpler strategy is preferred."""
DATA_PARALLEL = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3", "hsdp")
COMPARED = (*DATA_PARALLEL, "tp", "pp", "ep")
"""Offloading is left out: it is for models that fit in no other way, and bound to a machine's own memory and disk."""
COMPUTE_OPTIMAL = 20.0
"""Tokens per parameter (Hoffmann et al., arXiv 2203.15556)."""
MOST_TIMES_TOO_LONG = 1.5
"""Ratio of the largest model's tokens per parameter to those asked for from which a budget is too large."""


@dataclass(frozen=True)
class RunBudget:
    """The time or computation of a run, and its purpose."""

    hardware: Hardware
    family: Family
    vocabulary: int
    """Rows of the embedding."""
    hours: float | None = None
    flops: float | None = None
    """Computation; exactly one of hours and flops is given."""
    unique_tokens: float = math.inf
    """Tokens of the data."""
    tokens_per_parameter: float | None = None
    """Ratio asked for; None: that of the scaling law."""
    mfu: float | None = None
    optimizer: str = "muon"

    @property
    def seconds(self) -> float:
        """Time for steps."""
        kind = self.hardware.device_type
        return SHARE_FOR_STEPS[kind] * 3600 * self.hours - SECONDS_TO_START[kind]

    @property
    def precision(self) -> str:
        gpu = self.hardware.gpu
        return "bf16" if gpu.has_bf16 else "fp32" if self.hardware.device_type == "cpu" else "fp16"

    @property
    def shapes(self) -> list[Shape]:
        """The family's models with this vocabulary, smallest first."""
        return [Shape(*rung, self.vocabulary, self.family) for rung in self.family.rungs]

    def speed(self, shape: Shape) -> Speed:
        if self.mfu:
            return Speed(self.mfu, "stated")
        return Speed(mfu_of_size(shape.active, self.hardware.device_type, self.precision), "assumed for this size")

    def tokens(self, shape: Shape, tokens_per_second: float) -> float:
        """Tokens that a model can be trained on."""
        affordable = self.flops / shape.flops_per_token if self.flops else self.seconds * tokens_per_second
        return min(affordable, MOST_EPOCHS * self.unique_tokens)

    def tokens_at_mfu(self, shape: Shape) -> float:
        """Tokens that a model could be trained on if GPUs did nothing but compute."""
        flops = self.hardware.gpus * self.hardware.gpu.bf16_flops * self.speed(shape).mfu
        return self.tokens(shape, flops / shape.flops_per_token)

    def best(self, tokens: dict[Shape, float]) -> Shape:
        """Chooses by the ratio that was asked for, else by 20; if text would be repeated, by the law for that."""
        nearest = nearest_shape(tokens, self.tokens_per_parameter or COMPUTE_OPTIMAL)
        if self.tokens_per_parameter or tokens[nearest] <= self.unique_tokens:
            return nearest
        return best_shape(tokens, self.unique_tokens)

    def in_words(self) -> str:
        given = f"{self.flops:.3g} FLOPs" if self.flops else duration_text(3600 * self.hours)
        if self.hardware.device_type == "cpu":
            return f"{given} on a CPU, {counted(self.hardware.gpus, 'process')}"
        return f"{given} on {self.hardware.gpus} x {self.hardware.gpu.name}"


@dataclass(frozen=True)
class ScaledRun(PlannedRun):
    """A run whose activations are scaled from another model's, in proportion to width and window.

    This is nearly exact within a family, and within some tenths beyond it.
    """

    shape: Shape | None = None
    traced: PlannedRun | None = None
    traced_shape: Shape | None = None

    @property
    def projects(self) -> bool:
        return not self.shape.family.caps_logits

    def trace(self, call: ForwardPass) -> Activations:
        like = self.traced_shape
        # The trace is of the other model's own window: its cost is scaled below.
        found = self.traced.trace(replace(call, window=self.traced.config.data.window))
        width = self.shape.width / like.width
        both = width * self.shape.sequence_length / like.sequence_length

        def scaled(line: Line) -> Line:
            return Line(line.fixed * width**2, line.per_sequence * both)

        return Activations(*map(scaled, (found.outside, found.per_layer, found.backward, found.hidden)))


@dataclass(frozen=True)
class Combination:
    """A strategy with the micro-batch and the activation checkpointing that are fastest under it."""

    candidate: Candidate
    checkpointing: str

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.candidate.step_seconds

    def in_words(self) -> str:
        recomputes = ", activations recomputed" if self.checkpointing == "full" else ""
        reduces = ", gradients reduced once per step" if self.candidate.reduces_once else ""
        return f"{self.candidate.name}, micro-batch {self.candidate.micro_batch}{recomputes}{reduces}"


@dataclass(frozen=True)
class Sized:
    """A run of one shape within a budget."""

    budget: RunBudget
    shape: Shape
    run: PlannedRun
    work: RunWork
    combinations: tuple[Combination, ...]
    """The best of every strategy that fits, best first; none where nothing fits."""
    searched: int
    """Combinations of strategy, micro-batch and checkpointing that fit."""

    @property
    def config(self) -> RunConfig:
        """The recipe with the best combination's settings."""
        return self.config_with(self.combinations[0])

    def config_with(self, chosen: Combination) -> RunConfig:
        candidate = chosen.candidate
        config = self.run.config.with_batch(
            sequences_per_micro_batch=candidate.micro_batch, reduce_once=candidate.reduces_once
        )
        return config.model_copy(update={"activation_checkpointing": chosen.checkpointing})

    @property
    def batch(self) -> int:
        return self.work.tokens_per_step

    @property
    def tokens_per_second(self) -> float:
        return self.batch / self.combinations[0].seconds if self.combinations else 0.0

    @property
    def affordable(self) -> float:
        """Tokens at the speed that was found; 0 if nothing fits."""
        return self.budget.tokens(self.shape, self.tokens_per_second) if self.combinations else 0.0

    @property
    def steps(self) -> int:
        return int(self.affordable / self.batch)

    @property
    def tokens(self) -> int:
        return self.steps * self.batch

    @property
    def hours(self) -> float:
        """Hours of the steps."""
        return self.steps * self.combinations[0].seconds / 3600

    @property
    def billed_hours(self) -> float:
        """Hours with start, validation and checkpoints."""
        kind = self.budget.hardware.device_type
        return (self.hours + SECONDS_TO_START[kind] / 3600) / SHARE_FOR_STEPS[kind]

    @property
    def cost(self) -> float:
        """US dollars."""
        return self.billed_hours * self.budget.hardware.gpus * self.budget.hardware.gpu.price_per_hour

    @property
    def mfu(self) -> float:
        """MFU with communication and recomputation."""
        hardware = self.budget.hardware
        return self.tokens_per_second * self.work.flops_per_token / (hardware.gpus * hardware.gpu.bf16_flops)

    @property
    def expected_loss(self) -> float:
        """Nats per token by the scaling law, only to compare runs."""
        return expected_loss(self.shape.active, self.tokens, self.budget.unique_tokens)

    @property
    def learning_rate(self) -> float:
        return float(f"{OPTIMIZERS[self.budget.optimizer].auto_rate(self.work.sizes.total, self.batch):.3g}")

    @property
    def weight_decay(self) -> float:
        decay = weight_decay_by_law(self.work.sizes.total, self.tokens, self.batch, self.learning_rate)
        return float(f"{decay:.2g}")

    @property
    def warmup_steps(self) -> int:
        return warmup_by_law(self.work.sizes.total, self.tokens, self.batch)


def choose_run(budget: RunBudget) -> Sized:
    """Raises InputError for a budget that fits no model."""
    found = search_family(budget)
    chosen = size(budget, best_of(budget, found).shape, names=COMPARED)
    if not chosen.combinations:  # scaled memory said that it fits, by a hair
        others = {shape: sized for shape, sized in found.items() if shape.parameters < chosen.shape.parameters}
        chosen = size(budget, best_of(budget, others).shape, names=COMPARED)
    if problem := too_small(chosen):
        raise InputError(problem)
    return chosen


def search_family(budget: RunBudget) -> dict[Shape, Sized]:
    """Sizes the shapes that may be the best one: {shape: its run}, smallest first."""
    refuse_less_than_a_start(budget)
    refuse_more_than_the_largest(budget)
    shapes = budget.shapes
    place = shapes.index(guess(budget))
    # One trace serves the whole search: a trace takes seconds, scaling it nothing.
    like = planned_run(budget, shapes[place]), shapes[place]
    found = {shapes[place]: size(budget, shapes[place], like)}
    while place > 0:  # communication and recomputing leave less than was guessed, or nothing
        place -= 1
        found = {shapes[place]: size(budget, shapes[place], like), **found}
        able = {shape: sized for shape, sized in found.items() if sized.combinations}
        if able and best_of(budget, able).shape != shapes[place]:
            break
    return found


def guess(budget: RunBudget) -> Shape:
    """The shape for a budget if GPUs did nothing but compute."""
    return budget.best({shape: budget.tokens_at_mfu(shape) for shape in budget.shapes})


def other_size(like: Sized, factor: float) -> Sized | None:
    """The run of a model that is larger by this factor, within the same budget; None beyond the ladder."""
    budget = like.budget
    wanted = factor * like.shape.parameters
    shape = min(budget.shapes, key=lambda shape: abs(math.log(shape.parameters / wanted)))
    return None if shape == like.shape else size(budget, shape, (like.run, like.shape))


def alternative(budget: RunBudget, like: Sized) -> Sized | None:
    """The run of another budget, its memory scaled from `like`, which may be of another family; None if none fits."""
    refuse_less_than_a_start(budget)
    refuse_more_than_the_largest(budget)
    shapes = budget.shapes
    for shape in reversed(shapes[: shapes.index(guess(budget)) + 1]):
        sized = size(budget, shape, (like.run, like.shape))
        if sized.combinations:
            return sized if sized.steps >= FEWEST_STEPS else None
    return None


def refuse_less_than_a_start(budget: RunBudget) -> None:
    if budget.hours is not None and budget.seconds <= 0:
        start = SECONDS_TO_START[budget.hardware.device_type]
        raise InputError(f"budget: {budget.in_words()}: the start alone takes some {start:.0f} s; give more time")


def best_of(budget: RunBudget, found: dict[Shape, Sized]) -> Sized:
    able = {shape: sized for shape, sized in found.items() if sized.combinations}
    if not able:
        smallest = next(iter(found.values()))
        raise InputError(
            f"budget: no {budget.family.name} fits on {budget.hardware.gpus} x {budget.hardware.gpu.name}, not even "
            f"{count_text(smallest.shape.parameters)} parameters with a vocabulary of {budget.vocabulary:,}; give "
            "GPUs with more memory, or a smaller vocabulary"
        )
    # The smallest runs too few steps to be compared, and is refused then.
    tokens = {shape: max(sized.affordable, 1.0) for shape, sized in able.items()}
    return able[budget.best(tokens)]


def too_small(sized: Sized) -> str | None:
    if sized.steps >= FEWEST_STEPS:
        return None
    budget = sized.budget
    shape = sized.shape
    remedy = "give more of it, fewer GPUs, or a smaller vocabulary"
    if budget.unique_tokens * MOST_EPOCHS <= sized.affordable:
        remedy = f"the data has {count_text(budget.unique_tokens)} tokens: give more text"
    return (
        f"budget: {budget.in_words()} makes {sized.steps:,} steps of {sized.batch:,} tokens for the smallest model "
        f"that suits it, {budget.family.name} {shape.layers} x {shape.width} with {count_text(shape.parameters)} "
        f"parameters; a run learns little in fewer than {FEWEST_STEPS}: {remedy}"
    )


def refuse_more_than_the_largest(budget: RunBudget) -> None:
    """Raises InputError for a budget above that of the largest model, at the speed of GPUs that only compute."""
    largest = budget.shapes[-1]
    asked = budget.tokens_per_parameter or COMPUTE_OPTIMAL
    tokens = budget.tokens_at_mfu(largest)
    ratio = tokens / largest.active
    if ratio > MOST_TIMES_TOO_LONG * asked:
        wanted = math.sqrt(tokens * largest.active / asked)
        raise InputError(
            f"budget: {budget.in_words()} would train {count_text(wanted)} parameters at {asked:g} tokens per "
            f"parameter; the largest {budget.family.name} here has {count_text(largest.active)} ({largest.layers} "
            f"x {largest.width}). Give less, or train that one for longer with --tokens_per_parameter {ratio:.0f}"
        )


def size(
    budget: RunBudget,
    shape: Shape,
    like: tuple[PlannedRun, Shape] | None = None,
    names: Sequence[str] = DATA_PARALLEL,
) -> Sized:
    """Finds the fastest way to train a shape within a budget, by these strategies.

    Args:
        like: a run that is traced and its shape, to scale memory from.
    """
    run = planned_run(budget, shape)
    if like is not None and like[1] != shape:
        given = {name: getattr(run, name) for name in ("config", "model_config", "precision", "device_type")}
        run = ScaledRun(**given, shape=shape, traced=like[0], traced_shape=like[1])
    batch = run.config.batch.tokens_per_step
    # At least one step, for a shape that the budget cannot train; it is not chosen then.
    tokens = max(batch, budget.tokens_at_mfu(shape))
    sizes = sizes_of(run.model_config)
    work = RunWork(
        sizes=sizes,
        active=active_parameters(run.model_config),
        non_embedding=matrix_parameters(run.model_config),
        tokens=int(tokens),
        steps=int(tokens / batch),
        tokens_per_step=batch,
        flops_per_token=shape.flops_per_token,
        recompute=1.0,
    )
    combinations, searched = search(run, work, budget.hardware, budget.speed(shape), names)
    return Sized(budget, shape, run, work, tuple(combinations), searched)


@functools.cache
def scratch() -> tempfile.TemporaryDirectory:
    """A folder for models' JSONs until this process ends: strategies read the model that a recipe names."""
    return tempfile.TemporaryDirectory()


def planned_run(budget: RunBudget, shape: Shape) -> PlannedRun:
    """A shape's run with a micro-batch of one sequence: the search chooses it."""
    hardware = budget.hardware
    is_cpu = hardware.device_type == "cpu"
    model = Path(scratch().name, f"{shape.family.name}_{shape.layers}_{shape.width}_{shape.vocabulary}.json")
    model.write_text(shape.json_text)
    tokens = budget.tokens_at_mfu(shape)
    config = RunConfig.model_validate(
        {
            "model": str(model),
            "output": "run",
            "precision": budget.precision,
            "data": {"train": [{"shards": "shards"}], "sequence_length": shape.sequence_length},
            "budget": {"tokens": max(1, int(tokens))},
            "batch": {"tokens_per_step": batch_of(budget, shape, tokens), "sequences_per_micro_batch": 1},
            # The learning rate is the law's once the batch is chosen; the planner needs any valid one.
            "optim": {"name": budget.optimizer, "learning_rate": 1e-3},
            "compile": "none" if is_cpu else "regional",
        }
    )
    model_config = planned_model_config(config.model, config.data)
    return PlannedRun(config, model_config, planned_precision(config, hardware.gpu), hardware.device_type)


def batch_of(budget: RunBudget, shape: Shape, tokens: float) -> int:
    """Tokens per step by the law: a power of two times a sequence per GPU, small enough for FEWEST_STEPS."""
    one_each = budget.hardware.gpus * shape.sequence_length
    wanted = min(batch_by_law(tokens), LARGEST_BATCH_CHOSEN, tokens / FEWEST_STEPS)
    return one_each * 2 ** max(0, round(math.log2(max(wanted, 1) / one_each)))


def search(
    run: PlannedRun, work: RunWork, hardware: Hardware, speed: Speed, names: Sequence[str]
) -> tuple[list[Combination], int]:
    """Returns (the best combination of every strategy that fits, best first; how many were compared)."""
    best: dict[str, Combination] = {}
    enough = ENOUGH_TOKENS[hardware.device_type] // run.config.data.sequence_length
    compared = 0
    for checkpointing, recompute in (("none", 1.0), ("full", 4 / 3)):
        config = run.config.model_copy(update={"activation_checkpointing": checkpointing})
        with_it = replace(run, config=config)
        its_work = replace(work, recompute=recompute)
        for name in names:
            candidates = fitting_micro_batches(name, with_it, its_work, hardware, speed)
            able = [Combination(candidate, checkpointing) for candidate in candidates]
            compared += len(able)
            if able := [*filter(None, [best.get(name)]), *able]:
                best[name] = quickest(able, enough)
    # Only the winners' memory is computed again: it is part of the answer.
    best = {name: with_memory(found, run, hardware) for name, found in best.items()}
    fastest = min((found.seconds for found in best.values()), default=0.0)

    def rank(found: Combination) -> tuple[bool, float]:
        near = found.seconds <= WORTH_A_STRATEGY * fastest
        return (not near, SIMPLEST_FIRST[found.candidate.name] if near else found.seconds)

    return sorted(best.values(), key=rank), compared


def fitting_micro_batches(
    name: str, run: PlannedRun, work: RunWork, hardware: Hardware, speed: Speed
) -> list[Candidate]:
    """Lists a run under one strategy with every micro-batch that fits."""
    found = consider(name, run, work, hardware, speed)
    if not found.runs:
        return []
    divided = layout(name, hardware.gpus, hardware.machines)
    parts = strategy_named(name).parts_of_micro_batch(run.config)
    candidates = []
    for sequences in micro_batches(run.config, divided.micro_batches, parts):
        if sequences <= found.largest_micro_batch:
            seconds, exposed = speed.step_seconds(run.config, work, hardware, divided, sequences)
            timing = {"step_seconds": seconds, "communication_seconds": exposed, "reduces_once": False}
            found = replace(found, micro_batch=sequences, fits=True, **timing)
            candidates.append(reduced_once(found, divided, run, work, hardware, speed))
    return candidates


def with_memory(found: Combination, run: PlannedRun, hardware: Hardware) -> Combination:
    """Adds the memory of the combination's own micro-batch, which was the smallest's."""
    name = found.candidate.name
    sequences = found.candidate.micro_batch
    config = run.config.model_copy(update={"activation_checkpointing": found.checkpointing})
    config = config.with_batch(reduce_once=found.candidate.reduces_once)
    divided = layout(name, hardware.gpus, hardware.machines)
    memory = footprint(replace(run, config=config), divided, sequences)
    return replace(found, candidate=replace(found.candidate, memory=memory))


def quickest(able: Sequence[Combination], enough: int) -> Combination:
    """Chooses the fastest, and among those that are about as fast one without recomputation.

    Of these its micro-batch is nearest to `enough` sequences: a larger one takes memory for nothing.
    """
    fastest = min(combination.seconds for combination in able)
    near = [combination for combination in able if combination.seconds <= ABOUT_AS_FAST * fastest]

    def rank(found: Combination) -> tuple[bool, float]:
        return (found.checkpointing == "full", abs(math.log(found.candidate.micro_batch / max(1, enough))))

    return min(near, key=rank)
