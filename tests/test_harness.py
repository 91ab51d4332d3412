"""What the harness needs around it: the library that evaluate.py shadows, and tasks that exist."""

import sys
from pathlib import Path

import pytest
from conftest import ROOT

from pretrain.harness import BASE_TASKS, evaluate_package_importable, only_main_speaks


@pytest.mark.parametrize("entry", ["", str(ROOT), f"{ROOT}/tests/.."])
def test_the_evaluate_library_is_found_behind_the_script(monkeypatch, entry):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [entry, *sys.path])
    monkeypatch.delitem(sys.modules, "evaluate", raising=False)
    import evaluate

    assert Path(evaluate.__file__).resolve() == ROOT / "evaluate.py"  # what a task would get
    before = list(sys.path)
    with evaluate_package_importable():
        import evaluate

        assert evaluate.load
        import pretrain.schedule  # noqa: F401  (the project's own modules are still found)
    assert sys.path == before


def test_other_ranks_are_silent(capsys):
    for is_main in (True, False):
        with only_main_speaks(is_main):
            print("out")
            print("error", file=sys.stderr)
    assert capsys.readouterr() == ("out\n", "error\n")


def test_the_base_set_names_tasks_that_exist():
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    tasks = Path(lm_eval.tasks.__file__).parent
    folders = ["hellaswag", "arc", "piqa", "winogrande", "lambada", "super_glue/boolq", "sciq", "openbookqa", "blimp"]
    known = TaskManager(include_path=[str(tasks / f) for f in folders], include_defaults=False).all_tasks
    assert set(BASE_TASKS) <= set(known)
