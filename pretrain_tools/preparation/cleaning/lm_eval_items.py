"""Prints the items of lm-evaluation-harness tasks as JSON.

Runs as a separate process, because the harness starts threads, which make forking unsafe. Must not import from this
project: some tasks import the evaluate library, which evaluate.py would shadow.
"""

import functools
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

SOURCE_TEXTS = ("passage", "context", "article", "support", "paragraph", "story", "background")
"""Fields with reading passages. They are ignored if the item has other text, because passages come from the web."""
CHOICE = re.compile(
    r"(?:(?:in)?correct_?)?(?:option|choice|answer|ending|target|distractor|sol)_?s?_?\d*$|[A-E]$", re.I
)
"""Matches the names of fields with answer choices."""
ANSWER_BLANK = re.compile(r"(?<!\w)_+(?!\w)")
"""Matches the blank in a question."""
WORD = re.compile(r"\w+")


def main() -> None:
    """Prints {"items": {task: [item_texts, ...]}, "problems": [text, ...]}.

    The argument is a JSON list of task names, patterns, .yaml files or folders.
    """
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # send the harness's own output to stderr
    items = {}
    problems = []
    for name in json.loads(sys.argv[1]):
        try:
            for task in load_tasks(name):
                items[task.task_name] = [item_texts(task, document) for document in task.eval_docs]
        except Exception as error:  # task code, the datasets library and the network may raise anything
            reason = str(error).strip().partition("\n")[0][:300] or "no reason given"
            problems.append(f"{name}: {type(error).__name__}: {reason}")
    json.dump({"items": items, "problems": problems}, output)
    output.close()


def load_tasks(name: str) -> list[Any]:
    """Loads a task, or all tasks in a group, by name."""
    from lm_eval.tasks import TaskManager

    if os.path.isdir(name):
        manager = TaskManager(include_path=name, include_defaults=False)
        names = manager.all_subtasks
    else:
        is_file = name.endswith((".yaml", ".yml"))
        manager = TaskManager(include_defaults=not is_file)
        names = [os.path.abspath(name)] if is_file else manager.match_tasks([name])
    if not names:
        raise LookupError("no such task, and no such file or folder")
    return sorted(manager.load(list(names))["tasks"].values(), key=lambda task: task.task_name)


def item_texts(task: Any, document: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Returns the strings to search for: (strings that also match if they are short, strings that need a long match).

    Questions are the item's fields that appear in the prompt, without the prompt template. Answers are combined with
    the end of the question, because short answers alone occur in many documents.
    """
    prompt = task.doc_to_text(document)
    choices = answers_of(task, document)
    if isinstance(prompt, int):
        # The choices are different beginnings of a sentence, and the target is its end.
        target = task.doc_to_target(document)
        end = target if isinstance(target, str) else ""
        return [f"{choice} {end}".strip() for choice in task.doc_to_choice(document)], []
    prompt = prompt if isinstance(prompt, str) else ""
    strings = [(name, text) for name, text in strings_of(document) if text not in choices]
    shown = shown_in(prompt, strings)
    questions = [text for name, text in shown if name not in SOURCE_TEXTS] or [text for _, text in shown]
    if not questions and prompt.strip():
        questions = [prompt]
    if not questions:
        return choices, []
    question = max(questions, key=len)
    return question_texts(question, choices), [text for text in questions if text != question]


def question_texts(question: str, choices: Sequence[str]) -> list[str]:
    """Returns the question alone, and with each answer appended or filled into its blank."""
    end = " ".join(question.split()[-12:])
    appended = [f"{end} {choice}" for choice in choices]
    # Without a blank, this is the question itself.
    filled_in = [ANSWER_BLANK.sub(lambda _, choice=choice: choice, question) for choice in choices]
    return list(dict.fromkeys([question, *appended, *filled_in]))


def shown_in(prompt: str, strings: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Selects the fields that appear in a prompt, ignoring case and punctuation. Drops fields inside other fields.

    If none appears unchanged, selects all of them, because the prompt may contain edited versions.
    """
    if not prompt.strip():
        return []
    shown = [field for field in strings if stands_in(field[1], prompt)] or strings
    return [
        (name, text) for name, text in shown if not any(text != other and stands_in(text, other) for _, other in shown)
    ]


def stands_in(text: str, other: str) -> bool:
    """Returns True if `text` appears in `other` as whole words."""
    words = spaced_words(text)
    if words.strip() and words in spaced_words(other):
        return True
    return not text.isascii() and text in other  # for scripts without spaces


@functools.lru_cache
def spaced_words(text: str) -> str:
    """Returns the lowercase words of a text with a space before and after each."""
    return f" {' '.join(WORD.findall(text.casefold()))} "


def record_texts(value: Any) -> tuple[list[str], list[str]]:
    """Returns the same as item_texts, for an item from a file. value: a string or a JSON object."""
    strings = list(strings_of(value))
    choices = [text for name, text in strings_of(value, least=1) if isinstance(value, dict) and CHOICE.match(name)]
    texts = sorted((text for _, text in strings if text not in choices), key=len, reverse=True)
    if not texts:
        texts = sorted(choices, key=len, reverse=True)
        choices = []
    if not texts:
        return [], []
    question, *parts = texts
    natural = question_texts(question, choices)
    return natural, [*parts, *(choice for choice in choices if len(choice) > 2)]


def answers_of(task: Any, document: dict[str, Any]) -> list[str]:
    """Lists an item's answer choices, or its target answer."""
    try:
        choices = task.doc_to_choice(document) if getattr(task.config, "doc_to_choice", None) is not None else []
    except Exception:  # the harness raises AssertionError if a task has no choices
        choices = []
    target = task.doc_to_target(document)
    targets = [] if choices and isinstance(target, int) else target if isinstance(target, list) else [target]
    texts = [text.strip() for text in (*choices, *targets) if isinstance(text, str)]
    return list(dict.fromkeys(text for text in texts if text))


def strings_of(value: Any, name: str = "", least: int = 3) -> Iterator[tuple[str, str]]:
    """Yields (top-level field name, string) for all strings in an item that have at least `least` characters."""
    if isinstance(value, str):
        if len(value.strip()) >= least:
            yield name, value.strip()
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from strings_of(inner, name or str(key), least)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from strings_of(inner, name, least)


if __name__ == "__main__":
    main()
