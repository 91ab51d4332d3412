"""Tests with a local S3 server: documents, prepared folders and a run's mirror, through s3fs."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest
import yaml

from pretrain.errors import EXIT_INTERRUPTED
from pretrain.files import damage
from pretrain.runs.run_folder import checkpoint_name
from support.faults import launch_with_faults, reached, wait_until
from support.object_store import Gateway, store_server
from support.prepared import run_killed, texts, write_jsonl
from support.project import ROOT, events, losses, run_script

LEASE = "pretrain.checkpoint.mirror_lease"


@pytest.fixture(scope="module")
def store():
    with store_server() as server:
        yield server


def test_a_run_in_the_object_store(store, shards, recipe, tmp_path):
    """A run that writes to S3 works on machines with empty disks: a second start is rejected, and a killed run resumes
    exactly."""
    run_script("train.py", recipe, "--output", tmp_path / "whole")
    values = yaml.safe_load(recipe.read_text()) | {"output": "s3://mine/runs/demo"}
    values["data"]["train"] = [{"shards": "s3://mine/corpus"}]
    store.upload(shards, "corpus")
    store.write("recipes/demo.yaml", yaml.safe_dump(values).encode())

    def machine(name, **named):
        (tmp_path / name).mkdir()
        there = {"cwd": tmp_path / name, "XDG_CACHE_HOME": str(tmp_path / name), **store.environment}
        given = ("--config", "s3://mine/recipes/demo.yaml")
        return launch_with_faults(tmp_path / f"{name}-notes", "single", 1, *given, **named, **there)

    def meanwhile(process):
        copied = "checkpoints/step-00000004/MANIFEST.json"
        wait_until(lambda: (tmp_path / "first-notes/fault-0").exists() and copied in store.names("runs/demo"), process)
        second = machine("second", constants={f"{LEASE}.LOOK_SECONDS": 0.1})
        assert second.code == 2 and "Traceback" not in second.output, second.output
        said = f"s3://mine/runs/demo: process {process.pid} on {socket.gethostname()} is already training this run"
        assert said in second.output and not (tmp_path / "second/runs/demo").exists()
        process.kill()

    sleep = [{"where": "forward", "step": 7, "what": "sleep"}]
    machine("first", faults=sleep, meanwhile=meanwhile, constants={f"{LEASE}.BEAT_SECONDS": 0.1})
    third = machine("third", constants={f"{LEASE}.SILENT_SECONDS": 1.0, f"{LEASE}.LOOK_SECONDS": 0.1})
    run = tmp_path / "third/runs/demo"
    assert third.code == 0, third.output
    assert events(run, "resume")[-1]["step"] == 4 and losses(run) == losses(tmp_path / "whole")
    assert {"final/MANIFEST.json", "final/model.safetensors"} <= store.names("runs/demo")
    assert store.read("runs/demo/metrics.jsonl") == (run / "metrics.jsonl").read_bytes()
    assert store.names("runs/demo/leases") == set()

    refused = run_script("evaluate.py", "--model", "s3://mine/runs/demo", "--data", shards, check=False)
    said = "download it with python -m pretrain.checkpoint.mirror_fetch s3://mine/runs/demo, then"
    assert refused.returncode == 2 and said in refused.stderr
    refused = run_script("runs.py", "status", "s3://mine/runs/demo", check=False)
    assert refused.returncode == 2 and said in refused.stderr
    copy = tmp_path / "copy"
    run_script("-m", "pretrain.checkpoint.mirror_fetch", "s3://mine/runs/demo", copy, **store.environment)
    assert losses(copy) == losses(run) and damage(copy / "final") == damage(copy / "checkpoints/step-00000012") == []


def test_a_server_that_is_killed_in_the_middle_of_a_copy(store, recipe, tmp_path):
    """If the server dies during a copy, training continues with a warning. The copy never looks complete before
    it is."""
    gateway = Gateway(store, dies_at="/optimizer.safetensors")
    run = tmp_path / "killed"
    settings = ("--config", recipe, "--output", run, "--checkpoint.mirror", "s3://mine", "--budget.steps", 10**6)
    settings += ("--checkpoint.every_steps", 20, "--validation.every_steps", 10**6)

    def meanwhile(process):
        wait_until(gateway.is_dead, process)
        (cut,) = {name.rpartition("/")[0] for name in store.names("killed") if name.endswith("/model.safetensors")}
        wait_until(lambda: any("s3://mine/killed" in event["message"] for event in events(run, "warning")), process)
        before = max(losses(run))
        wait_until(lambda: reached(run, before + 20), process)
        assert f"{cut}/MANIFEST.json" not in store.names("killed")
        gateway.start()
        run_script("runs.py", "stop", run)

    with contextlib.closing(gateway):
        notes = (tmp_path / "notes", "single", 1)
        trained = launch_with_faults(*notes, *settings, meanwhile=meanwhile, **gateway.environment)
    assert trained.code == EXIT_INTERRUPTED and "could not copy" not in trained.output, trained.output
    copy = tmp_path / "copy"
    run_script("-m", "pretrain.checkpoint.mirror_fetch", "s3://mine/killed", copy, **store.environment)
    assert losses(copy) == losses(run)
    assert damage(copy / "checkpoints" / checkpoint_name(max(losses(run)))) == []


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

    # Three machines share only the object store. The second one is killed and restarted.
    asked = ("s3://mine/docs", "s3://mine/sliced")
    prepare(*asked, "--slice", "0/2", machine="one")
    killed = run_killed(8, *words(*asked, machine="two"), "--slice", "1/2", **store.environment)
    assert killed.returncode == -signal.SIGKILL and not store.names("sliced.slices/1-of-2") - {".unfinished"}
    refused = run_script(
        "prepare_data.py", *words(*asked, machine="three"), "--merge_slices", 2, check=False, **store.environment
    )
    assert refused.returncode == 2 and "1-of-2: is incomplete; run the same command with --slice 1/2" in refused.stderr
    prepare(*asked, "--slice", "1/2", machine="two")
    prepare(*asked, "--merge_slices", 2, machine="three")
    assert all(store.read(f"sliced/{name}") == store.read(f"shards/{name}") for name in (*shards, "manifest.json"))
    assert "already complete" in prepare(*asked, "--merge_slices", 2, machine="four")


def actors_of(driver) -> list[psutil.Process]:
    """Returns the Ray actor processes that are working."""
    found = []
    for process in psutil.Process(driver.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found += [process] if process.cmdline()[:1] == ["ray::_Actor.perform"] else []
    return found


def test_a_cluster_whose_driver_and_actor_are_killed(store, tokenizer, tmp_path):
    """prepare_data.py with Ray, killed and restarted, writes the same bytes to S3 as a single process to disk."""
    (tmp_path / "docs").mkdir()
    for part in range(20):
        write_jsonl(tmp_path / f"docs/{part:02d}.jsonl", [text * 20 for text in texts(400)])
    given = ("--input", f"{tmp_path}/docs/*.jsonl", "--tokenizer", tokenizer, "--validation_fraction", 0.2)
    given += ("--engine", "reference")
    run_script("prepare_data.py", *given, "--output", tmp_path / "here", "--workers", 1)
    there = (*given[:-1], "ray,reference", "--output", "s3://mine/clustered", "--staging", tmp_path / "staging")
    there += ("--workers", 2)
    killed = run_killed(8, *there, **store.environment)
    assert killed.returncode == -signal.SIGKILL and store.names("clustered") == {".unfinished"}, killed.stderr
    command = [sys.executable, ROOT / "prepare_data.py", *map(str, there)]
    with (tmp_path / "output.txt").open("w+") as output:
        driver = subprocess.Popen(command, env=os.environ | store.environment, stdout=output, stderr=output)
        wait_until(lambda: actors_of(driver), driver)
        (actor, *_) = actors_of(driver)
        actor.kill()
        assert driver.wait(600) == 0, output.seek(0) or output.read()
    made = [path.name for path in (tmp_path / "here").iterdir() if path.is_file()]
    assert len(made) >= 7
    assert all(store.read(f"clustered/{name}") == (tmp_path / "here" / name).read_bytes() for name in made)


def test_a_bucket_that_does_not_exist_is_named(store, tokenizer, tmp_path):
    given = ("--input", "s3://nobodys/*.jsonl", "--tokenizer", tokenizer, "--output", tmp_path / "here")
    refused = run_script("prepare_data.py", *given, check=False, **store.environment)
    assert refused.returncode == 2 and "s3://nobodys/*.jsonl" in refused.stderr and "Traceback" not in refused.stderr
