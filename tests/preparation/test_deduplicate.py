"""Tests for exact deduplication: the first copy in input order is kept, with any number of workers and after
interruptions."""

import signal

import numpy as np
import pytest

from pretrain.data.shards import read_manifest
from pretrain_tools.preparation.collector import document_digests
from pretrain_tools.preparation.documents.document_index import read_index
from support.prepared import content_of, texts, write_jsonl


def test_documents_have_equal_digests_when_they_are_equal():
    ids = np.array([1, 2, 0, 1, 2, 0, 2, 1, 0, 0], np.uint16)
    first, second, third, empty = document_digests(ids, np.array([3, 6, 9, 10]))
    assert first == second and len({first, third, empty}) == 3
    assert document_digests(ids[:0], np.empty(0, np.int64)) == [], "a partition without documents must be accepted"


@pytest.fixture
def small_parts(monkeypatch):
    for name in (
        "preparation.documents.formats.PART_BYTES",
        "preparation.documents.sources.PART_BYTES",
        "preparation.documents.byte_stream.READ_BYTES",
    ):
        monkeypatch.setattr(f"pretrain_tools.{name}", 1000)


def test_copies_are_removed_across_files_and_workers(tmp_path, run, small_parts):
    unique = texts(60)
    write_jsonl(tmp_path / "a.jsonl", [*unique[:40], *unique[:20]])
    write_jsonl(tmp_path / "b.jsonl", [*unique[10:], unique[0]])
    arguments = ("--input", f"{tmp_path}/*.jsonl", "--validation_fraction", 0, "--max_documents", 58)
    printed = run(*arguments, "--deduplicate", "--output", tmp_path / "one", "--workers", 1)
    run(*arguments, "--deduplicate", "--output", tmp_path / "three", "--workers", 3)
    assert "58; skipped 0 empty, 0 bad, 50 copies" in printed
    assert content_of(tmp_path / "one") == content_of(tmp_path / "three")
    (shard,) = read_manifest(tmp_path / "one").shards
    index = read_index(tmp_path / "one" / shard.file, 58)
    assert index["source"].tolist() == [0] * 40 + [1] * 18
    assert index["place"].tolist() == [*range(1, 41), *range(31, 49)], "the first copy must be kept"


def test_copies_of_documents_before_a_kill_are_found(tmp_path, tokenizer, run_killed):
    unique = texts(60)
    write_jsonl(tmp_path / "a.jsonl", [*unique, *unique])
    arguments = ("--input", tmp_path / "a.jsonl", "--tokenizer", tokenizer, "--deduplicate", "--shard_tokens", 1500)
    assert run_killed(0, *arguments, "--output", tmp_path / "whole").returncode == 0
    for at in (9, 14, 20):
        killed = run_killed(at, *arguments, "--output", tmp_path / "broken")
        assert killed.returncode == -signal.SIGKILL
    assert run_killed(0, *arguments, "--output", tmp_path / "broken").returncode == 0
    assert content_of(tmp_path / "broken") == content_of(tmp_path / "whole")
    assert sum(read_manifest(tmp_path / "whole").totals(s)[1] for s in ("train", "validation")) == 60
