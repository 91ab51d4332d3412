"""Finds input files, detects their formats, and splits them into parts for workers.

Documents are ordered by file path, then by location in the file. Preparation resumes at a part boundary.
"""

import collections
import fnmatch
import glob
import itertools
import os
import posixpath
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from pretrain.errors import InputError, Problems, did_you_mean
from pretrain.files import is_url, shown
from pretrain.registry import FORMATS
from pretrain.urls import file_system, fingerprint, open_file, reason_of, size_of
from pretrain_tools.preparation.documents import (
    archives,  # noqa: F401 registers its format
    containers,
    formats,
)
from pretrain_tools.preparation.documents.byte_stream import ByteStream, DamagedFileError
from pretrain_tools.preparation.documents.formats import PART_BYTES, format_by_name, inner_suffix
from pretrain_tools.preparation.documents.records import Reading, Record

EXPECTED_COMPRESSION_RATIO = 4
LARGEST_ROW_GROUP_BYTES = 64 << 20
RECORDS_PER_PART = 4096
MOST_FILES_PER_PART = 1024


class Position(NamedTuple):
    """Position to resume at: the source, its next part and, for a streamed dataset, the number of earlier rows."""

    source: int
    part: int
    rows: int = 0


BEGINNING = Position(0, 0)


@dataclass(frozen=True)
class InputFile:
    """An input file. `name` is its path relative to the common parent folder, `bytes` its size on disk."""

    path: str
    name: str
    format: str
    compression: str | None
    bytes: int

    def open(self) -> ByteStream:
        """Opens the decompressed content."""
        return ByteStream(self.path, self.compression)

    def place(self, number: int) -> str:
        """Formats a location in this file for messages, such as 'a.jsonl, line 5'."""
        return place_text(shown(self.path), self.format, number)


def place_text(path: str, format_name: str | None, number: int) -> str:
    """Formats a location in a file. format_name: None to detect it from the suffix."""
    format_name = format_name or format_by_name(path) or "dataset"
    return f"{path}, {'row' if format_name == 'dataset' else FORMATS[format_name].place} {number:,}"


def find_sources(
    patterns: Sequence[str],
    exclude: Sequence[str] = (),
    format_name: str | None = None,
    option: str = "--input",
    own_output: str | None = None,
) -> list[InputFile]:
    """Finds files by path, URL or pattern (`**` recurses), except those that match `exclude`. Sorts them by path.

    Raises InputError listing all problems.

    Args:
        option: name of the command-line option, for messages.
        own_output: folder with the command's output, whose files are skipped. Otherwise, a pattern that matches it
            would find more files when the command runs again.
    """
    problems = Problems()
    if format_name is not None and format_name not in FORMATS:
        problems.append(f"--input_format {format_name}: no such format{did_you_mean(format_name, FORMATS)}")
    paths: set[str] = set()
    for pattern in patterns:
        found = problems.attempt(files_matching, pattern)
        if found is None:
            continue
        if not found:
            remedy = "no such file; quote patterns, and use ** to search subfolders"
            if os.path.isdir(pattern):
                remedy = f"is a folder; specify its files, such as '{pattern}/**/*{_usual_suffix(pattern)}'"
            elif os.path.exists(pattern):
                remedy = "is a pipe or a device; save its content to a file"
            problems.append(f"{option} {shown(pattern)}: {remedy}")
        paths.update(found)
    if own_output is not None:
        own = os.path.join(os.path.realpath(own_output), "")
        others = {path for path in paths if is_url(path) or not os.path.realpath(path).startswith(own)}
        if paths and not others:
            problems.append(f"{option}: matches only files in --output {own_output}; use another folder")
        paths = others
    kept = _each_once([path for path in paths if not any(fnmatch.fnmatch(path, pattern) for pattern in exclude)])
    if paths and not kept:
        problems.append(f"--exclude {' '.join(exclude)}: excludes all {len(paths):,} input files")
    if len({is_url(path) for path in kept}) > 1:
        problems.append("--input: URLs and local paths cannot be mixed; write local paths as file:// URLs")
    named = zip(kept, _names_below(kept), strict=True)
    sources = [problems.attempt(_source, path, name, format_name) for path, name in named]
    counts = collections.Counter(source.name for source in sources if source)
    problems += [f"--input: two files are named {name}; remove one" for name, n in sorted(counts.items()) if n > 1]
    problems.stop_if_any()
    return sources


