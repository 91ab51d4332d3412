"""Writes bom.cdx.json: a published model's files and origin as a CycloneDX bill of materials (ML-BOM).

Format: https://cyclonedx.org/docs/1.6/json (ECMA-424). cyclonedx-python-lib doesn't support model cards.
"""

import json
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from pretrain.files import sha256_of
from pretrain_tools.publishing.card import CARD_MEASURES, environment, statements
from pretrain_tools.publishing.facts import Facts
from pretrain_tools.runs.history import measured

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


def write_materials(facts: Facts, folder: Path) -> None:
    """Writes a reproducible bill of materials for all files in a folder.

    Must be called before the provenance and signature are written, because they contain this file's hash.
    """
    bill = bill_of_materials(facts, {path.name: sha256_of(path) for path in sorted(folder.iterdir())})
    # Derive the UUID from the content, so that the file is reproducible.
    serial = uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(bill))
    contents = {**MATERIALS_FORMAT, "serialNumber": f"urn:uuid:{serial}", "version": 1, **bill}
    text = json.dumps(contents, indent=1, ensure_ascii=False) + "\n"
    (folder / MATERIALS_FILE).write_text(text, encoding="utf-8")


def bill_of_materials(facts: Facts, files: dict[str, str]) -> dict[str, Any]:
    """Builds the bill of materials from templates/bom.yaml.j2.

    files: {name: sha256}
    """
    times = [event["time"] for event in measured(facts.history.events, "time")]
    templates = environment().overlay(finalize=partial(json.dumps, ensure_ascii=False))
    text = templates.get_template("bom.yaml.j2").render(
        facts=facts,
        files=files,
        # The current time would make the file irreproducible.
        timestamp=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(max(times))) if times else None,
        measures=CARD_MEASURES,
        spdx=SPDX,
        **{name: statements(name, facts) for name in ("introduction", "lineage", "limits")},
    )
    bill = yaml.safe_load(text)
    return {"metadata": known(bill["metadata"]), "components": known(bill["components"] or [])}


def known(value: Any) -> Any:
    """Removes None and empty values from dicts, recursively. Converts properties to CycloneDX's form."""
    if isinstance(value, list):
        return [known(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: known(item) for key, item in value.items()}
    found = {key: item for key, item in found.items() if item not in (None, "", [], {})}
    if "properties" in found:
        entries = found["properties"].items()
        found["properties"] = [{"name": f"groundwork:{name}", "value": str(item)} for name, item in entries]
    return found
