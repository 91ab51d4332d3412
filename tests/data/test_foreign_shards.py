"""Tests for token IDs prepared by other tools: nanoGPT and Megatron files, and flat HDF5."""

import json
import struct

import h5py
import numpy as np
import pytest
import yaml

from pretrain.config import Data
from pretrain.data import foreign_shards
from pretrain.data.batches import Batches
from pretrain.data.shards import read_manifest
from pretrain.errors import InputError
from pretrain.optim.batch_ramp import BatchRamp
from support.prepared import stream_of
from support.project import events, run_script

# Three uint16 documents with 3, 1 and 4 IDs. The header is: magic, version 1, type 8, 3 sequences, 4 boundaries. It is
# followed by the lengths as int32, the byte offsets 0, 6, 8 as int64, and the boundaries 0 to 3 as int64.
GOLDEN_INDEX = bytes.fromhex(
    "4d4d494449445800000100000000000000080300000000000000"
    "0400000000000000030000000100000004000000"
    "000000000000000006000000000000000800000000000000"
    "0000000000000000010000000000000002000000000000000300000000000000"
)


def index_of_one() -> bytes:
    """Returns the index of a single document with 3 IDs."""
    header = GOLDEN_INDEX[:18] + struct.pack("<2Q", 1, 2)
    return header + struct.pack("<iq2q", 3, 0, 0, 1)


def test_megatrons_index_is_read(tmp_path):
    (tmp_path / "a.idx").write_bytes(GOLDEN_INDEX)
    assert foreign_shards.read_idx(tmp_path / "a.idx") == ("uint16", 8)


@pytest.fixture
def nanogpt(tmp_path, shards):
    """Writes a folder like nanoGPT's prepare.py."""
    folder = tmp_path / "openwebtext"
    folder.mkdir()
    for split, name in {"train": "train.bin", "validation": "val.bin"}.items():
        stream_of(shards, split).astype("<u2").tofile(folder / name)
    return folder


def test_nanogpts_folder_has_the_same_counts(nanogpt, shards, tokenizer):
    manifest = read_manifest(nanogpt, str(tokenizer))
    ours = read_manifest(shards)
    assert [manifest.totals(split) for split in ("train", "validation")] == [
        ours.totals(split) for split in ("train", "validation")
    ]
    assert (manifest.end_of_document_id, manifest.dtype) == (ours.end_of_document_id, "uint16")
    assert manifest.tokenizer_sha256 == ours.tokenizer_sha256
    assert read_manifest(nanogpt / "train.bin", str(tokenizer)).totals("validation") == (0, 0, 0)


@pytest.fixture
def pile(tmp_path, shards):
    """Writes flat HDF5 files like the Pile's: int32, extended document by document."""
    for split, name in {"train": "pile_train.h5", "validation": "pile_dev.h5"}.items():
        with h5py.File(tmp_path / name, "w") as file:
            tokens = file.create_dataset("tokens", (0,), maxshape=(None,), dtype="i")
            for piece in np.array_split(stream_of(shards, split), 7):
                tokens.resize(len(tokens) + len(piece), axis=0)
                tokens[-len(piece) :] = piece
    return tmp_path


def test_hdf5_files_have_the_same_sequences(pile, shards, tokenizer):
    ours = read_manifest(shards)
    for split, name in {"train": "pile_train.h5", "validation": "pile_dev.h5"}.items():
        manifest = read_manifest(pile / name, str(tokenizer))
        assert manifest.totals(split) == ours.totals(split) and manifest.dtype == "uint32"
    ramp = BatchRamp((4,), (0,), 20)
    sources = [{"shards": str(shards)}], [{"shards": str(pile / "pile_train.h5"), "tokenizer": str(tokenizer)}]
    mine, pile_batches = (
        Batches(Data.model_validate({"train": source, "sequence_length": 64}), seed=1, ramp=ramp) for source in sources
    )
    for step in range(20):
        ids = pile_batches.read(step, 0, 0, ranks=1, sequences=4)
        assert (ids == mine.read(step, 0, 0, ranks=1, sequences=4)).all()


