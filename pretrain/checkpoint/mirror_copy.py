"""Keeps a run's mirror up to date, in a process of its own that the run neither waits for nor depends on.

    python -m pretrain.checkpoint.mirror_copy RUN --mirror URL     # copies what the mirror lacks, and ends

While the run trains, its standard input is a pipe: a line asks for everything to be copied now, its end to end after
that, so that a run that was killed still leaves its newest checkpoint, if the machine lives. It looks into the run's
folder twice a second. Of the checkpoints there the newest that the mirror lacks is copied first, held by links against
pruning; others only where they are to be kept for good. What failed is tried again with longer and longer pauses.

    RUN/mirror/status.json      what was copied, what fails since when; for the run's log and `runs.py status`
    RUN/mirror/copying/         links to what is being copied
"""

import argparse
import fcntl
import json
import os
import select
import shutil
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pretrain import config
from pretrain.checkpoint.mirror_store import (
    CLAIM_FILE,
    IDENTITY_FILE,
    NAMELESS,
    DamagedCopyError,
    MirrorStore,
    connect,
    id_of_run,
    is_ahead,
    name_of,
    run_files,
)
from pretrain.checkpoint.pruning import steps_to_keep
from pretrain.errors import CRASHED, one_line, run_script
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
    validation_loss_of,
)

SECONDS_BETWEEN_LOOKS, BEAT_SECONDS = 0.5, 2.0
LONGEST_BACKOFF_SECONDS, LONGEST_PAUSE_AT_THE_END = 300.0, 5.0
"""Between two attempts, while the run trains and while it waits."""
GO_ON, SETTLE, END = range(3)
"""What the run has asked for."""


class TakenOverError(Exception):
    """The mirror is no longer this start's to write: copying ends for good."""


class AbandonedError(Exception):
    """The run has rolled back to before the checkpoint that is being copied."""


