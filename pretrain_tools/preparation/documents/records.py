"""Makes records, each with one document, from one or several fields, and filters them."""

import codecs
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
"""Value of a missing field. None is a null."""


class Record(NamedTuple):
    """One document: its place in the file (from 1, in the format's unit), and its text or problem, unless filtered."""

    place: int
    text: bytes | None
    problem: str | None = None
    url: str | None = None
    """Value of the field given with --url_field."""
    is_validation: bool | None = None
    """Split from the field given with --split_field. With None, the hash of the text decides."""
    problem_records: int = 1
    """Number of records that the problem affects. A missing column affects all of a file's records."""
    not_read: dict[str, int] | None = None
    """{suffix: archive members that aren't documents}. In that case, text and problem are None."""


@dataclass(frozen=True)
class Reading:
    """Settings for reading: the text field (dotted if nested) or a template, and the documents to keep.

    `only`: (field, values) pairs. Each field must have one of its values. The limits count Unicode characters.
    `documents`: the unit of plain-text documents.
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
        """The template as (literal text, next field) pairs."""
        if self.template is None:
            return [("", self.text_field)]
        return [(literal, name) for literal, name, _, _ in string.Formatter().parse(self.template)]

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """All needed fields, each once."""
        names = [name for _, name in self.pieces if name is not None]
        names += [name for name, _ in self.only]
        return tuple(dict.fromkeys(names + [name for name in (self.url_field, self.split_field) if name]))

    def leaves_out(self, text: bytes) -> bool:
        """Returns True if a text is shorter or longer than the limits."""
        if self.min_characters is None and self.max_characters is None:
            return False
        characters = len(text.decode())
        return characters < (self.min_characters or 0) or characters > (self.max_characters or characters)


def template_problem(template: str) -> str | None:
    """Describes a template's problem; None if the template is valid."""
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        return f"{error}; write {{{{ and }}}} for literal braces"
    if any(spec or conversion for _, _, spec, conversion in pieces):
        return "fields must not contain ! or :"
    if any(name is not None and not re.fullmatch(r"[^{}\[\]\s]+", name) for _, name, _, _ in pieces):
        return "a field is a name between braces, such as {title} or {meta.title}"
    return None if any(name for _, name, _, _ in pieces) else "has no field"


def find_field(value: Any, name: str) -> Any:
    """Finds a field in a JSON object by its own name or by dotted steps; MISSING if it doesn't exist."""
    found = value.get(name, MISSING)
    if found is MISSING and "." in name:
        found = value
        for step in name.split("."):
            found = found.get(step, MISSING) if isinstance(found, dict) else MISSING
    return found


def object_record(place: int, value: Any, reading: Reading) -> Record:
    """Makes the record of a JSON object."""
    if not isinstance(value, dict):
        return Record(place, None, f"is {kind_of(value)}, must be an object with the field {reading.fields[0]!r}")
    values = {name: find_field(value, name) for name in reading.fields}
    return fields_record(place, values, reading, list(value))


def row_records(columns: dict[str, Sequence[Any]], reading: Reading, rows_before: int) -> Iterator[Record]:
    """Makes the records for rows, numbered from rows_before + 1. columns: each field's values."""
    for place, row in enumerate(zip(*columns.values(), strict=True), rows_before + 1):
        yield fields_record(place, dict(zip(columns, row, strict=True)), reading)


def fields_record(place: int, values: dict[str, Any], reading: Reading, available: Sequence[str] = ()) -> Record:
    """Makes a document's record. values: each of reading.fields, or MISSING. available: names for messages."""
    if MISSING in values.values():
        missing = next(name for name, value in values.items() if value is MISSING)
        return Record(place, None, f"no field {missing!r} (fields: {', '.join(available[:12]) or 'none'})")
    if reading.is_plain:
        return text_record(place, values[reading.text_field], reading.text_field)
    if any(as_text(values[name]) not in allowed for name, allowed in reading.only):
        return Record(place, None)
    if reading.template is None:
        record = text_record(place, values[reading.text_field], reading.text_field)
    else:
        record = _filled(place, values, reading)
    if reading.url_field:
        record = record._replace(url=as_text(values[reading.url_field]))
    if reading.split_field:
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
            return Record(place, None, f"field {name!r} is {kind_of(value)}, must be text or a number")
        parts += [literal, text]
    return text_record(place, "".join(parts), "template")


def as_text(value: Any) -> str | None:
    """Formats a field's value for a template or filter. Nulls are empty. Returns None for lists and objects."""
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, str | int | float) else None


def text_record(place: int, value: Any, text_field: str) -> Record:
    """Makes a record from a field's value, which must be a str or UTF-8 bytes."""
    if isinstance(value, bytes):
        return checked(place, value)
    if not isinstance(value, str):
        return Record(place, None, f"field {text_field!r} is {kind_of(value)}, must be text")
    try:
        return Record(place, value.encode())
    except UnicodeEncodeError as error:
        return Record(place, None, f"not Unicode text (half of a surrogate pair at character {error.start + 1:,})")


def checked(place: int, text: bytes) -> Record:
    """Makes a record from a text, which must be UTF-8 and not too long."""
    if len(text) > MAXIMUM_DOCUMENT_BYTES:
        return Record(place, None, f"document of {len(text):,} bytes; the maximum is {MAXIMUM_DOCUMENT_BYTES:,}")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return Record(place, None, not_utf8(error))
    return Record(place, text)


def not_utf8(error: UnicodeDecodeError) -> str:
    """Describes a decoding error."""
    reason = f"not UTF-8 (0x{error.object[error.start]:02x} at byte {error.start + 1:,})"
    if error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return f"{reason} but UTF-16; convert it: iconv -f UTF-16 -t UTF-8"
    return reason


def json_record(place: int, line: bytes, reading: Reading) -> Record:
    """Reads the JSON object on a line."""
    if len(line) > MAXIMUM_DOCUMENT_BYTES:
        return Record(place, None, f"line of {len(line):,} bytes; the maximum is {MAXIMUM_DOCUMENT_BYTES:,}")
    try:
        # Decode strictly here, because json.loads accepts encoded surrogates in bytes.
        value = JSON.decode(line.decode())
    except UnicodeDecodeError as error:
        return Record(place, None, not_utf8(error))
    except json.JSONDecodeError as error:
        return Record(place, None, f"broken JSON ({error.msg} at column {error.colno:,})")
    except (ValueError, RecursionError) as error:
        return Record(place, None, f"broken JSON ({error})")
    return object_record(place, value, reading)


# Control characters in strings, including NUL, are text.
JSON = json.JSONDecoder(strict=False)


def kind_of(value: Any) -> str:
    """Names the type of a JSON value."""
    names = {dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
