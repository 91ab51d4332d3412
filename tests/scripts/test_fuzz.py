"""Tests with mutated recipes, model configs and command lines: each runs or fails with an error that names the
setting.

`make test` runs a sample in about a minute, and `make test-faults` runs all cases. Failures are reported with their
case numbers. To run a single case: `CASES="recipe 17" pytest tests/scripts/test_fuzz.py -k again`
"""

import json
import os
import random
from collections import Counter

import pytest
import yaml

from pretrain.model.build import count_parameters
from pretrain.model.model_config import load_model_config
from support.faults import EVERYTHING
from support.fuzzing import Case, Result, run_cases
from support.mutations import (
    ARCHITECTURES,
    SCRIPT_OPTIONS,
    Material,
    base_of,
    model_case,
    model_of,
    recipe_case,
    script_case,
)
from support.project import run_script
from support.run_folders import write_run
from support.tiny_models import TINY_LLAMA

KINDS = {"recipe": recipe_case, "model": model_case, "script": script_case}
NUMBERS = {"recipe": 500, "model": 200, "script": 200}
SAMPLE = 8
"""Interval between the case numbers that `make test` runs."""


@pytest.fixture(scope="module")
def material(tmp_path_factory, shards, tokenizer, text_files) -> Material:
    folder = tmp_path_factory.mktemp("fuzz")
    model = {**TINY_LLAMA, "bos_token_id": None}
    (folder / "tiny.json").write_text(json.dumps(model))
    values = {
        "model": str(folder / "tiny.json"),
        "output": "run",
        "precision": "fp32",
        "data": {"train": [{"shards": str(shards)}], "sequence_length": 64},
        "budget": {"steps": 12},
        "batch": {"tokens_per_step": 256, "sequences_per_micro_batch": 1},
        "optim": {"learning_rate": 0.003, "warmup_steps": 2},
        "compile": "none",
    }
    run = write_run(folder / "runs/x")
    text = sorted(text_files.glob("*.py"))[0]
    measured = folder / "measured"
    run_script("prepare_data.py", "--input", text, "--tokenizer", run / "final", "--documents", "paragraph",
               "--validation_fraction", "0.5", "--output", measured)  # fmt: skip
    return Material(folder, values, model, run, measured, tokenizer, text)


def failures(material: Material, kind: str, numbers: range) -> list[str]:
    """Runs cases and returns a paragraph for each failure."""
    found, codes = [], Counter()
    cases = [KINDS[kind](material, number) for number in numbers]
    for number, (case, result) in zip(numbers, run_cases(cases), strict=True):
        codes[result.code] += 1
        if problem := result.problem(case):
            words = " ".join(word if len(word) < 300 else f"{word[:300]}..." for word in case.arguments)
            end = result.output[-1500:]
            found.append(f"{kind} {number}: {problem} ({result.seconds} s)\n{case.script} {words}\n{end}")
    print(f"exit statuses of {kind}: {dict(codes)}")
    return found


def test_the_unmutated_cases_succeed(material):
    """Otherwise, a different error could pass for the expected one."""
    for model_type in ARCHITECTURES:
        path = material.folder / f"{model_type}.json"
        path.write_text(json.dumps(model_of(material, model_type)))
        assert count_parameters(load_model_config(str(path))) > 0
    rng, scripts = random.Random(1), [*SCRIPT_OPTIONS, *SCRIPT_OPTIONS]
    places = [material.place(f"right-{number}") for number in range(len(scripts))]
    cases = [
        Case(script, base_of(rng, script, material, place)) for script, place in zip(scripts, places, strict=True)
    ]
    cases = [case for case in cases if case.script != "runs.py"]  # half of its cases are folders that aren't runs
    cases += [Case("runs.py", ["status", str(material.run)])]
    cases += [Case("train.py", ["--config", str(places[0] / "recipe.yaml"), "--check"])]
    for case, result in run_cases(cases):
        assert result.code == 0, f"{case}\n{result.output}"


@pytest.mark.parametrize("kind", KINDS)
def test_mistakes_are_refused_in_words(material, kind):
    numbers = range(0, NUMBERS[kind], 1 if EVERYTHING else SAMPLE)
    found = failures(material, kind, numbers)
    assert not found, f"{len(found)} of {len(numbers)}:\n\n" + "\n\n".join(found)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train.py", "--check", "--config", "/dev/zero"], "/dev/zero: is not a regular file"),
        (
            ["plan.py", "--config", "{recipe}", "--interval_scale", "inf"],
            "--interval_scale: Input should be a finite number",
        ),
        (["runs.py", "status", "/typo"], "/typo: no such run"),
        (["evaluate.py", "--model", "{folder}/gone", "--seed", "9" * 30], "--seed 999"),
    ],
    ids=["train", "plan", "runs", "evaluate"],
)
def test_mistakes_are_reported_in_a_new_process(material, words, named):
    """Other cases run in a worker that has already imported the modules."""
    recipe = material.folder / "alone.yaml"
    recipe.write_text(yaml.safe_dump(material.recipe))
    ended = run_script(
        *(word.format(recipe=recipe, folder=material.folder) for word in words), check=False, timeout=120
    )
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert named in ended.stderr


def test_the_checker_detects_wrong_results():
    case = Case("train.py", [], ["learning_rate"])
    assert Result(2, "recipe.yaml: optim.learning_rate: must be above 0", 1.0).problem(case) is None
    assert Result(0, "No problems found: this run can start.", 1.0).problem(case) is None
    assert (
        Result(2, "usage: x --learning_rate\nx: error: wrong", 1.0).problem(case) == "names none of ['learning_rate']"
    )
    assert Result(2, "Traceback (most recent call last):\nlearning_rate", 1.0).problem(case) == "a traceback"
    assert Result(1, "learning_rate", 1.0).problem(case) == "exit status 1"
    assert "longer than 20 s" in Result(-9, "learning_rate", 1.0, timed_out=True).problem(case)


@pytest.mark.skipif("CASES" not in os.environ, reason='for one case: CASES="recipe 17"')
def test_again(material):
    kind, number = os.environ.get("CASES", "recipe 0").split()
    case = KINDS[kind](material, int(number))
    ((_, result),) = run_cases([case])
    print(case, result.output, sep="\n")
    assert result.problem(case) is None
