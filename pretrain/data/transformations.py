"""Transformations of training windows, each a class of an extension; see docs/own_data.md."""

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
    """Changes the tokens of a training window, and keeps their number. Validation reads the windows unchanged.

    Register a subclass in `registry.TRANSFORMATIONS`. Its nested class `Options`, a config.Section, declares what a
    recipe may set; None: nothing. `__init__` may raise InputError, which ends the start.
    """

    Options: Any = None

    def __init__(self, options: Any, tokenizer: Path, end_of_document_id: int):
        """tokenizer: folder of the data's tokenizer; end_of_document_id: token before each document."""
        self.options = options
        self.tokenizer = tokenizer
        self.end_of_document_id = end_of_document_id

    @abstractmethod
    def __call__(self, ids_T: np.ndarray, key: int) -> np.ndarray:
        """Returns as many token IDs as it gets, which are a window's and the target of its last one.

        The result depends on the arguments alone. key: 128 bits for random numbers, of the run's seed and the number
        of the window in the run, the same on any number of ranks and after a resume.
        """


class Transformations:
    """The transformations of a recipe, one after the other. Raises InputError as their classes do."""

    def __init__(self, data: Data, manifest: Manifest, seed: int):
        self.seed = seed
        self.vocabulary_size = manifest.vocabulary_size
        self.made: dict[str, Transformation] = {}
        for name, given in data.transformations.items():
            kind = TRANSFORMATIONS[name]
            options = None if kind.Options is None else kind.Options.model_validate(given or {})
            self.made[name] = kind(options, manifest.tokenizer_folder, manifest.end_of_document_id)

    def __call__(self, ids_T: np.ndarray, sample: int) -> np.ndarray:
        """Returns the tokens of the window of a sample. Raises InputError for what cannot be trained on."""
        for name, transformation in self.made.items():
            # Never change what is in the key: the data of every run that resumes depends on it.
            changed = np.asarray(transformation(ids_T.copy(), key_of(self.seed, "transformation", name, sample)))
            if changed.shape != ids_T.shape or changed.dtype.kind not in "iu":
                raise InputError(
                    f"data.transformations: {name} returned {changed.dtype} of shape {changed.shape} for a window of "
                    f"{len(ids_T):,} token ids; it must return as many integers"
                )
            if changed.min() < 0 or changed.max() >= self.vocabulary_size:
                raise InputError(
                    f"data.transformations: {name} returned ids from {changed.min():,} to {changed.max():,}; the "
                    f"vocabulary has {self.vocabulary_size:,}"
                )
            ids_T = changed
        return ids_T
