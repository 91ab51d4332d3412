"""Tests for other projects' flags: they are translated if the values have the same meaning. Otherwise, the docs say
what to use instead."""

import re

import pytest

from pretrain.errors import InputError
from pretrain.recipe import SETTINGS_ELSEWHERE, fields_of_config, own_name, read_command_line
from support.project import ROOT

SETTINGS = [path for path, _ in fields_of_config()]
OWN_FLAGS = {"config", "text"}


@pytest.mark.parametrize(
    ("flag", "ours"),
    [
        ("batch_size", "batch.sequences_per_micro_batch"),
        ("per-device-train-batch-size", "batch.sequences_per_micro_batch"),
        ("max_iters", "budget.steps"),
        ("lr", "optim.learning_rate"),
        ("weight_decay", "optim.weight_decay"),
        ("block_size", "data.sequence_length"),
        ("config_name", "model"),
        ("out_dir", "output"),
        ("training.steps", "budget.steps"),
        ("optim.learning_rate", "optim.learning_rate"),
        ("data.train.0.weight", "data.train.0.weight"),
    ],
)
def test_a_flag_of_another_project_is_read_as_ours_with_a_notice(flag, ours, capsys, monkeypatch):
    assert own_name(flag) == ours
    said = capsys.readouterr().err
    assert said == ("" if flag == ours else f"--{flag}: interpreted as --{ours} (docs/coming_from.md)\n")
    monkeypatch.setenv("RANK", "1")
    assert own_name(flag) == ours and capsys.readouterr().err == ""


def test_flag_values_are_translated():
    line = read_command_line(["recipes/demo.yaml", "--lr", "3e-4", "--max_steps=9"], "usage")
    assert line.config.optim.learning_rate == 3e-4 and line.config.budget.steps == 9
    assert line.overridden == {"optim.learning_rate", "budget.steps"}


def test_other_flags_are_rejected_together_with_the_page():
    words = ["--gradient_accumulation_steps", "4", "--bf16", "--decay_fraction", "0.1", "--chekpoint.keep_last", "1"]
    with pytest.raises(InputError) as caught:
        read_command_line(["recipes/demo.yaml", *words], "usage")
    accumulation, bf16, decay, typo = caught.value.problems
    assert (
        accumulation.startswith("--gradient_accumulation_steps: unknown key") and "docs/coming_from.md" in accumulation
    )
    assert bf16.startswith("--bf16: unknown key")
    assert decay == "--decay_fraction: must include its section; use --optim.decay_fraction"
    assert "--chekpoint.keep_last: unknown key; did you mean checkpoint?" in typo


@pytest.mark.parametrize("flag", ["target_param_data_ratio", "core_metric_every"])
def test_a_flag_with_another_meaning_is_rejected(flag):
    """nanochat's ratio doesn't count embeddings, and benchmarks.every_steps runs other tasks than CORE by default."""
    with pytest.raises(InputError, match=f"--{flag}: unknown key"):
        read_command_line(["recipes/demo.yaml", f"--{flag}", "12"], "usage")


def test_foreign_names_map_to_settings_and_are_not_settings_themselves():
    assert set(SETTINGS_ELSEWHERE.values()) <= set(SETTINGS) and not set(SETTINGS_ELSEWHERE) & set(SETTINGS)


PAGES = [ROOT / "docs/coming_from.md", *sorted((ROOT / "docs").glob("from_*.md"))]
PAGE = "\n".join(page.read_text() for page in PAGES)
ROWS = [row.strip("|").split(" | ") for row in PAGE.splitlines() if row.startswith("| `")]


def test_the_pages_have_every_name_with_the_setting_it_is_read_as():
    on_page = {}
    for row in ROWS:
        for name in re.findall(r"`([\w.]+)`", row[0]):
            on_page[name] = on_page.get(name, "") + row[1]
    assert set(SETTINGS_ELSEWHERE) - set(on_page) == set()
    for name, ours in SETTINGS_ELSEWHERE.items():
        assert f"--{ours}" in on_page[name], name


def test_the_pages_name_settings_and_files_that_exist():
    sections = {path.partition(".")[0] for path in SETTINGS}
    for path in re.findall(r"--([a-z_]+(?:\.[a-z_]+)+)", PAGE):
        assert path in SETTINGS or path.startswith(("model.", "data.train")), path
    for words in re.findall(r"train\.py (--config.*)", PAGE):
        flags = {flag.partition(".")[0] for flag in re.findall(r"--([\w.]+)", words)}
        assert flags <= {*SETTINGS, *sections, *OWN_FLAGS, "check"}, words
    for path in re.findall(r"(?<![\w./])\w[\w/]*\.(?:py|yaml|sbatch)\b", PAGE):
        assert (ROOT / path).exists() or path == "sample.py", path  # nanoGPT's script
