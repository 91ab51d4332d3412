"""The report on a prepared folder, as a page and as JSON: its input, what each rule removed, what stayed.

It shows what the folder records in the manifest, in the samples and near duplicates beside it, and in the indices.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.data_record import contamination_of
from pretrain.data.manifest import MANIFEST_FILE, SPLITS
from pretrain.data.shards import read_manifest
from pretrain.files import as_json, write_durably
from pretrain.units import bytes_text
from pretrain_tools.preparation.cleaning.account import KEPT, measured_text, recorded_account
from pretrain_tools.preparation.documents.document_index import read_index, tokens_of
from pretrain_tools.preparation.near_duplicate_search import NEAR_DUPLICATES_FILE

REPORT_PAGE = Path(__file__).with_name("report_page.html")
SKIPPED_RULES = {
    "filtered_documents": "--only, --min_characters, --max_characters",
    "empty_documents": "empty",
    "bad_records": "bad records (--on_error skip)",
    "duplicate_documents": "--deduplicate: copies of earlier documents",
    "near_duplicate_documents": "--near_duplicates: nearly copies of documents that stay",
}
"""Counts in the manifest's `skipped`, in the order of the preparation, and what removed the documents."""
MOST_SOURCE_ROWS = 50
MOST_DOMAIN_ROWS = 30
MOST_VALUE_ROWS = 40


def write_report(folder: Path, path: Path) -> list[Path]:
    """Writes the report on a prepared folder to `path` with .html and .json. Raises InputError where it is none."""
    facts = report_facts(folder)
    written = [path.with_name(f"{path.name}{suffix}") for suffix in (".html", ".json")]
    write_durably(written[0], report_page(facts))
    write_durably(written[1], as_json(facts))
    return written


def report_facts(folder: Path) -> dict[str, Any]:
    """Collects what the report shows, in JSON's types. Documents and bytes of a rule are those that it removed."""
    manifest = read_manifest(folder)
    made = json.loads((folder / MANIFEST_FILE).read_bytes())
    account = recorded_account(folder, made)
    skipped = made.get("skipped", {})
    kept = {
        split: dict(zip(("tokens", "documents", "bytes"), manifest.totals(split), strict=True)) for split in SPLITS
    }
    rules = [
        {"rule": rule, "documents": documents, "bytes": size}
        for rule, (documents, size) in account.rules.items()
        if rule != KEPT
    ]
    rules.sort(key=lambda row: (-row["documents"], row["rule"]))
    others = [
        {"rule": text, "documents": skipped[name], "bytes": skipped.get(name.replace("_documents", "_bytes"))}
        for name, text in SKIPPED_RULES.items()
        if skipped.get(name)
    ]
    near = folder / NEAR_DUPLICATES_FILE
    stayed = sum(split["documents"] for split in kept.values())
    return {
        "folder": folder.name,
        "options": {name: value for name, value in made.get("options", {}).items() if value is not None},
        "documents_in": stayed + sum(row["documents"] for row in [*rules, *others]),
        "documents_kept": stayed,
        "bytes_kept": sum(split["bytes"] for split in kept.values()),
        "splits": kept,
        "removed": rules,
        "skipped": others,
        "changed": {stage: {"documents": n, "fewer_bytes": size} for stage, (n, size) in account.changed.items()},
        "counts": account.counts,
        "by_source": account.sources,
        "samples": {rule: list(drawn.values()) for rule, drawn in account.samples.items()},
        "histograms": {
            "length of the documents that stayed, in bytes": _lengths(folder, manifest, "text_bytes"),
            "length of the documents that stayed, in tokens": _lengths(folder, manifest, "tokens"),
            **account.histograms,
        },
        "benchmarks": contamination_of(made),
        "found": account.found,
        "domains": _shares(account.domains.values()),
        "near_duplicates": json.loads(near.read_bytes()) if near.is_file() else None,
        "first_bad_records": skipped.get("first_bad_records", []),
    }


def _lengths(folder: Path, manifest: Any, unit: str) -> dict[str, int]:
    """Counts documents by length: {'at most 2^n': documents}, in order."""
    counts: Counter[int] = Counter()
    for shard in manifest.shards:
        index = read_index(folder / shard.file, shard.documents)
        if index is not None and len(index):
            sizes = tokens_of(index) if unit == "tokens" else index["text_bytes"].astype(np.int64)
            powers, numbers = np.unique(np.ceil(np.log2(np.maximum(sizes, 1))).astype(np.int64), return_counts=True)
            counts.update(dict(zip(powers.tolist(), numbers.tolist(), strict=True)))
    return {f"at most {2**power:,}": counts[power] for power in sorted(counts)}


def _shares(values: Iterable[str]) -> dict[str, float]:
    """Returns {value: its share}, the largest first."""
    counts = Counter(values)
    return {value: count / counts.total() for value, count in _most_frequent(counts, MOST_DOMAIN_ROWS)}


def _most_frequent(counts: Mapping[str, int], most: int) -> list[tuple[str, int]]:
    # Ties by name: the page must not depend on the order of parts.
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most]


def report_page(facts: Mapping[str, Any]) -> str:
    """Renders one HTML page that needs no other file."""
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(loader=FileSystemLoader(REPORT_PAGE.parent), autoescape=True)
    return environment.get_template(REPORT_PAGE.name).render(
        facts=facts,
        kept=KEPT,
        sources=_source_rows(facts["by_source"]),
        options=json.dumps(facts["options"], indent=1, ensure_ascii=False),
        share=_share,
        bytes=bytes_text,
        measured=measured_text,
        shown=_shown_values,
    )


def _shown_values(name: str, values: Mapping[str, int]) -> list[tuple[str, int]]:
    """Lists the rows of a histogram: the most frequent values, but every length in order."""
    if len(values) <= MOST_VALUE_ROWS or name.startswith("length"):
        return list(values.items())
    return _most_frequent(values, MOST_VALUE_ROWS)


def _source_rows(sources: Mapping[str, Mapping[str, Sequence[int]]]) -> list[dict[str, Any]]:
    """Lists the largest sources with the rules that removed most of their documents."""
    rows = []
    for source, rules in sources.items():
        total = sum(documents for documents, _ in rules.values())
        removed = sorted(((documents, rule) for rule, (documents, _) in rules.items() if rule != KEPT), reverse=True)
        row = {
            "source": source,
            "documents": total,
            "bytes": sum(size for _, size in rules.values()),
            "removed": total - rules.get(KEPT, (0, 0))[0],
            "mostly_by": ", ".join(f"{rule} {_share(documents, total)}" for documents, rule in removed[:3]),
        }
        rows.append(row)
    return sorted(rows, key=lambda row: (-row["bytes"], row["source"]))[:MOST_SOURCE_ROWS]


def _share(part: float, total: float) -> str:
    """Prints a share as '12 %', with enough digits that it is 0 only for nothing."""
    percent = 100 * part / total if total else 0.0
    digits = 0 if percent >= 10 or percent == 0 else min(4, 1 - math.floor(math.log10(percent)))
    return f"{percent:.{digits}f} %"
