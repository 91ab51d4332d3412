"""Accesses a run's mirror, a copy of the run on another disk or in object storage, through fsspec.

    MIRROR/NAME/run.json                                run ID, and start ID of the process that writes
    MIRROR/NAME/config.yaml, metrics.jsonl, ...         small files
    MIRROR/NAME/checkpoints/step-00000500/, final/      same as in the run folder
    MIRROR/NAME/leases/                                 see mirror_lease

NAME is the run folder's name. MANIFEST.json is written last, so a folder without it is incomplete.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pretrain import config
from pretrain.checkpoint.run_state import ROLLBACKS, RunStoppedError, parse_rollbacks, recorded_rollbacks
from pretrain.errors import EXIT_PREEMPTED, InputError, one_line
from pretrain.files import SEAL_FILE, Beat, commit, is_url, seal, sealed_files, shown
from pretrain.runs.event_log import Event, parse_lines
from pretrain.runs.run_folder import METRICS_FILE, checkpoint_name, step_named
from pretrain.urls import file_system

if TYPE_CHECKING:
    from fsspec.implementations.dirfs import DirFileSystem

BLOCK_BYTES = 8 << 20
FETCH_TRIES = 3
"""Maximum number of attempts to fetch a file."""
SECONDS_BETWEEN_TRIES = 0.5
IDENTITY_FILE = "run.json"
"""File on the mirror with the run ID and the start ID of the process that writes."""
CLAIM_FILE = "claim.json"
"""File in RUN/mirror, written by `mirror_fetch.look`."""
UNFETCHED = ".saving-"
"""Prefix of unfinished downloads."""
RUN_FILES = ("*.json", "*.jsonl", "*.yaml", "train.log", "evaluations/*.json")
"""Patterns for a run's small files."""
OBJECTS = ("model.json", "data.json", "strategy.json", "environment.json", "config.yaml", "evaluations/*.json")
"""Patterns for small files that contain a JSON or YAML object."""


class MirrorError(RunStoppedError):
    """Raised if the run needs the mirror, but the mirror is unreachable or has no intact checkpoint."""

    exit_code = EXIT_PREEMPTED


class DamagedCopyError(OSError):
    """Raised if a copy differs from the original. `strerror` describes the problem."""

    def __init__(self, problem: str):
        super().__init__(5, problem)


@dataclass(frozen=True)
class Identity:
    """A mirror's run ID, and the start ID of the process that writes to it."""

    run: str | None
    start: str | None
    damage: str | None = None
    """Problem with run.json. In that case, `run` comes from metrics.jsonl, and `start` is None."""


