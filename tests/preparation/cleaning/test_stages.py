"""Tests that cleaning removes and counts the same documents with any number of workers and after being killed."""

import json
import os
from collections import Counter

import pytest

from pretrain.data.tokenizer import load_tokenizer
from pretrain.errors import InputError
from pretrain_tools.preparation.cleaning.account import (
    KEPT,
    MOST_SOURCES_COUNTED,
    OTHER_SOURCES,
    CleaningAccount,
    measured_text,
)
from pretrain_tools.preparation.cleaning.filters import read_cleaning
from pretrain_tools.preparation.documents.records import Record
from pretrain_tools.preparation.documents.sources import Files, find_sources
from pretrain_tools.preparation.plan import PreparationOptions, PreparationRequest
from pretrain_tools.preparation.prepare import prepare
from pretrain_tools.preparation.slices import slice_of
from pretrain_tools.preparation.verification import verify_shards
from support.prepared import PROSE, content_of, texts, write_jsonl

FUNCTIONS = """
def keep(text):
    return text.removesuffix("loss").strip() if text.startswith("1") else not text.startswith("2")
"""


@pytest.fixture
def request_of(tmp_path, tokenizer, monkeypatch):
    """Returns arguments for preparing three files in many partitions, with a filter that removes and changes
    documents."""
    for name in ("documents.formats.PART_BYTES", "documents.sources.PART_BYTES", "documents.byte_stream.READ_BYTES"):
        monkeypatch.setattr(f"pretrain_tools.preparation.{name}", 2000)
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    documents = texts()
    for name, chosen in (("a", documents[:150]), ("b", documents[150:300]), ("c", documents[300:])):
        write_jsonl(tmp_path / f"{name}.jsonl", chosen)
    files = Files(find_sources([f"{tmp_path}/*.jsonl"]))
    options = PreparationOptions(cleaning=read_cleaning([f"{tmp_path}/mine.py:keep"]), validation_fraction=0.1)

    def request(name, **changed):
        return PreparationRequest(files, options, load_tokenizer(tokenizer), tmp_path / name, **changed)

    return request


def test_removed_documents_are_counted_by_rule_and_source(request_of, tmp_path, tokenizer):
    prepare(request_of("out"))
    removed = [text for text in texts() if text.startswith("2")]
    manifest = json.loads((tmp_path / "out/manifest.json").read_bytes())
    assert sum(t["documents"] for t in manifest["totals"].values()) == 400 - len(removed)
    cleaning = manifest["cleaning"]
    size = sum(len(text.encode()) for text in removed)
    assert cleaning["removed"] == {"mine.keep": {"documents": len(removed), "bytes": size}}
    assert cleaning["documents_in"] == 400 and cleaning["bytes_in"] == sum(len(t.encode()) for t in texts())
    by_source = Counter(
        {
            source: rules["mine.keep"]["documents"]
            for source, rules in cleaning["by_source"].items()
            if "mine.keep" in rules
        }
    )
    assert by_source == Counter("ab"[n >= 150] + ".jsonl" for n in range(300) if str(n).startswith("2"))
    assert manifest["options"]["cleaning"][0]["name"] == "mine.py:keep"
    changed = [text for text in texts() if text.startswith("1") and text.removesuffix("loss").strip() != text]
    assert cleaning["changed"]["mine.keep"]["documents"] == len(changed) > 0
    assert sum(t["text_bytes"] for t in manifest["totals"].values()) == (
        cleaning["bytes_in"] - size - cleaning["changed"]["mine.keep"]["fewer_bytes"]
    )
    samples = json.loads((tmp_path / "out/cleaning_samples.json").read_bytes())
    assert len(samples["mine.keep"]) == len(samples[KEPT]) == 10
    assert all(sample["text"].startswith("2") for sample in samples["mine.keep"].values())
    assert not verify_shards(tmp_path / "out")
    assert prepare(request_of("out")).already_done


def test_workers_slices_and_a_stop_change_no_byte(request_of, tmp_path):
    prepare(request_of("one"))
    expected = content_of(tmp_path / "one")
    prepare(request_of("two", workers=2))
    assert content_of(tmp_path / "two") == expected
    for number in range(3):
        prepare(slice_of(request_of("three"), number, 3))
    prepare(request_of("three", merge_slices=3))
    assert content_of(tmp_path / "three") == expected

    class Killed(Exception):
        pass

    def kill(tally):
        if tally.documents > 150:
            raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr("pretrain_tools.preparation.prepare.COMMIT_SECONDS", 0.0)
        prepare(request_of("four"), report=kill)
    prepare(request_of("four"))
    assert content_of(tmp_path / "four") == expected


