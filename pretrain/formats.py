"""Document formats: one generator per format, from a file's bytes to records that name where each document stands.

A record that cannot be used carries its problem instead of its text; what makes the rest of a file unreadable raises
DamagedFileError. Texts are UTF-8 bytes, exactly as they stand in the file but for a leading byte-order mark.
"""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from pretrain.byte_stream import ByteStream, DamagedFileError

MAXIMUM_DOCUMENT_BYTES = 256 << 20
PART_BYTES = 4 << 20
UNITS = ("file", "line", "paragraph")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Record(NamedTuple):
    """One document: its place in the file, counted from 1 in the format's unit, and its text or its problem."""

    place: int
    text: bytes | None
    problem: str | None = None


@dataclass(frozen=True)
class Reading:
    """How to find the text: a field (dotted when nested), and for plain text what a document is."""

    text_field: str = "text"
    documents: str = "file"
    tab_separated: bool = False


def whole_lines(stream: ByteStream) -> Iterator[tuple[int, bytes]]:
    """(number of its first line, content) of consecutive pieces of about PART_BYTES that end with a line.

    Raises DamagedFileError after the last whole line, or at a line longer than a document may be.
    """
    pending: list[bytes] = []
    size, line = 0, 1
    damage = None
    blocks = stream.blocks()
    while True:
        try:
            block = next(blocks, None)
        except DamagedFileError as error:
            block, damage = None, error
        if block is None:
            break
        pending.append(block)
        size += len(block)
        if size >= PART_BYTES and b"\n" in block:
            head, _, tail = block.rpartition(b"\n")
            content = b"".join([*pending[:-1], head, b"\n"])
            yield line, content
            line += content.count(b"\n")
            pending, size = [tail], len(tail)
        elif size > MAXIMUM_DOCUMENT_BYTES + PART_BYTES:
            raise DamagedFileError(f"line {line} or a later one is longer than {MAXIMUM_DOCUMENT_BYTES:,} bytes")
    content = b"".join(pending)
    if damage is not None:
        content = content[: content.rfind(b"\n") + 1]
    if content:
        yield line, content
    if damage is not None:
        raise damage


def records_of_lines(first_line: int, content: bytes, format_name: str, reading: Reading) -> Iterator[Record]:
    """The records of whole lines of a line format: a JSON object, or a document of plain text, on each."""
    if first_line == 1:
        content = content.removeprefix(BYTE_ORDER_MARK)
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    for place, line in enumerate(lines, first_line):
        if format_name == "txt":
            yield checked(place, line.removesuffix(b"\r"))
        elif line and not line.isspace():
            yield json_record(place, line, reading.text_field)


def checked(place: int, text: bytes) -> Record:
    """A record of a text that must be UTF-8 and not too long."""
    if len(text) > MAXIMUM_DOCUMENT_BYTES:
        return Record(place, None, f"document of {len(text):,} bytes, at most {MAXIMUM_DOCUMENT_BYTES:,} are taken")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return Record(place, None, _not_utf8(error))
    return Record(place, text)


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8 (byte 0x{error.object[error.start]:02x} at byte {error.start + 1:,} of it)"


def json_record(place: int, line: bytes, text_field: str) -> Record:
    """The record of one JSON object."""
    if len(line) > MAXIMUM_DOCUMENT_BYTES:
        return Record(place, None, f"line of {len(line):,} bytes, at most {MAXIMUM_DOCUMENT_BYTES:,} are taken")
    try:
        # Decoded here and strictly: json.loads lets encoded surrogates through when it is given bytes.
        value = _JSON.decode(line.decode())
    except UnicodeDecodeError as error:
        return Record(place, None, _not_utf8(error))
    except json.JSONDecodeError as error:
        return Record(place, None, f"broken JSON ({error.msg} at column {error.colno:,})")
    except (ValueError, RecursionError) as error:
        return Record(place, None, f"broken JSON ({error})")
    return _record_of(place, value, text_field)


# Control characters inside strings, NUL among them, are text.
_JSON = json.JSONDecoder(strict=False)


def _record_of(place: int, value: Any, text_field: str) -> Record:
    if not isinstance(value, dict):
        return Record(place, None, f"is {_kind(value)}, must be an object with the field {text_field!r}")
    found = value.get(text_field, _MISSING)
    if found is _MISSING and "." in text_field:
        found = value
        for name in text_field.split("."):
            found = found.get(name, _MISSING) if isinstance(found, dict) else _MISSING
    if found is _MISSING:
        return Record(place, None, f"no field {text_field!r} (fields: {', '.join(list(value)[:12]) or 'none'})")
    return text_record(place, found, text_field)