def _usual_suffix(folder: str) -> str:
    """Finds the most frequent suffix of the documents in a folder, such as .txt; .jsonl if there are none."""
    paths = (path for path in _matching(folder, ["**", "*"]) if format_by_name(path))
    names = [os.path.basename(path) for path in itertools.islice(paths, RECORDS_PER_PART)]
    counts = collections.Counter(name[name.lower().rindex(inner_suffix(name)[0]) :] for name in names)
    return max(sorted(counts), key=counts.get, default=".jsonl")


def files_matching(pattern: str) -> list[str]:
    """Lists the files that match a path, URL or pattern. Raises InputError if a URL can't be listed."""
    if is_url(pattern):
        return find_urls(pattern)
    path = os.path.expanduser(pattern)
    if os.path.isfile(path):  # its name may contain [ or *
        return [path]
    drive, steps = os.path.splitdrive(path)
    root = drive + os.sep if steps.startswith(os.sep) else drive
    return [path for path in _matching(root, [s for s in steps.split(os.sep) if s]) if os.path.isfile(path)]


def find_urls(pattern: str) -> list[str]:
    """Returns the files that match a URL with `*` and `**`, sorted. Raises InputError if listing fails."""
    system, path = file_system(pattern)
    try:
        if "*" not in path:
            return [pattern] if system.info(path).get("type") != "directory" else []
        found = system.glob(path, detail=True)
    except FileNotFoundError as error:
        # Over HTTP, fsspec also raises it if the server refuses or doesn't respond.
        cause = error.__cause__
        if not isinstance(cause, OSError) and getattr(cause, "status", 404) in (404, 410):
            return []
        raise InputError(
            f"--input {shown(pattern)}: cannot be reached: {reason_of(cause)}; run the same command again once the "
            "server responds, or correct the address"
        ) from None
    except Exception as error:
        raise InputError(f"--input {shown(pattern)}: cannot be listed: {reason_of(error)}") from None
    return sorted(system.unstrip_protocol(name) for name, about in found.items() if about.get("type") != "directory")


def _matching(folder: str, steps: list[str]) -> Iterator[str]:
    """Finds paths that match a pattern, given as a list of path components.

    Unlike glob, visits each folder only once, even if symbolic links are circular.
    """
    if "**" not in steps:
        yield from glob.glob(os.path.join(glob.escape(folder), *steps))
        return
    first = steps.index("**")
    starts = glob.glob(os.path.join(glob.escape(folder), *steps[:first], "")) if first else [folder]
    for below in _folders_below(starts):
        yield from _matching(below, steps[first + 1 :] or ["*"])


def _folders_below(starts: Sequence[str]) -> Iterator[str]:
    """Yields folders and all their subfolders, each only once. Visits symbolic links after real folders."""
    seen = set()
    for start in sorted(starts):
        for folder, names, _ in os.walk(start or ".", followlinks=True):
            real = os.path.realpath(folder)
            if real in seen:
                names.clear()
                continue
            seen.add(real)
            yield folder
            # Like glob, skip hidden folders.
            names[:] = [name for name in names if not name.startswith(".")]
            names.sort(key=lambda name: (os.path.islink(os.path.join(folder, name)), name))


def _each_once(paths: Collection[str]) -> list[str]:
    """Sorts paths and removes duplicates. If several paths refer to the same file, prefers its real path."""
    by_file: dict[str, str] = {}
    for path in sorted(paths):
        real = path if is_url(path) else os.path.realpath(path)
        if real not in by_file or os.path.abspath(path) == real:
            by_file[real] = path
    return sorted(by_file.values())


def _names_below(paths: Sequence[str]) -> list[str]:
    """Makes paths relative to their common parent folder, without credentials. Escapes invalid UTF-8."""
    absolute = [shown(path).replace("://", "/") if is_url(path) else shown(os.path.abspath(path)) for path in paths]
    if not absolute or len({os.path.isabs(path) for path in absolute}) > 1:
        return absolute
    parent = posixpath.commonpath([posixpath.dirname(path) for path in absolute])
    return [posixpath.relpath(path, parent) for path in absolute]


