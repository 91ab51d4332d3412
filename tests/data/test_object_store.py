"""Training from an object store must match training from disk bit for bit, and damage must be reported.

The runs use an S3 server behind a proxy that delays requests or makes them fail. Other tests use fsspec's memory
store. With STRATEGIES=all in the environment (`make test-strategies`), every type of strategy is tested.
"""

import hashlib
import itertools
import json
import os
import re
import shutil
import signal
from pathlib import Path

import fsspec
import numpy as np
import pytest
import yaml

from pretrain import urls
from pretrain.config import Data, DataCache
from pretrain.data import object_store
from pretrain.data.batches import Batches, open_training
from pretrain.data.object_store import BLOCK_BYTES, DiskCache, block_digests, block_reader
from pretrain.data.shards import ShardReader, open_shards, read_manifest
from pretrain.errors import InputError
from pretrain.optim.batch_ramp import batch_ramp
from pretrain.training.run_records import unhashed_blocks
from pretrain.urls import UnreachableError
from pretrain_tools.preparation.verification import verify_shards
from support.faults import end_of, launch_with_faults, reached, wait_until
from support.numbered_shards import write_shards
from support.object_store import faulty, store_server
from support.project import events, launch, losses, run_script
from support.tiny_models import TINY_LLAMA

STRATEGIES = ["ddp"]
if os.environ.get("STRATEGIES") == "all":
    STRATEGIES += ["fsdp2", "zero2", "zero3", "tp", "cp", "pp"]
RESUMED = {"from disk to store": ("ddp", " remote"), "from store to disk": ("ddp remote", "")}
"""{run: (run that it resumes, suffix of the data location)}."""
LENGTH = 1024
TOKENS = 300_000
FOLDERS = itertools.count()


@pytest.fixture(autouse=True)
def short(monkeypatch, tmp_path):
    """Shortens retries, and clears everything that other tests have cached."""
    block_reader.cache_clear()
    monkeypatch.setattr(urls, "FIRST_RETRY_SECONDS", 0.001)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def prepared(folder, tokens=TOKENS, *, blocks=True, first=0):
    """Writes a prepared folder with three shards and their block hashes."""
    write_shards(folder, tokens, files=3, validation=5000, first=first)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer/tokenizer.json").write_text("{}")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["tokenizer"]["sha256"] = hashlib.sha256(b"{}").hexdigest()
    for shard in manifest["shards"] if blocks else ():
        with (folder / shard["file"]).open("rb") as file:
            content = block_digests(file)
        name = shard["file"].replace(".bin", ".blocks")
        (folder / name).write_bytes(content)
        shard["beside"] = {name: hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def uploaded(folder, change=lambda name, content: content) -> str:
    """Uploads a copy to memory, with each file's content passed through `change`. Returns its URL."""
    place = f"copy-{os.getpid()}-{next(FOLDERS)}"
    for path in folder.rglob("*"):
        if path.is_file():
            name = str(path.relative_to(folder))
            fsspec.filesystem("memory").pipe_file(f"/{place}/{name}", change(name, path.read_bytes()))
    return f"memory://{place}"


def spoilt_at(place: int, of: str = "train-00001.bin"):
    """Returns a function that changes one byte of one file."""

    def change(name, content):
        return content if name != of else content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]

    return change


def read_all(url, split="train") -> np.ndarray:
    reader = open_shards(url, split)
    ids = np.empty(reader.tokens, np.uint16)
    reader.read(0, ids)
    return ids


MIXTURES = {
    "several epochs": {"train": [{"shards": "a"}]},
    "mixture": {"train": [{"shards": "a", "weight": 3}, {"shards": "b", "max_epochs": 0.5}]},
    "curriculum": {
        "stages": [
            {"train": [{"shards": "a"}], "until": 0.5},
            {"train": [{"shards": "b"}], "sequence_length": 2 * LENGTH},
        ]
    },
    "random windows": {"train": [{"shards": "a"}], "sampling": "random_windows"},
    "best fit": {"train": [{"shards": "a"}, {"shards": "b"}], "sampling": "best_fit"},
}


