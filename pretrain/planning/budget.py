"""From hours, dollars or FLOPs to a run: size, tokens, batch, and the fastest way to train it that fits.

Every size of a family near the one that the budget would buy at the assumed MFU is searched over strategies,
micro-batches and activation checkpointing; the size with the lowest expected loss is taken, at its own speed. Memory of
those sizes is scaled from one that is traced, so that a search takes seconds; the one chosen is traced itself.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoConfig

from pretrain.config import RunConfig
from pretrain.errors import InputError
from pretrain.memory.activations import Activations, ForwardPass, Line, trace_activations
from pretrain.memory.parts import PlannedRun
from pretrain.optim.learning_rate import learning_rate_for_parameters
from pretrain.parallel.registry import STRATEGIES
from pretrain.planning.candidates import SIMPLEST_FIRST, Candidate, consider, micro_batches, planned_precision
from pretrain.planning.families import Family, Shape
from pretrain.planning.sizing import MOST_EPOCHS, batch_for, best_shape, expected_loss
from pretrain.planning.step_time import Hardware, RunWork, Speed, mfu_of_size
from pretrain.units import count_text, duration_text

SHARE_OF_TIME = {"cuda": 0.95, "cpu": 0.85}
START_SECONDS = {"cuda": 60.0, "cpu": 5.0}
"""Of the time given, for steps: the rest is validation and checkpoints; and the start, with compiling, takes that."""
LARGEST_BATCH = 2**22
"""Tokens: what Llama was trained with."""
FEWEST_STEPS = 100
MICRO_BATCH_TOKENS = {"cuda": 16_384, "cpu": 1024}
"""From there on larger products are hardly faster."""
ABOUT_AS_FAST, WORTH_A_STRATEGY = 1.01, 1.03
LEFT_OUT = ("zero3_offload", "zero3_offload_nvme")
"""Strategies for models that fit in no other way: slow, and bound to a machine's own memory and disk."""
MOST_TIMES_TOO_LONG = 1.5
"""Tokens per parameter of the largest model, relative to what was asked for, from which a budget is too large."""
BELOW, ABOVE = 3, 1
"""Rungs searched around the one that the budget would buy without communication and recomputation."""


@dataclass(frozen=True)
class Budget:
    """What a run may take, and what it is for."""

    hardware: Hardware
    family: Family
    vocabulary: int
    """Rows of the embedding."""
    hours: float | None = None
    flops: float | None = None
    """One of the two."""
    unique_tokens: float = math.inf
    """Of the data."""
    tokens_per_parameter: float | None = None
    """None: by the law."""
    mfu: float | None = None
    optimizer: str = "muon"

    @property
    def seconds(self) -> float:
        """For steps."""
        kind = self.hardware.device_type
        return SHARE_OF_TIME[kind] * 3600 * self.hours - START_SECONDS[kind]

    @property
    def precision(self) -> str:
        gpu = self.hardware.gpu
        return "bf16" if gpu.has_bf16 else "fp32" if self.hardware.device_type == "cpu" else "fp16"

    @property
    def shapes(self) -> list[Shape]:
        """Smallest first."""
        return [Shape(*rung, self.vocabulary, self.family) for rung in self.family.rungs]

    def speed(self, shape: Shape) -> Speed:
        if self.mfu:
            return Speed(self.mfu, "stated")
        return Speed(mfu_of_size(shape.parameters, self.hardware.device_type, self.precision), "assumed for this size")

    def tokens(self, shape: Shape, tokens_per_second: float) -> float:
        """That a model can be trained on."""
        affordable = self.flops / shape.flops_per_token if self.flops else self.seconds * tokens_per_second
        return min(affordable, MOST_EPOCHS * self.unique_tokens)

    def tokens_at_mfu(self, shape: Shape) -> float:
        """The same if GPUs did nothing but compute."""
        gpu, mfu = self.hardware.gpu, self.speed(shape).mfu
        return self.tokens(shape, self.hardware.gpus * gpu.bf16_flops * mfu / shape.flops_per_token)

    def best(self, tokens: dict[Shape, float]) -> Shape:
        return best_shape(tokens, self.unique_tokens, tokens_per_parameter=self.tokens_per_parameter)

    def in_words(self) -> str:
        unit = "CPU processes" if self.hardware.device_type == "cpu" else self.hardware.gpu.name
        given = f"{self.flops:.3g} FLOPs" if self.flops else duration_text(3600 * self.hours)
        return f"{given} on {self.hardware.gpus} x {unit}"


