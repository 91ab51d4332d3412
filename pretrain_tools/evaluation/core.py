"""Computes CORE from DataComp-LM (arXiv 2406.11794): the mean centered accuracy over 22 tasks.

The implementation follows nanochat (nanochat/core_eval.py, scripts/base_eval.py), so the scores are comparable with
nanochat's published scores.
"""

import itertools
import json
import math
import random
from typing import Any

import torch

from pretrain.errors import InputError
from pretrain.parallel.ranks import Ranks
from pretrain.training.benchmarks import mean_and_error
from pretrain_tools.evaluation.results import TaskScore, mean_of_means
from pretrain_tools.evaluation.task_names import CORE, CORE_FIELDS, BundleTask

CENTERED = "centered_acc"
ORDER_SEED = 1337
EXAMPLES_SEED = 1234
ITEMS_AT_ONCE = 2000
"""Number of items to tokenize at a time."""

Item = dict[str, Any]


def score_core(model: Any, tasks: list[BundleTask], ranks: Ranks, limit: float | None) -> list[TaskScore]:
    """Scores each task as core/LABEL, and CORE itself. Must be called on all ranks.

    Args:
        model: model from lm_harness.
        limit: number of items per task, or a fraction below 1.
    """
    # By default, HFLM rounds log-likelihoods to the weights' dtype. nanochat computes the losses in fp32.
    model.softmax_dtype = torch.float32
    scores = []
    for task in tasks:
        items = read_items(task)
        count = len(items)
        if limit is not None:
            count = min(count, int(limit) if limit >= 1 else math.ceil(limit * count))
            # As in nanochat, examples come from these items, but there must be enough of them.
            items = items[: max(count, task.few_shots + 1)]
        right = answers_right(model, task, items, count, ranks)
        measures = mean_and_error("acc", list(map(float, right)))
        error = measures["acc_stderr"]
        measures |= {
            CENTERED: (measures["acc"] - task.baseline) / (1 - task.baseline),
            f"{CENTERED}_stderr": None if error is None else error / (1 - task.baseline),
        }
        name = f"{CORE}/{task.label}"
        scores.append(TaskScore(name, measures, task.few_shots, count, None, is_part=True))
    # The two HellaSwag tasks share items, so the standard error is slightly underestimated.
    samples = sum(score.samples for score in scores)
    return [*scores, TaskScore(CORE, mean_of_means(CORE, scores, CENTERED), None, samples, None)]


def read_items(task: BundleTask) -> list[Item]:
    """Reads a task's items in nanochat's order. Raises InputError if the file is incomplete."""
    items = []
    with open(task.file, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                item = json.loads(line)
                *_, answers = (item[name] for name in CORE_FIELDS[task.kind])
                if not 0 <= item.get("gold", 0) < len(answers):
                    raise ValueError("no correct answer")
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    f"--eval_bundle {task.file}:{number}: invalid {task.kind} item ({error}); unpack the bundle again"
                ) from error
            items.append(item)
    if len(items) <= task.few_shots:
        raise InputError(
            f"--eval_bundle {task.file}: contains {len(items)} items, too few for {task.few_shots} few-shot examples"
        )
    # As in nanochat, --limit selects the first items in this order.
    random.Random(ORDER_SEED).shuffle(items)
    return items


