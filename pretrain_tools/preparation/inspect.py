"""Describes a prepared folder for --inspect: counts, removed documents, document lengths, vocabulary and samples."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pretrain.data.data_record import contamination_of
from pretrain.data.manifest import MANIFEST_FILE, SPLITS, Manifest, id_dtype
from pretrain.data.shards import ShardReader, read_manifest
from pretrain.data.tokenizer import load_decoder
from pretrain.units import counted
from pretrain_tools.preparation.cleaning.account import CleaningAccount, measured_text
from pretrain_tools.preparation.cleaning.decontamination import contamination_text
from pretrain_tools.preparation.documents.document_index import UNDIVIDED
from pretrain_tools.preparation.encoded_part import Tally

READ_IDS = 1 << 22
FREQUENT_TOKENS = 20
FREQUENT_VALUES = 10
SAMPLED_DOCUMENTS = 3
SAMPLE_CHARACTERS = 300


def inspection_text(folder: Path) -> str:
    """Describes a folder of shards. Reads all token IDs. Raises InputError if the folder contains no shards."""
    manifest = read_manifest(folder)
    # Shards from other tools have no manifest.
    tally = Tally.recorded(manifest.folder) if (manifest.folder / MANIFEST_FILE).is_file() else None
    readers = [ShardReader(manifest, split) for split in _splits(manifest)]
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
    parts = [
        [str(folder), *figure_lines(manifest, tally)],
        _cleaning_lines(tally.cleaning) if tally else [],
        [f"tokens per document: {lengths_text(np.concatenate(lengths))}"],
        _vocabulary_lines(manifest, counts, decoder),
        ["sample:", *(line for reader in readers for line in _sample_lines(reader, decoder))],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _splits(manifest: Manifest) -> tuple[str, ...]:
    return (UNDIVIDED,) if manifest.of_split(UNDIVIDED) else SPLITS


def figure_lines(manifest: Manifest, tally: Tally | None) -> list[str]:
    """Formats a folder's counts. tally: None for shards from other tools."""
    name = manifest.tokenizer_name
    rows = [("tokenizer", f"{name}, {manifest.vocabulary_size:,} IDs, {manifest.dtype}")]
    for split in _splits(manifest):
        tokens, documents, text_bytes = manifest.totals(split)
        shards = counted(len(manifest.of_split(split)), "shard")
        text = f"{tokens:,} tokens, {documents:,} documents, {text_bytes:,} bytes of text in {shards}"
        if text_bytes:
            rate = max(1, tokens - documents) / text_bytes
            text += f", {rate:.4f} tokens per byte ({1 / rate:.3f} bytes per token)"
        rows.append((split, text if tokens else "empty"))
    if tally is not None:
        rows += _document_rows(manifest, tally)
    return [f"  {name:<16} {value}" for name, value in rows]


def _document_rows(manifest: Manifest, tally: Tally) -> list[tuple[str, str]]:
    documents = sum(shard.documents for shard in manifest.shards)
    rows = [("documents", f"{documents:,}; skipped {tally.skipped_text()}")]
    rows += [
        ("removed", f"{amounts['documents']:,} documents, {amounts['bytes']:,} bytes: {rule}")
        for rule, amounts in sorted(tally.cleaning.removed.items(), key=lambda item: -item[1]["documents"])
    ]
    rows += [("removed", line) for line in tally.cleaning.removed_whole_lines()]
    made = json.loads((manifest.folder / MANIFEST_FILE).read_bytes())
    rows += [("decontaminated", contamination_text(row)) for row in contamination_of(made)]
    if tally.unread_members:
        by_suffix = ", ".join(f"{number:,} {suffix}" for suffix, number in sorted(tally.unread_members.items()))
        rows.append(("not read", f"tar archive members that are not documents: {by_suffix}"))
    return rows + [("skipped", example) for example in tally.first_bad_records]


def _cleaning_lines(account: CleaningAccount) -> list[str]:
    """Formats the cleaning statistics, and samples of kept and removed documents."""
    measures = {**account.histograms, "domain (sampled)": Counter(account.domains.values())}
    lines = [f"{name}: {_shares_text(values)}" for name, values in measures.items() if values]
    for rule, drawn in account.samples.items():
        for sample in list(drawn.values())[:SAMPLED_DOCUMENTS]:
            measured = measured_text(sample)
            lines.append(f"  {rule}: {sample['source']}, {sample['place']:,}{measured and f' ({measured})'}")
            lines += _quoted(sample["text"])
    return lines


def _shares_text(values: Mapping[str, int]) -> str:
    """Formats the most frequent values with their shares. Ties are sorted by name."""
    total = sum(values.values())
    most = Counter(dict(sorted(values.items()))).most_common(FREQUENT_VALUES)
    return ", ".join(f"{value} {count / total:.1%}" for value, count in most)


def _quoted(text: str) -> list[str]:
    """Formats the beginning of a document as quoted lines."""
    return [f"    | {line}" for line in text[:SAMPLE_CHARACTERS].splitlines()]


def _ids(reader: ShardReader, start: int, most: int) -> np.ndarray:
    """Reads up to `most` token IDs from a split."""
    ids = np.empty(min(most, reader.tokens - start), id_dtype(reader.manifest.dtype))
    reader.read(start, ids)
    return ids


def lengths_text(lengths: np.ndarray) -> str:
    """Formats the minimum, percentiles, maximum and mean of lengths."""
    if not len(lengths):
        return "no documents"
    median, p90, p99 = np.percentile(lengths, (50, 90, 99))
    return (
        f"min {lengths.min():,}, median {median:,.0f}, p90 {p90:,.0f}, p99 {p99:,.0f}, max {lengths.max():,}, mean "
        f"{lengths.mean():,.1f}"
    )


def _vocabulary_lines(manifest: Manifest, counts: np.ndarray, decoder) -> list[str]:
    total = max(1, int(counts.sum()))
    unused = int(np.count_nonzero(counts == 0))
    lines = [
        f"unused vocabulary: {unused:,} of {len(counts):,} IDs ({unused / len(counts):.1%})",
        "most frequent tokens:",
    ]
    for token in np.argsort(-counts, kind="stable")[:FREQUENT_TOKENS]:
        if counts[token]:
            shown = "end of document" if token == manifest.end_of_document_id else repr(decoder.decode([int(token)]))
            lines.append(f"  {token:>8}  {int(counts[token]):>13,}  {counts[token] / total:>6.2%}  {shown}")
    return lines


def _sample_lines(reader: ShardReader, decoder) -> list[str]:
    """Formats SAMPLED_DOCUMENTS documents, evenly spaced across a split."""
    lines = []
    for number in range(SAMPLED_DOCUMENTS if reader.tokens else 0):
        start = reader.tokens * number // SAMPLED_DOCUMENTS
        ids = _ids(reader, start, READ_IDS)
        if start:
            # Skip to the beginning of the next document.
            skipped = int(np.argmax(ids == reader.manifest.end_of_document_id)) + 1
            ids = ids[skipped:]
            start += skipped
        if not len(ids):
            break
        ends = np.flatnonzero(ids[:SAMPLE_CHARACTERS] == reader.manifest.end_of_document_id)
        piece = ids[: ends[0] if len(ends) else SAMPLE_CHARACTERS]
        text = decoder.decode(piece.tolist(), skip_special_tokens=False)
        lines += [f"  {reader.split}, token {start:,}:", *_quoted(text)]
    return lines
