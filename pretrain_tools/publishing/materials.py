"""bom.cdx.json: what a published model consists of and was made from, as a CycloneDX bill of materials (ML-BOM).

https://cyclonedx.org/docs/1.6/json (ECMA-424). Written here: cyclonedx-python-lib has no model cards.
"""

import hashlib
import json
import time
import uuid
from pathlib import Path
from typing import Any

from pretrain.data.data_record import is_hub_id, public_name
from pretrain.files import CARD_FILE, PROVENANCE_FILE, SEAL_FILE, SIGNATURE_FILE, sha256_of
from pretrain.runs.history import Score, is_number
from pretrain.units import JOULES_PER_KWH
from pretrain_tools.publishing.card import (
    CARD_MEASURES,
    Publication,
    introduction,
    limits_text,
    lineage_text,
    score_name,
    title_of,
)
from pretrain_tools.publishing.card_facts import CardFacts, DataSource, distinct_sources, training_flops
from pretrain_tools.publishing.training_content import TRAINING_CONTENT_FILE

MATERIALS_FILE = "bom.cdx.json"
MATERIALS_FORMAT = {
    "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json", "bomFormat": "CycloneDX", "specVersion": "1.6"
}  # fmt: skip
MODEL = "model"
"""What the model is called within the bill."""
SPDX = {
    "apache-2.0": "Apache-2.0", "mit": "MIT", "bsd-3-clause": "BSD-3-Clause", "cc0-1.0": "CC0-1.0",
    "cc-by-4.0": "CC-BY-4.0", "cc-by-sa-4.0": "CC-BY-SA-4.0", "cc-by-nc-4.0": "CC-BY-NC-4.0",
    "cc-by-nc-sa-4.0": "CC-BY-NC-SA-4.0", "gpl-3.0": "GPL-3.0", "agpl-3.0": "AGPL-3.0", "lgpl-3.0": "LGPL-3.0",
    "mpl-2.0": "MPL-2.0", "odc-by": "ODC-By-1.0", "unlicense": "Unlicense",
}  # fmt: skip
"""{licence id of the Hub: SPDX's}; the others go by name."""
CONFIDENCE = 1.96
"""Standard errors to each side of a score: 95 %."""
GRAMS_PER_TONNE = 1e6

Entry = dict[str, Any]


def write_materials(facts: CardFacts, folder: Path, publication: Publication) -> None:
    """Writes the bill into a folder that has all files but those that cover it. The same files give the same bytes."""
    (folder / MATERIALS_FILE).write_text(materials_text(facts, publication, hashes_in(folder)), encoding="utf-8")


def hashes_in(folder: Path) -> dict[str, str]:
    """{name: sha256} of the files that the bill lists: not those that have its own hash in them."""
    beside = {MATERIALS_FILE, SEAL_FILE, PROVENANCE_FILE, SIGNATURE_FILE}
    return {path.name: sha256_of(path) for path in sorted(folder.iterdir()) if path.name not in beside}


def materials_text(facts: CardFacts, publication: Publication, files: dict[str, str]) -> str:
    """The bill as JSON. files: {name: sha256}"""
    bill = bill_of_materials(facts, publication, files)
    digest = hashlib.sha256(json.dumps(bill, default=str).encode()).hexdigest()
    named = {"serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, digest)}", "version": 1}
    return json.dumps({**MATERIALS_FORMAT, **named, **bill}, indent=1, ensure_ascii=False) + "\n"


def bill_of_materials(facts: CardFacts, publication: Publication, files: dict[str, str]) -> Entry:
    """metadata with the model, its data and packages, and which depends on which."""
    datasets = [dataset_entry(facts, source) for source in distinct_sources(facts.sources)]
    packages = [package_entry(*item) for item in (facts.environment.get("packages") or {}).items()]
    components = [*datasets, *packages]
    tool = without_none({"type": "application", "name": "Groundwork", "version": facts.environment.get("commit")})
    return {
        "metadata": without_none(
            {
                "timestamp": _last_time(facts),
                "lifecycles": [{"phase": "build"}],
                "tools": {"components": [tool]},
                "component": model_entry(facts, publication, files),
                "supplier": {"name": owner} if (owner := _owner_of(publication)) else None,
            }
        ),
        "components": components,
        "dependencies": [
            {"ref": MODEL, "dependsOn": [entry["bom-ref"] for entry in components]},
            *({"ref": entry["bom-ref"]} for entry in components),
        ],
    }


