"""Tokenizes benchmark questions and answers, so that a run can evaluate them on its training processes.

    python -m pretrain_tools.evaluation.answers --tasks TASK ... --tokenizer FOLDER --output FILE.npz [--limit N]

train.py runs this script for `benchmarks: {where: in_loop}`. If it fails, the run logs the last line of its output as
a warning.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.errors import InputError, Problems, run_script
from pretrain.training.benchmarks import MEASURES, Requests, Task
from pretrain_tools.evaluation.lm_harness import evaluate_package_importable, questions_of, select_tasks

Pair = tuple[list[int], list[int]]
"""Token IDs of (question, answer)."""
Answer = tuple[list[int], int, int, int]
"""(token IDs of question and answer, number of tokens in the answer, number of characters, number of bytes)."""


def encoder(folder: Path) -> Any:
    """Returns a dummy harness model that only stores the token IDs of all requests in `pairs`."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    class Encoder(TemplateLM):
        add_bos_token = None
        custom_prefix_token_id = None
        tok_encode = HFLM.tok_encode
        # By default, the harness would begin an empty question with EOS, but HFLM begins it with BOS.
        prefix_token_id = HFLM.prefix_token_id

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
    """Builds the requests. Raises InputError for tasks that don't score the likelihood of a single correct answer."""
    from lm_eval import simple_evaluate

    selected = select_tasks(names, include_path)
    model = encoder(tokenizer)
    with evaluate_package_importable():
        results = simple_evaluate(
            model=model, tasks=list(selected.loaded), task_manager=selected.manager, limit=limit, log_samples=False
        )
    parts = {task.task_name for group in selected.groups.values() for task in group.get_all_tasks()}
    problems = Problems()
    answers: list[Answer] = []
    question_ends, right, tasks, ranges = [], [], [], {}
    for name, task in sorted(selected.tasks.items(), key=lambda item: item[0] in parts):  # tasks in groups last
        first = len(right)
        for number, of_question in problems.attempt(answers_of, task, model.pairs) or []:
            answers += of_question
            question_ends.append(len(answers))
            right.append(number)
        ranges[name] = (first, len(right))
        given = {key.removesuffix(",none") for key in results["results"].get(name, {})}
        measures = tuple(m for m in MEASURES if m in given or m == "bits_per_byte")
        if task.OUTPUT_TYPE == "loglikelihood":  # here, acc means that each token is the most likely one
            measures = ("bits_per_byte",)
        is_part = name in parts and name not in names
        tasks.append(Task(name, measures, (ranges[name],), results["n-shot"].get(name), is_part))
    problems.stop_if_any()
    for name, group in selected.groups.items():
        members = [task.task_name for task in group.get_all_tasks()]
        shared = [m for m in MEASURES if all(m in t.measures for t in tasks if t.name in members)]
        tasks.append(Task(name, tuple(shared), tuple(ranges[member] for member in members), None, False))
    ids, *of_answers = zip(*answers, strict=True)
    return Requests(
        tasks,
        np.concatenate(ids, dtype=np.int32),
        np.cumsum(list(map(len, ids))),
        *map(np.array, of_answers),
        np.array(question_ends),
        np.array(right),
    )


def answers_of(task: Any, pairs: dict[tuple[str, str], Pair]) -> list[tuple[int, list[Answer]]]:
    """Lists (index of the correct answer, all answers) for each question in a task.

    Raises InputError if the task doesn't score the likelihood of a single correct answer.
    """
    found = []
    for right, instances in questions_of(task):
        choices = task.doc_to_choice(instances[0].doc) if task.OUTPUT_TYPE == "multiple_choice" else [""]
        if len(instances) != len(choices):
            found = []
            break
        answers = []
        for instance in sorted(instances, key=lambda instance: instance.idx):
            question, answer = pairs[instance.args]
            # As in the harness, the space before an answer counts as a byte, but not as a character.
            sizes = max(1, len(choices[instance.idx])), len(instance.args[1].encode())
            answers.append((question + answer, len(answer), *sizes))
        found.append((right, answers))
    if not found:
        raise InputError(
            f"--tasks {task.task_name}: where: in_loop only supports tasks with a single correct answer, scored by "
            "likelihood; use where: blocking"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", required=True)
    parser.add_argument("--include_path", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--limit", type=float)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    found = requests_of(options.tokenizer, options.tasks, options.include_path, options.limit)
    found.write(options.output)


if __name__ == "__main__":
    run_script(main)
