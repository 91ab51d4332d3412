"""Tests for training_content.md: it has the template's three sections, and only facts from the run's records."""

import dataclasses
import json
import re
from types import SimpleNamespace

import pytest

from pretrain.data.data_record import preparation_of
from pretrain_tools.publishing.facts import Publication, read_facts
from pretrain_tools.publishing.training_content import FILL, filter_rows, training_content
from pretrain_tools.runs.history import History
from support.run_folders import write_run

HEADINGS = """\
1. General information
1.1. Provider identification
1.2. Model identification
1.3. Modalities, overall training data size and other characteristics
2. List of data sources
2.1. Publicly available datasets
2.2. Private non-publicly available datasets obtained from third parties
2.3. Data crawled and scraped from online sources
2.4. User data
2.5. Synthetic data
2.6. Other sources of data
3. Data processing aspects
3.1. Respect of reservation of rights from the text and data mining exception or limitation
3.2. Removal of illegal content
3.3. Other information""".splitlines()
WEB = {
    "sources": [{"path": "owner/web", "subset": "cc", "split": "train", "rows": 90, "fingerprint": "abc"}],
    "options": {
        "cleaning": [{"name": "gopher"}, {"name": "language"}],
        "deduplicate": True,
        "near_duplicates": {"threshold": 0.8},
    },
    "cleaning": {
        "documents_in": 100,
        "removed": {"gopher: words": {"documents": 7, "bytes": 70}},
        "histograms": {"language": {"en": 60, "de": 40}},
        "domains": {"1": "example.org", "2": "example.org", "3": "example.com"},
    },
    "skipped": {"empty": 3, "first_bad_records": []},
}
FILES = {"sources": [{"path": "https://data.example.net/a.jsonl", "bytes": 5_000_000}, {"path": "b", "bytes": 10}]}


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """Facts about a run that was trained on a Hub dataset and on files."""
    run = write_run(tmp_path_factory.mktemp("runs") / "x")
    totals = {"docs": 2_000_000_000, "code": 50_000_000}
    kept = {
        str(run.parent / name): {
            "manifest_sha256": name[0] * 64,
            "totals": {"train": {"tokens": totals[name]}},
            "tokenizer": {"name": "bpe"},
            "preparation": preparation_of(manifest),
        }
        for name, manifest in (("docs", WEB), ("code", FILES))
    }
    benchmark = {"benchmark": "quiz", "items": 4, "sought": 4, "found": 1, "documents": 2, "remove": "document"}
    kept[str(run.parent / "docs")]["contamination"] = [benchmark]
    (run / "data.json").write_text(json.dumps(kept))
    return read_facts(run, 8)


def offered(facts, **offer):
    return dataclasses.replace(facts, offer=Publication("me/tiny", **offer))


def section(text, heading) -> str:
    """Returns the text between a heading and the next one."""
    return re.split(r"\n#+ ", text.split(f" {heading}\n", 1)[1])[0]


def test_it_has_the_templates_sections_in_their_order(facts):
    text = training_content(offered(facts, languages=("en",)))
    found = [line.lstrip("# ") for line in text.splitlines() if re.match(r"#+ \d", line)]
    assert found == HEADINGS


def test_it_contains_the_recorded_facts(facts):
    text = training_content(offered(facts, languages=("en", "de")))
    general = section(text, HEADINGS[3])
    assert "1 billion to 10 trillion tokens: 2.05B unique tokens" in general
    assert "declared: en, de" in general and "en 60.0%, de 40.0%" in general
    assert "| owner/web | cc, train | 2B | 100.0%, large | https://huggingface.co/datasets/owner/web |" in text
    assert "| code | 50M | 2 | 5.0 MB | data.example.net |" in text
    assert "3 documents" in section(text, HEADINGS[7]) and "example.org (2), example.com (1)" in text
    assert "| docs | gopher: words | 7 |" in section(text, HEADINGS[13]) and "| docs | language | 0 |" in text
    processing = section(text, HEADINGS[14])
    assert "near duplicates were removed (similarity of at least 0.8)" in processing
    assert "the benchmark quiz was searched for and removed: 1 of 4 items, in 2 documents" in processing
    assert "none: trained from scratch" in section(text, HEADINGS[2])


@pytest.mark.parametrize("heading", [h for h in HEADINGS if h.count(".") == 2 and h != HEADINGS[-1]])
def test_unrecorded_facts_are_left_to_the_provider(facts, heading):
    assert FILL in section(training_content(offered(facts)), heading)


@pytest.mark.parametrize(
    ("per_token", "words"),
    [
        (1e10, "8e+13 FLOP (as counted for MFU), or 8e-10 times 10^23. This is **below** the criterion"),
        (1.3e19, "1.04e+23 FLOP (as counted for MFU), or 1 times 10^23. This is **above** the criterion"),
        (
            None,
            "5.13e+09 FLOP (estimated as 6 FLOP per parameter per token), or 5.1e-14 times 10^23. This is **below**",
        ),
    ],
)
def test_it_says_when_the_law_asks_for_it(facts, per_token, words):
    events = [{**e, "flops_per_token": per_token} if e["event"] == "start" else e for e in facts.history.events]
    facts = dataclasses.replace(facts, history=History(facts.history.folder, events))
    assert words in section(training_content(offered(facts)), "When it is required")


def test_missing_records_of_earlier_versions_are_reported(tmp_path):
    text = training_content(read_facts(write_run(tmp_path / "x"), 8))
    assert "No document filters are recorded" in text and "| docs | **To be filled in by the provider**" in text
    assert "No datasets from the Hugging Face Hub were used" not in text


def test_a_function_that_removed_documents_is_not_listed_as_idle():
    made = {"filters": ["mine.py:keep", "c4"], "removed": {"mine.keep": 3}}
    rows = filter_rows(SimpleNamespace(name="web", preparation=made))
    assert rows == [("web", "mine.keep", 3), ("web", "c4", 0)]
