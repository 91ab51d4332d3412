"""Builds records (one document each) from fields, and filters them."""

import codecs
import hashlib
import json
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from pretrain.data.manifest import SPLITS

MAXIMUM_DOCUMENT_BYTES = 256 << 20
MISSING = object()
"""Marks a missing field, because None represents null."""


class Record(NamedTuple):
    """A document. `place` is its location in the file, such as a line number, starting at 1.

    If the record is unusable, `problem` is set. If it was filtered out, `text` and `problem` are both None.
    """

    place: int
    text: bytes | None
    problem: str | None = None
    url: str | None = None
    """Value of the --url_field field."""
    is_validation: bool | None = None
    """Value of the --split_field field; None to assign the document by hash."""
    problem_records: int = 1
    """Number of records affected by the problem. A missing column affects all records in a file."""
    source: str = ""
    """Name of the source, set by the worker."""
    not_read: str | None = None
    """Suffix of an archive member that isn't a document. If set, text and problem are None."""


@dataclass(frozen=True)
class Reading:
    """Settings for reading documents. Field names can be dotted paths to nested fields.

    `documents` is file, line or paragraph: what counts as a document in plain text. `only` contains (field, allowed
    values) pairs.
    """

    text_field: str = "text"
    documents: str = "file"
    template: str | None = None
    only: tuple[tuple[str, tuple[str, ...]], ...] = ()
    min_characters: int | None = None
    max_characters: int | None = None
    url_field: str | None = None
    split_field: str | None = None

    @cached_property
    def is_plain(self) -> bool:
        """True if only the text field is needed."""
        return self.template is None and not self.only and self.url_field is None and self.split_field is None

    @cached_property
    def pieces(self) -> list[tuple[str, str | None]]:
        """The template as (literal text, following field) pairs."""
        if self.template is None:
            return [("", self.text_field)]
        return [(literal, name) for literal, name, _, _ in string.Formatter().parse(self.template)]

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """All needed fields, without duplicates."""
        names = [name for _, name in self.pieces if name is not None]
        names += [name for name, _ in self.only]
        return tuple(dict.fromkeys(names + [name for name in (self.url_field, self.split_field) if name is not None]))

    def leaves_out(self, text: bytes) -> bool:
        """Returns True if the text's length isn't within the limits."""
        if self.min_characters is None and self.max_characters is None:
            return False
        characters = len(text.decode())
        return characters < (self.min_characters or 0) or characters > (self.max_characters or characters)


def is_drawn(text: bytes, fraction: float, first_byte: int = 0) -> bool:
    """Draws a random fraction of all texts, based on eight bytes of their SHA-256 from `first_byte` on."""
    # Never change this, because a document must be in the same split in all prepared folders.
    return int.from_bytes(hashlib.sha256(text).digest()[first_byte : first_byte + 8], "big") < fraction * 2.0**64


def template_problem(template: str) -> str | None:
    """Describes the problem with an invalid template; None if it is valid."""
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        return f"{error}; use {{{{ and }}}} for literal braces"
    if any(spec or conversion for _, _, spec, conversion in pieces):
        return "fields must not contain ! or :"
    if any(name is not None and not re.fullmatch(r"[^{}\[\]\s]+", name) for _, name, _, _ in pieces):
        return "a field must be a name in braces, such as {title} or {meta.title}"
    return None if any(name for _, name, _, _ in pieces) else "must contain a field"


def find_field(value: Any, name: str) -> Any:
    """Finds a field in a JSON object by its name or dotted path; MISSING if it doesn't exist."""
    if name in value:
        return value[name]
    for step in name.split("."):
        value = value.get(step, MISSING) if isinstance(value, dict) else MISSING
    return value


def object_record(place: int, value: Any, reading: Reading) -> Record:
    """Builds a record from a JSON object."""
    if not isinstance(value, dict):
        return Record(place, None, f"must be an object with the field {reading.fields[0]!r}, got {kind_of(value)}")
    values = {name: find_field(value, name) for name in reading.fields}
    return fields_record(place, values, reading, list(value))


