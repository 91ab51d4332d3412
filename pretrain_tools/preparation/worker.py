"""Reads, cleans and tokenizes documents, and assigns them to the training or validation split."""

import os
from dataclasses import dataclass, field

import numpy as np

from pretrain.data.manifest import dtype_for
from pretrain.data.tokenizer import LoadedTokenizer
from pretrain.errors import InputError
from pretrain_tools.preparation.cleaning.account import add_numbers
from pretrain_tools.preparation.documents.document_index import HELD_OUT, document_table
from pretrain_tools.preparation.documents.records import Record
from pretrain_tools.preparation.documents.sources import Part, place_text
from pretrain_tools.preparation.encode import FastEncoder, ReferenceEncoder
from pretrain_tools.preparation.encoded_part import EncodedPart, Problem, Tally
from pretrain_tools.preparation.plan import PreparationOptions
from pretrain_tools.preparation.text_files import document_line
from pretrain_tools.preparation.validation_split import ValidationSplit

SAMPLE_BYTES = 4096
FIRST_DOCUMENTS = 4


def read_part(
    part: Part, options: PreparationOptions, split: ValidationSplit
) -> tuple[list[Record], Tally, list[Problem]]:
    """Reads one part of the input. With on_error=stop, stops at the first bad record.

    Returns (records with text and an assigned split, counts of skipped documents, bad records).
    """
    records = []
    counts = Tally(input_bytes=part.input_bytes)
    problems = []
    for source, record in part.records(options.reading):
        if record.text:
            records += split.pieces(record._replace(source=source.name))
        elif record.problem is not None:
            place = source.place(record.place)
            name = place_text(source.name, source.format, record.place)
            reason = record.problem
            problems.append(Problem(f"{place}: {reason}", f"{name}: {reason}", record.problem_records))
            if options.on_error == "stop":
                # Keep the preceding documents, so that the next process can resume at the bad record.
                break
        elif record.not_read is not None:
            add_numbers(counts.unread_members, {record.not_read: 1})
        elif record.text is None:
            counts.filtered_documents += 1
        else:
            counts.empty_documents += 1
    return records, counts, problems


@dataclass
class PartEncoder:
    """Reads and tokenizes parts of the input. Each worker process has its own instance."""

    tokenizer: LoadedTokenizer
    encoder: ReferenceEncoder | None
    options: PreparationOptions
    split: ValidationSplit
    source_numbers: dict[str, int]
    """{source: index in the manifest's list of sources}."""
    _has_compared: bool = field(default=False, init=False)

    def compile(self) -> None:
        """Compiles the numba kernels before workers are forked, so that they share the compiled code."""
        near_duplicates = self.options.near_duplicates
        if near_duplicates is not None:
            near_duplicates.signatures(*near_duplicates.words([b"compiled once"]))
        for stage in self.options.cleaning.stages if self.options.cleaning else ():
            stage.compile()

    def encode(self, part: Part) -> EncodedPart:
        """Reads, cleans and tokenizes one part of the input."""
        # There is already one worker per core.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        options = self.options
        records, counts, problems = read_part(part, options, self.split)
        if options.cleaning is not None:
            records, counts.cleaning = options.cleaning.clean(records)
        texts = [record.text for record in records]
        arrays = self.encoder.encode(texts)
        self._compare(texts)
        tokens = np.array([len(array) + 1 for array in arrays], dtype=np.int64)
        ids = self._joined(arrays)
        sources = [self.source_numbers[record.source] for record in records]
        places = np.array([record.place for record in records], np.uint64)
        places += HELD_OUT * np.array([record.is_validation for record in records], bool)
        near = options.near_duplicates
        return EncodedPart(
            part.after,
            counts,
            ids=ids,
            documents=document_table(tokens, list(map(len, texts)), sources, places),
            signatures=None if near is None else near.signatures(*near.words(texts)),
            lines=list(map(document_line, records)) if options.write_text else None,
            problems=tuple(problems),
        )

    def _joined(self, arrays: list[np.ndarray]) -> np.ndarray:
        """Concatenates the documents, with an end-of-document ID after each."""
        end = np.array([self.tokenizer.end_of_document_id], np.uint32)
        ids = np.concatenate([end[:0], *(piece for array in arrays for piece in (array, end))])
        if np.count_nonzero(ids == end) > len(arrays):
            raise InputError(
                f"{self.tokenizer.name}: this tokenizer encodes ordinary text as its end-of-document token "
                f"{self.tokenizer.end_of_document!r}, so it cannot separate documents; use a different "
                "--end_of_document"
            )
        return ids.astype(dtype_for(self.tokenizer.vocabulary_size))

    def _compare(self, texts: list[bytes]) -> None:
        """Compares the fast encoder with the reference on FIRST_DOCUMENTS documents, and then on one per part.

        Compares only the first SAMPLE_BYTES of each document. Raises DisagreementError.
        """
        if isinstance(self.encoder, FastEncoder) and texts:
            compared = [texts[len(texts) // 2]] if self._has_compared else texts[:FIRST_DOCUMENTS]
            self._has_compared = True
            self.encoder.compare([t[:SAMPLE_BYTES].decode(errors="ignore").encode() for t in compared])
