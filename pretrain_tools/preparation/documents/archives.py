"""Reads tar archives, including WebDataset. Each member is a document or a file with documents.

Unlike Python's tarfile, it detects damaged headers and truncated archives.
"""

import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

from pretrain.registry import FORMATS
from pretrain_tools.preparation.documents.byte_stream import ByteStream, DamagedFileError
from pretrain_tools.preparation.documents.formats import (
    BYTE_ORDER_MARK,
    file_format,
    format_by_name,
    inner_suffix,
)
from pretrain_tools.preparation.documents.records import (
    MAXIMUM_DOCUMENT_BYTES,
    Reading,
    Record,
    checked,
    object_record,
)

SHOWN_SUFFIX_CHARACTERS = 12


class _StrictMember(tarfile.TarInfo):
    """A TarInfo that raises an error for a damaged header, which tarfile treats as the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        zero_blocks = 0
        while True:
            try:
                member = super().fromtarfile(archive)
                break
            except tarfile.EOFHeaderError:
                zero_blocks += 1
            except tarfile.EmptyHeaderError:
                if zero_blocks:
                    raise tarfile.EOFHeaderError("end of file header") from None
                reason = (
                    "the two zero blocks at the end are missing, so it may be truncated; if it is complete, "
                    "append them with truncate -s +1024 FILE"
                )
                raise tarfile.ReadError(reason if archive.offset else "empty file") from None
            except tarfile.HeaderError as error:
                where = "after the end of the archive" if zero_blocks > 1 else f"at byte {archive.offset:,}"
                raise tarfile.ReadError(f"no valid header {where}: {error}") from None
        if zero_blocks == 1:
            raise tarfile.ReadError(f"the header before {_shown(member.name)} is all zeros")
        # After two or more blocks of zeros, another archive may follow.
        return member


@dataclass
class _Sample:
    """Members with the same name up to the first dot, as in WebDataset."""

    name: tuple[str, str]
    texts: list[tuple[str, bytes]] = field(default_factory=list)
    objects: list[tuple[str, bytes]] = field(default_factory=list)
    """The .json members."""

    def records(self, reading: Reading) -> Iterator[Record]:
        """Yields the text members, with other fields from the .json member.

        If there are no text members, yields the JSON documents.
        """
        objects = {name.lower().rpartition("/")[2].partition(".")[2]: content for name, content in self.objects}
        for name, content in self.texts:
            record = _text_record(content.removeprefix(BYTE_ORDER_MARK), objects.get("json"), reading)
            yield record._replace(problem=record.problem and f"member {_shown(name)}: {record.problem}")
        if self.texts:
            for _ in objects.keys() - {"json"}:
                yield Record(1, None, not_read=".json next to a text")
            return
        for name, content in self.objects:
            yield from _member_records(name, io.BytesIO(content), reading)


@FORMATS.register("tar")
@file_format(".tar", ".tgz", place="document")
def read_tar(stream: ByteStream, reading: Reading) -> Iterator[Record]:
    """Reads the documents in a tar archive. A text member is one document; other members may contain several.

    A text member's other fields come from the .json member with the same name up to the first dot. A member that isn't
    a document gives a record with `not_read`.
    """
    place = 0
    for record in _records(stream, reading):
        place += record.not_read is None
        yield record._replace(place=max(1, place))


def _records(stream: ByteStream, reading: Reading) -> Iterator[Record]:
    sample = _Sample(("", ""))
    try:
        with tarfile.open(fileobj=io.BufferedReader(stream), mode="r|", tarinfo=_StrictMember) as archive:
            for member in archive:
                if member.isdir():
                    continue
                found = format_by_name(member.name) if member.isreg() and not _is_hidden(member.name) else None
                if found is None:
                    yield Record(1, None, not_read=_kind_of(member))
                    continue
                folder, _, base = member.name.rpartition("/")
                name = (folder, base.partition(".")[0])
                if name != sample.name:
                    yield from sample.records(reading)
                    sample = _Sample(name)
                is_text = found == "txt" and reading.documents == "file"
                file = archive.extractfile(member)
                if inner_suffix(member.name)[1] or not (is_text or found == "json"):
                    yield from _member_records(member.name, file, reading)
                elif member.size > MAXIMUM_DOCUMENT_BYTES:
                    yield _problem(member.name, f"is larger than {MAXIMUM_DOCUMENT_BYTES:,} bytes")
                else:
                    (sample.texts if is_text else sample.objects).append((member.name, file.read()))
            yield from sample.records(reading)
    except tarfile.TarError as error:
        # The members before the damage are complete.
        yield from sample.records(reading)
        raise DamagedFileError(f"damaged tar archive ({error})") from None


def _is_hidden(name: str) -> bool:
    """Returns True for hidden files, such as those that macOS adds to archives."""
    return any(part.startswith(".") and part not in (".", "..") for part in name.split("/"))


def _kind_of(member: tarfile.TarInfo) -> str:
    if member.islnk() or member.issym():
        return "links"
    if not member.isreg():
        return "special files"
    if _is_hidden(member.name):
        return "hidden files"
    base, dot, suffix = member.name.rpartition("/")[2].rpartition(".")
    shown = _shown(suffix.lower())
    return f".{shown}" if base and dot and len(shown) <= SHOWN_SUFFIX_CHARACTERS else "without a suffix"


def _shown(name: str) -> str:
    """Escapes a member's name for printing."""
    return name.encode(errors="backslashreplace").decode() if name.isprintable() else ascii(name)[1:-1]


def _problem(name: str, problem: str) -> Record:
    return Record(1, None, f"member {_shown(name)}: {problem}")


def _member_records(name: str, file: io.IOBase, reading: Reading) -> Iterator[Record]:
    """Reads a member that contains documents. If it is damaged, yields a record with the problem."""
    with ByteStream(name, inner_suffix(name)[1], file) as stream:
        try:
            for record in FORMATS[format_by_name(name)](stream, reading):
                problem = record.problem and f"member {_shown(name)}, {record.place:,}: {record.problem}"
                yield record._replace(problem=problem)
        except DamagedFileError as error:
            problem = f"{error}; the rest of the member was not read"
            yield _problem(name, problem)._replace(problem_records=error.records)


def _text_record(text: bytes, other_fields: bytes | None, reading: Reading) -> Record:
    if reading.is_plain:
        return checked(1, text)
    try:
        fields = json.loads(other_fields or b"{}")
    except (ValueError, RecursionError) as error:
        return Record(1, None, f"invalid JSON in its .json member ({error})")
    values = (fields if isinstance(fields, dict) else {}) | {reading.text_field: text}
    return object_record(1, values, reading)
