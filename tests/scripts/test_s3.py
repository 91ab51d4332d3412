"""A server that speaks S3, on this machine: documents, prepared folders and the mirror of a run, through s3fs."""

import json

import pytest

from support.mirrors import lose
from support.object_store import store_server
from support.project import events, losses, run_script


@pytest.fixture(scope="module")
def store():
    with store_server() as server:
        yield server


def test_a_lost_run_goes_on_from_its_mirror(store, recipe, tmp_path):
    """To the last bit, as one that was never interrupted."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    mirrored = ("train.py", recipe, "--checkpoint.mirror", "s3://mine/runs", "--checkpoint.mirror_wait_seconds", 120)
    run_script("train.py", recipe, "--output", whole)
    assert run_script(*mirrored, "--checkpoint.pause_at", 8, check=False, **store.environment).returncode == 130
    assert {"checkpoints/step-00000008/MANIFEST.json", "metrics.jsonl", "run.json"} <= store.names("runs/run")
    lose(run)
    run_script(*mirrored, **store.environment)
    assert events(run, "resume")[-1]["step"] == 8 and losses(run) == losses(whole)
    assert {"final/MANIFEST.json", "final/model.safetensors"} <= store.names("runs/run")
    assert store.read("runs/run/metrics.jsonl") == (run / "metrics.jsonl").read_bytes()


def test_documents_and_prepared_folders(store, tokenizer, tmp_path):
    lines = [json.dumps({"text": f"Document {number} of the store.\n" * (1 + number % 7)}) for number in range(200)]
    (tmp_path / "docs").mkdir()
    for part in range(2):
        content = "\n".join(lines[part::2]).encode()
        (tmp_path / f"docs/{part}.jsonl").write_bytes(content)
        store.write(f"docs/{part}.jsonl", content)

    def prepare(docs, output):
        given = (
            "--input",
            f"{docs}/*.jsonl",
            "--tokenizer",
            tokenizer,
            "--validation_fraction",
            0.2,
            "--output",
            output,
        )
        return run_script("prepare_data.py", *given, "--staging", tmp_path / "staging", **store.environment).stdout

    prepare(tmp_path / "docs", tmp_path / "here")
    prepare("s3://mine/docs", "s3://mine/shards")
    shards = {path.name for path in (tmp_path / "here").iterdir() if path.suffix in (".bin", ".documents", ".blocks")}
    assert len(shards) == 6 and {*shards, "manifest.json"} <= store.names("shards")
    assert all(store.read(f"shards/{name}") == (tmp_path / "here" / name).read_bytes() for name in shards)
    assert "already complete" in prepare("s3://mine/docs", "s3://mine/shards")


def test_a_bucket_that_does_not_exist_is_named(store, tokenizer, tmp_path):
    given = ("--input", "s3://nobodys/*.jsonl", "--tokenizer", tokenizer, "--output", tmp_path / "here")
    refused = run_script("prepare_data.py", *given, check=False, **store.environment)
    assert refused.returncode == 2 and "s3://nobodys/*.jsonl" in refused.stderr and "Traceback" not in refused.stderr
