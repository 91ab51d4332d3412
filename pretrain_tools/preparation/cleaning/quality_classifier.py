"""A linear model of quality: logistic regression on hashed words and pairs of words, trained on good and other texts.

As the classifiers that chose the data of GPT-3 (Brown et al. 2020, appendix A) and DCLM (Li et al. 2024) are: the mean
of a text's features, no features of order beyond pairs. Training is deterministic.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pretrain.errors import InputError
from pretrain.files import as_json
from pretrain_tools.preparation.cleaning.published import NamedFilter
from pretrain_tools.preparation.cleaning.stages import TextBatch, Verdicts
from pretrain_tools.preparation.documents.records import Reading
from pretrain_tools.preparation.documents.sources import find_sources, records_of

BUCKETS = 1 << 18
MOST_BYTES = 20_000
"""Of a text that are looked at: its beginning."""
HELD_OUT = 0.1
TRAINING_EPOCHS, STEP_SIZE, L2 = 10, 0.5, 1e-6
FEWEST_TEXTS = 50
WEIGHTS_FILE, RECORD_FILE_OF_CLASSIFIER = "weights.npy", "classifier.json"
CLASSIFIER_FORMAT = {"format": "groundwork-classifier", "version": 1}


@dataclass(frozen=True)
class ClassifierFilter(NamedFilter):
    """Keeps documents of which a trained classifier's probability of being good is at least `minimum`."""

    name: ClassVar[str] = "classifier"
    model: str
    minimum: float = 0.5

    def __post_init__(self) -> None:
        read_classifier(self.model)

    def as_plan(self) -> dict[str, Any]:
        sha256 = hashlib.sha256(Path(self.model, WEIGHTS_FILE).read_bytes()).hexdigest()
        return super().as_plan() | {"model": Path(self.model).name, "sha256": sha256}

    def open(self) -> Callable[[TextBatch], Verdicts]:
        weights = read_classifier(self.model)

        def judge(batch: TextBatch) -> Verdicts:
            scores = quality_scores(batch.texts, weights)
            verdicts = Verdicts(values={"classifier": [f"{np.floor(score * 20) / 20:.2f}" for score in scores]})
            verdicts.removed = dict.fromkeys(np.flatnonzero(scores < self.minimum).tolist(), "")
            return verdicts

        judge(TextBatch([b"compiled once, before workers are forked"], [None]))
        return judge


def read_classifier(folder: str) -> np.ndarray:
    """(BUCKETS + 1,) float32 weights of a trained classifier, the last the bias."""
    try:
        record = json.loads(Path(folder, RECORD_FILE_OF_CLASSIFIER).read_bytes())
        weights = np.load(Path(folder, WEIGHTS_FILE), allow_pickle=False)
    except (OSError, ValueError):
        record, weights = {}, np.empty(0)
    if {name: record.get(name) for name in CLASSIFIER_FORMAT} != CLASSIFIER_FORMAT or weights.shape != (BUCKETS + 1,):
        raise InputError(
            f"--filter classifier: model={folder}: is no classifier; train one: "
            "prepare_data.py --train_classifier good.jsonl other.jsonl --output FOLDER"
        )
    return weights.astype(np.float32)


def quality_scores(texts: Sequence[bytes], weights: np.ndarray) -> np.ndarray:
    """(texts,) probabilities of being good."""
    from pretrain_tools.preparation.cleaning.compiled.text_statistics import linear_scores

    features, ends = features_of(texts)
    scores = np.zeros(len(texts), np.float64)
    linear_scores(features, ends, weights, scores)
    return 1.0 / (1.0 + np.exp(-scores))


def features_of(texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """(features, ends): int32 buckets of all texts, one after another, and where each text's end."""
    from pretrain_tools.preparation.cleaning.compiled.text_blocks import joined_texts
    from pretrain_tools.preparation.cleaning.compiled.text_statistics import hashed_features

    text, bounds = joined_texts([text[:MOST_BYTES].decode(errors="ignore").encode() for text in texts])
    features, ends = np.empty(2 * len(text) + 2, np.int32), np.zeros(len(texts), np.int64)
    count = hashed_features(text, bounds, BUCKETS, features, ends)
    return features[:count], ends


def train_classifier(good: str, other: str, reading: Reading, output: Path) -> dict[str, Any]:
    """Trains on two globs of texts and writes the classifier's folder; what it records, with the held-out measures.

    Texts are held out by their hash, so a text that is given twice is never on both sides. Raises InputError.
    """
    if output.exists() and not (output / RECORD_FILE_OF_CLASSIFIER).is_file() and any(output.iterdir()):
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
    # An order that depends on the texts alone.
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
        (temporary / RECORD_FILE_OF_CLASSIFIER).write_bytes(as_json(record))
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
    """Weights by AdaGrad on the balanced logistic loss, in the order given."""
    from pretrain_tools.preparation.cleaning.compiled.text_statistics import fit_logistic

    features, ends = features_of(texts)
    good = labels.sum()
    shares = np.where(labels == 1.0, len(labels) / (2 * max(good, 1)), len(labels) / (2 * max(len(labels) - good, 1)))
    weights = np.zeros(BUCKETS + 1, np.float32)
    squares = np.full(len(weights), 1e-8)
    fit_logistic(features, ends, labels, shares, weights, squares, TRAINING_EPOCHS, STEP_SIZE, L2)
    return weights


def _measures(scores: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Accuracy and area under the curve of held-out texts; None where one kind has none."""
    good, other = scores[labels == 1.0], scores[labels == 0.0]
    if not len(good) or not len(other):
        return {"texts": len(scores), "accuracy": None, "auc": None}
    accuracy = (np.mean(good >= 0.5) + np.mean(other < 0.5)) / 2
    ranks = np.searchsorted(np.sort(other), good, "left") + np.searchsorted(np.sort(other), good, "right")
    auc = ranks.sum() / (2 * len(good) * len(other))
    return {"texts": len(scores), "accuracy": round(float(accuracy), 4), "auc": round(float(auc), 4)}
