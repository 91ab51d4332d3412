"""Outputs that are URLs: prepared in a local folder, which survives a kill, then copied file by file."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.errors import InputError, one_line
from pretrain.files import as_json, sha256_of, write_durably
from pretrain.urls import file_system, shown

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

UNFINISHED_FILE = ".unfinished"


@dataclass(frozen=True)
class Destination:
    """A folder at a URL and the local folder it is copied from; the file `last` means that it is complete."""

    url: str
    local: Path
    last: str

    def open(self) -> None:
        """Checks, before hours of work, that the URL is free, or holds what is made here. Raises InputError.

        Where it is complete and the local folder is not, the `last` file is copied here, to be recognised.
        """
        system, root = file_system(self.url)
        try:
            held = _files_of(system, root)
            if self.last in held:
                if not (self.local / self.last).is_file():
                    self.local.mkdir(parents=True, exist_ok=True)
                    write_durably(self.local / self.last, system.cat_file(f"{root}/{self.last}"))
                return
            if held and UNFINISHED_FILE not in held:
                others = ", ".join(sorted(held)[:5])
                raise InputError(f"--output {self.shown}: already contains other files ({others}); give a new folder")
            system.makedirs(root, exist_ok=True)
            system.pipe_file(f"{root}/{UNFINISHED_FILE}", b"")
        except InputError:
            raise
        except Exception as error:  # each file system has errors of its own
            raise InputError(f"--output {self.shown}: cannot be written: {one_line(error)}") from None

    @property
    def shown(self) -> str:
        """The URL without secrets."""
        return shown(self.url)

    def fill(self, say: Callable[[str], None]) -> int:
        """Copies what is missing, `last` after all others; returns the number of files copied.

        Raises InputError where it fails; a second call continues from there.
        """
        system, root = file_system(self.url)
        names = [str(path.relative_to(self.local)) for path in self.local.rglob("*") if path.is_file()]
        # A reader takes the folder for complete once `last` is there.
        names.sort(key=lambda name: (name == self.last, name))
        record = self.local.with_name(self.local.name + ".copied.json")
        copied: dict[str, str] = json.loads(record.read_bytes()) if record.is_file() else {}
        number = 0
        try:
            held = _files_of(system, root)
            if self.last in held and len(names) == 1:
                return 0
            for name in names:
                path = self.local / name
                size = path.stat().st_size
                sha256 = sha256_of(path)
                # The size alone is no proof: an earlier preparation may have put another file there.
                if held.get(name) == size and copied.get(name) == sha256:
                    continue
                say(f"copying {name} ({size / 1e6:,.1f} MB) to {self.shown}")
                _copy(system, path, f"{root}/{name}", size)
                copied[name] = sha256
                write_durably(record, as_json(copied))
                number += 1
            if UNFINISHED_FILE in held:
                system.rm_file(f"{root}/{UNFINISHED_FILE}")
        except Exception as error:  # each file system has errors of its own
            raise InputError(
                f"--output {self.shown}: {one_line(error)}; all is prepared in {self.local}: run the same command "
                "again to copy the rest"
            ) from None
        return number


def destination_of(url: str, staging: Path, last: str) -> Destination:
    """Places the local folder for a URL below `staging`, named by the parts of its address."""
    protocol, _, rest = shown(url).partition("://")
    parts = [part for part in rest.split("/") if part not in ("", ".", "..")]
    if not parts:
        raise InputError(f"--output {shown(url)}: is not a folder; give one, such as {shown(url).rstrip('/')}/data")
    return Destination(url.rstrip("/"), staging.joinpath(protocol, *parts), last)


def _files_of(system: "AbstractFileSystem", root: str) -> dict[str, int]:
    """Lists {name below root: bytes} of all files."""
    system.invalidate_cache()
    if not system.exists(root):
        return {}
    found: dict[str, dict[str, Any]] = system.find(root, detail=True)
    # Private, but fsspec has no public way to the form in which `find` names files.
    prefix = system._strip_protocol(root).rstrip("/") + "/"
    return {name.removeprefix(prefix): int(about.get("size") or 0) for name, about in found.items()}


def _copy(system: "AbstractFileSystem", path: Path, remote: str, size: int) -> None:
    system.makedirs(remote.rpartition("/")[0], exist_ok=True)
    system.put_file(str(path), remote)
    system.invalidate_cache()
    arrived = system.info(remote).get("size")
    if arrived != size:
        raise OSError(5, f"{path.name} has {size:,} bytes, {arrived} have arrived")
