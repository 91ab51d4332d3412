"""Reads files from local paths and fsspec URLs, such as s3://, gs://, https://, hf:// and memory://.

Also reads objects below a URL, such as prepared shards, with retries.
"""

import functools
import hashlib
import io
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from pretrain.errors import SMALL_FILE_BYTES, InputError, UnreachableError, one_line
from pretrain.files import fingerprint_of, is_url, shown

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_Value = TypeVar("Value")
DOWNLOAD_BLOCK_BYTES = 8 << 20
TRIES = 4
FIRST_RETRY_SECONDS = 0.1
LONGEST_RETRY_SECONDS = 15.0
PATIENCE_SECONDS = 60.0
"""Maximum time for all tries of a read, well below guard.step_timeout_seconds."""
IDENTITIES = ("ETag", "etag", "md5Hash", "md5", "crc32c", "content_md5", "Content-MD5", "blob_id", "Last-Modified")
"""Metadata fields that change with a file's content, in various file systems."""


def reason_of(error: BaseException) -> str:
    """Returns the error's class and message, without the secrets of URLs."""
    return re.sub(r"\w+://[^\s'\")]+", lambda found: shown(found[0]), one_line(error))


def file_system(url: str) -> tuple["AbstractFileSystem", str]:
    """Returns a URL's file system and path. Raises InputError if the protocol is unknown or its library is missing."""
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise InputError(f"{shown(url)}: cannot be reached: {reason_of(error)}") from None


def open_file(path: str) -> BinaryIO:
    """Opens a local or remote file for reading. Raises OSError if this fails."""
    return RemoteFile(path) if is_url(path) else open(path, "rb")


class RemoteFile(io.RawIOBase):
    """A remote file. It is seekable if the server supports it.

    Retries a failed read from the same position. Raises UnreachableError after TRIES failures.
    """

    def __init__(self, url: str):
        self.url = url
        self._position = 0
        self._file: Any = self._opened()
        # fsspec claims that a stream of unknown size is seekable.
        self._can_seek = self._file.seekable() and getattr(self._file, "size", 0) is not None

    def _opened(self) -> Any:
        system, path = file_system(self.url)
        return _translated(self.url, lambda: system.open(path, "rb", block_size=DOWNLOAD_BLOCK_BYTES))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._can_seek

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = _translated(self.url, lambda: self._file.seek(offset, whence))
        return self._position

    def readinto(self, buffer: Any) -> int:
        content = self._read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def _read(self, size: int) -> bytes:
        for attempt in range(TRIES):
            try:
                if attempt:
                    self._reopen()  # may also fail
                content = self._file.read(size)
                break
            except Exception as error:  # each file system raises its own errors
                if attempt == TRIES - 1:
                    raise UnreachableError(5, f"cannot be read: {reason_of(error)}", shown(self.url)) from error
                time.sleep(2.0**attempt / 4)
        self._position += len(content)
        return content

    def _reopen(self) -> None:
        self._file = self._opened()
        if self._can_seek:
            self._file.seek(self._position)
            return
        passed = 0
        while passed < self._position and (
            block := self._file.read(min(DOWNLOAD_BLOCK_BYTES, self._position - passed))
        ):
            passed += len(block)
        if passed < self._position:
            raise OSError("the server sent less of the file than before")

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _translated(url: str, action: Callable[[], _Value]) -> _Value:
    """Returns the result of `action`. Converts a file system's error to an UnreachableError with the file's URL."""
    try:
        return action()
    except FileNotFoundError:
        raise UnreachableError(2, "no such file", shown(url)) from None
    except Exception as error:
        raise UnreachableError(5, reason_of(error), shown(url)) from error


def size_of(path: str) -> int:
    """Returns a file's size in bytes, or 0 if the server doesn't report it. Raises OSError if it is unreadable."""
    if not is_url(path):
        return os.path.getsize(path)
    return int(_about(path).get("size") or 0)


def _about(url: str) -> dict[str, Any]:
    system, path = file_system(url)
    return _translated(url, lambda: system.info(path))


def fingerprint(path: str, size: int) -> str:
    """Returns a hash that detects changes without reading the whole file; see `fingerprint_of`.

    For a remote file, hashes its size and the server's ETag, checksum or date instead, if available.
    """
    if is_url(path):
        about = _about(path)
        known = {name: str(about[name]) for name in IDENTITIES if about.get(name)}
        if known:
            return hashlib.sha256(f"{size}{sorted(known.items())!r}".encode()).hexdigest()
    with open_file(path) as file:
        return fingerprint_of(file, size)


def patiently(ask: Callable[[], _Value], seconds: float, *, retry: bool) -> _Value:
    """Calls `ask` and returns its result. Raises its last error, or TimeoutError after `seconds`.

    retry: True to retry after an error other than InputError, with exponential backoff.
    """
    deadline = time.monotonic() + seconds
    pause = FIRST_RETRY_SECONDS
    while True:
        # Call it in a thread, because a dead connection may block forever.
        answer: Future[_Value] = Future()
        threading.Thread(target=_ask, args=(ask, answer), name="remote", daemon=True).start()
        try:
            return answer.result(max(0.1, deadline - time.monotonic()))
        except InputError:
            raise
        except TimeoutError:
            error = TimeoutError(f"no response within {seconds:g} s")
        except Exception as found:
            error = found
        if not retry or time.monotonic() + pause > deadline:
            raise error
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_RETRY_SECONDS)


def _ask(ask: Callable[[], _Value], answer: Future[_Value]) -> None:
    try:
        answer.set_result(ask())
    except Exception as error:
        answer.set_exception(error)


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
                raise InputError(f"{where}: {reason_of(error)}; grant this machine access") from None
            except Exception as error:  # each file system raises its own errors
                if "Credential" in type(error).__name__:
                    raise InputError(f"{where}: {reason_of(error)}; set up credentials on this machine") from None
                raise

        try:
            return patiently(ask_once, PATIENCE_SECONDS, retry=True)
        except InputError:
            raise
        except Exception as error:
            # A request without a body, such as S3's HEAD, doesn't say that credentials have expired.
            advice = "run the same command again once the server responds, or correct the address or credentials"
            reason = f"{problem} within {PATIENCE_SECONDS:g} s: {reason_of(error)}; {advice}"
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
