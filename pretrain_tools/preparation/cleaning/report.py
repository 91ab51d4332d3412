"""The report on a prepared folder: what went in, what each rule removed beside what stayed, as a page and as JSON.

Everything in it is recorded in the folder: the manifest, the samples and the near duplicates beside it, the indices.
"""

import html
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
from pretrain_tools.preparation.cleaning.near_duplicate_search import NEAR_DUPLICATES_FILE
from pretrain_tools.preparation.documents.document_index import read_index, tokens_of

REPORT_PAGE = Path(__file__).with_name("report_page.html")
SKIPPED_RULES = {
    "filtered_documents": "--only, --min_characters, --max_characters",
    "empty_documents": "empty",
    "bad_records": "bad records (--on_error skip)",
    "duplicate_documents": "--deduplicate: copies of earlier documents",
    "near_duplicate_documents": "--near_duplicates: nearly copies of documents that stay",
}
"""Count in the manifest's `skipped`, in the order of the preparation, to what removed the documents."""
BEFORE_CLEANING = ("filtered_documents", "empty_documents", "bad_records")
MOST_SOURCE_ROWS, MOST_DOMAIN_ROWS, MOST_VALUE_ROWS = 50, 30, 40
"""Rows shown of a table."""


def write_report(folder: Path, path: Path) -> list[Path]:
    """Writes the report on a prepared folder to `path` with .html and .json. Raises InputError where it is none."""
    facts = report_facts(folder)
    written = [path.with_name(f"{path.name}{suffix}") for suffix in (".html", ".json")]
    write_durably(written[0], report_page(facts))
    write_durably(written[1], as_json(facts))
    return written


