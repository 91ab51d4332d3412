"""File formats. Each format has a generator that reads records from a file.

An unusable record has a problem instead of text. If the rest of a file is unreadable, the generator raises
DamagedFileError. Text is unchanged UTF-8, except that a leading byte-order mark is removed.
"""

import csv
import io
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import PurePath

from pretrain.errors import InputError
from pretrain.files import shown
from pretrain.registry import FORMATS
from pretrain_tools.preparation.documents.byte_stream import ByteStream, DamagedFileError
from pretrain_tools.preparation.documents.records import (
    JSON,
    MAXIMUM_DOCUMENT_BYTES,
    Reading,
    Record,
    checked,
    fields_record,
    json_record,
    not_utf8,
    object_record,
)

PART_BYTES = 4 << 20
DOCUMENT_UNITS = ("file", "line", "paragraph")
COMPRESSIONS = {".gz": "gz", ".tgz": "gz", ".zst": "zst", ".zstd": "zst"}
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Reader = Callable[[ByteStream, Reading], Iterator[Record]]
"""Reads the records in a file. Places are numbered from 1."""


def file_format(*suffixes: str, place: str) -> Callable[[Reader], Reader]:
    """Returns a decorator for a file format's reader. Use it together with `registry.FORMATS.register`.

    Raises InputError if another format already uses one of the suffixes.

    Args:
        place: unit of a record's place, such as "line", for messages.
    """
    taken = {suffix: name for name, found in FORMATS.items() for suffix in found.suffixes}

    def decorated(read: Reader) -> Reader:
        if both := [suffix for suffix in suffixes if suffix in taken]:
            raise InputError(f"suffix {both[0]} is already used by the format {taken[both[0]]}; use another suffix")
        read.suffixes = suffixes
        read.place = place
        return read

    return decorated


def inner_suffix(path: str) -> tuple[str, str | None]:
    """Returns (suffix without compression, compression) of a file name."""
    stem, suffix = os.path.splitext(shown(path).lower())
    compression = COMPRESSIONS.get(suffix)
    return (suffix if compression is None or suffix == ".tgz" else os.path.splitext(stem)[1]), compression


def format_by_name(path: str) -> str | None:
    """Returns the format of a file by its suffix, ignoring case; None if it is unknown."""
    suffix, _ = inner_suffix(path)
    return next((name for name, found in FORMATS.items() if suffix in found.suffixes), None)


def whole_lines(stream: ByteStream) -> Iterator[tuple[int, bytes]]:
    """Reads a file in blocks of whole lines, about PART_BYTES each. Yields (number of the first line, block).

    Raises DamagedFileError if the rest of the file is unreadable or a line exceeds the maximum document size.
    """
    pending: list[bytes] = []
    size = 0
    line = 1
    try:
        for block in stream.blocks:
            # Join only once there is enough data. Otherwise a very long line would be copied once per block.
            pending.append(block)
            size += len(block)
            if size >= PART_BYTES and b"\n" in block:
                head, _, tail = block.rpartition(b"\n")
                content = b"".join([*pending[:-1], head, b"\n"])
                yield line, content
                line += content.count(b"\n")
                pending = [tail]
                size = len(tail)
            elif size > MAXIMUM_DOCUMENT_BYTES + PART_BYTES:
                raise DamagedFileError(f"line {line} or a later line is longer than {MAXIMUM_DOCUMENT_BYTES:,} bytes")
    except DamagedFileError:
        content = b"".join(pending)
        if whole := content[: content.rfind(b"\n") + 1]:
            yield line, whole
        raise
    if content := b"".join(pending):
        yield line, content


def records_of_lines(first_line: int, content: bytes, format_name: str, reading: Reading) -> Iterator[Record]:
    """Reads one record per line: a JSON object or, if format_name is txt, plain text."""
    if first_line == 1:
        content = content.removeprefix(BYTE_ORDER_MARK)
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    for place, line in enumerate(lines, first_line):
        if format_name == "txt":
            yield checked(place, line.removesuffix(b"\r"))
        elif line and not line.isspace():
            yield json_record(place, line, reading)


@FORMATS.register("jsonl")
@file_format(".jsonl", ".ndjson", place="line")
def read_jsonl(stream: ByteStream, reading: Reading) -> Iterator[Record]:
    """Reads JSON Lines, with one object per line."""
    for first_line, content in whole_lines(stream):
        yield from records_of_lines(first_line, content, "jsonl", reading)


