"""Background processes: they evaluate and publish checkpoints and cannot fail the run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pretrain import config
from pretrain.files import ROOT
from pretrain.parallel.launcher import environment_alone
from pretrain.parallel.ranks import Ranks
from pretrain.processes import hold_while_open, is_held
from pretrain.runs.publishing.hub_upload import cut_short, publish_in_background
from pretrain.runs.publishing.publish import EVALUATIONS, evaluation_log
from pretrain.training.metrics import Metrics

THEN_REMOVE = '"$@"; status=$?; rm -rf -- "$0"; exit $status'
"""For a shell: runs a command, removes the folder that stands before it, and exits as the command did."""


@dataclass
class Companion:
    """A process that was started."""

    name: str
    process: subprocess.Popen
    log: Path
    folder: Path
    """What it works on; it goes when the process ends."""
    results: Path
    """Where evaluate.py writes its JSON."""


class Companions:
    """Started and fetched by the main rank; on the other ranks there are none."""

    def __init__(self, run: Path, metrics: Metrics):
        self.run, self.metrics = run, metrics
        self._running: list[Companion] = []
        if metrics.is_main:
            for leftover in (run / EVALUATIONS).glob("step-*/"):  # of evaluations that a crash cut short
                if not is_held(evaluation_log(run, leftover.name)):
                    shutil.rmtree(leftover)

    def start(
        self, name: str, arguments: list[str], log: Path, *, device: str, results: Path, folder: Path
    ) -> subprocess.Popen | None:
        """Starts a script of this project, with its output in `log`; a failure to start is a warning.

        folder: removed when the process ends, also where the run has ended before it.
        """
        environment = environment_alone()
        environment["CUDA_VISIBLE_DEVICES"] = device.removeprefix("cuda:") if device.startswith("cuda:") else ""
        environment["OMP_NUM_THREADS"] = environment.get("OMP_NUM_THREADS", "1")
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with open(log, "a+b") as output:
                hold_while_open(output)
                process = subprocess.Popen(
                    ["/bin/sh", "-c", THEN_REMOVE, str(folder.absolute()), sys.executable, *arguments],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a Ctrl-C for the run is not one for it
                    preexec_fn=lambda: os.nice(10),
                )
        except OSError as error:
            self.metrics.write("warning", message=f"{name} could not be started: {error}")
            shutil.rmtree(folder, ignore_errors=True)
            return None
        self._running.append(Companion(name, process, log, folder, results))
        return process

    def fetch(self) -> None:
        """Sends the results of finished processes to the trackers and reports failures; does not wait."""
        for companion in [companion for companion in self._running if companion.process.poll() is not None]:
            self._running.remove(companion)
            if code := companion.process.returncode:
                self.metrics.write("warning", message=f"{companion.name} failed (exit {code}): see {companion.log}")
            else:
                self.metrics.track(numbers_of(companion.results))

    def stop(self, name: str | None = None) -> None:
        """Stops one or all: the run stops before the end of its budget."""
        for companion in [companion for companion in self._running if name in (None, companion.name)]:
            self._running.remove(companion)
            os.killpg(companion.process.pid, signal.SIGTERM)  # the shell and what it runs
            companion.process.wait()
            shutil.rmtree(companion.folder, ignore_errors=True)

    @property
    def names(self) -> list[str]:
        """The names of running processes."""
        return [companion.name for companion in self._running]


def evaluate_beside(
    companions: Companions, ranks: Ranks, checkpoint: Path, settings: config.Evaluation, beat: Callable[[], None]
) -> None:
    """Evaluates a checkpoint in a process that writes its results into the run's metrics.jsonl; all ranks call.

    With `where: same` all wait for its end, calling `beat` now and then.
    """
    process = _start_evaluation(companions, checkpoint, settings) if ranks.is_main else None
    while settings.where == "same" and ranks.gather(process is not None and process.poll() is None)[0]:
        time.sleep(0.5)
        beat()


def _start_evaluation(
    companions: Companions, checkpoint: Path, settings: config.Evaluation
) -> subprocess.Popen | None:
    """The model's files are linked, not copied, into evaluations/step-00000500: the checkpoint itself may be pruned
    while it is being evaluated."""
    run, name = checkpoint.parent.parent, f"the evaluation of {checkpoint.name}"
    folder, log = run / EVALUATIONS / checkpoint.name, evaluation_log(run, checkpoint.name)
    companions.stop(name)  # of this step before the run went back
    if is_held(log):
        return None  # one that a run before a crash has started, and that has outlived it
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in checkpoint.iterdir():
        if path.is_file() and not path.name.startswith(("optimizer", "MANIFEST")):
            os.link(path, folder / path.name)
    results = folder.with_suffix(".json")
    arguments = [str(ROOT / "evaluate.py"), "--model", str(folder.absolute()), "--output", str(results.absolute())]
    arguments += ["--tasks", *settings.tasks]
    if settings.limit is not None:
        arguments += ["--limit", f"{settings.limit:g}"]
    if settings.include_path is not None:
        arguments += ["--include_path", str(settings.include_path.absolute())]
    return companions.start(
        name,
        arguments,
        log,
        device=settings.device,
        results=results,
        folder=folder,
    )


def publish_beside(run: config.RunConfig, step: int | None, metrics: Metrics) -> None:
    """Publishes a checkpoint, or final/ (step None), as configured in the recipe; the run neither waits nor fails."""
    if run.hub.repository is None or not metrics.is_main:
        return
    warning = publish_in_background(
        run.output,
        run.hub.repository,
        step=step,
        private=run.hub.private,
        license=run.publish.license,
        languages=run.publish.language,
    )
    if warning:
        metrics.write("warning", message=warning)


def publish_cut_short(run: config.RunConfig, metrics: Metrics) -> None:
    """Restarts the uploads that were interrupted when the machine went down."""
    if metrics.is_main:
        for step in cut_short(run.output):
            publish_beside(run, step, metrics)


def numbers_of(results: Path) -> dict[str, float]:
    """{'evaluation/acc/arc_easy': 0.31, ...} and the step that was evaluated, from evaluate.py's JSON."""
    (model,) = json.loads(results.read_text(encoding="utf-8"))["models"]
    scores = {
        f"evaluation/{metric}/{task}": value
        for task, measures in model["tasks"].items()
        for metric, value in measures.items()
        if isinstance(value, float) and not measures.get("is_part")
    }
    return {"evaluation/step": model["step"], **scores}
