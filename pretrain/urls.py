"""Reads files from local paths and fsspec URLs, such as s3://, gs://, https://, hf:// and memory://."""

import hashlib
import io
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from pretrain.errors import InputError, UnreachableError, one_line
from pretrain.files import fingerprint_of, is_url, shown

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_Value = TypeVar("Value")
DOWNLOAD_BLOCK_BYTES = 8 << 20
TRIES = 4
FIRST_RETRY_SECONDS = 0.1
LONGEST_RETRY_SECONDS = 15.0
IDENTITIES = ("ETag", "etag", "md5Hash", "md5", "crc32c", "content_md5", "Content-MD5", "blob_id", "Last-Modified")
"""Metadata fields that change with a file's content, in various file systems."""


def file_system(url: str) -> tuple["AbstractFileSystem", str]:
    """Returns a URL's file system and path. Raises InputError if the protocol is unknown or its library is missing."""
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise InputError(f"{shown(url)}: cannot be reached: {one_line(error)}") from None


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
        self._can_seek = self._file.seekable()

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
                    raise UnreachableError(5, f"cannot be read: {one_line(error)}", shown(self.url)) from error
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
        raise UnreachableError(5, one_line(error), shown(url)) from error


def find_urls(pattern: str) -> list[str]:
    """Returns the files that match a URL with `*` and `**`, sorted. Raises InputError if listing fails."""
    system, path = file_system(pattern)
    try:
        if "*" not in path:
            return [pattern] if system.info(path).get("type") != "directory" else []
        found = system.glob(path, detail=True)
    except FileNotFoundError:
        return []
    except Exception as error:
        raise InputError(f"--input {shown(pattern)}: cannot be listed: {one_line(error)}") from None
    return sorted(system.unstrip_protocol(name) for name, about in found.items() if about.get("type") != "directory")


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
