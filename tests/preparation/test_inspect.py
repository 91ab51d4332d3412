"""prepare_data.py --inspect, against counts made by hand."""

import numpy as np

from pretrain.data.shards import read_manifest
from pretrain_tools.preparation.documents.document_index import read_index
from pretrain_tools.preparation.inspect import lengths_text
from support.prepared import stream_of, write_jsonl


def test_the_page_tells_counts_tokens_and_text(tmp_path, run):
    write_jsonl(tmp_path / "a.jsonl", ["def f(x): return x"] * 30 + ["zebra"])
    run("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--validation_fraction", 0)
    page = run("--inspect", tmp_path / "out", with_tokenizer=False)
    ids = stream_of(tmp_path / "out", "train")
    manifest = read_manifest(tmp_path / "out")
    assert f"train            {len(ids):,} tokens, 31 documents, 545 bytes of text in 1 shard" in page
    assert f"{(len(ids) - 31) / 545:.4f} tokens per byte" in page
    unused = manifest.vocabulary_size - len(np.unique(ids))
    assert f"unused vocabulary: {unused} of {manifest.vocabulary_size}" in page
    assert f"{manifest.end_of_document_id:>10}             31  {31 / len(ids):.2%}".strip() in page
    assert "end of document" in page and "    | def f(x): return x" in page
    assert "validation       nothing" in page


def test_lengths_of_both_splits_are_those_of_the_index(tmp_path, run):
    write_jsonl(tmp_path / "a.jsonl", ["a b c" * n for n in range(1, 20)])
    run("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--validation_fraction", 0.3)
    indices = [read_index(tmp_path / f"out/{split}-00000.bin", n) for split, n in documents_in(tmp_path / "out")]
    lengths = np.concatenate([np.diff(index["end"].astype(int), prepend=0) - 1 for index in indices])
    assert len(indices) == 2 and len(lengths) == 19
    assert f"tokens per document: {lengths_text(lengths)}\n" in run(
        "--inspect", tmp_path / "out", with_tokenizer=False
    )


def documents_in(folder):
    return [(shard.split, shard.documents) for shard in read_manifest(folder).shards]


def test_lengths_are_told_in_one_line():
    text = lengths_text(np.array([1, 2, 3, 4, 4, 100]))
    assert text.startswith("shortest 1, median 4, 90 % up to 52") and "longest 100, mean 19.0" in text
    assert lengths_text(np.array([], np.int64)) == "no documents"
