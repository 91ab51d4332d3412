"""Reads documents from datasets on the Hub or in local folders, with or without streaming."""

import difflib
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pretrain.errors import InputError, one_line
from pretrain_tools.preparation.documents.byte_stream import DamagedFileError
from pretrain_tools.preparation.documents.containers import table_records
from pretrain_tools.preparation.documents.records import Reading, Record
from pretrain_tools.preparation.documents.sources import InputFile, Part, Position

ROWS_PER_PART = 1000
ROWS_IN_FINGERPRINT = 64
ARTICLE_HEADING = re.compile(rb"\s= [^=].* =\s*")
"""Matches the first line of a WikiText article (' = Title = '), but not a section heading (' = = Section = = ')."""


@dataclass(frozen=True)
class Preset:
    """A Hub dataset. `streams` is True for large datasets, which are streamed by default.

    If `document_start` is set, each row is a line, and a matching line starts a document. Otherwise, each row is a
    document.
    """

    path: str
    subset: str | None = None
    streams: bool = False
    document_start: re.Pattern[bytes] | None = None


FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
SMOLLM_CORPUS = "HuggingFaceTB/smollm-corpus"
PRESETS = {
    "wikitext-2": Preset("Salesforce/wikitext", "wikitext-2-raw-v1", document_start=ARTICLE_HEADING),
    "wikitext-103": Preset("Salesforce/wikitext", "wikitext-103-raw-v1", document_start=ARTICLE_HEADING),
    "tinystories": Preset("roneneldan/TinyStories"),
    "openwebtext": Preset("Skylion007/openwebtext", "plain_text"),
    "wikipedia": Preset("wikimedia/wikipedia", "20231101.en"),
    "fineweb-edu": Preset(FINEWEB_EDU, "default", streams=True),
    "fineweb-edu-10bt": Preset(FINEWEB_EDU, "sample-10BT", streams=True),
    "fineweb-edu-100bt": Preset(FINEWEB_EDU, "sample-100BT", streams=True),
    "fineweb-edu-350bt": Preset(FINEWEB_EDU, "sample-350BT", streams=True),
    "cosmopedia-v2": Preset(SMOLLM_CORPUS, "cosmopedia-v2", streams=True),
    "fineweb-edu-dedup": Preset(SMOLLM_CORPUS, "fineweb-edu-dedup", streams=True),
    "smollm-corpus": Preset(SMOLLM_CORPUS, streams=True),
    "pile": Preset("monology/pile-uncopyrighted", streams=True),
    "pile-deduplicated": Preset("EleutherAI/the_pile_deduplicated", streams=True),
}


