"""Copies a run's checkpoints and small files to its mirror, in a low-priority background thread.

    python -m pretrain.checkpoint.mirror_copy RUN --mirror URL     # copy everything that is missing from the mirror

The thread checks the run folder twice a second and copies the newest checkpoint first. Older checkpoints are copied
only if they are kept permanently. Failed copies are retried with exponential backoff.

    RUN/mirror/status.json      the last copy and the current error, if any, for `runs.py status`
    RUN/mirror/copying/         hard links to the files being copied, which protect them from pruning
"""

import argparse
import fcntl
import json
import os
import shutil
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from pretrain import config
from pretrain.checkpoint.mirror_store import (
    CLAIM_FILE,
    IDENTITY_FILE,
    DamagedCopyError,
    MirrorStore,
    connect,
    id_of_run,
    is_ahead,
    name_of,
    require_same_run,
    run_files,
)
from pretrain.errors import CRASHED, InputError, one_line, run_script
from pretrain.files import SEAL_FILE, write_durably
from pretrain.runs.run_folder import (
    MIRROR_FOLDER,
    MIRROR_STATUS,
    checkpoint_folders,
    checkpoint_name,
    latest_step,
    read_json,
    read_state,
    step_named,
    steps_to_keep,
    validation_loss_of,
)

SECONDS_BETWEEN_LOOKS = 0.5
BEAT_SECONDS = 2.0
"""Seconds between updates of status.json."""
LONGEST_BACKOFF_SECONDS = 300.0
LONGEST_PAUSE_AT_THE_END = 5.0
"""Maximum seconds between attempts, during training and after it."""
NICENESS = 10


class TakenOverError(Exception):
    """Raised if another process has taken over the mirror."""


