"""wandb, tensorboard and trackio, through accelerate; several at once. After a restart each continues its curve.

A tracker that loses its network or its server costs a warning, never the run.
"""

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretrain.config import RunConfig
from pretrain.recipe import leaves

TRACKER_PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard", "trackio": "trackio"}
TRACKER_PROJECT = "groundwork"


def tracker_problems(names: list[str]) -> list[str]:
    """One line for each tracker whose package is missing."""
    return [
        f"trackers: {name} is not installed: pip install {TRACKER_PACKAGES[name]}, or leave it out"
        for name in names
        if importlib.util.find_spec(TRACKER_PACKAGES[name]) is None
    ]


class Trackers:
    """The trackers of a run; there may be none.

    Args:
        run: the run's folder, whose name is the run's name.
        config: sent to each of them whole; it holds no secrets.
        warn: called with a message when a tracker fails, which switches that tracker off.
        is_late: the run has ended, and has sent its config.
    """

    def __init__(self, run: Path, config: RunConfig, warn: Callable[[str], None], *, is_late: bool = False):
        self._warn, self._running = warn, {}
        for name in config.trackers:
            tracker = _make(name, run, config)
            self._running[name] = tracker
            self._call(name, tracker.start)
            if name in self._running and not is_late:
                settings = flatten_for_trackers(config.model_dump(mode="json"))
                self._call(name, tracker.store_init_configuration, settings)

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
        except Exception as error:  # each has its own kinds, and none is worth a run
            self._running.pop(name, None)
            self._warn(f"the tracker {name} failed and is switched off: {type(error).__name__}: {error}")


def _make(name: str, run: Path, config: RunConfig) -> Any:
    from accelerate.tracking import TensorBoardTracker, TrackioTracker, WandBTracker

    named = {"name": run.name, "group": config.group, "resume": "allow"}
    if name == "wandb":
        return WandBTracker(TRACKER_PROJECT, dir=str(run), id=run_id(run), **named)
    if name == "trackio":
        return TrackioTracker(TRACKER_PROJECT, **named)
    return TensorBoardTracker("tensorboard", logging_dir=run)


def run_id(run: Path) -> str:
    """wandb's name for this folder: the same after a restart, so that it continues the same curve."""
    path = run / ".tracker_id"
    if not path.exists():
        path.write_text(f"{run.name}-{time.time_ns():x}")
    return path.read_text()


def flatten_for_trackers(values: Any) -> dict[str, Any]:
    """As `leaves`; None as text and no empty lists, since not every tracker takes those."""
    return {path: "null" if leaf is None else leaf for path, leaf in leaves(values).items() if leaf not in ([], {})}
