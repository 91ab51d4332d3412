"""Tests for --write_text: the bytes are reproducible, and the documents can be read back."""

import json
import signal

import pytest
import zstandard

from pretrain.data.shards import open_shards
from pretrain.data.tokenizer import load_decoder
from pretrain.errors import InputError
from pretrain_tools.preparation.verification import verify_shards
from support.prepared import END, PROSE, content_of, make_parts_small, stream_of, texts, write_jsonl

SPLITS = ("train", "validation")


def lines_in(folder, split):
    paths = sorted((folder / "text").glob(f"{split}-*.jsonl.zst"))
    content = b"".join(zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes()) for path in paths)
    return [json.loads(line) for line in content.splitlines()]


def documents_of(folder, split):
    """Returns the documents decoded from a split's token IDs."""
    if not open_shards(folder, split).tokens:
        return []
    text = load_decoder(folder / "tokenizer").decode(stream_of(folder, split).tolist(), skip_special_tokens=False)
    return text.split(END)[:-1]


@pytest.fixture
def small_parts(monkeypatch):
    make_parts_small(monkeypatch, 1000)


def inputs(tmp_path):
    """Writes two files with duplicates, a near duplicate, addresses, an empty document and a bad line. Returns the
    arguments."""
    documents = [text.replace(END, "end").replace("\n", " \u2028\r\n") for text in texts(120)]
    near = " ".join(f"word{n}" for n in range(200))
    documents[10:10] = [near, f"{PROSE} Write to somebody@mail.org.", documents[3]]
    write_jsonl(tmp_path / "a.jsonl", documents[:70], [b"bad", b'{"text": ""}'])
    write_jsonl(tmp_path / "b.jsonl", [*documents[70:], f"{near} more", documents[0]])
    given = ("--input", f"{tmp_path}/?.jsonl", "--on_error", "skip", "--validation_fraction", 0.2)
    return (*given, "--filter", "personal_data", "--shard_tokens", 2000, "--write_text")


@pytest.mark.parametrize("copies", [("--near_duplicates", "0.8"), ("--deduplicate",), ("--max_documents", 50)])
def test_the_text_matches_the_ids_and_serves_another_tokenizer(tmp_path, run, small_parts, copies):
    arguments = (*inputs(tmp_path), *copies)
    run(*arguments, "--output", tmp_path / "out", "--workers", 1)
    for split in SPLITS:
        lines = lines_in(tmp_path / "out", split)
        assert [line["text"] for line in lines] == documents_of(tmp_path / "out", split)
        assert {line["split"] for line in lines} == {split}
    train = lines_in(tmp_path / "out", "train")
    assert train[0]["id"].startswith("a.jsonl:") and {line["source"] for line in train} <= {"a.jsonl", "b.jsonl"}
    everything = [*train, *lines_in(tmp_path / "out", "validation")]
    assert sum("email@example.com" in line["text"] for line in everything) == 1
    assert verify_shards(tmp_path / "out") == []
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert len(manifest["shards"]) > 3 and manifest["options"]["write_text"] is True
    assert all(f"text/{shard['file'][:-4]}.jsonl.zst" in shard["beside"] for shard in manifest["shards"])
    assert not list((tmp_path / "out").rglob("*.jsonl"))
    run(*arguments, "--output", tmp_path / "two", "--workers", 2)
    assert content_of(tmp_path / "two") == content_of(tmp_path / "out")

    other = tmp_path / "other"
    read = ("--input", f"{tmp_path}/out/text/*.jsonl.zst", "--split_field", "split")
    run(*read, "--train_tokenizer", 300, "--output", other, with_tokenizer=False)
    run(*read, "--tokenizer", other, "--output", tmp_path / "back", with_tokenizer=False)
    for split in SPLITS:
        assert documents_of(tmp_path / "back", split) == documents_of(tmp_path / "out", split)


def test_damaged_text_is_detected_and_lost_text_of_a_slice_is_named(tmp_path, run, small_parts):
    arguments = (*inputs(tmp_path), "--output", tmp_path / "out")
    for number in range(2):
        run(*arguments, "--slice", f"{number}/2")
    path = tmp_path / "out.slices/1-of-2/text/documents-00000.jsonl.zst"
    path.write_bytes(zstandard.compress(b'{"text": "only one"}\n'))
    assert "documents-00000.jsonl.zst" in verify_shards(path.parents[1])[0]
    with pytest.raises(InputError, match=r"1-of-2/text: contains fewer documents than the shards; prepare .* again"):
        run(*arguments, "--merge_slices", 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_any_write_the_text_is_the_same(tmp_path, tokenizer, workers, run_killed):
    arguments = (*inputs(tmp_path), "--tokenizer", tokenizer, "--near_duplicates", "0.8")
    assert run_killed(0, *arguments, "--workers", 1, "--output", tmp_path / "whole").returncode == 0
    broken = (*arguments, "--output", tmp_path / "broken", "--workers", workers)
    # With a string, the kill is at the first write to a matching file: compressed text in either pass, or text that is
    # still growing.
    for at in ("documents/text/documents-00001", 9, "broken/.unfinished/text/", "broken/text/train-00000", 15):
        killed = run_killed(at, *broken)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    ended = run_killed(0, *broken)
    assert ended.returncode == 0, ended.stderr
    assert content_of(tmp_path / "broken") == content_of(tmp_path / "whole")


def test_an_invalid_split_is_a_bad_record(tmp_path, run):
    (tmp_path / "a.jsonl").write_text('{"text": "one", "split": "train"}\n{"text": "two", "split": "test"}\n')
    arguments = ("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--split_field", "split")
    with pytest.raises(InputError, match=r"a\.jsonl, line 2: field 'split' must be train or validation"):
        run(*arguments)


def test_text_is_not_written_without_shards(tmp_path, run):
    write_jsonl(tmp_path / "a.jsonl", ["one"])
    arguments = ("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--write_text")
    with pytest.raises(InputError, match="--write_text: not supported with --train_tokenizer; omit it"):
        run(*arguments, "--train_tokenizer", 300, with_tokenizer=False)
