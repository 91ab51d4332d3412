"""Summarizes the shards' manifests for a run's record and its model card."""

from collections import Counter
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import urlsplit

SHOWN_DOMAINS = 50
DATASET_KEYS = ("subset", "split", "rows", "fingerprint")
DATA_FILE = "data.json"
"""File in the run folder with each shard folder's totals (see training/run_records.py)."""
DECONTAMINATION = "decontamination"
"""Name of the decontamination stage in a manifest."""


def preparation_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """Summarizes a manifest's sources and the removed documents; {} if the manifest lists no sources.

    Includes the number and total size of files and the hosts of URLs, but no file names.
    """
    sources = [source for source in manifest.get("sources") or [] if isinstance(source, dict)]
    if not sources:
        return {}
    files = [source for source in sources if "split" not in source]
    options = manifest.get("options") or {}
    cleaning = manifest.get("cleaning") or {}
    domains = Counter((cleaning.get("domains") or {}).values())
    return {
        "datasets": [
            {"name": public_name(source.get("path")), **{key: source.get(key) for key in DATASET_KEYS}}
            for source in sources
            if "split" in source
        ],
        "files": len(files),
        "file_bytes": sum(source.get("bytes") or 0 for source in files),
        "file_hosts": sorted({host for source in files if (host := urlsplit(str(source.get("path"))).hostname)}),
        "filters": [stage.get("name") for stage in options.get("cleaning") or []],
        "documents_in": cleaning.get("documents_in"),
        "removed": {rule: counts.get("documents") for rule, counts in (cleaning.get("removed") or {}).items()},
        "skipped": {name: count for name, count in (manifest.get("skipped") or {}).items() if isinstance(count, int)},
        "deduplicated": bool(options.get("deduplicate")),
        "near_duplicates_at": (options.get("near_duplicates") or {}).get("threshold"),
        "languages": (cleaning.get("histograms") or {}).get("language"),
        "domains": dict(domains.most_common(SHOWN_DOMAINS)),
        "domain_sample": domains.total(),
    }


def is_hub_id(name: Any) -> bool:
    """Returns True if a name has the form owner/name and isn't a local path."""
    return (
        isinstance(name, str) and len(PurePath(name).parts) == 2 and name[:1] not in "./~" and not Path(name).exists()
    )


def public_name(path: str | None) -> str | None:
    """Returns a Hub ID in full, but only the last component of a local path."""
    if not path:
        return None
    return path if is_hub_id(path) else PurePath(path).name


def contamination_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Lists a manifest's decontamination results, one row per benchmark; [] if the data wasn't decontaminated.

    A row has the keys benchmark, items, sought (number of items long enough to search for), found (number of items
    found), documents (number of documents that contain an item), and remove (what was removed from them).
    """
    stages = (manifest.get("options") or {}).get("cleaning") or []
    found = (manifest.get("cleaning") or {}).get("found") or {}
    rows = []
    for stage in stages:
        for benchmark in stage.get("benchmarks", []) if stage.get("name") == DECONTAMINATION else []:
            here = found.get(benchmark["name"]) or {"entries": "", "documents": 0}
            counts = {"found": len(numbers_in(here["entries"])), "documents": here["documents"]}
            known = {"benchmark": benchmark["name"], "items": benchmark["items"], "sought": benchmark["sought"]}
            rows.append(known | counts | {"remove": stage["remove"]})
    return rows


def numbers_in(ranges: str) -> set[int]:
    """Parses '0,4-6' into {0, 4, 5, 6}."""
    pairs = [part.partition("-") for part in ranges.split(",") if part]
    return {n for first, _, last in pairs for n in range(int(first), int(last or first) + 1)}
