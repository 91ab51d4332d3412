"""Tests for recipes, command lines and run records with old setting names."""

import pytest
import yaml

from pretrain.errors import InputError
from pretrain.old_names import RENAMED, current_path, with_current_names
from pretrain.recipe import fields_of_config, read_command_line, read_run_config
from pretrain.runs.run_folder import read_config

OLD = {
    "evaluation": {"every_steps": 5, "where": "same"},
    "cadence": 2.0,
    "guard": {"window": 64, "roll_back": "off"},
    "samples": {"temperature": None},
}


def test_every_new_name_is_a_setting_and_no_old_one_is():
    settings = {path for path, _ in fields_of_config()}
    sections = {path.rpartition(".")[0] for path in settings}
    assert set(RENAMED.values()) <= settings | sections and not set(RENAMED) & settings
    assert all(old.rpartition(".")[0] == new.rpartition(".")[0] for old, new in RENAMED.items())


def test_an_old_recipe_is_read_with_a_notice(recipe, capsys):
    values = yaml.safe_load(recipe.read_text())
    values["optim"] |= {"final_ratio": 0.5, "muon": {"iterations": 3, "blocks": {"*.c_attn.weight": 3}}}
    recipe.write_text(yaml.safe_dump(values | OLD))
    config = read_run_config(recipe)
    assert config.benchmarks.every_steps == 5 and config.benchmarks.where == "blocking"
    assert config.interval_scale == 2.0 and config.samples.temperature == 0
    assert config.guard.loss_window == 64 and config.guard.on_spike == "off"
    assert config.optim.min_lr_ratio == 0.5 and config.optim.muon.ns_steps == 3
    assert config.optim.muon.split_matrices == {"*.c_attn.weight": 3}
    assert "evaluation is now benchmarks" in (notice := capsys.readouterr().err)
    assert "guard.window is now guard.loss_window" in notice and "optim.muon.iterations is now" in notice


def test_an_old_name_on_the_command_line_is_read_with_a_notice(recipe, capsys):
    line = read_command_line([str(recipe), "--evaluation.where", "same", "--checkpoint.pause_at=3"], "usage")
    assert line.config.benchmarks.where == "blocking" and line.config.checkpoint.stop_at_step == 3
    assert line.overridden == {"benchmarks.where", "checkpoint.stop_at_step"}
    assert "--checkpoint.pause_at: is now --checkpoint.stop_at_step" in capsys.readouterr().err


def test_both_names_of_a_setting_are_refused(recipe):
    values = yaml.safe_load(recipe.read_text())
    recipe.write_text(yaml.safe_dump(values | {"cadence": 2.0, "interval_scale": 3.0}))
    with pytest.raises(InputError, match="cadence: unknown key"):
        read_run_config(recipe)


def test_records_of_old_runs_are_read_with_new_names(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(OLD))
    assert read_config(tmp_path)["benchmarks"] == {"every_steps": 5, "where": "blocking"}
    assert current_path("evaluation.tasks.0") == "benchmarks.tasks.0" and current_path("guards") == "guards"
    assert with_current_names({"optim": {"final_ratio": 1}}) == (
        {"optim": {"min_lr_ratio": 1}},
        ["optim.final_ratio is now optim.min_lr_ratio"],
    )
