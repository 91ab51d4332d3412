"""Splits a preparation into slices for independent machines, and merges them.

Slice i of n contains consecutive documents and is prepared in FOLDER.slices/i-of-n. The merged folder is identical to
one prepared on a single machine.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.manifest import MANIFEST_FILE, Manifest, id_dtype
from pretrain.data.shards import ShardReader, read_manifest
from pretrain.errors import InputError, Problems
from pretrain_tools.preparation.documents.document_index import UNDIVIDED, InputOrder
from pretrain_tools.preparation.documents.sources import Position
from pretrain_tools.preparation.encoded_part import EncodedPart, Problem, Tally
from pretrain_tools.preparation.plan import PreparationRequest, refuse_differences
from pretrain_tools.preparation.text_files import TEXT_FOLDER, stored_lines

TOKENS_PER_PART = 1 << 22
DOCUMENTS_PER_PART = 1 << 16


def parse_slice(text: str) -> tuple[int, int]:
    """Parses '3/16' to (3, 16). Raises InputError."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 0 <= int(number) < int(count)):
        raise InputError(f"--slice {text}: must be I/N with I from 0 to N - 1, such as 0/16")
    return int(number), int(count)


def slice_of(request: PreparationRequest, number: int, count: int) -> PreparationRequest:
    """Returns the request for slice `number` of `count`. It is uploaded to URL.slices/I-of-N."""
    # Duplicates are removed when the slices are merged.
    options = replace(request.options, slice=f"part {number} of {count}", deduplicate=False)
    name = f"{number}-of-{count}"
    output = request.output.with_name(f"{request.output.name}.slices") / name
    destination = request.destination
    if destination:
        destination = replace(destination, url=f"{destination.url}.slices/{name}", local=output)
    documents = replace(request.documents, slice=(number, count))
    return replace(request, documents=documents, options=options, output=output, destination=destination)


def require_slices(request: PreparationRequest, plan: dict[str, Any]) -> list[Path]:
    """Downloads and lists the slices to merge. Raises InputError if any are unfinished or don't match the request."""
    folders = []
    problems = Problems()
    count = request.merge_slices or 0
    slices = [slice_of(request, number, count) for number in range(count)]
    for of_slice in slices if request.destination else ():
        problems.attempt(of_slice.destination.fetch)
    problems.stop_if_any()
    for number, of_slice in enumerate(slices):
        folder = of_slice.output
        if not (folder / MANIFEST_FILE).is_file():
            problems.append(f"{folder}: is incomplete; run the same command with --slice {number}/{count}")
            continue
        made_from = json.loads((folder / MANIFEST_FILE).read_bytes())
        plan_of_slice = plan | {"options": of_slice.options.as_plan()}
        # All slices together may have more bad records than each of them was allowed to have.
        problems.attempt(refuse_differences, folder, made_from, plan_of_slice, "was finished", is_resumed=True)
        if any(shard["split"] != UNDIVIDED for shard in made_from["shards"]):
            problems.append(
                f"{folder}: was made by a different version of Groundwork; remove it and prepare the slice again"
            )
        folders.append(folder)
    problems.stop_if_any()
    return folders


def merged_parts(
    folders: Sequence[Path], start: Position, input_bytes: int, removed: np.ndarray | None
) -> Iterator[EncodedPart]:
    """Yields the documents in all slices in order, beginning at `start`, a (slice, part) position.

    removed: (documents in all slices,) bool, True for near duplicates to remove; None to keep all documents.
    """
    manifests = [read_manifest(folder) for folder in folders]
    sizes = [sum(shard.documents for shard in manifest.shards) for manifest in manifests]
    if removed is None:
        removed = np.zeros(sum(sizes), bool)
    for number, of_slice in enumerate(np.split(removed, np.cumsum(sizes)[:-1])):
        if number >= start.source:
            first = start.part if number == start.source else 0
            # Skip parts by reading them, because the text files don't support seeking.
            parts = slice_parts(manifests[number], number, input_bytes // len(folders), of_slice)
            yield from itertools.islice(parts, first, None)


def slice_parts(manifest: Manifest, number: int, input_bytes: int, removed: np.ndarray) -> Iterator[EncodedPart]:
    """Yields a slice's documents in parts, in input order. The last part contains only counts."""
    order = InputOrder([manifest])
    reader = ShardReader(manifest, UNDIVIDED)
    text = stored_lines(manifest) if (manifest.folder / TEXT_FOLDER).is_dir() else None
    part = first = read = 0
    while first < order.documents:
        documents = order.table(first, min(first + DOCUMENTS_PER_PART, order.documents))
        ends = np.cumsum(documents["end"].astype(np.int64))
        taken = max(1, int(np.searchsorted(ends, TOKENS_PER_PART, side="right")))
        documents = documents[:taken]
        documents["end"] = ends[:taken]
        ids = np.empty(int(ends[taken - 1]), id_dtype(manifest.dtype))
        reader.read(read, ids)
        read += len(ids)
        kept = ~removed[first : first + taken]
        counts = Tally(
            near_duplicate_documents=taken - int(kept.sum()),
            input_bytes=round(input_bytes * len(ids) / reader.tokens),
        )
        encoded = EncodedPart(
            Position(number, part + 1),
            counts,
            ids=ids,
            documents=documents,
            lines=list(itertools.islice(text, taken)) if text else None,
        )
        yield encoded.keeping(kept)
        part += 1
        first += taken
    yield _counts_of(manifest.folder, number)


def _counts_of(folder: Path, number: int) -> EncodedPart:
    """Returns a part that contains only the slice's counts of skipped documents."""
    counts = Tally.recorded(folder)
    problems = [Problem(example, example) for example in counts.first_bad_records]
    if problems:
        # A slice lists only its first bad records, so the last listed one also counts for the unlisted ones.
        problems[-1] = problems[-1]._replace(records=1 + counts.bad_records - len(problems))
    # Bad records are counted again from `problems`.
    counts.bad_records = 0
    return EncodedPart(Position(number + 1, 0), counts, problems=tuple(problems))
