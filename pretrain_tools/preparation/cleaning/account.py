"""Collects cleaning statistics: documents and bytes per rule and source, histograms, and sample documents.

The totals don't depend on how the input is split into parts.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from xxhash import xxh3_64_hexdigest

from pretrain.data.data_record import numbers_in

# These modules import numpy, which runs.py --help must not do.
if TYPE_CHECKING:
    from pretrain_tools.preparation.documents.records import Record

KEPT = "kept"
"""Used instead of a rule's name for documents that weren't removed."""
SAMPLES_PER_RULE = 10
EXCERPT_BYTES = 1200
DOMAIN_SAMPLE = 2000
"""Number of documents sampled to estimate each domain's share. The standard error is at most 0.011."""
MOST_SOURCES_COUNTED = 1000
OTHER_SOURCES = "other sources"
SAMPLES_FILE = "cleaning_samples.json"
"""File with sample documents, next to the manifest."""
MOST_NAMED = 5
"""Maximum number of sources listed in a message."""


@dataclass
class CleaningAccount:
    """Cleaning statistics. JSON-serializable. Bytes are counted before cleaning.

    All fields except `samples` are stored in the manifest.
    """

    by_source: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    """{source: {rule or KEPT: documents, bytes}}. After MOST_SOURCES_COUNTED sources, all others share one entry."""
    changed: dict[str, dict[str, int]] = field(default_factory=dict)
    """{stage: number of changed documents, number of bytes removed}."""
    histograms: dict[str, dict[str, int]] = field(default_factory=dict)
    """{histogram: {value: number of documents}}."""
    domains: dict[str, str] = field(default_factory=dict)
    """{hash of the text: URL host}, for the DOMAIN_SAMPLE kept documents with the smallest hashes."""
    samples: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """{rule: {hash: sample}}, for the SAMPLES_PER_RULE documents with the smallest hashes."""
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    """{list: documents, entries}. documents: number of documents that contain an entry. entries: indices of the
    entries found, such as "0,4-6"."""

    @property
    def rules(self) -> dict[str, dict[str, int]]:
        """{rule or KEPT: documents, bytes} for all sources."""
        total: dict[str, dict[str, int]] = {}
        for rules in self.by_source.values():
            add_numbers(total, rules)
        return total

    @property
    def removed(self) -> dict[str, dict[str, int]]:
        """{rule: documents, bytes} without KEPT."""
        return {rule: amounts for rule, amounts in self.rules.items() if rule != KEPT}

    def add_document(self, rule: str, record: "Record", measured: tuple[float, float] | None = None) -> None:
        """Counts a document that was removed by a rule or kept.

        Args:
            rule: name of the rule, or KEPT.
            record: the document before cleaning.
            measured: measured value and limit, if the rule has one.
        """
        text = record.text
        self._add_rules(record.source, {rule: {"documents": 1, "bytes": len(text)}})
        excerpt = text[:EXCERPT_BYTES].decode(errors="ignore")
        sample = {"source": record.source, "place": record.place, "bytes": len(text), "text": excerpt}
        if measured is not None:
            sample["value"], sample["limit"] = measured
        drawn = {_digest_of(text): sample} | self.samples.get(rule, {})
        self.samples[rule] = _smallest(drawn, SAMPLES_PER_RULE)

    def _add_rules(self, source: str, rules: Mapping[str, dict[str, int]]) -> None:
        if source not in self.by_source and len(self.by_source) >= MOST_SOURCES_COUNTED:
            source = OTHER_SOURCES
        add_numbers(self.by_source.setdefault(source, {}), rules)

    def add_domains(self, texts: Iterable[bytes], urls: Iterable[str | None]) -> None:
        """Records the domains of a sample of the kept documents."""
        for text, url in zip(texts, urls, strict=True):
            if url is not None:
                self.domains[_digest_of(text)] = domain_of(url)
        self.domains = _smallest(self.domains, DOMAIN_SAMPLE)

    def add_found(self, name: str, documents: int, entries: set[int]) -> None:
        """Counts documents that contain entries of a list, such as a benchmark. entries: their indices in the list."""
        before = self.found.get(name, {"documents": 0, "entries": ""})
        entries = ranges_text(numbers_in(before["entries"]) | entries)
        self.found[name] = {"documents": before["documents"] + documents, "entries": entries}

    def add(self, other: Self) -> None:
        """Adds statistics from later documents."""
        for source, rules in other.by_source.items():
            self._add_rules(source, rules)
        add_numbers(self.changed, other.changed)
        add_numbers(self.histograms, other.histograms)
        self.domains = _smallest(other.domains | self.domains, DOMAIN_SAMPLE)
        for rule, drawn in other.samples.items():
            # If several documents have the same text, keep the first.
            self.samples[rule] = _smallest(drawn | self.samples.get(rule, {}), SAMPLES_PER_RULE)
        for name, more in other.found.items():
            self.add_found(name, more["documents"], numbers_in(more["entries"]))

    def removed_whole_lines(self) -> list[str]:
        """Describes sources that lost more than 90% of their bytes, and the rules responsible."""
        whole = []
        for source, rules in self.by_source.items():
            stays = rules.get(KEPT, {"bytes": 0})["bytes"]
            if source == OTHER_SOURCES or 10 * stays >= sum(amounts["bytes"] for amounts in rules.values()):
                continue
            removed = sorted((-amounts["documents"], rule) for rule, amounts in rules.items() if rule != KEPT)
            examples = ", ".join(self._example(rule, source, -documents) for documents, rule in removed)
            whole.append(f"{source}: mostly removed by {examples}")
        more = [f"and {len(whole) - MOST_NAMED:,} more sources"] if len(whole) > MOST_NAMED else []
        return whole[:MOST_NAMED] + more

    def _example(self, rule: str, source: str, documents: int) -> str:
        samples = [sample for sample in self.samples.get(rule, {}).values() if sample["source"] == source]
        measured = next(filter(None, map(measured_text, samples)), "")
        return f"{rule}{measured and f' ({measured})'}" + (f" and {documents - 1:,} more" if documents > 1 else "")

    def as_manifest(self) -> dict[str, Any]:
        """Returns the manifest entry, which contains everything except the samples, sorted by name."""
        rules = self.rules.values()
        entry = vars(self) | {
            "documents_in": sum(amounts["documents"] for amounts in rules),
            "bytes_in": sum(amounts["bytes"] for amounts in rules),
            "removed": self.removed,
        }
        del entry["samples"]
        return json.loads(json.dumps(entry, sort_keys=True))


