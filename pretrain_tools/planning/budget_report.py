"""Reports the run chosen for a budget as a table or as a commented recipe."""

import math
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from pretrain.model.model_config import padded_vocabulary
from pretrain.terminal import width_of
from pretrain.units import count_text
from pretrain_tools.planning.budget import (
    ENOUGH_TOKENS,
    SECONDS_TO_START,
    SHARE_FOR_STEPS,
    RunBudget,
    Sized,
    choose_run,
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

Choice = tuple[str, str, str]
"""(name, value, reason)"""


Expectation = Callable[[int, int, int], tuple[float, float, float, str]]
"""Maps (parameters in matmuls, all parameters, tokens) to (loss, low, high, remark)."""


@dataclass(frozen=True)
class Answer:
    """The run chosen for a budget."""

    chosen: Sized
    expected: tuple[float, float, float, str] | None
    """Predicted (loss, low, high, remark) with --ladder; otherwise None."""
    place: RecipePlace

    @property
    def launch(self) -> str:
        """The command that starts the run."""
        run = self.chosen
        if run.budget.hardware.gpus == 1:
            return f"python train.py --config {self.place.recipe}"
        return command_of(run.best, str(self.place.recipe), [], run.budget.hardware, run.config)

    @property
    def preparation(self) -> str:
        """The command that prepares enough data for one epoch and validation."""
        millions = math.ceil(1.02 * self.chosen.tokens / 1e6)
        return (
            f"python prepare_data.py --input 'mine/*.jsonl' --tokenizer {self.place.tokenizer or 'TOKENIZER'} "
            f"--max_tokens {millions}M --validation_fraction 0.01 "
            f"--output {self.place.shards}"
        )


def recipe_of_budget(
    request: BudgetRequest, hardware: Hardware, command: str, expect: Expectation | None = None
) -> None:
    """Chooses a run, writes its recipe if requested, and prints the result.

    Args:
        command: the user's command, which becomes the recipe's first line.
        expect: function that predicts the loss.

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
    chosen = choose_run(budget)
    work = chosen.work
    expected = expect(work.non_embedding, work.active, chosen.tokens) if expect else None
    found = Answer(chosen, expected, request.place)
    if options.write:
        found.place.write(found.chosen.shape.json_text, text_of(found, command))
    print_answer(found, bool(options.write))


def choices(found: Answer) -> list[Choice]:
    """Lists every choice with its reason."""
    run = found.chosen
    lines = lines_of(
        "choices.j2",
        "choices",
        run,
        tokens_reason(run),
        reason_of(run.best, run.candidates),
        expected=found.expected,
        enough_tokens=ENOUGH_TOKENS,
        seconds_to_start=SECONDS_TO_START,
        share_for_steps=SHARE_FOR_STEPS,
    )
    return [tuple(line.split(" | ", 2)) for line in lines]


def tokens_reason(run: Sized) -> str:
    unique = run.budget.unique_tokens
    if math.isinf(unique):
        return "as many as the budget allows, without repetition"
    epochs = run.tokens / unique
    text = f"{epochs:.3g} epochs of {count_text(unique)} tokens"
    return f"{text}; repeated tokens are worth less, so 5 is the maximum (arXiv 2305.16264)" if epochs > 1 else text


def print_answer(found: Answer, is_written: bool) -> None:
    console = Console(soft_wrap=False, highlight=False, markup=False)
    console.width = width_of(sys.stdout) or TABLE_WIDTH
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("choice", "value", "reason"):
        table.add_column(column, overflow="fold")
    for choice in choices(found):
        table.add_row(*choice)
    console.print(table, "")
    place = found.place
    lines = ["To write the recipe and the model's JSON, pass --write recipes/mine.yaml."]
    if is_written:
        lines = [
            f"Wrote {place.model} and {place.recipe}",
            *([] if place.is_prepared else [f"Prepare the data:\n  {found.preparation}"]),
            f"Check the recipe:\n  python train.py --config {place.recipe} --check",
            f"Start the run:\n  {found.launch}",
        ]
    for line in lines:
        # Paths and commands must stay on one line, so that they can be pasted.
        console.print(line, soft_wrap=True)


def text_of(found: Answer, command: str) -> str:
    """Formats the recipe with a comment for each choice."""
    run = found.chosen
    # In long runs, a crash should cost at most half an hour.
    every = max(1, min(run.steps // SAVES, round(SECONDS_BETWEEN_SAVES / run.best.step_seconds)))
    sequences = SHARE_FOR_VALIDATION * every * run.batch * 3 / run.shape.sequence_length
    lines = [f"{name:<14} {value}: {reason}" for name, value, reason in choices(found)]
    return render(
        "budget.yaml.j2",
        made_by=MADE_BY,
        command=command,
        launch=found.launch,
        preparation=found.preparation,
        place=found.place,
        reasons="\n".join(textwrap.fill(line, 117, initial_indent="# ", subsequent_indent="#   ") for line in lines),
        run=run,
        every=every,
        validation_sequences=int(min(max(sequences, 4), 512)),
    )