@dataclass(frozen=True)
class HubDataset:
    """A split of a dataset.

    At most one of `maximum_rows` and `maximum_documents` is set: the latter if documents are joined from rows.
    `revision` is the commit of the Hub repository, if known.
    """

    rows_of: Any
    name: str
    subset: str | None
    split: str
    maximum_rows: int | None
    maximum_documents: int | None
    document_start: re.Pattern[bytes] | None = None
    revision: str | None = None

    @property
    def rows(self) -> int | None:
        """Number of rows; None for a stream."""
        return getattr(self.rows_of, "num_rows", None)

    @property
    def total_bytes(self) -> int | None:
        """Size in memory of the rows to read, in bytes; None for a stream."""
        if self.rows is None:
            return None
        rows = min(self.rows, self.maximum_rows or self.rows)
        return self.rows_of.data.nbytes * rows // max(1, self.rows)

    expected_text_bytes = total_bytes

    @cached_property
    def source_names(self) -> list[str]:
        """Names of the sources: the dataset itself, or each file of a streamed dataset."""
        # A document joined from lines may continue in the next file, so treat the dataset as a single source.
        files = self.rows_of.num_shards if self.rows is None and self.document_start is None else 1
        return [self.name] if files == 1 else [f"{self.name}/{self.split}/{number:05d}" for number in range(files)]

    def description(self) -> list[dict[str, Any]]:
        """Returns the manifest's list of sources. The fingerprint is the commit or a hash of some rows."""
        asked = {"subset": self.subset, "split": self.split, "examples": self.maximum_rows or self.maximum_documents}
        if self.document_start is not None:
            asked["document_start"] = self.document_start.pattern.decode()
        asked |= {"rows": self.rows, "fingerprint": self.revision if self.rows is None else self._fingerprint()}
        return [{"path": name, **asked} for name in self.source_names]

    def _fingerprint(self) -> str:
        digest = hashlib.sha256(str(self.rows).encode())
        for start in sorted({0, self.rows // 2, max(0, self.rows - ROWS_IN_FINGERPRINT)}):
            digest.update(repr(self.rows_of[start : start + ROWS_IN_FINGERPRINT].to_pydict()).encode())
        return digest.hexdigest()

    def parts(self, reading: Reading, start: Position) -> Iterator[Part]:
        """Yields the documents in order, in parts of ROWS_PER_PART rows.

        Reads a stream file by file, so that finished files can be skipped when resuming.
        """
        rows_before = start.rows
        for number in range(start.source, len(self.source_names)):
            first = start.part if number == start.source else 0
            if self.document_start is None:
                parts = self._records(number, first, rows_before, reading)
            else:
                # A document may begin in an earlier part, so read all parts again.
                joined = joined_documents(self._records(number, 0, 0, reading), self.document_start)
                parts = itertools.islice(joined, first, None)
            name = self.source_names[number]
            source = InputFile(name, name, "dataset", None, 0)
            for part, (found, input_bytes) in enumerate(parts, first + 1):
                rows_before += len(found)
                yield Part(Position(number, part, rows_before), input_bytes, [(source, found)])

    def _records(
        self, file: int, first: int, rows_before: int, reading: Reading
    ) -> Iterator[tuple[list[Record], int]]:
        """Yields (records, bytes) for each part of a file, starting at `first`. rows_before: number of earlier rows.

        Raises InputError if a field is missing.
        """
        place = first * ROWS_PER_PART
        rows = self.rows_of
        files = len(self.source_names)
        if files > 1:
            rows = rows.shard(num_shards=files, index=file, contiguous=True)
        if self.maximum_rows is not None:
            # `take` is applied before `skip`, so add the rows of this file that will be skipped.
            rows = rows.take(self.maximum_rows - rows_before + place)
        for table in rows.skip(place).iter(batch_size=ROWS_PER_PART):
            try:
                records = list(table_records(table, reading, place))
            except DamagedFileError as error:
                raise InputError(f"--dataset {self.name}: {error}; set the field with --text_field") from None
            place += table.num_rows
            yield records, table.nbytes


def joined_documents(
    tables: Iterable[tuple[list[Record], int]], start: re.Pattern[bytes]
) -> Iterator[tuple[list[Record], int]]:
    """Joins rows, which contain one line each, into documents. Yields (documents that end in it, bytes) per table.

    A row that matches `start` starts a document. The document's place is its first row.
    """
    lines: list[Record] = []
    for records, input_bytes in tables:
        found = []
        for record in records:
            if record.problem is not None:
                found.append(record)
            elif record.text:
                if start.fullmatch(record.text):
                    found += _document(lines)
                    lines = []
                lines.append(record)
        yield found, input_bytes
    yield _document(lines), 0


def _document(lines: list[Record]) -> list[Record]:
    text = b"".join(line.text for line in lines)
    return [Record(lines[0].place, text)] if text.strip() else []


def open_dataset(name_and_limit: str, subset: str | None, split: str, streaming: bool | None) -> HubDataset:
    """Opens NAME or NAME:N (at most N examples): a preset, Hub dataset, folder of data files or saved dataset.

    If `subset` or `streaming` is None, uses the preset's value or the default. Raises InputError if loading fails.
    """
    match = re.fullmatch(r"(.+?)(?::([0-9]+))?", name_and_limit)
    name = match[1]
    limit = int(match[2]) if match[2] else None
    if limit == 0:
        raise InputError(f"--dataset {name_and_limit}: the limit must be at least 1; omit it to read all examples")
    preset = find_preset(name) or Preset(name)
    subset = preset.subset if subset is None else subset
    streaming = preset.streams if streaming is None else streaming
    is_local = Path(name).exists()
    try:
        revision = None if is_local or not streaming else _revision(preset.path)
        rows = _load(preset.path, subset, split, streaming, revision)
    except Exception as error:  # a dataset's builder may raise anything
        lines = str(error).strip().splitlines() or [type(error).__name__]
        if error.__cause__ is not None:  # datasets' own error may not have the reason
            lines.append(f"({one_line(error.__cause__)})")
        where = "" if is_local else _where(name, preset)
        raise InputError(
            f"--dataset {name}{where}: cannot load subset {subset or 'default'}, "
            f"split {split}: {' '.join(lines)[:500]}"
        ) from None
    shown = Path(name).resolve().name if is_local else preset.path
    limits = (None, limit) if preset.document_start else (limit, None)
    return HubDataset(rows.with_format("arrow"), shown, subset, split, *limits, preset.document_start, revision)


def _where(name: str, preset: Preset) -> str:
    if preset.path != name:
        return f" ({preset.path} on the Hub)"
    near = difflib.get_close_matches(name.lower(), PRESETS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f" (no such local folder, so it was looked up on the Hub{hint})"


def _revision(name: str) -> str | None:
    """Returns the dataset's current commit, or None if it can't be determined."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return HfApi().dataset_info(name).sha
    except (HfHubHTTPError, HFValidationError, OSError, ValueError):
        return None


def _load(name: str, subset: str | None, split: str, streaming: bool, revision: str | None) -> Any:
    import datasets

    if (Path(name) / "dataset_dict.json").is_file() or (Path(name) / "state.json").is_file():
        saved = datasets.load_from_disk(name)
        if isinstance(saved, datasets.DatasetDict):
            if split not in saved:
                raise ValueError(f"no such split; available splits: {', '.join(saved)}")
            saved = saved[split]
        return saved.to_iterable_dataset() if streaming else saved
    return datasets.load_dataset(name, subset, split=split, streaming=streaming, revision=revision)


def find_preset(name: str) -> Preset | None:
    """Finds a preset by name; None if there is none, or if a local path with this name exists.

    Ignores case, treats _ and - as equal, and accepts names with subsets, such as fineweb-edu-sample-10BT.
    """
    key = name.lower().replace("_", "-").removeprefix("the-").removesuffix("-v1").removesuffix("-raw")
    return None if Path(name).exists() else PRESETS.get(key.replace("-sample-", "-"))
