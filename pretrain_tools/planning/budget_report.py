"""What a budget buys, why, and what else it would buy: a table, JSON, and the recipe with its reasons."""

import json
import math
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from pretrain.errors import InputError
from pretrain.files import write_durably
from pretrain.gpus import GIB
from pretrain.model.model_config import padded_vocabulary
from pretrain.terminal import width_of
from pretrain.units import count_text, count_upwards, duration_text
from pretrain_tools.planning.budget import (
    COMPUTE_OPTIMAL,
    ENOUGH_TOKENS,
    MOST_TIMES_TOO_LONG,
    SECONDS_TO_START,
    SHARE_FOR_STEPS,
    Combination,
    RunBudget,
    Sized,
    alternative,
    choose_run,
    other_size,
)
from pretrain_tools.planning.budget_request import BudgetRequest, RecipePlace
from pretrain_tools.planning.candidates import command_of
from pretrain_tools.planning.families import FAMILIES, NANOCHAT, Shape
from pretrain_tools.planning.own_text import MADE_BY
from pretrain_tools.planning.report import TABLE_WIDTH
from pretrain_tools.planning.sizing import MOST_EPOCHS
from pretrain_tools.planning.step_time import Hardware

SAVES, SECONDS_BETWEEN_SAVES = 10, 1800
"""Checkpoints and validations of a run, more where it is so long that half an hour is lost otherwise."""
PUBLISHED_FROM = 6e7
"""Parameters in layers."""
ROUTERS = "loss: {router_balance: 0.01, router_z_loss: 0.001}  # OLMoE's\n"
SHARE_FOR_VALIDATION = 0.02
"""Of the computation."""


