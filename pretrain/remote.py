"""Reads objects below an fsspec URL, with retries."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from pretrain.errors import SMALL_FILE_BYTES, InputError, UnreachableError, one_line
from pretrain.files import shown
from pretrain.urls import file_system, patiently

_Value = TypeVar("_Value")
PATIENCE_SECONDS = 60.0
"""Maximum time for all tries of a read, well below guard.step_timeout_seconds."""


class RemoteFolder:
    """A folder of prepared shards at a URL."""

    def __init__(self, url: str):
        from fsspec.implementations.dirfs import DirFileSystem

        self.shown = shown(url).rstrip("/")
        system, path = file_system(url)
        self._system = DirFileSystem(path.rstrip("/"), system)

    def sizes(self) -> dict[str, int | None]:
        """Returns {name: size in bytes, or None if unknown} for all files. Raises the same errors as `read`."""
        found = self._answer(self.shown, "its objects cannot be listed", self._found)
        return {name: about.get("size") for name, about in found.items()}

    def _found(self) -> dict[str, dict[str, Any]]:
        try:
            return self._system.find("", detail=True)
        except FileNotFoundError:
            return {}

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Reads an object, or its bytes from `start` to `end`, with retries.

        Raises InputError if the object is missing, forbidden or shorter than `end`. Raises UnreachableError if all
        tries within PATIENCE_SECONDS fail.
        """
        where = f"{self.shown}/{name}"

        def ask() -> bytes:
            try:
                content = self._system.cat_file(name, start=start, end=end)
                if start is None or len(content) == end - start:
                    return content
                problem: Exception = OSError(f"{len(content):,} bytes received instead of {end - start:,}")
            except (FileNotFoundError, PermissionError):
                raise
            except Exception as error:  # each file system raises its own errors
                problem = error
            if end is not None and (size := self._size(name)) is not None and size < end:
                raise InputError(
                    f"{where}: is truncated to {size:,} bytes, but needs at least {end:,}; upload it again"
                )
            raise problem

        span = "" if start is None else f"bytes {start:,} to {end:,} "
        return self._answer(where, f"{span}cannot be read", ask)

    def _answer(self, where: str, problem: str, ask: Callable[[], _Value]) -> _Value:
        def ask_once() -> _Value:
            try:
                return ask()
            except FileNotFoundError:
                raise InputError(f"{where}: no such object; upload it, or correct the address") from None
            except PermissionError as error:
                raise InputError(f"{where}: {one_line(error)}; grant this machine access") from None
            except Exception as error:  # each file system raises its own errors
                if "Credential" in type(error).__name__:
                    raise InputError(f"{where}: {one_line(error)}; set up credentials on this machine") from None
                raise

        try:
            return patiently(ask_once, PATIENCE_SECONDS, retry=True)
        except InputError:
            raise
        except Exception as error:
            advice = "run the same command again once the server responds, or correct the address"
            reason = f"{problem} within {PATIENCE_SECONDS:g} s: {one_line(error)}; {advice}"
            raise UnreachableError(5, reason, where) from None

    def _size(self, name: str) -> int | None:
        try:
            self._system.invalidate_cache()
            return self._system.info(name).get("size")
        except Exception:  # the failed read reports the problem
            return None


@functools.cache
def remote_folder(url: str) -> RemoteFolder:
    """Returns the folder at a URL. Cached, so that its connections stay open."""
    return RemoteFolder(url)


def read_text(url: str) -> str:
    """Reads a small text file. Otherwise, raises RemoteFolder's errors, or an InputError that omits the URL."""
    place, _, name = url.rpartition("/")
    content = remote_folder(place).read(name)
    if len(content) > SMALL_FILE_BYTES:
        raise InputError(f"is too large: {len(content):,} bytes, but the limit is {SMALL_FILE_BYTES:,}")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"cannot be read: {error}") from None
