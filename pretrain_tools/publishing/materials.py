"""Writes bom.cdx.json: a published model's files and origin as a CycloneDX bill of materials (ML-BOM).

Format: https://cyclonedx.org/docs/1.6/json (ECMA-424). cyclonedx-python-lib doesn't support model cards.
"""

import json
import time
import uuid
from pathlib import Path
from typing import Any

from pretrain.data.data_record import is_hub_id, public_name
from pretrain.files import CARD_FILE, PROVENANCE_FILE, SEAL_FILE, SIGNATURE_FILE, sha256_of
from pretrain_tools.publishing.card import CARD_MEASURES, score_name, statements
from pretrain_tools.publishing.facts import DataSource, Facts
from pretrain_tools.publishing.training_content import TRAINING_CONTENT_FILE
from pretrain_tools.runs.history import Score, is_number

MATERIALS_FILE = "bom.cdx.json"
MATERIALS_FORMAT = {
    "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json", "bomFormat": "CycloneDX", "specVersion": "1.6"
}  # fmt: skip
SPDX = {
    "apache-2.0": "Apache-2.0", "mit": "MIT", "bsd-3-clause": "BSD-3-Clause", "cc0-1.0": "CC0-1.0",
    "cc-by-4.0": "CC-BY-4.0", "cc-by-sa-4.0": "CC-BY-SA-4.0", "cc-by-nc-4.0": "CC-BY-NC-4.0",
    "cc-by-nc-sa-4.0": "CC-BY-NC-SA-4.0", "gpl-3.0": "GPL-3.0", "agpl-3.0": "AGPL-3.0", "lgpl-3.0": "LGPL-3.0",
    "mpl-2.0": "MPL-2.0", "odc-by": "ODC-By-1.0", "unlicense": "Unlicense",
}  # fmt: skip
"""{Hub license ID: SPDX ID}. Other licenses are listed by name."""
CONFIDENCE = 1.96
"""Half-width of a 95% interval, in standard errors."""

Entry = dict[str, Any]


def write_materials(facts: Facts, folder: Path) -> None:
    """Writes a reproducible bill of materials. Must be called before the provenance and signature are written."""
    # Provenance and signature contain the hash of this file, so it can't contain theirs.
    beside = {MATERIALS_FILE, SEAL_FILE, PROVENANCE_FILE, SIGNATURE_FILE}
    files = {path.name: sha256_of(path) for path in sorted(folder.iterdir()) if path.name not in beside}
    bill = bill_of_materials(facts, files)
    # Derive the UUID from the content, so that the file is reproducible.
    serial = uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(bill))
    named = {"serialNumber": f"urn:uuid:{serial}", "version": 1}
    text = json.dumps({**MATERIALS_FORMAT, **named, **bill}, indent=1, ensure_ascii=False) + "\n"
    (folder / MATERIALS_FILE).write_text(text, encoding="utf-8")


def known(value: Any) -> Any:
    """Removes None and empty values from dicts, recursively."""
    if isinstance(value, dict):
        return {key: found for key, item in value.items() if (found := known(item)) not in (None, "", [], {})}
    return [known(item) for item in value] if isinstance(value, list) else value


def bill_of_materials(facts: Facts, files: dict[str, str]) -> Entry:
    """Builds the bill of materials.

    files: {name: sha256}
    """
    times = [event["time"] for event in facts.history.events if is_number(event.get("time"))]
    metadata = {
        # The current time would make the file irreproducible.
        "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(max(times))) if times else None,
        "tools": {
            "components": [{"type": "application", "name": "Groundwork", "version": facts.environment.get("commit")}]
        },
        "component": model_entry(facts, files),
    }
    components = [dataset_entry(facts, source) for source in facts.distinct_sources]
    for name, version in (facts.environment.get("packages") or {}).items():
        purl = f"pkg:pypi/{name.lower().replace('_', '-')}@{version}"
        components.append({"type": "library", "bom-ref": purl, "name": name, "version": str(version), "purl": purl})
    return {"metadata": known(metadata), "components": known(components)}


def properties_of(values: Entry) -> list[Entry]:
    """Returns CycloneDX properties, with `groundwork:` as the prefix."""
    return [{"name": f"groundwork:{name}", "value": str(value)} for name, value in known(values).items()]


def hashed(sha256: str | None) -> list[Entry]:
    return [{"alg": "SHA-256", "content": sha256}] if sha256 else []


