"""Checks that benchmarks exist in the harness, the user's folder or DCLM's bundle.

    python -m pretrain_tools.evaluation.task_names --tasks TASK ... [--include_path FOLDER] [--eval_bundle FOLDER] \
        [--extensions FILE ...]

Prints one problem per line. train.py runs this script before training.
"""

import argparse
import csv
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pretrain.errors import InputError, Problems, did_you_mean, one_line
from pretrain.registry import TASKS, load_extensions

BASE_TASKS = (
    "hellaswag", "arc_easy", "arc_challenge", "piqa", "winogrande", "lambada_openai", "boolq", "sciq", "openbookqa",
    "blimp",
)  # fmt: skip
"""Tasks in the set `base`, for base models."""
SMALL_TASKS = ("arc_easy", "arc_challenge", "hellaswag", "winogrande", "piqa", "social_iqa", "sciq", "lambada_openai")
"""Tasks in the set `small`, from the base-easy suite of OLMo 3 (arXiv 2512.13961). Bits per byte of the correct answer
decrease smoothly long before a model chooses it."""
TASK_SETS = {"base": BASE_TASKS, "small": SMALL_TASKS}

CORE = "core"
CORE_SHOTS = {
    "hellaswag_zeroshot": 0, "jeopardy": 10, "bigbench_qa_wikidata": 10, "arc_easy": 10, "arc_challenge": 10,
    "copa": 0, "commonsense_qa": 10, "piqa": 10, "openbook_qa": 0, "lambada_openai": 0, "hellaswag": 10,
    "winograd": 0, "winogrande": 0, "bigbench_dyck_languages": 10, "agi_eval_lsat_ar": 3,
    "bigbench_cs_algorithms": 10, "bigbench_operators": 10, "bigbench_repeat_copy_logic": 10, "squad": 10, "coqa": 0,
    "boolq": 10, "bigbench_language_identification": 10,
}  # fmt: skip
"""{CORE task: number of few-shot examples} (arXiv 2406.11794). The tasks are low_variance_datasets in DCLM's
eval/additional_aggregation.json, and the numbers are from nanochat's core.yaml."""
CORE_FIELDS = {
    "multiple_choice": ("query", "gold", "choices"),
    "schema": ("continuation", "gold", "context_options"),
    "language_modeling": ("context", "continuation"),
}
"""{task type: fields of its items}. The last field contains the answers, or the only answer. `gold` is the index of
the correct choice."""


@dataclass(frozen=True)
class BundleTask:
    """A task in an evaluation bundle of DCLM or nanochat (core.yaml, eval_meta_data.csv, eval_data/)."""

    label: str
    kind: str
    file: Path
    few_shots: int
    delimiter: str
    """Text between question and answer."""
    baseline: float
    """Accuracy of random guessing, from 0 to 1."""

    def is_usable(self, few_shots: int) -> bool:
        """Returns True if the task has this number of few-shot examples, a known type, a baseline and a file."""
        is_known = self.few_shots == few_shots and self.kind in CORE_FIELDS
        return is_known and 0 <= self.baseline < 1 and self.file.is_file()


def task_problems(tasks: list[str], include_path: Path | None, bundle: Path | None = None) -> list[str]:
    """Lists problems with task names and task folders."""
    problems = Problems()
    if CORE in tasks:
        problems.attempt(core_tasks, bundle)
    if include_path is not None and not task_manager(include_path, include_defaults=False).all_tasks:
        problems.append(f"--include_path {include_path}: contains no .yaml file with a task or a group")
    # Skip known tasks, because building the harness's index takes 10 seconds.
    questioned = [name for name in tasks if name not in {CORE, *TASK_SETS, *BASE_TASKS, *SMALL_TASKS}]
    names = [name for name in questioned if not is_file(name)]
    manager = manager_of(names, include_path) if names else None
    for name in questioned:
        if not (Path(name).is_file() if is_file(name) else manager.match_tasks([name])):
            near = did_you_mean(name, [*manager.all_tasks, *TASK_SETS] if manager else ())
            # The harness has 14,000 names, which are too many to list.
            near = near if near.startswith("; did") else "; run `lm_eval ls tasks` to list all"
            problems.append(f"--tasks {name}: no such task, group, set or .yaml file{near}")
    return problems


