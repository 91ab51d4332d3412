"""The second pass, which leaves out near duplicates: reads the documents of the first in the order of the input."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pretrain.data.manifest import SPLITS, Manifest, id_dtype
from pretrain.data.shards import ShardReader, read_manifest
from pretrain_tools.preparation.documents.document_index import InputOrder
from pretrain_tools.preparation.documents.sources import Position
from pretrain_tools.preparation.encoded_part import EncodedPart, Problem, Tally
from pretrain_tools.preparation.text_files import has_text, stored_lines

TOKENS_PER_PART = 1 << 22
DOCUMENTS_PER_PART = 1 << 16


def kept_parts(folder: Path, start: Position, input_bytes: int, removed: np.ndarray) -> Iterator[EncodedPart]:
    """Yields the documents of a prepared folder in the order of the input, from a position on.

    Args:
        start: its `part` is the number of the first part to yield.
        input_bytes: of all documents, to be shared among the parts.
        removed: ascending numbers of the documents to leave out.
    """
    # Read again up to `start`: the splits can only be followed from their beginning.
    if start.source == 0:
        yield from itertools.islice(_parts(read_manifest(folder), input_bytes, removed), start.part, None)


def _parts(manifest: Manifest, input_bytes: int, removed: np.ndarray) -> Iterator[EncodedPart]:
    """Yields all documents, some at a time; the last part has the counts."""
    order = InputOrder(manifest)
    readers = {split: ShardReader(manifest, split) for split in SPLITS}
    text = {split: stored_lines(manifest, split) for split in SPLITS} if has_text(manifest) else None
    read = dict.fromkeys(SPLITS, 0)
    all_tokens = sum(reader.tokens for reader in readers.values())
    part = first = 0
    while first < order.documents:
        documents, is_validation = order.table(first, min(first + DOCUMENTS_PER_PART, order.documents))
        ends = np.cumsum(documents["end"].astype(np.int64))
        taken = max(1, int(np.searchsorted(ends, TOKENS_PER_PART, side="right")))
        documents = documents[:taken]
        is_validation = is_validation[:taken]
        ends = ends[:taken]
        ids = np.empty(int(ends[-1]), id_dtype(manifest.dtype))
        is_held_out = np.repeat(is_validation, documents["end"].astype(np.int64))
        # Each split is in the order of the input as well, so both are read front to back.
        for split, chosen in zip(SPLITS, (~is_held_out, is_held_out), strict=True):
            of_split = np.empty(np.count_nonzero(chosen), ids.dtype)
            readers[split].read(read[split], of_split)
            read[split] += len(of_split)
            ids[chosen] = of_split
        names, documents["source"] = np.unique(documents["source"], return_inverse=True)
        documents["end"] = ends
        left, right = np.searchsorted(removed, (first, first + taken))
        kept = np.ones(taken, bool)
        kept[removed[left:right].astype(np.int64) - first] = False
        counts = Tally(
            near_duplicate_documents=int(right - left),
            input_bytes=round(input_bytes * len(ids) / all_tokens),
        )
        encoded = EncodedPart(
            Position(0, part + 1),
            counts,
            ids=ids,
            documents=documents,
            source_names=tuple(manifest.source_names[name] for name in names),
            is_validation=is_validation,
            lines=[next(text[SPLITS[held_out]]) for held_out in is_validation.tolist()] if text else None,
        )
        yield encoded.keeping(kept)
        part = part + 1
        first = first + taken
    yield _counts_of(manifest.folder)


def _counts_of(folder: Path) -> EncodedPart:
    """Returns a part without documents that adds what the first pass left out to the counts."""
    counts = Tally.recorded(folder)
    named = [example.partition(": ") for example in counts.bad_examples]
    problems = [Problem(name, name, reason) for name, _, reason in named]
    if problems:
        # As many are named as the finished folder will: the last one stands for the others.
        problems[-1] = problems[-1]._replace(records=1 + counts.bad_records - len(problems))
    # They are counted by their problems.
    counts.bad_records = 0
    return EncodedPart(Position(1, 0), counts, problems=tuple(problems))
