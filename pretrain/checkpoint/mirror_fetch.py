"""Checks a run's mirror when the run starts, and fetches the run if its disk was lost or another machine got further.

    python -m pretrain.checkpoint.mirror_fetch s3://BUCKET/runs/NAME [FOLDER]     # fetch a copy to inspect or evaluate

    RUN/mirror/claim.json       which start of the run writes to the mirror, the files it fetched,
                                and the damaged files

Fetches the mirror's newest complete checkpoint, metrics.jsonl and the run's other small files. Reports and skips
damaged files. If the mirror is unreachable, a folder with its own checkpoints starts without it. An empty folder
doesn't start, because training from scratch would hide the run on the mirror and then overwrite it.
"""

import argparse
import json
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from pretrain import config
from pretrain.checkpoint.mirror_lease import Lease, take_lease
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
    name_of,
    require_same_run,
)
from pretrain.checkpoint.run_state import RunStoppedError
from pretrain.errors import EXIT_NO_VALID_CHECKPOINT, InputError, one_line, run_script
from pretrain.files import SEAL_FILE, write_durably
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
"""Maximum seconds to wait for the mirror if the run's folder has its own checkpoints."""


class LostMirrorError(MirrorError):
    """Raised if neither the mirror nor the run's folder has an intact checkpoint."""

    exit_code = EXIT_NO_VALID_CHECKPOINT


@contextmanager
def on_mirror(run: Path, settings: config.Checkpoint, ranks: Ranks) -> Iterator[None]:
    """Holds the mirror's lease for this run, and fetches the run if the mirror is ahead of the run's folder.

    A collective call, in which the main rank fetches. If the mirror isn't writable, the run continues without a lease,
    provided its folder has checkpoints.

    Raises these errors on all ranks: InputError if the mirror belongs to a different run, if another machine trains
    this run or if the store's library is missing; MirrorError if an empty folder needs the mirror but can't reach it;
    LostMirrorError if none of the mirror's checkpoints is intact.
    """
    lease = None

    def work() -> Exception | None:
        nonlocal lease
        try:
            lease = look(run, settings)
        except Exception as error:  # returned, not raised, because the other ranks wait for the answer
            is_told = isinstance(error, InputError | RunStoppedError)
            return error if is_told else MirrorError(f"checkpoint.mirror: {one_line(error)}")
        return None

    problem = ranks.gather(ranks.by_main(work, lambda: None))[0]
    if problem is not None:
        raise problem
    try:
        yield
    finally:
        if lease is not None:
            lease.release()


def fetch_earlier(
    run: Path, settings: config.Checkpoint, ranks: Ranks, at_most: int, beat: Callable[[], None]
) -> None:
    """Fetches the mirror's newest checkpoint of step `at_most` or earlier, if it is later than the folder's.

    A collective call. It only has an effect if this start fetched the run, because then the folder has only one
    checkpoint and the mirror may have several. If it fails, the run continues without that checkpoint.
    """

    def is_wanted(store: MirrorStore, step: int) -> bool:
        here = max((step for step in checkpoint_folders(run) if step <= at_most), default=-1)
        return here < step <= at_most and bool(read_json(run / MIRROR_FOLDER / CLAIM_FILE).get("fetched"))

    fetch_wanted(run, settings, ranks, is_wanted, beat)


def fetch_again(run: Path, settings: config.Checkpoint, ranks: Ranks, step: int, beat: Callable[[], None]) -> bool:
    """Fetches the checkpoint of a step that is damaged here. Returns True if it succeeds. A collective call."""
    return fetch_wanted(
        run, settings, ranks, lambda store, there: there == step and is_ahead(run, store.state(there)), beat
    )


def fetch_wanted(
    run: Path,
    settings: config.Checkpoint,
    ranks: Ranks,
    is_wanted: Callable[[MirrorStore, int], bool],
    beat: Callable[[], None],
) -> bool:
    """Fetches the newest intact checkpoint for which `is_wanted`. Returns True if there is one. A collective call."""

    def work() -> bool:
        with suppress(Exception):  # any error; the run can continue without the checkpoint
            store = connect(settings, run)
            look_around = partial(patiently, seconds=LOOK_SECONDS_WITHOUT_NEED, retry=False)
            sealed, _ = look_around(store.steps)
            require_same_run(run, id_of_run(run), look_around(store.identity), store)
            wanted = [step for step in sealed if is_wanted(store, step)]
            return fetch(run, store, wanted, {}, required=False) is not None
        return False

    return ranks.gather(ranks.by_main(work, beat))[0]


def look(run: Path, settings: config.Checkpoint) -> Lease | None:
    """Does the work of `on_mirror` on one process. Returns the lease, or None if the mirror isn't writable."""
    store = connect(settings, run)
    here = newest_sealed(run)
    own = read_json(run / MIRROR_FOLDER / CLAIM_FILE).get("start")
    lease = None
    claim: dict[str, Any] = {
        "start": uuid.uuid4().hex,
        "claimed": None,
        "fetched": None,
        "problem": None,
        "damaged": {},
    }
    try:
        say_stage(f"Looking at the mirror {store.address}")
        wait = settings.mirror_wait_seconds if here is None else LOOK_SECONDS_WITHOUT_NEED
        identity, (sealed, _) = patiently(lambda: (store.identity(), store.steps()), wait, retry=here is None)
        if identity is not None and identity.damage is not None:
            claim["damaged"][IDENTITY_FILE] = identity.damage
        if sealed:
            require_same_run(run, id_of_run(run), identity, store)
        try:
            lease = take_lease(store, claim["start"], own)
        except InputError:
            raise
        except Exception as error:  # a read-only mirror is still useful
            claim["problem"] = f"could not be reached or written at the start ({one_line(error)})"
        identity, (sealed, _) = store.identity(), store.steps()  # again, because the last holder may have added to it
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
        if lease is not None:
            lease.release()
        raise
    except Exception as error:  # each file system raises its own errors
        if newest_sealed(run) is None:
            if lease is not None:
                lease.release()
            raise MirrorError(
                f"checkpoint.mirror: {store.address} cannot be reached ({one_line(error)}), and {run} has no "
                "checkpoint: starting from scratch could overwrite the run that may be there; run the same command "
                "again when it can be reached, or set checkpoint.mirror: null to begin a new run"
            ) from error
        claim["problem"] = f"could not be reached or written at the start ({one_line(error)})"
    write_claim(run, claim)
    return lease


