"""Fetches a run from its mirror at the start of training, if the mirror has a later checkpoint than the run folder.

    python -m pretrain.checkpoint.mirror_fetch s3://BUCKET/runs/NAME [FOLDER]     # fetch a copy to inspect or evaluate

    RUN/mirror/claim.json       ID of the process that writes to the mirror, what it fetched, and damaged files

Fetches the newest complete checkpoint, metrics.jsonl and the other small files. Damaged files are reported and
skipped. If the mirror is unreachable, a run with local checkpoints starts without it. A run without checkpoints
doesn't start, because it could overwrite a run on the mirror.
"""

import argparse
import json
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from pretrain import config
from pretrain.checkpoint.mirror_lease import take_lease
from pretrain.checkpoint.mirror_store import (
    CLAIM_FILE,
    IDENTITY_FILE,
    DamagedCopyError,
    MirrorError,
    MirrorStore,
    connect,
    damage_of_run_file,
    id_of_run,
    is_ahead,
    is_run_file,
    name_of,
    require_same_run,
)
from pretrain.checkpoint.run_state import RunStoppedError
from pretrain.errors import EXIT_NO_VALID_CHECKPOINT, InputError, one_line, run_script
from pretrain.files import SEAL_FILE, Beat, write_durably
from pretrain.parallel.ranks import Ranks
from pretrain.runs.event_log import parse_lines
from pretrain.runs.run_folder import (
    METRICS_FILE,
    MIRROR_FOLDER,
    checkpoint_folders,
    checkpoint_name,
    contradictions,
    read_json,
)
from pretrain.terminal import say_stage
from pretrain.urls import patiently

LOOK_SECONDS_WITHOUT_NEED = 20.0
"""Maximum seconds to wait for the mirror if the run has local checkpoints."""


class LostMirrorError(MirrorError):
    """Raised if neither the mirror nor the run folder has an intact checkpoint."""

    exit_code = EXIT_NO_VALID_CHECKPOINT


@contextmanager
def on_mirror(run: Path, settings: config.Checkpoint, ranks: Ranks) -> Iterator[None]:
    """Fetches the run if the mirror is ahead of the run folder. Holds the mirror's lease until the context exits.

    A collective call. Raises on all ranks:
        InputError: the mirror belongs to another run, another machine is training this run, or a library is missing.
        MirrorError: the mirror is unreachable and the run has no local checkpoint.
        LostMirrorError: there is no intact checkpoint.
    """
    held = ExitStack()

    def work() -> Exception | None:
        try:
            look(run, settings, held)
        except Exception as error:  # raised below, on all ranks
            is_told = isinstance(error, InputError | RunStoppedError)
            return error if is_told else MirrorError(f"checkpoint.mirror: {one_line(error)}")
        return None

    with held:
        problem = ranks.gather(ranks.by_main(work, lambda: None))[0]
        if problem is not None:
            raise problem
        yield


def fetch_earlier(run: Path, settings: config.Checkpoint, ranks: Ranks, at_most: int, beat: Beat) -> None:
    """Fetches the newest checkpoint at or before step `at_most`, if there is no newer local one. A collective call.

    Does nothing if the run wasn't fetched at startup, because then all checkpoints are local. Ignores errors.
    """

    def is_wanted(store: MirrorStore, step: int) -> bool:
        here = max((step for step in checkpoint_folders(run) if step <= at_most), default=-1)
        return here < step <= at_most and bool(read_json(run / MIRROR_FOLDER / CLAIM_FILE).get("fetched"))

    fetch_wanted(run, settings, ranks, is_wanted, beat)


def fetch_again(run: Path, settings: config.Checkpoint, ranks: Ranks, step: int, beat: Beat) -> bool:
    """Fetches a checkpoint whose local copy is damaged. Returns True on success. A collective call."""
    return fetch_wanted(
        run, settings, ranks, lambda store, there: there == step and is_ahead(run, store.state(there)), beat
    )