def model_entry(facts: Facts, files: dict[str, str]) -> Entry:
    """Describes the model: its files, origin and card."""
    offer = facts.offer
    links = [{"type": "model-card", "url": CARD_FILE}, {"type": "documentation", "url": TRAINING_CONTENT_FILE}]
    if offer.repository:
        url = f"https://huggingface.co/{offer.repository}/tree/{offer.revision}"
        links.insert(0, {"type": "distribution", "url": url})
    flops = facts.training_flops
    license = {"id": SPDX[offer.license]} if offer.license in SPDX else {"name": offer.license}
    return {
        "type": "machine-learning-model",
        "bom-ref": "model",
        "name": facts.title,
        "group": offer.owner,
        "version": f"step-{facts.step}",
        "supplier": {"name": offer.owner},
        "description": " ".join(statements("introduction", facts)),
        "licenses": [{"license": license}] if offer.license else [],
        "purl": f"pkg:huggingface/{offer.repository}" if offer.repository else None,
        "externalReferences": links,
        "components": [
            {"type": "file", "bom-ref": f"file:{name}", "name": name, "hashes": hashed(sha256)}
            for name, sha256 in files.items()
        ],
        "pedigree": pedigree_of(facts),
        "modelCard": model_card_entry(facts),
        "properties": properties_of(
            {
                "run": facts.run_name,
                "step": facts.step,
                "training_tokens": facts.tokens,
                "parameters": facts.parameters,
                "active_parameters": facts.active_parameters,
                "training_flops": flops and f"{flops:.6g}",
                "dtype": offer.dtype,
                "languages": ", ".join(offer.languages),
                "evaluation_confidence": "95%, from the standard error",
                "training_energy": facts.history.energy,
            }
        ),
    }


def pedigree_of(facts: Facts) -> Entry:
    """Describes the origin of the weights: ancestor models and restarts."""
    ancestors = [
        {"type": "machine-learning-model", "name": public_name(trunk["run"]), "version": f"step-{trunk['step']}"}
        for trunk in facts.lineage
    ]
    if facts.is_continued:
        name, _, revision = (facts.model_source or "").partition("@")
        purl = f"pkg:huggingface/{name}" if is_hub_id(name) else None
        base = {"type": "machine-learning-model", "name": public_name(name), "version": revision, "purl": purl}
        ancestors.append(base)
    return {"ancestors": ancestors, "notes": "; ".join(statements("lineage", facts))}


def model_card_entry(facts: Facts) -> Entry:
    """Builds CycloneDX's model card."""
    architectures = facts.model.get("architectures") or [facts.model.get("model_type")]
    validations = [
        {"type": name, "value": f"{event[name]:.6g}", "slice": f"validation text of {source}, step {event['step']}"}
        for source, event in facts.validation.items()
        for name in CARD_MEASURES
        if is_number(event.get(name))
    ]
    return {
        "bom-ref": "model-card",
        "modelParameters": {
            "approach": {"type": "self-supervised"},
            "task": "text-generation",
            "architectureFamily": facts.model.get("model_type"),
            "modelArchitecture": architectures[0],
            "datasets": [{"ref": data_reference(source)} for source in facts.distinct_sources],
            "inputs": [{"format": "text"}],
            "outputs": [{"format": "text"}],
        },
        "quantitativeAnalysis": {"performanceMetrics": [*validations, *map(score_entry, facts.scores)]},
        "considerations": {
            "technicalLimitations": statements("limits", facts),
        },
    }


def score_entry(score: Score) -> Entry:
    """Describes a score, with its 95% interval if the standard error is known."""
    about = score_name(score)
    entry = {"type": score.metric, "value": f"{score.value:.6g}"}
    entry["slice"] = about if score.is_whole else f"{about}, only part of the task, not comparable"
    if score.standard_error is not None:
        reach = CONFIDENCE * score.standard_error
        bounds = {"lowerBound": f"{score.value - reach:.6g}", "upperBound": f"{score.value + reach:.6g}"}
        entry["confidenceInterval"] = bounds
    return entry


def data_reference(source: DataSource) -> str:
    return f"data:{source.name}" + (f":{source.manifest_sha256[:12]}" if source.manifest_sha256 else "")


def dataset_entry(facts: Facts, source: DataSource) -> Entry:
    """Describes a folder of shards, identified by the hash of its manifest."""
    made = source.preparation
    # A curriculum may use the same folder in several stages, with different weights.
    parts = [one for one in facts.sources if data_reference(one) == data_reference(source)]
    names = [dataset.get("name") for dataset in made.get("datasets") or []] or source.hub_datasets
    about = {
        "share": "; ".join(f"{one.weight:.6g}" for one in parts),
        "tokens": source.tokens,
        "documents": source.documents,
        "text_bytes": source.text_bytes,
        "tokenizer": source.tokenizer,
        "tokenizer_sha256": source.tokenizer_sha256,
        "files": made.get("files"),
        "filters": ", ".join(map(str, made.get("filters") or [])),
        "deduplicated": made.get("deduplicated"),
        "near_duplicates_at": made.get("near_duplicates_at"),
        "kept_out": ", ".join(row["benchmark"] for row in source.contamination),
    }
    return {
        "type": "data",
        "bom-ref": data_reference(source),
        "name": source.name,
        "hashes": hashed(source.manifest_sha256),
        "externalReferences": [
            {"type": "distribution", "url": f"https://huggingface.co/datasets/{name}"}
            for name in dict.fromkeys(names)
            if name and "/" in name
        ],
        "properties": properties_of(about),
    }
