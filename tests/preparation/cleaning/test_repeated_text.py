"""Lines and paragraphs that many documents have are removed from all of them, the same whatever happens."""

import json
import random

import numpy as np
import pytest
from tokenizers import Tokenizer
from xxhash import xxh3_64_intdigest

from pretrain.errors import InputError
from pretrain_tools.preparation.cleaning import repeated_text
from support.prepared import content_of, run_killed, stream_of, write_jsonl

NOTICES = ("Accept all cookies", "  Read more ", "Home | About | Contact", "Only in two of them")


def documents(count=60):
    """Each with text of its own, notices, a line that it has three times, and rules without letters."""
    rng, made = random.Random(0), []
    for number in range(count):
        own = [f"Sentence {line} of document {number}." for line in range(rng.randint(1, 12))]
        lines = [*own, *rng.sample(NOTICES[:3], 2), "***", "", "***", *[f"Chorus {number}"] * 3]
        lines += [NOTICES[3]] if number in (3, 40) else []
        rng.shuffle(lines)
        made.append("\n".join(lines))
    return [*made, "\n".join(NOTICES[:3])]


def expected(texts, most, divider="\n"):
    """By the definition."""
    of_each = [{piece.strip() for piece in text.split(divider)} for text in texts]
    counts = {piece: sum(piece in pieces for pieces in of_each) for pieces in of_each for piece in pieces}
    goes = {piece for piece, count in counts.items() if count > most and any(map(str.isalnum, piece))}
    left = [divider.join(piece for piece in text.split(divider) if piece.strip() not in goes) for text in texts]
    return [text for text in left if text.strip()]


def texts_of(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer/tokenizer.json"))
    decoded = tokenizer.decode(stream_of(folder, "train").tolist(), skip_special_tokens=False)
    return decoded.split("<|endoftext|>")[:-1]


@pytest.fixture
def small_parts(monkeypatch):
    for name in ("formats.PART_BYTES", "sources.PART_BYTES", "byte_stream.READ_BYTES"):
        monkeypatch.setattr(f"pretrain_tools.preparation.documents.{name}", 1000)
    monkeypatch.setattr(repeated_text, "HASHES_PER_RUN", 50)
    monkeypatch.setattr(repeated_text, "HASHES_AT_ONCE", 64)


def test_lines_of_many_documents_go_the_same_on_workers_slices_and_with_small_memory(
    tmp_path, run, small_parts, monkeypatch
):
    texts = documents()
    write_jsonl(tmp_path / "a.jsonl", texts)
    arguments = ("--input", tmp_path / "a.jsonl", "--validation_fraction", 0, "--repeated_lines", 2)
    run(*arguments, "--output", tmp_path / "one", "--workers", 1)
    assert texts_of(tmp_path / "one") == expected(texts, 2)
    run(*arguments, "--output", tmp_path / "two", "--workers", 2)
    for again in (True, False):
        for number in range(3):
            printed = run(*arguments, "--output", tmp_path / "merged", "--slice", f"{number}/3")
            assert ("run each slice's command again" in printed) == (again and number < 2)
    run(*arguments, "--output", tmp_path / "merged", "--merge_slices", 3)
    whole = content_of(tmp_path / "one")
    assert content_of(tmp_path / "two") == whole and content_of(tmp_path / "merged") == whole
    manifest = json.loads(whole["manifest.json"])
    assert manifest["options"]["cleaning"] == [{"name": "repeated_lines", "in_more_documents_than": 2}]
    assert manifest["cleaning"]["removed"]["repeated_lines.nothing_left"]["documents"] == 1
    assert manifest["cleaning"]["counts"]["repeated_lines.removed"] == 2 * 60 + 3


def test_each_piece_counts_once_in_a_document_and_those_without_letters_never():
    texts = [b"a b\n a b \n***\n\nc", b"", b"a b\n\nc\n", "é\n".encode()]
    expected = {
        "lines": [b"a b", b"c", b"a b", b"c", "é".encode()],
        "paragraphs": [b"a b\n a b \n***", b"c", b"a b", b"c", "é".encode()],
    }
    for unit, pieces in expected.items():
        hashes = repeated_text.RepeatedText(unit, 1).distinct_hashes(texts)
        assert sorted(hashes.tolist()) == sorted(map(xxh3_64_intdigest, pieces))


def test_paragraphs_go_too_and_what_cannot_be_is_refused(tmp_path, run):
    texts = [f"Own {n}\nRead more\n\nA notice\nin two lines\n\n***\n\nRead more" for n in range(5)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    arguments = ("--input", tmp_path / "a.jsonl", "--validation_fraction", 0, "--output", tmp_path / "out")
    run(*arguments, "--repeated_paragraphs", 4)
    assert texts_of(tmp_path / "out") == expected(texts, 4, "\n\n") == [f"Own {n}\nRead more\n\n***" for n in range(5)]
    with pytest.raises(InputError, match=r"give either --repeated_lines or --repeated_paragraphs"):
        run(*arguments, "--repeated_paragraphs", 4, "--repeated_lines", 3)
    with pytest.raises(InputError, match=r"count over all documents: leave out the limits"):
        run(*arguments, "--repeated_lines", 3, "--max_documents", 9)


def test_kills_change_nothing(tmp_path, tokenizer):
    """In the count, before the table, and after it; near duplicates are searched in what is left."""
    write_jsonl(tmp_path / "a.jsonl", documents(30))
    arguments = ("--input", tmp_path / "a.jsonl", "--tokenizer", tokenizer, "--repeated_lines", 2)
    arguments = (*arguments, "--near_duplicates", "0.8", "--workers", 2)
    assert run_killed(0, *arguments, "--output", tmp_path / "whole").returncode == 0
    for at in ("counts/.00000", "counts/.state.json", ".repeated.new", "documents/train-00000.bin"):
        assert run_killed(at, *arguments, "--output", tmp_path / "broken").returncode < 0, at
    assert run_killed(0, *arguments, "--output", tmp_path / "broken").returncode == 0
    assert content_of(tmp_path / "broken") == content_of(tmp_path / "whole")


def test_a_count_goes_on_and_of_something_else_begins_anew(tmp_path):
    rng = np.random.default_rng(0)
    parts = [np.unique(rng.integers(1, 60, 40)).astype(np.uint64) << np.uint64(57) for _ in range(20)]
    count = repeated_text.RepetitionCount(tmp_path / "counts", "this")
    for number, part in enumerate(parts[:9]):
        count.add(part, (0, number + 1))
    count.commit()
    count = repeated_text.RepetitionCount(tmp_path / "counts", "this")
    assert count.position == [0, 9] and not count.is_complete
    for number, part in enumerate(parts[9:]):
        count.add(part, (0, number + 10))
    count.commit(is_complete=True)
    repeated_text.write_table(tmp_path / "table", count.runs, 10)
    hashes, documents = np.unique(np.concatenate(parts), return_counts=True)
    assert np.array_equal(np.fromfile(tmp_path / "table", "<u8"), hashes[documents > 10])
    assert 0 < np.count_nonzero(documents > 10) < len(hashes)
    assert repeated_text.RepetitionCount(tmp_path / "counts", "other").position is None