def catch_up(run: Path, store: MirrorStore, sealed: list[int], here: int | None, claim: dict[str, Any]) -> None:
    """Fetches the run if the mirror is ahead of the folder, whose newest checkpoint is `here`.

    Records in `claim` what was fetched and what is damaged on the mirror.
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

    if not (later := [step for step in sealed if is_later(step)]):
        return
    # Before the checkpoint, because a kill in between then leaves only a log, which the next start fetches again.
    damaged |= fetch_files(run, store)
    if fetched := fetch(run, store, later, damaged, required=here is None):
        claim["fetched"] = fetched
        write_durably(run / "checkpoints" / "LATEST", checkpoint_name(fetched["step"]))
        if not (run / "final").exists() and store.read(f"final/{SEAL_FILE}") is not None:
            try:
                store.get("final", run / "final")
            except DamagedCopyError as error:  # the run exports final/ again
                damaged["final"] = error.strerror


def newest_sealed(run: Path) -> int | None:
    """Returns the step of the folder's newest checkpoint with a manifest, or None."""
    return max((step for step, path in checkpoint_folders(run).items() if (path / SEAL_FILE).is_file()), default=None)


def require_no_loss(run: Path, store: MirrorStore) -> None:
    """Raises LostMirrorError if the mirror's checkpoints are gone. Starting from scratch would hide the loss."""
    events = parse_lines((store.read(METRICS_FILE) or b"").splitlines())
    if copied := [event.get("step") for event in events if event["event"] == "mirror"]:
        raise LostMirrorError(
            f"checkpoint.mirror: by its {METRICS_FILE} {store.address} had step {copied[-1]}; no checkpoint there has "
            f"a {SEAL_FILE} any more, and {run} has none. Restore one, or choose another --output; to begin anew, "
            f"remove {store.address}"
        )


def fetch(
    run: Path, store: MirrorStore, steps: list[int], damaged: dict[str, str], *, required: bool
) -> dict[str, Any] | None:
    """Fetches the newest intact checkpoint of these steps. Returns a record of it, or None if none is intact.

    Adds {name: problem} of damaged checkpoints to `damaged`. Raises LostMirrorError if `required` and none is intact.
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
        for worse in passed_over:  # so that they are copied again; only after an intact one has arrived
            with suppress(Exception):  # the mirror may be read-only
                store.unseal(worse)
        seconds = round(time.perf_counter() - started, 3)
        return {"step": step, "bytes": size, "seconds": seconds, "mirror": store.address}
    if required:
        raise LostMirrorError(
            f"checkpoint.mirror: none of the checkpoints in {store.address} is intact ("
            f"{'; '.join(f'{name}: {damaged[name]}' for name in passed_over)}), and {run} has none; restore one, or "
            "choose another --output"
        )
    return None


def fetch_files(run: Path, store: MirrorStore) -> dict[str, str]:
    """Fetches the run's small files that the folder lacks, and logs that are longer on the mirror.

    Skips damaged files and returns {name: problem} for them.
    """
    damaged = {}
    for name in store.files():
        path = run / name
        try:
            content = store.read(name)
        except Exception as error:  # optional; if the mirror is unreachable, the checkpoint fails too
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


def write_claim(run: Path, claim: dict[str, Any]) -> None:
    """Records the findings for the copying thread and for the log."""
    (run / MIRROR_FOLDER).mkdir(parents=True, exist_ok=True)
    write_durably(run / MIRROR_FOLDER / CLAIM_FILE, json.dumps(claim))


def fetch_script() -> None:
    """Copies a run's newest checkpoint, its small files and final/ from a store into a new folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", metavar="URL")
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="folder to create (default: runs/NAME)")
    arguments = parser.parse_args()
    home, _, name = arguments.url.rstrip("/").rpartition("/")
    run = arguments.folder or Path("runs", name)
    if run.exists():
        raise InputError(f"{run}: exists; give another folder, or remove it")
    store = connect(config.Checkpoint(mirror=home), run.with_name(name))
    sealed, _ = patiently(store.steps, LOOK_SECONDS_WITHOUT_NEED, retry=False)
    if not sealed:
        raise InputError(f"{store.address}: no run with a complete checkpoint is there")
    claim: dict[str, Any] = {"damaged": {}}
    catch_up(run, store, sealed, None, claim)
    for what, problem in claim["damaged"].items():
        print(f"damaged there, and left out: {what} ({problem})", file=sys.stderr)
    print(f"Step {claim['fetched']['step']:,} of {store.address} is in {run}.")


if __name__ == "__main__":
    run_script(fetch_script)
