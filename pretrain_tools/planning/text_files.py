"""Finds the files that match train.py --text."""

import codecs
import fnmatch
import glob
import os
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pretrain.errors import InputError, Problems
from pretrain.files import is_url, shown
from pretrain.units import counted
from pretrain_tools.preparation.documents.byte_stream import DamagedFileError
from pretrain_tools.preparation.documents.formats import inner_suffix
from pretrain_tools.preparation.documents.sources import InputFile, files_matching, find_sources, format_by_name

MOST_SHOWN = 3
"""Maximum number of files that a message lists."""


@dataclass(frozen=True)
class TextFiles:
    """The files to train on, and prepare_data.py's options for them."""

    sources: list[InputFile]
    inputs: list[str]
    exclude: list[str]
    left_out: str
    """'skipped 3 files in other formats: ...', or ''."""

    @property
    def arguments(self) -> list[str]:
        """Arguments for prepare_data.py."""
        return ["--input", *self.inputs, *(["--exclude", *self.exclude] if self.exclude else [])]


class Found(NamedTuple):
    """The files found for one argument: a folder, a pattern or a file."""

    inputs: list[str]
    """Patterns for prepare_data.py."""
    paths: list[str]
    """All matching files, including excluded ones."""
    skipped: set[str]


def find_text_files(given: Sequence[str], exclude: Sequence[str] = ()) -> TextFiles:
    """Finds the text files in the given folders and patterns, except those that match `exclude`.

    Raises InputError if a file isn't text, a folder or pattern contains no text, or an exclusion has no match.
    """
    problems = Problems()
    # Excluding a folder excludes everything in it, because fnmatch's * also matches '/'.
    rules = {word: f"{glob.escape(word.rstrip('/'))}/*" if os.path.isdir(word) else word for word in exclude}
    excluded = list(rules.values())
    searches = [found for word in given if (found := problems.attempt(search, word, excluded))]
    paths = [path for found in searches for path in found.paths]
    if paths:
        unmatched = [word for word, rule in rules.items() if not fnmatch.filter(paths, rule)]
        problems += [f"--exclude {shlex.quote(word)}: matches none of the files" for word in sorted(unmatched)]
    inputs = [pattern for found in searches for pattern in found.inputs]
    sources = problems.attempt(find_sources, inputs, excluded, option="--text") or []
    unusable = {source.path: problem for source in sources if (problem := why_not_text(source))}
    if unusable:
        first, problem = next(iter(unusable.items()))
        problems.append(
            f"--text: {len(unusable):,} of {len(sources):,} files aren't UTF-8 text: {listed(unusable)} ({problem}); "
            f"convert them, for example with iconv -f cp1252 -t utf-8 {shlex.quote(shown(first))} > NEW.txt, or skip "
            "them with --exclude"
        )
    problems.stop_if_any()
    skipped = set().union(*(found.skipped for found in searches)) - {source.path for source in sources}
    count = counted(len(skipped), "file")
    left_out = f"skipped {count} in other formats: {listed(skipped)}" if skipped else ""
    return TextFiles(sources, inputs, excluded, left_out)


def search(word: str, excluded: Sequence[str]) -> Found:
    """Finds an argument's files. In folders, uses data files (.json, .parquet, ...) only if there is no plain text.

    Raises InputError for an empty folder, and for a folder that contains the current folder, where the command writes
    its own files.
    """
    path = os.path.expanduser(word)
    if is_url(word) or not os.path.isdir(path):
        return Found([word], files_matching(word), set())
    if Path.cwd().resolve().is_relative_to(Path(path).resolve()):
        raise InputError(
            f"--text {shown(word)}: contains the folders that this command writes to (data, runs, ...); put the text "
            "in a separate folder, or use patterns such as '*.txt'"
        )
    pattern = f"{glob.escape(path.rstrip('/'))}/**/*"
    paths = files_matching(pattern)
    if not paths:
        raise InputError(f"--text {shown(word)}: the folder contains no files")
    kept = [path for path in paths if not any(fnmatch.fnmatch(path, rule) for rule in excluded)]
    taken = [path for path in kept if format_by_name(path) == "txt"] or list(filter(format_by_name, kept))
    # Select files by suffix, so that other files needn't be excluded one by one.
    suffixes = sorted(set(map(written_suffix, taken))) or [""]
    return Found([pattern + suffix for suffix in suffixes], paths, set(kept) - set(taken))


def written_suffix(path: str) -> str:
    """Returns the suffix that determines the format: '.TXT' for 'a.TXT', '.txt.gz' for 'a.b.txt.gz'."""
    stem, last = os.path.splitext(path)
    _, compression = inner_suffix(path)
    return os.path.splitext(stem)[1] + last if compression else last


def why_not_text(source: InputFile) -> str | None:
    """Returns the reason why a plain-text file is unusable, or None. Reads it completely."""
    if source.format != "txt":
        return None
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with source.open() as stream:
            for block in stream.blocks:
                if b"\0" in block:
                    return "it contains NUL bytes"
                decoder.decode(block)
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        return f"0x{error.object[error.start]:02x} can't be decoded"
    except DamagedFileError as error:
        return str(error)
    return None


def listed(paths: Collection[str]) -> str:
    """Returns 'a.txt, b.txt, c.txt, 2 more'."""
    names = [shlex.quote(shown(path)) for path in sorted(paths)]
    more = [f"{len(names) - MOST_SHOWN:,} more"] if len(names) > MOST_SHOWN else []
    return ", ".join([*names[:MOST_SHOWN], *more])
