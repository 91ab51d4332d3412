"""Tests for the validation split of a few plain-text files, which is the end of the largest file."""

import json

import pytest

from pretrain.data.shards import read_manifest
from pretrain_tools.preparation.documents.document_index import read_index
from pretrain_tools.preparation.documents.records import Record, is_drawn
from pretrain_tools.preparation.validation_split import ValidationSplit, split_with_tail
from support.prepared import content_of, stream_of

PARAGRAPH = "A line of this text.\nAnother of its lines, naïve and 漢字.\n\n"


def novel(paragraphs=400):
    return "".join(f"{number}. {PARAGRAPH}" for number in range(paragraphs))


def both_splits(folder, tokenizer):
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    return [backend.decode(stream_of(folder, split)[:-1].tolist()) for split in ("train", "validation")]


def test_the_tail_of_a_single_text_is_held_out(tmp_path, run, tokenizer):
    (tmp_path / "novel.txt").write_text(novel())
    told = run("--input", tmp_path / "novel.txt", "--validation_fraction", 0.05, "--output", tmp_path / "out")
    assert "warning" not in told
    head, tail = both_splits(tmp_path / "out", tokenizer)
    assert head + tail == novel()
    assert head.endswith("\n\n"), "the split must be at the end of a paragraph"
    size = len(novel().encode())
    assert 0.05 * size <= len(tail.encode()) <= 0.08 * size
    manifest = read_manifest(tmp_path / "out")
    assert [manifest.totals(split)[1] for split in ("train", "validation")] == [1, 1]
    assert sum(manifest.totals(split)[2] for split in ("train", "validation")) == size
    cut = json.loads((tmp_path / "out" / "manifest.json").read_bytes())["held_out_tail"]["first_byte"]
    assert novel().encode()[cut:].decode() == tail
    table = read_index(tmp_path / "out" / "validation-00000.bin", 1)
    assert table["place"].tolist() == [1 + head.count("\n")], (
        "the index must contain the line at which the tail starts"
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_and_slices_give_the_same_bytes(tmp_path, run, workers):
    """Workers and slices give the same bytes. A copy of the largest file doesn't leak its held-out end into
    training."""
    for name, text in {"a": novel(300), "b": "b " + novel(380), "c": "b " + novel(380)}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    arguments = ("--input", f"{tmp_path}/*.txt", "--validation_fraction", 0.02)
    run(*arguments, "--workers", workers, "--output", tmp_path / "whole")
    for number in range(2):
        run(*arguments, "--output", tmp_path / "merged", "--slice", f"{number}/2")
    run(*arguments, "--output", tmp_path / "merged", "--merge_slices", 2)
    assert content_of(tmp_path / "merged") == content_of(tmp_path / "whole")
    assert read_manifest(tmp_path / "whole").totals("validation")[1] == 2, "the copy's tail must also be held out"
    assert "already complete" in run(*arguments, "--output", tmp_path / "whole")


def test_a_tokenizer_is_not_trained_on_the_tail(tmp_path, run):
    """Only the held-out text contains a word that could be merged."""
    (tmp_path / "text.txt").write_text(novel(200) + "\n\n" + "zyxwvu " * 100)
    run(
        "--input", tmp_path / "text.txt", "--train_tokenizer", 600, "--validation_fraction", 0.05, "--output",
        tmp_path / "made", with_tokenizer=False,
    )  # fmt: skip
    assert "zy" not in json.loads((tmp_path / "made/tokenizer.json").read_bytes())["model"]["vocab"]
    assert "held_out_tail" in json.loads((tmp_path / "made/training.json").read_bytes())


def test_many_documents_are_split_by_hash_alone():
    texts = [f"text {number}".encode() for number in range(400)]
    assert split_with_tail(iter(texts), 0.05) == ValidationSplit(0.05)
    pieces = [piece for text in texts for piece in ValidationSplit(0.05).pieces(Record(1, text))]
    assert [piece.text for piece in pieces] == texts
    assert [piece.is_validation for piece in pieces] == [is_drawn(text, 0.05) for text in texts]


def test_reading_ends_once_both_splits_have_a_document():
    texts = (f"text {number}".encode() for number in range(10_000))
    split_with_tail(texts, 0.05)
    assert len(list(texts)) > 9_000


def test_a_single_text_with_a_validation_hash_is_cut_too():
    text = next(text for n in range(1000) if is_drawn(text := f"{n} {novel(30)}".encode(), 0.05))
    head, tail = split_with_tail([text], 0.05).pieces(Record(1, text))
    assert (head.is_validation, tail.is_validation) == (False, True)
    assert head.text + tail.text == text and tail.place == 1 + head.text.count(b"\n")


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("first\n\nsecond third\n\n" + "x" * 10, "\n\n"),
        ("one\r\n\r\ntwo two two\r\n\r\n" + "x" * 10, "\r\n\r\n"),
        ("a line\nanother one\n" + "x" * 10, "\n"),
        ("words and more words " + "x" * 10, " "),
        ("漢" * 40, "漢"),
    ],
)
def test_the_cut_is_at_the_best_nearby_place(text, end):
    content = text.encode()
    head, tail = split_with_tail([content], 10 / len(content)).pieces(Record(1, content))
    assert head.text.decode().endswith(end) and tail.text.decode()
    assert 8 <= len(tail.text) <= 17


def test_nothing_is_held_out_without_a_fraction_or_text():
    assert split_with_tail([], 0.05).divided_sha256 is None
    assert split_with_tail([b"abc"], 0.05).divided_sha256 is None


def test_an_empty_split_gives_a_warning_with_a_remedy(tmp_path, run):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    told = run("--input", tmp_path / "a.jsonl", "--validation_fraction", 0.01, "--output", tmp_path / "out")
    assert "warning: none of the 2 documents are in the validation split, which should have 1.00% of them" in told
    assert "and a new --output" in told
    told = run("--input", tmp_path / "a.jsonl", "--validation_fraction", 0, "--output", tmp_path / "none")
    assert "warning" not in told
