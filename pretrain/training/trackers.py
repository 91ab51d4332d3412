"""Sends metrics to one or more trackers such as wandb, through accelerate's classes.

This module is loaded only if the recipe names a tracker. After a restart, each tracker continues its curve. A lost
network or server causes a warning but never ends the run.
"""

import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pretrain.config import RunConfig, Tracking
from pretrain.errors import did_you_mean
from pretrain.recipe import leaves
from pretrain.registry import TRACKERS
from pretrain.runs.run_folder import read_json

DEFAULT_PROJECT = "groundwork"
PROJECT_VARIABLES = {
    "clearml": "CLEARML_PROJECT",
    "comet_ml": "COMET_PROJECT_NAME",
    "mlflow": "MLFLOW_EXPERIMENT_NAME",
    "wandb": "WANDB_PROJECT",
}
"""Environment variables with the project, used if the recipe has none. WANDB_PROJECT is the fallback."""
SETTING_NAMES: dict[str, dict[str, str]] = {
    "aim": {"project": "experiment", "name": "run_name", "id": "run_hash"},
    "clearml": {"project": "project_name", "name": "task_name", "tags": "tags", "id": "reuse_last_task_id"},
    "comet_ml": {"project": "run_name", "entity": "workspace", "name": "name", "tags": "tags", "id": "experiment_key"},
    "dvclive": {"name": "exp_name"},
    "mlflow": {"project": "experiment_name", "name": "run_name", "tags": "tags", "group": "group", "id": "run_id"},
    "swanlab": {"project": "run_name", "entity": "workspace", "name": "name", "tags": "tags", "group": "group",
                "id": "id"},
    "tensorboard": {},
    "trackio": {"project": "run_name", "name": "name", "group": "group"},
    "wandb": {"project": "run_name", "entity": "entity", "name": "name", "tags": "tags", "group": "group", "id": "id"},
}  # fmt: skip
"""{tracker: {setting of `tracking`, or id (the run's ID): the argument's name in accelerate's class}}.

Most classes call the project `run_name`.
"""
IDS: dict[str, Callable[[Any], str]] = {
    "aim": lambda tracker: tracker.writer.hash,
    "clearml": lambda tracker: tracker.task.id,
    "comet_ml": lambda tracker: tracker.writer.get_key(),
    "mlflow": lambda tracker: tracker.active_run.info.run_id,
    "swanlab": lambda tracker: tracker.run.id,
    "wandb": lambda tracker: tracker.run.id,
}
"""{tracker: function that reads the run's ID from a started tracker}."""


def tracker_problems(names: list[str]) -> list[str]:
    """Lists unknown trackers, and trackers whose package isn't installed."""
    if not names:
        return []
    known = _classes()
    problems = [f"trackers: {name} is unknown{did_you_mean(name, known)}" for name in names if name not in known]
    # accelerate names the trackers after their packages.
    return problems + [
        f"trackers: {name} is not installed; pip install {name}, or omit it"
        for name in names
        if name in SETTING_NAMES and importlib.util.find_spec(name) is None
    ]


