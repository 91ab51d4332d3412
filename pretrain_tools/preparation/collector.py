"""Encoded documents to the shards of both splits: without duplicates, within the limits, counted."""

from dataclasses import replace

import numpy as np

from pretrain.errors import InputError
from pretrain_tools.preparation.deduplicate import SeenDocuments
from pretrain_tools.preparation.encoded_part import EncodedPart, Problem, Tally
from pretrain_tools.preparation.plan import PreparationOptions
from pretrain_tools.preparation.shard_writer import ShardWriter

PROBLEMS_NAMED_IN_MANIFEST = 20


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
        tally.add(encoded.counts)
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
