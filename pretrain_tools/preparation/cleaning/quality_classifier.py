"""A linear model of quality: logistic regression on hashed words and pairs of words, trained on good and other texts.

The kind of classifier that chose the data of GPT-3 (Brown et al. 2020, appendix A) and DCLM (Li et al. 2024): the mean
of a text's features, without the order of words beyond pairs. Training is deterministic.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pretrain.errors import InputError
from pretrain.files import as_json, sha256_of
from pretrain_tools.preparation.cleaning.published import NamedFilter
from pretrain_tools.preparation.cleaning.stages import Judge, TextBatch, Verdicts
from pretrain_tools.preparation.documents.records import Reading
from pretrain_tools.preparation.documents.sources import find_sources, records_of

BUCKETS = 1 << 18
MOST_BYTES = 20_000
"""Bytes at the beginning of a text that count."""
HELD_OUT = 0.1
TRAINING_EPOCHS = 10
STEP_SIZE = 0.5
L2 = 1e-6
FEWEST_TEXTS = 50
WEIGHTS_FILE = "weights.npy"
CLASSIFIER_FILE = "classifier.json"
CLASSIFIER_FORMAT = {"format": "groundwork-classifier", "version": 1}


@dataclass(frozen=True)
class ClassifierFilter(NamedFilter):
    """Keeps documents that a trained classifier calls good with a probability of at least `minimum`."""

    name: ClassVar[str] = "classifier"
    model: str
    minimum: float = 0.5

    def __post_init__(self) -> None:
        read_classifier(self.model)

    def as_plan(self) -> dict[str, Any]:
        sha256 = sha256_of(Path(self.model, WEIGHTS_FILE))
        return super().as_plan() | {"model": Path(self.model).name, "sha256": sha256}

    def open(self) -> Judge:
        weights = read_classifier(self.model)

        def judge(batch: TextBatch) -> Verdicts:
            scores = quality_scores(batch.texts, weights)
            verdicts = Verdicts(values={"classifier": [f"{np.floor(score * 20) / 20:.2f}" for score in scores]})
            verdicts.removed = dict.fromkeys(np.flatnonzero(scores < self.minimum).tolist(), "")
            return verdicts

        return judge


def read_classifier(folder: str) -> np.ndarray:
    """Reads the (BUCKETS + 1,) float32 weights of a trained classifier, the last the bias."""
    try:
        record = json.loads(Path(folder, CLASSIFIER_FILE).read_bytes())
        weights = np.load(Path(folder, WEIGHTS_FILE), allow_pickle=False)
    except (OSError, ValueError):
        record = {}
        weights = np.empty(0)
    if {name: record.get(name) for name in CLASSIFIER_FORMAT} != CLASSIFIER_FORMAT or weights.shape != (BUCKETS + 1,):
        raise InputError(
            f"--filter classifier: model={folder}: is no classifier; train one: "
            "prepare_data.py --train_classifier good.jsonl other.jsonl --output FOLDER"
        )
    return weights.astype(np.float32)


def quality_scores(texts: Sequence[bytes], weights: np.ndarray) -> np.ndarray:
    """Computes the (texts,) probabilities of being good."""
    features, ends = features_of(texts)
    sums = np.append(0.0, np.cumsum(weights[features], dtype=np.float64))
    starts = np.append(0, ends[:-1])[: len(ends)]
    means = (sums[ends] - sums[starts]) / np.maximum(1, ends - starts)
    return 1.0 / (1.0 + np.exp(-means - weights[-1]))


def features_of(texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Returns (features, ends): int32 buckets of all texts, one after another, and where each text's end."""
    from pretrain_tools.preparation.cleaning.compiled import hashed_features, joined_texts

    text, bounds = joined_texts([text[:MOST_BYTES].decode(errors="ignore").encode() for text in texts])
    features = np.empty(2 * len(text) + 2, np.int32)
    ends = np.zeros(len(texts), np.int64)
    count = hashed_features(text, bounds, BUCKETS, features, ends)
    return features[:count], ends


def train_classifier(good: str, other: str, reading: Reading, output: Path) -> dict[str, Any]:
    """Trains on two globs of texts and writes the classifier's folder; returns its record with the held-out measures.

    Texts are held out by their hash, so a text that is given twice is never on both sides. Raises InputError.
    """
    if output.exists() and not (output / CLASSIFIER_FILE).is_file() and any(output.iterdir()):
        raise InputError(f"--output {output}: already contains other files; give a new or empty folder")
    texts = [list(_texts_of(pattern, reading)) for pattern in (good, other)]
    for pattern, found in zip((good, other), texts, strict=True):
        if len(found) < FEWEST_TEXTS:
            raise InputError(
                f"--train_classifier {pattern}: has {len(found)} texts; give at least {FEWEST_TEXTS} of each kind"
            )
    together = texts[0] + texts[1]
    labels = np.repeat([1.0, 0.0], [len(found) for found in texts])
    drawn = [hashlib.sha256(text).digest() for text in together]
    held_out = np.array([int.from_bytes(digest[:8], "big") < HELD_OUT * 2.0**64 for digest in drawn])
    order = np.array(sorted(np.flatnonzero(~held_out).tolist(), key=drawn.__getitem__))
    weights = _fitted([together[n] for n in order], labels[order])
    scores = quality_scores([together[n] for n in np.flatnonzero(held_out)], weights)
    measured = _measures(scores, labels[held_out])
    record = {
        **CLASSIFIER_FORMAT,
        "good": {"texts": len(texts[0]), "bytes": sum(map(len, texts[0]))},
        "other": {"texts": len(texts[1]), "bytes": sum(map(len, texts[1]))},
        "held_out": measured,
    }
    temporary = output.with_name(output.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        np.save(temporary / WEIGHTS_FILE, weights)
        (temporary / CLASSIFIER_FILE).write_bytes(as_json(record))
        shutil.rmtree(output, ignore_errors=True)
        os.replace(temporary, output)
    except OSError as error:
        raise InputError(f"--output {output}: {error.strerror}; give a writable folder with room") from None
    return record


def _texts_of(pattern: str, reading: Reading) -> Iterator[bytes]:
    for source in find_sources([pattern], option="--train_classifier"):
        for record in records_of(source, reading):
            if record.problem is not None:
                raise InputError(f"{source.place(record.place)}: {record.problem}; fix the input")
            if record.text:
                yield record.text


def _fitted(texts: list[bytes], labels: np.ndarray) -> np.ndarray:
    """Fits weights by AdaGrad on the balanced logistic loss, in the order given."""
    from pretrain_tools.preparation.cleaning.compiled import fit_logistic

    features, ends = features_of(texts)
    good = labels.sum()
    shares = np.where(labels == 1.0, len(labels) / (2 * max(good, 1)), len(labels) / (2 * max(len(labels) - good, 1)))
    weights = np.zeros(BUCKETS + 1, np.float32)
    squares = np.full(len(weights), 1e-8)
    fit_logistic(features, ends, labels, shares, weights, squares, TRAINING_EPOCHS, STEP_SIZE, L2)
    return weights


def _measures(scores: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Measures accuracy and area under the curve on held-out texts; None where one kind has none."""
    from sklearn.metrics import balanced_accuracy_score, roc_auc_score

    if len(np.unique(labels)) < 2:
        return {"texts": len(scores), "accuracy": None, "auc": None}
    accuracy = balanced_accuracy_score(labels, scores >= 0.5)
    auc = roc_auc_score(labels, scores)
    return {"texts": len(scores), "accuracy": round(float(accuracy), 4), "auc": round(float(auc), 4)}
