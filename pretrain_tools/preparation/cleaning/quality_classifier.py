"""Linear quality classifier: logistic regression on hashed words and word pairs, trained with scikit-learn.

GPT-3 (Brown et al. 2020, appendix A) and DCLM (Li et al. 2024) used similar classifiers to select their data.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pretrain.errors import InputError
from pretrain.files import as_json, sha256_of, write_durably
from pretrain_tools.preparation.cleaning.stages import CleaningStage, TextBatch, Verdicts
from pretrain_tools.preparation.documents.records import Reading, is_drawn
from pretrain_tools.preparation.documents.sources import InputFile, find_sources, records_of

BUCKETS = 1 << 18
MOST_BYTES = 20_000
"""Maximum number of bytes per document that the classifier reads."""
HELD_OUT = 0.1
INVERSE_REGULARIZATION = 10.0
MOST_STEPS = 1000
FEWEST_TEXTS = 50
WEIGHTS_FILE = "weights.npy"
CLASSIFIER_FILE = "classifier.json"
CLASSIFIER_FORMAT = {"format": "groundwork-classifier", "version": 2}


@dataclass(frozen=True)
class ClassifierFilter(CleaningStage):
    """Keeps documents that a trained classifier scores at `minimum` or higher. `model` is the classifier's folder."""

    label: ClassVar[str] = "classifier"
    model: str
    minimum: float = 0.5

    def __post_init__(self) -> None:
        _ = self._weights

    @cached_property
    def _weights(self) -> np.ndarray:
        return read_classifier(self.model)

    def as_plan(self) -> dict[str, Any]:
        sha256 = sha256_of(Path(self.model, WEIGHTS_FILE))
        return super().as_plan() | {"model": Path(self.model).name, "sha256": sha256}

    def judge(self, batch: TextBatch) -> Verdicts:
        scores = quality_scores(batch.texts, self._weights)
        verdicts = Verdicts(values={"classifier": [f"{np.floor(score * 20) / 20:.2f}" for score in scores]})
        verdicts.removed = dict.fromkeys(np.flatnonzero(scores < self.minimum).tolist(), "")
        return verdicts


def read_classifier(folder: str) -> np.ndarray:
    """Reads a trained classifier's weights: (BUCKETS + 1,) float32, with the bias last. Raises InputError."""
    try:
        record = json.loads(Path(folder, CLASSIFIER_FILE).read_bytes())
        weights = np.load(Path(folder, WEIGHTS_FILE), allow_pickle=False)
        if CLASSIFIER_FORMAT.items() <= record.items() and weights.shape == (BUCKETS + 1,):
            return weights.astype(np.float32)
    except (OSError, ValueError):
        pass
    raise InputError(
        f"--filter classifier: model={folder}: is not a classifier from this version of Groundwork; train one "
        "with prepare_data.py --train_classifier good.jsonl other.jsonl --output FOLDER"
    )


def quality_scores(texts: Sequence[bytes], weights: np.ndarray) -> np.ndarray:
    """Returns (documents,), the probability that each document is good."""
    margins = features_of(texts) @ weights[:-1] + weights[-1]
    return 1.0 / (1.0 + np.exp(-margins.astype(np.float64)))


def features_of(texts: Sequence[bytes]) -> Any:
    """Counts hashed lowercase words and word pairs. Returns sparse (documents, BUCKETS) with rows of unit length."""
    from sklearn.feature_extraction.text import HashingVectorizer

    hashing = HashingVectorizer(n_features=BUCKETS, ngram_range=(1, 2), alternate_sign=False, token_pattern=r"[^\W_]+")
    return hashing.transform(text[:MOST_BYTES].decode(errors="ignore") for text in texts)


def train_classifier(
    good: str, other: str, reading: Reading, output: Path, exclude: Sequence[str] = (), format_name: str | None = None
) -> dict[str, Any]:
    """Trains a classifier, writes it to a folder, and returns its record with held-out metrics. Raises InputError.

    Documents are held out by hash, so that duplicates are never split between training and held-out documents.

    Args:
        good: glob pattern for files with good documents.
        other: glob pattern for files with ordinary documents.
        exclude, format_name: see `find_sources`.
    """
    ours = {CLASSIFIER_FILE, WEIGHTS_FILE, f".{CLASSIFIER_FILE}.new"}
    if output.is_dir() and {path.name for path in output.iterdir()} - ours:
        raise InputError(f"--output {output}: already contains other files; use a new or empty folder")
    texts: list[bytes] = []
    labels: list[float] = []
    for pattern, label in ((good, 1.0), (other, 0.0)):
        sources = find_sources([pattern], exclude, format_name, option="--train_classifier")
        found = list(_texts_of(sources, reading))
        if len(found) < FEWEST_TEXTS:
            raise InputError(
                f"--train_classifier {pattern}: contains only {len(found)} documents, but at least "
                f"{FEWEST_TEXTS} are required"
            )
        texts += found
        labels += [label] * len(found)
    is_good = np.array(labels)
    held_out = np.array([is_drawn(text, HELD_OUT) for text in texts])
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=INVERSE_REGULARIZATION, class_weight="balanced", max_iter=MOST_STEPS)
    model.fit(features_of(list(compress(texts, ~held_out))), is_good[~held_out])
    weights = np.append(model.coef_[0], model.intercept_).astype(np.float32)
    scores = quality_scores(list(compress(texts, held_out)), weights)
    record = {
        **CLASSIFIER_FORMAT,
        "good": {"texts": labels.count(1.0)},
        "other": {"texts": labels.count(0.0)},
        "held_out": _measures(scores, is_good[held_out]),
    }
    try:
        output.mkdir(parents=True, exist_ok=True)
        np.save(output / WEIGHTS_FILE, weights)
        write_durably(output / CLASSIFIER_FILE, as_json(record))
    except OSError as error:
        raise InputError(f"--output {output}: {error.strerror}; use a writable folder with free space") from None
    return record


def _texts_of(sources: Sequence[InputFile], reading: Reading) -> Iterator[bytes]:
    for source in sources:
        for record in records_of(source, reading):
            if record.problem is not None:
                raise InputError(f"{source.place(record.place)}: {record.problem}; fix the input")
            if record.text and not reading.leaves_out(record.text):
                yield record.text


def _measures(scores: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Computes balanced accuracy and ROC AUC; both are None if all labels are equal."""
    from sklearn.metrics import balanced_accuracy_score, roc_auc_score

    measures = {"texts": len(scores), "accuracy": None, "auc": None}
    if len(np.unique(labels)) == 2:
        measures["accuracy"] = round(float(balanced_accuracy_score(labels, scores >= 0.5)), 4)
        measures["auc"] = round(float(roc_auc_score(labels, scores)), 4)
    return measures