class MirrorCopier:
    """What one start of a run copies.

    Args:
        run: its folder.
        settings: which checkpoints stay, and how long to go on after the run's end.
    """

    def __init__(self, run: Path, store: MirrorStore, settings: config.Checkpoint):
        self.run, self.store, self.settings = run, store, settings
        claim = read_json(run / MIRROR_FOLDER / CLAIM_FILE)
        self.start = claim.get("start")
        self.damaged: dict[str, str] = claim.get("damaged") or {}
        """{name: what is wrong} of the files and folders on the mirror that are damaged."""
        self.held = run / MIRROR_FOLDER / "copying"
        self.there: dict[int, float | None] | None = None
        """{step: validation loss} of the whole checkpoints on the mirror; None before the first look."""
        self.manifests: dict[int, bytes] = {}
        self.files: dict[str, bytes] = {}
        """The small files as they were copied last."""
        self.final: bytes | None = None
        """The manifest of final/ on the mirror."""
        self.seen: set[int] = set()
        self._idle_since: tuple[int | None, int | None] | None = None
        """When LATEST was written after which nothing was left to copy, and what it says."""
        self.status: dict[str, Any] = {
            "mirror": store.address, "start": self.start, "pid": os.getpid(), "copied_step": None, "copied_time": None,
            "bytes": None, "seconds": None, "copying": None, "problem": None, "problem_since": None, "failures": 0,
            "dropped": 0, "dropped_step": None, "is_over": False, "settled": False, "damaged": self.damaged,
        }  # fmt: skip
        self._beaten = 0.0
        self.held.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.held, ignore_errors=True)

    def pass_once(self, *, everything: bool = False) -> bool:
        """Copies the most urgent thing that the mirror lacks; returns whether there may be more.

        everything: also the small files that have changed, and final/. Raises what the file system raises.
        """
        if self.there is None:
            self._first_look()
        self._drop_abandoned()
        step = self._next()
        if step is not None:
            self._copy(step)
            return True
        if (final := self._final()) is not None:
            self._put_files()
            self.store.put(self.run / "final", "final", beat=self.beat, before_seal=self._require_claim)
            self.final = final
            self._cured("final")
            return True
        if everything or whole_content(self.run / "rollbacks.json") != self.files.get("rollbacks.json"):
            self._put_files()
        return False

    def _first_look(self) -> None:
        """Learns what the mirror has, and makes it this start's."""
        self.manifests, self.files, self._idle_since = {}, {}, None
        identity, steps = self.store.identity(), self.store.steps()
        there = self._whole([step for step, is_sealed in steps.items() if is_sealed])
        own, claim = id_of_run(self.run), read_json(self.run / MIRROR_FOLDER / CLAIM_FILE)
        if identity is not None and identity.start is not None and claim.get("claimed") == self.store.address:
            self._require_claim()
        elif any(steps.values()):
            if identity is None or (identity.run is None and identity.damage is not None):
                raise TakenOverError(NAMELESS)
            if identity.run != own:
                raise TakenOverError("it holds another run; choose another checkpoint.mirror, or remove what is there")
            newest = max(there, default=0)
            if newest > (latest_step(self.run) or 0) and is_ahead(self.run, self.store.state(newest)):
                raise TakenOverError(
                    f"it has step {newest:,}, which is later than this folder's checkpoints, and was out of reach at "
                    "the start; stop the run and start it again to continue from there"
                )
        self.store.identify(own, self.start)
        claim |= {"claimed": self.store.address, "damaged": self.damaged}
        write_durably(self.run / MIRROR_FOLDER / CLAIM_FILE, json.dumps(claim))
        self._cured(IDENTITY_FILE)
        self.final = self._whole_final()
        self.there, self.status["copied_step"] = there, max(there, default=None)
        self._remove(step for step, is_sealed in steps.items() if not is_sealed)  # what killed copies have left

    def _whole(self, sealed: list[int]) -> dict[int, float | None]:
        """{step: validation loss} of those of these checkpoints that show no damage, which is noted of the others."""
        there, names = {}, [name_of(step) for step in sealed]
        for name in [name for name in self.damaged if name.startswith("checkpoints/") and name not in names]:
            self._cured(name)  # it is gone
        for step, name in zip(sealed, names, strict=True):
            try:
                loss = validation_loss_of(self.store.state(step))
            except DamagedCopyError as error:
                self.damaged.setdefault(name, error.strerror)
            if name not in self.damaged:
                there[step], self.manifests[step] = loss, self.store.read(f"{name}/{SEAL_FILE}")
        return there

    def _whole_final(self) -> bytes | None:
        """The manifest of final/ there; None if there is none, or final/ shows damage, which is noted."""
        content = self.store.read(f"final/{SEAL_FILE}")
        if content is not None:
            try:
                self.store.look_over("final")
            except DamagedCopyError as error:
                self.damaged.setdefault("final", error.strerror)
        return None if "final" in self.damaged else content

    def _cured(self, name: str) -> None:
        """What was damaged there is replaced or removed; the next process that copies reads of the rest."""
        if self.damaged.pop(name, None) is not None:
            path = self.run / MIRROR_FOLDER / CLAIM_FILE
            with suppress(OSError):
                write_durably(path, json.dumps(read_json(path) | {"damaged": self.damaged}))

    def _require_claim(self) -> None:
        """Raises TakenOverError if another start of this run has begun to write here, OSError if nothing is here."""
        identity = self.store.identity()
        if identity is None or identity.damage is not None:
            self.there = None
            gone = "what was there is gone; it is copied again"
            raise OSError(5, f"{IDENTITY_FILE} {identity.damage}; it is written again" if identity else gone)
        if identity.start != self.start:
            raise TakenOverError(
                f"another start of this run ({identity.start}) writes to it since; this one copies no more"
            )

    def _drop_abandoned(self) -> bool:
        """Removes what a rollback has gone back behind; False if that has to wait until anything else is there."""
        latest = latest_step(self.run)
        abandoned = [step for step in self.there if latest is not None and step > latest]
        if abandoned and len(abandoned) == len(self.there):
            return False
        self._remove(abandoned)
        return True

    def _remove(self, steps: Iterable[int]) -> None:
        for number, step in enumerate(list(steps)):
            if number == 0:
                self._require_claim()
            self.there.pop(step, None)
            self.manifests.pop(step, None)
            self.store.remove(name_of(step))
            self._cured(name_of(step))

    def _next(self) -> int | None:
        """The step to copy next: the newest, else one that is to be kept for good and is missing."""
        latest = latest_step(self.run)
        written = changed_at(self.run / "checkpoints" / "LATEST"), latest  # clocks go back, and tick slowly
        if latest is not None and written == self._idle_since:
            return None
        here = {s: path for s, path in checkpoint_folders(self.run).items() if latest is not None and s <= latest}
        here = {step: manifest for step, path in here.items() if (manifest := whole_content(path / SEAL_FILE))}
        self._count_dropped(set(here), latest)
        missing = {step for step, manifest in here.items() if self.manifests.get(step) != manifest}
        if not missing:
            self._idle_since = written
            return None
        if max(here) in missing:
            return max(here)
        losses = {step: validation_loss_of(read_state(self.run / name_of(step))) for step in here}
        kept = steps_to_keep(self.settings.model_copy(update={"keep_last": 1}), self.there | losses)
        kept |= {step for step in here if name_of(step) in self.damaged}
        self._idle_since = None if missing & kept else written
        return max(missing & kept, default=None)

    def _count_dropped(self, here: set[int], latest: int | None) -> None:
        """Checkpoints that came and went while the mirror was busy, or out of reach, with others."""
        gone = {step for step in self.seen - here - self.manifests.keys() if latest is not None and step <= latest}
        self.seen = here
        if gone:
            self.status["dropped"] += len(gone)
            self.status["dropped_step"] = max(gone)

    def _copy(self, step: int) -> None:
        started = time.perf_counter()
        try:
            folder = self._hold(step)
        except FileNotFoundError:  # pruned meanwhile: a newer one is there
            return
        self.status["copying"] = step
        self.beat(now=True)

        def before_seal() -> None:
            if (latest_step(self.run) or 0) < step:
                raise AbandonedError
            self._require_claim()
            self._put_files()

        try:
            manifest = (folder / SEAL_FILE).read_bytes()
            size = self.store.put(folder, name_of(step), beat=self.beat, before_seal=before_seal)
            self.there[step] = validation_loss_of(read_state(folder))
            self.manifests[step] = manifest
            self._cured(name_of(step))
        except AbandonedError:
            return
        finally:
            self.status["copying"] = None
            shutil.rmtree(self.held, ignore_errors=True)
        seconds = round(time.perf_counter() - started, 3)
        self.status |= {"copied_step": step, "copied_time": time.time(), "bytes": size, "seconds": seconds}
        self.beat(now=True)
        damaged = dict.fromkeys({step_at(name) for name in self.damaged} - {None})
        # A damaged one takes the place of no whole one.
        kept = steps_to_keep(self.settings, self.there)
        kept |= damaged.keys() & steps_to_keep(self.settings, self.there | damaged)
        self._remove({*self.there, *damaged} - kept)

    def _hold(self, step: int) -> Path:
        """The checkpoint under links of its own, which pruning leaves; itself on a disk without links."""
        folder, held = self.run / name_of(step), self.held / checkpoint_name(step)
        try:
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                target = held / path.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(path, target)
        except FileNotFoundError:
            raise
        except OSError:
            return folder
        return held

    def _put_files(self) -> None:
        # In this order: rollbacks.json is written after LATEST, so that who has read of a rollback sees its target.
        files = run_files(self.run)
        if not self._drop_abandoned():  # nor may the mirror know of the rollback before that
            return
        for name, content in files.items():
            if self.files.get(name) != content:
                self.store.write(name, content)
                self.files[name] = content
                self._cured(name)

    def _final(self) -> bytes | None:
        """The manifest of final/ where the mirror lacks it."""
        manifest = whole_content(self.run / "final" / SEAL_FILE)
        return manifest if manifest != self.final else None

    def beat(self, now: bool = False) -> None:
        """Writes the status, every few seconds at most."""
        if not now and time.monotonic() - self._beaten < BEAT_SECONDS:
            return
        self._beaten = time.monotonic()
        path = self.run / MIRROR_STATUS
        with suppress(OSError):  # a full disk here is no reason to stop copying
            fresh = path.with_suffix(".new")
            fresh.write_text(json.dumps(self.status | {"time": time.time()}))
            fresh.rename(path)

    def attempt(self, *, everything: bool) -> bool:
        """One pass whose failure becomes part of the status; returns whether all there is to do is done."""
        try:
            more = self.pass_once(everything=everything)
        except TakenOverError as error:
            self._fail(str(error))
            self.status["is_over"] = True
            return True
        except Exception as error:  # each file system has errors of its own
            if not self.run.is_dir():
                self.status["is_over"] = True  # the run's folder was deleted: nothing can follow
                return True
            self._fail(one_line(error))
            return False
        self.status |= {"problem": None, "problem_since": None, "failures": 0}
        return not more

    def _fail(self, problem: str) -> None:
        self.status["failures"] += 1
        self.status["problem_since"] = self.status["problem_since"] or time.time()
        self.status["problem"] = problem

    @property
    def pause_seconds(self) -> float:
        """Until the next pass."""
        return min(SECONDS_BETWEEN_LOOKS * 2.0 ** self.status["failures"], LONGEST_BACKOFF_SECONDS)


