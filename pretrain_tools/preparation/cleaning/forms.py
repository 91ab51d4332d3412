"""Computes line statistics, and detects each document's type, which determines which cleaning rules apply.

The published rules assume that each line is a paragraph, as on web pages. In books, verse and plays, line breaks can
be anywhere in a sentence. Code and tables have no sentences.
"""

from functools import cached_property
from itertools import pairwise

import numpy as np

from pretrain_tools.preparation.cleaning.compiled import LOWER, SENTENCE_END, DividedTexts
from pretrain_tools.preparation.cleaning.document_types import CODE, LINES, PARAGRAPHS, TABLE

LONG_LINE = 120
"""Maximum line length in hard-wrapped text. A longer line is a paragraph."""
CONTINUES = (ord(","), ord(";"), ord("-"), 0x2013, 0x2014)
"""Last characters of lines whose sentence continues on the next line."""
SIGNS = (b"\t", b"|", b",", b";", b"([", b")]", b"{", b"}", b"<>=_")
"""Characters that separate table cells (the first four) or are typical of code."""
SIGN_KINDS = np.zeros(256, np.uint8)
"""(256,): 1 + index in SIGNS for each byte; 0 for other bytes."""
for number, signs in enumerate(SIGNS, start=1):
    SIGN_KINDS[list(signs)] = number
DOTS = (b"...", "…".encode())
FEWEST_LINES = 10
"""Shorter documents are never classified as code or tables."""


class Lines:
    """The nonblank lines in a batch of documents.

    Args:
        text: (bytes,) uint8, the concatenated documents.
        table: (lines,) LINE, sorted by document.
        documents: number of documents.
    """

    def __init__(self, text: np.ndarray, table: np.ndarray, documents: int):
        self.text = text
        self.table = table
        self.bounds = np.searchsorted(table["document"], np.arange(documents + 1))
        """(documents + 1,) index of each document's first line."""
        self.counts = np.diff(self.bounds)
        """(documents,) number of lines per document."""

    def totals(self, values: np.ndarray | str) -> np.ndarray:
        """Sums (lines,) values, or a field of LINE, per document. Returns (documents,)."""
        by_line = self.table[values] if isinstance(values, str) else values
        return np.diff(np.append(0, np.cumsum(by_line, dtype=np.int64))[self.bounds])

    @cached_property
    def characters(self) -> np.ndarray:
        """(documents,) number of characters per document."""
        return self.totals("characters")

    @cached_property
    def ends_sentence(self) -> np.ndarray:
        """(lines,) bool: True if a sentence ends at the end of the line."""
        return self.table["last_kind"] & SENTENCE_END != 0

    @cached_property
    def signs(self) -> np.ndarray:
        """(lines, len(SIGNS)) how often each character in SIGNS occurs in each line."""
        kinds = SIGN_KINDS[self.text]
        places = np.flatnonzero(kinds)
        line = np.searchsorted(self.table["start"], places, "right") - 1
        # Ignore tabs outside the stripped lines.
        places, line = places[line >= 0], line[line >= 0]
        is_within = places < self.table["stop"][line]
        found = line[is_within] * len(SIGNS) + kinds[places[is_within]] - 1
        return np.bincount(found, minlength=len(self.table) * len(SIGNS)).reshape(-1, len(SIGNS))

    @property
    def last_bytes(self) -> np.ndarray:
        """(lines,) uint8"""
        return self.text[self.table["stop"] - 1]

    @cached_property
    def ends_in_dots(self) -> np.ndarray:
        """(lines,) bool: True if the line ends with three periods or the ellipsis character."""
        ends = np.stack([self.text[self.table["stop"] - place] for place in (3, 2, 1)])
        found = np.any([(ends == np.frombuffer(dots, np.uint8)[:, None]).all(axis=0) for dots in DOTS], axis=0)
        # The bytes before a document's first line belong to another document.
        return found & (self.table["stop"] - self.table["start"] >= 3)

    @cached_property
    def repeated(self) -> tuple[np.ndarray, np.ndarray]:
        """(documents,) number of repeated lines, and (documents,) number of characters in them."""
        digest = self.table["digest"]
        document = self.table["document"]
        # The sort is stable, so the first of several identical lines stays first and isn't counted.
        order = np.lexsort((digest, document))
        repeated = np.zeros(len(order), bool)
        is_same = (np.diff(digest[order]) == 0) & (np.diff(document[order]) == 0)
        repeated[order[1:][is_same]] = True
        return self.totals(repeated), self.totals(repeated * self.table["characters"])

    @cached_property
    def blocks(self) -> "Lines":
        """Blocks of text between blank lines, such as paragraphs. Each is represented by a single line.

        Only the fields `characters`, `digest` and `last_kind` refer to the whole block. `last_kind` combines the
        classes of all its lines.
        """
        first = np.flatnonzero(np.diff(self.table["block"], prepend=-1))
        blocks = self.table.take(first)
        if len(first):  # reduceat fails on empty arrays
            place = np.arange(len(self.table)) - np.repeat(first, np.diff(first, append=len(self.table)))
            digests = self.table["digest"] * (2 * place.astype(np.uint64) + np.uint64(1))
            blocks["characters"] = np.add.reduceat(self.table["characters"], first)
            blocks["digest"] = np.add.reduceat(digests, first)
            blocks["last_kind"] = np.bitwise_or.reduceat(self.table["last_kind"], first)
        return Lines(self.text, blocks, len(self.counts))

    def joined(self, stays: np.ndarray) -> list[bytes]:
        """Joins each document's kept lines with newlines. stays: (lines,) bool."""
        kept = np.flatnonzero(stays)
        text = self.text.tobytes()
        places = zip(self.table["start"][kept].tolist(), self.table["stop"][kept].tolist(), strict=True)
        lines = [text[start:stop] for start, stop in places]
        return [b"\n".join(lines[a:b]) for a, b in pairwise(np.searchsorted(kept, self.bounds).tolist())]


