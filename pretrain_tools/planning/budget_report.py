"""Reports the run chosen for a budget as a table or as a commented recipe."""

import math
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from pretrain.model.model_config import padded_vocabulary
from pretrain.terminal import width_of
from pretrain_tools.planning.budget import (
    ENOUGH_TOKENS,
    SECONDS_TO_START,
    SHARE_FOR_STEPS,
    RunBudget,
    Sized,
    choose_run,
    unusual_ratio,
)
from pretrain_tools.planning.budget_request import BudgetRequest
from pretrain_tools.planning.candidates import command_of, reason_of
from pretrain_tools.planning.families import FAMILIES
from pretrain_tools.planning.report import TABLE_WIDTH
from pretrain_tools.planning.step_time import Hardware
from pretrain_tools.planning.texts import MADE_BY, RecipePlace, lines_of, render

SAVES = 10
"""Minimum number of checkpoints and validations per run. They are at most SECONDS_BETWEEN_SAVES apart."""
SECONDS_BETWEEN_SAVES = 1800
SHARE_FOR_VALIDATION = 0.02
"""Validation FLOPs as a fraction of the training FLOPs."""


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
    rows = choices(run, expected)
    warnings = [f"warning: {warning}"] if (warning := unusual_ratio(run)) else []
    place = request.place
    # Enough data for one epoch and validation.
    preparation = (
        f"python prepare_data.py --input 'mine/*.jsonl' --tokenizer {place.tokenizer or 'TOKENIZER'} --max_tokens "
        f"{math.ceil(1.02 * run.tokens / 1e6)}M --validation_fraction 0.01 --output {place.shards}"
    )
    launch = command_of(run.best, str(place.recipe), [], hardware, run.config)
    lines = ["To write the recipe and the model's JSON, pass --write recipes/mine.yaml."]
    if options.write:
        commands = {"command": command, "preparation": preparation, "launch": launch}
        place.write(run.shape.json_text, recipe_text(run, rows, warnings, place, **commands))
        lines = [
            f"Wrote {place.model} and {place.recipe}",
            *([] if place.is_prepared else [f"Prepare the data:\n  {preparation}"]),
            f"Check the recipe:\n  python train.py --config {place.recipe} --check",
            f"Start the run:\n  {launch}",
        ]
    print_choices(rows, [*warnings, *lines])


def choices(run: Sized, expected: Any) -> list[list[str]]:
    """Lists every choice as [name, value, reason]. expected: the predicted loss, or None."""
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
    return [line.split(" | ", 2) for line in lines]


def print_choices(rows: list[list[str]], lines: list[str]) -> None:
    console = Console(soft_wrap=False, highlight=False, markup=False)
    console.width = width_of(sys.stdout) or TABLE_WIDTH
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("choice", "value", "reason"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table, "")
    for line in lines:
        # Paths and commands must stay on one line, so that they can be pasted.
        console.print(line, soft_wrap=True)


def recipe_text(run: Sized, rows: list[list[str]], warnings: list[str], place: RecipePlace, **commands: str) -> str:
    """Formats the recipe with a comment for each choice."""
    # In long runs, a crash should cost at most half an hour.
    every = max(1, min(run.steps // SAVES, round(SECONDS_BETWEEN_SAVES / run.best.step_seconds)))
    sequences = SHARE_FOR_VALIDATION * every * run.batch * 3 / run.shape.sequence_length
    lines = [*(f"{name:<14} {value}: {reason}" for name, value, reason in rows), *warnings]
    return render(
        "budget.yaml.j2",
        made_by=MADE_BY,
        place=place,
        reasons="\n".join(textwrap.fill(line, 117, initial_indent="# ", subsequent_indent="#   ") for line in lines),
        run=run,
        every=every,
        validation_sequences=int(min(max(sequences, 4), 512)),
        **commands,
    )