@dataclass(frozen=True)
class Choice:
    """A line of the answer."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class Answer:
    """A run within a budget and what stands beside it."""

    chosen: Sized
    alternatives: list[tuple[str, Sized | None, Combination | None]]
    """(what differs, the run, its combination); None: does not fit."""
    expected: tuple[float, float, float, str] | None
    """(loss, low, high, what is known of it) by a ladder."""
    place: RecipePlace


Expectation = Callable[[int, int, int], tuple[float, float, float, str]]
"""From parameters in matrix products, all parameters, and tokens: (loss, low, high, what is known of it)."""


def recipe_of_budget(
    request: BudgetRequest, hardware: Hardware, command: str, expect: Expectation | None = None
) -> None:
    """Chooses, writes where a recipe was asked for, and prints. Raises InputError for a budget that fits no model.

    Args:
        command: by which all this was asked for.
        expect: a ladder's.
    """
    hours = request.hours
    if request.dollars:
        hours = request.dollars / hardware.gpus / hardware.gpu.price_per_hour
    budget = RunBudget(
        hardware=hardware,
        family=request.family,
        vocabulary=padded_vocabulary(request.vocabulary),
        hours=hours,
        flops=request.flops,
        unique_tokens=request.unique_tokens,
        tokens_per_parameter=request.tokens_per_parameter,
        mfu=request.mfu,
        optimizer=request.optimizer,
    )
    found = answer(budget, request.place, expect)
    if request.writes:
        write_recipe(found, command)
    if request.as_json:
        print(answer_json(found))
    else:
        print_answer(found, request.writes)


def answer(budget: RunBudget, place: RecipePlace, expect: Expectation | None = None) -> Answer:
    """Raises InputError for a budget that fits no model."""
    chosen = choose_run(budget)
    rows: list[tuple[str, Sized | None, Combination | None]] = []
    for name, factor in (("half", 0.5), ("double", 2.0)):
        scaled = {"flops": factor * budget.flops} if budget.flops else {"hours": factor * budget.hours}
        rows.append(
            (f"{name} the {'FLOPs' if budget.flops else 'time'}", tried(replace(budget, **scaled), chosen), None)
        )
    for name, factor in (("half the size", 0.5), ("double the size", 2.0)):
        if (sized := other_size(chosen, factor)) is not None:
            rows.append((name, sized if sized.combinations and sized.steps else None, None))
    rows += [
        (family.name, tried(replace(budget, family=family), chosen), None)
        for family in FAMILIES.values()
        if family is not budget.family
    ]
    rows += [(found.candidate.name, chosen, found) for found in chosen.combinations[1:]]
    work = chosen.work
    expected = expect(work.non_embedding, work.active, chosen.tokens) if expect else None
    return Answer(chosen, rows, expected, place)


def tried(budget: RunBudget, like: Sized) -> Sized | None:
    try:
        return alternative(budget, like)
    except InputError:
        return None


def choices(found: Answer) -> list[Choice]:
    """Every choice and its reason."""
    return [*choices_of_model(found), *choices_of_training(found.chosen), *choices_of_launch(found)]


def choices_of_model(found: Answer) -> list[Choice]:
    """The budget, and the sizes that it buys."""
    run, shape = found.chosen, found.chosen.shape
    family, ratio, total = run.budget.family.name, run.tokens / shape.active, run.work.sizes.total
    active = f"{count_text(run.work.active)} active of " if run.work.active < total else ""
    return [
        Choice("budget", run.budget.in_words(), budget_reason(run)),
        Choice("model", f"{family}, {active}{count_text(total)} parameters", size_reason(found)),
        Choice("shape", f"{shape.layers} layers x {shape.width:,}", shape_reason(shape)),
        Choice(
            "tokens",
            f"{count_text(run.tokens)}, {ratio:.3g} per {'active ' if active else ''}parameter",
            tokens_reason(run),
        ),
        Choice(
            "window",
            f"{shape.sequence_length:,} tokens",
            "grows with the model: 256 in a demo, GPT-2's 1,024, Llama's 2,048",
        ),
    ]


def choices_of_training(run: Sized) -> list[Choice]:
    """Batch, optimizer and schedule."""
    optimizer = run.budget.optimizer
    is_muon = optimizer == "muon"
    multiple = f"{run.budget.hardware.gpus} x {run.shape.sequence_length:,}"
    return [
        Choice(
            "batch",
            f"{run.batch:,} tokens, {run.steps:,} steps",
            f"auto's law of the run's tokens; a multiple of {multiple}",
        ),
        Choice(
            "optimizer",
            optimizer,
            "fewer tokens than AdamW to the same loss (docs/training.md)" if is_muon else "as asked",
        ),
        Choice("learning rate", f"{run.learning_rate:g}", f"auto's law for {optimizer}, this size and batch"),
        Choice("weight decay", f"{run.weight_decay:g}", "auto's law of tokens per parameter, batch and rate"),
        Choice(
            "schedule",
            f"cosine to a tenth, warmup of {run.warmup_steps:,} steps",
            "a token per parameter, at most a twentieth of the run",
        ),
        Choice("precision", run.run.precision, precision_reason(run)),
    ]


def choices_of_launch(found: Answer) -> list[Choice]:
    """How the run is launched, and what comes of it."""
    run, hardware, best = found.chosen, found.chosen.budget.hardware, found.chosen.combinations[0]
    kind = hardware.device_type
    rows = [
        Choice("strategy", best.in_words(), strategy_reason(run)),
        Choice(
            "memory",
            f"{best.candidate.memory.total / GIB:.3g} of {hardware.usable_bytes / GIB:.3g} GB",
            f"per {hardware.unit}, at its peak; enough sequences for {ENOUGH_TOKENS[kind]:,} tokens if they fit",
        ),
        Choice(
            "time",
            duration_text(3600 * run.billed_hours),
            f"{run.tokens_per_second:,.0f} tokens/s, MFU {run.mfu:.0%}, {run.budget.speed(run.shape).source}; "
            f"{SECONDS_TO_START[kind]:.0f} s to start and {1 - SHARE_FOR_STEPS[kind]:.0%} for validation and saves",
        ),
    ]
    if kind != "cpu" and hardware.gpu.price_per_hour:
        price = f"{hardware.gpus} x ${hardware.gpu.price_per_hour:.2f} per hour; --price_per_gpu_hour for yours"
        rows.append(Choice("cost", f"${run.cost:,.2f}", price))
    if found.expected is None:
        unknown = "no law holds for all text: runs.py ladder makes yours of small runs, for --ladder"
        return [*rows, Choice("loss", "not known", unknown)]
    loss, low, high, known = found.expected
    return [*rows, Choice("loss", f"{loss:.3f} ({low:.3f} to {high:.3f})", known)]


def size_reason(found: Answer) -> str:
    run = found.chosen
    budget, ratio = run.budget, run.tokens / run.shape.active
    why = f"nearest to {budget.tokens_per_parameter or COMPUTE_OPTIMAL:g} tokens per parameter"
    if not budget.tokens_per_parameter:
        why += ", where the loss is lowest for the computation (Hoffmann et al., arXiv 2203.15556)"
        if run.tokens > budget.unique_tokens:
            why = "the lowest expected loss within 1 %, repeated text counted (Muennighoff et al., arXiv 2305.16264)"
    if run.shape == budget.shapes[0] and ratio < 10:
        return "the smallest there is, and too large for such a budget"
    if not budget.tokens_per_parameter and ratio > MOST_TIMES_TOO_LONG * COMPUTE_OPTIMAL:
        return f"the largest that fits in memory: at {COMPUTE_OPTIMAL:g} tokens per parameter it would be larger"
    return why


def shape_reason(shape: Shape) -> str:
    if shape.family is not NANOCHAT and shape.layer_parameters < PUBLISHED_FROM:
        return "smaller than published ones: 32 to 64 wide per layer, as theirs"
    return shape.family.source


def budget_reason(run: Sized) -> str:
    flops = run.tokens * run.work.flops_per_token
    spent = f"{flops:.3g} FLOPs of training"
    if run.budget.hours and run.billed_hours < 0.9 * run.budget.hours:
        return f"{spent}: not all of the time, see tokens"
    return spent


def tokens_reason(run: Sized) -> str:
    budget = run.budget
    if math.isinf(budget.unique_tokens):
        return "what the model can be trained on in the budget, all of it new text"
    epochs = run.tokens / budget.unique_tokens
    text = f"{epochs:.3g} epochs of {count_text(budget.unique_tokens)}"
    if epochs > 0.95 * MOST_EPOCHS:
        return f"{text}, the most: beyond {MOST_EPOCHS:.0f} a text is learned by heart (arXiv 2305.16264)"
    return f"{text}; repeated tokens count less (arXiv 2305.16264)" if epochs > 1 else text


def precision_reason(run: Sized) -> str:
    gpu = run.budget.hardware.gpu
    if run.run.precision == "bf16":
        return f"{gpu.name} multiplies in it; fp8 is not chosen, measure it" if gpu.fp8_flops else f"{gpu.name} has it"
    return f"{gpu.name} has no bf16 products"


def strategy_reason(run: Sized) -> str:
    best, *others = run.combinations
    compared = f"the fastest of {run.searched} combinations that fit" if run.searched > 1 else "the only one that fits"
    if not others:
        return compared
    other = others[0]
    difference = other.seconds / best.seconds - 1
    if difference < 0:
        return f"{compared}, or the simplest within 3 % of it: {other.candidate.name} is {-difference:.1%} faster"
    return f"{compared}; next {other.in_words()}, {difference:.0%} slower"


def alternative_rows(found: Answer) -> list[dict[str, Any]]:
    """What else the budget would buy; `loss_difference` in nats by Hoffmann's law, relative to the choice."""
    rows = []
    for name, sized, combination in [("chosen", found.chosen, None), *found.alternatives]:
        if sized is None:
            rows.append({"alternative": name, "fits": False})
            continue
        used = combination or sized.combinations[0]
        slower = used.seconds / sized.combinations[0].seconds
        rows.append(
            {
                "alternative": name,
                "fits": True,
                "family": sized.budget.family.name,
                "layers": sized.shape.layers,
                "width": sized.shape.width,
                "parameters": sized.work.sizes.total,
                "active_parameters": sized.work.active,
                "tokens": sized.tokens,
                "strategy": used.candidate.name,
                "sequences_per_micro_batch": used.candidate.micro_batch,
                "activation_checkpointing": used.checkpointing,
                "hours": sized.billed_hours * slower,
                "cost": sized.cost * slower,
                "loss_difference": loss_difference(sized, found.chosen),
            }
        )
    return rows


