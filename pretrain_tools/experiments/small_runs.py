"""Starts runs, each in a separate train.py process, and reads their outcomes.

    FOLDER/recipes/NAME.yaml   complete recipe, written when the run starts
    FOLDER/recipes/NAME.json   everything that must not change when it resumes
    FOLDER/runs/NAME           run folder
    FOLDER/logs/NAME.log       console output; locked by the training process so that no run starts twice

If this process is killed, its runs continue, and the next call waits for them. A killed run resumes from its
checkpoint.
"""

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.config import RunConfig
from pretrain.errors import EXIT_NUMERIC
from pretrain.files import ROOT, SEAL_FILE, write_durably
from pretrain.parallel.launcher import environment_alone
from pretrain.processes import hold_while_open
from pretrain.recipe import as_yaml
from pretrain.runs.event_log import Event, read_metrics
from pretrain.runs.run_folder import checkpoint_folders
from pretrain_tools.runs.comparison import flatten_settings
from pretrain_tools.runs.history import History, end_of, is_number


@dataclass(frozen=True)
class SmallRun:
    """A run in an experiment."""

    name: str
    folder: Path
    """Experiment folder."""
    config: RunConfig
    """Complete recipe."""
    on_disk: dict[str, Any]
    """Model and shards, as {name: value}."""

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that identifies the run, as {name: value}."""
        return flatten_settings(self.config.model_dump(mode="json", exclude={"output"})) | self.on_disk

    @property
    def record(self) -> Path:
        return self.folder / "recipes" / f"{self.name}.json"

    @property
    def recipe(self) -> Path:
        return self.folder / "recipes" / f"{self.name}.yaml"

    @property
    def output(self) -> Path:
        return self.folder / "runs" / self.name

    @property
    def log(self) -> Path:
        return self.folder / "logs" / f"{self.name}.log"


@dataclass(frozen=True)
class RunOutcome:
    """A run's progress, read from its folder."""

    folder: Path
    state: str
    """new, unfinished, finished, failed, or diverged (stopped by the guard; a retry would diverge again)."""
    step: int
    """Step of the newest checkpoint, or the last step of a finished run."""
    losses: dict[int, dict[str, float]]
    """{step: {source: validation loss}}, with inf for non-finite losses."""
    tokens: int = 0
    seconds: float = 0.0
    reason: str = ""
    """Why the run ended early."""

    def loss_at(self, step: int) -> float:
        """Returns the validation loss at a step, averaged over sources; inf if missing."""
        return statistics.fmean(self.losses[step].values()) if step in self.losses else math.inf

    @property
    def loss(self) -> float:
        """Final loss; inf for an unfinished run."""
        return self.loss_at(self.step) if self.state == "finished" else math.inf


def read_outcome(run: SmallRun) -> RunOutcome:
    """Reads a run's outcome from its folder, even after a crash."""
    history = History.of_events(run.output, read_metrics(run.output))
    events = history.events
    end = end_of(events)
    state = "unfinished" if events else "new"
    if end.get("code") == EXIT_NUMERIC:
        state = "diverged"
    # The export may have been deleted or damaged since.
    if end.get("code") == 0 and (run.output / "final" / SEAL_FILE).is_file():
        state = "finished"
    checkpoint = max(checkpoint_folders(run.output), default=0)
    return RunOutcome(
        folder=run.output,
        state=state,
        step=end.get("step", checkpoint) if state == "finished" else checkpoint,
        losses=losses_by_step(events),
        tokens=history.last("train").get("tokens") or 0,
        seconds=3600 * events[-1]["hours"] if events else 0.0,
        reason=str(end.get("reason", "")) if state != "finished" else "",
    )


def losses_by_step(events: Sequence[Event]) -> dict[int, dict[str, float]]:
    """Returns {step: {source: validation loss}}, with inf for non-finite losses."""
    losses: dict[int, dict[str, float]] = {}
    for event in events:
        if event["event"] == "validation":
            loss = event.get("loss")
            of_step = losses.setdefault(event.get("step") or 0, {})
            of_step[str(event.get("source"))] = loss if is_number(loss) else math.inf
    return losses


def device_slots(parallel: int | None) -> list[dict[str, str]]:
    """Returns the environment variables for each parallel run. The default is one run per GPU, or one on the CPU.

    If there are more runs than GPUs, they share the GPUs. Runs on the CPU share the cores.
    """
    import torch

    from pretrain.limits import available_cores

    # CUDA_VISIBLE_DEVICES may already restrict or reorder the GPUs.
    if count := torch.cuda.device_count():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        names = visible.split(",")[:count]
        return [{"CUDA_VISIBLE_DEVICES": names[n % count]} for n in range(parallel or count)]
    # Otherwise, each run would start one thread per core. A value set by the user takes precedence.
    if not parallel or parallel == 1 or "OMP_NUM_THREADS" in os.environ:
        return [{}] * (parallel or 1)
    return [{"OMP_NUM_THREADS": str(max(1, available_cores() // parallel))}] * parallel


def start_training(run: SmallRun, environment: Mapping[str, str]) -> subprocess.Popen:
    """Starts train.py with its console output redirected to the run's log."""
    for folder in (run.log.parent, run.recipe.parent):
        folder.mkdir(parents=True, exist_ok=True)
    # Written only now, because a run that is still training may read its recipe again.
    write_durably(run.record, json.dumps(run.settings))
    write_durably(run.recipe, as_yaml(run.config))
    with open(run.log, "ab") as log:
        # The child inherits the lock, so it outlives this process.
        hold_while_open(log)
        return subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), "--config", str(run.recipe)],
            # With a launcher's variables (RANK, WORLD_SIZE), the run would join this process's group.
            env=environment_alone() | environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # otherwise, the run would receive Ctrl-C twice
        )


def failure_text(run: SmallRun, outcome: RunOutcome, status: int) -> str:
    """Returns why a run ended early: its recorded reason, or the last line of its log."""
    log = run.log.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in (outcome.reason or log).splitlines() if line.strip()]
    return f"{lines[-1]} (exit {status})" if lines else f"exit {status}"