def test_sources_beyond_the_limit_count_together():
    account = CleaningAccount()
    for number in range(MOST_SOURCES_COUNTED + 5):
        part = CleaningAccount()
        part.add_document("rule" if number % 2 else KEPT, Record(1, b"text", source=f"{number}.txt"))
        account.add(part)
    assert len(account.by_source) == MOST_SOURCES_COUNTED + 1
    assert sum(amounts["documents"] for amounts in account.by_source[OTHER_SOURCES].values()) == 5
    assert account.rules == {
        KEPT: {"documents": 503, "bytes": 2012},
        "rule": {"documents": 502, "bytes": 2008},
    }


def test_a_completely_removed_file_shows_the_rule_the_value_and_the_limit(tmp_path, run):
    (tmp_path / "short.txt").write_text("Too short to be of use.")
    (tmp_path / "numbers.txt").write_text("the of " + " ".join(map(str, range(1000, 1100))))
    arguments = ("--input", tmp_path / "*.txt", "--filter", "gopher_quality", "--validation_fraction", 0)
    arguments += ("--workers", 1, "--output")
    with pytest.raises(InputError) as refused:
        run(*arguments, tmp_path / "out")
    message = str(refused.value)
    assert "no documents are left" in message and "2 removed by cleaning" in message
    assert "short.txt: mostly removed by gopher_quality.few_words (6, at least 50)" in message
    assert "numbers.txt: mostly removed by gopher_quality.few_alphabetic_words (0.0196078, at least 0.8)" in message
    (tmp_path / "good.txt").write_text(PROSE)
    run(*arguments, tmp_path / "out2")
    samples = json.loads((tmp_path / "out2/cleaning_samples.json").read_bytes())
    (sample,) = samples["gopher_quality.few_words"].values()
    assert (sample["value"], sample["limit"]) == (6, 50)


def test_values_and_limits_are_shown_with_six_digits():
    assert measured_text({"value": 0.79999, "limit": 0.8}) == "0.79999, at least 0.8"
    assert measured_text({"value": 202651, "limit": 100000}) == "202,651, at most 100,000"
    assert measured_text({}) == ""


WRITES = (
    "/documents/documents-00000.bin", "/documents/.unfinished/.progress.json", "/documents/.cleaning_samples.json",
    "/documents/.manifest.json", "/candidates/", "/pairs/",
    "broken/.near_duplicates.json", "broken/train-00000.bin", "broken/.unfinished/.progress.json",
    "broken/.cleaning_samples.json", "broken/.manifest.json",
)  # fmt: skip
"""Files in the order in which a full cleaning run writes them: all documents, near duplicates, kept documents."""


def test_a_full_disk_in_any_stage_is_reported_and_the_same_command_continues(tmp_path, run, monkeypatch):
    for name in ("documents.formats.PART_BYTES", "documents.sources.PART_BYTES", "documents.byte_stream.READ_BYTES"):
        monkeypatch.setattr(f"pretrain_tools.preparation.{name}", 2000)
    monkeypatch.setattr("pretrain_tools.preparation.prepare.COMMIT_SECONDS", 0.0)
    documents = [f"{number} {PROSE}\nRead more\n{number}" for number in range(12)] + ["buy now " * 60]
    write_jsonl(tmp_path / "a.jsonl", [*documents, *(text.replace("owls", "bats") for text in documents[:4])])
    arguments = ("--input", tmp_path / "a.jsonl", "--clean", "--workers", 1, "--output")
    run(*arguments, tmp_path / "whole")
    sync = os.fsync
    left = list(WRITES)

    def full(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if left and left[0] in path:
            del left[0]
            raise OSError(28, "No space left on device", path)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    for count in range(len(WRITES) - 1, -1, -1):
        with pytest.raises(InputError, match=r"No space left on device .*; free up space .* to resume"):
            run(*arguments, tmp_path / "broken")
        assert len(left) == count
    run(*arguments, tmp_path / "broken")
    assert content_of(tmp_path / "broken") == content_of(tmp_path / "whole")
    counted = json.loads((tmp_path / "broken/manifest.json").read_bytes())
    assert counted["skipped"]["near_duplicate_documents"] and counted["cleaning"]["removed"]