def _source(path: str, name: str, format_name: str | None) -> InputFile:
    suffix, compression = inner_suffix(path)
    found = format_name or format_by_name(path)
    if found is None:
        known = " ".join(suffix for found in FORMATS.values() for suffix in found.suffixes)
        given = suffix or "(no suffix)"
        raise InputError(
            f"{shown(path)}: unknown format {given}; use {known}, optionally with .gz or .zst, or set --input_format"
        )
    try:
        if not is_url(path):
            open_file(path).close()
        size = size_of(path)
    except OSError as error:
        raise InputError(
            f"{shown(path)}: cannot be read: {error.strerror}; make it readable, or use --exclude to skip it"
        ) from None
    source = InputFile(path, name, found, compression, size)
    if found == "json" and format_name is None and _holds_lines(source):
        source = replace(source, format="jsonl")
    return source


def _holds_lines(source: InputFile) -> bool:
    """Returns True if a .json file contains JSON Lines, as in C4 and Dolma. Reads only the beginning."""
    try:
        with source.open() as stream:
            block = next(stream.blocks, b"").removeprefix(formats.BYTE_ORDER_MARK)
    except DamagedFileError:
        return False
    first, end, _ = block.partition(b"\n")
    return bool(end) and first.startswith(b"{") and first.rstrip().endswith(b"}")


def records_of(source: InputFile, reading: Reading, stream: ByteStream | None = None, **some: int) -> Iterator[Record]:
    """Reads a file, or a part of it, such as row_group=3. If the rest is unreadable, the last record has a problem."""
    place = 0
    with stream or source.open() as stream:
        try:
            for record in FORMATS[source.format](stream, reading, **some):
                if not isinstance(record, Record):
                    raise InputError(f"format {source.format}: must yield Records, got {type(record).__name__}")
                place = record.place
                yield record
        except DamagedFileError as error:
            lost = f" ({error.records:,} records)" if error.records > 1 else ""
            problem = f"{error}; the rest of the file was not read{lost}"
            yield Record(place + 1, None, problem, problem_records=error.records)


RecordSource = Callable[[Reading], Iterable[Record]] | Sequence[Record]
"""Records, or a function that reads them."""


@dataclass(frozen=True)
class Part:
    """Part of the input, processed by a single worker. The split into parts depends only on the input."""

    after: Position
    """Position to resume at after this part."""
    input_bytes: int
    """Size on disk in bytes."""
    sources: Sequence[tuple[InputFile, RecordSource]]
    """Picklable."""

    def records(self, reading: Reading) -> Iterator[tuple[InputFile, Record]]:
        """Yields (source, record) pairs. Filters out documents whose length isn't within the limits."""
        for source, given in self.sources:
            for record in given(reading) if callable(given) else given:
                is_left_out = record.text and reading.leaves_out(record.text)
                yield source, Record(record.place, None) if is_left_out else record