def answers_right(model: Any, task: BundleTask, items: list[Item], count: int, ranks: Ranks) -> list[bool]:
    """Returns whether the model answers each of the first `count` items correctly.

    If there are choices, the model's answer is the choice with the lowest mean loss per token. In language modeling,
    each token of the answer must be the most likely one.
    """
    mine: dict[int, bool] = {}
    numbers = range(ranks.rank, count, ranks.count)
    for first in range(0, len(numbers), ITEMS_AT_ONCE):
        of_items = {number: spans(model, task, items, number) for number in numbers[first : first + ITEMS_AT_ONCE]}
        requests = [(None, ids[:start], ids[start:]) for found in of_items.values() for ids, start in found]
        # HFLM has no public method to score token IDs.
        likelihoods = iter(model._loglikelihood_tokens(requests))
        for number, found in of_items.items():
            answers = list(itertools.islice(likelihoods, len(found)))
            losses = [-answer[0] / (len(ids) - start) for answer, (ids, start) in zip(answers, found, strict=True)]
            if task.kind == "language_modeling":
                mine[number] = answers[0][1]
            else:
                mine[number] = losses.index(min(losses)) == items[number]["gold"]
    whole = {number: right for part in ranks.gather(mine) for number, right in part.items()}
    return [whole[number] for number in range(count)]


def spans(model: Any, task: BundleTask, items: list[Item], number: int) -> list[tuple[list[int], int]]:
    """Returns (token IDs of prompt and answer, index of the first scored token) for each choice of an item.

    In language modeling, the answer is the only choice.
    """
    prompts = prompts_of(task, items[number], examples_for(number, items, task.few_shots))
    if model.prefix_token_id is None:
        raise InputError(f"--tasks {CORE}: the tokenizer has no beginning-of-text token; add bos_token to its files")
    tokens = [
        [model.prefix_token_id, *model.tokenizer(prompt, add_special_tokens=False)["input_ids"]] for prompt in prompts
    ]
    shortest = min(map(len, tokens))
    if task.kind == "schema":  # different contexts, same continuation
        common = _common(ids[::-1] for ids in tokens)
        found = [(ids, len(ids) - min(common, shortest - 1)) for ids in tokens]
    else:
        start = min(_common(tokens), shortest - 1) if task.kind == "multiple_choice" else _common(tokens)
        # tokens[0] is the context alone, which shows where the answer begins.
        found = [(ids, start) for ids in (tokens if task.kind == "multiple_choice" else tokens[1:])]
    return [_cropped(ids, start, model.max_length, task) for ids, start in found]


def _cropped(tokens: list[int], start: int, most: int, task: BundleTask) -> tuple[list[int], int]:
    """Truncates a sequence on the left to `most` tokens. Raises InputError if the answer is too long."""
    cut = max(0, len(tokens) - most)
    if start - cut < 1:
        raise InputError(
            f"--tasks {CORE}/{task.label}: an answer of {len(tokens) - start:,} tokens is too long for the model's "
            f"{most:,} positions; omit {CORE}"
        )
    return tokens[cut:], start - cut


def _common(sequences: Any) -> int:
    """Returns the length of the longest common prefix."""
    columns = zip(*sequences, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


def examples_for(number: int, items: list[Item], count: int) -> list[Item]:
    """Samples an item's few-shot examples from the other items, with a seed per item."""
    drawn = random.Random(EXAMPLES_SEED + number).sample(range(len(items) - 1), count)
    return [items[other + (other >= number)] for other in drawn]


def prompts_of(task: BundleTask, item: Item, examples: list[Item]) -> list[str]:
    """Formats one prompt per choice. For language modeling, returns the prompt without and with the answer."""
    shots = [f"{task.delimiter.join(choices_of(task, shot)[shot.get('gold', 0)])}\n\n" for shot in examples]
    before = "".join(shots)
    prompts = [before + task.delimiter.join(choice) for choice in choices_of(task, item)]
    if task.kind == "language_modeling":
        return [f"{before}{item['context'].strip()}{task.delimiter}".strip(), *prompts]
    return prompts


def choices_of(task: BundleTask, item: Item) -> list[tuple[str, str]]:
    """Returns the (context, continuation) of each choice. In language modeling, the answer is the only choice."""
    match task.kind:
        case "multiple_choice":
            return [(item["query"], choice) for choice in item["choices"]]
        case "schema":
            return [(context, item["continuation"]) for context in item["context_options"]]
        case _:
            return [(item["context"].strip(), item["continuation"])]
