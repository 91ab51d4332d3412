"""The lines of documents, and the form of a text, by which it is decided which rules fit it.

The published rules were made for web pages, of which each line is a paragraph. Books, verse and plays are set in lines
that end anywhere in a sentence; code and tables have no sentences.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Self

import numpy as np

from pretrain_tools.preparation.cleaning.compiled import characters, words
from pretrain_tools.preparation.cleaning.compiled.text_statistics import mark_repeated

if TYPE_CHECKING:
    from pretrain_tools.preparation.cleaning.compiled.words import DividedTexts

PARAGRAPHS, LINES, CODE, TABLE = range(4)
"""Forms of a text: each line is a paragraph; set in lines, with blank lines between paragraphs, stanzas or speeches;
program code; rows of cells."""
LONG_LINE = 120
"""Characters of a line that is a paragraph: of what is set in lines none is longer."""
CONTINUES = (ord(","), ord(";"), ord("-"), 0x2013, 0x2014)
"""Signs at the end of a line whose sentence goes on in the next."""
CELL_SIGNS = (words.TABS, words.PIPES, words.COMMAS, words.SEMICOLONS, words.GAPS)
"""What is between the cells of a row; GAPS: two spaces or more."""
DOTS = (b"...", "…".encode())
FEWEST_LINES = 10
"""Of code and tables: a shorter text does not tell."""


class Lines:
    """The lines of documents that are not blank, in blocks: runs of lines without a blank one between.

    A line is text between line ends, without the spaces around it. A stage that drops lines passes on the others.
    """

    def __init__(
        self,
        text: np.ndarray,
        table: np.ndarray,
        hashes: np.ndarray,
        places: np.ndarray,
        count: int,
        rows: np.ndarray | None = None,
    ):
        """Places: (2, lines), numbers of block and document, the latter ascending; count: of the documents.

        table: (len(words.COLUMNS), lines), or more lines of which `rows`, (lines,), are these.
        """
        self.text = text
        """(bytes,) uint8, where the lines stand."""
        self.hashes = hashes
        """(lines,) uint64: of the words in each."""
        self._block, self.document = places
        self._table, self._rows = table, rows
        self._columns: dict[int, np.ndarray] = {}
        self.bounds = np.searchsorted(self.document, np.stack([np.arange(count), np.arange(1, count + 1)], axis=1))
        """(documents, 2): first line and end of each."""
        self.counts = self.bounds[:, 1] - self.bounds[:, 0]
        """(documents,): lines of each."""

    @classmethod
    def of(cls, divided: "DividedTexts") -> Self:
        """The lines of the documents of a divided text."""
        return cls(divided.text, divided.lines, divided.line_hashes, divided.places, len(divided.bounds))

    def staying(self, stays: np.ndarray | None, documents: Sequence[int]) -> "Lines":
        """Takes the lines that stay, (lines,) bool or None for all, of some documents, which are numbered anew."""
        number = np.full(len(self.counts), -1)
        number[documents] = np.arange(len(documents))
        document = number[self.document]
        kept = np.flatnonzero(document >= 0 if stays is None else stays & (document >= 0))
        places = np.stack([self._block[kept], document[kept]])
        rows = kept if self._rows is None else self._rows[kept]
        return Lines(self.text, self._table, self.hashes[kept], places, len(documents), rows)

    def replaced(self, documents: Sequence[int], others: "Lines") -> "Lines":
        """The lines with others in the place of those of some documents, in ascending order."""
        stays = ~np.isin(self.document, documents)
        moved = others._table.copy()
        moved[[words.START, words.STOP]] += len(self.text)
        document = np.append(self.document[stays], np.array(documents)[others.document])
        block = np.append(self._block[stays], others._block + self._block.max(initial=0))
        order = np.argsort(document, kind="stable")
        rows = np.arange(self._table.shape[1]) if self._rows is None else self._rows
        rows = np.append(rows[stays], np.arange(moved.shape[1]) + self._table.shape[1])[order]
        table = np.concatenate([self._table, moved], axis=1)
        hashes = np.append(self.hashes[stays], others.hashes)[order]
        places = np.stack([block, document])[:, order]
        return Lines(np.append(self.text, others.text), table, hashes, places, len(self.counts), rows)

    def column(self, number: int) -> np.ndarray:
        """(lines,) int32: one of words.COLUMNS."""
        if self._rows is None:
            return self._table[number]
        if number not in self._columns:
            self._columns[number] = self._table[number].take(self._rows)
        return self._columns[number]

    def totals(self, values: np.ndarray) -> np.ndarray:
        """(documents,): the sum of a value per line, (lines,), over each document."""
        return _totals(values, self.bounds)

    @cached_property
    def characters(self) -> np.ndarray:
        """(documents,): characters of the lines of each."""
        return self.totals(self.column(words.CHARACTERS))

    @cached_property
    def ends_sentence(self) -> np.ndarray:
        """(lines,) bool: closing quotes and brackets do not count."""
        return self.column(words.LAST_KIND) & characters.SENTENCE_END != 0

    @property
    def last_bytes(self) -> np.ndarray:
        """(lines,) uint8"""
        return self.text[self.column(words.STOP) - 1]

    @cached_property
    def ends_in_dots(self) -> np.ndarray:
        """(lines,) bool: in three full stops, or the character for them."""
        # What is before a line is no full stop.
        ends = np.stack([self.text[self.column(words.STOP) - place] for place in (3, 2, 1)])
        return np.any([(ends == np.frombuffer(dots, np.uint8)[:, None]).all(axis=0) for dots in DOTS], axis=0)

    def joined(self, stays: np.ndarray) -> list[bytes]:
        """The lines that stay, (lines,) bool, of each document, with line ends between them."""
        kept = np.flatnonzero(stays)
        starts, stops = self.column(words.START)[kept], self.column(words.STOP)[kept]
        first = np.searchsorted(self.document[kept], np.arange(len(self.counts) + 1))
        ends = np.append(0, np.cumsum(stops - starts + 1))[first]
        joined = np.empty(ends[-1], np.uint8)
        words.join_lines(self.text, starts, stops, joined)
        view = joined.data
        return [bytes(view[begin : max(begin, end - 1)]) for begin, end in pairwise(ends)]

    @cached_property
    def repeated(self) -> tuple[np.ndarray, np.ndarray]:
        """(documents,) each: lines that stand in the document before, and their characters."""
        repeated = _is_repeated(self.hashes, self.document)
        return self.totals(repeated), self.totals(repeated * self.column(words.CHARACTERS))

    @cached_property
    def blocks(self) -> "Blocks":
        """The blocks of the same documents."""
        begins = np.append(True, (self._block[1:] != self._block[:-1]) | (self.document[1:] != self.document[:-1]))
        return Blocks(self, np.flatnonzero(begins[: len(self._block)]))


class Blocks:
    """What blank lines divide: paragraphs, stanzas, speeches. Attributes as those of Lines."""

    def __init__(self, lines: Lines, first: np.ndarray):
        """first: (blocks,) the number of the first line of each."""
        before = np.searchsorted(first, lines.bounds)
        self.bounds = before
        self.counts = before[:, 1] - before[:, 0]
        self._document = lines.document[first]
        last = np.append(first[1:], len(lines.hashes)) - 1
        self.ends_sentence = np.logical_or.reduceat(lines.ends_sentence, first) if len(first) else first
        """(blocks,) bool: whether a line of it ends a sentence."""
        self.sizes = np.add.reduceat(lines.column(words.CHARACTERS), first) if len(first) else first
        """(blocks,): characters of each."""
        place = np.arange(len(lines.hashes)) - np.repeat(first, last + 1 - first)
        mixed = lines.hashes * (2 * place.astype(np.uint64) + np.uint64(1))
        self._hashes = np.add.reduceat(mixed, first) if len(first) else mixed

    def totals(self, values: np.ndarray) -> np.ndarray:
        """(documents,): the sum of a value per block over each document."""
        return _totals(values, self.bounds)

    @cached_property
    def repeated(self) -> tuple[np.ndarray, np.ndarray]:
        """(documents,) each: blocks that stand in the document before, and their characters."""
        repeated = _is_repeated(self._hashes, self._document)
        return self.totals(repeated), self.totals(repeated * self.sizes)


def _totals(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    sums = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    return sums[bounds[:, 1]] - sums[bounds[:, 0]]


def _is_repeated(hashes: np.ndarray, document: np.ndarray) -> np.ndarray:
    """Whether the same hash stands in the same document before; all (lines,)."""
    repeated = np.empty(len(hashes), bool)
    size = 1 << (2 * len(hashes)).bit_length()
    mark_repeated(hashes, document, np.empty(size, np.uint64), np.zeros(size, np.int64), repeated)
    return repeated


def forms_of(divided: "DividedTexts", lines: Lines) -> np.ndarray:
    """(documents,) int: PARAGRAPHS, LINES, CODE or TABLE, by the shares below; only a text of short lines is another
    than PARAGRAPHS."""
    share = lambda values: lines.totals(values) / np.maximum(lines.counts, 1)  # noqa: E731
    sizes = lines.column(words.CHARACTERS)
    long = lines.totals(sizes * (sizes > LONG_LINE)) / np.maximum(lines.characters, 1)
    # Of the last line in a document the next one is another's, which is one line of many.
    follows_in_lower_case = np.append(lines.column(words.FIRST_KIND)[1:] & characters.LOWER != 0, False)
    runs_on = ~lines.ends_sentence & (np.isin(lines.column(words.LAST_CODE), CONTINUES) | follows_in_lower_case)
    runs_on, ends = share(runs_on), share(lines.ends_sentence)
    per_line = lines.totals(lines.column(words.WORDS)) / np.maximum(lines.counts, 1)
    is_set = (long <= 0.1) & (per_line >= 3) & (runs_on >= 0.08) & (runs_on + ends >= 0.25)

    opening, closed = lines.totals(lines.column(words.OPENING)), lines.totals(lines.column(words.CLOSED))
    signs = lines.column(words.SIGNS)
    density = (lines.totals(signs) + opening + closed) / np.maximum(lines.characters, 1)
    any_sign = signs + lines.column(words.OPENING) + lines.column(words.CLOSED) > 0
    is_code = (share(any_sign) >= 0.4) & (share(signs > 0) >= 0.15) & (density >= 0.03) & (ends <= 0.25)
    is_code &= np.abs(opening - closed) <= 0.02 * (opening + closed) + 1
    is_code &= opening > 0
    is_code &= divided.totals[:, 2] >= 0.3 * divided.totals[:, 0]

    is_table = np.zeros(len(lines.counts), bool)
    for sign in CELL_SIGNS:
        cells = lines.column(sign)
        like_the_last = np.append(False, (cells[1:] == cells[:-1]) & (cells[1:] >= 2))[: len(cells)]
        is_table |= share(like_the_last) >= 0.75
    is_table &= share(lines.column(words.NUMBERS) > 0) >= 0.5

    tells = (lines.counts >= FEWEST_LINES) & (long <= 0.2)
    return np.select([tells & is_table, tells & is_code, is_set], [TABLE, CODE, LINES], PARAGRAPHS)