def manager_of(names: Iterable[str], include_path: Path | None) -> Any:
    """Returns an lm_eval TaskManager, without the harness's tasks if the user's folder contains all of `names`."""
    if include_path is not None:
        local = task_manager(include_path, include_defaults=False)
        if all(is_complete(name, local) for name in names):
            return local
    return task_manager(include_path, include_defaults=True)


@functools.cache
def task_manager(include_path: Path | None, include_defaults: bool) -> Any:
    """Returns an lm_eval TaskManager for the user's tasks and, with include_defaults, the harness's tasks."""
    from lm_eval.tasks import TaskManager

    folder = None if include_path is None else str(include_path)
    return TaskManager(include_path=folder, include_defaults=include_defaults)


def core_tasks(bundle: Path | None) -> list[BundleTask]:
    """Returns the 22 tasks of CORE. Raises InputError if the bundle doesn't contain all of them as published."""
    if bundle is None:
        raise InputError(
            f"--tasks {CORE}: requires DCLM's evaluation bundle; set --eval_bundle to the folder with core.yaml, "
            "eval_meta_data.csv and eval_data/ (see CORE in docs/benchmarks.md)"
        )
    known = _tasks_in(bundle)
    unusable = [
        label for label, shots in CORE_SHOTS.items() if label not in known or not known[label].is_usable(shots)
    ]
    if unusable:
        raise InputError(
            f"--eval_bundle {bundle}: lacks {len(unusable)} of the {len(CORE_SHOTS)} tasks of CORE, or their type, "
            f"number of few-shot examples, random baseline or file differs ({', '.join(unusable)}); use the published "
            "bundle"
        )
    return [known[label] for label in CORE_SHOTS]


def _tasks_in(bundle: Path) -> dict[str, BundleTask]:
    """Reads all tasks in a bundle: {label: task}. Raises InputError."""
    try:
        with open(bundle / "eval_meta_data.csv", encoding="utf-8", newline="") as file:
            percent = {row["Eval Task"]: float(row["Random baseline"] or "nan") for row in csv.DictReader(file)}
        rows = yaml.safe_load((bundle / "core.yaml").read_text(encoding="utf-8"))["icl_tasks"]
        return {
            row["label"]: BundleTask(
                label=row["label"],
                kind=row["icl_task_type"],
                file=bundle / "eval_data" / row["dataset_uri"],
                few_shots=int(row["num_fewshot"][0]),
                delimiter=row.get("continuation_delimiter", " "),
                baseline=0.01 * percent.get(row["label"], float("nan")),
            )
            for row in rows
        }
    except (OSError, ValueError, KeyError, TypeError, IndexError, yaml.YAMLError) as error:
        raise InputError(
            f"--eval_bundle {bundle}: core.yaml or eval_meta_data.csv cannot be read ({one_line(error)}); use the "
            "folder of the unpacked DCLM bundle"
        ) from error


def is_complete(name: str, manager: Any) -> bool:
    """Returns True if a manager contains a task, or a group and all its tasks."""
    if name not in manager.all_groups:
        return name in manager.all_subtasks
    parts = (manager.task_index[name].cfg or {}).get("task")
    return isinstance(parts, list) and all(isinstance(part, str) and is_complete(part, manager) for part in parts)


def is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", metavar="TASK", required=True)
    parser.add_argument("--include_path", type=Path)
    parser.add_argument("--eval_bundle", type=Path)
    parser.add_argument("--extensions", nargs="+", default=[])
    arguments = parser.parse_args()
    load_extensions(arguments.extensions)
    tasks = [name for name in arguments.tasks if name not in TASKS]
    for problem in task_problems(tasks, arguments.include_path, arguments.eval_bundle):
        # A recipe's settings have the same names as the options.
        setting = re.sub(r"^--(\w+)", r"benchmarks.\1:", problem)
        print(setting.replace("--eval_bundle", "benchmarks.eval_bundle"))


if __name__ == "__main__":
    main()
