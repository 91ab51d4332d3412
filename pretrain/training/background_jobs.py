"""Evaluates, publishes and mirrors checkpoints in the background. Failures never stop the run."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from pretrain.config import Benchmarks, Checkpoint, RunConfig
from pretrain.files import ROOT
from pretrain.parallel.launcher import ToolError, environment_alone, run_tool
from pretrain.processes import hold_while_open, is_held
from pretrain.registry import EXTENSIONS, LOADED_CODE, TASKS
from pretrain.runs.hub import STAGING, WAITING, evaluation_log, revision_of, waiting_mark
from pretrain.runs.run_folder import EVALUATIONS, MIRROR_FOLDER, checkpoint_name, latest_step, read_json, step_named
from pretrain.training.metrics import Metrics
from pretrain.units import duration_text

THEN_REMOVE = '"$@"; status=$?; rm -rf -- "$0"; exit $status'
"""Shell script that runs a command, then removes the folder $0 and exits with the command's status."""

STALLED_SECONDS = 1800.0
"""Seconds without a response from the mirror before a warning is logged."""
LAST_COPY_SECONDS = 30.0
"""Maximum time to wait for the final copy of the log."""


def evaluation_problems(settings: Benchmarks) -> list[str]:
    """Checks the benchmark tasks and their folders in a separate process. Returns a list of problems."""
    if settings.where == "in_loop" and settings.eval_bundle is not None:
        return ["benchmarks.where: in_loop does not support eval_bundle; use blocking, or omit eval_bundle"]
    if settings.where == "in_loop" and (own := [name for name in settings.tasks if name in TASKS]):
        return [f"benchmarks.where: in_loop does not support tasks from extensions ({', '.join(own)}); use blocking"]
    try:
        return run_tool("evaluation.task_names", *task_arguments(settings)).splitlines()
    except ToolError as error:
        return [f"benchmarks.tasks: could not be checked ({error})"]


def task_arguments(settings: Benchmarks) -> list[str]:
    """Returns evaluate.py's arguments for these benchmarks."""
    arguments = ["--tasks", *settings.tasks]
    for flag, path in (("--include_path", settings.include_path), ("--eval_bundle", settings.eval_bundle)):
        arguments += [flag, str(path.absolute())] if path is not None else []
    if any(name in TASKS for name in settings.tasks):
        arguments += ["--extensions", *EXTENSIONS]
    return arguments


def start_beside(command: list[str], log: IO, held: IO, **environment: str) -> subprocess.Popen:
    """Starts a command at low priority. It outlives this process, and holds `held` open (see processes.py)."""
    hold_while_open(held)
    # Not preexec_fn, which can deadlock in a multithreaded process.
    niceness = ["nice", "-n", "10"] if shutil.which("nice") else []
    return subprocess.Popen(
        [*niceness, *command],
        env=environment_alone() | environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[held.fileno()],
        start_new_session=True,  # so that the trainer's signals, such as Ctrl-C, don't reach it
    )