def report_facts(folder: Path) -> dict[str, Any]:
    """What the report shows, in JSON's types. Documents and bytes of a rule are those that it removed."""
    manifest = read_manifest(folder)
    made = json.loads((folder / MANIFEST_FILE).read_bytes())
    account, skipped = recorded_account(folder, made), made.get("skipped", {})
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
    before = sum(skipped.get(name, 0) for name in BEFORE_CLEANING)
    after = sum(skipped.get(name, 0) for name in SKIPPED_RULES if name not in BEFORE_CLEANING)
    stayed = sum(split["documents"] for split in kept.values())
    return {
        "folder": folder.name,
        "options": {name: value for name, value in made.get("options", {}).items() if value is not None},
        "documents_in": before + after + stayed + sum(row["documents"] for row in rules),
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
    """{'at most 2^n': documents}, in order."""
    counts: Counter[int] = Counter()
    for shard in manifest.shards:
        index = read_index(folder / shard.file, shard.documents)
        if index is not None and len(index):
            sizes = tokens_of(index) if unit == "tokens" else index["text_bytes"].astype(np.int64)
            powers, numbers = np.unique(np.ceil(np.log2(np.maximum(sizes, 1))).astype(np.int64), return_counts=True)
            counts.update(dict(zip(powers.tolist(), numbers.tolist(), strict=True)))
    return {f"at most {2**power:,}": counts[power] for power in sorted(counts)}


def _shares(values: Iterable[str]) -> dict[str, float]:
    """{value: its share}, the largest first."""
    counts = Counter(values)
    total = sum(counts.values())
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return {value: count / total for value, count in ordered[:MOST_DOMAIN_ROWS]}


def report_page(facts: Mapping[str, Any]) -> str:
    """One HTML page that needs nothing else."""
    total = facts["documents_in"]
    stayed, size = facts["documents_kept"], bytes_text(facts["bytes_kept"])
    tokens = sum(split["tokens"] for split in facts["splits"].values())
    head = f"{total:,} documents went in; {stayed:,} ({_share(stayed, total)}) stayed: {size}, {tokens:,} tokens."
    sections = [
        _rules_section(facts),
        _benchmarks_section(facts["benchmarks"], facts["found"]),
        _samples_section(facts["samples"]),
        _near_section(facts["near_duplicates"]),
        _histograms_section(facts),
        _sources_section(facts["by_source"]),
        _options_section(facts["options"]),
    ]
    page = REPORT_PAGE.read_text(encoding="utf-8")
    for name, text in (
        ("TITLE", _escape(facts["folder"])),
        ("HEAD", _escape(head)),
        ("SECTIONS", "\n".join(filter(None, sections))),
    ):
        page = page.replace(f"{{{{{name}}}}}", text)
    return page


def _rules_section(facts: Mapping[str, Any]) -> str:
    total = facts["documents_in"]
    rows = [
        [_escape(row["rule"]), f"{row['documents']:,}", _bar(row["documents"], total), _bytes(row["bytes"])]
        for row in [*facts["removed"], *facts["skipped"]]
    ]
    text = "<h2>What was removed</h2>"
    text += _table(["rule", "documents", "of all", "text"], rows) if rows else "<p>Nothing.</p>"
    changed = [
        [
            _escape(stage),
            f"{row['documents']:,}",
            _bar(row["documents"], total),
            f"{bytes_text(abs(row['fewer_bytes']))} {'less' if row['fewer_bytes'] >= 0 else 'more'}",
        ]
        for stage, row in sorted(facts["changed"].items())
    ]
    if changed:
        text += "<h2>What was changed</h2>" + _table(["stage", "documents", "of all", "text"], changed)
    if facts["counts"]:
        counted = [[_escape(name), f"{number:,}"] for name, number in facts["counts"].items()]
        text += "<h2>Counted</h2>" + _table(["what", "number"], counted)
    return text


def _benchmarks_section(benchmarks: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> str:
    if not benchmarks:
        return ""
    rows = [
        [
            _escape(row["benchmark"]),
            f"{row['items']:,}",
            f"{row['sought']:,}",
            f"{row['found']:,}",
            f"{row['documents']:,}",
        ]
        for row in benchmarks
    ]
    text = "<h2>Benchmarks kept out</h2>"
    text += _table(["benchmark", "items", "long enough to be sought", "found", "in documents"], rows)
    for name, entries in found.items():
        examples = [
            [
                f"{example['entry']:,}",
                _escape(f"{example['source']}, {example['place']:,}"),
                _escape(example["excerpt"]),
            ]
            for example in entries["examples"]
        ]
        text += (
            f"<details><summary>{_escape(name)}</summary>{_table(['item', 'document', 'text'], examples)}</details>"
        )
    return text


def _samples_section(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    removed = [rule for rule in sorted(samples) if rule != KEPT]
    if not removed:
        return ""
    kept = samples.get(KEPT, [])
    parts = ["<h2>Samples</h2><p>Drawn at random: to the left what the rule removed, to the right what stayed.</p>"]
    for rule in removed:
        columns = "".join(
            f"<div><h4>{title}</h4>{''.join(map(_document, documents))}</div>"
            for title, documents in ((f"removed by {_escape(rule)}", samples[rule]), ("stayed", kept))
        )
        parts.append(f"<details><summary>{_escape(rule)}</summary><div class='pair'>{columns}</div></details>")
    return "".join(parts)


def _document(sample: Mapping[str, Any]) -> str:
    where = f"{sample['source']}, {sample['place']:,}; {bytes_text(sample['bytes'])}"
    if measured := measured_text(sample):
        where += f"; measured {measured}"
    return f"<p class='where'>{_escape(where)}</p><pre>{_escape(sample['text'])}</pre>"


def _near_section(near: Mapping[str, Any] | None) -> str:
    if not near:
        return ""
    text = (
        f"<h2>Near duplicates</h2><p>{near['removed']:,} of {near['documents']:,} documents, in {near['clusters']:,} "
    )
    text += f"clusters; the largest has {near['largest_cluster']:,} documents.</p>"
    if near["clusters"]:
        sizes = {f"at most {n}": c for n, c in near["clusters_of_at_most"].items()}
        text += _histogram("documents per cluster", sizes)
    for pair in near["examples"]:
        columns = "".join(f"<div><h4>{name}</h4>{_document(pair[name])}</div>" for name in ("removed", "kept"))
        summary = f"Jaccard {pair['jaccard']:.3f}, {pair['copies']:,} near copies of the one that stays"
        text += f"<details><summary>{summary}</summary><div class='pair'>{columns}</div></details>"
    return text


def _histograms_section(facts: Mapping[str, Any]) -> str:
    shown = {name: values for name, values in facts["histograms"].items() if values}
    parts = [_histogram(name, values) for name, values in shown.items()]
    if facts["domains"]:
        rows = [[_escape(name), _bar(share, 1)] for name, share in facts["domains"].items()]
        parts.append(
            "<div><h3>domains of what stayed (estimated from a sample)</h3>" + _table(["", ""], rows) + "</div>"
        )
    return f"<h2>Distributions</h2><div class='grid'>{''.join(parts)}</div>" if parts else ""


def _histogram(name: str, values: Mapping[str, int]) -> str:
    total, rows = sum(values.values()), list(values.items())
    if len(rows) > MOST_VALUE_ROWS and not name.startswith("length"):
        rows = sorted(rows, key=lambda item: (-item[1], item[0]))[:MOST_VALUE_ROWS]
    table = _table(["", "", ""], [[_escape(value), f"{n:,}", _bar(n, total)] for value, n in rows])
    return f"<div><h3>{_escape(name)}</h3>{table}</div>"


def _sources_section(sources: Mapping[str, Mapping[str, Sequence[int]]]) -> str:
    def amounts(rules: Mapping[str, Sequence[int]]) -> tuple[int, int]:
        return sum(n for n, _ in rules.values()), sum(size for _, size in rules.values())

    largest = sorted(sources.items(), key=lambda item: (-amounts(item[1])[1], item[0]))[:MOST_SOURCE_ROWS]
    rows = []
    for source, rules in largest:
        total, size = amounts(rules)
        removed = sorted(((n, rule) for rule, (n, _) in rules.items() if rule != KEPT), reverse=True)[:3]
        by = ", ".join(f"{rule} {_share(n, total)}" for n, rule in removed)
        gone = total - rules.get(KEPT, (0, 0))[0]
        rows.append([_escape(source), f"{total:,}", _bytes(size), _bar(gone, total), _escape(by)])
    if not rows:
        return ""
    more = f"<p>The {MOST_SOURCE_ROWS} largest of {len(sources):,}.</p>" if len(sources) > MOST_SOURCE_ROWS else ""
    columns = ["source", "documents in", "text in", "removed", "mostly by"]
    return "<h2>By source</h2>" + more + _table(columns, rows)


def _options_section(options: Mapping[str, Any]) -> str:
    return f"<h2>Options</h2><pre>{_escape(json.dumps(options, indent=1, ensure_ascii=False))}</pre>"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML."""
    head = f"<tr>{''.join(f'<th>{name}</th>' for name in columns)}</tr>" if any(columns) else ""
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class='scroll'><table>{head}{body}</table></div>"


def _bar(part: float, total: float) -> str:
    width = 100 * part / total if total else 0.0
    return f"<span class='bar'><i style='width:{width:.2f}%'></i></span> {_share(part, total)}"


def _share(part: float, total: float) -> str:
    """'12 %', with so many digits that what is there is not 0."""
    percent = 100 * part / total if total else 0.0
    digits = 0 if percent >= 10 or percent == 0 else min(4, 1 - math.floor(math.log10(percent)))
    return f"{percent:.{digits}f} %"


def _bytes(size: int | None) -> str:
    return "" if size is None else bytes_text(size)


def _escape(text: object) -> str:
    return html.escape(str(text))