def loss_difference(sized: Sized, chosen: Sized) -> float | None:
    """In nats by the law; None where so few tokens are not its subject: it expects more loss than from guessing."""
    guessing = math.log(chosen.shape.vocabulary)
    if max(sized.expected_loss, chosen.expected_loss) > guessing:
        return None
    return sized.expected_loss - chosen.expected_loss


def answer_json(found: Answer) -> str:
    run = found.chosen
    loss = dict(zip(("loss", "low", "high", "source"), found.expected, strict=True)) if found.expected else None
    values = {
        "choices": [asdict(choice) for choice in choices(found)],
        "model": run.shape.config_values(2 * run.shape.sequence_length),
        "parameters": run.work.sizes.total,
        "active_parameters": run.work.active,
        "tokens": run.tokens,
        "steps": run.steps,
        "tokens_per_step": run.batch,
        "sequence_length": run.shape.sequence_length,
        "flops": run.tokens * run.work.flops_per_token,
        "learning_rate": run.learning_rate,
        "optimizer": run.budget.optimizer,
        "precision": run.run.precision,
        "strategy": run.combinations[0].candidate.name,
        "sequences_per_micro_batch": run.combinations[0].candidate.micro_batch,
        "activation_checkpointing": run.combinations[0].checkpointing,
        "bytes_per_gpu": run.combinations[0].candidate.memory.total,
        "hours": run.billed_hours,
        "cost": run.cost,
        "expected_loss": loss,
        "alternatives": alternative_rows(found)[1:],
        "command": launch_command_of(found),
    }
    return json.dumps(values, indent=1)


def launch_command_of(found: Answer) -> str:
    run, hardware = found.chosen, found.chosen.budget.hardware
    if hardware.gpus == 1:
        return f"python train.py --config {found.place.recipe}"
    return command_of(run.combinations[0].candidate, str(found.place.recipe), [], hardware, run.config)


