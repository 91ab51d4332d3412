"""Outputs that are URLs: prepared in a local folder, which survives a kill, then copied file by file."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.data.shards import verify_shards
from pretrain.errors import InputError, one_line
from pretrain.files import seal, shown, write_durably

if TYPE_CHECKING:
    from pretrain.checkpoint.mirror_store import MirrorStore

UNFINISHED_FILE = ".unfinished"


@dataclass(frozen=True)
class Destination:
    """A folder at a URL and the local folder it is copied from; the file `last` means that it is complete."""

    url: str
    local: Path
    last: str

    @cached_property
    def _store(self) -> "MirrorStore":
        from pretrain.checkpoint.mirror_store import MirrorStore

        return MirrorStore(*self.url.rsplit("/", 1))

    @property
    def shown(self) -> str:
        """The URL without secrets."""
        return shown(self.url)

    def open(self) -> None:
        """Checks, before hours of work, that the URL is free, or holds what is made here. Raises InputError.

        Where it is complete and the local folder is not, the `last` file is copied here, to be recognized.
        """
        with self._errors_named(f"--output {self.shown}: cannot be written"):
            held = self._store.sizes("")
            if self.last in held:
                if not (self.local / self.last).is_file():
                    self.local.mkdir(parents=True, exist_ok=True)
                    write_durably(self.local / self.last, self._store.read(self.last))
                return
            if held and UNFINISHED_FILE not in held:
                others = ", ".join(sorted(held)[:5])
                raise InputError(f"--output {self.shown}: already contains other files ({others}); give a new folder")
            self._store.write(UNFINISHED_FILE, b"")

    @contextmanager
    def _errors_named(self, problem: str, remedy: str = "") -> Iterator[None]:
        """Turns whatever a file system raises into an InputError."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:  # each file system has errors of its own
            raise InputError(f"{problem}: {one_line(error)}{remedy}") from None

    def fill(self, say: Callable[[str], None]) -> int:
        """Copies what is missing, `last` after all others; returns the number of files copied.

        Every file is read back and compared with its hash. Raises InputError where it fails; a second call continues
        from there.
        """
        names = [str(path.relative_to(self.local)) for path in self.local.rglob("*") if path.is_file()]
        # A reader takes the folder for complete once `last` is there.
        names.sort(key=lambda name: (name == self.last, name))
        number = 0
        remedy = f"; all is prepared in {self.local}: run the same command again to copy the rest"
        with self._errors_named(f"--output {self.shown}", remedy):
            held = self._store.sizes("")
            if self.last in held and len(names) == 1:
                return 0
            for name in names:
                entry = seal(self.local / name)
                if self._store.put_file(self.local / name, name, entry):
                    say(f"copied {name} ({entry['bytes'] / 1e6:,.1f} MB) to {self.shown}")
                    number += 1
            if UNFINISHED_FILE in held:
                self._store.system.rm_file(UNFINISHED_FILE)
        return number

    def fetch(self, say: Callable[[str], None]) -> None:
        """Copies the folder here from the URL if it is complete there; does nothing if it is not, or is here already.

        A second call continues after a kill. Raises InputError if it cannot be read, or is not what was written.
        """
        if (self.local / self.last).is_file():
            return
        with self._errors_named(f"{self.shown}: cannot be copied here", "; run the same command again"):
            held = self._store.sizes("")
            if self.last not in held:
                return
            self.local.mkdir(parents=True, exist_ok=True)
            # What this machine has begun of it; another has finished it.
            shutil.rmtree(self.local / UNFINISHED_FILE, ignore_errors=True)
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
                *problems, f"{self.local}: is not what was written to {self.shown}; remove it to copy it again"
            )
        say(f"copied {self.shown} to {self.local}")


def destination_of(url: str, staging: Path, last: str) -> Destination:
    """Places the local folder for a URL below `staging`, named by the parts of its address."""
    protocol, _, rest = shown(url).partition("://")
    parts = [part for part in rest.split("/") if part not in ("", ".", "..")]
    if not parts:
        raise InputError(f"--output {shown(url)}: is not a folder; give one, such as {shown(url).rstrip('/')}/data")
    return Destination(url.rstrip("/"), staging.joinpath(protocol, *parts), last)