def keep_copying(copier: MirrorCopier, wait_seconds: float) -> bool:
    """Copies until the run's end of the pipe is closed, and then what is left, for so long at most; returns whether
    all was copied."""
    asked, deadline = GO_ON, None
    while True:
        asked = max(asked, heard(0.0))
        if asked == END and deadline is None:
            deadline = time.monotonic() + wait_seconds
        done = copier.attempt(everything=asked > GO_ON)
        is_over, failed = copier.status["is_over"], copier.status["problem"] is not None
        copier.status["settled"] = asked > GO_ON and done
        copier.beat(now=failed or asked > GO_ON)
        if is_over or (asked == END and (done or time.monotonic() > deadline)):
            copier.beat(now=True)
            return done and not failed
        if done or failed:
            pause = copier.pause_seconds if asked == GO_ON else min(copier.pause_seconds, LONGEST_PAUSE_AT_THE_END)
            if asked == END:  # standard input has nothing more to say
                time.sleep(pause)
            else:
                asked = max(asked, heard(pause))


def heard(seconds: float) -> int:
    """What the run asks for on standard input, waited for that long."""
    ready, _, _ = select.select([sys.stdin.fileno()], [], [], seconds)
    if not ready:
        return GO_ON
    return SETTLE if os.read(sys.stdin.fileno(), 4096) else END


