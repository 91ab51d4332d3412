"""Background processes, which evaluate, publish and mirror checkpoints and cannot fail the run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pretrain import config
from pretrain.checkpoint.mirror_store import CLAIM_FILE, mirror_place
from pretrain.files import ROOT
from pretrain.parallel.launcher import environment_alone
from pretrain.parallel.ranks import Ranks
from pretrain.processes import hold_while_open, is_held
from pretrain.runs.hub import EVALUATIONS, cut_short, evaluation_log, publish_in_background
from pretrain.runs.run_folder import (
    MIRROR_FOLDER,
    MIRROR_STATUS,
    checkpoint_name,
    latest_step,
    read_json,
    step_named,
)
from pretrain.training.metrics import Metrics
from pretrain.units import bytes_text, counted

THEN_REMOVE = '"$@"; status=$?; rm -rf -- "$0"; exit $status'
"""For a shell: runs a command, then removes the folder given before it, and exits as the command did."""

COPIER = (sys.executable, "-m", "pretrain.checkpoint.mirror_copy")
STALLED_SECONDS, RESTART_SECONDS, LAST_COPY_SECONDS = 1800.0, 10.0, 30.0
"""Of the process that copies to the mirror: silence that is a hang; between its first two starts; for the last log."""


class Evaluations:
    """Evaluations of checkpoints in separate processes. The main rank starts and collects them; others have none.

    evaluations/step-00000500 holds links to the model's files, since the checkpoint may be pruned meanwhile, and is
    removed when its process ends, even if the run has ended before; log and results are kept beside it.

    Args:
        threads: OMP_NUM_THREADS of each; more than 1 where training leaves the cores free.
    """

    def __init__(self, run: Path, metrics: Metrics, threads: str = "1"):
        self.run, self.metrics, self.threads = run, metrics, threads
        self._running: dict[Path, subprocess.Popen] = {}
        if metrics.is_main:
            for leftover in (run / EVALUATIONS).glob("step-*/"):  # of evaluations that a crash cut short
                if step_named(leftover.name) is not None and not is_held(evaluation_log(run, leftover.name)):
                    shutil.rmtree(leftover)

    def start(self, checkpoint: Path, settings: config.Evaluation) -> subprocess.Popen | None:
        """Starts evaluating a checkpoint, whose results go into metrics.jsonl; a failure to start is a warning."""
        folder, log = self.run / EVALUATIONS / checkpoint.name, evaluation_log(self.run, checkpoint.name)
        self.stop(folder)  # of this step before a rollback
        if is_held(log):
            return None  # started before a crash of the run, which it has survived
        environment = environment_alone()
        environment["CUDA_VISIBLE_DEVICES"] = settings.device.removeprefix("cuda:").removeprefix("cpu")
        environment["OMP_NUM_THREADS"] = self.threads
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            for path in checkpoint.iterdir():
                if path.is_file() and not path.name.startswith(("optimizer", "MANIFEST")):
                    os.link(path, folder / path.name)
            with open(log, "a+b") as output:
                hold_while_open(output)
                self._running[folder] = subprocess.Popen(
                    ["/bin/sh", "-c", THEN_REMOVE, str(folder.absolute()), *evaluation_command(folder, settings)],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a Ctrl-C for the run is not one for it
                    preexec_fn=lambda: os.nice(10),
                )
        except OSError as error:
            self.metrics.write("warning", message=f"the evaluation of {folder.name} could not be started: {error}")
            shutil.rmtree(folder, ignore_errors=True)
        return self._running.get(folder)

    def fetch(self) -> None:
        """Sends the results of finished evaluations to the trackers and reports failures; does not wait."""
        for folder, process in [(folder, p) for folder, p in self._running.items() if p.poll() is not None]:
            del self._running[folder]
            if process.returncode:
                failed = f"the evaluation of {folder.name} failed (exit {process.returncode})"
                self.metrics.write("warning", message=f"{failed}: see {evaluation_log(self.run, folder.name)}")
            else:
                self.metrics.track(numbers_of(folder.with_suffix(".json")))

    def stop(self, folder: Path | None = None) -> None:
        """Stops the one in this folder, or all: the run stops before the end of its budget."""
        for running in [running for running in self._running if folder in (None, running)]:
            process = self._running.pop(running)
            os.killpg(process.pid, signal.SIGTERM)  # the shell and what it runs
            process.wait()
            shutil.rmtree(running, ignore_errors=True)

    @property
    def names(self) -> list[str]:
        """The checkpoints whose evaluations are running."""
        return [folder.name for folder in self._running]


def evaluation_command(folder: Path, settings: config.Evaluation) -> list[str]:
    """evaluate.py on the model in a folder, with its results beside the folder."""
    results = folder.with_suffix(".json").absolute()
    command = [sys.executable, str(ROOT / "evaluate.py"), "--model", str(folder.absolute()), "--output", str(results)]
    command += ["--tasks", *settings.tasks]
    command += ["--limit", f"{settings.limit:g}"] if settings.limit is not None else []
    for flag, path in (("--include_path", settings.include_path), ("--eval_bundle", settings.eval_bundle)):
        command += [flag, str(path.absolute())] if path is not None else []
    return command


def evaluate_beside(
    evaluations: Evaluations, ranks: Ranks, checkpoint: Path, settings: config.Evaluation, beat: Callable[[], None]
) -> None:
    """Evaluates a checkpoint in a separate process; all ranks call.

    With `where: same` all wait for its end, calling `beat` now and then.
    """
    process = evaluations.start(checkpoint, settings) if ranks.is_main else None
    while settings.where == "same" and ranks.gather(process is not None and process.poll() is None)[0]:
        time.sleep(0.5)
        beat()


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
    """Restarts uploads that a crash of the machine interrupted."""
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


class MirrorCopies:
    """The process that copies the run to `checkpoint.mirror`, as its log sees it. The main rank's; others have none.

    Nothing here waits for the mirror but `settle` and `close`, at the end of the run. See checkpoint/mirror_copy.py.
    """

    def __init__(self, run: config.RunConfig, metrics: Metrics):
        self.run, self.settings, self.metrics = run.output, run.checkpoint, metrics
        self._process: subprocess.Popen | None = None
        self._reported: int | None = None
        self._failing = self._dropping = False
        self._started, self._starts = 0.0, 0
        self._heard, self._heard_at = None, 0.0
        """The time in the last status, by its writer's clock, and when it was new, by one that nobody sets."""
        self._damaged: dict[str, str] = {}
        if self.settings.mirror is None or not metrics.is_main:
            return
        claim = self._claim = read_json(self.run / MIRROR_FOLDER / CLAIM_FILE)
        self._warn_of_damage(claim.get("damaged") or {})
        if found := claim.get("fetched"):
            figures = {name: found[name] for name in ("bytes", "seconds", "mirror")}
            metrics.write("fetch", step=found["step"], path=checkpoint_name(found["step"]), **figures)
        if problem := claim.get("problem"):
            what_now = "the run goes on from its own folder, and its end says what is not copied"
            self._warn(f"the mirror {problem}; {what_now}")
        self._start()

    def _warn(self, *messages: str) -> None:
        for message in messages:
            self.metrics.write("warning", message=message)

    def _warn_of_damage(self, damaged: dict[str, str]) -> None:
        """Names what was not known before; {name: what is wrong}."""
        if fresh := [f"{name} ({what})" for name, what in damaged.items() if name not in self._damaged]:
            self._warn(f"damaged on the mirror: {'; '.join(fresh)}; what this folder has of it is copied again")
        self._damaged |= damaged

    def _start(self) -> None:
        """Starts the process; a failure to start is a warning."""
        self._started, self._starts = time.monotonic(), self._starts + 1
        settings = self.settings.model_dump(mode="json", exclude={"mirror"})
        command = [*COPIER, str(self.run.absolute()), "--follow"]
        command += ["--mirror", mirror_place(self.settings.mirror), "--settings", json.dumps(settings)]
        try:
            (self.run / MIRROR_STATUS).unlink(missing_ok=True)
            with open(self.run / MIRROR_FOLDER / "mirror.log", "ab") as log:
                self._process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env={**environment_alone(), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # the signals and the end of the training are not its own
                    preexec_fn=lambda: os.nice(10),
                )
        except OSError as error:
            self._warn(f"the copies to the mirror could not be started: {error}")

    def _status(self) -> dict:
        """What the process has written; {} while that of an earlier start still ends."""
        status = read_json(self.run / MIRROR_STATUS)
        return status if status.get("start") == self._claim.get("start") else {}

    def look(self) -> None:
        """Logs what was copied since the last call, and warns once of what fails; does not wait."""
        if self._process is None:
            return
        status = self._status()
        self._report(status)
        if status.get("time") != self._heard:
            self._heard, self._heard_at = status.get("time"), time.monotonic()
        silent = self._heard is not None and time.monotonic() - self._heard_at > STALLED_SECONDS
        ended = self._process.poll() is not None
        patience = RESTART_SECONDS * 2.0 ** (self._starts - 1)
        if (ended or silent) and not status.get("is_over") and time.monotonic() - self._started > patience:
            self._warn(
                f"the process that copies to the mirror {'has died' if ended else 'hangs'}; it is started again"
            )
            self._kill()
            self._start()

    def _report(self, status: dict) -> None:
        self._warn_of_damage(status.get("damaged") or {})
        step, latest = status.get("copied_step"), latest_step(self.run)
        if step not in (None, self._reported) and status["bytes"] is not None:
            self._reported = step
            figures = {"bytes": status["bytes"], "seconds": status["seconds"]}
            self.metrics.write("mirror", step=step, **figures, latest_step=latest)
        last = f"its last copy is of step {step:,}" if step is not None else "nothing was copied since the start"
        problem = status.get("problem")
        if problem is not None and not self._failing:
            tries = counted(status["failures"], "attempt")
            what_now = "copying ends" if status["is_over"] else "it is tried again, and training does not wait"
            self._warn(
                f"the mirror {status['mirror']} does not take step {latest or 0:,} ({tries}): {problem}; {last}; "
                + what_now
            )
        self._failing = problem is not None
        if status.get("dropped") and not self._dropping and problem is None:
            self._dropping = True
            self._warn(
                f"the mirror {status['mirror']} is slower than checkpoints are written: "
                f"{counted(status['dropped'], 'checkpoint')} up to step {status['dropped_step']:,} left out in favour "
                f"of newer ones; {last}, {bytes_text(status['bytes'] or 0)} in {status['seconds'] or 0:.0f} s"
            )

    def settle(self, beat: Callable[[], None]) -> None:
        """Waits until everything is on the mirror, for `mirror_wait_seconds` at most, and says what is not."""
        if self._process is None:
            return
        deadline = time.monotonic() + self.settings.mirror_wait_seconds
        with suppress(OSError):
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        with self.metrics.doing("copying to the mirror"):
            while not (status := self._status()).get("settled"):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    break
                beat()
                time.sleep(0.05)
        self._report(status)
        self._tell_of_damage(status.get("damaged", self._damaged))
        if status.get("settled") and status.get("problem") is None:
            return
        step, latest = status.get("copied_step"), latest_step(self.run)
        lives = self._process.poll() is None
        waited = f"within {self.settings.mirror_wait_seconds:g} s" if lives else "as copying has ended"
        left = f"step {latest:,}" if latest is not None and latest != step else "the last files"
        left += " and final/" if (self.run / "final").exists() else ""
        again = f"python -m pretrain.checkpoint.mirror_copy {self.run} --mirror {self.settings.mirror}"
        self._warn(f"{left} not copied to the mirror {waited}; they are in {self.run}: {again} copies them")

    def _tell_of_damage(self, left: dict[str, str]) -> None:
        """What became of it by the end."""
        if cured := [name for name in self._damaged if name not in left]:
            self.metrics.say(f"Damaged on the mirror at first, and replaced or removed there: {', '.join(cured)}")
        if left:
            names = "; ".join(f"{name} ({what})" for name, what in left.items())
            what_now = f"the next copy replaces what is in {self.run}; restore or remove the rest there"
            self._warn(f"still damaged on the mirror: {names}; {what_now}")

    def close(self) -> None:
        """After the last line of the log: lets the log be copied too, and ends the process."""
        if self._process is None:
            return
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LAST_COPY_SECONDS if self._status().get("settled") else 0.0)
        self._kill()

    def _kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process = None
