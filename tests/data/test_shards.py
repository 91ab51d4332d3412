import hashlib
import json
import os
from collections import deque
from dataclasses import asdict

import numpy as np
import pytest

from pretrain.data.manifest import Shard, dtype_for
from pretrain.data.shards import open_shards, read_manifest
from pretrain.errors import InputError
from pretrain_tools.preparation.documents.document_index import document_table, read_index
from pretrain_tools.preparation.documents.sources import BEGINNING
from pretrain_tools.preparation.encoded_part import EncodedPart, Tally
from pretrain_tools.preparation.shard_writer import ShardWriter
from pretrain_tools.preparation.verification import verify_shards

END = 9
VOCABULARY = 10


def write_folder(folder, streams, dtype="uint16", vocabulary_size=VOCABULARY):
    """Writes a prepared folder from {split: [IDs of each shard]}."""
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    shards = []
    for split, parts in streams.items():
        for number, ids in enumerate(parts):
            content = np.array(ids, dtype=dtype).tobytes()
            name = f"{split}-{number:05d}.bin"
            (folder / name).write_bytes(content)
            documents = ids.count(END)
            shards.append(Shard(name, split, len(ids), documents, 7 * documents, hashlib.sha256(content).hexdigest()))
    manifest = {
        "format": "groundwork-shards",
        "version": 1,
        "tokenizer": {"name": "t", "sha256": hashlib.sha256(b"{}").hexdigest()},
        "vocabulary_size": vocabulary_size,
        "end_of_document_id": END,
        "dtype": dtype,
        "shards": [asdict(shard) for shard in shards],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "data", {"train": [[1, 2, 9, 3, 9], [4, 9], [5, 6, 7, 9]], "validation": [[8, 9]]})


def test_few_of_many_shards_are_open_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("pretrain.data.shards.MOST_OPEN_MAPS", 2)
    monkeypatch.setattr("pretrain.data.shards._open_maps", deque())
    parts = [[number % 9, 9] for number in range(20)]
    folder = write_folder(tmp_path, {"train": parts, "validation": parts})
    before = len(os.listdir("/proc/self/fd"))
    readers = [open_shards(folder, split) for split in ("train", "validation")]
    out = np.zeros(2, np.uint16)
    for number in [*range(20), *range(20)]:
        for reader in readers:
            reader.read(2 * number, out)
            assert out.tolist() == parts[number]
    assert len(os.listdir("/proc/self/fd")) <= before + 2


@pytest.mark.parametrize("out_type", [np.uint16, np.int32, np.int64])
def test_reads_cross_shard_files_into_any_integer_type(folder, out_type):
    reader = open_shards(folder, "train")
    stream = [1, 2, 9, 3, 9, 4, 9, 5, 6, 7, 9]
    assert reader.tokens == len(stream)
    for start in range(len(stream)):
        for stop in range(start, len(stream) + 1):
            out = np.zeros(stop - start, dtype=out_type)
            reader.read(start, out)
            assert out.tolist() == stream[start:stop]


def test_reads_outside_the_stream_are_rejected(folder):
    reader = open_shards(folder, "train")
    for start, length in ((-1, 2), (10, 2), (11, 1)):
        with pytest.raises(IndexError, match="train has 0 to 11"):
            reader.read(start, np.zeros(length, dtype=np.int64))


def test_wide_ids_and_plain_memmap_open_the_same_file(tmp_path):
    folder = write_folder(tmp_path / "data", {"train": [[70_000, 9]]}, "uint32", 70_001)
    out = np.zeros(2, dtype=np.int64)
    open_shards(folder, "train").read(0, out)
    assert out.tolist() == [70_000, 9] == np.memmap(folder / "train-00000.bin", dtype=np.uint32).tolist()
    assert (dtype_for(65_536), dtype_for(65_537)) == ("uint16", "uint32")


def test_manifest_counts_and_identity(folder):
    manifest = read_manifest(folder)
    assert manifest.totals("train") == (11, 4, 28)
    assert manifest.totals("test") == (0, 0, 0)
    assert manifest.sha256 == hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    assert manifest.tokenizer_folder == folder / "tokenizer"


def test_errors_for_missing_and_unfinished_folders_show_the_command(tmp_path):
    with pytest.raises(InputError, match=r"no such folder.*python prepare_data.py"):
        read_manifest(tmp_path / "none")
    with pytest.raises(InputError, match=r"no manifest.json.*not a finished folder"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: "{" + m, "not valid JSON"),
        (lambda m: "[]", "contains list, must contain {'format': 'groundwork-shards', 'version': 1}"),
        (lambda m: m.replace('"version": 1', '"version": 2'), "'version': 2}, must contain .* 'version': 1}"),
        (lambda m: m.replace('"uint16"', '"int8"'), r"dtype: Input should be 'uint16' or 'uint32' \(got 'int8'\)"),
        (lambda m: m.replace('"tokens": 5', '"tokens": "5"'), r"shards.0.tokens: .* a valid integer \(got '5'\)"),
    ],
)
def test_bad_manifests_are_named(folder, change, message):
    path = folder / "manifest.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(InputError, match=message):
        read_manifest(folder)


def test_all_missing_keys_are_named_at_once(folder):
    path = folder / "manifest.json"
    fields = json.loads(path.read_text())
    del fields["vocabulary_size"], fields["tokenizer"]["sha256"], fields["shards"][1]["sha256"]
    path.write_text(json.dumps(fields))
    with pytest.raises(InputError) as caught:
        read_manifest(folder)
    assert len(caught.value.problems) == 3


