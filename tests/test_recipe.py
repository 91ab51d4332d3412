"""Tests for recipes: parsing, rejected values and error messages."""

import ast
import os
import subprocess
import sys

import pytest
import yaml

from pretrain.config import RunConfig
from pretrain.errors import InputError
from pretrain.recipe import (
    FLAGS,
    SECTIONS_LEFT_OUT,
    as_yaml,
    explain,
    fields_of_config,
    read_command_line,
    read_run_config,
    sections_in,
)
from pretrain.units import UNITS, parse_count
from support.project import ROOT

RECIPE = """
model: model_configs/llama_30m.json
output: runs/x
data:
  train: [{shards: data/a}]
  sequence_length: 2k
batch: {tokens_per_step: 512k}
optim: {learning_rate: 3e-4}
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def problems_of(path, *overrides):
    with pytest.raises(InputError) as caught:
        read_run_config(path, list(overrides))
    return caught.value.problems


def test_counts_with_decimals_are_exact():
    for hundredths in range(1, 10_000):
        for unit in "kMBT":
            assert parse_count(f"{hundredths / 100:.2f}{unit}") == hundredths * UNITS[unit] // 100
    assert (parse_count("1.0001k"), parse_count("2k", 1024), parse_count("1_000")) == ("1.0001k", 2048, 1000)


def test_activations_are_recomputed_by_a_word_a_share_or_a_budget(recipe):
    def read(text):
        return read_run_config(recipe, [("activation_checkpointing", text)]).activation_checkpointing

    assert [read("full"), read("50%"), read("{memory_budget: 80%}").memory_budget] == ["full", 0.5, 0.8]
    for before in ("none", "full", "50%"):
        given = [("activation_checkpointing", before), ("activation_checkpointing.memory_budget", "0.5")]
        assert read_run_config(recipe, given).activation_checkpointing.memory_budget == 0.5
    for text, problem in (
        ("some", "--activation_checkpointing: Input should be 'none' or 'full'"),
        ("1.5", "--activation_checkpointing: Input should be less than 1"),
        ("{memory_budget: 0}", "activation_checkpointing.memory_budget: Input should be greater than 0 (got 0)"),
        ("{memory_budgt: 0.5}", "activation_checkpointing.memory_budgt: unknown key; did you mean memory_budget?"),
    ):
        problems = problems_of(recipe, ("activation_checkpointing", text))
        assert any(problem in found for found in problems), problems


def test_numbers_with_units_parse(recipe):
    config = read_run_config(recipe, [("budget.tokens", "10B"), ("optim.warmup_steps", "2k")])
    assert config.data.sequence_length == 2048, "k must be 1,024 in lengths and batch sizes"
    assert config.batch.tokens_per_step == 2**19
    assert config.budget.tokens == 10**10
    assert config.optim.warmup_steps == 2000, "k must be 1,000 in other settings"
    assert config.optim.learning_rate == 3e-4


@pytest.mark.parametrize(
    ("text", "value"), [("1e9", 10**9), ("1.5B", 1_500_000_000), ("500M", 5 * 10**8), ("1_000", 1000)]
)
def test_counts(recipe, text, value):
    assert read_run_config(recipe, [("budget.tokens", text)]).budget.tokens == value


def test_one_name_is_a_list_of_one(recipe):
    words = (("benchmarks.tasks", "base"), ("publish.language", "en,de"), ("benchmarks.every_tokens", "1B"))
    config = read_run_config(recipe, words)
    assert config.benchmarks.tasks == ["base"] and config.publish.language == ["en", "de"]


def test_values_that_yaml_1_1_would_misread(recipe):
    recipe.write_text(RECIPE + "seed: 0123\n")
    assert read_run_config(recipe).seed == 123, "leading zeros must not make a number octal"
    assert "got 'off'" in problems_of(recipe, ("precision", "off"))[0], "off must not be read as false"


@pytest.mark.parametrize("given", ["1/3", " 1 / 3 ", "0.3333333333"])
def test_a_fraction_can_be_written_with_a_slash(recipe, given):
    assert read_run_config(recipe, [("batch.ramp.from", given)]).batch.ramp_levels == 3


@pytest.mark.parametrize("given", ["1/0", "1/", "a/b", "1/2/3", "nan/1", "3/2"])
def test_a_wrong_fraction_is_rejected(recipe, given):
    assert "batch.ramp" in problems_of(recipe, ("batch.ramp.from", given))[0]


def test_all_problems_are_reported_at_once(recipe):
    recipe.write_text(RECIPE + "chekpoint: {}\nprecision: bf61\n")
    problems = problems_of(
        recipe, ("optim.learning_rat", "1"), ("data.train.0.wieght", "2"), ("batch.ramp.from", "0.3")
    )
    text = "\n".join(problems)
    assert len(problems) == 5
    assert f"{recipe}: chekpoint: unknown key; did you mean checkpoint?" in problems
    assert "--optim.learning_rat: unknown key; did you mean learning_rate?" in problems
    assert "--data.train.0.wieght: unknown key; did you mean weight?" in problems
    assert f"{recipe}: precision: " in text and "did you mean bf16?" in text and "got 'bf61'" in text
    assert "batch.ramp: from must be 1/2, 1/3, 1/4, ... (got 0.3)" in text


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optim.max_grad_norm", "0", "greater than 0 (got 0)"),
        ("optim.warmup_steps", "2.5", "valid integer"),
        ("data.sequence_length", "-4", "greater than or equal to 1 (got -4)"),
        ("guard.loss_window", "7", "greater than or equal to 8 (got 7)"),
        ("budget.tokens", "many", "got 'many'"),
        ("optim.stochastic_rounding", "true", "stochastic_rounding requires name: adafactor (got adamw)"),
        ("data.train", "[]", "at least 1 item"),
    ],
)
def test_impossible_values_are_refused(recipe, key, value, message):
    (problem,) = problems_of(recipe, (key, value))
    assert problem.startswith(f"--{key}: ") or key.rsplit(".", 1)[0] in problem
    assert message in problem


def test_a_repeated_key_is_refused(recipe):
    recipe.write_text(RECIPE + "seed: 1\nseed: 2\n")
    (problem,) = problems_of(recipe)
    assert "duplicate key: seed" in problem


def test_missing_settings_are_named(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("seed: 1\n")
    assert {problem.split(": ")[1] for problem in problems_of(path)} == {"model", "output", "data", "batch", "optim"}


def test_a_missing_recipe_is_named(tmp_path):
    (problem,) = problems_of(tmp_path / "no.yaml")
    assert "no.yaml: no such recipe" in problem


def test_the_command_line_replaces_the_recipes_alternative(recipe):
    recipe.write_text(RECIPE + "budget: {tokens_per_parameter: 20}\n")
    config = read_run_config(recipe, [("budget.steps", "100"), ("optim.learning_rate_per_sequence", "1e-5")])
    assert (config.budget.steps, config.budget.tokens_per_parameter) == (100, None)
    assert (config.optim.learning_rate_per_sequence, config.optim.learning_rate) == (1e-5, None)
    sections = ("validation", "checkpoint", "samples", "diagnostics", "benchmarks")
    recipe.write_text(RECIPE + "".join(f"{section}: {{every_tokens: 1M}}\n" for section in sections))
    config = read_run_config(recipe, [(f"{section}.every_steps", "5") for section in sections])
    found = [getattr(config, section) for section in sections]
    assert [(cadence.every_steps, cadence.every_tokens) for cadence in found] == [(5, None)] * 5


@pytest.mark.parametrize("last", [False, True])
def test_the_models_file_and_its_changes_come_in_any_order(recipe, tmp_path, last):
    changes = [("model.num_hidden_layers", "8"), ("model.rope_parameters.rope_theta", "5e5")]
    file = [("model", "model_configs/llama_1b.json")]
    config = read_run_config(recipe, [*changes, *file] if last else [*file, *changes])
    assert config.model.config == "model_configs/llama_1b.json"
    assert config.model.changes == {"num_hidden_layers": 8, "rope_parameters": {"rope_theta": 5e5}}
    replay = tmp_path / "config.yaml"
    replay.write_text(as_yaml(config))
    assert read_run_config(replay) == config
    other_file = read_run_config(replay, [("model", "model_configs/llama_30m.json")])
    assert other_file.model.changes == {}, "changes to the replaced file must be dropped"
    more = read_run_config(replay, [("model.num_hidden_layers", "9")])
    assert more.model.changes == config.model.changes | {"num_hidden_layers": 9}


def test_a_model_without_changes_is_recorded_as_its_file(recipe):
    assert as_yaml(read_run_config(recipe)).startswith("model: model_configs/llama_30m.json\n")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (("model", "5"), "--model: must be a model's .json file, folder or Hub ID, or a mapping"),
        (("model", "{hidden_size: 8}"), "--model: to override a model's keys, also set config to a model's .json"),
        (("model.config", "[a]"), "model: to override a model's keys, also set config"),
    ],
)
def test_a_model_without_a_file_is_refused(recipe, override, message):
    (problem,) = problems_of(recipe, override)
    assert message in problem


def test_a_value_may_be_the_name_of_a_flag(recipe):
    read = read_command_line([str(recipe), "--output", "smoke", "--check"], "usage")
    assert (str(read.config.output), read.check, read.smoke) == ("smoke", True, False)
    with pytest.raises(InputError, match=r"'check': expected --section\.key VALUE"):
        read_command_line([str(recipe), "check"], "usage")


def test_the_origin_of_a_changed_model_is_printed(recipe):
    lines = explain(
        read_command_line(["--config", str(recipe), "--model.num_hidden_layers", "8"], "usage")
    ).splitlines()
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in lines}
    assert rows["model.config"] == ['"model_configs/llama_30m.json"', str(recipe)]
    assert rows["model.num_hidden_layers"] == ["8", "command line"]


def test_the_origin_of_old_names_and_of_a_list_in_one_word_is_the_recipe(recipe):
    recipe.write_text(RECIPE + "cadence: 2.0\ntrackers: tensorboard\n")
    lines = explain(read_command_line(["--config", str(recipe)], "usage")).splitlines()
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in lines}
    assert rows["interval_scale"] == ["2.0", str(recipe)]
    assert rows["trackers.0"] == ['"tensorboard"', str(recipe)] and rows["seed"] == ["42", "default"]


def test_a_group_in_two_places_is_refused(recipe):
    (problem,) = problems_of(recipe, ("group", "x"), ("tracking.group", "y"))
    assert problem == "--group: is now tracking.group, but both are set; remove group"


@pytest.mark.parametrize("key", ["optim.learning_rate", "optim.warmup_steps", "batch.tokens_per_step"])
def test_a_mistake_in_a_number_or_auto_is_reported_once(recipe, key):
    (problem,) = problems_of(recipe, (key, "often"))
    assert problem.startswith(f"--{key}: Input should be a valid ") and problem.endswith(", or auto (got 'often')")


def test_two_budgets_are_refused(recipe):
    (problem,) = problems_of(recipe, ("budget.steps", "100"), ("budget.tokens", "1M"))
    assert "set exactly one of tokens_per_parameter, tokens and steps (got tokens, steps)" in problem


@pytest.mark.parametrize("ends", [["50%", "20%", None], ["20%", None, None], ["20%", "80%"]])
def test_stages_must_rise_to_the_end(recipe, ends):
    stages = [{"train": [{"shards": "a"}], "until": end} for end in ends]
    recipe.write_text(RECIPE.replace("train: [{shards: data/a}]", f"stages: {stages}".replace("None", "null")))
    (problem,) = problems_of(recipe)
    assert "stages[].until must increase" in problem


def test_a_recipe_without_data_is_refused(recipe):
    recipe.write_text(RECIPE.replace("  train: [{shards: data/a}]\n", ""))
    (problem,) = problems_of(recipe)
    assert "set either train (one mixture) or stages (a curriculum)" in problem


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config"], "--config: requires a value"),
        (["x.json"], r"'x.json': expected --section.key VALUE; write a list as '\[first, second\]'"),
        (["x.yaml"], "--config x.yaml: no such recipe"),
        (["--seed", "1"], "use one recipe"),
    ],
)
def test_command_lines_that_say_nothing(argv, message):
    with pytest.raises(InputError, match=message):
        read_command_line(argv, "usage")


def test_overridden_paths_are_known(recipe):
    command_line = read_command_line(["--config", str(recipe), "--seed=7", "--check"], "usage")
    assert (command_line.config.seed, command_line.overridden, command_line.check) == (7, {"seed"}, True)


def test_the_config_is_frozen_and_replays(recipe, tmp_path):
    config = read_run_config(recipe, [("batch.ramp.from", "0.5")])
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 1
    replay = tmp_path / "config.yaml"
    replay.write_text(as_yaml(config))
    assert read_run_config(replay) == config


def test_the_recipe_may_stand_without_config(recipe):
    assert read_command_line([str(recipe), "--seed", "7"], "usage").recipe == str(recipe)
    assert read_command_line(["--check", str(recipe)], "usage").check


def help_of(*argv, capsys):
    with pytest.raises(SystemExit) as stop:
        read_command_line(list(argv), "the usage")
    return capsys.readouterr().out, stop.value.code


def test_without_arguments_a_short_usage_is_printed(capsys):
    text, code = help_of(capsys=capsys)
    lines = [line for line in text.splitlines() if line]
    assert code == 2 and len(lines) <= 6 and sum("  python train.py" in line for line in lines) == 3
    assert max(map(len, lines)) <= 80


def test_help_has_headings_choices_and_every_option(capsys):
    text, code = help_of("--help", capsys=capsys)
    assert code == 0 and "the usage" in text and "\noptim:\n" in text
    assert "--precision {auto,fp32,bf16,fp16,fp8}" in text and "--tracking.project" in text
    assert "--optim.learning_rate  [null]" in text, "a setting with words and numbers must not list choices"
    assert '--activation_checkpointing  ["none"]' in text, "a word can replace this section"
    for path, _ in fields_of_config():
        assert f"--{path}" in text
    usage = ast.get_docstring(ast.parse((ROOT / "train.py").read_text()))
    for flag in (*FLAGS, "--config", "--text", "--minutes", "--exclude", "--profile", "--help"):
        assert flag in usage, flag


def test_every_setting_is_described():
    assert [path for path, field in fields_of_config() if not (field.description or "").strip()] == []


def test_a_setting_that_moved_is_refused_with_its_new_place(recipe):
    (problem,) = problems_of(recipe, ("optim.muon.adamw_learning_rate", "1e-3"))
    assert problem.startswith("--optim.muon.adamw_learning_rate: is now optim.group_learning_rates: {embedding")


def test_help_shows_defaults_that_need_their_section(capsys):
    left_out = {
        f"{name}.{key}"
        for name, field in RunConfig.model_fields.items()
        for section in sections_in(field.annotation)
        for key, inner in section.model_fields.items()
        if inner.default is None and "list" not in str(inner.annotation) and sections_in(inner.annotation)
    }
    assert left_out == SECTIONS_LEFT_OUT
    text, _ = help_of("--help", "batch", capsys=capsys)
    assert "--batch.ramp.from  [null; 0.25 if batch.ramp is set]" in text


def test_help_of_one_section(capsys):
    text, code = help_of("--help", "optim", capsys=capsys)
    assert code == 0 and "--optim.name" in text and "--data." not in text and "the usage" not in text
    with pytest.raises(InputError, match="--help optm: no such section; did you mean optim"):
        read_command_line(["--help", "optm"], "usage")


def test_every_setting_is_listed_once():
    paths = [path for path, _ in fields_of_config()]
    assert len(paths) == len(set(paths)) > 50
    assert {"batch.ramp.from", "data.train[].shards", "data.stages[].train[].weight"} <= set(paths)


def test_help_and_mistakes_need_no_torch():
    for argv in (["--help"], ["--config", "missing.yaml"]):
        code = (
            "import sys, runpy\n"
            f"sys.argv = ['train.py'] + {argv}\n"
            "try: runpy.run_path('train.py', run_name='__main__')\n"
            "except SystemExit as stop: print('exit', stop.code, 'torch' in sys.modules, 'numpy' in sys.modules)\n"
        )
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert out.splitlines()[-1] == f"exit {0 if argv == ['--help'] else 2} False False"


def test_yaml_of_the_replay_is_plain(recipe):
    assert yaml.safe_load(as_yaml(read_run_config(recipe)))["data"]["train"][0]["shards"] == "data/a"


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("interval_scale", "inf"),
        ("interval_scale", ".nan"),
        ("optim.learning_rate", "inf"),
        ("optim.betas", "[.nan, 0.9]"),
        ("benchmarks.every_steps", "true"),
        ("budget.tokens", "true"),
        ("seed", "false"),
        ("interval_scale", "true"),
        ("optim.warmup_steps", "true"),
        ("optim.betas", "[true, 0.9]"),
        ("guard.spike_warn_factor", "true"),
        ("budget.steps", "1e30"),
        ("batch.tokens_per_step", "9" * 5000),
        ("batch.tokens_per_step", "[" * 3000),
    ],
)
def test_numbers_are_finite_and_no_booleans(recipe, key, text):
    problems = problems_of(recipe, (key, text))
    assert len(problems) == len([p for p in problems if key in p]) > 0
    assert max(map(len, problems)) < 1000


def test_only_a_file_of_text_is_a_recipe(tmp_path):
    nested, large = tmp_path / "nested.yaml", tmp_path / "large.yaml"
    nested.write_text("a: " + "[" * 3000)
    large.write_text("a: 1 #" + "x" * (2 << 20))
    os.mkfifo(tmp_path / "pipe.yaml")
    for path, expected in (
        (nested, "nested too deeply"),
        (large, "the limit is 1,048,576"),
        ("/dev/zero", "not a regular file"),
        (tmp_path / "pipe.yaml", "not a regular file"),
        (tmp_path, "is a folder"),
        ("", "is a folder; use a file instead"),
    ):
        (problem,) = problems_of(path)
        assert expected in problem and str(path) in problem


def test_a_value_within_aliases_of_aliases_is_shown_in_short(recipe):
    levels = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))]
    recipe.write_text(RECIPE + "\n".join(levels) + "\nseed: *a11\n")
    assert max(map(len, problems_of(recipe))) < 5000