def fetch_wanted(
    run: Path,
    settings: config.Checkpoint,
    ranks: Ranks,
    is_wanted: Callable[[MirrorStore, int], bool],
    beat: Beat,
) -> bool:
    """Fetches the newest intact checkpoint that `is_wanted` accepts. Returns True on success. A collective call."""

    def work() -> bool:
        with suppress(Exception):  # the run can continue without the checkpoint
            store = connect(settings, run)
            look_around = partial(patiently, seconds=LOOK_SECONDS_WITHOUT_NEED, retry=False)
            sealed, _ = look_around(store.steps)
            require_same_run(run, id_of_run(run), look_around(store.identity), store)
            wanted = [step for step in sealed if is_wanted(store, step)]
            return fetch(run, store, wanted, {}, required=False) is not None
        return False

    return ranks.gather(ranks.by_main(work, beat))[0]


def look(run: Path, settings: config.Checkpoint, held: ExitStack) -> None:
    """Implements `on_mirror` on the main rank. `held` releases the lease, if the mirror is writable."""
    store = connect(settings, run)
    here = newest_sealed(run)
    own = read_json(run / MIRROR_FOLDER / CLAIM_FILE).get("start")
    claim: dict[str, Any] = {
        "start": uuid.uuid4().hex,
        "claimed": None,
        "fetched": None,
        "problem": None,
        "damaged": {},
    }
    try:
        say_stage(f"Checking the mirror {store.address}")
        wait = settings.mirror_wait_seconds if here is None else LOOK_SECONDS_WITHOUT_NEED
        identity, (sealed, _) = patiently(lambda: (store.identity(), store.steps()), wait, retry=here is None)
        if identity is not None and identity.damage is not None:
            claim["damaged"][IDENTITY_FILE] = identity.damage
        if sealed:
            require_same_run(run, id_of_run(run), identity, store)
        try:
            held.callback(take_lease(store, claim["start"], own).release)
        except InputError:
            raise
        except Exception as error:  # the mirror may be read-only
            claim["problem"] = f"could not be reached or written to at startup ({one_line(error)})"
        identity, (sealed, _) = store.identity(), store.steps()  # the previous holder may have added checkpoints
        if sealed:
            require_same_run(run, id_of_run(run), identity, store)
            catch_up(run, store, sealed, here, claim)
            known = identity.run if identity is not None else None
            identify = partial(store.identify, known or id_of_run(run), claim["start"])
            patiently(identify, LOOK_SECONDS_WITHOUT_NEED, retry=False)
            claim["claimed"] = store.address
        elif here is None:
            require_no_loss(run, store)
    except (InputError, RunStoppedError):
        raise
    except Exception as error:  # error types depend on the file system
        if newest_sealed(run) is None:
            raise MirrorError(
                f"checkpoint.mirror: {store.address} cannot be reached ({one_line(error)}), and {run} has no "
                "checkpoint: starting from scratch could overwrite a run on the mirror; run the same command again "
                "when the mirror is reachable, or set checkpoint.mirror: null to start a new run"
            ) from error
        claim["problem"] = f"could not be reached or written to at startup ({one_line(error)})"
    (run / MIRROR_FOLDER).mkdir(parents=True, exist_ok=True)
    write_durably(run / MIRROR_FOLDER / CLAIM_FILE, json.dumps(claim))


def catch_up(run: Path, store: MirrorStore, sealed: list[int], here: int | None, claim: dict[str, Any]) -> None:
    """Fetches the run if the mirror is ahead of the run folder. Records fetched and damaged files in `claim`.

    here: step of the newest local checkpoint.
    """
    damaged = claim["damaged"]

    def is_later(step: int) -> bool:
        if here is None:
            return True
        try:
            return step > here and is_ahead(run, store.state(step))
        except DamagedCopyError as error:
            damaged[name_of(step)] = error.strerror
            return False

    later = [step for step in sealed if is_later(step)]
    if not later and id_of_run(run) is not None:  # the mirror's log must not be overwritten if the run's own is lost
        return
    # Before the checkpoint, because a restart doesn't fetch these files if it finds the checkpoint.
    damaged |= fetch_files(run, store)
    if later and (fetched := fetch(run, store, later, damaged, required=here is None)):
        claim["fetched"] = fetched
        write_durably(run / "checkpoints" / "LATEST", checkpoint_name(fetched["step"]))
        if not (run / "final").exists() and store.read(f"final/{SEAL_FILE}") is not None:
            try:
                store.get("final", run / "final")
            except DamagedCopyError as error:  # the run exports final/ again
                damaged["final"] = error.strerror


