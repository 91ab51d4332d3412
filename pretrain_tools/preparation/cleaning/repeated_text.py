"""Lines or paragraphs that many documents have, such as menus and notices: counted over all, then removed from each.

All of their occurrences go, as in CCNet: what many pages share is seldom their content. Counting writes runs of sorted
hashes, each complete or absent, with the position in the input where the next one begins. So it continues after a
kill, and the table of repeated hashes is the same however the work was divided. With 64 bits, the chance that one line
of a billion is taken for a repeated one, out of a million of those, is 5 in 100,000.
"""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pretrain.files import as_json, write_durably
from pretrain_tools.preparation.cleaning.stages import Judge, TextBatch, Verdicts

DIVIDERS = {"lines": b"\n", "paragraphs": b"\n\n"}
HASH_COUNT = np.dtype([("hash", "<u8"), ("documents", "<u4")])
HASHES_PER_RUN = 1 << 23
HASHES_AT_ONCE = 1 << 24
LETTER_OR_DIGIT = re.compile(rb"[0-9A-Za-z\x80-\xff]")


@dataclass(frozen=True)
class RepeatedText:
    """The stage that removes pieces that occur in more than `documents` documents.

    Pieces are compared without the spaces around them; those without a letter or digit stay. unit: a key of DIVIDERS.
    table: the file of the hashes to remove, once all documents have been counted.
    """

    is_compiled: ClassVar[bool] = False
    unit: str
    documents: int
    table: Path | None = field(default=None, compare=False)

    @property
    def label(self) -> str:
        return f"repeated_{self.unit}"

    def as_plan(self) -> dict[str, Any]:
        return {"name": self.label, "in_more_documents_than": self.documents}

    def distinct_hashes(self, texts: Sequence[bytes]) -> np.ndarray:
        """Hashes the pieces of documents, uint64, each once per document that has it."""
        return np.array([h for text in texts for h in set(self._hashes(self._pieces(text))) - {0}], np.uint64)

    def _pieces(self, text: bytes) -> list[bytes]:
        return text.split(DIVIDERS[self.unit])

    def _hashes(self, pieces: Sequence[bytes]) -> list[int]:
        """Hashes pieces; 0 stands for a piece that always stays."""
        from xxhash import xxh3_64_intdigest

        return [xxh3_64_intdigest(piece.strip()) if LETTER_OR_DIGIT.search(piece) else 0 for piece in pieces]

    def open(self) -> Judge:
        # An array rather than a set: 8 bytes of memory per hash.
        repeated = np.fromfile(self.table, "<u8")

        def judge(batch: TextBatch) -> Verdicts:
            verdicts = Verdicts()
            for number, text in enumerate(batch.texts if len(repeated) else ()):
                pieces = self._pieces(text)
                hashes = np.array(self._hashes(pieces), np.uint64)
                places = np.minimum(np.searchsorted(repeated, hashes), len(repeated) - 1)
                goes = repeated[places] == hashes
                if goes.any():
                    left = DIVIDERS[self.unit].join(itertools.compress(pieces, (~goes).tolist()))
                    verdicts.changed[number] = left if left.strip() else b""
                    verdicts.counts["removed"] += int(goes.sum())
            return verdicts

        return judge


class RepetitionCount:
    """The count in a folder.

    Args:
        identity: of what is counted; a count of something else starts over.

    Attributes:
        position: where it continues, as it was given to `add`; None at the beginning.
    """

    def __init__(self, folder: Path, identity: str):
        self._folder = folder
        self._identity = identity
        folder.mkdir(parents=True, exist_ok=True)
        state = {"runs": 0, "position": None, "is_complete": False}
        if (folder / "state.json").is_file():
            earlier = json.loads((folder / "state.json").read_bytes())
            state = earlier if earlier["identity"] == identity else state
        self._number = state["runs"]
        self.position = state["position"]
        self.is_complete = state["is_complete"]
        self._waiting: list[np.ndarray] = []

    @property
    def runs(self) -> list[Path]:
        """The files for `write_table`."""
        return [self._folder / f"{number:05d}" for number in range(self._number)]

    def add(self, hashes: np.ndarray, position: Sequence[int]) -> None:
        """Counts the distinct hashes of the documents before `position`."""
        self._waiting.append(hashes)
        self.position = list(position)
        if sum(map(len, self._waiting)) >= HASHES_PER_RUN:
            self.commit()

    def commit(self, is_complete: bool = False) -> None:
        """Makes everything so far durable."""
        hashes, documents = np.unique(np.concatenate([np.empty(0, np.uint64), *self._waiting]), return_counts=True)
        counted = np.empty(len(hashes), HASH_COUNT)
        counted["hash"] = hashes
        counted["documents"] = documents
        write_durably(self._folder / f"{self._number:05d}", counted.tobytes())
        self._number += 1
        self._waiting = []
        self.is_complete = is_complete
        state = {
            "identity": self._identity,
            "runs": self._number,
            "position": self.position,
            "is_complete": is_complete,
        }
        write_durably(self._folder / "state.json", as_json(state))


def write_table(path: Path, runs: Sequence[Path], documents: int) -> None:
    """Writes the sorted hashes that occur in more than `documents` documents by all runs, HASHES_AT_ONCE in memory."""
    opened = [np.memmap(run, HASH_COUNT, mode="r") for run in runs if run.stat().st_size]
    parts = max(1, -(-sum(map(len, opened)) // HASHES_AT_ONCE))
    cuts = [np.uint64((part << 64) // parts) for part in range(1, parts)]
    places = [[0, *np.searchsorted(run["hash"], cuts), len(run)] for run in opened]
    tables = [np.empty(0, np.uint64)]
    for part in range(parts if opened else 0):
        pieces = (run[at[part] : at[part + 1]] for run, at in zip(opened, places, strict=True))
        counted = np.concatenate(list(pieces))
        hashes, inverse = np.unique(counted["hash"], return_inverse=True)
        tables.append(hashes[np.bincount(inverse, counted["documents"], len(hashes)) > documents])
    write_durably(path, np.concatenate(tables).astype("<u8").tobytes())
