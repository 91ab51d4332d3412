"""Finds the files that train.py --text trains on: the text in folders and patterns, and one line about the rest."""

import codecs
import collections
import fnmatch
import glob
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pretrain.errors import InputError, Problems
from pretrain.urls import is_url, shown
from pretrain_tools.preparation.documents.byte_stream import DamagedFileError
from pretrain_tools.preparation.documents.sources import (
    FORMATS,
    InputFile,
    files_matching,
    find_sources,
    format_by_name,
)

CONTROL_CHARACTERS = bytes(set(range(32)) - set(b"\b\t\n\f\r\x1a\x1b"))
"""Control characters that no text has, in any encoding."""
UTF_16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
BEGINNING_BYTES = 1 << 16
MOST_SHOWN = 3
"""Files of a kind that a message names, and suffixes."""
MOST_EXCLUDED = 2000
"""Files left out by name, each on the command line of prepare_data.py."""


class LeftOut(NamedTuple):
    """A file that is left out, and the reason."""

    path: str
    reason: str
    is_counted_by_suffix: bool = False
    remedy: str = ""


@dataclass(frozen=True)
class TextFiles:
    """The files to train on, and the options with which prepare_data.py reads them."""

    sources: list[InputFile]
    inputs: list[str]
    exclude: list[str]
    left_out: str
    """'3 of 175 files left out: ...'; '' if none is."""

    @property
    def arguments(self) -> list[str]:
        """Arguments of prepare_data.py."""
        return ["--input", *self.inputs, *(["--exclude", *self.exclude] if self.exclude else [])]


@dataclass
class TextSearch:
    """The files of one word of the command line: a folder, a pattern or a file."""

    word: str
    inputs: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    @property
    def is_one_file(self) -> bool:
        return os.path.isfile(self.word) or not (os.path.isdir(self.word) or any(sign in self.word for sign in "*?["))


def find_text_files(given: Sequence[str], exclude: Sequence[str] = ()) -> TextFiles:
    """Finds the text in the folders, of the patterns and in the files given, without what `exclude` matches.

    Raises InputError for a file that is named and is not text, for a folder or pattern without text, and for an
    --exclude that matches nothing.
    """
    problems = Problems()
    searches = []
    unmatched = set(exclude)
    # A folder is left out with everything in it.
    # fnmatch's * also matches '/', so the rule holds for all levels below.
    rules = {word: f"{glob.escape(word.rstrip('/'))}/*" if os.path.isdir(word) else word for word in exclude}
    for word in given:
        search = problems.attempt(search_for, word, rules, unmatched)
        if search:
            searches.append(search)
    problems += no_text_problems(searches)
    if searches:
        problems += [f"--exclude {shlex.quote(word)}: matches none of the files" for word in sorted(unmatched)]
    problems.stop_if_any()
    inputs = list(dict.fromkeys(pattern for search in searches for pattern in search.inputs))
    taken = {path for search in searches for path in search.taken}
    # A file that one word leaves out may be named by another.
    left_out = {each.path: each for search in searches for each in search.left_out if each.path not in taken}
    excluded = list(dict.fromkeys(rules.values()))
    others = {path for pattern in inputs for path in files_matching(pattern)} - taken
    # Left-out files that the patterns match are excluded by name, so that the shown command reads the same files.
    excluded += [glob.escape(path) for path in sorted(others) if not matches_any(path, excluded)]
    if len(excluded) > MOST_EXCLUDED:
        raise InputError(f"{left_out_text(left_out.values(), len(taken))}; convert them, or --exclude their folders")
    sources = find_sources(inputs, excluded, option="--text")
    return TextFiles(sources, inputs, excluded, left_out_text(left_out.values(), len(taken)))


