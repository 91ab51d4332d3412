"""Tests for the real scripts with datasets, tokenizers and models from the Hub."""

import json

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from support.hub_server import TOKEN, running_hub
from support.project import events, launch, run_script
from support.run_folders import TEXT, write_model, write_tokenizer
from support.tiny_models import TINY_LLAMA

DOCUMENTS = [f"{TEXT}# document {number}\n" for number in range(40)]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A mock Hub with a tokenizer, a dataset and a model, and the environment variables to use it."""
    folder = tmp_path_factory.mktemp("hub")
    with running_hub() as hub:
        tokenizer = write_tokenizer(folder / "tokenizer")
        hub.add("models", "owner/tokenizer", tokenizer)
        (folder / "dataset/data").mkdir(parents=True)
        table = pyarrow.table({"text": DOCUMENTS, "score": list(range(40))})
        pyarrow.parquet.write_table(table, folder / "dataset/data/train-00000-of-00001.parquet")
        (folder / "dataset/README.md").write_text("---\nlicense: mit\n---\n")
        hub.add("datasets", "owner/web", folder / "dataset")
        hub.add("models", "owner/base", write_model(folder / "model", tokenizer, TINY_LLAMA, seed=3))
        hub.repositories["models", "owner/base"].tags["v1"] = hub.repositories["models", "owner/base"].branches["main"]
        home = {"HF_HOME": str(folder / "home"), "HF_DATASETS_OFFLINE": "0", **hub.environment}
        yield hub, home


@pytest.fixture(scope="module")
def shards(hub, tmp_path_factory):
    """A folder prepared with a dataset and a tokenizer from the Hub."""
    output = tmp_path_factory.mktemp("shards") / "web"
    run_script(
        "prepare_data.py", "--dataset", "owner/web", "--tokenizer", "owner/tokenizer", "--validation_fraction", "0.2",
        "--output", output, **hub[1],
    )  # fmt: skip
    return output


def test_a_dataset_and_a_tokenizer_by_their_names(shards):
    manifest = json.loads((shards / "manifest.json").read_text())
    assert manifest["tokenizer"]["name"] == "owner/tokenizer"
    assert sum(split["documents"] for split in manifest["totals"].values()) == len(DOCUMENTS)
    assert sum(split["text_bytes"] for split in manifest["totals"].values()) == sum(map(len, DOCUMENTS))
    assert manifest["sources"][0]["path"] == "owner/web"
    assert TOKEN not in (shards / "manifest.json").read_text()


def test_a_dataset_that_streams_gives_the_same_tokens(hub, shards, tmp_path):
    run_script(
        "prepare_data.py", "--dataset", "owner/web", "--streaming", "--tokenizer", "owner/tokenizer",
        "--validation_fraction", "0.2", "--output", tmp_path / "streamed", **hub[1],
    )  # fmt: skip
    streamed = tmp_path / "streamed/train-00000.bin"
    assert streamed.read_bytes() == (shards / "train-00000.bin").read_bytes()


@pytest.mark.parametrize(("examples", "files"), [(30, 1), (120, 2)])
def test_a_limited_stream_fetches_only_the_files_it_needs(hub, tmp_path, examples, files):
    served, home = hub
    if ("datasets", "owner/large") not in served.repositories:
        for number in range(5):
            rows = [f"{number} {row} {TEXT[:200]}" for row in range(100)]
            path = tmp_path / f"large/data/train-{number:05d}-of-00005.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pyarrow.parquet.write_table(pyarrow.table({"text": rows, "unread": rows}), path)
        served.add("datasets", "owner/large", tmp_path / "large")
    served.downloads.clear()
    run_script(
        "prepare_data.py", "--dataset", f"owner/large:{examples}", "--streaming", "--tokenizer", "owner/tokenizer",
        "--validation_fraction", "0", "--output", tmp_path / "out", **home,
    )  # fmt: skip
    totals = json.loads((tmp_path / "out/manifest.json").read_text())["totals"]
    assert totals["train"]["documents"] == examples
    read = {name for name, _ in served.downloads if name.startswith("owner/large/data")}
    assert read == {f"owner/large/data/train-{number:05d}-of-00005.parquet" for number in range(files)}
    others = {name for name, _ in served.downloads} - read
    assert all(name.startswith("owner/tokenizer/") or name == "owner/large/README.md" for name in others), others


def test_missing_hub_content_is_reported(hub, tmp_path):
    out = run_script(
        "prepare_data.py", "--dataset", "owner/nothing", "--tokenizer", "owner/tokenizer", "--output", tmp_path / "x",
        check=False, **hub[1],
    )  # fmt: skip
    assert out.returncode == 2 and "--dataset owner/nothing" in out.stderr and "Traceback" not in out.stderr
    out = run_script("evaluate.py", "--model", "owner/nothing", "--prompt", "def", check=False, **hub[1])
    assert out.returncode == 2 and "owner/nothing" in out.stderr and "Traceback" not in out.stderr


@pytest.fixture(scope="module")
def evaluated(hub, shards, tmp_path_factory):
    """(evaluate.py's results, printed output) for the Hub model at its tag."""
    results = tmp_path_factory.mktemp("evaluated") / "results.json"
    out = run_script(
        "evaluate.py", "--model", "owner/base@v1", "--data", shards, "--sequence_length", "64", "--sequences", "8",
        "--output", results, **hub[1],
    )  # fmt: skip
    return json.loads(results.read_text())["models"][0], out.stdout + out.stderr


def test_a_model_of_the_hub_is_evaluated_at_a_revision(hub, evaluated):
    model, said = evaluated
    assert model["name"] == "owner/base@v1"
    assert model["revision"] == hub[0].repositories["models", "owner/base"].tags["v1"]
    assert 4 < model["sources"]["web"]["loss"] < 8  # ln 512 = 6.2, because the weights are random
    assert TOKEN not in said


def test_a_model_of_the_hub_is_trained_further(hub, shards, evaluated, tmp_path):
    values = {
        "model": "owner/base",
        "init": "pretrained",
        "output": str(tmp_path / "run"),
        "precision": "fp32",
        "data": {"train": [{"shards": str(shards)}], "sequence_length": 64},
        "budget": {"steps": 12},
        "batch": {"tokens_per_step": 256, "sequences_per_micro_batch": 2},
        "optim": {"learning_rate": 0.003, "warmup_steps": 2},
        "compile": "none",
        "validation": {"every_steps": 6, "sequences": 8},
        "logging": {"every_steps": 1},
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values))
    out = launch("ddp", 2, "train.py", "--config", recipe, **hub[1])
    run = tmp_path / "run"
    measured = [event["loss"] for event in events(run, "validation")]
    on_the_hub = evaluated[0]["sources"]["web"]["loss"]
    # the same windows in fp32 on a different number of processes, so only the order of summation differs
    assert measured[0] == pytest.approx(on_the_hub, abs=1e-4), "training must start from the Hub's weights"
    assert measured[-1] < measured[0] - 0.5
    assert "base_model: owner/base" in (run / "final/README.md").read_text()
    assert "- owner/web" in (run / "final/README.md").read_text()
    for text in (out.stdout, out.stderr, *(path.read_text() for path in run.glob("*.*") if path.is_file())):
        assert TOKEN not in text
