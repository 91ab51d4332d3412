"""Runs lm-evaluation-harness on a model folder.

The scores don't depend on the number of processes: every rank builds all requests, answers its share, and receives all
answers. With several processes, the harness itself would sample different few-shot examples.
"""

import argparse
import contextlib
import io
import logging
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.errors import InputError, Problems, one_line
from pretrain.files import ROOT
from pretrain.hardware import DTYPES
from pretrain.parallel.strategy import Strategy
from pretrain.training.benchmarks import mean_and_error
from pretrain_tools.evaluation.core import score_core
from pretrain_tools.evaluation.results import TaskScore, mean_of_means
from pretrain_tools.evaluation.task_names import (
    CORE,
    SMALL_TASKS,
    TASK_SETS,
    BundleTask,
    core_tasks,
    is_file,
    manager_of,
    task_problems,
)
from pretrain_tools.runs.history import is_number

BITS_PER_BYTE = "bits_per_byte"
BOOKKEEPING = ("sample_len", "sample_count")


@dataclass(frozen=True)
class TaskSelection:
    """Tasks whose data has been loaded."""

    names: list[str]
    core: list[BundleTask]
    """CORE tasks from DCLM's bundle."""
    loaded: list[Any] = field(default_factory=list)
    """lm_eval Task and Group objects."""
    manager: Any = None
    """The lm_eval TaskManager."""
    tasks: dict[str, Any] = field(default_factory=dict)
    """{name: Task}, including tasks in groups."""
    groups: dict[str, Any] = field(default_factory=dict)
    """{name: Group}, including nested groups."""


@contextlib.contextmanager
def evaluate_package_importable() -> Iterator[None]:
    """Makes `import evaluate` find the library, which some tasks need, instead of this project's evaluate.py."""
    path = list(sys.path)
    shadow = sys.modules.get("evaluate")
    sys.path[:] = [entry for entry in path if Path(entry or ".").resolve() != ROOT]
    if shadow is not None and Path(getattr(shadow, "__file__", None) or "/").resolve().parent == ROOT:
        del sys.modules["evaluate"]
    try:
        yield
    finally:
        sys.path[:] = path


@contextlib.contextmanager
def only_main_prints(is_main: bool) -> Iterator[None]:
    """Silences all ranks except the main one."""
    # The harness sees every rank as rank 0 (see SharedModel) and would print on all of them.
    if is_main:
        yield
        return
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def select_tasks(names: list[str], include_path: Path | None = None, eval_bundle: Path | None = None) -> TaskSelection:
    """Finds tasks by name and loads their data.

    Raises InputError listing all problems. Tasks that run model-generated code aren't allowed.

    Args:
        names: tasks, groups, tags, sets (base, small, core), patterns (blimp_*) and .yaml files.
    """
    if problems := task_problems(names, include_path, eval_bundle):
        raise InputError(*problems)
    core = core_tasks(eval_bundle) if CORE in names else []
    of_harness = [name for name in names if name != CORE]
    if not of_harness:
        return TaskSelection(names, core)
    wanted = dict.fromkeys(member for name in of_harness for member in TASK_SETS.get(name, (name,)))
    manager = manager_of([name for name in wanted if not is_file(name)], include_path)
    specs = [
        spec
        for name in wanted
        for spec in ([str(Path(name).absolute())] if is_file(name) else manager.match_tasks([name]))
    ]
    problems = Problems()
    with evaluate_package_importable():
        loaded = [item for spec in dict.fromkeys(specs) for item in problems.attempt(_load, manager, spec) or []]
    groups = [item for item in loaded if hasattr(item, "get_all_tasks")]
    grouped = {task.task_name for group in groups for task in group.get_all_tasks()}
    # A task that is also in a requested group is scored only as part of the group.
    tasks = {item.task_name: item for item in loaded if item not in groups and item.task_name not in grouped}
    loaded = [*groups, *tasks.values()]
    try:
        found = manager.load(loaded)
    except ValueError as error:  # a task in two groups
        problems.append(f"--tasks: {error}; use only one of them, or pass the tasks by name")
    problems.stop_if_any()
    return TaskSelection(names, core, loaded, manager, found["tasks"], found["groups"])