_MISSING = object()


def text_record(place: int, value: Any, text_field: str) -> Record:
    """The record of a field's value, which must be text: a str, or bytes of UTF-8."""
    if isinstance(value, bytes):
        return checked(place, value)
    if not isinstance(value, str):
        return Record(place, None, f"field {text_field!r} is {_kind(value)}, must be text")
    try:
        return Record(place, value.encode())
    except UnicodeEncodeError as error:
        return Record(place, None, f"not Unicode text (half of a surrogate pair at character {error.start + 1:,})")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")


def read_jsonl(stream: ByteStream, reading: Reading) -> Iterator[Record]:
    """JSON Lines: an object per line."""
    for first_line, content in whole_lines(stream):
        yield from records_of_lines(first_line, content, "jsonl", reading)


def read_text(stream: ByteStream, reading: Reading) -> Iterator[Record]:
    """Plain text: a document per file, per line, or per block of lines between blank lines."""
    if reading.documents == "line":
        for first_line, content in whole_lines(stream):
            yield from records_of_lines(first_line, content, "txt", reading)
    elif reading.documents == "paragraph":
        yield from _paragraphs(stream)
    else:
        yield checked(1, read_whole(stream, "use --documents line or paragraph").removeprefix(BYTE_ORDER_MARK))


def read_whole(stream: ByteStream, remedy: str) -> bytes:
    """All of a file. Raises DamagedFileError, with the remedy, when it is larger than a document may be."""
    blocks, size = [], 0
    for block in stream.blocks():
        blocks.append(block)
        size += len(block)
        if size > MAXIMUM_DOCUMENT_BYTES:
            raise DamagedFileError(f"more than {MAXIMUM_DOCUMENT_BYTES:,} bytes in one piece; {remedy}")
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


def read_json(stream: ByteStream, reading: Reading) -> Iterator[Record]:
    """JSON: a list of objects, an object that holds one such list, or objects one after another."""
    try:
        text = read_whole(stream, "convert it to JSON lines").removeprefix(BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError as error:
        raise DamagedFileError(_not_utf8(error)) from None
    position, place = _after_space(text, 0), 0
    while position < len(text):
        try:
            value, position = _JSON.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise DamagedFileError(f"broken JSON ({error.msg} at line {error.lineno:,})") from None
        except (ValueError, RecursionError) as error:
            raise DamagedFileError(f"broken JSON ({error})") from None
        for element in _elements(value, reading.text_field):
            place += 1
            yield _record_of(place, element, reading.text_field)
        position = _after_space(text, position)


def _after_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _elements(value: Any, text_field: str) -> list[Any]:
    if isinstance(value, list):
        return value
    if isinstance(value, dict) and text_field.split(".")[0] not in value and text_field not in value:
        lists = [part for part in value.values() if isinstance(part, list)]
        if len(lists) == 1:
            return lists[0]
    return [value]


def read_csv(stream: ByteStream, reading: Reading) -> Iterator[Record]:
    """Comma- or tab-separated values with a header row. A record's place is the line on which its row ends."""
    csv.field_size_limit(MAXIMUM_DOCUMENT_BYTES)
    # Bytes that are not UTF-8 come through as lone surrogates, so that one bad row is one bad record.
    lines = io.TextIOWrapper(io.BufferedReader(stream), "utf-8", errors="surrogateescape", newline="")
    rows = csv.reader(lines, delimiter="\t" if reading.tab_separated else ",", strict=True)
    header = None
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            if "limit" in str(error) or "end of data" in str(error):
                raise DamagedFileError(f"broken row that ends at line {rows.line_num:,} ({error})") from None
            yield Record(rows.line_num, None, f"broken row ({error})")
            continue
        if row is None:
            return
        if header is None:
            header = [name.removeprefix("\ufeff") for name in row]
            if reading.text_field not in header:
                raise DamagedFileError(f"no column {reading.text_field!r} (columns: {', '.join(header[:12])})")
            column = header.index(reading.text_field)
        elif row:
            yield _csv_record(rows.line_num, row, len(header), column)


def _csv_record(place: int, row: list[str], columns: int, column: int) -> Record:
    if len(row) != columns:
        return Record(place, None, f"row has {len(row)} columns, the header has {columns}")
    try:
        return Record(place, row[column].encode())
    except UnicodeEncodeError:
        return checked(place, row[column].encode(errors="surrogateescape"))
