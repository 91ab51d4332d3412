"""Encoded documents to the shards of both splits: without duplicates, within the limits, counted."""

import itertools
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from pretrain.errors import InputError
from pretrain_tools.preparation.cleaning.account import CleaningAccount
from pretrain_tools.preparation.deduplicate import SeenDocuments
from pretrain_tools.preparation.documents.document_index import chosen_ids, tokens_of
from pretrain_tools.preparation.plan import PreparationOptions
from pretrain_tools.preparation.shard_writer import ShardWriter
from pretrain_tools.preparation.worker import EncodedPart, Problem

PROBLEMS_NAMED_IN_MANIFEST = 20
SKIPPED_COUNTS = ("empty_documents", "filtered_documents", "duplicate_documents", "bad_records")
NEAR_DUPLICATE_COUNTS = ("near_duplicate_documents", "near_duplicate_bytes")


@dataclass
class Tally:
    """What has been counted so far, over both splits."""

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
        """What was left out, as the manifest records it."""
        # Where none were looked for, the manifest is what it was before they could be.
        near = {name: getattr(self, name) for name in NEAR_DUPLICATE_COUNTS if getattr(self, name)}
        counts = {name: getattr(self, name) for name in SKIPPED_COUNTS} | near
        if self.unread_members:
            counts["unread_members"] = dict(sorted(self.unread_members.items()))
        return counts | {"first_bad_records": self.bad_examples}

    @classmethod
    def from_progress(cls, fields: dict[str, Any]) -> Self:
        """The tally that a preparation's progress recorded."""
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
        self.tally, self._writer, self._options = tally, writer, options
        self._source_numbers, self._seen = source_numbers, seen

    def add(self, encoded: EncodedPart) -> bool:
        """Writes a part's documents, up to the limits; whether a limit has been reached."""
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
        documents = encoded.documents[:taken].copy()
        numbers = np.array([self._source_numbers[name] for name in encoded.source_names], np.uint32)
        documents["source"] = numbers[documents["source"]]
        signatures = None if encoded.signatures is None else encoded.signatures[:taken]
        lines = None if encoded.lines is None else encoded.lines[:taken]
        validation_tokens = self._write(encoded.ids, documents, encoded.is_validation[:taken], signatures, lines)
        tally.documents += taken
        tally.tokens += int(documents["end"][-1]) if taken else 0
        tally.text_bytes += int(documents["text_bytes"].sum())
        tally.validation_tokens += validation_tokens
        tally.empty_documents += encoded.empty_documents
        tally.filtered_documents += encoded.filtered_documents
        tally.near_duplicate_documents += encoded.near_duplicate_documents
        tally.near_duplicate_bytes += encoded.near_duplicate_bytes
        for suffix, members in encoded.unread_members.items():
            tally.unread_members[suffix] = tally.unread_members.get(suffix, 0) + members
        tally.input_bytes += encoded.input_bytes
        if encoded.cleaning is not None:
            tally.cleaning.add(encoded.cleaning)
        return complete

    def _write(
        self,
        ids: np.ndarray,
        documents: np.ndarray,
        is_validation: np.ndarray,
        signatures: np.ndarray | None,
        lines: list[bytes] | None,
    ) -> int:
        """Writes documents to the split that each belongs to; the tokens that went to validation."""
        if not is_validation.any():
            self._writer.write("train", ids, documents, signatures, lines)
            return 0
        tokens = tokens_of(documents)
        ids = ids[: int(tokens.sum())]
        for split, chosen in (("train", ~is_validation), ("validation", is_validation)):
            if chosen.any():
                of_split = documents[chosen]
                of_split["end"] = np.cumsum(tokens[chosen])
                of_signatures = None if signatures is None else signatures[chosen]
                of_lines = None if lines is None else list(itertools.compress(lines, chosen.tolist()))
                self._writer.write(split, chosen_ids(ids, tokens, chosen), of_split, of_signatures, of_lines)
        return int(tokens[is_validation].sum())

    def _check_problems(self, problems: list[Problem]) -> None:
        tally, options = self.tally, self._options
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
