"""Tests for importing the `evaluate` library despite evaluate.py, and for lm-evaluation-harness task names."""

import sys
from pathlib import Path

import pytest

from pretrain.registry import TASKS
from pretrain_tools.evaluation.evaluate import own_score
from pretrain_tools.evaluation.lm_harness import evaluate_package_importable, only_main_prints
from pretrain_tools.evaluation.results import ModelResults, TaskScore
from pretrain_tools.evaluation.task_names import BASE_TASKS, task_problems
from pretrain_tools.runs.addresses import ModelAddress
from support.project import ROOT


@pytest.mark.parametrize("entry", ["", str(ROOT), f"{ROOT}/tests/.."])
def test_the_evaluate_library_is_found_behind_the_script(monkeypatch, entry):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [entry, *sys.path])
    monkeypatch.delitem(sys.modules, "evaluate", raising=False)
    import evaluate

    assert Path(evaluate.__file__).resolve() == ROOT / "evaluate.py"  # what a task would import by default
    before = list(sys.path)
    with evaluate_package_importable():
        import evaluate

        assert evaluate.load
        import pretrain.optim.learning_rate  # noqa: F401  (the project's own modules are still found)
    assert sys.path == before


def test_other_ranks_are_silent(capsys):
    for is_main in (True, False):
        with only_main_prints(is_main):
            print("out")
            print("error", file=sys.stderr)
    assert capsys.readouterr() == ("out\n", "error\n")


def test_the_limit_is_not_recorded_for_tasks_that_ignore_it(monkeypatch):
    monkeypatch.setitem(TASKS, "mine", lambda model, tokenizer: {"acc": 1.0})
    scores = [own_score("mine", None, None), TaskScore("theirs", {"acc": 0.5}, 0, 10, "1")]
    results = ModelResults(ModelAddress("x", Path("x")), 1, tasks=scores, limit=10)
    assert [(line["task"], line["limit"]) for line in results.lines()] == [("mine", None), ("theirs", 10)]


def test_the_base_set_names_tasks_that_exist():
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    tasks = Path(lm_eval.tasks.__file__).parent
    folders = ["hellaswag", "arc", "piqa", "winogrande", "lambada", "super_glue/boolq", "sciq", "openbookqa", "blimp"]
    known = TaskManager(include_path=[str(tasks / f) for f in folders], include_defaults=False).all_tasks
    assert set(BASE_TASKS) <= set(known)


def test_task_names_in_a_recipe(tmp_path):
    (tmp_path / "mine.yaml").write_text("task: mine\ntag: [ours, theirs]\ndataset_path: json\n")
    assert task_problems(["base", "mine", "ours", "blimp_*", "mmlu", "mmlu_anatomy"], tmp_path) == []
    (problem,) = task_problems(["helaswag"], tmp_path)
    assert problem.startswith("--tasks helaswag: no such task") and "did you mean hellaswag?" in problem
    assert "no such task" in task_problems([f"{tmp_path}/gone.yaml"], None)[0]
    assert task_problems(["base"], tmp_path / "nowhere")[0].startswith("--include_path ")
    (tmp_path / "empty").mkdir()
    assert "contains no .yaml file with a task" in task_problems(["base"], tmp_path / "empty")[0]