@pytest.mark.parametrize("with_cache", [False, True])
@pytest.mark.parametrize("name", MIXTURES)
def test_batches_match_local_folders(tmp_path, name, with_cache):
    """Batches must match in training order, after jumping back, and with two ranks."""
    folders = {name: prepared(tmp_path / name, first=1000 * number) for number, name in enumerate("ab")}
    urls = {name: uploaded(folder) for name, folder in folders.items()}
    ramp = batch_ramp(8, total_steps=80)

    def batches(places):
        text = json.dumps(MIXTURES[name])
        for letter, place in places.items():
            text = text.replace(f'"shards": "{letter}"', f'"shards": "{place}"')
        cache = {"folder": tmp_path / "cache", "size": 10**7} if with_cache else None
        return Batches(Data(sequence_length=LENGTH, cache=cache, **json.loads(text)), seed=1, ramp=ramp)

    local, remote = batches(folders), batches(urls)
    for step in [*range(80), 3, 4, 70]:
        span = local.span_at(local.first_sample(step))
        for rank in range(2):
            for micro_step in range(2):
                given = (step, micro_step, rank)
                of_both = [b.read(*given, ranks=2, sequences=2 // span) for b in (local, remote)]
                assert np.array_equal(*of_both), given


def test_the_next_sequences_are_prefetched(tmp_path, monkeypatch):
    data = Data(train=[{"shards": uploaded(prepared(tmp_path / "a"))}], sequence_length=LENGTH)
    batches = Batches(data, seed=1, ramp=batch_ramp(4, total_steps=70))
    batches.read(0, 0, 0, ranks=1, sequences=4)
    reader = block_reader(None)
    for future in list(reader._blocks.values()):
        future.result()
    monkeypatch.setattr(urls.RemoteFolder, "read", lambda *_: pytest.fail("the step waits for the server"))
    for step in range(1, 60):
        batches.read(step, 0, 0, ranks=1, sequences=4)


def test_a_damaged_block_is_rejected_by_name(tmp_path):
    folder = prepared(tmp_path / "a")
    url = uploaded(folder, spoilt_at(BLOCK_BYTES + 7))
    reader = open_shards(url, "train")
    ids = np.empty(10, np.uint16)
    shard = TOKENS // 3
    reader.read(shard, ids)  # the block before the damaged one
    said = f"{url}/train-00001.bin: bytes 65,536 to 131,072 are damaged"
    with pytest.raises(InputError, match=said):
        reader.read(shard + BLOCK_BYTES // 2, ids)
    assert verify_shards(url) != [] and any("train-00001.bin: its content" in line for line in verify_shards(url))
    assert not any("its content" in line and "blocks" in line for line in verify_shards(url))


def test_changed_hashes_are_rejected_by_name(tmp_path):
    url = uploaded(prepared(tmp_path / "a"), spoilt_at(3, "train-00001.blocks"))
    with pytest.raises(InputError, match=f"{url}/train-00001.blocks: its content has changed"):
        read_all(url)


def test_a_truncated_object_is_rejected(tmp_path):
    folder = prepared(tmp_path / "a")
    url = uploaded(folder, lambda name, content: content[:-10] if name == "train-00002.bin" else content)
    with pytest.raises(InputError, match=f"{url}/train-00002.bin: has 199,990 bytes, must have 200,000"):
        open_shards(url, "train")
    reader = ShardReader(read_manifest(url), "train")
    with pytest.raises(
        InputError, match=f"{url}/train-00002.bin: is truncated to 199,990 bytes, but needs at least 200,000"
    ):
        reader.read(TOKENS - 10, np.empty(10, np.uint16))


def test_missing_objects_are_named(tmp_path, monkeypatch):
    folder = prepared(tmp_path / "a")
    (folder / "train-00001.bin").unlink()
    url = uploaded(folder)
    with pytest.raises(InputError, match=f"{url}/train-00001.bin: is missing"):
        open_shards(url, "train")
    (folder / "tokenizer/tokenizer.json").write_text("[]")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    url = uploaded(folder)
    with pytest.raises(InputError, match=f"{url}/tokenizer/tokenizer.json: is missing or does not match"):
        read_manifest(url)
    with pytest.raises(InputError, match=r"memory://nothing/manifest\.json: no such object"):
        read_manifest("memory://nothing")


def test_a_refusal_is_the_only_problem(monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("Forbidden")

    monkeypatch.setattr(fsspec.filesystem("memory"), "cat_file", refuse)
    with pytest.raises(InputError) as caught:
        read_manifest("memory://forbidden")
    place = "memory://forbidden/manifest.json"
    assert caught.value.problems == [f"{place}: PermissionError: Forbidden; grant this machine access"]


def test_failed_reads_are_retried_but_not_forever(tmp_path, monkeypatch):
    folder = prepared(tmp_path / "a")
    url = uploaded(folder)
    reader = open_shards(url, "train")
    system = type(object_store.remote_folder(url)._system)
    whole = system.cat_file
    calls = itertools.count(1)

    def failing(self, name, **where):
        number = next(calls)
        if number % 3 == 1:
            raise OSError("503 Slow Down")
        content = whole(self, name, **where)
        return content[:-1] if number % 3 == 2 else content

    monkeypatch.setattr(system, "cat_file", failing)
    ids = np.empty(TOKENS, np.uint16)
    reader.read(0, ids)
    assert np.array_equal(ids, read_all(folder)) and next(calls) > 20

    def dead(self, name, **where):
        raise OSError("503 Slow Down")

    monkeypatch.setattr(system, "cat_file", dead)
    reader = ShardReader(reader.manifest, "validation")
    monkeypatch.setattr(urls, "PATIENCE_SECONDS", 0.5)
    with pytest.raises(UnreachableError, match=r"cannot be read within 0\.5 s: OSError: 503 Slow Down"):
        reader.read(0, ids[:10])
    with pytest.raises(UnreachableError, match=r"within 0\.5 s: OSError: 503 Slow Down"):
        read_manifest(uploaded(folder))


def test_shards_of_earlier_versions_are_read_with_a_warning(tmp_path):
    folder = prepared(tmp_path / "old", blocks=False)
    url = uploaded(folder)
    assert np.array_equal(read_all(url), read_all(folder))
    old = open_training(Data(train=[{"shards": url}], sequence_length=LENGTH))
    new = open_training(Data(train=[{"shards": uploaded(prepared(tmp_path / "new"))}], sequence_length=LENGTH))
    (said,) = unhashed_blocks(old | new)
    assert said.startswith(f"data: {url} has no block hashes")


def test_the_cache_keeps_its_size_and_never_returns_damaged_blocks(tmp_path):
    size = 5_000_000
    cache = DiskCache(tmp_path, size)
    blocks = {f"{number}".encode(): np.random.default_rng(number).bytes(BLOCK_BYTES) for number in range(300)}
    for key, content in blocks.items():
        cache.put(key, content)
        assert cache.get(key, len(content)) == content
    assert (tmp_path / "blocks").stat().st_size <= size
    again = DiskCache(tmp_path, size)  # as after a restart
    held = [key for key, content in blocks.items() if again.get(key, len(content)) == content]
    assert len(held) == size // DiskCache.PLACE_BYTES // 8 * 8
    with (tmp_path / "blocks").open("r+b") as file:
        for place in range(0, size - DiskCache.PLACE_BYTES, DiskCache.PLACE_BYTES):
            file.seek(place + 1000)
            file.write(b"torn")
    assert [again.get(key, BLOCK_BYTES) for key in held] == [None] * len(held)
    assert again.get(b"unknown", BLOCK_BYTES) is None
    with pytest.raises(InputError, match=r"data\.cache: /proc/x: cannot create a file of 5,000,000 bytes"):
        DiskCache(Path("/proc/x"), size)


def test_a_second_start_reads_from_the_cache(tmp_path, monkeypatch):
    url = uploaded(prepared(tmp_path / "a"))
    cache = DataCache(folder=tmp_path / "cache", size=10**7)
    for _ in range(2):
        block_reader.cache_clear()
        ids = np.empty(TOKENS, np.uint16)
        ShardReader(read_manifest(url), "train", cache).read(0, ids)
        fetched = block_reader(cache).fetched_bytes
        assert fetched in (2 * TOKENS, 0)
    assert fetched == 0


@pytest.fixture(scope="module")
def store(shards):
    with store_server() as server:
        server.upload(shards, "corpus")
        yield server


@pytest.fixture(scope="module")
def faulty_store(store, tmp_path_factory):
    with faulty(store, fail_every=20, cut_every=30) as environment:
        yield environment | {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("home"))}


REMOTE = ("--data.train", "[{shards: s3://mine/corpus}]")


def measured(run):
    return {line["step"]: line["loss"] for line in events(run, "validation")}


def test_a_killed_run_resumes_from_a_faulty_server(faulty_store, recipe, tmp_path):
    """The losses must match a run from disk bit for bit, and evaluate.py and runs.py must work with the store."""
    local, remote = tmp_path / "local", tmp_path / "remote"
    run_script("train.py", recipe, "--output", local)
    cache = ("--data.cache.folder", tmp_path / "cache", "--data.cache.size", "10M")
    given = ("--config", recipe, "--output", remote, "--checkpoint.async_save", "false", *REMOTE, *cache)
    kill = [{"where": "forward", "step": 7, "what": "SIGKILL"}]
    killed = launch_with_faults(tmp_path / "notes", "single", 1, *given, faults=kill, **faulty_store)
    assert killed.code == -signal.SIGKILL
    run_script("train.py", *given, **faulty_store)
    assert events(remote, "resume")[-1]["step"] == 4
    assert losses(remote) == losses(local) and measured(remote) == measured(local)
    assert (tmp_path / "cache/blocks").stat().st_size <= 10e6
    evaluated = ("evaluate.py", "--model", f"{remote}@12", "--data", "s3://mine/corpus", "--sequences", 8)
    run_script(*evaluated, "--output", tmp_path / "evaluation.json", **faulty_store)
    (loss,) = re.findall(r'"loss": ([\d.]+)', (tmp_path / "evaluation.json").read_text())
    assert float(loss) == pytest.approx(measured(remote)[12], abs=1e-6)
    shown = run_script("runs.py", "documents", remote, "--step", 3, **faulty_store).stdout
    assert shown.count("    from ") == shown.count("\n  document ") >= 4


def repeated(shards, folder, times):
    """Copies prepared shards with the training split repeated `times` times."""
    shutil.copytree(shards, folder)
    path = folder / "train-00000.bin"
    path.write_bytes(path.read_bytes() * times)
    with path.open("rb") as file:
        hashes = block_digests(file)
    path.with_suffix(".blocks").write_bytes(hashes)
    manifest = json.loads((folder / "manifest.json").read_text())
    (shard,) = [shard for shard in manifest["shards"] if shard["file"] == path.name]
    shard |= {"tokens": shard["tokens"] * times, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    shard["beside"]["train-00000.blocks"] = hashlib.sha256(hashes).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


IMPATIENT = {
    "pretrain.urls.PATIENCE_SECONDS": 3.0,
    "pretrain.data.object_store.BLOCKS_AHEAD": 0,
    "pretrain.data.object_store.BLOCKS_KEPT": 0,
}
"""Constants that make a run notice a vanished server within seconds."""


def test_a_vanished_server_ends_every_rank_with_its_name(shards, recipe, tmp_path):
    """Runs must end with status 75 and no traceback, and resume bit for bit with the same corpus on disk."""
    local, remote = tmp_path / "local", tmp_path / "remote"
    shards = repeated(shards, tmp_path / "corpus", 10)
    given = ("--config", recipe, "--data.train", "[{shards: s3://mine/vanishing}]", "--output", remote)
    given += ("--checkpoint.every_steps", 2, "--budget.steps", 40, "--optim.warmup_steps", 2)
    with store_server() as server:
        server.upload(shards, "vanishing")  # servers in the same process share their objects

        def vanish(process):
            wait_until(lambda: reached(remote, 6), process)
            server.vanish()

        there = server.environment | {"XDG_CACHE_HOME": str(tmp_path / "home")}
        ended = launch_with_faults(tmp_path / "one", "ddp", 2, *given, meanwhile=vanish, constants=IMPATIENT, **there)
    end = end_of(remote)
    assert end["code"] == 75 and ended.left == [], ended.output
    named = r"s3://mine/vanishing/(train|validation)-00000.bin: bytes [\d,]+ to [\d,]+ cannot be read within 3 s"
    assert re.match(named, end["reason"])
    assert end["reason"].endswith("once the server responds, or correct the address or credentials")
    assert 'train.py", line' not in ended.output
    again = launch_with_faults(tmp_path / "two", "single", 1, *given, constants=IMPATIENT, **there)
    assert again.code == 75 and "s3://mine/vanishing/manifest.json: cannot be read within 3 s" in again.output
    assert "Traceback" not in again.output
    on_disk = (*given, "--data.train", f"[{{shards: {shards}}}]")
    launch("ddp", 2, "train.py", *on_disk)
    launch("ddp", 2, "train.py", *on_disk, "--output", local)
    assert events(remote, "resume")[-1]["step"] >= 4 and losses(remote) == losses(local)


@pytest.fixture(scope="module")
def runs(shards, faulty_store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    (folder / "model.json").write_text(json.dumps(TINY_LLAMA))
    recipe = {
        "model": str(folder / "model.json"),
        "output": str(folder / "run"),
        "seed": 1,
        "precision": "fp32",
        "data": {"train": [{"shards": str(shards)}], "sequence_length": 64},
        "budget": {"steps": 4},
        "batch": {"tokens_per_step": 1024, "sequences_per_micro_batch": 2},
        "optim": {"learning_rate": 0.003, "warmup_steps": 2},
        "compile": "none",
        "validation": {"every_steps": 2, "sequences": 7},
        "checkpoint": {"every_steps": 2},
        "logging": {"every_steps": 1},
        "pipeline": {"schedule": "1F1B"},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    ways = {"": [], " remote": list(REMOTE)}
    described = [
        {"strategy": name, "arguments": ["--output", str(folder / f"{name}{way}"), *more]}
        for name in STRATEGIES
        for way, more in ways.items()
    ]
    first = "checkpoints/step-00000002"
    for name, (before, more) in RESUMED.items():
        arguments = ["--output", str(folder / name), *(ways[more] or ["--data.train", f"[{{shards: {shards}}}]"])]
        described.append({"strategy": "ddp", "arguments": arguments, "start_from": str(folder / before / first)})
    (folder / "runs.json").write_text(json.dumps(described))
    program = ["tests/support/train_strategies.py", folder / "recipe.yaml", folder / "runs.json"]
    launch("ddp", 2, *program, timeout=3000, **faulty_store)
    return folder


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_trains_the_same(runs, strategy):
    local, remote = runs / strategy, runs / f"{strategy} remote"
    assert len(losses(local)) == 4 and losses(remote) == losses(local)
    assert measured(remote) == measured(local)


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_moves_between_disk_and_store(runs, name):
    """After the location is changed on the command line, the run must match bit for bit."""
    assert [event["step"] for event in events(runs / name, "resume")] == [2]
    whole = losses(runs / "ddp")
    assert losses(runs / name) == {step: whole[step] for step in (3, 4)}
    assert measured(runs / name)[4] == measured(runs / "ddp")[4]
