"""A server that speaks S3, on this machine: documents, prepared folders and the mirror of a run, through s3fs."""

import json
import signal

import pytest

from support.mirrors import lose
from support.object_store import store_server
from support.prepared import run_killed
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
    assert run_script(*mirrored, "--checkpoint.stop_at_step", 8, check=False, **store.environment).returncode == 130
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

    def words(docs, output, machine="one"):
        given = ("--input", f"{docs}/*.jsonl", "--tokenizer", tokenizer, "--validation_fraction", 0.2)
        return *given, "--output", output, "--staging", tmp_path / machine, "--workers", 1

    def prepare(docs, output, *more, **where):
        return run_script("prepare_data.py", *words(docs, output, **where), *more, **store.environment).stdout

    prepare(tmp_path / "docs", tmp_path / "here")
    prepare("s3://mine/docs", "s3://mine/shards")
    shards = {path.name for path in (tmp_path / "here").iterdir() if path.suffix in (".bin", ".documents", ".blocks")}
    assert len(shards) == 6 and {*shards, "manifest.json"} <= store.names("shards")
    assert all(store.read(f"shards/{name}") == (tmp_path / "here" / name).read_bytes() for name in shards)
    assert "already complete" in prepare("s3://mine/docs", "s3://mine/shards")

    # On three machines that share nothing but the store; the second is killed and goes on.
    asked = ("s3://mine/docs", "s3://mine/sliced")
    prepare(*asked, "--slice", "0/2", machine="one")
    killed = run_killed(8, *words(*asked, machine="two"), "--slice", "1/2", **store.environment)
    assert killed.returncode == -signal.SIGKILL and not store.names("sliced.slices/1-of-2") - {".unfinished"}
    refused = run_script(
        "prepare_data.py", *words(*asked, machine="three"), "--merge_slices", 2, check=False, **store.environment
    )
    assert (
        refused.returncode == 2 and "1-of-2: is not complete; run the same command with --slice 1/2" in refused.stderr
    )
    prepare(*asked, "--slice", "1/2", machine="two")
    prepare(*asked, "--merge_slices", 2, machine="three")
    assert all(store.read(f"sliced/{name}") == store.read(f"shards/{name}") for name in (*shards, "manifest.json"))
    assert "already complete" in prepare(*asked, "--merge_slices", 2, machine="four")


def test_a_bucket_that_does_not_exist_is_named(store, tokenizer, tmp_path):
    given = ("--input", "s3://nobodys/*.jsonl", "--tokenizer", tokenizer, "--output", tmp_path / "here")
    refused = run_script("prepare_data.py", *given, check=False, **store.environment)
    assert refused.returncode == 2 and "s3://nobodys/*.jsonl" in refused.stderr and "Traceback" not in refused.stderr
