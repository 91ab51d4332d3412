"""Encoded documents to the shards of both splits: without duplicates, within the limits, counted."""

from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from pretrain.errors import InputError
from pretrain_tools.preparation.cleaning.account import CleaningAccount
from pretrain_tools.preparation.deduplicate import SeenDocuments
from pretrain_tools.preparation.plan import PreparationOptions
from pretrain_tools.preparation.shard_writer import ShardWriter
from pretrain_tools.preparation.worker import EncodedPart, Problem

PROBLEMS_NAMED_IN_MANIFEST = 20
SKIPPED_COUNTS = ("empty_documents", "filtered_documents", "duplicate_documents", "bad_records")
NEAR_DUPLICATE_COUNTS = ("near_duplicate_documents", "near_duplicate_bytes")
ADDED_COUNTS = ("empty_documents", "filtered_documents", *NEAR_DUPLICATE_COUNTS, "input_bytes")
"""Counts of a part that are added up."""


@dataclass
class Tally:
    """Counts over both splits."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    validation_tokens: int = 0
    empty_documents: int = 0
    filtered_documents: int = 0
    duplicate_documents: int = 0
    near_duplicate_documents: int = 0
    near_duplicate_bytes: int = 0
    bad_records: int = 0
    bad_examples: list[str] = field(default_factory=list)
    unread_members: dict[str, int] = field(default_factory=dict)
    input_bytes: int = 0
    cleaning: CleaningAccount = field(default_factory=CleaningAccount)

    def skipped(self) -> dict[str, Any]:
        """Returns the counts of what was left out, as the manifest records them."""
        # Absent unless near duplicates were looked for, as in older manifests.
        near = {name: getattr(self, name) for name in NEAR_DUPLICATE_COUNTS if getattr(self, name)}
        counts = {name: getattr(self, name) for name in SKIPPED_COUNTS} | near
        if self.unread_members:
            counts["unread_members"] = dict(sorted(self.unread_members.items()))
        return counts | {"first_bad_records": self.bad_examples}

    @classmethod
    def from_progress(cls, fields: dict[str, Any]) -> Self:
        """Reads the tally that a preparation's progress recorded."""
        return cls(**fields | {"cleaning": CleaningAccount(**fields.get("cleaning", {}))})


class DisagreementError(Exception):
    """The fast path gave other ids than the reference."""


class Intake:
    """Writes encoded parts, one after another, to the shards.

    Args:
        source_numbers: the number of each source by its name.
        seen: the documents so far, to leave out duplicates; None keeps them.
    """

    def __init__(
        self,
        tally: Tally,
        writer: ShardWriter,
        options: PreparationOptions,
        source_numbers: dict[str, int],
        seen: SeenDocuments | None,
    ):
        self.tally = tally
        self._writer = writer
        self._options = options
        self._source_numbers = source_numbers
        self._seen = seen

    def add(self, encoded: EncodedPart) -> bool:
        """Writes a part's documents, up to the limits; returns whether a limit has been reached."""
        if encoded.disagreement is not None:
            raise DisagreementError(f"gigatoken gives other ids than tokenizers for {encoded.disagreement}")
        tally = self.tally
        if self._seen is not None:
            new = self._seen.add(encoded.hashes)
            encoded = encoded.keeping(new)
            tally.duplicate_documents += int(np.count_nonzero(~new))
        taken = _documents_within_limits(encoded, tally, self._options)
        complete = taken < len(encoded.documents) or tally.documents + taken == self._options.max_documents
        self._check_problems([p for p in encoded.problems if p.documents_before <= taken and not complete])
        part = encoded.keeping(np.arange(len(encoded.documents)) < taken)
        documents = part.documents.copy()
        numbers = np.array([self._source_numbers[name] for name in encoded.source_names], np.uint32)
        documents["source"] = numbers[documents["source"]]
        part = replace(part, documents=documents)
        for split, chosen in (("train", ~part.is_validation), ("validation", part.is_validation)):
            if chosen.any():
                of_split = part.keeping(chosen)
                ends = of_split.documents["end"]
                self._writer.write(split, of_split.ids, of_split.documents, of_split.signatures, of_split.lines)
                tally.tokens += int(ends[-1])
                tally.validation_tokens += int(ends[-1]) if split == "validation" else 0
        tally.documents += taken
        tally.text_bytes += int(documents["text_bytes"].sum())
        for name in ADDED_COUNTS:
            setattr(tally, name, getattr(tally, name) + getattr(encoded, name))
        for suffix, members in encoded.unread_members.items():
            tally.unread_members[suffix] = tally.unread_members.get(suffix, 0) + members
        if encoded.cleaning is not None:
            tally.cleaning.add(encoded.cleaning)
        return complete

    def _check_problems(self, problems: list[Problem]) -> None:
        tally = self.tally
        options = self._options
        if not problems:
            return
        if options.on_error == "stop":
            first = problems[0]
            raise InputError(
                f"{first.place}: {first.reason}; fix the input, or use --on_error skip, which counts what it skips"
            )
        bad_records = tally.bad_records
        for problem in problems:
            bad_records += problem.records
            if bad_records > options.max_errors:
                more = "one more" if bad_records == options.max_errors + 1 else f"{bad_records:,}, more"
                raise InputError(
                    f"{problem.place}: {problem.reason}; that is {more} than --max_errors {options.max_errors:,} bad "
                    "records; fix the input, or run again with a larger --max_errors, which continues from here"
                )
        room = PROBLEMS_NAMED_IN_MANIFEST - len(tally.bad_examples)
        tally.bad_examples += [f"{problem.name}: {problem.reason}" for problem in problems[:room]]
        tally.bad_records = bad_records


def _documents_within_limits(encoded: EncodedPart, tally: Tally, options: PreparationOptions) -> int:
    taken = len(encoded.documents)
    if options.max_documents is not None:
        taken = min(taken, options.max_documents - tally.documents)
    if options.max_tokens is not None:
        ends = encoded.documents["end"].astype(np.int64)
        taken = min(taken, int(np.searchsorted(ends, options.max_tokens - tally.tokens, side="right")))
    return taken