def test_hdf5_without_a_1d_id_array_is_rejected(tmp_path, tokenizer):
    def problem(**datasets):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.h5"
        with h5py.File(path, "w") as file:
            file.update({name: np.array(value) for name, value in datasets.items()})
        with pytest.raises(InputError) as caught:
            read_manifest(path, str(tokenizer))
        return caught.value.problems[0]

    assert "contains ids, more; the token IDs must be its only dataset or be named tokens" in problem(
        ids=[1], more=[1]
    )
    assert "has type float64 and shape (1,), must be a 1-D integer array" in problem(tokens=[1.0], more=[1])
    assert "has type int64 and shape (1, 2), must be a 1-D integer array" in problem(ids=[[1, 2]])
    assert "contains token ID -1, but the tokenizer's IDs are 0 to 511" in problem(ids=[5, -1])
    assert "contains token ID 512, but the tokenizer's IDs are 0 to 511" in problem(ids=[5, 512])


def test_training_on_foreign_files_is_identical(nanogpt, shards, tokenizer, recipe, tmp_path):
    values = yaml.safe_load(recipe.read_text())
    run_script("train.py", "--config", recipe)
    values["data"]["train"] = [{"shards": str(nanogpt), "tokenizer": str(tokenizer)}]
    values["output"] = str(tmp_path / "foreign")
    recipe.write_text(yaml.safe_dump(values))
    run_script("train.py", "--config", recipe)
    ours, foreign = ([e["loss"] for e in events(tmp_path / name, "train")] for name in ("run", "foreign"))
    assert len(ours) == 12 and ours == foreign
    ours, foreign = (events(tmp_path / name, "validation") for name in ("run", "foreign"))
    assert [e["bits_per_byte"] for e in ours] == [e["bits_per_byte"] for e in foreign]
    assert (tmp_path / "foreign/final/tokenizer.json").exists()

    words = ["--model", tmp_path / "run/final", "--data", shards, nanogpt, "--tokenizer", tokenizer]
    run_script("evaluate.py", *words, "--output", tmp_path / "scores.json")
    ours, foreign = json.loads((tmp_path / "scores.json").read_text())["models"][0]["sources"].values()
    assert ours == foreign


def test_invalid_foreign_files_are_reported(nanogpt, tokenizer, tmp_path):
    name = str(tokenizer)
    with pytest.raises(InputError, match=r"these token IDs need a tokenizer; set it in the recipe"):
        read_manifest(nanogpt)
    (nanogpt / "odd.bin").write_bytes(b"123")
    with pytest.raises(InputError, match=r"odd\.bin: has 3 bytes, must contain uint16 IDs"):
        read_manifest(nanogpt / "odd.bin", name)
    np.array([600, 1], "<u2").tofile(nanogpt / "wide.bin")
    with pytest.raises(InputError, match=r"wide\.bin: contains token ID 600, but the tokenizer's IDs are 0 to 511"):
        read_manifest(nanogpt / "wide.bin", name)
    np.array([20240520, 1, 9], "<i4").tofile(nanogpt / "llmc.bin")
    with pytest.raises(InputError, match=r"llmc\.bin: starts with llm\.c's 1,024-byte header"):
        read_manifest(nanogpt / "llmc.bin", name)
    np.arange(8, dtype="<u2").tofile(nanogpt / "m.bin")
    bad = {
        b"nothing": "is not the .idx file of a Megatron dataset",
        GOLDEN_INDEX[:-1]: "has 101 bytes, must have 102",
        GOLDEN_INDEX[:17] + b"\x05" + GOLDEN_INDEX[18:]: "ID type 5",
        GOLDEN_INDEX[:46] + b"\x02" + GOLDEN_INDEX[47:]: "are not contiguous",
        index_of_one(): r"must contain 6 bytes according to its .idx",
    }
    for content, problem in bad.items():
        (nanogpt / "m.idx").write_bytes(content)
        with pytest.raises(InputError, match=problem):
            read_manifest(nanogpt / "m.bin", name)
    (nanogpt / "m.idx").write_bytes(GOLDEN_INDEX)
    assert read_manifest(nanogpt / "m.bin", name).totals("train")[0] == 8