def search_for(word: str, rules: dict[str, str], unmatched: set[str]) -> TextSearch:
    """Looks at the files that a word stands for; removes from `unmatched` the keys of the rules that match one.

    Suffixes count in any case. Data files (.json, .parquet ...) are taken from a folder that holds no plain text.

    Raises InputError where there is no file.
    """
    search = TextSearch(word)
    pattern, suffix = pattern_and_suffix(word)
    found = files_matching(pattern)
    beside = [path for path in found if suffix and written_suffix(path).lower() != suffix]
    found = [path for path in found if not suffix or written_suffix(path).lower() == suffix]
    if not found:
        raise InputError(f"--text {shown(word)}: {why_nothing(word)}")
    for name, rule in rules.items():
        if fnmatch.filter(found, rule):
            unmatched.discard(name)
    found = [path for path in found if not matches_any(path, rules.values())]
    if not found:
        raise InputError(f"--exclude {shlex.join(rules)}: leaves none of the files of --text {shown(word)}")
    problems = {path: problem for path in found if (problem := why_unread(path))}
    readable = [path for path in found if path not in problems]
    is_any_file = suffix is None and os.path.basename(pattern) == "*"
    if is_any_file and any(format_by_name(path) == "txt" for path in readable):
        data = [path for path in readable if format_by_name(path) != "txt"]
        problems.update({path: LeftOut(path, "data beside text; name them to take them", True) for path in data})
    search.taken = [path for path in readable if path not in problems]
    search.left_out = [problems[path] for path in found if path in problems]
    search.left_out += [LeftOut(path, "not named", True) for path in beside if format_by_name(path) == "txt"]
    by_suffix = suffix is not None or is_any_file
    suffixes = sorted({written_suffix(path) for path in search.taken})
    search.inputs = [pattern + each for each in suffixes] if by_suffix else [pattern]
    return search


def pattern_and_suffix(word: str) -> tuple[str, str | None]:
    """Returns (pattern that finds the files, suffix that they must have in any case).

    'mine' -> ('mine/**/*', None) where it is a folder; 'mine/*.txt' -> ('mine/*', '.txt').

    Raises InputError for a folder that holds the current one, and so what the command itself writes.
    """
    if is_url(word):
        return word, None
    expanded = os.path.expanduser(word)
    if os.path.isfile(expanded):
        return glob.escape(expanded), None
    if os.path.isdir(expanded):
        if Path.cwd().resolve().is_relative_to(Path(expanded).resolve()):
            raise InputError(
                f"--text {shown(word)}: holds the folders that this command writes (data, runs, ...); put the text "
                "into a folder of its own, or name patterns such as '*.txt'"
            )
        return f"{glob.escape(expanded.rstrip('/'))}/**/*", None
    folder, last = os.path.split(expanded)
    if last == "**":
        return os.path.join(expanded, "*"), None
    if last == "*.*":
        return os.path.join(folder, "*"), None
    if last.startswith("*.") and format_by_name(last) and not set(last[1:]) & set("*?["):
        return os.path.join(folder, "*"), last[1:].lower()
    return expanded, None


def why_nothing(word: str) -> str:
    if os.path.isdir(word):
        return "is a folder without files"
    if not is_url(word) and os.path.exists(word):
        return "is a pipe or a device; write its content into a file"
    return "no such file; quote patterns, ** looks into folders"


def matches_any(path: str, rules: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(path, rule) for rule in rules)


def written_suffix(path: str) -> str:
    """'.TXT' of 'a.TXT', '.txt.gz' of 'a.b.txt.gz': as far as it tells the format."""
    stem, last = os.path.splitext(path)
    inner = os.path.splitext(stem)[1]
    is_compressed = format_by_name("a" + last) is None and format_by_name("a" + inner) is not None
    return inner + last if is_compressed else last


def why_unread(path: str) -> LeftOut | None:
    """The reason why a file cannot be trained on, if there is one; plain text is read to its end."""
    found = format_by_name(path)
    if found is None:
        known = " ".join(FORMATS["txt"].suffixes)
        return LeftOut(path, "unknown format", True, f"if it is text, rename it to end with .txt ({known})")
    if found != "txt":
        return None
    try:
        return encoding_problem(path)
    except DamagedFileError as error:
        return LeftOut(path, str(error))
    except OSError as error:
        return LeftOut(path, f"cannot be read: {error.strerror}", remedy="make it readable")