def _classes() -> dict[str, type]:
    """Returns {name: class} of accelerate's trackers and of registered extensions."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    return LOGGER_TYPE_TO_CLASS | dict(TRACKERS)


class Trackers:
    """A run's trackers. Some may have failed.

    Args:
        run: the run's folder. By default, the trackers show its name.
        config: the whole config, sent to each tracker. It contains no secrets.
        warn: called with a message when a tracker fails and is switched off.
        facts: sent with the config, as `run.NAME`.
        is_late: True if the run has ended, so that its config was already sent.
    """

    def __init__(
        self,
        run: Path,
        config: RunConfig,
        warn: Callable[[str], None],
        facts: Mapping[str, Any] | None = None,
        *,
        is_late: bool = False,
    ):
        self._warn = warn
        self._running: dict[str, Any] = {}
        given = {setting for setting, value in config.tracking if value}
        taken = {setting for name in config.trackers for setting in SETTING_NAMES.get(name, {"project": ""})}
        if config.trackers and given - taken and not is_late:
            settings = ", ".join(f"tracking.{setting}" for setting in sorted(given - taken))
            warn(f"{settings}: {' and '.join(config.trackers)} cannot show it")
        for name in dict.fromkeys(config.trackers):
            self._call(name, self._start, name, run, config.tracking)
            if name in self._running and not is_late:
                settings = flatten_for_trackers({**config.model_dump(mode="json"), "run": facts or {}})
                try:
                    self._running[name].store_init_configuration(settings)
                except Exception as error:  # MLflow rejects changed settings after a restart
                    warn(f"the tracker {name} rejected the settings: {type(error).__name__}: {error}")

    def _start(self, name: str, run: Path, tracking: Tracking) -> None:
        """Starts or continues a tracker, and records its project and ID."""
        path = run / ".trackers.json"
        recorded = read_json(path)
        before = recorded.get(name, {})
        project = tracking.project or before.get("project") or project_of_environment(name)
        known_id = before.get("id") if before.get("project") == project else None
        tracker = make_tracker(name, run, tracking, project, known_id)
        tracker.start()
        recorded[name] = {"project": project, "id": IDS[name](tracker) if name in IDS else None}
        self._running[name] = tracker
        path.write_text(json.dumps(recorded), encoding="utf-8")

    def log_event(self, event: str, values: dict[str, Any]) -> None:
        """Sends an event's numbers, with names such as 'validation/loss/SOURCE'."""
        source = f"/{values['source']}" if "source" in values else ""
        numbers = {
            f"{event}/{name}{source}": value
            for name, value in values.items()
            if isinstance(value, int | float) and name != "step"
        }
        self.log(numbers, step=values["step"])

    def log(self, numbers: dict[str, float], step: int) -> None:
        """Sends the numbers to all trackers."""
        for name in list(self._running):
            self._call(name, self._running[name].log, numbers, step=step)

    def finish(self) -> None:
        for name in list(self._running):
            self._call(name, self._running[name].finish)

    def _call(self, name: str, function: Callable, *arguments: Any, **named: Any) -> None:
        try:
            function(*arguments, **named)
        except Exception as error:  # each tracker raises its own errors; none may end a run
            self._running.pop(name, None)
            self._warn(f"the tracker {name} failed and is switched off: {type(error).__name__}: {error}")


def project_of_environment(name: str) -> str:
    """Returns this tracker's project from the environment, or the default."""
    variables = (PROJECT_VARIABLES.get(name, ""), "WANDB_PROJECT")
    return next((value for variable in variables if (value := os.environ.get(variable))), DEFAULT_PROJECT)


def make_tracker(name: str, run: Path, tracking: Tracking, project: str, known_id: str | None) -> Any:
    """Returns accelerate's tracker of this name with the settings that it supports, not yet started.

    Args:
        known_id: ID of the run to continue; None to start a new one.
    """
    made = _classes()[name]
    if name not in SETTING_NAMES:  # a user's own tracker, called as in accelerate
        return made(project, run) if made.requires_logging_directory else made(project)
    given = {
        "project": project,
        "entity": tracking.entity,
        "name": tracking.name or run.name,
        "tags": tracking.tags,
        "group": tracking.group,
        "id": known_id,
    }
    words = {word: given[setting] for setting, word in SETTING_NAMES[name].items() if given[setting]}
    match name:
        case "aim":
            words["logging_dir"] = "."
        case "clearml":
            # 0 makes steps keep their numbers after a restart. The framework hooks are off because they would upload
            # checkpoints.
            words |= {"continue_last_task": 0} if known_id else {"reuse_last_task_id": False}
            words["auto_connect_frameworks"] = False
        case "comet_ml":
            from comet_ml import ExperimentConfig

            named = {word: words.pop(word) for word in ("name", "tags") if word in words}
            words["experiment_config"] = ExperimentConfig(auto_metric_logging=False, display_summary_level=0, **named)
        case "dvclive":
            words |= {"dir": str(run / "dvclive"), "dvcyaml": str(run / "dvclive" / "dvc.yaml"), "resume": True}
        case "mlflow":
            group = {"group": words.pop("group")} if "group" in words else {}
            words["tags"] = {**dict.fromkeys(tracking.tags, ""), **group}
        case "swanlab":
            words |= {"log_dir": str(run / "swanlab"), "resume": "allow"}
        case "tensorboard":
            words |= {"run_name": "tensorboard", "logging_dir": run}
        case "trackio":
            words["resume"] = "allow"
        case "wandb":
            # The limits suppress the list of all curves at the end of the console output. The log has the numbers.
            brief = {"max_end_of_run_history_metrics": 0, "max_end_of_run_summary_metrics": 0}
            words |= {"dir": str(run), "resume": "allow", "settings": brief}
    return made(**words)


def flatten_for_trackers(values: Any) -> dict[str, Any]:
    """Flattens settings like `leaves`. Turns None into text and drops empty lists, because some trackers lack them."""
    return {path: "null" if leaf is None else leaf for path, leaf in leaves(values).items() if leaf not in ([], {})}
