"""Tokenized documents and their counts, as returned by workers."""

import itertools
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from pretrain.data.manifest import MANIFEST_FILE
from pretrain_tools.preparation.cleaning.account import CleaningAccount, add_numbers, recorded_account
from pretrain_tools.preparation.documents.document_index import DOCUMENT, tokens_of
from pretrain_tools.preparation.documents.sources import Position

SKIPPED_COUNTS = ("empty_documents", "filtered_documents", "duplicate_documents", "bad_records")
BAD_RECORDS_SHOWN = 3


@dataclass
class Tally:
    """Document counts over both splits. JSON-serializable."""

    documents: int = 0
    tokens: int = 0
    empty_documents: int = 0
    filtered_documents: int = 0
    duplicate_documents: int = 0
    near_duplicate_documents: int = 0
    bad_records: int = 0
    first_bad_records: list[str] = field(default_factory=list)
    unread_members: dict[str, int] = field(default_factory=dict)
    """{suffix: number of archive members that were not read}."""
    input_bytes: int = 0
    cleaning: CleaningAccount = field(default_factory=CleaningAccount)

    def add(self, other: Self) -> None:
        """Adds another tally's counts, except `first_bad_records`."""
        counts = {name: value for name, value in vars(other).items() if isinstance(value, int | dict)}
        add_numbers(vars(self), counts)
        self.cleaning.add(other.cleaning)

    def skipped(self) -> dict[str, Any]:
        """Returns the manifest entry for skipped documents."""
        counts = {name: getattr(self, name) for name in SKIPPED_COUNTS}
        some = {
            "near_duplicate_documents": self.near_duplicate_documents,
            "unread_members": dict(sorted(self.unread_members.items())),
        }
        found = {name: value for name, value in some.items() if value}
        return {**counts, **found, "first_bad_records": self.first_bad_records}

    def skipped_text(self) -> str:
        """Formats the number of skipped documents, without those removed by cleaning."""
        counts = {
            "filtered": self.filtered_documents,
            "copies": self.duplicate_documents,
            "near copies": self.near_duplicate_documents,
        }
        more = "".join(f", {number:,} {name}" for name, number in counts.items() if number)
        return f"{self.empty_documents:,} empty, {self.bad_records:,} bad{more}"

    def advice_if_empty(self) -> str:
        """Returns what to change if all documents were skipped. Lists the first bad records."""
        if self.bad_records:
            advice = "fix the bad records, or set --text_field or --input_format to match them:"
            return "\n  ".join([advice, *self.first_bad_records[:BAD_RECORDS_SHOWN]])
        if self.filtered_documents:
            return "change --only, --min_characters or --max_characters, which excluded all documents"
        return "use files that contain text"

    @classmethod
    def recorded(cls, folder: Path) -> Self:
        """Reads the counts of skipped and cleaned documents from a prepared folder."""
        made = json.loads((folder / MANIFEST_FILE).read_bytes())
        return cls(**made["skipped"], cleaning=recorded_account(folder, made))

    @classmethod
    def from_progress(cls, fields: dict[str, Any]) -> Self:
        """Reads the tally from a progress file."""
        return cls(**fields | {"cleaning": CleaningAccount(**fields.get("cleaning", {}))})


class Problem(NamedTuple):
    """An unusable record."""

    text: str
    """Its location and the reason."""
    recorded: str
    """`text` for the manifest, which doesn't contain local folders."""
    records: int = 1


@dataclass(frozen=True)
class EncodedPart:
    """Tokenized documents from one part of the input, in order."""

    after: Position
    counts: Tally
    """Counts of skipped documents and bytes read."""
    ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint16))
    """Concatenated documents, with an end-of-document ID after each."""
    documents: np.ndarray = field(default_factory=lambda: np.empty(0, DOCUMENT))
    """(documents,) DOCUMENT. Ends are offsets in `ids`; places of validation documents have the flag HELD_OUT."""
    signatures: np.ndarray | None = None
    """(documents, signature_bytes) uint8; None without --near_duplicates."""
    lines: list[bytes] | None = None
    """One JSON line per document (text_files.document_line); None without --write_text."""
    problems: tuple[Problem, ...] = ()

    def keeping(self, kept: np.ndarray) -> "EncodedPart":
        """Returns a copy with only some of the documents. kept: (documents,) bool."""
        if kept.all():
            return self
        tokens = tokens_of(self.documents)
        documents = self.documents[kept]
        documents["end"] = np.cumsum(tokens[kept])
        return replace(
            self,
            ids=self.ids[np.repeat(kept, tokens)],
            documents=documents,
            signatures=None if self.signatures is None else self.signatures[kept],
            lines=None if self.lines is None else list(itertools.compress(self.lines, kept.tolist())),
        )
