"""Fill-in-the-middle: moves the middle of a document to its end, so that the model learns to fill gaps.

    python train.py --config RECIPE --extensions examples/fill_in_the_middle.py \
        --data.transformations '{fill_in_the_middle: {rate: 0.5}}' --output runs/fim

"Efficient Training of Language Models to Fill in the Middle" (arXiv 2207.14255) splits a fraction of the documents at
two random positions into prefix, middle and suffix, and reorders them:

    PSM: PREFIX prefix SUFFIX suffix MIDDLE middle
    SPM: PREFIX SUFFIX suffix MIDDLE prefix middle

PREFIX, SUFFIX and MIDDLE are special tokens, which the tokenizer must contain. Each reordered document is three tokens
longer, so the packed window is truncated to its original length. Unlike in the paper, documents are split between
tokens, not characters.
"""

import itertools
import random
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field
from tokenizers import Tokenizer

from pretrain.config import Section
from pretrain.data.transformations import Transformation
from pretrain.errors import InputError
from pretrain.registry import TRANSFORMATIONS

Share = Annotated[float, Field(ge=0, le=1)]
NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
)
"""Special tokens of Qwen, StarCoder and SantaCoder."""


@TRANSFORMATIONS.register("fill_in_the_middle")
class FillInTheMiddle(Transformation):
    """Reorders a fraction of the documents in a window."""

    class Options(Section):
        """Options for `fill_in_the_middle`."""

        rate: Share = 0.5
        """Fraction of documents to reorder."""
        spm_rate: Share = 0.5
        """Fraction of reordered documents that use SPM instead of PSM."""
        tokens: Annotated[list[str], Field(min_length=3, max_length=3)] | None = None
        """The PREFIX, SUFFIX and MIDDLE tokens. By default, tries NAMES."""

    def __init__(self, options, tokenizer: Path, end_of_document_id: int):
        super().__init__(options, tokenizer, end_of_document_id)
        id_of = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).token_to_id
        sets = NAMES if options.tokens is None else [options.tokens]
        found = [[id_of(name) for name in names] for names in sets if all(id_of(name) is not None for name in names)]
        if not found:
            raise InputError(
                f"data.transformations.fill_in_the_middle: {tokenizer} doesn't have the special tokens "
                f"{' nor '.join(', '.join(names) for names in sets)}; set tokens: [PREFIX, SUFFIX, MIDDLE] to the "
                "tokenizer's own names, or prepare the data with a tokenizer that has such tokens"
            )
        self.prefix, self.suffix, self.middle = found[0]

    def __call__(self, ids_T: np.ndarray, key: int) -> np.ndarray:
        # random.Random.random() generates the same numbers in all versions, unlike numpy's generators.
        numbers = random.Random(key)
        starts = [0, *np.flatnonzero(ids_T == self.end_of_document_id).tolist(), len(ids_T)]
        whole = []
        for start, end in itertools.pairwise(starts):
            # `starts` are positions of end-of-document IDs, which aren't part of the next document.
            opening = int(start < end and ids_T[start] == self.end_of_document_id)
            whole += [ids_T[start : start + opening], *self.reordered(ids_T[start + opening : end], numbers)]
        return np.concatenate(whole)[: len(ids_T)]

    def reordered(self, text: np.ndarray, numbers: random.Random) -> list[np.ndarray]:
        """Returns the parts of a reordered document, or the unchanged document."""
        if not len(text) or numbers.random() >= self.options.rate:
            return [text]
        is_spm = numbers.random() < self.options.spm_rate
        first, second = sorted(int(numbers.random() * (len(text) + 1)) for _ in range(2))
        prefix, middle, suffix = np.split(text, [first, second])
        before, after, fill = ([special] for special in (self.prefix, self.suffix, self.middle))
        if is_spm:
            return [before, after, suffix, fill, prefix, middle]
        return [before, prefix, after, suffix, fill, middle]
