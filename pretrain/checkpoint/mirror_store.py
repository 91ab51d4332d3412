"""A run's copy on another disk or in a store: sealed folders and small files, through fsspec.

    MIRROR/NAME/run.json                                which run this is, and which start of it writes
    MIRROR/NAME/config.yaml, metrics.jsonl, ...         the run's small files
    MIRROR/NAME/checkpoints/step-00000500/, final/      as in the run's folder; MANIFEST.json is written last

NAME is that of the run's folder. A folder without a manifest there is not whole, whatever else it holds.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pretrain import config
from pretrain.checkpoint.run_state import ROLLBACKS, RunStoppedError, parse_rollbacks, recorded_rollbacks
from pretrain.errors import InputError, one_line
from pretrain.files import SEAL_FILE, commit, damage_of_content, seal, sealed_files
from pretrain.runs.history import first_start, first_start_of, parse_lines
from pretrain.runs.run_folder import METRICS_FILE, checkpoint_name, step_named
from pretrain.urls import file_system, is_url, shown

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

BLOCK_BYTES = 8 << 20
FETCH_TRIES, SECONDS_BETWEEN_TRIES = 3, 0.5
"""Of a file that is fetched."""
IDENTITY_FILE, CLAIM_FILE = "run.json", "claim.json"
"""On the mirror; and in the run's folder, what its last start has found there."""
NAMELESS = (
    f"{IDENTITY_FILE} and {METRICS_FILE} there are damaged, so that nothing tells whose checkpoints it has; restore "
    "one of the two, or remove what is there"
)
UNFETCHED = ".saving-"
"""What a download is called until it is whole: the next start removes what a kill leaves of it."""
RUN_FILES = ("*.json", "*.jsonl", "*.yaml", "train.log", "evaluations/*.json")
"""Patterns of the run's small files."""
OBJECTS = ("model.json", "data.json", "strategy.json", "environment.json", "config.yaml", "evaluations/*.json")
"""Those of them that a run writes, and whose content is an object."""


class MirrorError(RunStoppedError):
    """The mirror has what the run needs and cannot be reached, or holds nothing that is intact."""


class DamagedCopyError(OSError):
    """A copy that is not what was written; `strerror` names the file and says what is wrong with it."""


@dataclass(frozen=True)
class Identity:
    """Which run a mirror holds, and which start of it writes there."""

    run: str | None
    start: str | None
    damage: str | None = None
    """What is wrong with run.json; then the run is that of the log beside it, and the start is not known."""