def _load(manager: Any, spec: str) -> list[Any]:
    try:
        found = manager.load([spec])
    except Exception as error:  # task code, the datasets library and the network may raise anything
        raise InputError(
            f"--tasks {spec}: its data or definition cannot be loaded ({one_line(error)}); data paths in a task file "
            "are relative to the current folder, and other data is loaded from the Hub"
        ) from error
    unsafe = [name for name, task in found["tasks"].items() if getattr(task, "UNSAFE_CODE", False)]
    if unsafe:
        raise InputError(
            f"--tasks {spec}: {', '.join(unsafe)} runs model-generated code; use the lm_eval command with "
            "--confirm_run_unsafe_code in a sandbox instead"
        )
    return [found["groups"][spec]] if spec in found["groups"] else list(found["tasks"].values())


def score_tasks(
    folder: Path, tasks: TaskSelection, strategy: Strategy, arguments: argparse.Namespace
) -> list[TaskScore]:
    """Scores a model folder. Must be called on all ranks, and returns all scores on each.

    arguments: num_fewshot, limit, batch_size, precision and trust_remote_code, as in evaluate.py.
    """
    from lm_eval import simple_evaluate

    scores = []
    with evaluate_package_importable(), only_main_prints(strategy.ranks.is_main):
        model = _shared_model(strategy)(
            pretrained=str(folder),
            device=str(strategy.device),
            dtype=DTYPES.get(arguments.precision, "auto"),
            batch_size=str(arguments.batch_size or ("auto" if strategy.device.type == "cuda" else 1)),
            max_batch_size=64,
            trust_remote_code=arguments.trust_remote_code,
            # Never load pickles, which can execute code.
            use_safetensors=True,
        )
        if tasks.loaded:
            results = simple_evaluate(
                model=model,
                tasks=list(tasks.loaded),
                task_manager=tasks.manager,
                num_fewshot=arguments.num_fewshot,
                limit=arguments.limit,
                log_samples=False,
            )
            # The harness returns results only if LOCAL_RANK is 0.
            gathered = strategy.ranks.gather(None if results is None else _scores(results, tasks))
            scores += next(found for found in gathered if found is not None)
        if tasks.core:  # must come last, because it changes the model's softmax to fp32
            scores += score_core(model, tasks.core, strategy.ranks, arguments.limit)
    return scores


def _shared_model(strategy: Strategy) -> type:
    """Returns a subclass of HFLM that distributes requests across ranks."""
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)

    class SharedModel(HFLM):
        # The harness sees a single process, so that every rank builds all requests in the same order.
        rank = 0
        world_size = 1

    def shared(method: Callable) -> Callable:
        def answer(model: SharedModel, requests: list, disable_tqdm: bool = False) -> list:
            # Keep a document's requests on the same rank, because they share a context.
            owners = [request.doc_id % strategy.ranks.count for request in requests]
            mine = [request for request, owner in zip(requests, owners, strict=True) if owner == strategy.ranks.rank]
            answers = method(model, mine, disable_tqdm) if mine else []
            parts = [iter(part) for part in strategy.ranks.gather(list(answers))]
            # Each rank answers its requests in order, so merge the answers in order.
            return [next(parts[owner]) for owner in owners]

        return answer

    for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        setattr(SharedModel, name, shared(getattr(HFLM, name)))
    return SharedModel


