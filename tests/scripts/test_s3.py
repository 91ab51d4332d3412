"""A server that speaks S3, on this machine: documents, prepared folders and the mirror of a run, through s3fs."""

import json
import logging

import boto3
import pytest
from moto.server import ThreadedMotoServer

from support.mirrors import lose
from support.project import events, losses, run_script

KEYS = {
    "AWS_ACCESS_KEY_ID": "key-of-a-test",
    "AWS_SECRET_ACCESS_KEY": "secret-of-a-test",
    "AWS_DEFAULT_REGION": "us-east-1",
}


class Store:
    """One bucket, and the variables by which s3fs finds it."""

    def __init__(self, address: str):
        self.environment = {**KEYS, "AWS_ENDPOINT_URL": address}
        names = ("aws_access_key_id", "aws_secret_access_key", "region_name")
        self.client = boto3.client("s3", endpoint_url=address, **dict(zip(names, KEYS.values(), strict=True)))
        self.client.create_bucket(Bucket="mine")

    def names(self, folder: str) -> set[str]:
        """Of the objects below a folder, relative to it."""
        found = self.client.list_objects_v2(Bucket="mine", Prefix=f"{folder}/").get("Contents", [])
        return {about["Key"].removeprefix(f"{folder}/") for about in found}

    def read(self, name: str) -> bytes:
        return self.client.get_object(Bucket="mine", Key=name)["Body"].read()


@pytest.fixture(scope="module")
def store():
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield Store(f"http://{host}:{port}")
    server.stop()


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
        store.client.put_object(Bucket="mine", Key=f"docs/{part}.jsonl", Body=content)

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
    shards = {path.name for path in (tmp_path / "here").iterdir() if path.suffix in (".bin", ".documents")}
    assert len(shards) == 4 and {*shards, "manifest.json"} <= store.names("shards")
    assert all(store.read(f"shards/{name}") == (tmp_path / "here" / name).read_bytes() for name in shards)
    assert "already complete" in prepare("s3://mine/docs", "s3://mine/shards")


def test_a_bucket_that_does_not_exist_is_named(store, tokenizer, tmp_path):
    given = ("--input", "s3://nobodys/*.jsonl", "--tokenizer", tokenizer, "--output", tmp_path / "here")
    refused = run_script("prepare_data.py", *given, check=False, **store.environment)
    assert refused.returncode == 2 and "s3://nobodys/*.jsonl" in refused.stderr and "Traceback" not in refused.stderr