def step_at(name: str) -> int | None:
    """The reverse of `name_of`; None for any other name."""
    folder, _, name = name.rpartition("/")
    return step_named(name) if folder == "checkpoints" else None


def whole_content(path: Path) -> bytes | None:
    """A file's content; None where there is none."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def changed_at(path: Path) -> int | None:
    """Its time of modification in ns; None where there is no such file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def copy_script() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--mirror", required=True, help="checkpoint.mirror")
    parser.add_argument("--settings", default="{}", help="the other settings of checkpoint:, as JSON")
    parser.add_argument("--follow", action="store_true", help="until standard input is closed")
    arguments = parser.parse_args()
    settings = config.Checkpoint(**{**json.loads(arguments.settings), "mirror": arguments.mirror})
    if not arguments.follow:
        settings = settings.model_copy(update={"keep_last": config.MOST})  # by hand nothing is pruned
    folder = arguments.run / MIRROR_FOLDER
    folder.mkdir(exist_ok=True)
    store = connect(settings, arguments.run)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # what an earlier start has left may still be copying its last checkpoint
        copier = MirrorCopier(arguments.run, store, settings)
        if arguments.follow:
            return 0 if keep_copying(copier, settings.mirror_wait_seconds) else CRASHED
        while not copier.attempt(everything=True):
            if copier.status["problem"] is not None:
                print(f"{store.address}: {copier.status['problem']}", file=sys.stderr)
                return CRASHED
        if copier.status["problem"] is not None:
            print(f"{store.address}: {copier.status['problem']}", file=sys.stderr)
            return CRASHED
        for name, what in copier.damaged.items():
            print(f"{store.address}: {name} is damaged ({what}), and not in {arguments.run}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    run_script(copy_script)
