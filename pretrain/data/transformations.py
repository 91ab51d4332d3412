"""Transforms training windows with classes from extensions (docs/own_data.md)."""

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
    """Base class for changes to the tokens of a training window. Validation windows aren't transformed.

    Register subclasses in `registry.TRANSFORMATIONS`. A nested class `Options`, a config.Section, declares the recipe
    settings; set it to None if there are none. Raise InputError in `__init__` to keep the run from starting.
    """

    Options: Any = None

    def __init__(self, options: Any, tokenizer: Path, end_of_document_id: int):
        """tokenizer: folder of the data's tokenizer. end_of_document_id: ID of the token after each document."""
        self.options = options
        self.tokenizer = tokenizer
        self.end_of_document_id = end_of_document_id

    @abstractmethod
    def __call__(self, ids_T: np.ndarray, key: int) -> np.ndarray:
        """Transforms a window's token IDs. Must return the same number of IDs and depend only on the arguments.

        Args:
            ids_T: the window's tokens, and the target of the last one.
            key: 128-bit seed for random numbers, derived from the run's seed and the sample index. It doesn't depend
                on the number of ranks or on resuming.
        """


class Transformations:
    """Applies a recipe's transformations in order. Raises the InputErrors of their classes."""

    def __init__(self, data: Data, manifest: Manifest, seed: int):
        self.seed = seed
        self.vocabulary_size = manifest.vocabulary_size
        self.made: dict[str, Transformation] = {}
        for name, given in data.transformations.items():
            kind = TRANSFORMATIONS[name]
            options = None if kind.Options is None else kind.Options.model_validate(given or {})
            self.made[name] = kind(options, manifest.tokenizer_folder, manifest.end_of_document_id)

    def __call__(self, ids_T: np.ndarray, sample: int) -> np.ndarray:
        """Returns the transformed tokens of a sample's window. Raises InputError if they are invalid."""
        for name, transformation in self.made.items():
            # Never change the parts of the key: they determine the data of every resumed run.
            changed = np.asarray(transformation(ids_T.copy(), key_of(self.seed, "transformation", name, sample)))
            if changed.shape != ids_T.shape or changed.dtype.kind not in "iu":
                raise InputError(
                    f"data.transformations: {name} returned an array of type {changed.dtype} and shape "
                    f"{changed.shape} for a window of {len(ids_T):,} token IDs; it must return the same number "
                    "of integers"
                )
            if changed.min() < 0 or changed.max() >= self.vocabulary_size:
                raise InputError(
                    f"data.transformations: {name} returned IDs from {changed.min():,} to {changed.max():,}, but the "
                    f"vocabulary size is {self.vocabulary_size:,}"
                )
            ids_T = changed
        return ids_T
