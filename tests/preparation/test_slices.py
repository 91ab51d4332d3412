"""Tests that merging slices from several machines gives the same bytes as a single machine."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from pretrain.data.shards import read_manifest
from pretrain.errors import InputError
from pretrain_tools.preparation.documents.records import Reading
from pretrain_tools.preparation.documents.sources import BEGINNING, Files, find_sources
from pretrain_tools.preparation.slices import parse_slice
from support.prepared import WRITERS, content_of, make_parts_small, texts, write_jsonl
from support.project import ROOT


@pytest.fixture
def small_parts(monkeypatch):
    make_parts_small(monkeypatch, 1000)


def write_inputs(tmp_path):
    """Writes files of different sizes with bad lines, empty documents, and duplicates across files. Returns the
    arguments."""
    documents = texts(150)
    write_jsonl(tmp_path / "a.jsonl", documents[:90], [b"bad", b'{"text": ""}'])
    write_jsonl(tmp_path / "b.jsonl", documents[40:100], [b"worse"])
    write_jsonl(tmp_path / "c.jsonl", ["", *documents[90:120]])
    write_jsonl(tmp_path / "d.jsonl", [*documents[100:], documents[0]])
    return (
        "--input",
        f"{tmp_path}/*.jsonl",
        "--on_error",
        "skip",
        "--validation_fraction",
        0.2,
        "--shard_tokens",
        2000,
    )


def read_in(parts):
    return [(part.after, part.input_bytes, list(part.records(Reading()))) for part in parts]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_merged_slices_equal_the_bytes_of_one_machine(tmp_path, run, small_parts, count):
    arguments = (*write_inputs(tmp_path), "--deduplicate", "--min_characters", 10)
    arguments = (*arguments, "--write_text")
    run(*arguments, "--output", tmp_path / "whole")
    for number in range(count):
        run(*arguments, "--output", tmp_path / "merged", "--slice", f"{number}/{count}")
    run(*arguments, "--output", tmp_path / "merged", "--merge_slices", count)
    whole = content_of(tmp_path / "whole")
    assert content_of(tmp_path / "merged") == whole
    skipped = json.loads(whole["manifest.json"])["skipped"]
    assert (skipped["bad_records"], skipped["empty_documents"]) == (2, 2)
    assert skipped["filtered_documents"] > 0 and skipped["duplicate_documents"] > 50


def test_missing_and_different_slices_are_all_named(tmp_path, run):
    arguments = (*write_inputs(tmp_path), "--output", tmp_path / "out")
    run(*arguments, "--slice", "0/3")
    run(*arguments, "--slice", "2/3")
    with pytest.raises(InputError) as caught:
        run(*arguments, "--min_characters", 3, "--merge_slices", 3)
    told = caught.value.problems
    assert "options.min_characters was None but is now 3" in told[0]
    assert "1-of-3: is incomplete; run the same command with --slice 1/3" in told[1]
    assert len(told) == 3 and not (tmp_path / "out").exists()


def test_more_bad_records_can_be_allowed_for_the_merge(tmp_path, run, small_parts):
    arguments = (*write_inputs(tmp_path), "--output", tmp_path / "out")
    for number in range(2):
        run(*arguments, "--max_errors", 1, "--slice", f"{number}/2")
    with pytest.raises(InputError, match="use a larger --max_errors"):
        run(*arguments, "--max_errors", 1, "--merge_slices", 2)
    run(*arguments, "--max_errors", 2, "--merge_slices", 2)
    assert json.loads((tmp_path / "out/manifest.json").read_bytes())["skipped"]["bad_records"] == 2


def test_options_that_exclude_slices_are_rejected(tmp_path, run):
    with pytest.raises(InputError, match=r"--slice 3/3: must be I/N with I from 0 to N - 1"):
        parse_slice("3/3")
    with pytest.raises(InputError, match="--slice ²/3: must be"):
        parse_slice("²/3")
    arguments = (*write_inputs(tmp_path), "--output", tmp_path / "out")
    with pytest.raises(
        InputError, match="--max_tokens: not supported with slices, which cannot share a limit; omit it"
    ):
        run(*arguments, "--slice", "0/2", "--max_tokens", 9)
    with pytest.raises(InputError, match=r"use either --slice I/N, or --merge_slices N"):
        run(*arguments, "--slice", "0/2", "--merge_slices", 2)


def test_slices_are_runs_of_parts_of_about_the_same_size(tmp_path, small_parts):
    rng = np.random.default_rng(0)
    for name in range(20):
        write_jsonl(tmp_path / f"{name:02d}.jsonl", texts(int(rng.integers(0, 40))))
    documents = Files(find_sources([f"{tmp_path}/*.jsonl"]))
    whole = [part.after for part in documents.parts(Reading(), BEGINNING)]
    slices = [list(replace(documents, slice=(number, 8)).parts(Reading(), BEGINNING)) for number in range(8)]
    assert [part.after for parts in slices for part in parts] == whole
    sizes = [sum(part.input_bytes for part in parts) for parts in slices]
    assert sum(sizes) == documents.total_bytes and max(sizes) - min(sizes) < 4000
    # Each slice can be resumed from any of its partitions.
    middle = slices[3][1].after
    assert read_in(replace(documents, slice=(3, 8)).parts(Reading(), middle)) == read_in(slices[3][2:])


def test_no_document_is_lost_if_a_slice_ends_with_a_file(tmp_path, small_parts, monkeypatch):
    monkeypatch.setattr("pretrain_tools.preparation.documents.sources.RECORDS_PER_PART", 10)
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(json.dumps([{"text": f"{name}{n:02d}" * 20} for n in range(40)]))
    documents = Files(find_sources([f"{tmp_path}/*.json"]))
    slices = [read_in(replace(documents, slice=(number, 2)).parts(Reading(), BEGINNING)) for number in range(2)]
    assert slices[0] + slices[1] == read_in(documents.parts(Reading(), BEGINNING))


@pytest.mark.parametrize("name", ["one.jsonl.zst", "one.parquet", "one.csv"])
def test_one_large_file_is_sliced_too(tmp_path, run, small_parts, name):
    (tmp_path / name).write_bytes(WRITERS[name.partition(".")[2]](texts(120)))
    arguments = ("--input", tmp_path / name, "--validation_fraction", 0.2)
    run(*arguments, "--output", tmp_path / "whole")
    for number in range(3):
        run(*arguments, "--output", tmp_path / "merged", "--slice", f"{number}/3")
        made = read_manifest(tmp_path / f"merged.slices/{number}-of-3")
        # A slice of a compressed file is a range of 1,000-byte blocks.
        assert 10 < sum(shard.documents for shard in made.shards) < 80
    run(*arguments, "--output", tmp_path / "merged", "--merge_slices", 3)
    assert content_of(tmp_path / "merged") == content_of(tmp_path / "whole")


def test_a_dataset_is_read_by_one_machine(tmp_path, run, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set/train.jsonl", texts(3))
    with pytest.raises(InputError, match=r"not supported with --dataset; use its files instead, such as --input"):
        run("--dataset", tmp_path / "set", "--output", tmp_path / "out", "--slice", "0/3")


def test_the_batch_script_prepares_a_slice_or_merges(tmp_path):
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text('#!/bin/bash\necho "$@"\n')
    (tmp_path / ".venv/bin/python").chmod(0o755)

    def told(**environment):
        command = ["bash", ROOT / "slurm/prepare.sbatch", "--input", "a b*", "--output", "x"]
        out = subprocess.run(command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True)
        return out.stdout.strip() or out.stderr

    assert told(SLURM_ARRAY_TASK_ID="3", SLURM_ARRAY_TASK_COUNT="16", SLURM_CPUS_PER_TASK="8") == (
        "prepare_data.py --input a b* --output x --slice 3/16 --workers 8"
    )
    assert told(SLICES="16") == "prepare_data.py --input a b* --output x --merge_slices 16 --workers 1"
    assert "submit with --array" in told()


def test_missing_ray_is_reported(tmp_path, run, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", texts(3))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"Ray is not installed; run pip install"):
        run("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--engine", "ray")
    with pytest.raises(InputError, match=r"--engine quick: must be auto, reference, ray or reference,ray"):
        run("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--engine", "ray,quick")


def test_ray_gives_the_same_bytes_as_one_machine(tmp_path, run, small_parts):
    (tmp_path / "items.txt").write_text("\n".join(text for text in texts(30) if len(text) > 100))
    arguments = (*write_inputs(tmp_path), "--decontaminate", tmp_path / "items.txt")
    arguments = (*arguments, "--near_duplicates", "0.8", "--write_text")
    run(*arguments, "--output", tmp_path / "whole")
    run(*arguments, "--output", tmp_path / "ray", "--engine", "ray", "--workers", 2)
    assert content_of(tmp_path / "ray") == content_of(tmp_path / "whole")
    assert '"items.txt": {' in (tmp_path / "ray/manifest.json").read_text(), (
        "the actors must have found benchmark items"
    )
