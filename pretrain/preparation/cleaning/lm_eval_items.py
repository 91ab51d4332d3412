"""Prints the items of lm-evaluation-harness tasks as JSON lines. Run as a script of its own by `benchmarks`.

In a process of its own, because the harness starts threads, after which workers cannot be forked safely. It imports
nothing of this project, whose folder is not on its path: some tasks import a library called evaluate.
"""

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

SOURCE_TEXTS = ("passage", "context", "article", "support", "paragraph", "story", "background")
"""Fields of reading comprehension that were text of the web before they were part of an item."""
UNKNOWN = "no such task, and no such file or folder"


def main() -> None:
    """Arguments: JSON of [name of a task, group, tag or pattern, or a .yaml file, or a folder of them]."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the harness prints
    for name in json.loads(sys.argv[1]):
        try:
            tasks = load_tasks(name)
            for task in tasks:
                lines = [json.dumps([task.task_name, *item_texts(task, document)]) for document in task.eval_docs]
                output.write("\n".join([*lines, ""]))
        except Exception as error:  # whatever a task's file, its code, the datasets library or the network raises
            reason = str(error).strip().partition("\n")[0][:300] or "no reason given"
            kind = "" if isinstance(error, LookupError) and reason == UNKNOWN else f"{type(error).__name__}: "
            output.write(json.dumps({"name": name, "problem": f"{kind}{reason}"}) + "\n")
    output.close()


def load_tasks(name: str) -> list[Any]:
    """Every task of one name."""
    from lm_eval.tasks import TaskManager

    if os.path.isdir(name):
        manager = TaskManager(include_path=name, include_defaults=False)
        names = manager.all_subtasks
    else:
        is_file = name.endswith((".yaml", ".yml"))
        manager = TaskManager(include_defaults=not is_file)
        names = [os.path.abspath(name)] if is_file else manager.match_tasks([name])
    if not names:
        raise LookupError(UNKNOWN)
    found = manager.load(list(names))
    tasks = {task.task_name: task for task in found["tasks"].values()}
    return [tasks[task] for task in sorted(tasks)]


def item_texts(task: Any, document: dict[str, Any]) -> tuple[list[str], list[str]]:
    """(texts that are an item even when short, texts of which only a long run is one).

    The question is what the task's prompt shows of the item's fields, without the prompt's own words; an answer counts
    together with the end of the question, or it would be found wherever its words stand.
    """
    prompt, choices = task.doc_to_text(document), answers_of(task, document)
    prompt = prompt if isinstance(prompt, str) else ""
    shown = [(name, text) for name, text in strings_of(document) if text in prompt and text not in choices]
    shown = [(name, text) for name, text in shown if not any(text != other and text in other for _, other in shown)]
    questions = [text for name, text in shown if name not in SOURCE_TEXTS] or [text for _, text in shown]
    if not questions and prompt.strip():
        questions = [prompt]
    if not questions:
        return choices, []
    question = max(questions, key=len)
    end = " ".join(question.split()[-12:])
    return [question, *(f"{end} {text}" for text in choices)], [text for text in questions if text != question]


def answers_of(task: Any, document: dict[str, Any]) -> list[str]:
    """The answers to choose from, or the one to generate."""
    try:
        choices = task.doc_to_choice(document) if getattr(task.config, "doc_to_choice", None) is not None else []
    except Exception:  # a task without choices; the harness asserts
        choices = []
    target = task.doc_to_target(document)
    targets = [] if choices and isinstance(target, int) else target if isinstance(target, list) else [target]
    texts = [text.strip() for text in (*choices, *targets) if isinstance(text, str)]
    return list(dict.fromkeys(text for text in texts if text))


def strings_of(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """(name of the outermost field, text) of every text in an item."""
    if isinstance(value, str):
        if len(value.strip()) > 2:
            yield name, value.strip()
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from strings_of(inner, name or str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from strings_of(inner, name)


if __name__ == "__main__":
    main()
