"""Uploads outputs to URLs, file by file, from a local staging folder."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.errors import InputError, one_line
from pretrain.files import seal, shown, write_durably
from pretrain.terminal import say
from pretrain_tools.preparation.verification import verify_shards

if TYPE_CHECKING:
    from pretrain.checkpoint.mirror_store import MirrorStore

UNFINISHED_FILE = ".unfinished"


@dataclass(frozen=True)
class Destination:
    """An output folder at a URL, and its local copy. A folder is complete once it contains the file `last`."""

    url: str
    local: Path
    last: str

    @cached_property
    def _store(self) -> "MirrorStore":
        from pretrain.checkpoint.mirror_store import MirrorStore

        return MirrorStore(*self.url.rsplit("/", 1))

    @property
    def shown(self) -> str:
        """The URL without credentials."""
        return shown(self.url)

    def open(self) -> None:
        """Checks that the URL is writable and doesn't contain other files. Call this before preparing any data.

        If the output at the URL is already complete, downloads `last`. Raises InputError.
        """
        with self._errors_named(f"--output {self.shown}: cannot be written"):
            held = self._store.sizes("")
            if self.last in held:
                if not (self.local / self.last).is_file():
                    self._discard_unfinished()
                    write_durably(self.local / self.last, self._store.read(self.last))
                return
            if held and UNFINISHED_FILE not in held:
                others = ", ".join(sorted(held)[:5])
                raise InputError(f"--output {self.shown}: already contains other files ({others}); use a new folder")
            self._store.write(UNFINISHED_FILE, b"")

    @contextmanager
    def _errors_named(self, problem: str, remedy: str = "") -> Iterator[None]:
        """Converts file-system errors to InputError."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:  # each file system raises its own exceptions
            raise InputError(f"{problem}: {one_line(error)}{remedy}") from None

    def fill(self) -> int:
        """Uploads missing files, verifies their hashes, and returns the number of uploaded files.

        Raises InputError if an upload fails. Call this again to resume.
        """
        names = [str(path.relative_to(self.local)) for path in self.local.rglob("*") if path.is_file()]
        # `last` marks the folder as complete, so upload it last.
        names.sort(key=lambda name: (name == self.last, name))
        number = 0
        remedy = f"; the complete output is in {self.local}. Run the same command again to upload the remaining files."
        with self._errors_named(f"--output {self.shown}", remedy):
            held = self._store.sizes("")
            if self.last in held and len(names) == 1:
                return 0
            for name in names:
                entry = seal(self.local / name)
                if self._store.put_file(self.local / name, name, entry):
                    say(f"copied {name} ({entry['bytes'] / 1e6:,.1f} MB) to {self.shown}", sys.stderr)
                    number += 1
            if UNFINISHED_FILE in held:
                self._store.system.rm_file(UNFINISHED_FILE)
        return number

    def fetch(self) -> None:
        """Downloads the folder if it is complete at the URL but not locally. Call this again to resume.

        Raises InputError if the folder is unreadable or damaged.
        """
        if (self.local / self.last).is_file():
            return
        with self._errors_named(f"{self.shown}: download failed", "; run the same command again"):
            held = self._store.sizes("")
            if self.last not in held:
                return
            self._discard_unfinished()
            for name in sorted(held, key=lambda name: (name == self.last, name)):
                path = self.local / name
                if not path.is_file():
                    path.parent.mkdir(exist_ok=True)
                    fresh = path.with_name(f".{path.name}.new")
                    self._store.system.get_file(name, str(fresh))
                    fresh.rename(path)
        if problems := verify_shards(self.local):
            (self.local / self.last).unlink()
            raise InputError(
                *problems, f"{self.local}: differs from the data at {self.shown}; remove it to download the data again"
            )
        say(f"copied {self.shown} to {self.local}", sys.stderr)

    def _discard_unfinished(self) -> None:
        """Removes unfinished local work. Call this if another machine has finished the folder."""
        if (self.local / UNFINISHED_FILE).exists():
            shutil.rmtree(self.local)
        self.local.mkdir(parents=True, exist_ok=True)


def destination_of(url: str, staging: Path, last: str) -> Destination:
    """Returns the destination for a URL, with a local folder in `staging` named after the URL."""
    protocol, _, rest = shown(url).partition("://")
    parts = [part for part in rest.split("/") if part not in ("", ".", "..")]
    if not parts:
        raise InputError(f"--output {shown(url)}: must be a folder, such as {shown(url).rstrip('/')}/data")
    return Destination(url.rstrip("/"), staging.joinpath(protocol, *parts), last)