class Evaluations:
    """Evaluates checkpoints in separate processes started by the main rank.

    Each evaluation uses a folder such as evaluations/step-00000500 with hard links to the model's files, so the
    checkpoint can be pruned in the meantime. The process removes the folder when it exits.

    Args:
        threads: OMP_NUM_THREADS for each process.
    """

    def __init__(self, run: Path, metrics: Metrics, threads: str = "1"):
        self.run = run
        self.metrics = metrics
        self.threads = threads
        self._running: dict[Path, subprocess.Popen] = {}
        if metrics.is_main:
            for leftover in (run / EVALUATIONS).glob("step-*/"):  # left behind by a crash
                if step_named(leftover.name) is not None and not is_held(evaluation_log(run, leftover.name)):
                    shutil.rmtree(leftover)

    def start(self, checkpoint: Path, settings: Benchmarks) -> subprocess.Popen | None:
        """Starts evaluating a checkpoint, or logs a warning if the process can't be started."""
        folder = self.run / EVALUATIONS / checkpoint.name
        log = evaluation_log(self.run, checkpoint.name)
        if folder in self._running:
            self.stop(folder)  # from before a rollback; may hold the log for a moment
        elif is_held(log):
            return None  # still running from before a crash
        command = ["/bin/sh", "-c", THEN_REMOVE, str(folder.absolute()), *evaluation_command(folder, settings)]
        gpu = settings.device.removeprefix("cuda:").removeprefix("cpu")  # empty for the CPU, which hides all GPUs
        environment = {"CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": self.threads}
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            for path in checkpoint.iterdir():
                if path.is_file() and not path.name.startswith(("optimizer", "MANIFEST")):
                    os.link(path, folder / path.name)
            with open(log, "a+b") as output:
                self._running[folder] = start_beside(command, output, output, **environment)
        except OSError as error:
            self.metrics.warn(f"the evaluation of {folder.name} could not be started: {error}")
            shutil.rmtree(folder, ignore_errors=True)
        return self._running.get(folder)

    def fetch(self) -> None:
        """Sends results of finished evaluations to the trackers and logs failures. Doesn't block."""
        for folder, process in list(self._running.items()):
            if process.poll() is None:
                continue
            del self._running[folder]
            if process.returncode:
                failed = f"the evaluation of {folder.name} failed with exit code {process.returncode}"
                self.metrics.warn(f"{failed}; see {evaluation_log(self.run, folder.name)}")
            else:
                for model in read_json(folder.with_suffix(".json")).get("models", ()):  # unless removed since
                    for task, measures in model["tasks"].items():
                        self.metrics.say_scores(model["step"], task, measures)
                    self.metrics.track(numbers_of(model))

    def stop(self, folder: Path | None = None) -> None:
        """Stops the evaluation in `folder`, or all evaluations, and logs which ones had no results yet."""
        self.fetch()
        for running in [running for running in self._running if folder in (None, running)]:
            process = self._running.pop(running)
            os.killpg(process.pid, signal.SIGTERM)  # the shell and its command
            process.wait()
            shutil.rmtree(running, ignore_errors=True)
            self.metrics.warn(f"the evaluation of {running.name} was stopped before it had results")

    @property
    def names(self) -> list[str]:
        """Names of the checkpoints being evaluated."""
        return [folder.name for folder in self._running]


def evaluation_command(folder: Path, settings: Benchmarks) -> list[str]:
    """Returns the command that evaluates the model in `folder` and writes the results next to it."""
    results = folder.with_suffix(".json").absolute()
    command = [sys.executable, str(ROOT / "evaluate.py"), "--model", str(folder.absolute()), "--output", str(results)]
    command += ["--limit", f"{settings.limit:g}"] if settings.limit is not None else []
    command += ["--trust_remote_code"] if "code of the model" in LOADED_CODE else []
    return command + task_arguments(settings)


def start_publishing(config: RunConfig, step: int | None, metrics: Metrics) -> None:
    """Starts publish.py for the checkpoint of `step`, or for final/ if None. Logs a warning if that fails.

    publish.py retries failed uploads, logs to RUN/publish/publish.log and records the outcome in metrics.jsonl. The
    checkpoint must be committed, and must not be pruned during the upload.
    """
    if not metrics.is_main:
        return
    run = config.output
    repository = config.hub.repository
    command = [sys.executable, str(ROOT / "publish.py"), "--run", str(run), "--repo", repository]
    command += ["--final"] if step is None else ["--checkpoint", str(step)]
    command += ["--license", config.publish.license, "--beside_training"]
    command += ["--language", *config.publish.language] if config.publish.language else []
    command += ["--private"] if config.hub.private else []
    command += ["--trust_remote_code"] if config.trust_remote_code else []
    mark = waiting_mark(run, "main" if step is None else revision_of(step))
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    try:
        mark.parent.mkdir(exist_ok=True)
        with open(run / STAGING / "publish.log", "ab") as log, open(mark, "a+b") as held:
            start_beside(command, log, held, **environment)
    except OSError as error:
        metrics.warn(f"publishing to {repository} could not be started ({error}); run publish.py yourself")


def resume_publishing(config: RunConfig, metrics: Metrics) -> None:
    """Restarts uploads that were interrupted by a machine crash."""
    if not metrics.is_main:
        return
    for mark in sorted((config.output / STAGING).glob(f".*{WAITING}")):
        revision = mark.name.removeprefix(".").removesuffix(WAITING)
        step = None if revision == "main" else int(revision.removeprefix("step-"))
        folder = config.output / ("final" if step is None else f"checkpoints/{checkpoint_name(step)}")
        if not folder.is_dir():
            mark.unlink()
        elif not is_held(mark):
            start_publishing(config, step, metrics)


def numbers_of(model: dict[str, Any]) -> dict[str, float]:
    """Converts a model's entry in evaluate.py's JSON to tracker metrics, such as {'evaluation/acc/arc_easy': 0.31}."""
    scores = {
        f"evaluation/{metric}/{task}": value
        for task, measures in {**model["sources"], **model["tasks"]}.items()
        for metric, value in measures.items()
        if isinstance(value, float) and not measures.get("is_part")
    }
    return {"evaluation/step": model["step"], **scores}