class MirrorCopier:
    """Copies a run to its mirror. Run `keep_copying` in a thread or call `attempt`.

    Args:
        run: the run folder.
        settings: determines which checkpoints are kept.
    """

    def __init__(self, run: Path, store: MirrorStore, settings: config.Checkpoint):
        self.run = run
        self.store = store
        store.beat = self.beat
        self.settings = settings
        claim = read_json(run / MIRROR_FOLDER / CLAIM_FILE)
        self.start = claim.get("start")
        self.damaged: dict[str, str] = claim.get("damaged") or {}
        """{damaged file or folder on the mirror: problem}."""
        self.there: dict[int, float | None] | None = None
        """{step: validation loss} of complete checkpoints on the mirror. None until the first pass."""
        self.manifests: dict[str, bytes] = {}
        """{folder: manifest} of complete folders on the mirror: checkpoints and final/."""
        self.files: dict[str, bytes] = {}
        """{name of small file: last copied content}."""
        self.first_step = latest_step(run) or 0
        """Step at the start. Earlier checkpoints may be pruned uncopied even if the mirror keeps up."""
        self.seen: set[int] = set()
        """Steps of the local checkpoints in the last pass."""
        self.beaten = time.monotonic()
        """Time when status.json was last written (monotonic clock)."""
        self.status: dict[str, Any] = {
            "mirror": store.address,
            "copied_step": None,
            "problem": None,
            "problem_since": None,
            "failures": 0,
            "dropped": 0,
            "is_over": False,
            "damaged": self.damaged,
        }
        self.notices: deque[dict[str, Any]] = deque()
        """Events for the run's log, which the training thread removes."""
        self.is_settled = False
        """True if everything that existed when `settle` was called has been copied."""
        self._settles = False
        self._ends = False
        self._wake = threading.Event()
        (run / MIRROR_FOLDER).mkdir(parents=True, exist_ok=True)
        shutil.rmtree(run / MIRROR_FOLDER / "copying", ignore_errors=True)

    def keep_copying(self) -> None:
        """Copies until `end` is called and everything has been copied."""
        if sys.platform == "linux":  # on Linux, the priority is set per thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        with copying_alone(self.run):
            while True:
                # Cleared before reading the flags, so that no request is missed.
                self._wake.clear()
                settles = self._settles
                ends = self._ends
                done = self.attempt(everything=settles)
                failed = self.status["problem"] is not None
                self.is_settled = settles and done and not failed
                self.beat(now=failed or settles)
                if self.status["is_over"] or (ends and done):
                    return
                if done or failed:
                    pause = self.pause_seconds
                    self._wake.wait(min(pause, LONGEST_PAUSE_AT_THE_END) if settles else pause)

    def settle(self) -> None:
        """Requests a copy of everything that exists now."""
        self._settles = True
        self._wake.set()

    def end(self) -> None:
        """Makes `keep_copying` return once everything written since `settle` has been copied."""
        self._ends = True
        self._wake.set()

    def attempt(self, *, everything: bool) -> bool:
        """Calls `pass_once` and records any error in the status. Returns True if there is nothing left to copy."""
        try:
            more = self.pass_once(everything=everything)
        except Exception as error:  # error types depend on the file system
            is_taken_over = isinstance(error, TakenOverError)
            self.status["is_over"] = is_taken_over or not self.run.is_dir()
            if self.run.is_dir():
                problem = str(error) if is_taken_over else one_line(error)
                if self.status["problem"] is None:
                    what_now = "Copying stops." if is_taken_over else "Copying will be retried."
                    step = latest_step(self.run) or 0
                    self._warn(f"the mirror {self.store.address} failed to store step {step:,}: {problem}. {what_now}")
                self.status["failures"] += 1
                self.status["problem_since"] = self.status["problem_since"] or time.time()
                self.status["problem"] = problem
            return self.status["is_over"]
        self.status |= {"problem": None, "problem_since": None, "failures": 0}
        return not more

    def _warn(self, message: str) -> None:
        message = f"{message} {self.last_copy} Training does not wait."
        self.notices.append({"event": "warning", "message": message})

    @property
    def last_copy(self) -> str:
        """Says which step was copied last."""
        step = self.status["copied_step"]
        return "Nothing has been copied in this session." if step is None else f"The last copy is step {step:,}."

    def pass_once(self, *, everything: bool) -> bool:
        """Copies one missing folder. Returns True if there may be more to copy.

        everything: also copies small files that have changed.
        """
        if self.there is None:  # first pass, or run.json is missing or damaged
            self._first_look()
        self._drop_abandoned()
        if (step := self._next()) is not None:
            self._copy(step)
            return True
        final = content_of(self.run / "final" / SEAL_FILE)
        if final != self.manifests.get("final"):
            self._put_files()
            if final is None:  # an extended run has renamed it
                self._require_claim()
                self.store.unseal("final")
                del self.manifests["final"]
            else:
                self.store.put(self.run / "final", "final", self._require_claim)
                self._copied("final", final)
            return True
        if everything or content_of(self.run / "rollbacks.json") != self.files.get("rollbacks.json"):
            self._put_files()
        return False

    def _first_look(self) -> None:
        """Lists the mirror's contents and claims the mirror for this process."""
        self.manifests = {}
        self.files = {}
        identity = self.store.identity()
        sealed, parts = self.store.steps()
        there = self._whole(sealed)
        own = id_of_run(self.run)
        claim = read_json(self.run / MIRROR_FOLDER / CLAIM_FILE)
        if identity is not None and identity.start is not None and claim.get("claimed") == self.store.address:
            self._require_claim()
        elif sealed:
            try:
                require_same_run(self.run, own or "", identity, self.store)
            except (InputError, DamagedCopyError) as error:
                raise TakenOverError(str(error)) from error
            newest = max(there, default=0)
            if newest > (latest_step(self.run) or 0) and is_ahead(self.run, self.store.state(newest)):
                raise TakenOverError(
                    f"the mirror, which was unreachable at startup, contains step {newest:,}, which is later than "
                    "this folder's checkpoints; to continue from that step, restart the run"
                )
        self.store.identify(own, self.start)
        claim |= {"claimed": self.store.address, "damaged": self.damaged}
        write_durably(self.run / MIRROR_FOLDER / CLAIM_FILE, json.dumps(claim))
        self._copied(IDENTITY_FILE)
        self.there = there
        self.status["copied_step"] = max(there, default=None)
        self._remove(parts)  # left by interrupted copies

    def _whole(self, sealed: list[int]) -> dict[int, float | None]:
        """Returns {step: validation loss} of complete checkpoints. Records damaged ones in `damaged`.

        Also checks final/ and fills `manifests`. Doesn't read tensor files.
        """
        losses = {}
        names = {name_of(step): step for step in sealed}
        for name in [name for name in self.damaged if name.startswith("checkpoints/") and name not in names]:
            self._copied(name)  # removed
        if self.store.read(f"final/{SEAL_FILE}") is not None:
            names["final"] = None
        for name, step in names.items():
            try:
                loss = validation_loss_of(self.store.state(step)) if step is not None else self.store.look_over(name)
            except DamagedCopyError as error:
                self.damaged.setdefault(name, error.strerror)
            if name not in self.damaged:
                self.manifests[name] = self.store.read(f"{name}/{SEAL_FILE}")
                if step is not None:
                    losses[step] = loss
        return losses

    def _copied(self, name: str, manifest: bytes | None = None) -> None:
        """Records that a file or folder was copied to or removed from the mirror, so it is no longer damaged."""
        if manifest is not None:
            self.manifests[name] = manifest
        self.damaged.pop(name, None)

    def _require_claim(self) -> None:
        """Raises TakenOverError if another process writes to the mirror, or OSError if run.json is unusable."""
        identity = self.store.identity()
        if identity is None or identity.damage is not None:
            self.there = None
            gone = "the mirror was emptied; copying everything again"
            raise OSError(5, f"{IDENTITY_FILE} {identity.damage}; writing it again" if identity else gone)
        if identity.start != self.start:
            raise TakenOverError(
                f"another process of this run ({identity.start}) is writing to the mirror, so this one stopped copying"
            )

    def _drop_abandoned(self) -> bool:
        """Removes checkpoints that a rollback has discarded. Returns False if the mirror has no other checkpoints."""
        latest = latest_step(self.run)
        abandoned = [step for step in self.there if latest is not None and step > latest]
        if abandoned and len(abandoned) == len(self.there):
            return False
        self._remove(abandoned)
        return True

    def _remove(self, steps: list[int]) -> None:
        if steps:
            self._require_claim()
        for step in steps:
            # First, so that a partially removed folder doesn't count as complete.
            self.there.pop(step, None)
            self.manifests.pop(name_of(step), None)
            self.store.remove(name_of(step))
            self._copied(name_of(step))

    def _next(self) -> int | None:
        """Returns the step to copy next: the newest if it is missing, otherwise another one that should be kept."""
        latest = latest_step(self.run)
        if latest is None:
            return None
        here = {}
        for step, path in checkpoint_folders(self.run).items():
            manifest = content_of(path / SEAL_FILE)
            if manifest is not None and step <= latest:
                here[step] = manifest
        # Checkpoints that were pruned before they were copied.
        gone = self.seen - here.keys()
        dropped = {step for step in gone if step <= latest and name_of(step) not in self.manifests}
        self.seen = set(here)
        late = [step for step in dropped if step >= self.first_step]
        if late and not self.status["dropped"]:
            behind = f"the mirror {self.store.address} cannot keep up with the checkpoints"
            self._warn(f"{behind}: it skipped step {max(late):,}.")
        self.status["dropped"] += len(late)
        if dropped:  # failed copies of them would fill the mirror
            self._remove([step for step in self.store.steps()[1] if step in dropped])
        missing = {step for step, manifest in here.items() if self.manifests.get(name_of(step)) != manifest}
        if not missing or max(here) in missing:
            return max(missing, default=None)
        losses = {step: validation_loss_of(read_state(self.run / name_of(step))) for step in here}
        kept = steps_to_keep(self.settings.model_copy(update={"keep_last": 1}), self.there | losses)
        kept |= {step for step in here if name_of(step) in self.damaged}
        return max(missing & kept, default=None)

    def _copy(self, step: int) -> None:
        started = time.perf_counter()
        held = self.run / MIRROR_FOLDER / "copying" / checkpoint_name(step)

        def is_abandoned() -> bool:
            return (latest_step(self.run) or 0) < step

        def before_seal() -> None:
            if is_abandoned():
                raise FileNotFoundError
            self._require_claim()
            # Before the manifest, so that a complete checkpoint always comes with the log up to its step.
            self._put_files()

        self.beat()
        try:
            folder = hold(self.run / name_of(step), held)
            manifest = (folder / SEAL_FILE).read_bytes()
            size = self.store.put(folder, name_of(step), before_seal)
            self.there[step] = validation_loss_of(read_state(folder))
        except FileNotFoundError:
            if (self.run / name_of(step)).is_dir() and not is_abandoned():
                raise
            return  # pruned, or discarded by a rollback
        finally:
            shutil.rmtree(held.parent, ignore_errors=True)
        self._copied(name_of(step), manifest)
        seconds = round(time.perf_counter() - started, 3)
        self.status["copied_step"] = step
        latest = latest_step(self.run) or 0
        copied = {"event": "mirror", "step": step, "bytes": size, "seconds": seconds, "latest_step": latest}
        self.notices.append(copied)
        self.beat(now=True)
        damaged = {step_named(name.removeprefix("checkpoints/")): None for name in self.damaged}
        damaged.pop(None, None)
        kept = steps_to_keep(self.settings, self.there)
        # A damaged checkpoint must not replace a complete one.
        kept |= damaged.keys() & steps_to_keep(self.settings, self.there | damaged)
        self._remove([step for step in {*self.there, *damaged} if step not in kept])

    def _put_files(self) -> None:
        # Read before LATEST. The run writes LATEST before rollbacks.json, so LATEST reflects all rollbacks in it.
        files = run_files(self.run)
        if not self._drop_abandoned():  # the target of a rollback must be on the mirror before rollbacks.json
            return
        for name, content in files.items():
            if self.files.get(name) != content:
                self.store.write(name, content)
                self.files[name] = content
                self._copied(name)

    def beat(self, now: bool = False) -> None:
        """Writes status.json, at most once per BEAT_SECONDS unless `now`."""
        if not now and time.monotonic() - self.beaten < BEAT_SECONDS:
            return
        self.beaten = time.monotonic()
        path = self.run / MIRROR_STATUS
        with suppress(OSError):  # the local disk may be full
            fresh = path.with_suffix(".new")
            fresh.write_text(json.dumps(self.status | {"time": time.time()}))
            fresh.rename(path)

    @property
    def pause_seconds(self) -> float:
        """Seconds until the next pass."""
        return min(SECONDS_BETWEEN_LOOKS * 2.0 ** self.status["failures"], LONGEST_BACKOFF_SECONDS)


