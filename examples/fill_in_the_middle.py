"""Fill-in-the-middle: documents whose middle stands at their end, behind what comes before and after it.

    python train.py --config RECIPE --extensions examples/fill_in_the_middle.py \
        --data.transformations '{fill_in_the_middle: {rate: 0.5}}' --output runs/fim

From "Efficient Training of Language Models to Fill in the Middle" (arXiv 2207.14255): a share of the documents is cut
at two random places into prefix, middle and suffix, and reordered

    PSM: PREFIX prefix SUFFIX suffix MIDDLE middle
    SPM: PREFIX SUFFIX suffix MIDDLE prefix middle

where PREFIX, SUFFIX and MIDDLE are special tokens of the data's tokenizer. Documents are changed where they lie in a
packed window, so each stays within its end-of-document IDs; one that a window cuts is changed as far as it is there.
A changed document is three tokens longer, and what then exceeds the window is left out at its end. Cuts are between
tokens; the paper's are between characters.
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
"""The special tokens by the names of Qwen, StarCoder and SantaCoder."""


@TRANSFORMATIONS.register("fill_in_the_middle")
class FillInTheMiddle(Transformation):
    """Reorders a share of the documents."""

    class Options(Section):
        """rate: share of documents that is reordered; spm_rate: of those, in SPM; tokens: the three names."""

        rate: Share = 0.5
        spm_rate: Share = 0.5
        tokens: Annotated[list[str], Field(min_length=3, max_length=3)] | None = None

    def __init__(self, options, tokenizer: Path, end_of_document_id: int):
        super().__init__(options, tokenizer, end_of_document_id)
        id_of = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).token_to_id
        sets = NAMES if options.tokens is None else [options.tokens]
        found = [[id_of(name) for name in names] for names in sets if all(id_of(name) is not None for name in names)]
        if not found:
            raise InputError(
                f"data.transformations.fill_in_the_middle: {tokenizer} has no special tokens "
                f"{' nor '.join(', '.join(names) for names in sets)}; give tokens: [PREFIX, SUFFIX, MIDDLE] by its "
                "own names, or prepare the data with a tokenizer that has them"
            )
        self.prefix, self.suffix, self.middle = found[0]

    def __call__(self, ids_T: np.ndarray, key: int) -> np.ndarray:
        # Python keeps this generator's numbers the same in all its versions, numpy does not.
        numbers = random.Random(key)
        starts = [0, *np.flatnonzero(ids_T == self.end_of_document_id).tolist(), len(ids_T)]
        whole = []
        for start, end in itertools.pairwise(starts):
            # Each document begins with the ID that ended the one before; at the window's start it may be cut off.
            opening = int(start < end and ids_T[start] == self.end_of_document_id)
            whole += [ids_T[start : start + opening], *self.reordered(ids_T[start + opening : end], numbers)]
        return np.concatenate(whole)[: len(ids_T)]

    def reordered(self, text: np.ndarray, numbers: random.Random) -> list[np.ndarray]:
        """Returns the pieces of a document in their new order, or the document."""
        if not len(text) or numbers.random() >= self.options.rate:
            return [text]
        is_spm = numbers.random() < self.options.spm_rate
        first, second = sorted(int(numbers.random() * (len(text) + 1)) for _ in range(2))
        prefix, middle, suffix = np.split(text, [first, second])
        before, after, fill = ([special] for special in (self.prefix, self.suffix, self.middle))
        if is_spm:
            return [before, after, suffix, fill, prefix, middle]
        return [before, prefix, after, suffix, fill, middle]