def newest_sealed(run: Path) -> int | None:
    """Returns the step of the newest local checkpoint with a manifest, or None."""
    return max((step for step, path in checkpoint_folders(run).items() if (path / SEAL_FILE).is_file()), default=None)


def require_no_loss(run: Path, store: MirrorStore) -> None:
    """Raises LostMirrorError if the mirror has lost its checkpoints, according to its metrics.jsonl."""
    events = parse_lines((store.read(METRICS_FILE) or b"").splitlines())
    if copied := [event.get("step") for event in events if event["event"] == "mirror"]:
        raise LostMirrorError(
            f"checkpoint.mirror: {METRICS_FILE} in {store.address} lists step {copied[-1]}, but no checkpoint there "
            f"has a {SEAL_FILE}, and {run} has no checkpoint. Restore one, or choose another --output; to start over, "
            f"remove {store.address}"
        )


def fetch(
    run: Path, store: MirrorStore, steps: list[int], damaged: dict[str, str], *, required: bool
) -> dict[str, Any] | None:
    """Fetches the newest intact checkpoint among `steps`. Returns its metadata, or None if none is intact.

    Adds {name: problem} to `damaged`. Raises LostMirrorError if `required` and none is intact.
    """
    started = time.perf_counter()
    passed_over = []
    for step in sorted(steps, reverse=True):
        name = name_of(step)
        say_stage(f"Fetching step {step:,} from the mirror {store.address}")
        try:
            size = store.get(name, run / name, partial(contradictions, step=step))
        except DamagedCopyError as error:
            damaged[name] = error.strerror
            passed_over.append(name)
            continue
        for worse in passed_over:  # so that they are copied again
            with suppress(Exception):  # the mirror may be read-only
                store.unseal(worse)
        seconds = round(time.perf_counter() - started, 3)
        return {"step": step, "bytes": size, "seconds": seconds, "mirror": store.address}
    if required:
        raise LostMirrorError(
            f"checkpoint.mirror: none of the checkpoints in {store.address} is intact ("
            f"{'; '.join(f'{name}: {damaged[name]}' for name in passed_over)}), and {run} has no checkpoint; restore "
            "one, or choose another --output"
        )
    return None


def fetch_files(run: Path, store: MirrorStore) -> dict[str, str]:
    """Fetches small files that are missing from the run folder, and logs that are longer on the mirror.

    Damaged files are skipped. Returns {name: problem} for them.
    """
    damaged = {}
    for name in filter(is_run_file, store.sizes("")):
        path = run / name
        try:
            content = store.read(name)
        except Exception as error:  # if the mirror is unreachable, fetching the checkpoint raises the error
            damaged[name] = f"cannot be read ({one_line(error)})"
            continue
        if content is None:
            continue
        if what := damage_of_run_file(name, content):
            damaged[name] = what
            continue
        grows = path.suffix in (".jsonl", ".log")
        if not path.exists() or (grows and path.stat().st_size < len(content)):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, content)
    return damaged


def fetch_script() -> None:
    """Fetches a run's newest checkpoint, small files and final/ into a new folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", metavar="URL")
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="folder to create (default: runs/NAME)")
    arguments = parser.parse_args()
    home, _, name = arguments.url.rstrip("/").rpartition("/")
    run = arguments.folder or Path("runs", name)
    if run.exists():
        raise InputError(f"{run} already exists; choose another folder, or remove it")
    store = connect(config.Checkpoint(mirror=home), run.with_name(name))
    sealed, _ = patiently(store.steps, LOOK_SECONDS_WITHOUT_NEED, retry=False)
    if not sealed:
        raise InputError(f"{store.address}: found no run with a complete checkpoint")
    claim: dict[str, Any] = {"damaged": {}}
    try:
        catch_up(run, store, sealed, None, claim)
    except BaseException as error:
        shutil.rmtree(run, ignore_errors=True)  # otherwise, a retry would find the folder
        if isinstance(error, LostMirrorError):
            raise InputError(str(error)) from None
        raise
    for what, problem in claim["damaged"].items():
        print(f"skipped {what}, which is damaged on the mirror ({problem})", file=sys.stderr)
    print(f"Fetched step {claim['fetched']['step']:,} from {store.address} to {run}.")


if __name__ == "__main__":
    run_script(fetch_script)
