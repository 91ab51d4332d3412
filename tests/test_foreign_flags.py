"""Flags of other projects are answered with ours."""

import re

import pytest

from pretrain.errors import InputError
from pretrain.foreign_flags import OURS, answer_in_ours
from pretrain.recipe import list_fields, read_command_line
from support.project import ROOT

SETTINGS = [path for path, _, _ in list_fields()]
OWN_FLAGS = {"config", "text"}


@pytest.mark.parametrize(
    ("flag", "ours"),
    [
        ("--batch_size=32", "--batch.sequences_per_micro_batch"),
        ("--per-device-train-batch-size", "--batch.sequences_per_micro_batch"),
        ("--max_iters", "--budget.steps"),
        ("--lr", "--optim.learning_rate"),
        ("--learning_rate", "--optim.learning_rate"),
        ("--train_file", "--text PATTERN"),
        ("--model_name_or_path", "--init pretrained"),
        ("--num_train_epochs", "--budget.tokens"),
        ("--gradient_accumulation_steps", "--batch.tokens_per_step"),
        ("--weight_decay", "--optim.weight_decay"),
        ("--block_size", "--data.sequence_length"),
        ("--config_name", "--model"),
        ("--devices", "--num_processes"),
        ("--out_dir", "--output"),
        ("--train.global_batch_size", "--batch.tokens_per_step"),
        ("--training.steps", "--budget.steps"),
    ],
)
def test_a_flag_of_another_project_is_answered(flag, ours):
    assert ours in answer_in_ours(flag, SETTINGS)


def test_ours_and_typos_are_left_to_the_recipe():
    assert answer_in_ours("--optim.learning_rate", SETTINGS) is None
    assert answer_in_ours("--optim.learning_rat", SETTINGS) is None
    assert not set(OURS) & set(SETTINGS)


def test_every_answer_names_settings_flags_and_files_that_exist():
    sections = {path.partition(".")[0] for path in SETTINGS}
    scripts = {"tokenizer", "dataset", "data", "config_file", "num_processes", "num_machines", "prompt"}
    scripts |= {"streaming", "max_documents", "workers", "minutes"}
    for name, answer in OURS.items():
        for flag in re.findall(r"--([\w.]+)", answer):
            flag = flag.split(".")[0] if flag.startswith("model.") else flag  # any key of a model's JSON
            assert flag in {*SETTINGS, *sections, *OWN_FLAGS, *scripts}, f"{name}: --{flag}"
        for path in re.findall(r"[\w/]+\.(?:py|yaml|sbatch)", answer):
            assert (ROOT / path).exists(), f"{name}: {path}"


def test_all_are_answered_at_once():
    with pytest.raises(InputError) as caught:
        read_command_line(["recipes/demo.yaml", "--lr", "3e-4", "--max_steps=9", "--bf16"], "usage")
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["--lr", "--max_steps", "--bf16"]


PAGE = (ROOT / "docs/coming_from.md").read_text()
ROWS = [row.strip("|").split(" | ") for row in PAGE.splitlines() if row.startswith("| `")]


def test_the_page_has_every_flag_and_gives_the_programs_answer():
    on_page = {name: row[1] for row in ROWS for name in re.findall(r"`([\w.]+)`", row[0])}
    assert set(OURS) - set(on_page) == set()
    for name, answer in OURS.items():
        for ours in re.findall(r"--[a-z_]+\.[a-z_]+|accelerate_configs/\w+", answer.partition("; the global")[0]):
            assert ours in on_page[name] or ours.startswith("--data.train"), f"{name}: {ours} is not in its row"


def test_the_page_names_settings_and_files_that_exist():
    sections = {path.partition(".")[0] for path in SETTINGS}
    for path in re.findall(r"--([a-z_]+(?:\.[a-z_]+)+)", PAGE):
        assert path in SETTINGS or path.startswith(("model.", "data.train")), path
    for words in re.findall(r"train\.py (--config.*)", PAGE):
        flags = {flag.partition(".")[0] for flag in re.findall(r"--([\w.]+)", words)}
        assert flags <= {*SETTINGS, *sections, *OWN_FLAGS, *OURS, "check"}, words
    for path in re.findall(r"(?<![\w./])\w[\w/]*\.(?:py|yaml|sbatch)\b", PAGE):
        assert (ROOT / path).exists() or path == "sample.py", path  # nanoGPT's