def forms_of(divided: DividedTexts, lines: Lines) -> np.ndarray:
    """Detects each document's type. Returns (documents,) PARAGRAPHS, LINES, CODE or TABLE."""
    table = lines.table
    counts = np.maximum(lines.counts, 1)
    sizes = table["characters"]
    characters = np.maximum(lines.characters, 1)

    def share(values: np.ndarray) -> np.ndarray:
        return lines.totals(values) / counts

    long = lines.totals(sizes * (sizes > LONG_LINE)) / characters
    # A document's last line is followed by the next document's first line.
    in_same = table["document"][1:] == table["document"][:-1]
    next_is_lower = np.append(in_same & (table["first_kind"][1:] & LOWER != 0), False)
    runs_on = share(~lines.ends_sentence & (np.isin(table["last_code"], CONTINUES) | next_is_lower[: len(table)]))
    ends = share(lines.ends_sentence)
    is_set = (long <= 0.1) & (share(table["words"]) >= 3) & (runs_on >= 0.08) & (runs_on + ends >= 0.25)

    *cell_signs, semicolon, opened, closing, opened_block, closing_block, other = lines.signs.T
    signs = semicolon + opened_block + closing_block + other
    brackets = opened + opened_block + closing + closing_block
    opening = lines.totals(opened + opened_block)
    closed = lines.totals(closing + closing_block)
    is_code = (
        (share(signs + brackets > 0) >= 0.4)
        & (share(signs > 0) >= 0.15)
        & (lines.totals(signs + brackets) / characters >= 0.03)
        & (ends <= 0.25)
        & (np.abs(opening - closed) <= 0.02 * (opening + closed) + 1)
        & (opening > 0)
        & (divided.totals[:, 2] >= 0.3 * divided.totals[:, 0])
    )

    is_table = np.zeros(len(counts), bool)
    for cells in (*cell_signs, semicolon, table["gaps"]):
        is_like_last = np.append(False, in_same & (cells[1:] == cells[:-1]) & (cells[1:] >= 2))[: len(cells)]
        is_table |= share(is_like_last) >= 0.75
    is_table &= share(table["numbers"] > 0) >= 0.5

    can_tell = (lines.counts >= FEWEST_LINES) & (long <= 0.2)
    return np.select([can_tell & is_table, can_tell & is_code, is_set], [TABLE, CODE, LINES], PARAGRAPHS)
