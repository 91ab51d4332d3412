"""Reads and decompresses a file or URL."""

import io
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import zstandard

from pretrain.urls import open_file

READ_BYTES = 1 << 18


class DamagedFileError(Exception):
    """Raised if the rest of a file is unreadable. records: number of unreadable records, if known."""

    def __init__(self, reason: str, records: int = 1):
        super().__init__(reason)
        self.records = max(1, records)


class ByteStream(io.RawIOBase):
    """A decompressed stream (gzip or zstd, with any number of frames).

    Raises DamagedFileError if the compressed data is truncated, which zstandard's own reader would ignore.

    Args:
        file: file to read from instead of `path`, such as an archive member.
    """

    def __init__(self, path: str, compression: str | None, file: BinaryIO | None = None):
        self.path = path
        self.is_as_stored = compression is None and file is None
        """True if the stream's content is identical to the file at `path`."""
        self._file = open_file(path) if file is None else file
        self.blocks = self._read_blocks() if compression is None else self._decompress(compression)
        """The content in consecutive blocks. Reading from it doesn't copy to a buffer."""
        self._left = memoryview(b"")
        self.consumed = 0

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            block = next(self.blocks, None)
            if block is None:
                return 0
            self._left = memoryview(block)
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def _read_blocks(self) -> Iterator[bytes]:
        while block := self._file.read(READ_BYTES):
            self.consumed += len(block)
            yield block

    def _decompress(self, compression: str) -> Iterator[bytes]:
        decompressor = None
        for raw in self._read_blocks():
            while raw:
                decompressor = decompressor or new_decompressor(compression)
                try:
                    block = decompressor.decompress(raw)
                except (zlib.error, zstandard.ZstdError) as error:
                    raise DamagedFileError(f"damaged {compression} data: {error}") from None
                raw = b""
                if decompressor.eof:
                    raw = decompressor.unused_data
                    decompressor = None
                if block:
                    yield block
        if decompressor is not None:
            raise DamagedFileError(f"{compression} data is truncated")
        if self.consumed == 0:
            raise DamagedFileError(f"expected {compression} data, got an empty file")


def new_decompressor(compression: str) -> Any:
    """Creates a decompressor for one frame of gz or zst data."""
    if compression == "gz":
        return zlib.decompressobj(wbits=31)
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
