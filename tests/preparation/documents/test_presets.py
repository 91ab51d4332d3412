"""Tests for dataset presets, with mock repositories that have the same names, subsets, files and columns."""

import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import yaml
import zstandard

from pretrain.data.shards import open_shards
from pretrain_tools.preparation.documents.hub_dataset import ARTICLE_HEADING, PRESETS, HubDataset, find_preset
from pretrain_tools.preparation.documents.records import Reading
from pretrain_tools.preparation.documents.sources import BEGINNING
from support.hub_server import running_hub
from support.project import run_script
from support.run_folders import TEXT, write_tokenizer

STORIES = [f"{TEXT[:200]} story {number}" for number in range(20)]
WIKITEXT = [
    "", " = Robert Boulter = \n", "", " Robert is an actor . \n", " He = plays . \n", "", " = = Career = = \n", "",
    " In 2000 he began . \n", "", " = Homarus = \n", "", " A lobster . \n",
]  # fmt: skip
WEB_COLUMNS = {"id": "a", "dump": "CC", "url": "http", "language": "en", "score": 3.1, "token_count": 9}
# {repository: {subset: (file, columns other than text)}}, according to its card and files
REPOSITORIES = {
    "Salesforce/wikitext": {
        name: (f"{name}/train-00000-of-00001.parquet", {}) for name in ("wikitext-2-raw-v1", "wikitext-103-raw-v1")
    },
    "roneneldan/TinyStories": {"default": ("data/train-00000-of-00004-2d5a1467fff1081b.parquet", {})},
    "Skylion007/openwebtext": {"plain_text": ("plain_text/train-00000-of-00080.parquet", {})},
    "wikimedia/wikipedia": {
        name: (f"{name}/train-00000-of-00041.parquet", {"id": "12", "url": "https", "title": "Anarchism"})
        for name in ("20231101.de", "20231101.en")
    },
    "HuggingFaceFW/fineweb-edu": {
        "default": ("data/CC-MAIN-2013-20/train-00000-of-00014.parquet", WEB_COLUMNS),
        **{f"sample-{size}": (f"sample/{size}/000_00000.parquet", WEB_COLUMNS) for size in ("10BT", "100BT", "350BT")},
    },
    "HuggingFaceTB/smollm-corpus": {
        "cosmopedia-v2": (
            "cosmopedia-v2/train-00000-of-00104.parquet",
            {"prompt": "Write", "token_length": 9, "audience": "general", "format": "textbook", "seed_data": "web"},
        ),
        "fineweb-edu-dedup": (
            "fineweb-edu-dedup/train-00000-of-00234.parquet",
            {"id": "a", "metadata": {"dump": "CC"}},
        ),
    },
    "monology/pile-uncopyrighted": {"default": ("train/00.jsonl.zst", {"meta": {"pile_set_name": "Pile-CC"}})},
    "EleutherAI/the_pile_deduplicated": {"default": ("data/train-00000-of-01650-f70471ee3deb09c0.parquet", {})},
}


def texts_of(repository: str, subset: str) -> list[str]:
    if repository == "Salesforce/wikitext":
        return WIKITEXT
    return [f"{subset}: {story}" for story in STORIES]


def write_repository(folder, repository, subsets):
    configs = []
    for subset, (file, columns) in subsets.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"text": text, **columns} for text in texts_of(repository, subset)]
        if file.endswith(".zst"):
            lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
            path.write_bytes(zstandard.compress(lines))
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        pattern = f"{path.parent.relative_to(folder)}/*"
        configs.append({"config_name": subset, "data_files": [{"split": "train", "path": pattern}]})
    card = "" if "pile" in repository else f"---\n{yaml.safe_dump({'configs': configs})}---\n"
    (folder / "README.md").write_text(card)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("presets")
    with running_hub() as hub:
        for repository, subsets in REPOSITORIES.items():
            write_repository(folder / repository, repository, subsets)
            hub.add("datasets", repository, folder / repository)
        write_tokenizer(folder / "tokenizer")
        home = {"HF_HOME": str(folder / "home"), "HF_DATASETS_OFFLINE": "0", **hub.environment}
        yield home, folder / "tokenizer"


