"""Trackers must get their settings under the right names, resume the same run, and be disabled if they fail."""

import json
import sys
from types import SimpleNamespace

import pytest
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from pretrain.errors import InputError
from pretrain.recipe import read_run_config
from pretrain.training.metrics import Metrics
from pretrain.training.trackers import (
    IDS,
    SETTING_NAMES,
    Trackers,
    flatten_for_trackers,
    make_tracker,
    tracker_problems,
)
from support.project import ROOT

TRACKING = {"project": "p", "entity": "team", "name": "n", "tags": "[a, b]", "group": "g"}


def config_of(trackers, **tracking):
    changes = [("trackers", trackers), *((f"tracking.{name}", value) for name, value in tracking.items())]
    return read_run_config(ROOT / "recipes/demo.yaml", changes)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for variable in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(variable, raising=False)
    PartialState(cpu=True)  # accelerate's trackers need the process index


class Own(GeneralTracker):
    """User-defined tracker registered with accelerate."""

    name, requires_logging_directory = "own", False
    tracker = None

    def __init__(self, project):
        super().__init__()
        self.project, self.sent, self.settings = project, [], {}
        Own.made = self

    def store_init_configuration(self, values):
        self.settings = values

    def log(self, values, step):
        if step == 13:
            raise OSError("no route to host")
        self.sent.append((step, values))

    def finish(self):
        self.sent.append("finished")


@pytest.fixture
def own(monkeypatch):
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "own", Own)
    return Own


def test_all_of_accelerates_trackers_are_known_and_others_rejected(own, monkeypatch):
    assert set(IDS) <= set(SETTING_NAMES) <= set(LOGGER_TYPE_TO_CLASS)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ("mlflow", "comet_ml") else name)
    assert tracker_problems(["wandb", "tensorboard", "own"]) == tracker_problems([]) == []
    assert tracker_problems(["mlflow", "tensorbord", "comet_ml", "nothing_like_it"]) == [
        "trackers: tensorbord is unknown; did you mean tensorboard?",
        f"trackers: nothing_like_it is unknown; allowed: {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}",
        "trackers: mlflow is not installed; pip install mlflow, or omit it",
        "trackers: comet_ml is not installed; pip install comet_ml, or omit it",
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wandb", {"run_name": "p", "entity": "team", "name": "n", "tags": ["a", "b"], "group": "g", "id": "7"}),
        ("trackio", {"run_name": "p", "name": "n", "group": "g", "resume": "allow"}),
        ("mlflow", {"experiment_name": "p", "run_name": "n", "tags": {"a": "", "b": "", "group": "g"}, "run_id": "7"}),
        ("clearml", {"reuse_last_task_id": False}),
        ("dvclive", {"resume": True}),
    ],
)  # fmt: skip
def test_each_tracker_gets_settings_under_its_own_names(name, expected, tmp_path, monkeypatch):
    told = {}
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, lambda *project, **settings: told.update(settings))
    make_tracker(name, tmp_path, config_of(name, **TRACKING).tracking, "p", "7")
    assert expected.items() <= told.items()


@pytest.mark.parametrize(
    ("tracking", "variables", "project"),
    [
        ({}, {}, "groundwork"),
        ({}, {"WANDB_PROJECT": "mine"}, "mine"),
        ({"project": "other"}, {"WANDB_PROJECT": "mine"}, "other"),
    ],
)
def test_the_project_is_the_recipes_else_the_environments(tracking, variables, project, own, tmp_path, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    Trackers(tmp_path, config_of("own", **tracking), warn=pytest.fail)
    assert own.made.project == project
    monkeypatch.setenv("WANDB_PROJECT", "of another shell")
    Trackers(tmp_path, config_of("own"), warn=pytest.fail, is_late=True)
    assert own.made.project == project, "evaluate.py and a restart must use the run's original project"


def test_trackio_gets_settings_and_metrics(tmp_path, monkeypatch):
    """accelerate must call trackio's functions with arguments that they accept."""
    told, sent = {}, []
    run = SimpleNamespace(log=lambda values, step: sent.append((step, values)), finish=lambda: sent.append("finished"))
    package = SimpleNamespace(init=lambda **settings: told.update(settings) or run, config=ConfigOfTrackio())
    monkeypatch.setitem(sys.modules, "trackio", package)
    config = config_of("trackio", group="mine")
    (tmp_path / "run_7").mkdir()
    trackers = Trackers(tmp_path / "run_7", config, warn=pytest.fail)
    trackers.log({"train/loss": 2.5, "train/perplexity": 12.2}, step=3)
    trackers.finish()
    assert told == {"project": "groundwork", "name": "run_7", "group": "mine", "resume": "allow"}
    assert package.config["optim.name"] == config.optim.name and package.config["trackers.0"] == "trackio"
    assert sent == [(3, {"train/loss": 2.5, "train/perplexity": 12.2}), "finished"]


class ConfigOfTrackio(dict):
    def update(self, values, allow_val_change):
        super().update(values)


def test_a_restart_continues_the_run_unless_the_project_changes(tmp_path, monkeypatch):
    """MLflow creates the ID itself and rejects changed settings, which must only cause a warning."""
    told, warnings = [], []

    class Experiment(Own):
        def __init__(self, **settings):
            told.append(settings)
            self.active_run = SimpleNamespace(info=SimpleNamespace(run_id=f"id of {settings['experiment_name']}"))
            self.sent = []

        def store_init_configuration(self, values):
            if "run_id" in told[-1]:
                raise ValueError("Changing param values is not allowed")

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "mlflow", Experiment)
    for project in ("a", "a", "b"):
        trackers = Trackers(tmp_path, config_of("mlflow", project=project), warnings.append)
        trackers.log({"train/loss": 1.0}, step=1)
    assert [settings.get("run_id") for settings in told] == [None, "id of a", None]
    assert warnings == ["the tracker mlflow rejected the settings: ValueError: Changing param values is not allowed"]
    assert list(trackers._running) == ["mlflow"]
    assert json.loads((tmp_path / ".trackers.json").read_text()) == {"mlflow": {"project": "b", "id": "id of b"}}