def test_every_bad_shard_is_named_with_the_size_it_should_have(folder):
    (folder / "train-00000.bin").write_bytes(b"12")
    (folder / "train-00002.bin").unlink()
    with pytest.raises(InputError) as caught:
        open_shards(folder, "train")
    first, second = caught.value.problems
    assert "train-00000.bin: has 2 bytes, must have 10 bytes (5 uint16 IDs)" in first
    assert "train-00002.bin: is missing, must have 8 bytes" in second
    assert "run prepare_data.py again" in first
    open_shards(folder, "validation")


def test_a_split_without_tokens_names_those_that_exist(folder):
    with pytest.raises(InputError, match=r"no tokens in split 'test' \(existing splits: train, validation\)"):
        open_shards(folder, "test")


def test_a_shard_truncated_after_opening_is_named_when_read(folder):
    reader = open_shards(folder, "train")
    (folder / "train-00001.bin").write_bytes(b"1234567890")
    with pytest.raises(InputError, match=r"train-00001\.bin: has 10 bytes, must have 4 bytes"):
        reader.read(0, np.zeros(11, dtype=np.int64))


def test_verify_finds_nothing_in_a_good_folder(folder):
    assert verify_shards(folder) == []


def test_verify_finds_one_changed_bit(folder):
    path = folder / "train-00002.bin"
    content = bytearray(path.read_bytes())
    content[6] ^= 1
    path.write_bytes(content)
    (problem,) = verify_shards(folder)
    assert "train-00002.bin: its content has changed" in problem


def test_verify_finds_a_foreign_tokenizer(folder):
    (folder / "tokenizer" / "tokenizer.json").write_text("other")
    (problem,) = verify_shards(folder)
    assert "tokenizer.json: its content has changed" in problem


def documents(*lengths):
    ids = np.concatenate([np.r_[np.arange(length - 1), END] for length in lengths]) if lengths else np.array([])
    table = document_table(np.array(lengths), np.array(lengths) * 3, np.arange(len(lengths)), np.array(lengths) + 1)
    return EncodedPart(BEGINNING, Tally(), ids=ids, documents=table)


def test_shards_are_split_between_documents(tmp_path):
    writer = ShardWriter(tmp_path, "uint16", 10)
    writer.write("train", documents(4, 5, 3, 12, 2))
    writer.write("train", documents(7, 2))
    shards = writer.finish()
    assert [(shard.tokens, shard.documents) for shard in shards] == [(9, 2), (3, 1), (12, 1), (9, 2), (2, 1)]
    assert [shard.text_bytes for shard in shards] == [27, 9, 36, 27, 6]
    for shard in shards:
        content = (tmp_path / shard.file).read_bytes()
        assert hashlib.sha256(content).hexdigest() == shard.sha256
        assert np.frombuffer(content, dtype="<u2")[-1] == END
        index = read_index(tmp_path / shard.file, shard.documents)
        assert all(np.frombuffer(content, dtype="<u2")[index["end"] - 1] == END)
        assert index["end"][-1] == shard.tokens
        assert index["text_bytes"].sum() == shard.text_bytes
        beside = [(tmp_path / shard.file).with_suffix(suffix) for suffix in (".documents", ".blocks")]
        assert shard.beside == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in beside}
    index = read_index(tmp_path / shards[0].file, 2)
    assert index[["source", "place"]].tolist() == [(0, 5), (1, 6)]


@pytest.mark.parametrize("written_after", [0, 1, 6])
def test_a_writer_resumes_from_its_state(tmp_path, written_after):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    pieces = [documents(4, 5, 3), documents(6, 6), documents(2), documents(9, 9), documents(1, 1, 1)]
    writer = ShardWriter(whole, "uint16", 10)
    for piece in pieces:
        writer.write("train", piece)
        writer.write("validation", piece)
    expected = writer.finish()
    writer = ShardWriter(broken, "uint16", 10)
    for piece in pieces[:2]:
        writer.write("train", piece)
        writer.write("validation", piece)
    state = json.loads(json.dumps(writer.sync()))
    for _ in range(written_after):
        writer.write("train", documents(8, 3))
    writer = ShardWriter(broken, "uint16", 10, state)
    for piece in pieces[2:]:
        writer.write("train", piece)
        writer.write("validation", piece)
    assert writer.finish() == expected
    assert {p.name: p.read_bytes() for p in broken.iterdir()} == {p.name: p.read_bytes() for p in whole.iterdir()}


def test_a_writer_does_not_resume_from_a_changed_shard(tmp_path):
    writer = ShardWriter(tmp_path, "uint16", 10)
    writer.write("train", documents(4, 5, 3))
    state = writer.sync()
    with (tmp_path / "train-00000.bin").open("ab") as shard:
        shard.write(b"12")
    with pytest.raises(InputError, match=r"train-00000\.bin: has changed since it was written; remove"):
        ShardWriter(tmp_path, "uint16", 10, state)


def test_a_writer_does_not_resume_from_a_truncated_shard(tmp_path):
    writer = ShardWriter(tmp_path, "uint16", 100)
    writer.write("train", documents(4, 5, 3))
    state = writer.sync()
    (tmp_path / "train-00000.bin").write_bytes(b"12")
    with pytest.raises(InputError, match=r"train-00000\.bin: was truncated after it was written; remove"):
        ShardWriter(tmp_path, "uint16", 100, state)
