"""Tests for bom.cdx.json: it is valid under CycloneDX's official schema and matches the folder and the run."""

import hashlib
import json

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from pretrain_tools.publishing.facts import Publication, read_facts
from pretrain_tools.publishing.materials import SPDX, write_materials
from pretrain_tools.publishing.staging import find_publishable, stage
from pretrain_tools.runs.history import append_events
from support.run_folders import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with energy, evaluations and a record of one source's manifest. Tests must not change it."""
    run = write_run(tmp_path_factory.mktemp("runs") / "x", energy={"carbon_grams_per_kwh": 500.0})
    preparation = {
        "datasets": [{"name": "owner/web", "subset": "cc", "split": "train", "rows": 9, "fingerprint": "f" * 40}],
        "filters": ["gopher", "decontaminate"], "deduplicated": True, "removed": {"gopher: words": 3}, "files": 0,
    }  # fmt: skip
    found = [{"benchmark": "quiz", "items": 4, "sought": 4, "found": 1, "documents": 1, "remove": "document"}]
    kept = {"manifest_sha256": "d" * 64, "tokenizer": {"name": "bpe", "sha256": "e" * 64}, "contamination": found}
    kept |= {"totals": {"train": {"tokens": 5000, "documents": 9}}, "preparation": preparation}
    (run / "data.json").write_text(json.dumps({str(run.parent / "docs"): kept}))
    append_events(run, [
        {"event": "train", "step": 8, "tokens": 8000, "loss": 2.0, "joules": 7.2e6, "time": 1_767_225_600.0},
        {"event": "evaluation", "step": 8, "task": "quiz", "acc": 0.5, "acc_stderr": 0.1},
        {"event": "evaluation", "step": 8, "task": "half", "acc": 0.5, "limit": 10},
    ])  # fmt: skip
    return run


def bill(run, publication, folder, **wanted) -> dict:
    """Returns the bill of materials for the run's final model, or for another one, validated against the schema."""
    (model,) = find_publishable(run, **{"steps": [], "milestones": False, "final": not wanted.get("steps"), **wanted})
    return valid(stage(run, model, publication, folder / "staged"))


def valid(folder) -> dict:
    """Returns a folder's bill of materials after checking it with the official validator."""
    text = (folder / "bom.cdx.json").read_text()
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    assert error is None, error
    return json.loads(text)


OFFER = Publication("me/tiny", license="apache-2.0", languages=("en",))


@pytest.fixture(scope="module")
def contents(run, tmp_path_factory):
    """The bill of materials for the run's final model."""
    return bill(run, OFFER, tmp_path_factory.mktemp("published"))


def properties(entry) -> dict:
    return {item["name"].removeprefix("groundwork:"): item["value"] for item in entry["properties"]}


def test_it_is_valid_and_matches_the_run(contents):
    model = contents["metadata"]["component"]
    assert (contents["specVersion"], contents["metadata"]["timestamp"]) == ("1.6", "2026-01-01T00:00:00Z")
    assert (model["type"], model["group"], model["version"]) == ("machine-learning-model", "me", "step-8")
    assert model["licenses"] == [{"license": {"id": "Apache-2.0"}}] and model["purl"] == "pkg:huggingface/me/tiny"
    assert contents["metadata"]["tools"]["components"][0]["version"] == "abc123"
    assert "initialized randomly with seed 7" in str(model["pedigree"])
    about = properties(model)
    assert (about["training_tokens"], about["parameters"]) == ("8000", "106816")
    assert float(about["training_flops"]) == pytest.approx(6 * 106_816 * 8000, rel=1e-5)
    parameters = model["modelCard"]["modelParameters"]
    assert parameters["modelArchitecture"] == "LlamaForCausalLM" and parameters["architectureFamily"] == "llama"
    docs, code = (entry for entry in contents["components"] if entry["type"] == "data")
    assert parameters["datasets"] == [{"ref": docs["bom-ref"]}, {"ref": code["bom-ref"]}]
    assert docs["hashes"] == [{"alg": "SHA-256", "content": "d" * 64}] and "hashes" not in code
    assert properties(docs)["filters"] == "gopher, decontaminate" and properties(docs)["kept_out"] == "quiz"
    assert docs["externalReferences"][0]["url"] == "https://huggingface.co/datasets/owner/web"
    assert "pkg:pypi/torch@2.13.0" in [entry.get("purl") for entry in contents["components"]]


def test_every_evaluation_and_the_energy_are_in_its_card(contents):
    card = contents["metadata"]["component"]["modelCard"]
    metrics = {(m["type"], m["slice"]): m for m in card["quantitativeAnalysis"]["performanceMetrics"]}
    assert metrics["loss", "validation text of docs, step 8"]["value"] == "4"
    assert metrics["acc", "quiz"]["confidenceInterval"] == {"lowerBound": "0.304", "upperBound": "0.696"}
    assert "confidenceInterval" not in metrics["acc", "half, only part of the task, not comparable"]
    used = properties(contents["metadata"]["component"])["training_energy"]
    assert used == "2 kWh (1 kg of CO2 at 500 g/kWh)"


def test_every_file_is_listed_by_its_hash(run, tmp_path):
    contents = bill(run, OFFER, tmp_path, steps=[4])
    folder = tmp_path / "staged"
    listed = {
        entry["name"]: entry["hashes"][0]["content"] for entry in contents["metadata"]["component"]["components"]
    }
    covering = {"bom.cdx.json", "provenance.json"}
    files = {path.name: path for path in folder.iterdir() if path.name not in covering}
    assert listed == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    assert {"model.safetensors", "README.md", "training_content.md", "config.json"} <= listed.keys()


def test_references_are_unique(contents):
    model = contents["metadata"]["component"]
    known = [entry["bom-ref"] for entry in [model, *model["components"], *contents["components"]]]
    assert len(known) == len(set(known))
    used = model["modelCard"]["modelParameters"]["datasets"]
    assert {entry["ref"] for entry in used} <= set(known)


def test_the_same_run_gives_the_same_bytes_and_a_different_run_a_new_serial_number(run, contents, tmp_path):
    assert bill(run, OFFER, tmp_path / "a") == contents
    other = bill(run, Publication("me/other", license="mit"), tmp_path / "b")
    assert other["serialNumber"] != contents["serialNumber"]


@pytest.mark.parametrize("license", ["apache-2.0", "cc-by-nc-sa-4.0", "agpl-3.0", "openrail", "unlicense", "other"])
def test_common_licenses_are_valid(run, tmp_path, license):
    write_materials(read_facts(run, 8, run / "final", Publication("me/x", license=license)), tmp_path)
    (entry,) = valid(tmp_path)["metadata"]["component"]["licenses"]
    assert entry["license"] == ({"id": SPDX[license]} if license in SPDX else {"name": license})


def test_a_run_that_recorded_little_has_a_valid_bill(tmp_path):
    run = write_run(tmp_path / "x", init="pretrained")
    recipe = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(recipe.replace("model_configs/tiny.json", "owner/base@v1"))
    for name in ("environment.json", "strategy.json"):
        (run / name).unlink()
    contents = bill(run, Publication(), tmp_path)
    (ancestor,) = contents["metadata"]["component"]["pedigree"]["ancestors"]
    assert (ancestor["purl"], ancestor["version"]) == ("pkg:huggingface/owner/base", "v1")
    assert "timestamp" not in contents["metadata"] and "training_energy" not in json.dumps(contents)
    (run / "config.yaml").write_text("{}")
    assert bill(run, Publication(), tmp_path / "again")["components"] == []
