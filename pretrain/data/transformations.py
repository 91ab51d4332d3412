"""Transforms training windows with classes from extensions; see docs/own_data.md."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.config import Data
from pretrain.data.manifest import Manifest
from pretrain.data.sampling import key_of
from pretrain.errors import InputError
from pretrain.registry import TRANSFORMATIONS


class Transformation(ABC):
    """Changes the tokens in a training window, but not their number. Validation reads the windows unchanged.

    Register a subclass in `registry.TRANSFORMATIONS`. Its nested class `Options`, a config.Section, declares the
    settings that a recipe may give, or is None if there are none. If `__init__` raises InputError, the run doesn't
    start.
    """

    Options: Any = None

    def __init__(self, options: Any, tokenizer: Path, end_of_document_id: int):
        """tokenizer: folder of the data's tokenizer. end_of_document_id: token after each document."""
        self.options = options
        self.tokenizer = tokenizer
        self.end_of_document_id = end_of_document_id

    @abstractmethod
    def __call__(self, ids_T: np.ndarray, key: int) -> np.ndarray:
        """Returns as many token IDs as it is given: a window's tokens and the target of the last one.

        The result must depend only on the arguments.

        Args:
            key: 128 bits for random numbers, from the run's seed and the window's number in the run. The key doesn't
                depend on the number of ranks or on resuming.
        """


class Transformations:
    """A recipe's transformations, applied in order. Raises the InputErrors of their classes."""

    def __init__(self, data: Data, manifest: Manifest, seed: int):
        self.seed = seed
        self.vocabulary_size = manifest.vocabulary_size
        self.made: dict[str, Transformation] = {}
        for name, given in data.transformations.items():
            kind = TRANSFORMATIONS[name]
            options = None if kind.Options is None else kind.Options.model_validate(given or {})
            self.made[name] = kind(options, manifest.tokenizer_folder, manifest.end_of_document_id)

    def __call__(self, ids_T: np.ndarray, sample: int) -> np.ndarray:
        """Returns the transformed tokens of a sample's window. Raises InputError for unusable tokens."""
        for name, transformation in self.made.items():
            # Never change the parts of the key, because the data of every resumed run depends on them.
            changed = np.asarray(transformation(ids_T.copy(), key_of(self.seed, "transformation", name, sample)))
            if changed.shape != ids_T.shape or changed.dtype.kind not in "iu":
                raise InputError(
                    f"data.transformations: {name} returned {changed.dtype} of shape {changed.shape} for a window of "
                    f"{len(ids_T):,} token IDs; it must return the same number of integers"
                )
            if changed.min() < 0 or changed.max() >= self.vocabulary_size:
                raise InputError(
                    f"data.transformations: {name} returned IDs from {changed.min():,} to {changed.max():,}; the "
                    f"vocabulary has {self.vocabulary_size:,}"
                )
            ids_T = changed
        return ids_T
