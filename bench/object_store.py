"""Compares training from an object store and from disk: time spent waiting for data, disk usage, and resume time.

    pip install -r requirements-dev.txt
    python bench/object_store.py [--steps 60] [--rounds 3] [--megabytes 400]

The store is moto's server behind a proxy that adds 20 ms of latency, answers every 100th request with a 503 and
truncates every 150th response to half its size. Server and proxy run in a separate process. Disk and store alternate.
In each round, a run trains, stops at a checkpoint, and resumes. With the store, runs and resumes start with empty
cache folders. A step reads about 17 blocks of 64 KiB, so from step 30 on it needs blocks that were requested during
training.

Exits with status 1 if a requirement is missed (medians over rounds):
- The losses are the same as with data from disk.
- The run waits for data for less than 1% of the step time, not counting the first step.
- The run uses at most 256 MB of disk.
- The first step after resuming finishes at most 3 s later than with data from disk.
"""

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import yaml

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from pretrain.data.object_store import block_digests  # noqa: E402
from pretrain.errors import EXIT_INTERRUPTED  # noqa: E402
from support.object_store import faulty, store_server  # noqa: E402
from support.project import events, losses  # noqa: E402

LARGEST_WAIT = 0.01
LARGEST_DISK_BYTES = 256 << 20
LATEST_RESUME_SECONDS = 3.0
STEPS_AFTER_THE_RESUME = 3
SHARD_BYTES = 8 << 20
"""Size of an object. moto's server reads the whole object for each range request."""
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


def serve(corpus: Path, pipe: Connection) -> None:
    """Serves the corpus until the pipe is closed."""
    with store_server() as store:
        store.upload(corpus, "corpus")
        with faulty(store) as environment:
            pipe.send(environment)
            with contextlib.suppress(EOFError):
                pipe.recv()


