"""A preparation divided over machines that do not communicate, and the merge of what they made.

Slice i of n takes consecutive parts of the input and makes a prepared folder of its own, FOLDER.slices/i-of-n. The
merge reads the slices' documents in the order of the input and writes the same bytes as a single machine would.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from pretrain.data.document_index import DOCUMENT, document_table, read_index, tokens_of
from pretrain.data.manifest import MANIFEST_FILE, SPLITS, Manifest, Shard, id_dtype
from pretrain.data.shards import ShardReader, read_manifest
from pretrain.errors import InputError, Problems
from pretrain.preparation.cleaning.account import recorded_account
from pretrain.preparation.deduplicate import document_hashes
from pretrain.preparation.documents.sources import Position
from pretrain.preparation.plan import PreparationOptions, PreparationRequest, refuse_differences
from pretrain.preparation.worker import EncodedPart, Problem

TOKENS_PER_PART = 1 << 22


def parse_slice(text: str) -> tuple[int, int]:
    """'3/16' -> (3, 16). Raises InputError for what is no slice."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 0 <= int(number) < int(count)):
        raise InputError(f"--slice {text}: must be i/n with i from 0 to n - 1, such as 0/16 to 15/16")
    return int(number), int(count)


def slice_problems(options: PreparationOptions) -> list[str]:
    """Why a preparation with these options cannot be divided."""
    limits = {"max_documents": options.max_documents, "max_tokens": options.max_tokens}
    given = [f"--{name} {value:,}" for name, value in limits.items() if value is not None]
    return [f"--slice: slices do not know of each other, so {' and '.join(given)} must be left out"] if given else []


def slice_of(request: PreparationRequest, number: int, count: int) -> PreparationRequest:
    """The preparation of slice `number` of `count`. Raises InputError where the documents cannot be divided."""
    # Which document is a copy is known only when all are together.
    label = f"part {number} of {count}"
    options = replace(request.options, slice=label, deduplicate=False, megatron=False)
    output = request.output.with_name(request.output.name + ".slices") / f"{number}-of-{count}"
    return replace(request, documents=request.documents.sliced(number, count), options=options, output=output)


def require_slices(request: PreparationRequest) -> list[Path]:
    """The folders of the slices to merge. Raises InputError naming each that is unfinished or of something else."""
    if request.merge_slices is None:
        return []
    plan = request.plan()
    folders, problems = [], Problems()
    for number in range(request.merge_slices):
        of_slice = slice_of(request, number, request.merge_slices)
        folder = of_slice.output
        if not (folder / MANIFEST_FILE).is_file():
            command = f"--slice {number}/{request.merge_slices}"
            problems.append(f"{folder}: is not complete; run the same command with {command}")
            continue
        made_from = json.loads((folder / MANIFEST_FILE).read_bytes())
        plan_of_slice = plan | {"options": of_slice.options.as_plan()}
        problems.attempt(refuse_differences, folder, made_from, plan_of_slice, "was finished")
        folders.append(folder)
    problems.stop_if_any()
    return folders


def merged_parts(folders: list[Path], start: Position, input_bytes: int, deduplicate: bool) -> Iterator[EncodedPart]:
    """The documents of all slices in order, from a position on: (slice, number of its next part)."""
    for number in range(start.source, len(folders)):
        first = start.part if number == start.source else 0
        parts = slice_parts(folders[number], number, input_bytes // len(folders), deduplicate)
        yield from itertools.islice(parts, first, None)


def slice_parts(folder: Path, number: int, input_bytes: int, deduplicate: bool) -> Iterator[EncodedPart]:
    """A slice's documents in the order of its input, TOKENS_PER_PART at a time; the last part has the counts."""
    manifest = read_manifest(folder)
    tables = {split: documents_of(manifest, split) for split in SPLITS}
    is_validation = np.repeat([False, True], [len(tables[split]) for split in SPLITS])
    documents = np.concatenate([tables[split] for split in SPLITS])
    order = np.lexsort((documents["place"], documents["source"]))
    documents, is_validation = documents[order], is_validation[order]
    tokens = documents["end"].astype(np.int64)
    part_of = np.cumsum(tokens) // TOKENS_PER_PART
    count = int(part_of[-1]) + 1 if len(part_of) else 0
    cuts = np.searchsorted(part_of, np.arange(count + 1))
    readers = {split: ShardReader(manifest, split) for split in SPLITS}
    read = dict.fromkeys(SPLITS, 0)
    for part in range(count):
        here = slice(int(cuts[part]), int(cuts[part + 1]))
        ids = np.empty(int(tokens[here].sum()), id_dtype(manifest.dtype))
        of_validation = np.repeat(is_validation[here], tokens[here])
        for split, chosen in zip(SPLITS, (~of_validation, of_validation), strict=True):
            piece = np.empty(int(np.count_nonzero(chosen)), ids.dtype)
            readers[split].read(read[split], piece)
            read[split] += len(piece)
            ids[chosen] = piece
        names, sources = np.unique(documents["source"][here], return_inverse=True)
        table = document_table(tokens[here], documents["text_bytes"][here], sources, documents["place"][here])
        yield EncodedPart(
            ids=ids,
            documents=table,
            source_names=tuple(manifest.source_names[name] for name in names),
            is_validation=is_validation[here],
            hashes=document_hashes(ids, np.cumsum(tokens[here])) if deduplicate else None,
            after=Position(number, part + 1),
            input_bytes=input_bytes // count,
        )
    yield _counts_of(folder, manifest, number)


def documents_of(manifest: Manifest, split: str) -> np.ndarray:
    """The records of a split's documents over all of its shards, with tokens instead of ends."""

    def table(shard: Shard) -> np.ndarray:
        index = read_index(manifest.folder / shard.file, shard.documents)
        if index is None:
            raise InputError(f"{manifest.folder / shard.file}: its index is missing; prepare the slice again")
        documents = index.copy()
        documents["end"] = tokens_of(index)
        return documents

    return np.concatenate([np.empty(0, DOCUMENT), *map(table, manifest.of_split(split))])


def _counts_of(folder: Path, manifest: Manifest, number: int) -> EncodedPart:
    """A part without documents, which adds what the slice left out to the counts."""
    made = json.loads((folder / MANIFEST_FILE).read_bytes())
    skipped = made["skipped"]
    named = [example.partition(": ") for example in skipped["first_bad_records"]]
    problems = [Problem(0, name, name, reason) for name, _, reason in named]
    # A slice names as many as the merged folder will, so the others need no name.
    problems += [Problem(0, str(folder), str(folder), "more bad records")] * (skipped["bad_records"] - len(named))
    return EncodedPart(
        ids=np.empty(0, id_dtype(manifest.dtype)),
        documents=np.empty(0, DOCUMENT),
        source_names=(),
        is_validation=np.empty(0, bool),
        hashes=np.empty(0, np.uint64),
        after=Position(number + 1, 0),
        empty_documents=skipped["empty_documents"],
        filtered_documents=skipped["filtered_documents"],
        problems=tuple(problems),
        cleaning=recorded_account(folder, made),
    )
