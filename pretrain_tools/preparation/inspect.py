"""The page of --inspect on a prepared folder: counts, lengths of documents, the vocabulary, and a sample."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.data_record import contamination_of
from pretrain.data.manifest import MANIFEST_FILE, SPLITS, Manifest, Shard, id_dtype
from pretrain.data.shards import read_manifest
from pretrain.data.tokenizer import load_decoder
from pretrain_tools.preparation.cleaning.decontamination import contamination_text
from pretrain_tools.preparation.documents.document_index import read_index, tokens_of

READ_IDS = 1 << 22
BAR_CHARACTERS = 40
FREQUENT_TOKENS = 20
SAMPLED_DOCUMENTS = 3
SAMPLE_CHARACTERS = 300


def inspection_text(folder: Path) -> str:
    """Describes a folder of shards; reads every id. Raises InputError if it is none."""
    manifest = read_manifest(folder)
    counts = np.zeros(manifest.vocabulary_size, np.int64)
    lengths: list[np.ndarray] = []
    for shard in manifest.shards:
        lengths.append(document_lengths(manifest, shard))
        for ids in ids_of(manifest, shard):
            counts += np.bincount(ids, minlength=len(counts))[: len(counts)]
    decoder = load_decoder(manifest.tokenizer_folder)
    lines = [
        str(folder),
        *_count_lines(manifest),
        *(f"  decontaminated   {contamination_text(row)}" for row in contamination_of(_fields_of(manifest))),
        "",
        "tokens per document:",
        *histogram_lines(np.concatenate(lengths) if lengths else np.empty(0, np.int64)),
        "",
        *_vocabulary_lines(manifest, counts, decoder),
        "",
        *_sample_lines(manifest, decoder),
    ]
    return "\n".join(lines)


def ids_of(manifest: Manifest, shard: Shard) -> Iterator[np.ndarray]:
    """Reads the ids of a shard, READ_IDS at a time."""
    dtype = id_dtype(manifest.dtype)
    with (manifest.folder / shard.file).open("rb") as file:
        while len(ids := np.frombuffer(file.read(READ_IDS * dtype.itemsize), dtype)):
            yield ids


def document_lengths(manifest: Manifest, shard: Shard) -> np.ndarray:
    """Counts the tokens of each document without its end id: (documents,)."""
    index = read_index(manifest.folder / shard.file, shard.documents)
    if index is not None:
        return tokens_of(index) - 1
    first = 0
    ends = []
    for ids in ids_of(manifest, shard):
        ends.append(np.flatnonzero(ids == manifest.end_of_document_id) + first)
        first += len(ids)
    return np.diff(np.concatenate([[-1], *ends])) - 1


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


def histogram_lines(lengths: np.ndarray) -> list[str]:
    """Prints a histogram by powers of two, with the median and the extremes."""
    if not len(lengths):
        return ["  no documents"]
    bins = np.bincount(np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64))
    lines = []
    for power in range(int(np.flatnonzero(bins)[0]), len(bins)):
        low = 0 if power == 0 else (1 << power - 1) + 1
        bar = "█" * -(-int(bins[power]) * BAR_CHARACTERS // int(bins.max()))
        lines.append(f"  {low:>11,} to {1 << power:>11,}  {int(bins[power]):>11,}  {bar}".rstrip())
    share = [np.percentile(lengths, p) for p in (50, 90, 99)]
    lines.append(
        f"  shortest {lengths.min():,}, median {share[0]:,.0f}, 90 % up to {share[1]:,.0f}, 99 % up to "
        f"{share[2]:,.0f}, longest {lengths.max():,}, mean {lengths.mean():,.1f}"
    )
    return lines


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


def _sample_lines(manifest: Manifest, decoder) -> list[str]:
    """Documents at the beginning, a third and two thirds of the shards."""
    lines = ["sample:"]
    total = sum(shard.tokens for shard in manifest.shards)
    for number in range(SAMPLED_DOCUMENTS if total else 0):
        token = total * number // SAMPLED_DOCUMENTS
        for shard in manifest.shards:
            if token < shard.tokens:
                break
            token -= shard.tokens
        ids = np.memmap(manifest.folder / shard.file, id_dtype(manifest.dtype), mode="r").view(np.ndarray)
        start = _next_start(ids, token, manifest.end_of_document_id) if token else 0
        piece = ids[start : start + SAMPLE_CHARACTERS]
        ends = np.flatnonzero(piece == manifest.end_of_document_id)
        piece = piece[: ends[0]] if len(ends) else piece
        text = decoder.decode(piece.tolist(), skip_special_tokens=False)[:SAMPLE_CHARACTERS]
        lines += [f"  {shard.file}, token {start:,}:", *(f"    | {line}" for line in text.splitlines())]
    return lines


def _next_start(ids: np.ndarray, token: int, end: int) -> int:
    """Finds the start of the first document after a token; 0 if there is none."""
    for first in range(token, len(ids), READ_IDS):
        found = np.flatnonzero(ids[first : first + READ_IDS] == end)
        if len(found) and first + int(found[0]) + 1 < len(ids):
            return first + int(found[0]) + 1
    return 0
