"""Lines or paragraphs that many documents have, such as menus and notices: counted over all, then removed from each.

All of their occurrences go, as in CCNet: what many pages share is seldom their content. Counting writes runs of sorted
hashes, each complete or absent, with the position in the input that the next one begins at; so it continues after a
kill, and the table of repeated hashes is the same however the work was divided. With 64 bits, the chance that one line
of a billion is taken for a repeated one, of a million of those, is 5 in 100,000.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.files import as_json, write_durably
from pretrain_tools.preparation.cleaning.stages import TextBatch, Verdicts

BETWEEN = {"lines": b"\n", "paragraphs": b"\n\n"}
HASH_COUNT = np.dtype([("hash", "<u8"), ("documents", "<u4")])
HASHES_PER_RUN = 1 << 23
HASHES_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class RepeatedText:
    """The stage that removes what occurs in more than `documents` documents.

    Compared without the spaces around it; pieces without a letter or digit stay. unit: lines, or paragraphs, which
    blank lines divide. table: of the hashes of what is removed.
    """

    unit: str
    documents: int
    table: Path | None = field(default=None, compare=False)

    @property
    def label(self) -> str:
        return f"repeated_{self.unit}"

    def as_plan(self) -> dict[str, Any]:
        return {"name": self.label, "in_more_documents_than": self.documents}

    def with_table(self, table: Path) -> "RepeatedText":
        """The stage when all has been counted."""
        return replace(self, table=table)

    def distinct_hashes(self, texts: Sequence[bytes]) -> np.ndarray:
        """uint64 hashes of documents' pieces, each once per document that has it."""
        from pretrain_tools.preparation.cleaning.compiled.piece_hashes import distinct_in_documents

        pieces, hashes = self._pieces(TextBatch(list(texts), []))
        return distinct_in_documents(np.ascontiguousarray(pieces[:, 0]), hashes)

    def _pieces(self, batch: TextBatch) -> tuple[np.ndarray, np.ndarray]:
        from pretrain_tools.preparation.cleaning.compiled.piece_hashes import piece_hashes

        return piece_hashes(*batch.joined, len(BETWEEN[self.unit]))

    def open(self) -> Callable[[TextBatch], Verdicts]:
        repeated = np.fromfile(self.table, "<u8") if self.table.stat().st_size else np.empty(0, "<u8")

        def judge(batch: TextBatch) -> Verdicts:
            verdicts = Verdicts()
            if not len(repeated):
                return verdicts
            pieces, hashes = self._pieces(batch)
            places = np.searchsorted(repeated, hashes)
            goes = repeated[np.minimum(places, len(repeated) - 1)] == hashes
            for number in np.unique(pieces[goes, 0]).tolist():
                first, stop = np.searchsorted(pieces[:, 0], (number, number + 1))
                start, text = batch.joined[1][number, 0], batch.texts[number]
                stays = (pieces[first:stop, 1:][~goes[first:stop]] - start).tolist()
                left = BETWEEN[self.unit].join(text[begin:end] for begin, end in stays)
                verdicts.changed[number] = left if left.strip() else b""
            if goes.any():
                verdicts.counts["removed"] += int(np.count_nonzero(goes))
            return verdicts

        return judge


class RepetitionCount:
    """The count in a folder. `position`: where it goes on, as it was given to `add`; None at the beginning.

    identity: of what is counted; a count of something else begins anew.
    """

    def __init__(self, folder: Path, identity: str):
        self._folder, self._identity = folder, identity
        folder.mkdir(parents=True, exist_ok=True)
        state = {"runs": 0, "position": None, "is_complete": False}
        if (folder / "state.json").is_file():
            earlier = json.loads((folder / "state.json").read_bytes())
            state = earlier if earlier["identity"] == identity else state
        self._number, self.position, self.is_complete = state["runs"], state["position"], state["is_complete"]
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
        counted["hash"], counted["documents"] = hashes, documents
        write_durably(self._folder / f"{self._number:05d}", counted.tobytes())
        self._number, self._waiting, self.is_complete = self._number + 1, [], is_complete
        state = {"identity": self._identity, "runs": self._number, "position": self.position}
        state["is_complete"] = is_complete
        write_durably(self._folder / "state.json", as_json(state))


def write_table(path: Path, runs: Sequence[Path], documents: int) -> None:
    """Writes the sorted hashes that occur in more than `documents` documents by all runs, HASHES_AT_ONCE in memory."""
    opened = [np.memmap(run, HASH_COUNT, mode="r") for run in runs if run.stat().st_size]
    total = sum(map(len, opened))
    bits = max(0, (max(1, -(-total // HASHES_AT_ONCE)) - 1).bit_length())
    cuts = [min(part << (64 - bits), (1 << 64) - 1) for part in range((1 << bits) + 1)]
    tables = []
    begins = [0] * len(opened)
    for cut in cuts[1:]:
        is_last = cut == cuts[-1]
        stops = [len(run) if is_last else int(np.searchsorted(run["hash"], np.uint64(cut))) for run in opened]
        counted = np.concatenate(
            [np.empty(0, HASH_COUNT), *(run[a:b] for run, a, b in zip(opened, begins, stops, strict=True))]
        )
        begins = stops
        hashes, inverse = np.unique(counted["hash"], return_inverse=True)
        tables.append(hashes[np.bincount(inverse, counted["documents"], len(hashes)) > documents])
    write_durably(path, np.concatenate([np.empty(0, np.uint64), *tables]).astype("<u8").tobytes())