def write_corpus(folder: Path, megabytes: int) -> Path:
    """Prepares this project's source code, repeated until the corpus has `megabytes`."""
    source = ("--input", str(ROOT / "pretrain/**/*.py"), "--validation_fraction", "0.1")
    prepare = [sys.executable, ROOT / "prepare_data.py", *source]
    subprocess.run([*prepare, "--train_tokenizer", "512", "--output", folder / "tokenizer"], check=True)
    corpus = folder / "corpus"
    subprocess.run([*prepare, "--tokenizer", folder / "tokenizer", "--output", corpus], check=True)
    manifest = json.loads((corpus / "manifest.json").read_text())
    (shard,) = [shard for shard in manifest["shards"] if shard["split"] == "train"]
    content = (corpus / shard["file"]).read_bytes()
    repeats = SHARD_BYTES // len(content)
    manifest["shards"].remove(shard)
    for number in range(megabytes * 10**6 // (repeats * len(content)) + 1):
        path = corpus / f"train-{number:05d}.bin"
        path.write_bytes(content * repeats)
        with path.open("rb") as file:
            hashes = block_digests(file)
        path.with_suffix(".blocks").write_bytes(hashes)
        beside = {path.with_suffix(".blocks").name: hashlib.sha256(hashes).hexdigest()}
        sha256 = hashlib.sha256(content * repeats).hexdigest()
        whole = {"file": path.name, "tokens": shard["tokens"] * repeats, "sha256": sha256, "beside": beside}
        manifest["shards"].append(shard | whole)
    (corpus / "manifest.json").write_text(json.dumps(manifest))
    return corpus


def write_recipe(folder: Path, steps: int) -> Path:
    (folder / "model.json").write_text(json.dumps(MODEL))
    recipe = {
        "model": {"config": str(folder / "model.json"), "vocab_size": "auto"},
        "seed": 1,
        "precision": "fp32",
        "data": {"sequence_length": 512},
        "budget": {"steps": steps + STEPS_AFTER_THE_RESUME},
        "batch": {"tokens_per_step": 8192, "sequences_per_micro_batch": 16},
        "optim": {"learning_rate": 0.001, "schedule": "constant", "warmup_steps": 2},
        "compile": "none",
        "logging": {"every_steps": 1},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"


def train(*arguments: object, **environment: str) -> float:
    """Runs train.py. Returns its start time."""
    began = time.time()
    command = [sys.executable, ROOT / "train.py", *map(str, arguments)]
    ended = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if ended.returncode not in (0, EXIT_INTERRUPTED):  # the second status is for checkpoint.stop_at_step
        sys.exit(f"{ended.stdout}{ended.stderr}\nexit status {ended.returncode}")
    return began


def disk_bytes(folder: Path) -> int:
    """Returns the bytes that a folder takes on disk."""
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())


def measure(folder: Path, recipe: Path, steps: int, *data: object, **environment: str) -> dict[str, float]:
    """Trains and resumes in `folder`, and deletes its `disk` folder in between. Returns the round's measurements."""
    run, disk = folder / "run", folder / "disk"
    given = ("--config", recipe, "--output", run, *data)
    train(*given, "--checkpoint.stop_at_step", steps, **environment)
    taken = disk_bytes(disk)
    shutil.rmtree(disk, ignore_errors=True)
    began = train(*given, **environment)
    first, *later = [event for event in events(run, "train") if event["step"] <= steps]
    resumed = next(event for event in events(run, "train") if event["step"] == steps + 1)
    return {
        "step_seconds": statistics.mean(event["step_seconds"] for event in later),
        "wait": sum(event["data_seconds"] for event in later) / sum(event["step_seconds"] for event in later),
        "first_batch_seconds": first["data_seconds"],
        "resume_seconds": resumed["time"] - began,
        "disk_bytes": taken,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=400, help="size of the corpus in MB")
    arguments = parser.parse_args()
    processes = multiprocessing.get_context("spawn")
    found: dict[str, list[dict[str, float]]] = {"disk": [], "store": []}
    are_equal = True
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        corpus = write_corpus(folder, arguments.megabytes)
        recipe = write_recipe(folder, arguments.steps)
        here, there = processes.Pipe()
        server = processes.Process(target=serve, args=(corpus, there), daemon=True)
        server.start()
        environment = here.recv()
        print(f"load {psutil.getloadavg()[0]:.1f} on {psutil.cpu_count()} cores", flush=True)
        for number in range(arguments.rounds):
            places = {name: folder / f"{name}-{number}" for name in found}
            cache = f"{{folder: {places['store'] / 'disk/cache'}, size: 256M}}"
            remote = ("--data.train", "[{shards: s3://mine/corpus}]", "--data.cache", cache)
            home = {"XDG_CACHE_HOME": str(places["store"] / "disk/home"), **environment}
            local = ("--data.train", f"[{{shards: {corpus}}}]")
            found["disk"].append(measure(places["disk"], recipe, arguments.steps, *local))
            found["store"].append(measure(places["store"], recipe, arguments.steps, *remote, **home))
            are_equal = are_equal and losses(places["disk"] / "run") == losses(places["store"] / "run")
            for name, rounds in found.items():
                print(name, json.dumps(rounds[-1]), flush=True)
        server.kill()
    middle = {
        name: {figure: statistics.median(each[figure] for each in rounds) for figure in rounds[0]}
        for name, rounds in found.items()
    }
    later = middle["store"]["resume_seconds"] - middle["disk"]["resume_seconds"]
    for name, figures in middle.items():
        print(
            f"{name}: {figures['step_seconds']:.2f} s per step, {figures['wait']:.2%} of it waiting for data; first "
            f"batch after {figures['first_batch_seconds']:.1f} s; first step after resuming: "
            f"{figures['resume_seconds']:.1f} s; {figures['disk_bytes'] / 1e6:.1f} MB of disk"
        )
    bounds = {
        "bit-identical losses": are_equal,
        f"waiting less than {LARGEST_WAIT:.0%} of the step time": middle["store"]["wait"] < LARGEST_WAIT,
        "at most 256 MB of disk": middle["store"]["disk_bytes"] <= LARGEST_DISK_BYTES,
        f"resuming at most {LATEST_RESUME_SECONDS:g} s slower ({later:+.1f} s)": later <= LATEST_RESUME_SECONDS,
    }
    for bound, is_met in bounds.items():
        print(f"{'met' if is_met else 'MISSED'}: {bound}")
    return 0 if all(bounds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
