"""Compares the output of prepare_data.py --inspect with hand-counted values."""

import json

import numpy as np
import pytest

from pretrain.data.shards import read_manifest
from pretrain_tools.preparation.cleaning.account import DOMAIN_SAMPLE, CleaningAccount
from pretrain_tools.preparation.documents.document_index import read_index
from pretrain_tools.preparation.inspect import lengths_text
from support.prepared import stream_of, write_jsonl
from support.project import run_script

FUNCTION = 'def keep(text):\n    return "<script>" not in text\n'


@pytest.fixture
def documents(tmp_path):
    """40 files with 40 documents each. The filter removes every fourth document, and every eighth is a copy."""
    (tmp_path / "mine.py").write_text(FUNCTION)
    folder = tmp_path / "docs"
    folder.mkdir()
    for number in range(40):
        lines = []
        for line in range(40):
            text = f"file {number} line {line} " + ("<script>alert(1)</script>" if line % 4 == 0 else "is fine")
            text = "the same everywhere" if line % 8 == 1 else text
            lines.append(json.dumps({"text": text, "url": f"https://www.site{number % 3}.org/{line}"}))
        (folder / f"{number:02d}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def arguments(documents, tokenizer, *more):
    given = ["--input", f"{documents}/docs/*.jsonl", "--filter", f"{documents}/mine.py:keep", "--url_field", "url"]
    given += ["--deduplicate", "--tokenizer", tokenizer, "--output", documents / "out", "--workers", 1, *more]
    return [str(word) for word in given]


def test_the_page_shows_counts_tokens_and_text(tmp_path, run):
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
    assert "validation       empty" in page


def test_lengths_of_both_splits_match_the_index(tmp_path, run):
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


def test_lengths_fit_on_one_line():
    text = lengths_text(np.array([1, 2, 3, 4, 4, 100]))
    assert text.startswith("min 1, median 4, p90 52") and "max 100, mean 19.0" in text
    assert lengths_text(np.array([], np.int64)) == "no documents"


def test_removed_documents_add_up_and_are_shown(documents, tokenizer):
    run_script("prepare_data.py", *arguments(documents, tokenizer))
    page = run_script("prepare_data.py", "--inspect", str(documents / "out")).stdout
    copies = 200 - 1
    assert f"documents        {1600 - 400 - copies:,}; skipped 0 empty, 0 bad, {copies} copies" in page
    assert "removed          400 documents, " in page and " bytes: mine.keep\n" in page
    assert page.count("  mine.keep: ") == page.count("  kept: ") == 3 and "<script>alert(1)</script>" in page
    (domains,) = [line for line in page.splitlines() if line.startswith("domain (sampled): ")]
    assert all(f"site{number}.org" in domains for number in range(3))


def test_the_domain_sample_does_not_depend_on_the_division():
    texts = [f"text {n}".encode() for n in range(3 * DOMAIN_SAMPLE)]
    urls = [f"http://{n % 7}.org/x" for n in range(len(texts))]
    whole = CleaningAccount()
    whole.add_domains(texts, urls)
    divided = CleaningAccount()
    for first in range(0, len(texts), 777):
        part = CleaningAccount()
        part.add_domains(texts[first : first + 777], urls[first : first + 777])
        divided.add(part)
    assert divided.domains == whole.domains and len(whole.domains) == DOMAIN_SAMPLE