def test_a_restart_tells_if_a_tracker_starts_another_run(own, tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "comet_ml", own)
    for _ in range(2):
        Trackers(tmp_path, config_of("comet_ml"), warnings.append)
    assert warnings == ["the tracker comet_ml cannot continue its run, so it starts another one"]
    late = Trackers(tmp_path, config_of("comet_ml"), pytest.fail, is_late=True)
    assert not late._running, "an evaluation must not start another run"


def test_a_tracker_that_fails_is_switched_off_with_a_warning(own, tmp_path, monkeypatch):
    warnings = []
    trackers = Trackers(tmp_path, config_of("own"), warnings.append)
    for step in (12, 13, 14):
        trackers.log({"train/loss": 1.0}, step=step)
    trackers.finish()
    assert own.made.sent == [(12, {"train/loss": 1.0})]
    assert warnings == ["the tracker own failed and is disabled: OSError: no route to host"]
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "own", lambda project: own.nothing)
    Trackers(tmp_path, config_of("own"), warnings.append).finish()
    assert len(warnings) == 2 and "AttributeError" in warnings[1], (
        "a tracker that can't be created must also cause a warning"
    )


def test_settings_that_no_tracker_shows_are_reported(own, tmp_path):
    warnings = []
    config = config_of("own,tensorboard", project="p", entity="team", tags="a")
    Trackers(tmp_path, config, warnings.append).finish()
    assert warnings == ["tracking.entity, tracking.tags: not supported by own and tensorboard"]


def test_trackers_get_curves_and_settings_only(own, tmp_path):
    """Events such as starts, checkpoints and ends aren't sent, because each would be a chart with a single point."""
    metrics = Metrics(tmp_path, is_main=True)
    config = config_of("own", tags="a,b").model_copy(update={"output": tmp_path})
    metrics.begin(config, facts={"parameters": 7})
    metrics.write("start", step=0, parameters=7)
    metrics.write("validation", step=3, source="s", loss=2.0, perplexity=7.4, bits_per_byte=1.0)
    metrics.write("checkpoint", step=3, path="p", bytes=1, seconds=1.0, stall_seconds=0.1)
    metrics.write("rollback", step=3, to_step=2, reason="r", change="c")
    metrics.end(0, "done", step=3, tokens=5)
    validation = {"validation/loss/s": 2.0, "validation/perplexity/s": 7.4, "validation/bits_per_byte/s": 1.0}
    assert own.made.sent == [(3, validation), "finished"]
    assert own.made.settings["run.parameters"] == 7 and own.made.settings["tracking.tags.1"] == "b"


def test_settings_are_flat_and_complete():
    assert flatten_for_trackers({"a": {"b": 1}, "c": [2, {"d": None}]}) == {"a.b": 1, "c.0": 2, "c.1.d": "null"}


def test_group_is_still_read_at_the_top_level():
    """Older recipes set `group` at the top level instead of in `tracking`."""
    recipe = ROOT / "recipes/demo.yaml"
    assert read_run_config(recipe, [("group", "g")]).tracking.group == "g"
    assert read_run_config(recipe, [("group", "null")]).tracking.group is None
    assert read_run_config(recipe, [("group", "g"), ("tracking.tags", "a")]).tracking.tags == ["a"]
    with pytest.raises(InputError, match=r"group: is now tracking\.group, but both are set"):
        read_run_config(recipe, [("group", "g"), ("tracking.group", "h")])