@dataclass(frozen=True)
class Files:
    """Input documents in local files or at URLs."""

    sources: Sequence[InputFile]
    slice: tuple[int, int] = (0, 1)
    """(number, count): the slice to read. A part belongs to the slice in which it begins."""
    maximum_documents: None = None

    @property
    def total_bytes(self) -> int:
        """Number of bytes to read, before decompression."""
        return sum(source.bytes for source in self.sources) // self.slice[1]

    @property
    def expected_text_bytes(self) -> int:
        """Estimated number of bytes to read, after decompression."""
        return sum(map(expected_bytes, self.sources)) // self.slice[1]

    def description(self) -> list[dict[str, Any]]:
        """Returns the manifest's list of sources: name, size and fingerprint of each file."""
        return [
            {
                "path": source.name,
                "bytes": (size := size_of(source.path)),
                "fingerprint": fingerprint(source.path, size),
            }
            for source in self.sources
        ]

    def parts(self, reading: Reading, start: Position = BEGINNING) -> Iterator[Part]:
        """Yields the parts in order, beginning at `start`. Reads only large files, to split them."""
        slice, count = self.slice
        total = sum(map(expected_bytes, self.sources))
        # The last slice is open-ended.
        taken = range(total * slice // count, total * (slice + 1) // count if slice + 1 < count else sys.maxsize)
        number = start.source
        offset = sum(map(expected_bytes, self.sources[:number]))
        while number < len(self.sources) and offset < taken.stop:
            following = self.sources[number : number + MOST_FILES_PER_PART]
            group = list(itertools.takewhile(lambda source: _is_small(source, reading), following))
            if group:
                # Grouping must not depend on the number of workers, because positions must stay valid if it changes.
                sizes = itertools.accumulate(expected_bytes(source) for source in group)
                group = group[: max(1, sum(1 for size in sizes if size <= PART_BYTES))]
                number += len(group)
                if offset >= taken.start:
                    read = [(source, partial(records_of, source)) for source in group]
                    yield Part(Position(number, 0), sum(source.bytes for source in group), read)
                offset += sum(map(expected_bytes, group))
            else:
                source = self.sources[number]
                end = offset + expected_bytes(source)
                # Skip files that end before the slice. The last parts of a file may begin at its end, because reading
                # runs ahead.
                parts = _parts_of(source, number, reading) if end >= taken.start else ()
                for part in parts:
                    if offset in taken and part.after > start:
                        yield part
                    offset += part.input_bytes * compression_ratio(source)
                    if offset >= taken.stop:
                        return
                number += 1
                offset = end

    def are_whole_documents(self, reading: Reading) -> bool:
        """Returns True if each file is a single plain-text document."""
        return reading.documents == "file" and all(source.format == "txt" for source in self.sources)

    def texts(self, reading: Reading) -> Iterator[bytes]:
        """Yields the text of all usable documents in all slices."""
        parts = Files(self.sources).parts(reading)
        return (record.text for part in parts for _, record in part.records(reading) if record.text)


def compression_ratio(source: InputFile) -> int:
    """Estimates the ratio of a file's decompressed size to its size on disk."""
    return EXPECTED_COMPRESSION_RATIO if source.compression else 1


def expected_bytes(source: InputFile) -> int:
    """Estimates a file's decompressed size."""
    return source.bytes * compression_ratio(source)


def _is_small(source: InputFile, reading: Reading) -> bool:
    """Returns True if a file doesn't have to be split, because it is small or a single document."""
    return expected_bytes(source) <= PART_BYTES or (source.format == "txt" and reading.documents == "file")


def _parts_of(source: InputFile, number: int, reading: Reading) -> Iterator[Part]:
    """Splits a large file into parts."""
    pieces = _record_pieces(source, reading)
    if source.format == "jsonl" or (source.format == "txt" and reading.documents == "line"):
        pieces = _line_pieces(source)
    elif source.format == "parquet" and not source.compression:
        groups = containers.parquet_row_group_bytes(source.path)
        if groups and max(groups) <= LARGEST_ROW_GROUP_BYTES:
            pieces = _row_groups(source, groups)
    before = 0
    for part, (end, records) in enumerate(pieces, 1):
        yield Part(Position(number, part), end - before, [(source, records)])
        before = end


def _line_pieces(source: InputFile) -> Iterator[tuple[int, RecordSource]]:
    """Yields (end on disk, how to read the records) of consecutive pieces of a file, like the next two functions."""
    line = 1
    content = b""
    with source.open() as stream:
        try:
            for line, content in formats.whole_lines(stream):
                yield stream.consumed, partial(formats.records_of_lines, line, content, source.format)
        except DamagedFileError as error:
            problem = f"{error}; the rest of the file was not read"
            yield source.bytes, [Record(line + content.count(b"\n"), None, problem)]


def _row_groups(source: InputFile, groups: list[int]) -> Iterator[tuple[int, RecordSource]]:
    total = sum(groups) or 1
    ends = itertools.accumulate(source.bytes * size // total for size in groups)
    for row_group, end in enumerate(ends):
        yield end, partial(records_of, source, row_group=row_group)


def _record_pieces(source: InputFile, reading: Reading) -> Iterator[tuple[int, RecordSource]]:
    stream = source.open()
    size = 0
    found: list[Record] = []
    for record in records_of(source, reading, stream):
        found.append(record)
        size += len(record.text or b"")
        if size >= PART_BYTES or len(found) >= RECORDS_PER_PART:
            yield stream.consumed, found
            found = []
            size = 0
    yield source.bytes, found
