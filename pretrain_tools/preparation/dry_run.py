"""A dry run: the same preparation on a few documents from all over the input, of which only the report is kept."""

import itertools
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pretrain_tools.preparation.documents.records import Reading, Record
from pretrain_tools.preparation.documents.sources import BEGINNING, Files, InputFile, Part, Position, given_records
from pretrain_tools.preparation.plan import Documents, PreparationRequest
from pretrain_tools.preparation.prepare import PreparationOutcome, prepare
from pretrain_tools.preparation.report import write_report

MOST_FILES = 32
RECORDS_AT_ONCE = 512


@dataclass(frozen=True)
class DrawnDocuments:
    """The beginnings of at most MOST_FILES files that are spread evenly over the input; of a dataset its beginning.

    As many documents of each as it takes to have `number`. What comes before a document in a compressed file would
    have to be read to be left out, so nothing is drawn from within one.
    """

    documents: Documents
    number: int
    total_bytes: None = None
    expected_text_bytes: None = None
    maximum_documents: None = None

    @property
    def files(self) -> list[InputFile]:
        """Empty for a dataset."""
        sources = self.documents.sources if isinstance(self.documents, Files) else []
        count = min(len(sources), MOST_FILES)
        return [sources[len(sources) * number // count] for number in range(count)]

    def description(self) -> list[dict[str, Any]]:
        """Identifies the documents, as for all of them."""
        return (
            replace(self.documents, sources=self.files).description() if self.files else self.documents.description()
        )

    def parts(self, reading: Reading, start: Position) -> Iterator[Part]:
        """Yields the drawn documents in input order."""
        # The part applies the limits of length again; they are left out here, so that what they remove is counted.
        unlimited = replace(reading, min_characters=None, max_characters=None)
        if self.files:
            sources = [Files([source]).parts(reading) for source in self.files]
        else:
            sources = [self.documents.parts(reading, BEGINNING)]
        drawn: list[list[tuple[InputFile, Record]]] = [[] for _ in sources]
        turns = deque((found, _records(parts, unlimited)) for found, parts in zip(drawn, sources, strict=True))
        left = self.number
        # One document of each in turn: others make up for short files.
        while left and turns:
            found, records = turns.popleft()
            record = next(records, None)
            if record is not None:
                found.append(record)
                turns.append((found, records))
                left -= 1
        together = tuple(itertools.chain.from_iterable(drawn))
        for first in range(0, len(together), RECORDS_AT_ONCE):
            batch = together[first : first + RECORDS_AT_ONCE]
            read = tuple((source, partial(given_records, (record,))) for source, record in batch)
            yield Part(Position(0, first + 1), 0, read)


def _records(parts: Iterator[Part], reading: Reading) -> Iterator[tuple[InputFile, Record]]:
    return (found for part in parts for found in part.records(reading))


def dry_run(
    request: PreparationRequest, number: int, say: Callable[[str], None]
) -> tuple[PreparationOutcome, list[Path]]:
    """Prepares `number` documents in a temporary folder and writes the report beside the output to be.

    Returns the outcome and the report's files, OUTPUT.dry_run.html and .json, which replace those of an earlier run.
    """
    output = request.output
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="groundwork-dry-run-") as temporary:
        drawn = DrawnDocuments(request.documents, number)
        folder = Path(temporary, output.name)
        outcome = prepare(replace(request, documents=drawn, output=folder, destination=None), say)
        return outcome, write_report(folder, output.with_name(f"{output.name}.dry_run"))