@dataclass(frozen=True)
class ScaledRun(PlannedRun):
    """A run whose activations are those of another model in proportion to width and window: nearly exact within a
    family, within some tenths beyond it."""

    shape: Shape | None = None
    traced: PlannedRun | None = None
    traced_shape: Shape | None = None

    def trace(self, call: ForwardPass) -> Activations:
        like = self.traced_shape
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
    bytes: float
    """Of a GPU's memory."""

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.candidate.step_seconds

    def in_words(self) -> str:
        recomputes = ", activations recomputed" if self.checkpointing == "full" else ""
        return f"{self.candidate.name}, micro-batch {self.candidate.micro_batch}{recomputes}"


@dataclass(frozen=True)
class Sized:
    """A run of one shape within a budget."""

    budget: Budget
    shape: Shape
    run: PlannedRun
    work: RunWork
    combinations: tuple[Combination, ...]
    """The best of every strategy that fits, best first; none where nothing fits."""
    searched: int
    """Combinations of strategy, micro-batch and checkpointing that fit."""

    @property
    def config(self) -> RunConfig:
        """With the best combination's settings."""
        return self.config_with(self.combinations[0])

    def config_with(self, chosen: Combination) -> RunConfig:
        config = self.run.config.with_batch(sequences_per_micro_batch=chosen.candidate.micro_batch)
        return config.model_copy(update={"activation_checkpointing": chosen.checkpointing})

    @property
    def batch(self) -> int:
        return self.work.tokens_per_step

    @property
    def tokens_per_second(self) -> float:
        return self.batch / self.combinations[0].seconds if self.combinations else 0.0

    @property
    def affordable(self) -> float:
        """Tokens, at the speed that was found; 0 where nothing fits."""
        return self.budget.tokens(self.shape, self.tokens_per_second) if self.combinations else 0.0

    @property
    def steps(self) -> int:
        return int(self.affordable / self.batch)

    @property
    def tokens(self) -> int:
        return self.steps * self.batch

    @property
    def hours(self) -> float:
        """Of the steps."""
        return self.steps * self.combinations[0].seconds / 3600

    @property
    def billed_hours(self) -> float:
        """With start, validation and checkpoints."""
        kind = self.budget.hardware.device_type
        return (self.hours + START_SECONDS[kind] / 3600) / SHARE_OF_TIME[kind]

    @property
    def cost(self) -> float:
        """US dollars."""
        return self.billed_hours * self.budget.hardware.gpus * self.budget.hardware.gpu.price_per_hour

    @property
    def mfu(self) -> float:
        """With communication and recomputing."""
        hardware = self.budget.hardware
        return self.tokens_per_second * self.work.flops_per_token / (hardware.gpus * hardware.gpu.bf16_flops)

    @property
    def expected_loss(self) -> float:
        """By the law, to compare with."""
        return expected_loss(self.shape.parameters, self.tokens, self.budget.unique_tokens)

    @property
    def learning_rate(self) -> float:
        return float(f"{learning_rate_for_parameters(self.shape.parameters, self.budget.optimizer):.2g}")

    @property
    def warmup_steps(self) -> int:
        return max(1, min(500, self.steps // 50))


def choose_run(budget: Budget) -> tuple[Sized, list[Sized]]:
    """(the run, the others of its family that were searched). Raises InputError for a budget that fits no model."""
    found = search_family(budget)
    chosen = best_of(budget, found)
    if chosen.run is not found[chosen.shape].run or isinstance(chosen.run, ScaledRun):
        chosen = size(budget, chosen.shape)
    if not chosen.combinations:  # scaled memory said that it fits, by a hair
        others = {shape: sized for shape, sized in found.items() if shape.parameters < chosen.shape.parameters}
        chosen = size(budget, best_of(budget, others).shape)
    if problem := too_small(chosen) or too_large(chosen):
        raise InputError(problem)
    return chosen, [sized for shape, sized in found.items() if shape != chosen.shape]


def search_family(budget: Budget, like: PlannedRun | None = None, like_shape: Shape | None = None) -> dict[Shape, Sized]:
    """{shape: its run} around the best one, smallest first.

    Args:
        like: a run of another family that is traced already, to scale memory from; `like_shape`: its shape.
    """
    if budget.hours is not None and budget.seconds <= 0:
        start = START_SECONDS[budget.hardware.device_type]
        raise InputError(f"budget: {budget.in_words()}: the start alone takes some {start:.0f} s; give more time")
    shapes = budget.shapes
    middle = shapes.index(budget.best({shape: budget.tokens_at_mfu(shape) for shape in shapes}))
    traced, traced_shape = like or planned_run(budget, shapes[middle]), like_shape or shapes[middle]
    low, high = max(0, middle - BELOW), min(len(shapes), middle + ABOVE + 1)
    found: dict[Shape, Sized] = {}
    while True:
        for shape in shapes[low:high]:
            found.setdefault(shape, size(budget, shape, traced, traced_shape))
        able = {shape: sized for shape, sized in found.items() if sized.combinations}
        best = shapes.index(best_of(budget, able).shape) if able else -1
        if low == 0 or best > low:
            return dict(sorted(found.items(), key=lambda item: shapes.index(item[0])))
        low = max(0, low - BELOW)


def best_of(budget: Budget, found: dict[Shape, Sized]) -> Sized:
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
    budget, shape = sized.budget, sized.shape
    remedy = "give more of it, fewer GPUs, or a smaller vocabulary"
    if budget.unique_tokens * MOST_EPOCHS <= sized.affordable:
        remedy = f"the data has {count_text(budget.unique_tokens)} tokens: give more text"
    return (
        f"budget: {budget.in_words()} makes {sized.steps:,} steps of {sized.batch:,} tokens for the smallest model "
        f"that suits it, {budget.family.name} {shape.layers} x {shape.width} with {count_text(shape.parameters)} "
        f"parameters; a run learns little in fewer than {FEWEST_STEPS}: {remedy}"
    )


def too_large(sized: Sized) -> str | None:
    budget, largest = sized.budget, sized.budget.shapes[-1]
    asked = budget.tokens_per_parameter or 20.0
    ratio = sized.affordable / sized.shape.parameters
    if sized.shape != largest or ratio <= MOST_TIMES_TOO_LONG * asked:
        return None
    wanted = math.sqrt(sized.affordable * largest.parameters / asked)
    return (
        f"budget: {budget.in_words()} would train {count_text(wanted)} parameters at {asked:g} tokens per parameter; "
        f"the largest {budget.family.name} here has {count_text(largest.parameters)} ({largest.layers} x "
        f"{largest.width}). Give less, or train that one for longer with --tokens_per_parameter {ratio:.0f}"
    )


def size(
    budget: Budget, shape: Shape, traced: PlannedRun | None = None, traced_shape: Shape | None = None
) -> Sized:
    """The fastest way to train a shape within a budget; its memory traced, or scaled from a run that is."""
    run = planned_run(budget, shape)
    if traced is not None and shape != traced_shape:
        run = ScaledRun(**vars_of(run), shape=shape, traced=traced, traced_shape=traced_shape)
    elif traced is not None:
        run = traced
    batch = run.config.batch.tokens_per_step
    tokens = max(batch, budget.tokens_at_mfu(shape))
    work = RunWork(
        sizes=run.sizes,
        active=run.sizes.total,
        non_embedding=run.sizes.total - (0 if run.sizes.is_tied else run.sizes.embedding),
        tokens=int(tokens),
        steps=int(tokens / batch),
        tokens_per_step=batch,
        flops_per_token=shape.flops_per_token,
        recompute=1.0,
    )
    combinations, searched = search(run, work, budget.hardware, budget.speed(shape))
    return Sized(budget, shape, run, work, tuple(combinations), searched)


def vars_of(run: PlannedRun) -> dict[str, Any]:
    return {name: getattr(run, name) for name in ("config", "model_config", "precision", "device_type")}


def planned_run(budget: Budget, shape: Shape) -> PlannedRun:
    """A shape's run with a micro-batch of one sequence: the search chooses it."""
    hardware, is_cpu = budget.hardware, budget.hardware.device_type == "cpu"
    model_config = AutoConfig.for_model(**shape.config_values(2 * shape.sequence_length))
    tokens = budget.tokens_at_mfu(shape)
    config = RunConfig.model_validate(
        {
            "model": "model.json",
            "output": "run",
            "precision": budget.precision,
            "data": {"train": [{"shards": "shards"}], "sequence_length": shape.sequence_length},
            "budget": {"tokens": max(1, int(tokens))},
            "batch": {"tokens_per_step": batch_of(budget, shape, tokens), "sequences_per_micro_batch": 1},
            "optim": {"name": budget.optimizer, "learning_rate": "auto"},
            "compile": "none" if is_cpu else "regional",
        }
    )
    return PlannedRun(config, model_config, planned_precision(config, hardware.gpu), hardware.device_type)


def batch_of(budget: Budget, shape: Shape, tokens: float) -> int:
    """By the law for so many tokens, a power of two times what all GPUs take together; smaller for FEWEST_STEPS."""
    one_each = budget.hardware.gpus * shape.sequence_length
    wanted = min(batch_for(tokens, 1, LARGEST_BATCH), max(tokens / FEWEST_STEPS, 1))
    return one_each * 2 ** max(0, round(math.log2(wanted / one_each)))


def search(
    run: PlannedRun, work: RunWork, hardware: Hardware, speed: Speed
) -> tuple[list[Combination], int]:
    """(the best combination of every strategy that fits, best first; how many were compared)."""
    best: dict[str, Combination] = {}
    compared = 0
    for checkpointing in ("none", "full"):
        config = run.config.model_copy(update={"activation_checkpointing": checkpointing})
        with_it = replace(run, config=config)
        its_work = replace(work, recompute=1.0 if checkpointing == "none" else 4 / 3)
        for name in STRATEGIES:
            if name in LEFT_OUT:
                continue
            able = [
                Combination(candidate, checkpointing, candidate.memory.total)
                for candidate in fitting(name, with_it, its_work, hardware, speed)
            ]
            compared += len(able)
            both = [*filter(None, [best.get(name)]), *able]
            if both:
                best[name] = quickest(both, MICRO_BATCH_TOKENS[hardware.device_type] // run.config.data.sequence_length)
    fastest = min((found.seconds for found in best.values()), default=0.0)

    def rank(found: Combination) -> tuple[bool, float]:
        near = found.seconds <= WORTH_A_STRATEGY * fastest
        return (not near, SIMPLEST_FIRST[found.candidate.name] if near else found.seconds)

    return sorted(best.values(), key=rank), compared


def fitting(name: str, run: PlannedRun, work: RunWork, hardware: Hardware, speed: Speed) -> list[Candidate]:
    """A run under one strategy with every micro-batch that fits."""
    found = consider(name, run, work, hardware, speed)
    if not found.runs:
        return []
    strategy = STRATEGIES[name]
    layout = strategy.layout(name, hardware.gpus, hardware.machines)
    parts = strategy.parts_of_micro_batch(run.config)
    candidates = []
    for sequences in micro_batches(run.config, strategy.micro_batches(layout)):
        if sequences % parts == 0 and sequences <= found.largest_micro_batch:
            seconds, exposed = speed.step_seconds(run.config, work, hardware, layout, sequences)
            memory = strategy.footprint(run, layout, sequences)
            timing = {"step_seconds": seconds, "communication_seconds": exposed}
            candidates.append(replace(found, memory=memory, fits=True, micro_batch=sequences, **timing))
    return candidates


def quickest(able: Sequence[Combination], enough: int) -> Combination:
    """The fastest; among those that are about as fast the first without recomputing, whose micro-batch has `enough`
    sequences or comes nearest to it: a larger one takes memory for nothing."""
    fastest = min(combination.seconds for combination in able)
    near = [combination for combination in able if combination.seconds <= ABOUT_AS_FAST * fastest]

    def rank(found: Combination) -> tuple[bool, float]:
        return (found.checkpointing == "full", abs(math.log(found.candidate.micro_batch / max(1, enough))))

    return min(near, key=rank)
