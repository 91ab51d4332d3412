"""Checks that the benchmarks that a recipe names exist, in a process of the evaluation's own code."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from pretrain.parallel.launcher import environment_alone, python_path

CHECK_SECONDS = 300.0


def task_problems(tasks: Iterable[str], include_path: Path | None, bundle: Path | None = None) -> list[str]:
    """Returns what is wrong with `evaluation.tasks`, `include_path` and `eval_bundle`, without the harness itself."""
    command = [sys.executable, "-m", "pretrain_tools.evaluation.task_names", *tasks]
    command += ["--include_path", str(include_path)] if include_path is not None else []
    command += ["--eval_bundle", str(bundle)] if bundle is not None else []
    environment = environment_alone() | {"PYTHONPATH": python_path()}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CHECK_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        return [f"evaluation.tasks: could not be checked ({error})"]
    if done.returncode:
        return [f"evaluation.tasks: could not be checked ({(done.stderr.splitlines() or ['killed'])[-1]})"]
    return done.stdout.splitlines()