def encoding_problem(path: str) -> LeftOut | None:
    """The problem of a file that is not text in UTF-8. Raises DamagedFileError and OSError."""
    source = find_sources([path if is_url(path) else glob.escape(path)])[0]
    decoder = codecs.getincrementaldecoder("utf-8")()
    beginning = b""
    position = 0
    with source.open() as stream:
        for block in stream.blocks():
            beginning = beginning or block[:BEGINNING_BYTES]
            # UTF-16 has NUL bytes too; the byte-order mark tells it from binary files below.
            if b"\0" in block:
                break
            # Bytes of a character that the last block cut; error.start counts from them.
            held = len(decoder.getstate()[0])
            try:
                decoder.decode(block)
            except UnicodeDecodeError as error:
                at = position - held + error.start
                return another_encoding(path, beginning, f"byte 0x{error.object[error.start]:02x} at {at + 1:,}")
            position += len(block)
        else:
            held, _ = decoder.getstate()
            return another_encoding(path, beginning, f"it ends with byte 0x{held[0]:02x}") if held else None
    if beginning.startswith(UTF_16_MARKS):
        return another_encoding(path, beginning, "it is UTF-16")
    return LeftOut(path, "not text (it has NUL bytes)")


def another_encoding(path: str, beginning: bytes, where: str) -> LeftOut:
    """A file that is binary, or else text in an encoding to convert from."""
    encoding = "utf-16" if beginning.startswith(UTF_16_MARKS) else "cp1252"
    without = beginning.translate(None, CONTROL_CHARACTERS)
    # Any bytes are valid cp1252: control characters tell binary files from text.
    if encoding == "cp1252" and (beginning.startswith(b"%PDF-") or len(without) < len(beginning)):
        return LeftOut(path, "not text (binary)")
    stem, suffix = os.path.splitext(path)
    remedy = ""
    if not is_url(path) and suffix == written_suffix(path):
        converted = shlex.quote(shown(f"{stem}.utf8{suffix}"))
        command = f"iconv -f {encoding} -t utf-8 {quoted(path)} > {converted}"
        remedy = f"convert it, if it is in {encoding}: {command}"
    return LeftOut(path, f"not text in UTF-8 ({where})", remedy=remedy)


def quoted(path: str) -> str:
    return shlex.quote(shown(path))


def no_text_problems(searches: Sequence[TextSearch]) -> list[str]:
    """The problems of folders and patterns without text, and of files that are named and no text."""
    problems = []
    named = []
    for search in searches:
        if search.is_one_file and not search.taken:
            named += search.left_out
        elif not search.taken:
            problems.append(
                f"--text {shown(search.word)}: has no text that can be read: {left_out_text(search.left_out, 0)}"
            )
    if len(named) > MOST_SHOWN:
        taken = sum(len(search.taken) for search in searches)
        said = left_out_text(named, taken, "no text")
        return [*problems, f"--text: {said}; name the folder, or quote the pattern, and they are left out"]
    for each in named:
        what = f"{each.reason} {suffix_in_words(each.path)}" if each.is_counted_by_suffix else f"is {each.reason}"
        problems.append(f"{quoted(each.path)}: {what}; {each.remedy or 'leave it out'}")
    return problems


def left_out_text(left_out: Iterable[LeftOut], taken: int, how: str = "left out") -> str:
    """'3 of 175 files left out: 2 .pdf (unknown format), mine/a.txt (not text)'; '' if none is."""
    by_reason: dict[str, list[LeftOut]] = collections.defaultdict(list)
    for each in left_out:
        by_reason[each.reason.split(" (")[0]].append(each)
    if not by_reason:
        return ""
    parts = []
    for reason, files in by_reason.items():
        if files[0].is_counted_by_suffix:
            suffixes = collections.Counter(suffix_in_words(each.path) for each in files).most_common()
            names = [f"{count:,} {suffix}" for suffix, count in suffixes]
        else:
            names = [quoted(each.path) for each in files]
        more = [f"{len(names) - MOST_SHOWN:,} more"] if len(names) > MOST_SHOWN else []
        parts.append(f"{', '.join([*names[:MOST_SHOWN], *more])} ({reason})")
    count = sum(map(len, by_reason.values()))
    remedy = next((each.remedy for files in by_reason.values() for each in files if "iconv" in each.remedy), "")
    said = f"{count:,} of {taken + count:,} files {how}: {'; '.join(parts)}"
    return f"{said}; {remedy.replace('it,', 'one,', 1)}" if remedy else said


def suffix_in_words(path: str) -> str:
    return os.path.splitext(shown(path))[1].lower() or "without a suffix"
