"""The page of --inspect on a prepared folder: counts, lengths of documents, the vocabulary, and a sample."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.data_record import contamination_of
from pretrain.data.manifest import MANIFEST_FILE, SPLITS, Manifest, id_dtype
from pretrain.data.shards import ShardReader, read_manifest
from pretrain.data.tokenizer import load_decoder
from pretrain_tools.preparation.cleaning.decontamination import contamination_text

READ_IDS = 1 << 22
FREQUENT_TOKENS = 20
SAMPLED_DOCUMENTS = 3
SAMPLE_CHARACTERS = 300


def inspection_text(folder: Path) -> str:
    """Describes a folder of shards; reads every id. Raises InputError if it is none."""
    manifest = read_manifest(folder)
    readers = [ShardReader(manifest, split) for split in SPLITS]
    counts = np.zeros(manifest.vocabulary_size, np.int64)
    lengths = []
    for reader in readers:
        ends = [np.array([-1])]
        for start in range(0, reader.tokens, READ_IDS):
            ids = _ids(reader, start, READ_IDS)
            counts += np.bincount(ids, minlength=len(counts))[: len(counts)]
            ends.append(np.flatnonzero(ids == manifest.end_of_document_id) + start)
        lengths.append(np.diff(np.concatenate(ends)) - 1)
    decoder = load_decoder(manifest.tokenizer_folder)
    lines = [
        str(folder),
        *_count_lines(manifest),
        *(f"  decontaminated   {contamination_text(row)}" for row in contamination_of(_fields_of(manifest))),
        "",
        f"tokens per document: {lengths_text(np.concatenate(lengths))}",
        "",
        *_vocabulary_lines(manifest, counts, decoder),
        "",
        "sample:",
        *(line for reader in readers for line in _sample_lines(reader, decoder)),
    ]
    return "\n".join(lines)


def _ids(reader: ShardReader, start: int, most: int) -> np.ndarray:
    """Reads at most so many ids of a split."""
    ids = np.empty(min(most, reader.tokens - start), id_dtype(reader.manifest.dtype))
    reader.read(start, ids)
    return ids


def _fields_of(manifest: Manifest) -> dict[str, Any]:
    path = manifest.folder / MANIFEST_FILE  # shards of other tools have none
    return json.loads(path.read_bytes()) if path.is_file() else {}


def _count_lines(manifest: Manifest) -> list[str]:
    name = manifest.tokenizer_name
    lines = [f"  tokenizer        {name}, {manifest.vocabulary_size:,} ids, {manifest.dtype}"]
    for split in SPLITS:
        tokens, documents, text_bytes = manifest.totals(split)
        if not tokens:
            lines.append(f"  {split:<16} nothing")
            continue
        shards = len(manifest.of_split(split))
        rates = ""
        if text_bytes:
            text_tokens = max(1, tokens - documents)
            rates = (
                f", {text_tokens / text_bytes:.4f} tokens per byte ({text_bytes / text_tokens:.3f} bytes per token)"
            )
        counted = f"{tokens:,} tokens, {documents:,} documents, {text_bytes:,} bytes of text"
        lines.append(f"  {split:<16} {counted} in {shards} shard{'s' if shards != 1 else ''}{rates}")
    return lines


def lengths_text(lengths: np.ndarray) -> str:
    """Describes lengths by their extremes, percentiles and mean."""
    if not len(lengths):
        return "no documents"
    share = [np.percentile(lengths, p) for p in (50, 90, 99)]
    return (
        f"shortest {lengths.min():,}, median {share[0]:,.0f}, 90 % up to {share[1]:,.0f}, 99 % up to "
        f"{share[2]:,.0f}, longest {lengths.max():,}, mean {lengths.mean():,.1f}"
    )


def _vocabulary_lines(manifest: Manifest, counts: np.ndarray, decoder) -> list[str]:
    total = max(1, int(counts.sum()))
    unused = int(np.count_nonzero(counts == 0))
    lines = [
        f"unused vocabulary: {unused:,} of {len(counts):,} ids ({unused / len(counts):.1%})",
        "most frequent tokens:",
    ]
    for token in np.argsort(-counts, kind="stable")[:FREQUENT_TOKENS]:
        if counts[token]:
            shown = "end of document" if token == manifest.end_of_document_id else repr(decoder.decode([int(token)]))
            lines.append(f"  {token:>8}  {int(counts[token]):>13,}  {counts[token] / total:>6.2%}  {shown}")
    return lines


def _sample_lines(reader: ShardReader, decoder) -> list[str]:
    """Shows documents at the beginning, a third and two thirds of a split."""
    lines = []
    for number in range(SAMPLED_DOCUMENTS if reader.tokens else 0):
        start = reader.tokens * number // SAMPLED_DOCUMENTS
        ids = _ids(reader, start, READ_IDS)
        if start:
            # The place is within a document: the next one begins after its end, if there is one.
            skipped = int(np.argmax(ids == reader.manifest.end_of_document_id)) + 1
            ids = ids[skipped:]
            start += skipped
        if not len(ids):
            break
        ends = np.flatnonzero(ids[:SAMPLE_CHARACTERS] == reader.manifest.end_of_document_id)
        piece = ids[: ends[0] if len(ends) else SAMPLE_CHARACTERS]
        text = decoder.decode(piece.tolist(), skip_special_tokens=False)[:SAMPLE_CHARACTERS]
        lines += [f"  {reader.split}, token {start:,}:", *(f"    | {line}" for line in text.splitlines())]
    return lines
