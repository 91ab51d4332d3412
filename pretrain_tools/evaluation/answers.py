"""Writes the questions and answers of benchmarks as token IDs, for a run that scores them on its training processes.

    python -m pretrain_tools.evaluation.answers --tasks TASK ... --tokenizer FOLDER --output FILE.npz [--limit N]

train.py starts it for `benchmarks: {where: in_loop}`. The harness itself builds the requests and splits them into
tokens, as evaluate.py's model would; what it prints last, if it fails, becomes the run's warning.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.errors import EXIT_BAD_INPUT, InputError, Problems
from pretrain.training.benchmarks import MEASURES, Requests, Task
from pretrain_tools.evaluation.lm_harness import (
    evaluate_package_importable,
    questions_of,
    select_tasks,
)

Pair = tuple[list[int], list[int]]
"""Token IDs of (question, answer)."""


def encoder(folder: Path) -> Any:
    """Returns a harness model that answers nothing, and keeps the tokens of every request in `pairs`."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    class Encoder(TemplateLM):
        add_bos_token = None
        tok_encode = HFLM.tok_encode

        def __init__(self, tokenizer: Any):
            super().__init__()
            self.tokenizer = tokenizer
            self.pairs: dict[tuple[str, str], Pair] = {}

        @property
        def eot_token_id(self) -> int:
            return self.tokenizer.eos_token_id

        def _loglikelihood_tokens(self, requests: list, **_: Any) -> list[tuple[float, bool]]:
            self.pairs |= {texts: (question, answer) for texts, question, answer in requests}
            return [(0.0, False)] * len(requests)

        def loglikelihood_rolling(self, requests: list, **_: Any) -> list[float]:
            return [0.0] * len(requests)

        def generate_until(self, requests: list, **_: Any) -> list[str]:
            return [""] * len(requests)

    return Encoder(AutoTokenizer.from_pretrained(folder))


def requests_of(tokenizer: Path, names: list[str], include_path: Path | None, limit: float | None) -> Requests:
    """Builds the requests. Raises InputError for tasks that are not scored by the likelihood of one right answer."""
    from lm_eval import simple_evaluate

    selected = select_tasks(names, include_path)
    model = encoder(tokenizer)
    with evaluate_package_importable():
        results = simple_evaluate(
            model=model, tasks=list(selected.loaded), task_manager=selected.manager, limit=limit, log_samples=False
        )
    groups = [item for item in selected.loaded if hasattr(item, "get_all_tasks")]
    single = [item for item in selected.loaded if item not in groups]
    parts = {task.task_name: task for group in groups for task in group.get_all_tasks()}
    problems = Problems()
    built = Builder(model.pairs)
    tasks = []
    ranges = {}
    for task in [*single, *parts.values()]:
        name = task.task_name
        first = len(built.right)
        if problem := built.add(task):
            problems.append(problem)
            continue
        ranges[name] = (first, len(built.right))
        given = {key.removesuffix(",none") for key in results["results"].get(name, {})}
        measures = tuple(m for m in MEASURES if m in given or m == "bits_per_byte")
        if task.OUTPUT_TYPE == "loglikelihood":  # its acc asks whether each token is the likeliest
            measures = ("bits_per_byte",)
        is_part = name in parts and name not in names
        tasks.append(Task(name, measures, (ranges[name],), results["n-shot"].get(name), is_part))
    problems.stop_if_any()
    for group in groups:
        for each in [group, *group.get_all_groups()]:
            members = [task.task_name for task in each.get_all_tasks()]
            shared = [m for m in MEASURES if all(m in t.measures for t in tasks if t.name in members)]
            tasks.append(Task(each.name, tuple(shared), tuple(ranges[name] for name in members), None, False))
    return built.requests(tasks)


class Builder:
    """Collects requests, question by question."""

    def __init__(self, pairs: dict[tuple[str, str], Pair]):
        self.pairs = pairs
        self.ids: list[int] = []
        self.ends: list[int] = []
        self.answer_tokens: list[int] = []
        self.characters: list[int] = []
        self.bytes: list[int] = []
        self.question_ends: list[int] = []
        self.right: list[int] = []

    def add(self, task: Any) -> str | None:
        """Adds a task's questions; returns why it cannot be scored here."""
        name = task.task_name
        other = f"--tasks {name}: is not scored by the likelihood of one right answer; use where: blocking for it"
        questions = questions_of(task)
        if not questions:
            return other
        for right, instances in questions:
            choices = task.doc_to_choice(instances[0].doc) if task.OUTPUT_TYPE == "multiple_choice" else [""]
            if len(instances) != len(choices):
                return other
            for instance in sorted(instances, key=lambda instance: instance.idx):
                question, answer = self.pairs[instance.args]
                self.ids += question + answer
                self.ends.append(len(self.ids))
                self.answer_tokens.append(len(answer))
                # As in the harness and in bits_of_right_answers: the space before an answer counts as a byte alone.
                self.characters.append(max(1, len(choices[instance.idx])))
                self.bytes.append(len(instance.args[1].encode()))
            self.question_ends.append(len(self.ends))
            self.right.append(right)
        return None

    def requests(self, tasks: list[Task]) -> Requests:
        return Requests(
            tasks,
            ids=np.array(self.ids, np.int32),
            ends=np.array(self.ends),
            answer_tokens=np.array(self.answer_tokens),
            characters=np.array(self.characters),
            bytes=np.array(self.bytes),
            question_ends=np.array(self.question_ends),
            right=np.array(self.right),
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", required=True)
    parser.add_argument("--include_path", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--limit", type=float)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    try:
        found = requests_of(options.tokenizer, options.tasks, options.include_path, options.limit)
    except InputError as error:
        print(*error.problems, sep="\n")
        return EXIT_BAD_INPUT
    found.write(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