def measured_text(sample: Mapping[str, Any]) -> str:
    """Formats the measured value and limit, such as '0.42, at least 0.8'; '' if the rule has no limit."""
    if "value" not in sample:
        return ""
    value = sample["value"]
    limit = sample["limit"]
    return f"{value:,.6g}, {'at least' if value < limit else 'at most'} {limit:,.6g}"


def domain_of(url: str) -> str:
    """Returns the host of a URL: 'https://www.example.org/a' -> 'example.org'."""
    with suppress(ValueError):  # not a URL
        if host := urlsplit(url).hostname:
            return host.removeprefix("www.")
    return "no domain"


def recorded_account(folder: Path, manifest: dict[str, Any]) -> CleaningAccount:
    """Reads a prepared folder's cleaning statistics. They are empty if the documents weren't cleaned."""
    recorded = manifest.get("cleaning", {})
    path = folder / SAMPLES_FILE
    samples = json.loads(path.read_bytes()) if recorded and path.is_file() else {}
    names = recorded.keys() & {field.name for field in fields(CleaningAccount)}
    return CleaningAccount(**{name: recorded[name] for name in names}, samples=samples)


def ranges_text(numbers: Iterable[int]) -> str:
    """Formats numbers as ranges: {0, 4, 5, 6} becomes '0,4-6'."""
    import numpy as np

    ordered = np.array(sorted(numbers), np.int64)
    runs = np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1)
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs if len(run))


def add_numbers(numbers: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Adds the values in `more` to those in `numbers`, in place. Both may be nested."""
    for name, value in more.items():
        if isinstance(value, Mapping):
            add_numbers(numbers.setdefault(name, {}), value)
        else:
            numbers[name] = numbers.get(name, 0) + int(value)


def _digest_of(text: bytes) -> str:
    """Hashes the beginning of a document, for reproducible sampling."""
    return xxh3_64_hexdigest(text[:EXCERPT_BYTES])


def _smallest(drawn: dict[str, Any], count: int) -> dict[str, Any]:
    return {digest: drawn[digest] for digest in sorted(drawn)[:count]}
