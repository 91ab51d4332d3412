"""Tests for the quality classifier: deterministic training on good and ordinary documents, and filtering."""

import json

import numpy as np
import pytest

from pretrain.errors import InputError
from pretrain_tools.preparation.cleaning.filters import parse_filter
from pretrain_tools.preparation.cleaning.quality_classifier import features_of, train_classifier
from pretrain_tools.preparation.cleaning.stages import TextBatch
from pretrain_tools.preparation.documents.records import Reading
from support.prepared import content_of, write_jsonl
from support.project import run_script

GOOD = [
    "theorem",
    "proof",
    "lemma",
    "equation",
    "integral",
    "therefore",
    "energy",
    "model",
    "measured",
    "observed",
    "because",
    "function",
]
OTHER = ["buy", "cheap", "now", "click", "sale", "offer", "free", "shipping", "subscribe", "follow", "best", "price"]
BOTH = ["the", "of", "and", "to", "a", "in", "is", "that", "for", "with", "it", "on", "as", "this"]


def texts_of(words, count, seed):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(BOTH + words[: 2 + n % 10], 60)) for n in range(count)]


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    write_jsonl(folder / "good.jsonl", texts_of(GOOD, 300, 1))
    write_jsonl(folder / "other.jsonl", texts_of(OTHER, 500, 2))
    return folder


def test_a_classifier_separates_good_texts_and_training_is_deterministic(examples, tmp_path):
    command = ["prepare_data.py", "--train_classifier", examples / "good.jsonl", examples / "other.jsonl", "--output"]
    told = run_script(*map(str, [*command, tmp_path / "one"])).stdout
    record = json.loads((tmp_path / "one/classifier.json").read_bytes())
    assert record["held_out"]["auc"] > 0.95 and record["held_out"]["accuracy"] > 0.9
    assert 40 < record["held_out"]["texts"] < 140
    assert f"AUC {record['held_out']['auc']}" in told
    train_classifier(str(examples / "good.jsonl"), str(examples / "other.jsonl"), Reading(), tmp_path / "two")
    assert content_of(tmp_path / "one") == content_of(tmp_path / "two")
    texts = texts_of(GOOD, 20, 3) + texts_of(OTHER, 20, 4)
    judge = parse_filter(f"classifier({tmp_path}/one)").judge
    verdicts = judge(TextBatch([text.encode() for text in texts], [None] * 40))
    assert len(verdicts.values["classifier"]) == 40
    assert sum(number >= 20 for number in verdicts.removed) >= 18
    assert sum(number < 20 for number in verdicts.removed) <= 2


def test_too_few_texts_and_foreign_folders_are_rejected(examples, tmp_path):
    write_jsonl(tmp_path / "few.jsonl", ["text"] * 3)
    with pytest.raises(InputError, match=r"few\.jsonl: contains only 3 documents, but at least 50"):
        train_classifier(str(examples / "good.jsonl"), f"{tmp_path}/few.jsonl", Reading(), tmp_path / "out")
    with pytest.raises(InputError, match=r"--train_classifier .*none\.jsonl: no such file"):
        train_classifier(f"{tmp_path}/none.jsonl", str(examples / "other.jsonl"), Reading(), tmp_path / "out")
    with pytest.raises(InputError, match="already contains other files"):
        train_classifier(str(examples / "good.jsonl"), str(examples / "other.jsonl"), Reading(), tmp_path)


def test_the_options_for_reading_also_select_the_examples(examples, tmp_path):
    patterns = (str(examples / "good.jsonl"), str(examples / "other.jsonl"))
    with pytest.raises(InputError, match="contains only 0 documents"):
        train_classifier(*patterns, Reading(min_characters=10_000), tmp_path / "out")
    with pytest.raises(InputError, match="excludes all 1 input files"):
        train_classifier(*patterns, Reading(), tmp_path / "out", exclude=["*"])


def test_words_count_without_case_and_punctuation():
    one = features_of([b"The model, measured!"])
    two = features_of([b"the MODEL measured", b"measured model"])
    assert (one != two[0]).nnz == 0 and one.nnz == 5
    assert two[1].nnz == 3


def test_a_classifier_of_another_version_is_rejected(examples, tmp_path):
    train_classifier(str(examples / "good.jsonl"), str(examples / "other.jsonl"), Reading(), tmp_path / "old")
    record = json.loads((tmp_path / "old/classifier.json").read_bytes())
    (tmp_path / "old/classifier.json").write_text(json.dumps(record | {"version": 1}))
    with pytest.raises(InputError, match="is not a classifier from this version of Groundwork; train one"):
        parse_filter(f"classifier({tmp_path}/old)")