def _scores(results: dict[str, Any], tasks: TaskSelection) -> list[TaskScore]:
    grouped = {part for group in results.get("groups", ()) for part in results["group_subtasks"][group]}
    bits = _bits_per_byte(tasks)
    scores = []
    for task, row in results["results"].items():  # includes the groups
        # 'acc,none' becomes 'acc'. Keep other filters in the name, because they define a different metric.
        measures = {
            key.removesuffix(",none"): value if is_number(value) else None
            for key, value in row.items()
            if key not in BOOKKEEPING and (is_number(value) or "_stderr" in key)
        }
        if task in bits:
            measures |= mean_and_error(BITS_PER_BYTE, bits[task])
        few_shots, version = (results[key].get(task) for key in ("n-shot", "versions"))
        samples = results["n-samples"].get(task, {}).get("effective")
        is_part = task in grouped and task not in tasks.names
        scores.append(
            TaskScore(task, measures, few_shots, samples, None if version is None else str(version), is_part)
        )
    return scores + (_mean_of_small(scores) if "small" in tasks.names else [])


def _mean_of_small(scores: list[TaskScore]) -> list[TaskScore]:
    """Returns the mean of the set `small`, or [] with a warning if a task has no bits per byte."""
    parts = [score for score in scores if score.task in SMALL_TASKS and BITS_PER_BYTE in score.measures]
    # A task in --include_path may override a harness task with the same name.
    if len(parts) < len(SMALL_TASKS):
        missing = ", ".join(sorted(set(SMALL_TASKS) - {score.task for score in parts}))
        print(
            f"warning: --tasks small: {missing} in --include_path does not score a correct answer as a continuation, "
            "so there is no mean over all tasks",
            file=sys.stderr,
        )
        return []
    samples = sum(score.samples for score in parts)
    return [TaskScore("small", mean_of_means(BITS_PER_BYTE, parts, BITS_PER_BYTE), None, samples, None)]


def _bits_per_byte(tasks: TaskSelection) -> dict[str, list[float]]:
    """Returns {task or group: bits per byte of each correct answer} for all tasks that support it."""
    found = {name: bits for name, task in tasks.tasks.items() if (bits := bits_of_right_answers(task))}
    for name, group in tasks.groups.items():
        parts = [task.task_name for task in group.get_all_tasks()]
        if all(part in found for part in parts):
            found[name] = [value for part in parts for value in found[part]]
    return found


def bits_of_right_answers(task: Any) -> list[float]:
    """Computes bits per byte of each correct answer: -log2 p(answer | question) / UTF-8 bytes of the answer.

    The answer includes the space before it. The formula is from OLMo-in-loop-evals (src/olmo_eval/metrics.py, bpb).
    Returns [] if the task doesn't score the likelihood of a single correct answer. Call after the harness has run.
    """
    bits = []
    for right, instances in questions_of(task):
        instance = next(instance for instance in instances if instance.idx == right)
        answer_bytes = len(instance.args[1].encode())
        if not answer_bytes:
            return []
        bits.append(-instance.resps[0][0] / (answer_bytes * math.log(2)))
    return bits


def questions_of(task: Any) -> list[tuple[int, list[Any]]]:
    """Lists (index of the correct answer, requests) for each question in a task.

    Returns [] if the task doesn't score the likelihood of a single correct answer.
    """
    if task.OUTPUT_TYPE not in ("loglikelihood", "multiple_choice") or callable(task.config.process_results):
        return []
    requests: dict[int, list[Any]] = {}
    for instance in task.instances:
        requests.setdefault(instance.doc_id, []).append(instance)
    questions = [(right_answer(task, instances[0].doc), instances) for instances in requests.values()]
    return [] if any(right is None for right, _ in questions) else questions


def right_answer(task: Any, document: dict) -> int | None:
    """Returns the index of the request that scores the correct answer; None if there isn't exactly one."""
    if task.OUTPUT_TYPE == "loglikelihood":
        return 0
    choices = task.doc_to_choice(document)
    # For tasks with several inputs and one target (WinoGrande), doc_to_text returns the index of the correct input.
    right = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
    if isinstance(right, str):
        right = choices.index(right) if right in choices else None
    return right if isinstance(right, int) and 0 <= right < len(choices) else None