def _owner_of(publication: Publication) -> str | None:
    return publication.repository.partition("/")[0] if publication.repository else None


def _last_time(facts: CardFacts) -> str | None:
    """Of the training, not of now: the same run gives the same bytes."""
    times = [event["time"] for event in facts.history.events if is_number(event.get("time"))]
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(max(times))) if times else None


def without_none(entry: Entry) -> Entry:
    """Without what is not known."""
    return {key: value for key, value in entry.items() if value not in (None, [], {})}


def properties_of(values: Entry) -> list[Entry]:
    """Of names of ours, which CycloneDX keeps apart by a prefix."""
    return [{"name": f"groundwork:{name}", "value": str(value)} for name, value in values.items() if value is not None]


def hashed(sha256: str | None) -> list[Entry]:
    return [{"alg": "SHA-256", "content": sha256}] if sha256 else []


def model_entry(facts: CardFacts, publication: Publication, files: dict[str, str]) -> Entry:
    """The model, its files, where it came from, and its card."""
    repository = publication.repository
    links = [{"type": "model-card", "url": CARD_FILE}, {"type": "documentation", "url": TRAINING_CONTENT_FILE}]
    if repository:
        url = f"https://huggingface.co/{repository}/tree/{publication.revision}"
        links.insert(0, {"type": "distribution", "url": url})
    flops, _ = training_flops(facts)
    about = {
        "run": facts.run_name, "step": facts.step, "training_tokens": facts.tokens, "parameters": facts.parameters,
        "active_parameters": facts.active_parameters, "training_flops": flops and f"{flops:.6g}",
        "dtype": publication.dtype, "languages": ", ".join(publication.languages) or None,
        "evaluation_confidence": "95 %, of the standard error",
    }  # fmt: skip
    license = publication.license
    spdx = {"id": SPDX[license]} if license in SPDX else {"name": license}
    owner = _owner_of(publication)
    return without_none(
        {
            "type": "machine-learning-model",
            "bom-ref": MODEL,
            "name": title_of(facts, publication),
            "group": owner,
            "version": f"step-{facts.step}",
            "supplier": {"name": owner} if owner else None,
            "description": introduction(facts),
            "licenses": [{"license": spdx}] if license else None,
            "purl": f"pkg:huggingface/{repository}" if repository else None,
            "externalReferences": links,
            "components": [
                {"type": "file", "bom-ref": f"file:{name}", "name": name, "hashes": hashed(sha256)}
                for name, sha256 in files.items()
            ],
            "pedigree": pedigree_of(facts),
            "modelCard": model_card_entry(facts, publication),
            "properties": properties_of(about),
        }
    )


def pedigree_of(facts: CardFacts) -> Entry:
    """What the weights began with, by which code they were trained, and every restart."""
    ancestors = [
        {"type": "machine-learning-model", "name": public_name(trunk["run"]), "version": f"step-{trunk['step']}"}
        for trunk in facts.lineage
    ]
    if facts.setting("init") == "pretrained":
        name, _, revision = (facts.model_source or "").partition("@")
        base = {"type": "machine-learning-model", "name": public_name(name), "version": revision or None}
        if is_hub_id(name):
            base["purl"] = f"pkg:huggingface/{name}"
        ancestors.append(without_none(base))
    commit = facts.environment.get("commit")
    return without_none(
        {
            "ancestors": ancestors,
            "commits": [{"uid": commit, "message": "the code that trained it"}] if commit else None,
            "notes": "; ".join(line.removeprefix("- ") for line in lineage_text(facts).splitlines()) or None,
        }
    )


def model_card_entry(facts: CardFacts, publication: Publication) -> Entry:
    """CycloneDX's own model card."""
    limits = [line.removeprefix("- ") for line in limits_text(facts, publication).splitlines()]
    architectures = facts.model.get("architectures") or [facts.model.get("model_type")]
    considerations = {
        "useCases": ["continuing text; it has not been trained to follow instructions or to chat"],
        "technicalLimitations": limits,
        "ethicalConsiderations": [
            {
                "name": "It continues text as its training text would, wrong, private or offensive parts included.",
                "mitigationStrategy": "none in the model: no safety training and no filter of what it writes",
            }
        ],
        "environmentalConsiderations": environment_entry(facts),
    }
    return {
        "bom-ref": "model-card",
        "modelParameters": without_none(
            {
                "approach": {"type": "self-supervised"},
                "task": "text-generation",
                "architectureFamily": facts.model.get("model_type"),
                "modelArchitecture": next(iter(architectures), None),
                "datasets": [{"ref": data_reference(source)} for source in distinct_sources(facts.sources)],
                "inputs": [{"format": "text"}],
                "outputs": [{"format": "text"}],
            }
        ),
        "quantitativeAnalysis": {"performanceMetrics": [*validation_entries(facts), *map(score_entry, facts.scores)]},
        "considerations": without_none(considerations),
    }