class MirrorCopies:
    """Copies the run to `checkpoint.mirror` in a background thread. Used on the main rank.

    Only `settle` and `close` wait for the mirror.
    """

    def __init__(self, run: Path, settings: Checkpoint, metrics: Metrics):
        self.run = run
        self.settings = settings
        self.metrics = metrics
        self._is_silent = False
        """True if the mirror has not responded for STALLED_SECONDS."""
        self._damaged: dict[str, str] = {}
        from pretrain.checkpoint.mirror_copy import MirrorCopier
        from pretrain.checkpoint.mirror_store import CLAIM_FILE, connect

        claim = read_json(run / MIRROR_FOLDER / CLAIM_FILE)
        self._warn_of_damage(claim.get("damaged") or {})
        if found := claim.get("fetched"):
            figures = {name: found[name] for name in ("bytes", "seconds", "mirror")}
            metrics.write("fetch", step=found["step"], path=checkpoint_name(found["step"]), **figures)
        if problem := claim.get("problem"):
            metrics.warn(
                f"the mirror {problem}; the run continues from its own folder and reports missing copies at the end"
            )
        self._copier = MirrorCopier(run, connect(settings, run), settings)
        # A daemon thread, so that an unresponsive mirror can't block the exit.
        self._thread = threading.Thread(target=self._copier.keep_copying, name="mirror", daemon=True)
        self._thread.start()

    def _warn_of_damage(self, damaged: dict[str, str]) -> None:
        """Warns about newly damaged files, {name: problem}."""
        if fresh := {name: what for name, what in damaged.items() if name not in self._damaged}:
            self.metrics.warn(f"damaged on the mirror: {named(fresh)}; files with a local copy will be copied again")
        self._damaged |= damaged

    def look(self) -> None:
        """Logs new copies, and warns once about each failure. Doesn't block."""
        copier = self._copier
        self._warn_of_damage(dict(copier.damaged))
        while copier.notices:
            self.metrics.write(**copier.notices.popleft())
        seconds = time.monotonic() - copier.beaten
        was = self._is_silent
        self._is_silent = seconds > STALLED_SECONDS and self._thread.is_alive()
        if self._is_silent and not was:
            silence = f"the mirror {copier.store.address} has not responded for {duration_text(seconds)}"
            self.metrics.warn(f"{silence}. {copier.last_copy} Training does not wait.")

    def settle(self, beat: Callable[[], None]) -> None:
        """Waits up to `mirror_wait_seconds` for copying to finish, and reports missing copies."""
        copier = self._copier
        deadline = time.monotonic() + self.settings.mirror_wait_seconds
        copier.settle()
        with self.metrics.doing("copying to the mirror"):
            while not copier.is_settled and self._thread.is_alive() and time.monotonic() < deadline:
                beat()
                time.sleep(0.05)
        self.look()
        left = dict(copier.damaged)
        if cured := [name for name in self._damaged if name not in left]:
            self.metrics.say(f"Damaged files on the mirror, now replaced or removed: {', '.join(cured)}")
        if left:
            what_now = (
                f"Files that exist in {self.run} will be replaced by the next copy; restore or remove the others on "
                "the mirror."
            )
            self.metrics.warn(f"still damaged on the mirror: {named(left)}. {what_now}")
        if copier.is_settled:
            return
        latest = latest_step(self.run)
        waited = f"within {self.settings.mirror_wait_seconds:g} s"
        if not self._thread.is_alive():
            waited = "because copying stopped"
        missing = f"step {latest:,}" if latest not in (None, copier.status["copied_step"]) else "the last files"
        missing += " and final/" if (self.run / "final").exists() else ""
        again = f"python -m pretrain.checkpoint.mirror_copy {self.run} --mirror {self.settings.mirror}"
        self.metrics.warn(
            f"could not copy {missing} to the mirror {waited}; to copy the files from {self.run}, run {again}"
        )

    def close(self) -> None:
        """Copies the rest of the log and stops the thread."""
        seconds = LAST_COPY_SECONDS if self._copier.is_settled else 0.0
        self._copier.end()
        self._thread.join(seconds)


def named(damaged: dict[str, str]) -> str:
    """Formats damaged files as 'run.json (is truncated); model.json (is empty)'."""
    return "; ".join(f"{name} ({what})" for name, what in damaged.items())