class MirrorStore:
    """The mirror of one run. Methods raise whatever the file system raises; none of them retries.

    Args:
        mirror: `checkpoint.mirror`.
        name: of the run's folder.
    """

    def __init__(self, mirror: str, name: str):
        self.place = f"{mirror_place(mirror)}/{name}"
        self.address = shown(self.place)

    @cached_property
    def _connection(self) -> tuple["AbstractFileSystem", str]:
        return file_system(self.place)

    @property
    def system(self) -> "AbstractFileSystem":
        """The file system; connects at first use."""
        return self._connection[0]

    @property
    def root(self) -> str:
        """The run's folder in it."""
        return self._connection[1]

    def read(self, name: str) -> bytes | None:
        """A file's content; None where there is none."""
        try:
            return self.system.cat_file(f"{self.root}/{name}")
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Replaces a small file."""
        path = f"{self.root}/{name}"
        self.system.makedirs(path.rpartition("/")[0], exist_ok=True)
        self.system.pipe_file(path, content)

    def identity(self) -> Identity | None:
        """What is here; None where there is neither run.json nor a log."""
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
        """Records what is here."""
        self.write(IDENTITY_FILE, json.dumps({"run": run, "start": start}).encode())

    def steps(self) -> dict[int, bool]:
        """{step: whether it is sealed} of the checkpoints here."""
        found: dict[int, bool] = {}
        for name in self._sizes("checkpoints"):
            folder, _, file = name.partition("/")
            step = step_named(folder)
            if step is not None:
                found[step] = found.get(step, False) or file == SEAL_FILE
        return found

    def sealed(self, name: str) -> dict[str, dict]:
        """{file: {bytes, sha256}} of a folder, by its manifest. Raises DamagedCopyError."""
        content = self.read(f"{name}/{SEAL_FILE}")
        try:
            entries = sealed_files(content or b"")
        except ValueError as error:
            raise DamagedCopyError(5, f"{SEAL_FILE} is missing" if content is None else str(error)) from None
        if astray := [file for file in entries if Path(file).is_absolute() or ".." in Path(file).parts]:
            raise DamagedCopyError(5, f"{SEAL_FILE} names {astray[0]}, which is outside of the folder")
        return entries

    def look_over(self, name: str) -> dict[str, dict]:
        """As `sealed`; the files must be there in their sizes. Reads none of them."""
        entries, sizes = self.sealed(name), self._sizes(name)
        for file, entry in entries.items():
            if file not in sizes:
                raise DamagedCopyError(5, f"{file} is missing")
            if sizes[file] not in (entry["bytes"], None):  # None: a store that does not tell
                raise DamagedCopyError(5, f"{file} has {sizes[file]:,} bytes instead of {entry['bytes']}")
        return entries

    def state(self, step: int) -> dict[str, Any]:
        """The trainer_state.json of a checkpoint that was looked over. Raises DamagedCopyError."""
        name, file = name_of(step), "trainer_state.json"
        entry = self.look_over(name).get(file, {})
        if damage := damage_of_content(file, content := self.read(f"{name}/{file}") or b"", entry):
            raise DamagedCopyError(5, damage)
        return json.loads(content)

    def files(self) -> list[str]:
        """The run's small files that are here, by name."""
        return [name for name in self._sizes("") if is_run_file(name)]

    def _sizes(self, folder: str) -> dict[str, int | None]:
        """{name: bytes, if the store tells} of all files below a folder, by name relative to it."""
        self.system.invalidate_cache()
        place = f"{self.root}/{folder}".rstrip("/")
        try:
            found = self.system.find(place, detail=True)
        except FileNotFoundError:
            return {}
        prefix = self.system._strip_protocol(place).rstrip("/") + "/"
        return {name.removeprefix(prefix): about.get("size") for name, about in found.items()}

    def put(
        self,
        folder: Path,
        name: str,
        *,
        beat: Callable[[], None] = lambda: None,
        before_seal: Callable[[], None] = lambda: None,
    ) -> int:
        """Copies a sealed folder, its manifest last; returns the bytes.

        Every file is read back and compared with its hash; what is there from an earlier try is kept. Raises
        DamagedCopyError where something else arrived.

        Args:
            beat: called now and then.
            before_seal: called before the manifest; may raise, so that the copy stays unsealed.
        """
        manifest = (folder / SEAL_FILE).read_bytes()
        if self.read(f"{name}/{SEAL_FILE}") not in (None, manifest):
            self.unseal(name)
        entries = json.loads(manifest)["files"]
        for file, entry in entries.items():
            path = f"{self.root}/{name}/{file}"
            if not self._holds(path, entry, beat):
                self.system.makedirs(path.rpartition("/")[0], exist_ok=True)
                self.system.put_file(str(folder / file), path)
                if not self._holds(path, entry, beat):
                    raise DamagedCopyError(5, f"{file} did not arrive with the sha256 that was written")
        before_seal()
        self.write(f"{name}/{SEAL_FILE}", manifest)
        if self.read(f"{name}/{SEAL_FILE}") != manifest:
            raise DamagedCopyError(5, f"{SEAL_FILE} did not arrive as it was written")
        return sum(entry["bytes"] for entry in entries.values())

    def _holds(self, path: str, entry: dict[str, Any], beat: Callable[[], None]) -> bool:
        """Whether a file here has the bytes and the hash of a manifest's entry, by reading all of it."""
        beat()
        self.system.invalidate_cache()
        try:
            if self.system.info(path).get("size") != entry["bytes"]:
                return False
            digest = hashlib.sha256()
            with self.system.open(path, "rb", block_size=BLOCK_BYTES) as file:
                while block := file.read(BLOCK_BYTES):
                    digest.update(block)
                    beat()
        except FileNotFoundError:
            return False
        return digest.hexdigest() == entry["sha256"]

    def get(self, name: str, target: Path, check: Callable[[Path], list[str]] = lambda folder: []) -> int:
        """Fetches a sealed folder: verified, durable, and under its own name only when it is whole; returns the bytes.

        Raises DamagedCopyError where a file is not the one that was written.

        Args:
            check: says what is wrong with the files together.
        """
        entries = self.sealed(name)
        unfinished = target.with_name(f"{UNFETCHED}{target.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        sealed = {}
        try:
            for file, entry in entries.items():
                path = unfinished / file
                path.parent.mkdir(parents=True, exist_ok=True)
                sealed[file] = self._fetched(f"{self.root}/{name}/{file}", path, entry)
            if problems := check(unfinished):
                raise DamagedCopyError(5, "; ".join(problems))
        except Exception:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        commit(unfinished, target, sealed)
        return sum(entry["bytes"] for entry in sealed.values())

    def _fetched(self, remote: str, path: Path, entry: dict[str, Any]) -> dict[str, Any]:
        """One file, as its manifest says. A connection may break or garble what it brings: FETCH_TRIES of them."""
        for tries_left in reversed(range(FETCH_TRIES)):
            try:
                self.system.get_file(remote, str(path))
                if (found := seal(path)) == entry:
                    return found
                problem = DamagedCopyError(5, f"{path.name} does not have the sha256 that was written")
            except FileNotFoundError:
                raise DamagedCopyError(5, f"{path.name} is missing") from None
            except Exception as error:  # each file system has errors of its own
                problem = error
            if tries_left:
                time.sleep(SECONDS_BETWEEN_TRIES)
        raise problem

    def unseal(self, name: str) -> None:
        """From here on the folder is not whole."""
        if self.read(f"{name}/{SEAL_FILE}") is not None:
            self.system.rm_file(f"{self.root}/{name}/{SEAL_FILE}")

    def remove(self, name: str) -> None:
        """Removes a folder; its manifest first, because a half-removed folder must never look whole."""
        self.unseal(name)
        self.system.invalidate_cache()
        self.system.rm(f"{self.root}/{name}", recursive=True)


def name_of(step: int) -> str:
    """Of a checkpoint's folder, in the run's folder and here."""
    return f"checkpoints/{checkpoint_name(step)}"


def is_run_file(name: str) -> bool:
    """Whether this is one of the run's small files, by its name below the run's folder."""
    hidden = any(part.startswith(".") for part in name.split("/")) or name == IDENTITY_FILE
    patterns = [pattern for pattern in RUN_FILES if pattern.count("/") == name.count("/")]
    return not hidden and any(fnmatchcase(name, pattern) for pattern in patterns)


def damage_of_run_file(name: str, content: bytes) -> str | None:
    """What shows that one of the run's small files is not as it was written; None if nothing does."""
    try:
        if name == ROLLBACKS:
            parse_rollbacks(content)
        elif name == METRICS_FILE and not parse_lines(content[:BLOCK_BYTES].splitlines()):
            return "holds no event"
        elif any(fnmatchcase(name, pattern) for pattern in OBJECTS):
            values = json.loads(content) if name.endswith(".json") else yaml.safe_load(content)
            return None if isinstance(values, dict) else f"cannot be what was written: {content[:40]!r}"
    except (ValueError, yaml.YAMLError) as error:
        return f"cannot be read ({one_line(error)})"
    return None


def run_files(run: Path) -> dict[str, bytes]:
    """{name: content} of the run's small files as they are now; of a line that is being written nothing.

    Damaged ones are left out: the mirror may still have them as they were.
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
    """Why the mirror of a recipe cannot be used, as far as can be told without reaching it."""
    mirror = settings.mirror
    if mirror is None:
        return []
    if not mirror.strip():
        return ["checkpoint.mirror: is empty; give a folder, a URL such as s3://BUCKET/runs, or null"]
    if not is_url(mirror):
        place, run = Path(os.path.abspath(mirror)), Path(os.path.abspath(output))
        if place == run.parent or place.is_relative_to(run):
            return [f"checkpoint.mirror: {mirror}: the copy would lie in {output} itself; give another disk or a URL"]
        return []
    if shown(mirror) != mirror.rstrip("?#"):
        return [f"checkpoint.mirror: {shown(mirror)}: holds secrets, which config.yaml would; put them into the "
                "environment, as the store's own tools take them, and give the bare URL"]  # fmt: skip
    protocol = mirror.partition("://")[0]
    from fsspec.registry import get_filesystem_class, known_implementations, registry

    if protocol not in registry and protocol not in known_implementations:
        return [f"checkpoint.mirror: {mirror}: {protocol}:// is not known; give a folder, or s3://, gs://, hf://, ..."]
    try:
        get_filesystem_class(protocol)
    except ImportError as error:
        package = known_implementations[protocol]["class"].partition(".")[0]
        if package == "fsspec" or importlib.util.find_spec(package) is not None:
            return [f"checkpoint.mirror: {mirror}: {one_line(error)}"]
        return [f"checkpoint.mirror: {mirror}: needs {package}, which is not installed: pip install {package}"]
    return []


def mirror_place(mirror: str) -> str:
    """A setting's folder or URL, whatever the current folder."""
    return (mirror if is_url(mirror) else os.path.abspath(mirror)).rstrip("/")


def connect(settings: config.Checkpoint, run: Path) -> MirrorStore:
    """The mirror of a run. Raises InputError where its library is missing."""
    if problems := mirror_problems(run, settings):
        raise InputError(*problems)
    return MirrorStore(settings.mirror, Path(os.path.abspath(run)).name)


def id_of_run(run: Path) -> str | None:
    """That of its first start; None before it."""
    return first_start_of(run).get("start_id") if (run / METRICS_FILE).is_file() else None


def is_ahead(run: Path, state: Mapping[str, Any]) -> bool:
    """Whether a checkpoint of that trainer_state.json continues the run's folder: it knows every rollback recorded
    here."""
    return len(state.get("state", {}).get("rollbacks", ())) >= len(recorded_rollbacks(run))
