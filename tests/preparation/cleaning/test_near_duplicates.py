"""Tests for near-duplicate removal: exact similarities, recall, and the same result after interruptions."""

import collections
import json
import random
import re
import signal
import textwrap
from pydoc_data.topics import topics

import numpy as np
import pytest

from pretrain.data.manifest import SPLITS
from pretrain.data.shards import read_manifest
from pretrain.errors import InputError
from pretrain_tools.preparation import near_duplicate_search
from pretrain_tools.preparation.cleaning.near_duplicates import EMPTY, NearDuplicates, shingle_hashes
from pretrain_tools.preparation.documents.document_index import read_index
from support.faults import EVERYTHING
from support.prepared import content_of, write_jsonl


def words(rng, count):
    return ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 7))) for _ in range(count)]


def edited(rng, document, share):
    """Returns a copy with this fraction of its words replaced. Some copies are also rotated."""
    changed = [words(rng, 1)[0] if rng.random() < share else word for word in document]
    if rng.random() < 0.2:
        cut = rng.randrange(len(changed))
        changed = changed[cut:] + changed[:cut]
    return changed


def documents_with_copies(count, seed=0):
    """Returns (texts, pairs): `count` documents plus edited copies of half of them, with their index pairs."""
    rng = random.Random(seed)
    documents = [words(rng, rng.choice([2, 12, 40, 150, 400])) for _ in range(count)]
    pairs = []
    for one in rng.sample(range(count), count // 2):
        pairs.append((one, len(documents)))
        documents.append(edited(rng, documents[one], rng.choice([0, 0.01, 0.02, 0.05, 0.2, 0.4])))
    return [" ".join(document) for document in documents], pairs


def documents_in(folder):
    """Returns {line number: (split, IDs)} for a folder prepared from one file."""
    found = {}
    for shard in read_manifest(folder).shards:
        index = read_index(folder / shard.file, shard.documents)
        pieces = np.split(np.fromfile(folder / shard.file, np.uint16), index["end"][:-1].astype(int))
        for record, ids in zip(index, pieces, strict=True):
            found[int(record["place"])] = (shard.split, ids[:-1].tolist())
    return found


def exact(one, other, shingle=5):
    """Returns the Jaccard similarity of two lists of words, computed from its definition."""
    sets = [{tuple(words[n : n + shingle]) for n in range(max(1, len(words) - shingle + 1))} for words in (one, other)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def test_near_copies_are_removed_and_others_kept(tmp_path, run):
    """At least 95% of copies with a similarity of 0.8 or more are removed, including across splits, and at most 2% of
    those below 0.5."""
    documents, pairs = documents_with_copies(900)
    write_jsonl(tmp_path / "a.jsonl", documents)
    arguments = ("--input", tmp_path / "a.jsonl", "--validation_fraction", 0.3)
    run(*arguments, "--output", tmp_path / "all")
    printed = run(*arguments, "--output", tmp_path / "out", "--near_duplicates", "0.8")
    everything = documents_in(tmp_path / "all")
    left = documents_in(tmp_path / "out")
    gone = everything.keys() - left.keys()
    assert all(everything[place] == left[place] for place in left)
    similar = {pair: exact(*(documents[number].split() for number in pair)) for pair in pairs}
    near = [pair[1] + 1 in gone for pair, similarity in similar.items() if similarity >= 0.8]
    far = [pair[1] + 1 in gone for pair, similarity in similar.items() if similarity < 0.5]
    assert len(near) > 150 and np.mean(near) >= 0.95
    assert len(far) > 100 and np.mean(far) <= 0.02
    assert all(similarity >= 0.8 for (_, copy), similarity in similar.items() if copy + 1 in gone)
    splits = [
        {everything[place + 1][0] for place in pair} for pair, similarity in similar.items() if similarity >= 0.8
    ]
    assert splits.count(set(SPLITS)) > 20, "copies across splits must be removed"
    manifest = json.loads((tmp_path / "out/manifest.json").read_bytes())
    sizes = [len(documents[place - 1].encode()) for place in gone]
    assert manifest["skipped"]["near_duplicate_documents"] == len(sizes)
    assert f"{len(sizes)} near copies" in printed
    settings = {"threshold": 0.8, "bands": 25, "rows": 5, "shingle_words": 5, "compared_at_threshold": 0.9999}
    assert manifest["options"]["near_duplicates"] | {"compared_at_threshold": 0.9999} == settings
    report = json.loads((tmp_path / "out/near_duplicates.json").read_bytes())
    assert (report["documents"], report["removed"]) == (len(documents), len(sizes))
    example = report["examples"][len(report["examples"]) // 2]
    assert example["removed"]["place"] in gone and example["kept"]["place"] in left
    assert documents[example["kept"]["place"] - 1].startswith(example["kept"]["text"][:100])
    assert not (tmp_path / "out/.unfinished").exists()


DISGUISES = [
    str.upper,
    lambda text: text.replace(" ", "  "),
    lambda text: text.replace(" ", "\u00a0"),
    lambda text: textwrap.fill(text, 60),
    lambda text: textwrap.fill(text, 72).replace("\n", "\r\n"),
    lambda text: textwrap.indent(textwrap.fill(text, 66), "> "),
    lambda text: re.sub(r"(\w{4})(\w{4})", "\\1\u00ad\\2", text).replace(" ", " \u200b"),
    lambda text: re.sub(r"\b(\w{4})(\w{4})", "\\1-\n\\2", text).replace(" ", ", "),
]
"""Changes to case, spaces, line endings and punctuation that disguise a copy."""


def excerpts():
    """Returns (documents as words, texts of originals and disguised copies) from real prose, with a range of
    similarities."""
    rng = random.Random(3)
    prose = [word for topic in sorted(topics) for word in re.findall("[A-Za-z0-9]+", topics[topic])]
    originals = []
    copies = []
    first = 0
    while len(originals) < 700:
        size = rng.choice([40, 60, 100, 160])
        originals.append(prose[first : first + size])
        first += size
    for number, words_of in enumerate(originals[:600]):
        copy = list(words_of)
        # A changed word affects five shingles, or one at the end.
        spread, at_end = divmod(number, 2)
        changed = len(copy) // ((9 if at_end else 45) if number < 400 else (3 if at_end else 12))
        for place in range(changed):
            copy[-1 - place if at_end else (place * len(copy) + len(copy) // 2) // changed] = f"other{number}n{place}"
        copies.append(DISGUISES[spread % len(DISGUISES)](" ".join(copy)))
        originals.append(copy)
    return originals, [" ".join(document) for document in originals[:700]] + copies


def similar_pairs(documents):
    """Returns {(one, other): Jaccard similarity} for all pairs with a common shingle, computed from its definition."""
    sets = []
    holders = {}
    shared = collections.Counter()
    for number, document in enumerate(documents):
        lowered = [word.lower() for word in document]
        sets.append({tuple(lowered[n : n + 5]) for n in range(len(lowered) - 4)})
        for shingle in sets[-1]:
            shared.update((other, number) for other in holders.setdefault(shingle, []))
            holders[shingle].append(number)
    return {
        (one, other): count / (len(sets[one]) + len(sets[other]) - count) for (one, other), count in shared.items()
    }


def test_disguised_copies_of_real_prose_are_removed_by_similarity(tmp_path, run):
    """Recall is at least 0.95 for similarities from 0.8 to 0.83, and only documents connected at 0.8 are removed."""
    documents, contents = excerpts()
    write_jsonl(tmp_path / "a.jsonl", contents)
    run("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--near_duplicates", "0.8")
    left = documents_in(tmp_path / "out")
    similarity = similar_pairs(documents)
    assert len(documents) == len(contents) == 1300
    at_threshold = [pair for pair, value in similarity.items() if 0.8 <= value < 0.83]
    found = [pair[1] + 1 not in left for pair in at_threshold]
    assert len(found) >= 200 and np.mean(found) >= 0.95
    roots = list(range(len(documents)))
    for one, other in sorted(pair for pair, value in similarity.items() if value >= 0.8):
        roots = [roots[one] if root == roots[other] else root for root in roots]
    wrong = [number for number, root in enumerate(roots) if root == number and number + 1 not in left]
    assert not wrong and sum(0 < value < 0.5 for value in similarity.values()) > 200


def test_a_chain_keeps_its_first_document(tmp_path, run):
    """A chain a ~ b ~ c is one component, even if a and c are less similar. Short and identical documents are also
    removed."""
    rng = random.Random(1)
    chain = [words(rng, 300)]
    for _ in range(6):
        chain.append([*chain[-1][8:], *words(rng, 8)])
    texts = [" ".join(document) for document in chain]
    write_jsonl(tmp_path / "a.jsonl", ["x", *texts[::-1], "y", "x", "an other text", "x"])
    run(
        "--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--near_duplicates", "0.8",
        "--validation_fraction", 0.5,
    )  # fmt: skip
    assert sorted(documents_in(tmp_path / "out")) == [1, 2, 9, 11]
    report = json.loads((tmp_path / "out/near_duplicates.json").read_bytes())
    assert report["clusters"] == 2 and report["removed"] == 2 + 6


@pytest.fixture
def small_parts(monkeypatch):
    for name in (
        "preparation.documents.formats.PART_BYTES",
        "preparation.documents.sources.PART_BYTES",
        "preparation.documents.byte_stream.READ_BYTES",
        "preparation.slices.TOKENS_PER_PART",
    ):
        monkeypatch.setattr(f"pretrain_tools.{name}", 3000)
    monkeypatch.setattr(near_duplicate_search, "RUN_DOCUMENTS", 64)
    monkeypatch.setattr(near_duplicate_search, "KEYS_AT_ONCE", 32)
    monkeypatch.setattr(near_duplicate_search, "PAIRS_AT_ONCE", 8)


def test_workers_slices_and_small_memory_give_the_same_bytes(tmp_path, run, small_parts, monkeypatch):
    documents, _ = documents_with_copies(160)
    write_jsonl(tmp_path / "a.jsonl", documents[:100], [b'{"text": ""}'])
    write_jsonl(tmp_path / "b.jsonl", documents[100:])
    arguments = ("--input", f"{tmp_path}/*.jsonl", "--near_duplicates", "0.7", "--validation_fraction", 0.2)
    arguments = (*arguments, "--shard_tokens", 4000)
    for workers in (1, 3):
        run(*arguments, "--output", tmp_path / f"w{workers}", "--workers", workers)
    for number in range(3):
        run(*arguments, "--output", tmp_path / "merged", "--slice", f"{number}/3")
    run(*arguments, "--output", tmp_path / "merged", "--merge_slices", 3, "--workers", 2)
    whole = content_of(tmp_path / "w1")
    assert content_of(tmp_path / "w3") == whole and content_of(tmp_path / "merged") == whole
    # everything in one sorted run and one partition
    monkeypatch.setattr(near_duplicate_search, "RUN_DOCUMENTS", 1 << 20)
    monkeypatch.setattr(near_duplicate_search, "KEYS_AT_ONCE", 1 << 20)
    run(*arguments, "--output", tmp_path / "large")
    assert content_of(tmp_path / "large") == whole
    assert json.loads(whole["manifest.json"])["skipped"]["near_duplicate_documents"] > 20


MOMENTS = (
    "40",
    "/.unfinished/documents/.manifest.json",
    "/candidates/",
    "/pairs/",
    "broken/.near_duplicates.json",
    "broken/train-00001",
    "broken/.unfinished/.progress.json",
    "broken/.manifest.json",
)
"""Kill points: during and at the end of the first pass, during the search, before and during the second pass,
and before the manifest is written."""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_kill_at_any_moment_changes_nothing(tmp_path, tokenizer, workers, run_killed):
    """FAULTS=all tests 20 random moments."""
    write_jsonl(tmp_path / "a.jsonl", documents_with_copies(40)[0])
    arguments = ("--input", tmp_path / "a.jsonl", "--tokenizer", tokenizer, "--near_duplicates", "0.8")
    arguments = (*arguments, "--validation_fraction", 0.2, "--shard_tokens", 9000)
    assert run_killed(0, *arguments, "--workers", 1, "--output", tmp_path / "whole").returncode == 0
    moments = MOMENTS if workers == 1 else MOMENTS[::5]
    if EVERYTHING:
        moments = random.Random(workers).choices([*MOMENTS, *range(1, 60)], k=20)
    for at in moments:
        killed = run_killed(at, *arguments, "--workers", workers, "--output", tmp_path / "broken")
        assert killed.returncode == -signal.SIGKILL or EVERYTHING, (at, killed.stderr)
    ended = run_killed(0, *arguments, "--workers", workers, "--output", tmp_path / "broken")
    assert ended.returncode == 0, ended.stderr
    assert content_of(tmp_path / "broken") == content_of(tmp_path / "whole")


def test_a_stopped_search_continues(tmp_path, run, small_parts, monkeypatch):
    documents, _ = documents_with_copies(120)
    write_jsonl(tmp_path / "a.jsonl", documents)
    arguments = ("--input", tmp_path / "a.jsonl", "--near_duplicates", "0.8")
    run(*arguments, "--output", tmp_path / "whole")
    perform = near_duplicate_search.DuplicateSearch.perform
    performed = []

    def breaking(self, job):
        performed.append(job)
        if len(performed) in (1, 30, 60, 205):
            raise OSError(28, "No space left on device")
        return perform(self, job)

    monkeypatch.setattr(near_duplicate_search.DuplicateSearch, "perform", breaking)
    for _ in range(4):
        with pytest.raises(InputError, match=r"No space left on device; free up space .* to resume"):
            run(*arguments, "--workers", 1, "--output", tmp_path / "broken")
    run(*arguments, "--workers", 1, "--output", tmp_path / "broken")
    assert len(performed) == len(set(performed)) + 4, "only failed tasks may run twice"
    assert {stage for stage, _ in performed} == {"candidates", "pairs"}
    assert content_of(tmp_path / "broken") == content_of(tmp_path / "whole")


def test_invalid_options_are_rejected(tmp_path, run):
    write_jsonl(tmp_path / "a.jsonl", ["a", "b"])
    arguments = ("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out")
    with pytest.raises(InputError) as caught:
        run(*arguments, "--near_duplicates", "80", "--deduplicate")
    told = "\n".join(caught.value.problems)
    for said in ("from 0.3 to 1, such as 0.8", "also removes exact duplicates"):
        assert said in told


@pytest.mark.parametrize("threshold", ["0.5", "0.8", "0.9", "1"])
def test_bands_are_chosen_for_the_threshold(threshold):
    near = NearDuplicates.parse(threshold)
    assert near.compared(near.threshold) >= 0.999 and near.signature_bytes <= 128
    assert (
        NearDuplicates(near.threshold, 128 // (near.rows + 1), near.rows + 1).compared(near.threshold) < 0.999
        or near.rows == 128
    )


def test_the_agreement_of_signatures_estimates_the_similarity():
    near = NearDuplicates()
    rng = np.random.default_rng(0)
    for length, tolerance in ((30, 0.08), (3000, 0.02)):
        differences = []
        for _ in range(60):
            one = rng.integers(0, 1 << 32, length).astype(np.uint32)
            other = one.copy()
            other[rng.integers(0, length, length // 30)] += 1
            signatures = near.signatures(np.concatenate([one, other]), np.array([length, 2 * length]))
            alone = near.signatures(other, np.array([length]))
            assert np.array_equal(signatures[1], alone[0]), "a signature must not depend on the other documents"
            similarity = near.similarity(one, other)
            assert similarity == pytest.approx(exact(one.tolist(), other.tolist()))
            differences.append((signatures[0] == signatures[1]).mean() - similarity)
        assert abs(np.mean(differences)) < tolerance / 2 and np.std(differences) < tolerance * 2


def test_every_bin_has_the_smallest_hash_of_its_shingles():
    near = NearDuplicates(bands=32, rows=4)
    rng = np.random.default_rng(1)
    sizes = [5, 6, 2053, 7000, 60]
    documents = [rng.integers(0, 1 << 32, size).astype(np.uint32) for size in sizes]
    signatures = near.signatures(np.concatenate(documents), np.cumsum(sizes))
    for row, document in zip(signatures, documents, strict=True):
        expected = np.full(128, EMPTY)
        hashes = shingle_hashes(document, 5)
        np.minimum.at(expected, hashes & np.uint32(127), hashes >> np.uint32(7))
        filled = expected != EMPTY
        assert np.array_equal(row[filled], expected[filled].astype(np.uint8)) and filled.any()


@pytest.mark.parametrize("size", [5, 6, 60, 2052, 5000])
def test_the_similarity_is_exact(size):
    near = NearDuplicates()
    rng = np.random.default_rng(size)
    one = rng.integers(0, 20, size).astype(np.uint32)  # few distinct words, so that shingles repeat within a document
    other = np.concatenate([one[: size // 2], rng.integers(0, 20, 40).astype(np.uint32), one[size // 2 :]])
    found = near.similarity(one, other)
    assert found == near.similarity(other, one) == exact(one.tolist(), other.tolist())
    assert near.similarity(one, one) == 1.0
