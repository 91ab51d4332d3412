"""Writes tokenized documents to shards, removes exact duplicates and enforces limits."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.manifest import id_dtype
from pretrain.errors import InputError
from pretrain.files import as_json, write_durably
from pretrain.units import counted
from pretrain_tools.preparation.documents.document_index import HELD_OUT, UNDIVIDED, read_index
from pretrain_tools.preparation.documents.sources import BEGINNING, Position
from pretrain_tools.preparation.encoded_part import EncodedPart, Problem, Tally
from pretrain_tools.preparation.plan import PreparationOptions
from pretrain_tools.preparation.shard_writer import ShardWriter
from pretrain_tools.preparation.text_files import TEXT_FOLDER

UNFINISHED_FOLDER = ".unfinished"
PROGRESS_FILE = "progress.json"
NO_PROGRESS: dict[str, Any] = {"tally": {}, "position": BEGINNING, "writer": None}
PROBLEMS_NAMED_IN_MANIFEST = 20


class Intake:
    """Writes encoded parts to a folder's shards, and records the progress.

    Args:
        plan: result of PreparationRequest.plan.
        progress: recorded progress to resume from, or NO_PROGRESS.
    """

    def __init__(self, folder: Path, plan: dict[str, Any], options: PreparationOptions, progress: dict[str, Any]):
        self.tally = Tally.from_progress(progress["tally"])
        self.position = Position(*progress["position"])
        self.is_complete = False
        """True if max_documents or max_tokens has been reached."""
        state_folder = folder / UNFINISHED_FOLDER
        self._progress_path = state_folder / PROGRESS_FILE
        self._options = options
        plain_text = state_folder / TEXT_FOLDER if options.write_text else None
        self.writer = ShardWriter(folder, plan["dtype"], options.shard_tokens, progress["writer"], plain_text)
        self._seen: set[bytes] = set()
        """Digests of all documents written so far. Empty without --deduplicate."""
        for shard in self.writer.written() if options.deduplicate else ():
            path = folder / shard.file
            ids = np.memmap(path, id_dtype(plan["dtype"]), mode="r")
            self._seen.update(document_digests(ids, read_index(path, shard.documents)["end"]))

    def commit(self) -> None:
        """Flushes all data to disk, then records the progress."""
        state = {"position": self.position, "tally": asdict(self.tally), "writer": self.writer.sync()}
        write_durably(self._progress_path, as_json(state))
        self.writer.remove_compressed()

    def add(self, encoded: EncodedPart) -> None:
        """Writes a part's documents, up to the limits."""
        tally = self.tally
        read = len(encoded.documents)
        if self._options.deduplicate:
            encoded = encoded.keeping(self._are_new(encoded))
        copies = read - len(encoded.documents)
        taken = _documents_within_limits(encoded, tally, self._options)
        is_complete = taken < len(encoded.documents) or tally.documents + taken == self._options.max_documents
        if not is_complete:
            # This may raise InputError, so do it before any other change to the tally.
            count_problems(encoded.problems, tally, self._options)
        tally.duplicate_documents += copies
        part = encoded.keeping(np.arange(len(encoded.documents)) < taken)
        is_validation = part.documents["place"] >= HELD_OUT
        chosen_by_split = {UNDIVIDED: np.ones(taken, bool)}
        if self._options.slice is None:
            documents = part.documents.copy()
            documents["place"] %= HELD_OUT
            part = replace(part, documents=documents)
            chosen_by_split = {"train": ~is_validation, "validation": is_validation}
        for split, chosen in chosen_by_split.items():
            if chosen.any():
                self.writer.write(split, part.keeping(chosen))
        tally.tokens += len(part.ids)
        tally.documents += taken
        tally.add(encoded.counts)
        self.position = encoded.after
        self.is_complete = is_complete

    def _are_new(self, encoded: EncodedPart) -> np.ndarray:
        """Returns (documents,) bool: False for copies of earlier documents."""
        are_new = np.zeros(len(encoded.documents), bool)
        for number, digest in enumerate(document_digests(encoded.ids, encoded.documents["end"])):
            are_new[number] = digest not in self._seen
            self._seen.add(digest)
        return are_new


def document_digests(ids: np.ndarray, ends: np.ndarray) -> list[bytes]:
    """Hashes each document's token IDs. ends: end offsets in `ids`."""
    content = memoryview(np.ascontiguousarray(ids)).cast("B")
    bounds = [0, *(ends * ids.itemsize).tolist()]
    return [hashlib.blake2b(content[start:stop], digest_size=16).digest() for start, stop in pairwise(bounds)]


def count_problems(problems: Sequence[Problem], tally: Tally, options: PreparationOptions) -> None:
    """Adds bad records to the tally.

    Raises InputError if bad records aren't allowed or there are too many. The tally doesn't change in this case.
    """
    if problems and options.on_error == "stop":
        raise InputError(f"{problems[0].text}; fix the input, or use --on_error skip to skip bad records")
    bad_records = tally.bad_records
    for problem in problems:
        bad_records += problem.records
        if bad_records > options.max_errors:
            raise InputError(
                f"{problem.text}. That makes {counted(bad_records, 'bad record')}, but "
                f"--max_errors is {options.max_errors:,}; fix the input, or use a larger --max_errors to resume from "
                "this record"
            )
    tally.bad_records = bad_records
    room = PROBLEMS_NAMED_IN_MANIFEST - len(tally.first_bad_records)
    tally.first_bad_records += [problem.recorded for problem in problems[:room]]


def _documents_within_limits(encoded: EncodedPart, tally: Tally, options: PreparationOptions) -> int:
    taken = len(encoded.documents)
    if options.max_documents is not None:
        taken = min(taken, options.max_documents - tally.documents)
    if options.max_tokens is not None:
        ends = encoded.documents["end"].astype(np.int64)
        taken = min(taken, int(np.searchsorted(ends, options.max_tokens - tally.tokens, side="right")))
    return taken
