"""Sends metrics to trackers such as wandb, using accelerate's tracker classes.

After a restart, trackers continue the same run, except those in STARTS_ANEW. If a tracker fails, it is disabled with a
warning.
"""

import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pretrain.config import RunConfig, Tracking
from pretrain.errors import did_you_mean
from pretrain.registry import TRACKERS
from pretrain.runs.run_folder import read_json
from pretrain.units import leaves

DEFAULT_PROJECT = "groundwork"
SETTING_NAMES: dict[str, dict[str, str]] = {
    "mlflow": {"project": "experiment_name", "name": "run_name", "tags": "tags", "group": "group", "id": "run_id"},
    "tensorboard": {},
    "trackio": {"project": "run_name", "name": "name", "group": "group"},
    "wandb": {"project": "run_name", "entity": "entity", "name": "name", "tags": "tags", "group": "group", "id": "id"},
}
"""{tracker: {`tracking` setting or id: argument of accelerate's class}}. id is the run ID. Other trackers get only a
project.
"""
STARTS_ANEW = ("aim", "clearml", "comet_ml", "swanlab")
"""accelerate's trackers that start another run after a restart."""
IDS: dict[str, Callable[[Any], str]] = {
    "mlflow": lambda tracker: tracker.active_run.info.run_id,
    "wandb": lambda tracker: tracker.run.id,
}
"""{tracker: function that returns the run ID of a started tracker}."""


def tracker_problems(names: list[str]) -> list[str]:
    """Lists trackers that are unknown or not installed."""
    from accelerate.utils import LoggerType

    known = _classes()
    problems = [f"trackers: {name} is unknown{did_you_mean(name, known)}" for name in names if name not in known]
    # accelerate's tracker names are also the package names.
    return problems + [
        f"trackers: {name} is not installed; pip install {name}, or omit it"
        for name in names
        if name in LoggerType.list() and importlib.util.find_spec(name) is None
    ]


def _classes() -> dict[str, type]:
    """Returns {name: class} for accelerate's trackers and those registered by extensions."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    return LOGGER_TYPE_TO_CLASS | dict(TRACKERS)


class Trackers:
    """A run's trackers.

    Args:
        run: the run folder. Its name is the default run name.
        config: sent to each tracker. Contains no secrets.
        warn: called with a message when a tracker fails and is disabled.
        facts: sent with the config, as `run.NAME`.
        is_late: True after the end of the run. The config isn't sent again, and no tracker starts another run.
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
            warn(f"{settings}: not supported by {' and '.join(config.trackers)}")
        for name in dict.fromkeys(config.trackers):
            if is_late and name in STARTS_ANEW:
                continue
            self._call(name, self._start, name, run, config.tracking)
            if name in self._running and not is_late:
                settings = flatten_for_trackers({**config.model_dump(mode="json"), "run": facts or {}})
                try:
                    self._running[name].store_init_configuration(settings)
                except Exception as error:  # MLflow rejects changed settings after a restart
                    warn(f"the tracker {name} rejected the settings: {type(error).__name__}: {error}")

    def _start(self, name: str, run: Path, tracking: Tracking) -> None:
        """Starts or resumes a tracker, and records its project and run ID."""
        path = run / ".trackers.json"
        recorded = read_json(path)
        before = recorded.get(name, {})
        project = tracking.project or before.get("project") or project_of_environment(name)
        known_id = before.get("id") if before.get("project") == project else None
        tracker = make_tracker(name, run, tracking, project, known_id)
        if before and name in STARTS_ANEW:
            self._warn(f"the tracker {name} cannot continue its run, so it starts another one")
        tracker.start()
        recorded[name] = {"project": project, "id": IDS[name](tracker) if name in IDS else None}
        self._running[name] = tracker
        path.write_text(json.dumps(recorded), encoding="utf-8")

    def log_event(self, event: str, values: dict[str, Any]) -> None:
        """Sends an event's numeric values, with names such as 'validation/loss/SOURCE'."""
        source = f"/{values['source']}" if "source" in values else ""
        numbers = {
            f"{event}/{name}{source}": value
            for name, value in values.items()
            if isinstance(value, int | float) and name != "step"
        }
        self.log(numbers, step=values["step"])

    def log(self, numbers: dict[str, float], step: int) -> None:
        """Sends metrics to all trackers."""
        for name in list(self._running):
            self._call(name, self._running[name].log, numbers, step=step)

    def finish(self) -> None:
        for name in list(self._running):
            self._call(name, self._running[name].finish)

    def _call(self, name: str, function: Callable, *arguments: Any, **named: Any) -> None:
        try:
            function(*arguments, **named)
        except Exception as error:  # trackers may raise anything, but must not stop the run
            self._running.pop(name, None)
            self._warn(f"the tracker {name} failed and is disabled: {type(error).__name__}: {error}")


def project_of_environment(name: str) -> str:
    """Returns the tracker's project from the environment, or the default."""
    experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") if name == "mlflow" else None
    return experiment or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT


def make_tracker(name: str, run: Path, tracking: Tracking, project: str, known_id: str | None) -> Any:
    """Creates a tracker with the settings that it supports, without starting it.

    Args:
        known_id: ID of the run to resume; None for a new run.
    """
    made = _classes()[name]
    if name == "dvclive":  # deletes earlier values unless it resumes
        return made(project, dir=str(run / "dvclive"), dvcyaml=str(run / "dvclive" / "dvc.yaml"), resume=True)
    if name == "clearml":  # overwrites the last task, which may be another run's
        return made(project, reuse_last_task_id=False)
    if name not in SETTING_NAMES:  # created as in accelerate
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
        case "mlflow":
            group = {"group": words.pop("group")} if "group" in words else {}
            words["tags"] = {**dict.fromkeys(tracking.tags, ""), **group}
        case "tensorboard":
            words |= {"run_name": "tensorboard", "logging_dir": run}
        case "trackio":
            words["resume"] = "allow"
        case "wandb":
            # Suppresses the summary of all curves on the console.
            brief = {"max_end_of_run_history_metrics": 0, "max_end_of_run_summary_metrics": 0}
            words |= {"dir": str(run), "resume": "allow", "settings": brief}
    return made(**words)


def flatten_for_trackers(values: Any) -> dict[str, Any]:
    """Flattens settings with `leaves`. Drops empty lists and writes None as text, as some trackers require."""
    return {path: "null" if leaf is None else leaf for path, leaf in leaves(values).items() if leaf not in ([], {})}
