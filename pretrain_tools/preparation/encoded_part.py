"""Encoded parts of the documents, and the counts that they add up to."""

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


@dataclass
class Tally:
    """Counts over both splits, in JSON's types."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    validation_tokens: int = 0
    empty_documents: int = 0
    filtered_documents: int = 0
    duplicate_documents: int = 0
    near_duplicate_documents: int = 0
    bad_records: int = 0
    first_bad_records: list[str] = field(default_factory=list)
    unread_members: dict[str, int] = field(default_factory=dict)
    """{suffix: members of archives that hold no documents}."""
    input_bytes: int = 0
    cleaning: CleaningAccount = field(default_factory=CleaningAccount)

    def add(self, other: Self) -> None:
        """Adds the counts of a part; `first_bad_records` stay."""
        for name, value in vars(other).items():
            if isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)
        add_numbers(self.unread_members, other.unread_members)
        self.cleaning.add(other.cleaning)

    def skipped(self) -> dict[str, Any]:
        """Returns the counts of what was left out, as the manifest records them."""
        counts = {name: getattr(self, name) for name in SKIPPED_COUNTS}
        some = {
            "near_duplicate_documents": self.near_duplicate_documents,
            "unread_members": dict(sorted(self.unread_members.items())),
        }
        found = {name: value for name, value in some.items() if value}
        return {**counts, **found, "first_bad_records": self.first_bad_records}

    @classmethod
    def recorded(cls, folder: Path) -> Self:
        """Reads what a finished folder's manifest records as left out and as cleaned."""
        made = json.loads((folder / MANIFEST_FILE).read_bytes())
        return cls(**made["skipped"], cleaning=recorded_account(folder, made))

    @classmethod
    def from_progress(cls, fields: dict[str, Any]) -> Self:
        """Reads the tally that a preparation's progress recorded."""
        return cls(**fields | {"cleaning": CleaningAccount(**fields.get("cleaning", {}))})


class Problem(NamedTuple):
    """A record that could not be used; `place` is for messages, `name`, without folders, for the manifest."""

    place: str
    name: str
    reason: str
    records: int = 1


@dataclass(frozen=True)
class EncodedPart:
    """The documents of a part in order, and what was left out of it."""

    after: Position
    counts: Tally
    """Counts of what is not among the documents, and the bytes that were read."""
    ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint16))
    """Documents end to end, each closed by the end-of-document id."""
    documents: np.ndarray = field(default_factory=lambda: np.empty(0, DOCUMENT))
    """(documents,) DOCUMENT; ends count in `ids`, sources in `source_names`."""
    source_names: tuple[str, ...] = ()
    is_validation: np.ndarray = field(default_factory=lambda: np.empty(0, bool))
    hashes: np.ndarray | None = None
    """(documents,) uint64; None unless duplicates are looked for."""
    signatures: np.ndarray | None = None
    """(documents, signature_bytes) uint8; None unless near duplicates are looked for."""
    lines: list[bytes] | None = None
    """The documents as text_files.document_line; None unless text is written."""
    problems: tuple[Problem, ...] = ()
    disagreement: str | None = None
    """A text for which the fast path gave wrong ids, if any."""

    def keeping(self, kept: np.ndarray) -> "EncodedPart":
        """Returns the part with some of the documents. kept: (documents,) bool."""
        if kept.all():
            return self
        tokens = tokens_of(self.documents)
        documents = self.documents[kept]
        documents["end"] = np.cumsum(tokens[kept])
        return replace(
            self,
            ids=self.ids[np.repeat(kept, tokens)],
            documents=documents,
            is_validation=self.is_validation[kept],
            hashes=None if self.hashes is None else self.hashes[kept],
            signatures=None if self.signatures is None else self.signatures[kept],
            lines=None if self.lines is None else list(itertools.compress(self.lines, kept.tolist())),
        )