@FORMATS.register("txt")
@file_format(".txt", ".text", ".md", ".py", ".rst", place="line")
def read_text(stream: ByteStream, reading: Reading) -> Iterator[Record]:
    """Reads plain text. A document is a file, a line or a paragraph between blank lines."""
    if not reading.is_plain:
        raise DamagedFileError(
            "plain text has no fields for --template, --only, --url_field or --split_field; omit these options or "
            "the file"
        )
    if reading.documents == "line":
        for first_line, content in whole_lines(stream):
            yield from records_of_lines(first_line, content, "txt", reading)
    elif reading.documents == "paragraph":
        yield from _paragraphs(stream)
    else:
        yield checked(1, read_whole(stream, "use --documents line or paragraph").removeprefix(BYTE_ORDER_MARK))


def read_whole(stream: ByteStream, remedy: str) -> bytes:
    """Reads a whole file. Raises DamagedFileError, with `remedy` in its message, if it exceeds the maximum size."""
    blocks = []
    size = 0
    for block in stream.blocks:
        blocks.append(block)
        size += len(block)
        if size > MAXIMUM_DOCUMENT_BYTES:
            raise DamagedFileError(f"larger than {MAXIMUM_DOCUMENT_BYTES:,} bytes; {remedy}")
    return b"".join(blocks)


def _paragraphs(stream: ByteStream) -> Iterator[Record]:
    block: list[bytes] = []
    start = 1
    for first_line, content in whole_lines(stream):
        for place, line in enumerate(content.removesuffix(b"\n").split(b"\n"), first_line):
            if place == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if line.strip():
                start = start if block else place
                block.append(line)
            elif block:
                yield checked(start, b"\n".join(block).removesuffix(b"\r"))
                block = []
    if block:
        yield checked(start, b"\n".join(block).removesuffix(b"\r"))


@FORMATS.register("json")
@file_format(".json", place="document")
def read_json_documents(stream: ByteStream, reading: Reading) -> Iterator[Record]:
    """Reads JSON: a list of objects, or one object."""
    content = read_whole(stream, "convert it to JSON Lines").removeprefix(BYTE_ORDER_MARK)
    if not content.strip():
        return
    try:
        value = JSON.decode(content.decode())
    except UnicodeDecodeError as error:
        raise DamagedFileError(not_utf8(error)) from None
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"invalid JSON ({error}); for one object per line, use --input_format jsonl") from None
    for place, element in enumerate(value if isinstance(value, list) else [value], 1):
        yield object_record(place, element, reading)


@FORMATS.register("csv")
@file_format(".csv", ".tsv", place="line")
def read_csv(stream: ByteStream, reading: Reading) -> Iterator[Record]:
    """Reads comma- or tab-separated values with a header row. A record's place is the last line of its row."""
    csv.field_size_limit(MAXIMUM_DOCUMENT_BYTES)
    # Decode invalid UTF-8 to lone surrogates, so that it affects only the row that contains it.
    lines = io.TextIOWrapper(io.BufferedReader(stream), "utf-8-sig", errors="surrogateescape", newline="")
    is_tab_separated = ".tsv" in PurePath(shown(stream.path).lower()).suffixes
    rows = csv.reader(lines, delimiter="\t" if is_tab_separated else ",", strict=True)
    header: list[str] | None = None
    columns: dict[str, int] = {}
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            if "limit" in str(error) or "end of data" in str(error):
                raise DamagedFileError(f"malformed row ending at line {rows.line_num:,} ({error})") from None
            yield Record(rows.line_num, None, f"malformed row ({error})")
            continue
        if row is None:
            return
        if header is None:
            header = row
            if problem := checked(1, ",".join(header).encode(errors="surrogateescape")).problem:
                raise DamagedFileError(f"the header is {problem}", _count_of(rows))
            for name in reading.fields:
                if (count := header.count(name)) != 1:
                    given = f"{count or 'no'} columns are named {name!r} (columns: {', '.join(header[:12])})"
                    raise DamagedFileError(given, _count_of(rows))
            columns = {name: header.index(name) for name in reading.fields}
        elif len(row) == len(header):
            values = {name: row[column].encode(errors="surrogateescape") for name, column in columns.items()}
            yield fields_record(rows.line_num, values, reading)
        elif row:
            yield Record(rows.line_num, None, f"row has {len(row)} columns, but the header has {len(header)}")


def _count_of(rows: Iterator[list[str]]) -> int:
    """Counts the remaining rows, up to the first malformed one."""
    count = 0
    with suppress(csv.Error):
        for _ in rows:
            count += 1
    return count
