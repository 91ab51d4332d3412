"""Shows a step's training data: the source, shard and offset of each sequence, and its documents as text."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from pretrain.checkpoint.run_state import recorded_rollbacks
from pretrain.config import Data
from pretrain.data.batches import Batches, DataPosition
from pretrain.data.manifest import Manifest, Shard
from pretrain.data.tokenizer import load_decoder
from pretrain.errors import InputError
from pretrain.optim.batch_ramp import BatchRamp
from pretrain.runs.run_folder import checkpoint_folders, read_config, read_state
from pretrain.units import counted
from pretrain_tools.preparation.documents.document_index import index_path, read_index
from pretrain_tools.preparation.documents.sources import place_text
from pretrain_tools.runs.history import read_history

SHOWN_CHARACTERS = 600


@dataclass(frozen=True)
class Document:
    """A document, or the part of it that is in a sequence."""

    ids: np.ndarray
    """Token IDs without the end-of-document ID."""
    origin: str | None
    """Source file and line; None if not recorded in the shards."""


@dataclass(frozen=True)
class Sequence:
    """One of a step's training sequences. With best-fit packing, one piece of it."""

    source: str
    file: str
    offset: int
    """Offset of the sequence's first token in the file."""
    ids: np.ndarray
    """Token IDs, without the one that is only the final target."""
    documents: list[Document]
    begins_inside: bool
    """True if its first document started in an earlier sequence."""


def documents_text(run: Path, step: int, *, limit: int) -> str:
    """Formats the first `limit` sequences of a step, with up to 600 characters per document.

    step: as logged, starting at 1. Raises InputError if the run hasn't reached the step, or if shards are missing or
    have changed since training.
    """
    batches, first_sample, samples = open_step(run, step)
    span = batches.span_at(first_sample)
    count = samples // span
    lines = [
        f"{run} · step {step:,}: {count:,} sequences of {span * batches.window.sequence_length:,} tokens, "
        f"samples {first_sample:,} to {first_sample + samples - 1:,} of the run"
    ]
    decoders = {source: load_decoder(reader.manifest.tokenizer_folder) for source, reader in batches.readers.items()}
    # Consecutive sequences go to different ranks.
    for number in range(1, min(limit, count) + 1):
        for sequence in read_sequences(batches, first_sample + (number - 1) * span):
            lines += ["", *_sequence_lines(number, sequence, decoders[sequence.source])]
    if count > limit:
        lines += ["", f"{count - limit:,} more sequences; use --limit {count} to show all"]
    return "\n".join(lines)


