"""Documents from datasets: the Hub's by name, local folders by path, downloaded whole or streamed."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.byte_stream import DamagedFileError
from pretrain.containers import column_values
from pretrain.formats import Reading, Record, text_record
from pretrain.problems import InputError
from pretrain.sources import Part, Position, RecordsPart, Source

ROWS_PER_PART = 1000
ROWS_IN_FINGERPRINT = 64


@dataclass(frozen=True)
class HubDataset:
    """One split of a dataset. `rows` is None where it streams and the number cannot be known."""

    rows_of: Any
    name: str
    subset: str | None
    split: str
    streaming: bool
    rows: int | None
    maximum_examples: int | None

    @property
    def total_bytes(self) -> int | None:
        """Bytes of the rows to read in memory; None where it streams."""
        return None if self.streaming else self.rows_of.data.nbytes * self._rows_to_read // max(1, self.rows)

    @property
    def expected_text_bytes(self) -> int | None:
        """About how much text there is; None where it streams."""
        return self.total_bytes

    @property
    def _rows_to_read(self) -> int:
        return self.rows if self.maximum_examples is None else min(self.rows, self.maximum_examples)

    def description(self) -> list[dict[str, Any]]:
        """What names the dataset, and where it can be had cheaply a hash over some of its rows."""
        asked = {"path": self.name, "subset": self.subset, "split": self.split, "examples": self.maximum_examples}
        return [{**asked, "rows": self.rows, "fingerprint": None if self.streaming else self._fingerprint()}]

    def _fingerprint(self) -> str:
        digest = hashlib.sha256(str(self.rows).encode())
        for start in sorted({0, self.rows // 2, max(0, self.rows - ROWS_IN_FINGERPRINT)}):
            digest.update(repr(self.rows_of[start : start + ROWS_IN_FINGERPRINT].to_pydict()).encode())
        return digest.hexdigest()

    def parts(self, reading: Reading, start: Position) -> Iterator[Part]:
        """The rows in order, ROWS_PER_PART at a time."""
        source = Source(self.name, self.name, "dataset", None, 0)
        total = self.total_bytes
        rows_before = start.part * ROWS_PER_PART
        for part, table in enumerate(self._tables(rows_before), start.part + 1):
            try:
                records = [text_record(n, v, reading.text_field) for n, v in _numbered(table, reading, rows_before)]
            except DamagedFileError as error:
                records = [Record(rows_before + 1, None, str(error))]
            rows_before += table.num_rows
            input_bytes = table.nbytes if total is None else total * table.num_rows // self._rows_to_read
            yield RecordsPart(source, tuple(records), Position(0, part), input_bytes)

    def _tables(self, first_row: int) -> Iterator[Any]:
        if not self.streaming:
            stop = self._rows_to_read
            for row in range(first_row, stop, ROWS_PER_PART):
                yield self.rows_of[row : min(row + ROWS_PER_PART, stop)]
            return
        rows = self.rows_of if self.maximum_examples is None else self.rows_of.take(self.maximum_examples)
        yield from rows.skip(first_row).iter(batch_size=ROWS_PER_PART)


def _numbered(table: Any, reading: Reading, rows_before: int) -> Iterator[tuple[int, Any]]:
    return enumerate(column_values(table, reading), rows_before + 1)


def open_dataset(name_and_limit: str, subset: str | None, split: str, streaming: bool) -> HubDataset:
    """Opens NAME or NAME:N (at most N examples): a Hub dataset, a folder of data files, or a saved dataset.

    Raises InputError when it cannot be had, with what datasets says: it names the subsets and splits that exist.
    """
    match = re.fullmatch(r"(.+?)(?::([0-9]+))?", name_and_limit)
    name, limit = match[1], int(match[2]) if match[2] else None
    if limit == 0:
        raise InputError(f"--dataset {name_and_limit}: asks for 0 examples; give at least 1, or no limit")
    is_local = Path(name).exists()
    try:
        rows = _load(name, subset, split, streaming)
    except Exception as error:  # a dataset's loading raises whatever its builder meets
        lines = str(error).strip().splitlines() or [type(error).__name__]
        where = "" if is_local else " (no such folder here, so it was looked for on the Hub)"
        raise InputError(
            f"--dataset {name}{where}: cannot be loaded as subset {subset or 'default'}, split {split}: "
            f"{' '.join(lines)[:500]}"
        ) from None
    shown = Path(name).resolve().name if is_local else name
    number = None if streaming else rows.num_rows
    return HubDataset(rows.with_format("arrow"), shown, subset, split, streaming, number, limit)


def _load(name: str, subset: str | None, split: str, streaming: bool) -> Any:
    import datasets

    if (Path(name) / "dataset_dict.json").is_file() or (Path(name) / "state.json").is_file():
        saved = datasets.load_from_disk(name)
        if isinstance(saved, datasets.DatasetDict):
            if split not in saved:
                raise ValueError(f"no such split; splits that exist: {', '.join(saved)}")
            saved = saved[split]
        return saved.to_iterable_dataset() if streaming else saved
    return datasets.load_dataset(name, subset, split=split, streaming=streaming)