def validation_entries(facts: CardFacts) -> list[Entry]:
    """Those of the last validation up to the model's step."""
    return [
        {"type": name, "value": f"{event[name]:.6g}", "slice": f"validation text of {source}, step {event['step']}"}
        for source, event in facts.validation.items()
        for name, _ in CARD_MEASURES
        if is_number(event.get(name))
    ]


def score_entry(score: Score) -> Entry:
    """One number of an evaluation; where its error is known, with the interval of 95 %."""
    about = score_name(score) + (f" {score.split}" if score.split else "")
    entry = {"type": score.metric, "value": f"{score.value:.6g}"}
    entry["slice"] = about if score.is_whole else f"{about}, a part of the task: not comparable"
    if score.standard_error is not None:
        reach = CONFIDENCE * score.standard_error
        bounds = {"lowerBound": f"{score.value - reach:.6g}", "upperBound": f"{score.value + reach:.6g}"}
        entry["confidenceInterval"] = bounds
    return entry


def environment_entry(facts: CardFacts) -> Entry | None:
    """The energy of the training, its CO2 where the grid is known; None where nothing is."""
    joules, grams = facts.history.joules, facts.setting("energy.grid_grams_per_kwh")
    if joules is None:
        return None
    energy = {"value": round(joules / JOULES_PER_KWH, 6), "unit": "kWh"}
    how = facts.history.last("start").get("energy")
    provider = {
        "description": "who provided the energy is not recorded",
        "organization": {"name": "not recorded"},
        "energySource": "unknown",
        "energyProvided": energy,
    }
    consumption = {"activity": "training", "energyProviders": [provider], "activityEnergyCost": energy}
    if grams is not None:
        tonnes = joules / JOULES_PER_KWH * grams / GRAMS_PER_TONNE
        consumption["co2CostEquivalent"] = {"value": float(f"{tonnes:.6g}"), "unit": "tCO2eq"}
    known = {"energy_is": how, "grid_grams_per_kwh": grams}
    return {"energyConsumptions": [without_none({**consumption, "properties": properties_of(known)})]}


def data_reference(source: DataSource) -> str:
    return f"data:{source.name}" + (f":{source.manifest_sha256[:12]}" if source.manifest_sha256 else "")


def dataset_entry(facts: CardFacts, source: DataSource) -> Entry:
    """One folder of shards: identified by the hash of its manifest, which has that of every shard."""
    made = source.preparation
    parts = [one for one in facts.sources if data_reference(one) == data_reference(source)]
    shares = "; ".join(f"{one.weight:.6g}" + (f" from {one.stage}" if one.stage else "") for one in parts)
    names = [dataset.get("name") for dataset in made.get("datasets") or []] or list(source.hub_datasets)
    links = [
        {"type": "distribution", "url": f"https://huggingface.co/datasets/{name}"}
        for name in dict.fromkeys(names)
        if name and "/" in name
    ]
    about = {
        "share": shares, "tokens": source.tokens, "documents": source.documents,
        "text_bytes": source.text_bytes, "hash_is_of": "manifest.json" if source.manifest_sha256 else None,
        "tokenizer": source.tokenizer, "tokenizer_sha256": source.tokenizer_sha256,
        "files": made.get("files"), "filters": ", ".join(map(str, made.get("filters") or [])) or None,
        "deduplicated": made.get("deduplicated"), "near_duplicates_at": made.get("near_duplicates_at"),
        "kept_out": ", ".join(row["benchmark"] for row in source.contamination) or None,
    }  # fmt: skip
    return without_none(
        {
            "type": "data",
            "bom-ref": data_reference(source),
            "name": source.name,
            "description": "text that it was trained on, as token ids",
            "hashes": hashed(source.manifest_sha256),
            "externalReferences": links,
            "data": [{"type": "dataset", "name": source.name, "classification": "training data"}],
            "properties": properties_of(about),
        }
    )


def package_entry(name: str, version: str) -> Entry:
    """A package that the training ran with."""
    purl = f"pkg:pypi/{name.lower().replace('_', '-')}@{version}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": str(version), "purl": purl}
