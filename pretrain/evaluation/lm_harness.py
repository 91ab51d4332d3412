"""lm-evaluation-harness on a model folder: the scores of the `lm_eval` command, on any number of processes.

With several processes, the harness itself draws other few-shot examples than with one and sums in another order. Here
every process builds all requests, answers its share, and receives all answers: scores do not depend on their number.
"""

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.errors import InputError, Problems
from pretrain.files import ROOT
from pretrain.parallel.strategy import Strategy
from pretrain.runs.history import is_number
from pretrain.training.task_names import TASK_SETS, no_such_task, task_problems

HARNESS_DTYPES = {"auto": "auto", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
BOOKKEEPING = ("alias", "name", "sample_len", "sample_count")


@dataclass(frozen=True)
class TaskScore:
    """The scores of one task or group."""

    task: str
    measures: dict[str, float | None]
    """By the harness's names: acc and acc_stderr, or exact_match,strict-match and exact_match_stderr,strict-match."""
    few_shots: int | None
    samples: int | None
    version: str | None
    is_part: bool = False
    """One of a group that has a score of its own, and not asked for by name."""


@dataclass(frozen=True)
class TaskSettings:
    """How tasks are scored."""

    few_shots: int | None = None
    """Examples in the prompt; None: the task's own number."""
    limit: float | None = None
    """Documents per task, or a fraction below 1; for quick tests."""
    batch_size: str | None = None
    """A number, "auto" (the largest that fits) or None: auto on a GPU, 1 on a CPU."""
    precision: str = "auto"
    """Of the weights: auto (as saved), bf16, fp16 or fp32."""
    trust_remote_code: bool = False


@dataclass(frozen=True)
class TaskSelection:
    """Tasks that exist and whose data is there, ready to be scored."""

    names: list[str]
    loaded: list[Any] = field(repr=False)
    """lm_eval Task and Group objects."""
    manager: Any = field(repr=False)
    """The lm_eval TaskManager that knows them."""


@contextlib.contextmanager
def evaluate_package_importable() -> Iterator[None]:
    """Inside, `import evaluate` finds the library of that name and not this project's script, which shadows it.

    Some tasks of the harness import the library. pretrain's own modules stay importable: a package's modules are found
    through the package, not through sys.path.
    """
    path, shadow = list(sys.path), sys.modules.get("evaluate")
    sys.path[:] = [entry for entry in path if Path(entry or ".").resolve() != ROOT]
    if shadow is not None and Path(getattr(shadow, "__file__", None) or "/").resolve().parent == ROOT:
        del sys.modules["evaluate"]
    try:
        yield
    finally:
        sys.path[:] = path


@contextlib.contextmanager
def only_main_prints(is_main: bool) -> Iterator[None]:
    """Silences everything on the other ranks: the harness reports from each."""
    if is_main:
        yield
        return
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def select_tasks(names: list[str], include_path: Path | None = None) -> TaskSelection:
    """Finds the tasks, groups, tags, sets (base), patterns (blimp_*) and .yaml files, and loads their data.

    Raises InputError with every unknown name, every task whose data cannot be loaded, and every task that would run
    code written by the model.
    """
    if problems := task_problems(names, include_path, ("--tasks", "--include_path")):
        raise InputError(*problems)  # much sooner than the harness, which first reads all its files
    wanted = list(dict.fromkeys(member for name in names for member in TASK_SETS.get(name, (name,))))
    with evaluate_package_importable():
        manager = _task_manager(wanted, include_path)
        specs, unknown = match_names(manager, wanted)
        problems = Problems(unknown)
        problems.stop_if_any()
        loaded = [task for spec in dict.fromkeys(specs) for task in problems.attempt(_load, manager, spec) or []]
    loaded, repeated = _without_repeats(loaded)
    problems += repeated
    problems.stop_if_any()
    return TaskSelection(names, loaded, manager)


def _task_manager(wanted: list[str], include_path: Path | None):
    """Knows the local tasks alone where they are enough: reading the harness's own 14,000 takes many seconds."""
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        local = TaskManager(include_path=str(include_path), include_defaults=False)
        entries = [entry for name in wanted if (entry := local.task_index.get(name))]
        if len(entries) == len(wanted) and all(_is_complete(entry, local.task_index) for entry in entries):
            return local
    return TaskManager(include_path=None if include_path is None else str(include_path))


def _is_complete(entry, index: dict[str, Any]) -> bool:
    """Whether a task, or a group with all its tasks, is in the index. A tag may hold more elsewhere."""
    from lm_eval.tasks._index import Kind

    if entry.kind is not Kind.GROUP:
        return entry.kind is not Kind.TAG
    parts = (entry.cfg or {}).get("task", [])
    names = [part for part in parts if isinstance(part, str)] if isinstance(parts, list) else []
    return (
        bool(names)
        and len(names) == len(parts)
        and all(name in index and _is_complete(index[name], index) for name in names)
    )


def match_names(manager, wanted: list[str]) -> tuple[list[str], list[str]]:
    """(what the task manager can load, problems) of names, patterns and paths."""
    specs, problems = [], []
    for name in wanted:
        if name.endswith((".yaml", ".yml")):
            matches = [str(Path(name).absolute())] if Path(name).is_file() else []
        else:
            matches = manager.match_tasks([name])
        specs += matches
        if not matches:
            problems.append(no_such_task("--tasks", name, [*manager.all_tasks, *TASK_SETS]))
    return specs, problems


def _load(manager, spec: str) -> list[Any]:
    try:
        found = manager.load([spec])
    except Exception as error:  # whatever a task's file, its code, the datasets library or the network raises
        reason = str(error).strip().split("\n")[0][:300] or "no reason given"
        raise InputError(
            f"--tasks {spec}: its data or its definition cannot be loaded ({type(error).__name__}: {reason}); data "
            "paths in a task file are relative to the current folder, other data comes from the Hub"
        ) from error
    unsafe = [name for name, task in found["tasks"].items() if getattr(task, "UNSAFE_CODE", False)]
    if unsafe:
        raise InputError(
            f"--tasks {spec}: {', '.join(unsafe)} runs code that the model writes; use the lm_eval command with "
            "--confirm_run_unsafe_code in a sandbox"
        )
    groups = found.get("groups", {})
    return [groups[spec]] if spec in groups else list(found["tasks"].values())


def _without_repeats(loaded: list[Any]) -> tuple[list[Any], list[str]]:
    """(each task once, problems): a task beside a group that holds it goes, one in two groups is refused."""
    groups = [item for item in loaded if hasattr(item, "get_all_tasks")]
    holders: dict[str, list[str]] = {}
    for group in groups:
        for task in group.get_all_tasks():
            holders.setdefault(task.task_name, []).append(group.name)
    problems = [
        f"--tasks: {task} is in {' and '.join(names)}; give one of them, or the tasks by name"
        for task, names in holders.items()
        if len(names) > 1
    ]
    tasks = {item.task_name: item for item in loaded if item not in groups}
    return groups + [task for name, task in tasks.items() if name not in holders], problems


def score_tasks(folder: Path, tasks: TaskSelection, strategy: Strategy, settings: TaskSettings) -> list[TaskScore]:
    """Scores a model folder; all ranks together, each returns all scores."""
    from lm_eval import simple_evaluate

    batch_size = settings.batch_size or ("auto" if strategy.device.type == "cuda" else "1")
    with evaluate_package_importable(), only_main_prints(strategy.ranks.is_main):
        model = _shared_model(strategy)(
            pretrained=str(folder),
            device=str(strategy.device),
            dtype=HARNESS_DTYPES[settings.precision],
            batch_size=batch_size,
            max_batch_size=64,
            trust_remote_code=settings.trust_remote_code,
            use_safetensors=True,
        )
        model.answer_alone()
        results = simple_evaluate(
            model=model,
            tasks=list(tasks.loaded),
            task_manager=tasks.manager,
            num_fewshot=settings.few_shots,
            limit=settings.limit,
            batch_size=batch_size,
            log_samples=False,
        )
        # The harness returns results only where LOCAL_RANK is 0.
        gathered = strategy.ranks.gather(None if results is None else _scores(results, tasks.names))
    return next(scores for scores in gathered if scores is not None)


def _shared_model(strategy: Strategy) -> type:
    """The harness's model class, answering the requests of each document on one rank."""
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)

    class SharedModel(HFLM):
        def answer_alone(self) -> None:
            """Shows the harness one process: it then builds all requests, in one order, on every rank."""
            self._rank, self._world_size = 0, 1

        def loglikelihood(self, requests, disable_tqdm=False):
            return self._answer(super().loglikelihood, requests, disable_tqdm)

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            return self._answer(super().loglikelihood_rolling, requests, disable_tqdm)

        def generate_until(self, requests, disable_tqdm=False):
            return self._answer(super().generate_until, requests, disable_tqdm)

        def _answer(self, method, requests, disable_tqdm):
            # By document: its choices share a context, which the harness computes once.
            owners = [request.doc_id % strategy.ranks.count for request in requests]
            mine = [request for request, owner in zip(requests, owners, strict=True) if owner == strategy.ranks.rank]
            answers = method(mine, disable_tqdm) if mine else []
            parts = [iter(part) for part in strategy.ranks.gather(list(answers))]
            return [next(parts[owner]) for owner in owners]

    return SharedModel


def _scores(results: dict[str, Any], named: list[str]) -> list[TaskScore]:
    groups = results.get("groups", {})
    grouped = {part for group, parts in results["group_subtasks"].items() if group in groups for part in parts}
    rows = {**results["results"], **groups}
    return [
        TaskScore(
            task=task,
            # 'acc,none' -> 'acc'; another filter stays, since it makes another metric.
            measures={
                key.removesuffix(",none"): value if is_number(value) else None
                for key, value in row.items()
                if key not in BOOKKEEPING and (is_number(value) or "_stderr" in key)
            },
            few_shots=results["n-shot"].get(task),
            samples=results["n-samples"].get(task, {}).get("effective"),
            version=None if results["versions"].get(task) is None else str(results["versions"][task]),
            is_part=task in grouped and task not in named,
        )
        for task, row in rows.items()
    ]
