"""Trackers such as wandb, through accelerate's classes, by its names; several at once.

After a restart each continues its curve. A tracker that loses its network or its server costs a warning and never the
run.
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
from pretrain.runs.run_folder import read_json

DEFAULT_PROJECT = "groundwork"
PROJECT_VARIABLES = {
    "clearml": "CLEARML_PROJECT",
    "comet_ml": "COMET_PROJECT_NAME",
    "mlflow": "MLFLOW_EXPERIMENT_NAME",
    "wandb": "WANDB_PROJECT",
}
"""Environment variables that name the project where the recipe does not, before WANDB_PROJECT."""
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
"""What accelerate's class of each tracker calls the settings of `tracking`, and the id by which a run is continued.
`run_name` is what most of them call the project."""
IDS: dict[str, Callable[[Any], str]] = {
    "aim": lambda tracker: tracker.writer.hash,
    "clearml": lambda tracker: tracker.task.id,
    "comet_ml": lambda tracker: tracker.writer.get_key(),
    "mlflow": lambda tracker: tracker.active_run.info.run_id,
    "swanlab": lambda tracker: tracker.run.id,
    "wandb": lambda tracker: tracker.run.id,
}
"""Where a started tracker has that id."""


def tracker_problems(names: list[str]) -> list[str]:
    """One line for each tracker that accelerate does not know, or whose package is missing."""
    if not names:
        return []
    known = _classes()
    problems = [f"trackers: {name} is unknown{did_you_mean(name, known)}" for name in names if name not in known]
    # The packages have the names that accelerate gives the trackers.
    return problems + [
        f"trackers: {name} is not installed: pip install {name}, or leave it out"
        for name in names
        if name in SETTING_NAMES and importlib.util.find_spec(name) is None
    ]


def _classes() -> dict[str, type]:
    """{name: class} of accelerate's trackers, with those of your own that are registered there."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    return LOGGER_TYPE_TO_CLASS


class Trackers:
    """The trackers of a run; there may be none.

    Args:
        run: the run's folder, whose name is the run's name unless `tracking` has another.
        config: sent to each of them whole; it holds no secrets.
        warn: called with a message when a tracker fails, which switches that tracker off.
        facts: sent with the config, as `run.NAME`.
        is_late: the run has ended, and has sent its config.
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
        self._warn, self._running = warn, {}
        if not is_late:
            self._warn_of_settings_without_effect(config)
        for name in dict.fromkeys(config.trackers):
            self._start(name, run, config.tracking)
            if name in self._running and not is_late:
                settings = flatten_for_trackers({**config.model_dump(mode="json"), "run": facts or {}})
                try:
                    self._running[name].store_init_configuration(settings)
                except Exception as error:  # MLflow lets no setting change after a restart
                    self._warn(f"the tracker {name} did not take the settings: {type(error).__name__}: {error}")

    def _warn_of_settings_without_effect(self, config: RunConfig) -> None:
        given = {setting for setting, value in config.tracking if value}
        taken = {setting for name in config.trackers for setting in SETTING_NAMES.get(name, {"project": ""})}
        if config.trackers and given - taken:
            settings = ", ".join(f"tracking.{setting}" for setting in sorted(given - taken))
            self._warn(f"{settings}: {' and '.join(config.trackers)} cannot show it")

    def _start(self, name: str, run: Path, tracking: Tracking) -> None:
        """Starts or continues one, and records under which project and id."""
        path = run / ".trackers.json"
        recorded = read_json(path)
        before = recorded.get(name, {})
        project = tracking.project or before.get("project") or _project_of_environment(name)
        known_id = before.get("id") if before.get("project") == project else None
        try:
            tracker = make_tracker(name, run, tracking, project, known_id)
            tracker.start()
            recorded[name] = {"project": project, "id": IDS[name](tracker) if name in IDS else None}
        except Exception as error:  # each has its own kinds, and none is worth a run
            self._warn_of_failure(name, error)
            return
        self._running[name] = tracker
        path.write_text(json.dumps(recorded), encoding="utf-8")

    def log(self, numbers: dict[str, float], step: int) -> None:
        """Sends the same numbers to all."""
        for name in list(self._running):
            self._call(name, self._running[name].log, numbers, step=step)

    def finish(self) -> None:
        for name in list(self._running):
            self._call(name, self._running[name].finish)

    def _call(self, name: str, function: Callable, *arguments: Any, **named: Any) -> None:
        try:
            function(*arguments, **named)
        except Exception as error:  # as above
            self._running.pop(name, None)
            self._warn_of_failure(name, error)

    def _warn_of_failure(self, name: str, error: Exception) -> None:
        self._warn(f"the tracker {name} failed and is switched off: {type(error).__name__}: {error}")


def _project_of_environment(name: str) -> str:
    variables = (PROJECT_VARIABLES.get(name, ""), "WANDB_PROJECT")
    return next((value for variable in variables if (value := os.environ.get(variable))), DEFAULT_PROJECT)


def make_tracker(name: str, run: Path, tracking: Tracking, project: str, known_id: str | None) -> Any:
    """accelerate's tracker of that name with the settings it takes; not started.

    Args:
        known_id: of the run to continue; None: a new one.
    """
    made = _classes()[name]
    if name not in SETTING_NAMES:  # registered with accelerate, and called as accelerate calls them
        return made(project, run) if made.requires_logging_directory else made(project)
    meant = {"project": project, "entity": tracking.entity, "name": tracking.name or run.name}
    meant |= {"tags": tracking.tags, "group": tracking.group, "id": known_id}
    words = {word: meant[setting] for setting, word in SETTING_NAMES[name].items() if meant[setting]}
    if name == "aim":
        return made(logging_dir=".", **words)
    if name == "clearml":
        # 0: steps keep their numbers after a restart. The hooks into frameworks would upload checkpoints.
        again = {"continue_last_task": 0} if known_id else {"reuse_last_task_id": False}
        return made(auto_connect_frameworks=False, **again, **words)
    if name == "comet_ml":
        from comet_ml import ExperimentConfig

        of_config = {word: words.pop(word) for word in ("name", "tags") if word in words}
        quiet = {"auto_metric_logging": False, "display_summary_level": 0}
        return made(experiment_config=ExperimentConfig(**quiet, **of_config), **words)
    if name == "dvclive":
        folder = run / "dvclive"
        return made(dir=str(folder), dvcyaml=str(folder / "dvc.yaml"), resume=True, **words)
    if name == "mlflow":
        group = {"group": words.pop("group")} if "group" in words else {}
        return made(**{**words, "tags": {**dict.fromkeys(tracking.tags, ""), **group}})
    if name == "swanlab":
        return made(log_dir=str(run / "swanlab"), resume="allow", **words)
    if name == "tensorboard":
        return made("tensorboard", logging_dir=run)
    if name == "trackio":
        return made(resume="allow", **words)
    # Without a list of all curves on the console at the end; the log has their numbers.
    brief = {"max_end_of_run_history_metrics": 0, "max_end_of_run_summary_metrics": 0}
    return made(dir=str(run), resume="allow", settings=brief, **words)


def flatten_for_trackers(values: Any) -> dict[str, Any]:
    """As `leaves`; None as text and no empty lists, since not every tracker takes those."""
    return {path: "null" if leaf is None else leaf for path, leaf in leaves(values).items() if leaf not in ([], {})}
