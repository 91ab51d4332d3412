"""Finds the files that match train.py --text, and summarizes the files that it skips."""

import codecs
import collections
import fnmatch
import glob
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pretrain.errors import InputError, Problems
from pretrain.files import is_url, shown
from pretrain_tools.preparation.documents.byte_stream import DamagedFileError
from pretrain_tools.preparation.documents.sources import (
    FORMATS,
    InputFile,
    files_matching,
    find_sources,
    format_by_name,
)

MOST_SHOWN = 3
"""Maximum number of files that a message lists per reason."""
MOST_EXCLUDED = 2000
"""Maximum number of files excluded by name on prepare_data.py's command line."""


class LeftOut(NamedTuple):
    """A skipped file."""

    path: str
    reason: str
    """Reason for skipping the file. Messages group files by the part before any parenthesis."""
    remedy: str = ""


@dataclass(frozen=True)
class TextFiles:
    """The files to train on, and prepare_data.py's options for them."""

    sources: list[InputFile]
    inputs: list[str]
    exclude: list[str]
    left_out: str
    """'3 of 175 files were skipped: ...', or ''."""

    @property
    def arguments(self) -> list[str]:
        """Arguments for prepare_data.py."""
        return ["--input", *self.inputs, *(["--exclude", *self.exclude] if self.exclude else [])]


class Found(NamedTuple):
    """The files found for one argument: a folder, a pattern or a file."""

    inputs: list[str]
    taken: list[str]
    left_out: list[LeftOut]


def find_text_files(given: Sequence[str], exclude: Sequence[str] = ()) -> TextFiles:
    """Finds the text files in the given folders and patterns, except those that match `exclude`.

    Raises InputError if a named file isn't text, a folder or pattern contains no text, or an exclusion has no match.
    """
    problems = Problems()
    # Excluding a folder excludes everything in it, because fnmatch's * also matches '/'.
    rules = {word: f"{glob.escape(word.rstrip('/'))}/*" if os.path.isdir(word) else word for word in exclude}
    matches: dict[str, list[str]] = {}
    for word in given:
        if found := problems.attempt(files_of, word):
            matches[word] = found
    paths = [path for found in matches.values() for path in found]
    if paths:
        unmatched = [word for word, rule in rules.items() if not fnmatch.filter(paths, rule)]
        problems += [f"--exclude {shlex.quote(word)}: matches none of the files" for word in sorted(unmatched)]
    kept = {word: [p for p in found if not matches_any(p, rules.values())] for word, found in matches.items()}
    searches = {word: sorted_out(word, paths) for word, paths in kept.items()}
    problems += no_text_problems(searches)
    problems.stop_if_any()
    inputs = list(dict.fromkeys(pattern for search in searches.values() for pattern in search.inputs))
    taken = {path for search in searches.values() for path in search.taken}
    # One argument may name a file that another argument skips.
    left_out = {each.path: each for search in searches.values() for each in search.left_out if each.path not in taken}
    said = left_out_text(left_out.values(), len(taken))
    # Exclude skipped files by name, so that the printed command reads the same files.
    others = {path for pattern in inputs for path in files_matching(pattern)} - taken
    excluded = list(dict.fromkeys(rules.values()))
    excluded += [glob.escape(path) for path in sorted(others) if not matches_any(path, excluded)]
    if len(excluded) > MOST_EXCLUDED:
        raise InputError(f"{said}; convert them, or exclude their folders with --exclude")
    return TextFiles(find_sources(inputs, excluded, option="--text"), inputs, excluded, said)


def pattern_of(word: str) -> str:
    """Returns the pattern for an argument's files.

    Raises InputError for a folder that contains the current folder, where the command writes its own files.
    """
    path = os.path.expanduser(word)
    if is_url(word) or not os.path.exists(path):
        return word
    if not os.path.isdir(path):
        return glob.escape(path)
    if Path.cwd().resolve().is_relative_to(Path(path).resolve()):
        raise InputError(
            f"--text {shown(word)}: contains the folders that this command writes to (data, runs, ...); put the text "
            "in a separate folder, or use patterns such as '*.txt'"
        )
    return f"{glob.escape(path.rstrip('/'))}/**/*"


def files_of(word: str) -> list[str]:
    """Lists an argument's files. Raises InputError if there are none."""
    found = files_matching(pattern_of(word))
    if not found:
        raise InputError(f"--text {shown(word)}: {why_nothing(word)}")
    return found