def hold(folder: Path, held: Path) -> Path:
    """Hard-links a checkpoint's files into `held`, to protect them from pruning.

    Returns `held`, or the original folder if the disk doesn't support hard links or the checkpoint has been pruned.
    """
    try:
        shutil.copytree(folder, held, copy_function=os.link)
    except OSError:
        return folder
    return held


def content_of(path: Path) -> bytes | None:
    """Returns a file's content, or None if it doesn't exist."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def copying_alone(run: Path) -> TextIO:
    """Locks RUN/mirror, so that only one process copies the run."""
    lock = open(run / MIRROR_FOLDER / ".lock", "w")  # noqa: SIM115
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def copy_script() -> int:
    """Copies a run to a mirror. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--mirror", required=True, help="mirror folder or URL, as in checkpoint.mirror")
    arguments = parser.parse_args()
    if not arguments.run.is_dir():
        raise InputError(f"{arguments.run}: no such folder; use the folder of a run, such as runs/demo")
    settings = config.Checkpoint(mirror=arguments.mirror, keep_last=config.MOST)  # a manual copy doesn't prune
    store = connect(settings, arguments.run)
    (arguments.run / MIRROR_FOLDER).mkdir(exist_ok=True)
    with copying_alone(arguments.run):
        copier = MirrorCopier(arguments.run, store, settings)
        while not copier.attempt(everything=True) and copier.status["problem"] is None:
            pass
    if copier.status["problem"] is not None:
        print(f"{store.address}: {copier.status['problem']}", file=sys.stderr)
        return CRASHED
    for name, what in copier.damaged.items():
        print(f"{store.address}: {name} is damaged ({what}), and {arguments.run} has no copy of it", file=sys.stderr)
    return 0


if __name__ == "__main__":
    run_script(copy_script)