def row_records(columns: dict[str, Sequence[Any]], reading: Reading, rows_before: int) -> Iterator[Record]:
    """Builds a record per row. The first row's place is rows_before + 1. columns: {field: values}."""
    for place, row in enumerate(zip(*columns.values(), strict=True), rows_before + 1):
        yield fields_record(place, dict(zip(columns, row, strict=True)), reading)


def fields_record(place: int, values: dict[str, Any], reading: Reading, available: Sequence[str] = ()) -> Record:
    """Builds a record from {field: value, or MISSING}. available: existing fields, for messages."""
    if missing := [name for name, value in values.items() if value is MISSING]:
        return Record(place, None, f"no field {missing[0]!r} (fields: {', '.join(available[:12]) or 'none'})")
    if any(as_text(values[name]) not in allowed for name, allowed in reading.only):
        return Record(place, None)
    if reading.template is None:
        record = text_record(place, values[reading.text_field], reading.text_field)
    else:
        record = _filled(place, values, reading)
    if reading.url_field is not None:
        record = record._replace(url=as_text(values[reading.url_field]))
    if reading.split_field is not None:
        split = as_text(values[reading.split_field])
        if split not in SPLITS:
            return Record(place, None, f"field {reading.split_field!r} must be {' or '.join(SPLITS)}")
        record = record._replace(is_validation=split == "validation")
    return record


def _filled(place: int, values: dict[str, Any], reading: Reading) -> Record:
    parts = []
    for literal, name in reading.pieces:
        value = values[name] if name is not None else ""
        if isinstance(value, bytes):
            record = checked(place, value)
            if record.text is None:
                return record
        text = as_text(value)
        if text is None:
            return Record(place, None, f"field {name!r} must be text or a number, got {kind_of(value)}")
        parts += [literal, text]
    return text_record(place, "".join(parts), "template")


def as_text(value: Any) -> str | None:
    """Formats a value for a template or filter. Null becomes an empty string. Returns None for lists and objects."""
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, str | int | float) else None


def text_record(place: int, value: Any, text_field: str) -> Record:
    """Builds a record from the value of the text field, which must be a str or UTF-8 bytes."""
    if isinstance(value, bytes):
        return checked(place, value)
    if not isinstance(value, str):
        return Record(place, None, f"field {text_field!r} must be text, got {kind_of(value)}")
    try:
        return Record(place, value.encode())
    except UnicodeEncodeError as error:
        return Record(place, None, f"not valid Unicode (lone surrogate at character {error.start + 1:,})")


def checked(place: int, text: bytes) -> Record:
    """Builds a record from UTF-8 text. If the text is invalid or too long, the record has a problem instead."""
    if len(text) > MAXIMUM_DOCUMENT_BYTES:
        return Record(place, None, f"document is {len(text):,} bytes, but the maximum is {MAXIMUM_DOCUMENT_BYTES:,}")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return Record(place, None, not_utf8(error))
    return Record(place, text)


def not_utf8(error: UnicodeDecodeError) -> str:
    """Describes a decoding error."""
    reason = f"not UTF-8 (0x{error.object[error.start]:02x} at byte {error.start + 1:,})"
    if error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return f"{reason} but UTF-16; convert it with iconv -f UTF-16 -t UTF-8"
    return reason


def json_record(place: int, line: bytes, reading: Reading) -> Record:
    """Builds a record from a line that contains a JSON object."""
    if len(line) > MAXIMUM_DOCUMENT_BYTES:
        return Record(place, None, f"line is {len(line):,} bytes, but the maximum is {MAXIMUM_DOCUMENT_BYTES:,}")
    try:
        # Decode explicitly, because json.loads accepts encoded surrogates in bytes.
        value = JSON.decode(line.decode())
    except UnicodeDecodeError as error:
        return Record(place, None, not_utf8(error))
    except json.JSONDecodeError as error:
        return Record(place, None, f"invalid JSON ({error.msg} at column {error.colno:,})")
    except (ValueError, RecursionError) as error:
        return Record(place, None, f"invalid JSON ({error})")
    return object_record(place, value, reading)


# strict=False allows control characters in strings.
JSON = json.JSONDecoder(strict=False)


def kind_of(value: Any) -> str:
    """Returns the name of a JSON value's type."""
    names = {dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