def sorted_out(word: str, paths: Sequence[str]) -> Found:
    """Separates text from other files. Uses data files (.json, .parquet, ...) only in folders without plain text."""
    problems = {path: problem for path in paths if (problem := why_unread(path))}
    readable = [path for path in paths if path not in problems]
    pattern = pattern_of(word)
    is_any_file = os.path.basename(pattern) == "*"
    if is_any_file and any(format_by_name(path) == "txt" for path in readable):
        for path in readable:
            if format_by_name(path) != "txt":
                problems[path] = LeftOut(path, "ignored, because data files next to text must be named explicitly")
    taken = [path for path in readable if path not in problems]
    # In folders, select files by suffix, so that other files needn't be excluded one by one.
    suffixes = sorted({written_suffix(path) for path in taken}) if is_any_file else [""]
    return Found([pattern + suffix for suffix in suffixes], taken, list(problems.values()))


def why_nothing(word: str) -> str:
    if os.path.isdir(word):
        return "the folder contains no files"
    if not is_url(word) and os.path.exists(word):
        return "is a pipe or a device; write its contents to a file"
    return "no such file; quote patterns, and use ** to search subfolders"


def matches_any(path: str, rules: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(path, rule) for rule in rules)


def written_suffix(path: str) -> str:
    """Returns the suffix that determines the format: '.TXT' for 'a.TXT', '.txt.gz' for 'a.b.txt.gz'."""
    stem, last = os.path.splitext(path)
    inner = os.path.splitext(stem)[1]
    is_compressed = format_by_name("a" + last) is None and format_by_name("a" + inner) is not None
    return inner + last if is_compressed else last


def why_unread(path: str) -> LeftOut | None:
    """Returns the reason why a file is unusable, or None. Reads plain-text files completely."""
    found = format_by_name(path)
    if found is None:
        suffix = os.path.splitext(shown(path))[1].lower() or "without a suffix"
        known = " ".join(FORMATS["txt"].suffixes)
        return LeftOut(path, f"of unknown format {suffix}", f"if it is text, rename it to end with .txt ({known})")
    if found != "txt":
        return None
    try:
        return encoding_problem(path)
    except DamagedFileError as error:
        return LeftOut(path, str(error))
    except OSError as error:
        return LeftOut(path, f"unreadable: {error.strerror}", "make it readable")


def encoding_problem(path: str) -> LeftOut | None:
    """Returns the problem if a file isn't UTF-8 text, else None. Raises DamagedFileError and OSError."""
    source = find_sources([path if is_url(path) else glob.escape(path)])[0]
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0
    try:
        with source.open() as stream:
            for block in stream.blocks():
                read += len(block)
                if b"\0" in block:
                    return LeftOut(path, "not text (it contains NUL bytes)")
                decoder.decode(block)
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        # If a character is split between two blocks, the decoder prepends its start to the second block.
        place = read - len(error.object) + error.start + 1
        where = f"byte {place:,} is 0x{error.object[error.start]:02x}"
        remedy = f"if it is text, convert it: iconv -f cp1252 -t utf-8 {quoted(path)} > NEW.txt"
        return LeftOut(path, f"not UTF-8 text ({where})", remedy)
    return None


def quoted(path: str) -> str:
    return shlex.quote(shown(path))


def no_text_problems(searches: dict[str, Found]) -> list[str]:
    """Lists problems with folders and patterns without text, and with named files that aren't text."""
    problems = []
    named = []
    for word, found in searches.items():
        if found.taken:
            continue
        if is_url(word) or os.path.isfile(os.path.expanduser(word)):
            named += found.left_out
        else:
            said = left_out_text(found.left_out, 0) or "--exclude matches all of its files"
            problems.append(f"--text {shown(word)}: contains no readable text: {said}")
    if len(named) > MOST_SHOWN:  # the shell expanded a pattern
        taken = sum(len(found.taken) for found in searches.values())
        said = left_out_text(named, taken, "are not usable text")
        return [*problems, f"--text: {said}; to skip them, pass the folder or quote the pattern"]
    return problems + [f"{quoted(each.path)}: is {each.reason}; {each.remedy or 'leave it out'}" for each in named]


def left_out_text(left_out: Iterable[LeftOut], taken: int, how: str = "were skipped") -> str:
    """Returns '3 of 175 files were skipped: 2 of unknown format .pdf: a.pdf, b.pdf; 1 not text: c.txt', or ''."""
    by_reason: dict[str, list[LeftOut]] = collections.defaultdict(list)
    for each in sorted(left_out):  # folder listings are unordered
        by_reason[each.reason.split(" (")[0]].append(each)
    if not by_reason:
        return ""
    parts = []
    for reason, files in by_reason.items():
        more = [f"{len(files) - MOST_SHOWN:,} more"] if len(files) > MOST_SHOWN else []
        parts.append(f"{len(files):,} {reason}: {', '.join([*(quoted(f.path) for f in files[:MOST_SHOWN]), *more])}")
    count = sum(map(len, by_reason.values()))
    return f"{count:,} of {taken + count:,} files {how}: {'; '.join(parts)}"