def print_answer(found: Answer, is_written: bool) -> None:
    console = Console(soft_wrap=False, highlight=False, markup=False)
    console.width = width_of(sys.stdout) or TABLE_WIDTH
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("choice", "value", "reason"):
        table.add_column(column, overflow="fold")
    for choice in choices(found):
        table.add_row(choice.name, choice.value, choice.reason)
    console.print(table, "", "What else it would be (loss: difference in nats by Hoffmann's law, to compare with):")
    console.print(alternatives_table(found), "")
    if is_written:
        place = found.place
        console.print(f"written: {place.model}, {place.recipe}", soft_wrap=True)
        if not place.is_prepared:
            console.print(f"prepare the data:\n  {preparation_command(found)}", soft_wrap=True)
        console.print(f"check it:\n  python train.py --config {place.recipe} --check", soft_wrap=True)
        console.print(f"start it:\n  {launch_command_of(found)}", soft_wrap=True)
    else:
        console.print("--write recipes/mine.yaml writes the recipe and the model's JSON.", soft_wrap=True)


def alternatives_table(found: Answer) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "model", "parameters", "tokens", "per parameter", "strategy", "time", "cost", "loss"):
        table.add_column(column, justify="left" if column in ("", "model", "strategy") else "right", no_wrap=True)
    for row in alternative_rows(found):
        if not row["fits"]:
            table.add_row(row["alternative"], "does not fit", *[""] * 7)
            continue
        recomputes = " recomputed" if row["activation_checkpointing"] == "full" else ""
        table.add_row(
            row["alternative"],
            f"{row['family']} {row['layers']} x {row['width']:,}",
            count_text(row["parameters"]),
            count_text(row["tokens"]),
            f"{row['tokens'] / row['active_parameters']:.3g}",
            f"{row['strategy']} {row['sequences_per_micro_batch']}{recomputes}",
            duration_text(3600 * row["hours"]),
            f"${row['cost']:,.0f}" if row["cost"] else "-",
            "-" if row["loss_difference"] is None else f"{row['loss_difference']:+.3f}",
        )
    return table


def preparation_command(found: Answer) -> str:
    """Of text that is enough for one epoch and for validation."""
    tokenizer = found.place.tokenizer or "TOKENIZER"
    tokens = count_upwards(1.02 * found.chosen.tokens)
    return (
        f"python prepare_data.py --input 'mine/*.jsonl' --tokenizer {tokenizer} --max_tokens {tokens} "
        f"--validation_fraction 0.01 --output {found.place.shards}"
    )


def write_recipe(found: Answer, command: str) -> None:
    """The model's JSON and the recipe."""
    place, shape = found.place, found.chosen.shape
    for path, text in ((place.model, shape.json_text), (place.recipe, recipe_text(found, command))):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, text)


def recipe_text(found: Answer, command: str) -> str:
    """The recipe, with every reason."""
    run, place = found.chosen, found.place
    best, length = run.combinations[0], run.shape.sequence_length
    every = max(1, min(run.steps // SAVES, round(SECONDS_BETWEEN_SAVES / best.seconds)))
    measured = SHARE_FOR_VALIDATION * every * run.batch * 3 / length
    reasons = "\n".join(
        textwrap.fill(
            f"{choice.name:<14} {choice.value}: {choice.reason}", 117, initial_indent="# ", subsequent_indent="#   "
        )
        for choice in choices(found)
    )
    once = ", reduce_once: true" if best.candidate.reduces_once else ""
    routers = ROUTERS if run.shape.family.experts else ""
    preparation = "" if place.is_prepared else f"# Prepare the data first:\n#   {preparation_command(found)}\n"
    return f"""\
{MADE_BY}python {command}
{preparation}# Start it with: {launch_command_of(found)}
{reasons}
model: {place.model}
output: {json.dumps(str(place.output))}
seed: 42
precision: {run.run.precision}
data:
  train: [{{shards: {json.dumps(str(place.shards))}}}]
  sequence_length: {length}
  document_mask: true
budget: {{steps: {run.steps}}}
batch: {{tokens_per_step: {run.batch}, sequences_per_micro_batch: {best.candidate.micro_batch}{once}}}
optim:
  name: {run.budget.optimizer}
  learning_rate: {run.learning_rate:g}
  schedule: cosine
  warmup_steps: {run.warmup_steps}
  weight_decay: {run.weight_decay:g}
  max_grad_norm: 1.0
{routers}compile: {run.run.config.compile}
activation_checkpointing: {best.checkpointing}
validation: {{every_steps: {every}, sequences: {int(min(max(measured, 4), 512))}}}
checkpoint: {{every_steps: {every}, keep_last: 2, keep_best: 1}}
logging: {{every_steps: 10}}
"""
