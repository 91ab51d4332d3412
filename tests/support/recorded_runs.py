"""Recorded runs that replace training in tests of experiments."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from pretrain.config import RunConfig
from pretrain.files import SEAL_FILE
from pretrain.recipe import read_run_config
from pretrain_tools.experiments import small_runs, sweep
from support.run_logs import end_line, start_line, train_line, validation_line, write_run


def record_instead_of_training(monkeypatch, losses: Callable[[RunConfig], dict[str, float]]) -> list[str]:
    """Makes experiments write finished runs with these validation losses, {source: loss}, instead of running train.py.

    Returns a list to which each run's name is added when the run starts.
    """
    trained: list[str] = []

    def popen(command: list[str], **options: object) -> SimpleNamespace:
        assert command[:1] == [sys.executable] and Path(command[1]).name == "train.py"
        config = read_run_config(Path(command[command.index("--config") + 1]))
        last = config.budget.steps
        lines = [start_line(0, last), *(train_line(step) for step in range(1, last + 1))]
        lines += [validation_line(last, loss, source) for source, loss in losses(config).items()]
        run = write_run(config.output, [*lines, end_line(last)])
        (run / "final").mkdir()
        (run / "final" / SEAL_FILE).touch()
        trained.append(run.name)
        return SimpleNamespace(poll=lambda: 0, returncode=0)

    # Don't replace subprocess.Popen itself, because modules imported later may use it in annotations.
    monkeypatch.setattr(small_runs, "subprocess", SimpleNamespace(**(vars(subprocess) | {"Popen": popen})))
    monkeypatch.setattr(sweep, "POLL_SECONDS_OF_RUNS", 0.0)
    return trained