# Opens and reads every preset in one process, because importing datasets once per preset would take minutes.
READ = """
import json, sys
from pretrain_tools.preparation.documents.hub_dataset import open_dataset
from pretrain_tools.preparation.documents.hub_dataset import PRESETS
from pretrain_tools.preparation.documents.records import Reading
from pretrain_tools.preparation.documents.sources import BEGINNING
found = {}
for name in PRESETS:
    subset = "cosmopedia-v2" if name == "smollm-corpus" else None
    dataset = open_dataset(name + ":7", subset, "train", None)
    parts = dataset.parts(Reading(), BEGINNING)
    texts = [record.text.decode() for part in parts for _, record in part.records(Reading())]
    found[name] = [dataset.name, dataset.subset, dataset.rows is None, texts]
print(json.dumps(found))
"""


def test_each_preset_loads_the_repository_and_subset_it_names(hub):
    found = json.loads(run_script("-c", READ, **hub[0]).stdout.splitlines()[-1])
    assert set(found) == set(PRESETS)
    for name, (repository, subset, streams, texts) in found.items():
        preset = PRESETS[name]
        assert (repository, streams) == (preset.path, preset.streams)
        assert subset == (preset.subset or ("cosmopedia-v2" if name == "smollm-corpus" else None))
        if preset.document_start is None:
            assert texts == texts_of(repository, subset or "default")[:7], name
        else:
            assert texts == ["".join(WIKITEXT[1:10]), "".join(WIKITEXT[10:])]


def test_a_preset_by_the_command_line_with_a_limit(hub, tmp_path):
    home, tokenizer = hub
    run_script(
        "prepare_data.py", "--dataset", "wikitext-2:1", "--tokenizer", tokenizer, "--validation_fraction", "0",
        "--output", tmp_path / "wikitext-2", **home,
    )  # fmt: skip
    manifest = json.loads((tmp_path / "wikitext-2/manifest.json").read_text())
    assert manifest["sources"][0]["path"] == "Salesforce/wikitext"
    assert manifest["sources"][0]["subset"] == "wikitext-2-raw-v1"
    reader = open_shards(tmp_path / "wikitext-2", "train")
    assert reader.manifest.totals("train")[1:] == (1, len("".join(WIKITEXT[1:10])))


def test_names_are_found_in_any_spelling_and_folders_come_first(tmp_path, monkeypatch):
    assert find_preset("WikiText_103") is PRESETS["wikitext-103"]
    assert find_preset("the-pile") is PRESETS["pile"]
    assert find_preset("wikitext-2-raw-v1") is PRESETS["wikitext-2"]
    assert find_preset("wikitext-103-raw-v1") is PRESETS["wikitext-103"]
    assert find_preset("wikitext") is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wikipedia").mkdir()
    assert find_preset("wikipedia") is None


def test_a_corpus_of_several_subsets_asks_which(hub, tmp_path):
    out = run_script(
        "prepare_data.py", "--dataset", "smollm-corpus", "--tokenizer", hub[1], "--output", tmp_path / "x",
        check=False, **hub[0],
    )  # fmt: skip
    assert out.returncode == 2 and "cosmopedia-v2" in out.stderr and "fineweb-edu-dedup" in out.stderr


def test_a_misspelt_preset_gets_a_hint(hub, tmp_path):
    out = run_script(
        "prepare_data.py", "--dataset", "tinystorys", "--tokenizer", hub[1], "--output", tmp_path / "x", check=False,
        **hub[0],
    )  # fmt: skip
    assert out.returncode == 2 and "did you mean tinystories?" in out.stderr and "Traceback" not in out.stderr


def test_articles_continue_from_any_part_without_loss_or_copies(tmp_path, monkeypatch):
    monkeypatch.setattr("pretrain_tools.preparation.documents.hub_dataset.ROWS_PER_PART", 4)
    rows = [f" = Title {n} = \n" if n % 3 == 0 else f" line {n} \n" for n in range(20)]
    saved = datasets.Dataset.from_dict({"text": rows})
    dataset = HubDataset(saved.with_format("arrow"), "set", None, "train", None, None, ARTICLE_HEADING)
    parts = list(dataset.parts(Reading(), BEGINNING))
    whole = [list(part.records(Reading())) for part in parts]
    documents = [record for found in whole for _, record in found]
    assert [document.place for document in documents] == [1, 4, 7, 10, 13, 16, 19]
    assert b"".join(document.text for document in documents) == "".join(rows).encode()
    for number, part in enumerate(parts):
        later = dataset.parts(Reading(), part.after)
        assert [list(part.records(Reading())) for part in later] == whole[number + 1 :]
