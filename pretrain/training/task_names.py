"""Whether the benchmarks that a recipe names exist, read from the harness's files without importing it.

Importing lm_eval and building its index of 14,000 tasks takes half a minute; reading the names in its files takes a
second or two, and is not needed for the tasks of `base`.
"""

import fnmatch
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from pretrain.errors import did_you_mean

BASE_TASKS = ("hellaswag", "arc_easy", "arc_challenge", "piqa", "winogrande")
BASE_TASKS += ("lambada_openai", "boolq", "sciq", "openbookqa", "blimp")
"""What `base` stands for: tasks that separate base models of this size, without chat or code."""
TASK_SETS = {"base": BASE_TASKS}

KEY = re.compile(r"""^["']?(?:task|group|tag)["']?\s*:[ \t]*(\S.*)$""", re.MULTILINE)
ITEM = re.compile(r"""^[ \t]*-[ \t]+(?:["']?task["']?[ \t]*:)?[ \t]*([^\s:]+)[ \t]*$""", re.MULTILINE)
"""A line of a list: of tags, or of the tasks of a group."""


def task_problems(
    tasks: Iterable[str],
    include_path: Path | None,
    settings: tuple[str, str] = ("evaluation.tasks:", "evaluation.include_path:"),
) -> list[str]:
    """What is wrong with the names of tasks and the user's folder of tasks, as far as shows without the harness.

    A name is known if a task, group or tag of any file has it. settings: the two settings, as messages name them.
    """
    tasks_are, folder_is = settings
    problems, own = [], set()
    if importlib.util.find_spec("lm_eval") is None:
        return [f"{tasks_are} lm_eval is not installed; pip install lm_eval, or leave the tasks out"]
    if include_path is not None:
        if not include_path.is_dir():
            return [f"{folder_is} {include_path}: no such folder; give a folder with task .yaml files"]
        own = set(names_in(include_path))
        if not own:
            problems.append(f"{folder_is} {include_path} holds no .yaml file with a task or a group")
    unknown = [name for name in tasks if name not in TASK_SETS and name not in BASE_TASKS and not matches(name, own)]
    known: set[str] = set()
    if unknown and not all(is_file(name) for name in unknown):
        known = set(names_in(harness_folder())) | own
    for name in unknown:
        if not os.path.isfile(name) if is_file(name) else not matches(name, known):
            problems.append(no_such_task(tasks_are, name, known | set(TASK_SETS)))
    return problems


def no_such_task(setting: str, name: str, known: Iterable[str]) -> str:
    """The problem with an unknown name: with a suggestion, but without a list of all 14,000."""
    near = did_you_mean(name, known)
    near = near if near.startswith("; did") else "; `lm_eval ls tasks` lists all"
    return f"{setting} {name}: no such task, group, set or .yaml file{near}"


def is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def matches(name: str, known: set[str]) -> bool:
    """Whether it is one of the names, or a pattern such as blimp_* of any of them."""
    return name in known or (any(letter in name for letter in "*?[") and bool(fnmatch.filter(known, name)))


def harness_folder() -> Path:
    """Where the installed harness keeps its tasks."""
    spec = importlib.util.find_spec("lm_eval")
    return Path(next(iter(spec.submodule_search_locations))) / "tasks"


def names_in(folder: Path) -> Iterator[str]:
    """Names of tasks, groups and tags in the YAML files of a folder, templates without a suffix among them."""
    for place, _, files in os.walk(folder):
        for file in files:
            if not file.endswith(("yaml", "yml")) and "." in file:
                continue
            try:
                text = (Path(place) / file).read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            for value in [*KEY.findall(text), *ITEM.findall(text)]:
                for name in value.split(" #")[0].strip("[] \t").split(","):
                    yield name.strip(" \t\"'")