def open_step(run: Path, step: int) -> tuple[Batches, int, int]:
    """Returns the run's batches, and the step's first sample and number of samples.

    Reads only the run's records and the shards. Raises InputError.
    """
    history = read_history(run)
    last = history.last("train").get("step", 0)
    if not last:
        raise InputError(
            f"--step {step:,}: {run} has not logged a step yet; wait for its first line, or use another run"
        )
    if step > last:
        raise InputError(f"--step {step:,}: {run} has only reached step {last:,}; use a step from 1 to {last:,}")
    branch = history.last("branch")
    if branch and step <= branch["step"]:
        raise InputError(
            f"--step {step:,}: {run} is a branch of {branch['run']}, which trained until step {branch['step']:,}; use "
            f"{branch['run']}, or a step from {branch['step'] + 1:,} to {last:,}"
        )
    settings = read_config(run)
    # Use the newest checkpoint with a readable state.
    newest = next(filter(None, map(read_state, reversed(checkpoint_folders(run).values()))), {})
    state = newest.get("state", {})
    # Increasing the budget moves later curriculum stages, so use the start that was in effect at this step.
    # `runs.py anneal` shortens the run without moving stages, so ignore starts after it. A branch may begin with it.
    before = min(step, state.get("anneal_from") or step)
    starts = history.of("start")
    start = next((start for start in reversed(starts) if start["step"] < before), starts[0] if starts else {})
    try:
        data = Data.model_validate(start.get("data") or settings["data"])
        seed = int(settings["seed"])
        ramp = TypeAdapter(BatchRamp).validate_python(start)
        origin = TypeAdapter(DataPosition | None).validate_python(start.get("origin"))
    except (KeyError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise InputError(
            f"{run}: config.yaml or the start event has missing or invalid data settings ({problem}); restore it"
        ) from None
    # A checkpoint from before a rollback doesn't contain it.
    rollbacks = max(state.get("rollbacks") or [], recorded_rollbacks(run), key=len)
    left_out = [tuple(entry["samples"]) for entry in rollbacks if entry.get("samples")]
    passed = start.get("stage_starts", [])[1:]
    # Samples skipped by a rollback shift all later samples.
    batches = Batches(data, seed=seed, ramp=ramp, skipped=left_out, passed=passed, origin=origin)
    if problems := changed_sources(batches, newest.get("identity", {})):
        raise InputError(*problems)
    # Logged steps start at 1, BatchRamp's at 0.
    return batches, ramp.sequences_before(step - 1), ramp.sequences_at(step - 1)


def changed_sources(batches: Batches, identity: dict) -> list[str]:
    """Returns a message for each source whose shards don't match the hash recorded in the run's checkpoints."""
    stages = identity.get("data.train") or identity.get("data.stages") or []
    trained_on = {source[0]: source[1] for stage in stages for source in stage.get("train", [])}
    return [
        f"{folder}: the shards have changed since training (their hash was {trained_on[folder]}, but is now "
        f"{reader.manifest.sha256[:16]}); restore the original shards"
        for folder, reader in batches.readers.items()
        if folder in trained_on and not reader.manifest.sha256.startswith(trained_on[folder])
    ]


def read_sequences(batches: Batches, sample: int) -> list[Sequence]:
    """Reads the sequence at a sample index. With best-fit packing, each of its pieces is a sequence."""
    (source, start), *_ = batches.locate(sample, 1)
    length = batches.span_at(sample) * batches.window.sequence_length
    return [_read(batches, batches.folders[source], *piece) for piece in batches.pieces(source, start, length)]


def _read(batches: Batches, source: str, start: int, count: int) -> Sequence:
    reader = batches.readers[source]
    manifest = reader.manifest
    end = manifest.end_of_document_id
    # The last ID of a sequence is only a target, except with best-fit packing.
    inside = count if batches.packings else count - 1
    # The preceding ID shows whether the sequence begins inside a document.
    before = min(start, 1)
    read = np.empty(before + inside, batches.dtype)
    reader.read(start - before, read)
    ids = read[before:]
    shards = list(manifest.of_split(reader.split))
    offset = start
    while offset >= shards[0].tokens:
        offset -= shards.pop(0).tokens
    parts = np.split(ids, np.flatnonzero(ids == end))
    documents = [
        # np.split leaves the end-of-document ID at the start of the next part.
        Document(part[part != end], origin)
        for part, origin in zip(parts, origins_from(manifest, shards, offset), strict=False)
        if (part != end).any()
    ]
    return Sequence(source, shards[0].file, offset, ids, documents, end not in (read[0], ids[0]) and start > 0)


def origins_from(manifest: Manifest, shards: list[Shard], offset: int) -> Iterator[str | None]:
    """Yields the source file and line of each document, starting from an offset in the first shard.

    Yields None for documents in shards that don't record them. If the shards are at a URL, downloads only their index.
    """
    for shard in shards:
        path = manifest.folder / shard.file
        if manifest.url is not None:
            from pretrain.data.object_store import copied_file

            copied_file(manifest, index_path(path).name)
        index = read_index(path, shard.documents)
        if index is None:
            yield from itertools.repeat(None)
        for entry in index[np.searchsorted(index["end"], offset, side="right") :]:
            yield place_text(manifest.source_names[entry["source"]], manifest.input_format, int(entry["place"]))
        offset = 0
    yield from itertools.repeat(None)  # a last document that doesn't end in these shards


def _sequence_lines(number: int, sequence: Sequence, decoder) -> list[str]:
    lines = [
        f"sequence {number} · {sequence.source}/{sequence.file} · tokens {sequence.offset:,} to "
        f"{sequence.offset + len(sequence.ids) - 1:,} · {counted(len(sequence.documents), 'document')}"
    ]
    for place, document in enumerate(sequence.documents):
        text = decoder.decode(document.ids.tolist(), skip_special_tokens=False)
        hidden = len(text) - SHOWN_CHARACTERS
        cut = f" [... {hidden:,} more characters]" if hidden > 0 else ""
        part = ", continued from an earlier sequence" if place == 0 and sequence.begins_inside else ""
        lines.append(f"  document of {len(document.ids):,} tokens{part}")
        if document.origin is not None:
            lines.append(f"    from {document.origin}")
        lines += [f"    | {line}" for line in (text[:SHOWN_CHARACTERS] + cut).splitlines()]
    return lines