class MirrorStore:
    """Mirror of one run. Methods raise the file system's errors. Only downloads are retried.

    Args:
        mirror: `checkpoint.mirror`.
        name: name of the run folder.
    """

    def __init__(self, mirror: str, name: str):
        self.place = f"{mirror if is_url(mirror) else os.path.abspath(mirror)}".rstrip("/") + f"/{name}"
        self.address = shown(self.place)
        self.is_local = not is_url(mirror)
        self.beat: Beat = lambda: None
        """Called regularly during uploads."""

    @cached_property
    def system(self) -> "DirFileSystem":
        """File system rooted at MIRROR/NAME. Connects on first use."""
        from fsspec.implementations.dirfs import DirFileSystem

        system, root = file_system(self.place)
        return DirFileSystem(root, system)

    def read(self, name: str) -> bytes | None:
        """Returns a file's content, or None if it doesn't exist."""
        try:
            return self.system.cat_file(name)
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Writes or overwrites a small file."""
        self.system.makedirs(name.rpartition("/")[0], exist_ok=True)
        self.system.pipe_file(name, content)

    def create(self, name: str, content: bytes) -> None:
        """Writes a new small file. Raises the file system's error if it exists."""
        self.system.makedirs(name.rpartition("/")[0], exist_ok=True)
        if self.is_local:
            with self.system.open(name, "xb") as file:
                file.write(content)
        else:
            self.system.pipe_file(name, content, mode="create")

    def identity(self) -> Identity | None:
        """Returns the mirror's identity, or None if neither run.json nor metrics.jsonl exists."""
        content = self.read(IDENTITY_FILE)
        try:
            values = json.loads(content or b"")
            if all(isinstance(values[key], str | None) for key in ("run", "start")):
                return Identity(values["run"], values["start"])
        except (ValueError, TypeError, LookupError):
            pass
        log = self.read(METRICS_FILE)
        if content is None and log is None:
            return None
        damage = "is missing" if content is None else f"cannot be read: {content[:40]!r}"
        return Identity(first_start((log or b"").splitlines()).get("start_id"), None, damage)

    def identify(self, run: str | None, start: str | None) -> None:
        """Writes run.json."""
        self.write(IDENTITY_FILE, json.dumps({"run": run, "start": start}).encode())

    def steps(self) -> tuple[list[int], list[int]]:
        """Returns (steps of sealed checkpoints, steps of incomplete checkpoints)."""
        names = self.sizes("checkpoints")
        found = {step_named(name.split("/")[0]) for name in names} - {None}
        sealed = {step for step in found if f"{checkpoint_name(step)}/{SEAL_FILE}" in names}
        return sorted(sealed), sorted(found - sealed)

    def sealed(self, name: str) -> dict[str, dict]:
        """Returns {file: {bytes, sha256}} from a folder's manifest. Raises DamagedCopyError."""
        content = self.read(f"{name}/{SEAL_FILE}")
        try:
            entries = sealed_files(content or b"")
        except ValueError as error:
            raise DamagedCopyError(f"{SEAL_FILE} is missing" if content is None else str(error)) from None
        if astray := [file for file in entries if Path(file).is_absolute() or ".." in Path(file).parts]:
            raise DamagedCopyError(f"{SEAL_FILE} lists {astray[0]}, which is outside the folder")
        return entries

    def look_over(self, name: str) -> dict[str, dict]:
        """Checks that all files exist and have the right size. Returns the same as `sealed`."""
        entries = self.sealed(name)
        sizes = self.sizes(name)
        for file, entry in entries.items():
            if file not in sizes:
                raise DamagedCopyError(f"{file} is missing")
            if sizes[file] not in (entry["bytes"], None):  # some stores don't report sizes
                raise DamagedCopyError(f"{file} has {sizes[file]:,} bytes instead of {entry['bytes']}")
        return entries

    def state(self, step: int) -> dict[str, Any]:
        """Returns a checkpoint's trainer_state.json. Raises DamagedCopyError, like `look_over`."""
        name = name_of(step)
        file = "trainer_state.json"
        entry = self.look_over(name).get(file, {})
        content = self.read(f"{name}/{file}") or b""
        if hashlib.sha256(content).hexdigest() != entry.get("sha256"):
            raise DamagedCopyError(f"{file} does not match its sha256")
        return json.loads(content)

    def sizes(self, folder: str) -> dict[str, int | None]:
        """Returns {path relative to the folder: size in bytes}. Sizes are None if the store doesn't report them."""
        self.system.invalidate_cache()
        try:
            found = self.system.find(folder, detail=True)
        except FileNotFoundError:
            return {}
        return {name.removeprefix(f"{folder}/"): about.get("size") for name, about in found.items()}

    def put(self, folder: Path, name: str, before_seal: Callable[[], None]) -> int:
        """Uploads a sealed folder. Returns its size in bytes.

        Reads every file back and verifies its hash. Reuses files from an earlier attempt. Raises DamagedCopyError if a
        hash differs.

        before_seal: called before the manifest is written. If it raises an error, the copy isn't sealed.
        """
        manifest = (folder / SEAL_FILE).read_bytes()
        if self.read(f"{name}/{SEAL_FILE}") not in (None, manifest):
            self.unseal(name)
        entries = json.loads(manifest)["files"]
        for file, entry in entries.items():
            self.put_file(folder / file, f"{name}/{file}", entry)
        before_seal()
        self.write(f"{name}/{SEAL_FILE}", manifest)
        if self.read(f"{name}/{SEAL_FILE}") != manifest:
            raise DamagedCopyError(f"{SEAL_FILE} was changed during the upload")
        return sum(entry["bytes"] for entry in entries.values())

    def put_file(self, file: Path, path: str, entry: dict[str, Any]) -> bool:
        """Uploads a file unless the mirror already has it. Returns True if it was uploaded.

        Raises DamagedCopyError if the uploaded file doesn't match `entry`, the file's size and hash.
        """
        if self._holds(path, entry):
            return False
        self.system.makedirs(path.rpartition("/")[0], exist_ok=True)
        self.system.put_file(str(file), path)
        if not self._holds(path, entry):
            raise DamagedCopyError(f"{file.name} has the wrong sha256 after the upload")
        return True

    def _holds(self, path: str, entry: dict[str, Any]) -> bool:
        """Returns True if a file on the mirror has the size and hash in `entry`. Reads the whole file."""
        self.beat()
        self.system.invalidate_cache()
        try:
            if self.system.info(path).get("size") != entry["bytes"]:
                return False
            digest = hashlib.sha256()
            with self.system.open(path, "rb", block_size=BLOCK_BYTES) as file:
                while block := file.read(BLOCK_BYTES):
                    digest.update(block)
                    self.beat()
        except FileNotFoundError:
            return False
        return digest.hexdigest() == entry["sha256"]

    def get(self, name: str, target: Path, check: Callable[[Path], list[str]] = lambda folder: []) -> int:
        """Downloads a sealed folder and verifies it. Returns its size in bytes.

        The folder is created atomically. Raises DamagedCopyError if a hash differs or if `check` finds a problem.

        Args:
            check: returns a list of problems with the downloaded folder.
        """
        entries = self.sealed(name)
        unfinished = target.with_name(f"{UNFETCHED}{target.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        try:
            for file, entry in entries.items():
                path = unfinished / file
                path.parent.mkdir(parents=True, exist_ok=True)
                self._fetch(f"{name}/{file}", path, entry)
            if problems := check(unfinished):
                raise DamagedCopyError("; ".join(problems))
        except Exception:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        commit(unfinished, target, entries)
        return sum(entry["bytes"] for entry in entries.values())

    def _fetch(self, remote: str, path: Path, entry: dict[str, Any]) -> None:
        """Downloads a file, with up to FETCH_TRIES attempts."""
        for tries_left in reversed(range(FETCH_TRIES)):
            try:
                self.system.get_file(remote, str(path))
                if seal(path) == entry:
                    return
                problem = DamagedCopyError(f"{path.name} has the wrong sha256")
            except FileNotFoundError:
                raise DamagedCopyError(f"{path.name} is missing") from None
            except Exception as error:  # error types depend on the file system
                problem = error
            if tries_left:
                time.sleep(SECONDS_BETWEEN_TRIES)
        raise problem

    def unseal(self, name: str) -> None:
        """Removes a folder's manifest, which marks the folder as incomplete."""
        if self.read(f"{name}/{SEAL_FILE}") is not None:
            self.system.rm_file(f"{name}/{SEAL_FILE}")

    def remove(self, name: str) -> None:
        """Removes a folder."""
        self.unseal(name)  # first, so that a partially removed folder never looks complete
        self.system.invalidate_cache()
        self.system.rm(name, recursive=True)


def name_of(step: int) -> str:
    """Returns the path of a checkpoint relative to the run folder."""
    return f"checkpoints/{checkpoint_name(step)}"


def is_run_file(name: str) -> bool:
    """Returns True if `name`, relative to the run folder, is one of the run's small files."""
    hidden = any(part.startswith(".") for part in name.split("/")) or name == IDENTITY_FILE
    patterns = [pattern for pattern in RUN_FILES if pattern.count("/") == name.count("/")]
    return not hidden and any(fnmatchcase(name, pattern) for pattern in patterns)


def damage_of_run_file(name: str, content: bytes) -> str | None:
    """Describes the damage to a small file. Returns None if its content looks valid."""
    try:
        if name == ROLLBACKS:
            parse_rollbacks(content)
        elif name == METRICS_FILE and not parse_lines(content[:BLOCK_BYTES].splitlines()):
            return "contains no events"
        elif any(fnmatchcase(name, pattern) for pattern in OBJECTS):
            values = json.loads(content) if name.endswith(".json") else yaml.safe_load(content)
            return None if isinstance(values, dict) else f"is not a mapping: {content[:40]!r}"
    except (ValueError, yaml.YAMLError) as error:
        return f"cannot be read ({one_line(error)})"
    return None


def run_files(run: Path) -> dict[str, bytes]:
    """Returns {name: content} of the run's small files, without an incomplete last line in metrics.jsonl.

    Skips damaged files, because the mirror may have intact copies.
    """
    found = {}
    for path in sorted(path for pattern in RUN_FILES for path in run.glob(pattern)):
        name = str(path.relative_to(run))
        if is_run_file(name):
            content = path.read_bytes()
            content = content[: content.rfind(b"\n") + 1] if path.name == METRICS_FILE else content
            if damage_of_run_file(name, content) is None:
                found[name] = content
    return found


def mirror_problems(output: Path, settings: config.Checkpoint) -> list[str]:
    """Lists problems with `checkpoint.mirror` that can be detected without connecting."""
    mirror = settings.mirror
    if not mirror.strip():
        return ["checkpoint.mirror: is empty; use a folder, a URL such as s3://BUCKET/runs, or null"]
    if not is_url(mirror):
        place = Path(os.path.abspath(mirror))
        run = Path(os.path.abspath(output))
        if place == run.parent or place.is_relative_to(run):
            return [f"checkpoint.mirror: {mirror}: the mirror would be in {output} itself; use another disk or a URL"]
        return []
    if shown(mirror) != mirror.rstrip("?#"):
        return [
            f"checkpoint.mirror: {shown(mirror)}: the URL contains secrets, which would be saved in config.yaml; "
            "remove them, and set the environment variables that the store's own tools use"
        ]
    from fsspec.registry import get_filesystem_class

    try:
        get_filesystem_class(mirror.partition("://")[0])
    except (ValueError, ImportError) as error:  # says which protocol is unknown, or which package to install
        return [f"checkpoint.mirror: {mirror}: {error}; use a folder, or s3://, gs://, hf://, ..."]
    return []


def connect(settings: config.Checkpoint, run: Path) -> MirrorStore:
    """Returns the run's mirror. Raises InputError if the settings are invalid or a library is missing."""
    if problems := mirror_problems(run, settings):
        raise InputError(*problems)
    return MirrorStore(settings.mirror, Path(os.path.abspath(run)).name)


def id_of_run(run: Path) -> str | None:
    """Returns the run's ID, or None if the run hasn't started yet."""
    with suppress(FileNotFoundError), open(run / METRICS_FILE, "rb") as log:
        return first_start(log).get("start_id")
    return None


def first_start(lines: Iterable[bytes]) -> Event:
    """Returns the first `start` event in a log's lines, or {}."""
    return next((event for line in lines for event in parse_lines([line]) if event["event"] == "start"), {})


def require_same_run(run: Path, own: str | None, identity: Identity | None, store: MirrorStore) -> None:
    """Raises InputError if the mirror belongs to a different run, and DamagedCopyError if that is unknown.

    own: ID of the local run. None accepts any mirror.
    """
    if own is None:
        return
    if identity is None or (identity.run is None and identity.damage is not None):
        raise DamagedCopyError(
            f"{IDENTITY_FILE} and {METRICS_FILE} on the mirror are damaged, so the mirror's run ID is unknown; "
            "restore either file, or empty the mirror"
        )
    if identity.run not in (None, own):
        raise InputError(
            f"checkpoint.mirror: {store.address} belongs to a different run than {run}; choose another mirror or "
            "--output, or remove the mirror's contents"
        )


def is_ahead(run: Path, state: Mapping[str, Any]) -> bool:
    """Returns True if a checkpoint's trainer_state.json contains at least as many rollbacks as the run folder."""
    return len(state.get("state", {}).get("rollbacks", ())) >= len(recorded_rollbacks(run))
