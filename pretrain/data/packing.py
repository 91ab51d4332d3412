"""Packs windows without cut documents, for `data.sampling: best_fit`.

A source is divided into blocks of about BLOCK_WINDOWS windows. Best fit, longest first, packs a block's documents into
exactly the block's number of windows (Johnson 1973, "Near-optimal bin packing algorithms"; for training Ding et al.
2024, arXiv 2404.10830). The number of windows is therefore known without a plan, and a block is planned from its own
tokens when one of its windows is needed. The gap at a window's end is filled with the beginning of a document: either
a document that fits nowhere and is cropped, or a document that is repeated.

A document longer than a window is cut into whole windows, and its rest is packed like a document.

An epoch visits the blocks in a keyed order. It shuffles the windows of POOL_BLOCKS blocks at a time, also with a key.
A block's windows are therefore used while its plan is in memory, and an object store's blocks are fetched only once.
"""

import bisect
import functools
import itertools
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from pretrain.data.sampling import Permutation, Stream
from pretrain.data.shards import ShardReader

# Never change these, because the order of the data depends on them.
BLOCK_WINDOWS = 256
POOL_BLOCKS = 64

PLANS_KEPT = 2 * POOL_BLOCKS
MEASURED_BLOCKS = 8
"""Number of blocks used to estimate a source's shares."""


def block_count(windows: int) -> int:
    """Returns the number of blocks for this many windows per epoch."""
    return max(1, round(windows / BLOCK_WINDOWS))


def best_fit(draws: np.ndarray, stream: Stream) -> np.ndarray:
    """Visits every window once per epoch, pool by pool. Returns the number of each window times its length."""
    epoch, place = np.divmod(draws, stream.windows)
    window = np.empty_like(draws)
    for turn in np.unique(epoch).tolist():
        here = epoch == turn
        window[here] = _in_order(place[here], stream, turn)
    return window * stream.length


def _in_order(place: np.ndarray, stream: Stream, epoch: int) -> np.ndarray:
    """Returns the windows at these positions of an epoch."""
    order, ends = _order_of_blocks(stream.windows, stream.key("blocks", epoch))
    pools = max(1, round(len(order) / POOL_BLOCKS))
    pool_ends = ends[np.arange(1, pools + 1) * len(order) // pools - 1]
    pool_of = np.searchsorted(pool_ends, place, side="right")
    mixed = np.empty_like(place)
    for pool in np.unique(pool_of).tolist():
        here = pool_of == pool
        first = int(pool_ends[pool - 1]) if pool else 0
        permutation = Permutation(int(pool_ends[pool]) - first, stream.key("pool", epoch, pool))
        mixed[here] = first + permutation(place[here] - first)
    number = np.searchsorted(ends, mixed, side="right")
    blocks = len(order)
    # Counted back from the end of its block, because that position is known both in this order and in the source.
    return (order[number] + 1) * stream.windows // blocks - (ends[number] - mixed)


@functools.lru_cache(maxsize=256)
def _order_of_blocks(windows: int, key: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (blocks in an epoch's order, number of windows up to the end of each)."""
    blocks = block_count(windows)
    order = Permutation(blocks, key)(np.arange(blocks))
    return order, np.cumsum((order + 1) * windows // blocks - order * windows // blocks)


@dataclass(frozen=True)
class BlockPlan:
    """A block's windows, as contiguous pieces of the source."""

    starts: np.ndarray
    """(pieces,) int64 first token of each piece."""
    lengths: np.ndarray
    """(pieces,) int32 tokens in each piece."""
    first_piece: np.ndarray
    """(windows + 1,) int32 number of each window's first piece."""
    documents: int
    """Number of documents shorter than a window."""
    cropped: int
    """Number of these documents that are cropped or dropped."""
    dropped: int
    """Tokens not read."""
    repeated: int
    """Tokens read twice."""


class Packing:
    """A source's windows of one length, packed by best fit.

    windows: their number, from `WindowSpec.count_in`.
    """

    def __init__(self, reader: ShardReader, length: int, windows: int):
        self.reader = reader
        self.length = length
        self.windows = windows
        self.blocks = block_count(windows)
        self._end_id = reader.manifest.end_of_document_id
        self._plans: OrderedDict[int, BlockPlan] = OrderedDict()

    def read(self, window: int, out: np.ndarray) -> None:
        """Copies a window into `out`, (length + 1,). Its first token is the one before the window's first piece."""
        pieces = self.pieces(window)
        start, count = pieces[0]
        if start:
            self.reader.read(start - 1, out[: 1 + count])
        else:
            out[0] = self._end_id
            self.reader.read(0, out[1 : 1 + count])
        filled = 1 + count
        for start, count in pieces[1:]:
            self.reader.read(start, out[filled : filled + count])
            filled += count

    def pieces(self, window: int) -> list[tuple[int, int]]:
        """Returns (first token in the source, tokens) for each piece of a window."""
        block = self._block_of(window)
        plan = self._plan(block)
        place = window - self._first_window(block)
        pieces = slice(plan.first_piece[place], plan.first_piece[place + 1])
        return list(zip(plan.starts[pieces].tolist(), plan.lengths[pieces].tolist(), strict=True))

    def expect(self, window: int) -> None:
        """Begins to fetch the window's whole block from an object store. The block's plan needs all its tokens."""
        first, end = self._span(self._block_of(window))
        self.reader.expect(first, end - first)

    @property
    def pool_bytes(self) -> int:
        """Bytes of a pool's token IDs, including the blocks of the next pool that are read ahead."""
        blocks = min(self.blocks, POOL_BLOCKS * 5 // 4)
        return blocks * (BLOCK_WINDOWS + 2) * self.length * self.reader.manifest.bytes_per_id

    def shares(self) -> tuple[float, float, float]:
        """Estimates the shares of dropped tokens, repeated tokens and cropped documents from a few blocks."""
        measured = sorted({number * self.blocks // MEASURED_BLOCKS for number in range(MEASURED_BLOCKS)})
        for block in measured:
            self.expect(self._first_window(block))
        plans = [self._plan(block) for block in measured]
        tokens = sum(int(plan.lengths.sum()) for plan in plans)
        documents = sum(plan.documents for plan in plans)
        return (
            sum(plan.dropped for plan in plans) / tokens,
            sum(plan.repeated for plan in plans) / tokens,
            sum(plan.cropped for plan in plans) / max(1, documents),
        )

    def _first_window(self, block: int) -> int:
        return block * self.windows // self.blocks

    def _block_of(self, window: int) -> int:
        return ((window + 1) * self.blocks - 1) // self.windows

    def _span(self, block: int) -> tuple[int, int]:
        """Returns the token range of a block, which begins up to a window's length before its first window."""
        first = max(0, self._first_window(block) - 1) * self.length
        is_last = block == self.blocks - 1
        return first, self.reader.tokens if is_last else self._first_window(block + 1) * self.length

    def _plan(self, block: int) -> BlockPlan:
        plan = self._plans.get(block)
        if plan is None:
            plan = self._plans[block] = self._planned(block)
            while len(self._plans) > PLANS_KEPT:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(block)
        return plan

    def _planned(self, block: int) -> BlockPlan:
        first, end = self._span(block)
        ids = np.empty(end - first, self.reader.manifest.dtype)
        self.reader.read(first, ids)
        ends = first + 1 + np.flatnonzero(ids == self._end_id)
        begin = self._edge(ends, self._first_window(block) * self.length) if block else 0
        if block < self.blocks - 1:
            end = self._edge(ends, end)
        inside = ends[(ends > begin) & (ends <= end)]
        is_open = not len(inside) or inside[-1] < end
        bounds = np.concatenate([[begin], inside, [end] if is_open else []]).astype(np.int64)
        windows = self._first_window(block + 1) - self._first_window(block)
        is_continued = begin > 0 and begin not in ends
        return pack(bounds, self.length, windows, is_continued=is_continued, is_open=is_open)

    def _edge(self, ends: np.ndarray, nominal: int) -> int:
        """Returns a block's edge: the last document end at most a window's length before `nominal`, or `nominal`."""
        last = np.searchsorted(ends, nominal, side="right") - 1
        return int(ends[last]) if last >= 0 and ends[last] > nominal - self.length else nominal


def pack(
    bounds: np.ndarray, length: int, windows: int, *, is_continued: bool = False, is_open: bool = False
) -> BlockPlan:
    """Plans a block's windows.

    Args:
        bounds: (documents + 1,) first token of each of its documents, and the end of the last one.
        length: tokens in a window.
        windows: number of windows. All of them get filled.
        is_continued: True if the first document began in the previous block.
        is_open: True if the last document continues in the next block. The rest of it may only fill a gap, because
            without an end-of-document ID nothing may follow it in a window.
    """
    sizes = np.diff(bounds)
    whole = sizes // length
    # Windows filled by long documents.
    number = np.repeat(np.arange(len(sizes)), whole)
    turn = np.arange(len(number)) - np.repeat(np.cumsum(whole) - whole, whole)
    full = (bounds[number] + turn * length)[:windows].tolist()
    rest = sizes % length
    rest_starts = bounds[1:] - rest
    packed = np.flatnonzero(rest)
    if is_open and rest[-1]:
        packed = packed[:-1]
    packed = packed[np.argsort(-rest[packed], kind="stable")]
    bins, left = _best_fit(rest[packed].tolist(), length, windows - len(full))
    places = packed[[piece for pieces in bins for piece in pieces]] if any(bins) else packed[:0]
    pieces = [[(start, length)] for start in full]
    pieces += [sorted((int(rest_starts[packed[n]]), int(rest[packed[n]])) for n in members) for members in bins]
    gaps = [length - sum(count for _, count in window) for window in pieces]
    # Pieces that fit nowhere come first, then the longest pieces, which are read whole as well.
    unplaced = packed[left].tolist()
    if is_open and rest[-1] >= max(gaps):
        unplaced.insert(0, len(rest) - 1)
    fillers = [(int(rest_starts[n]), int(rest[n]), True) for n in unplaced]
    fillers += [(int(rest_starts[n]), int(rest[n]), False) for n in packed.tolist()]
    fillers += [(start, length, False) for start in full[:1]]
    repeated = _fill(pieces, gaps, fillers)
    flat = list(itertools.chain.from_iterable(pieces))
    read = sum(count for _, count in flat)
    is_short = (whole == 0) & (np.arange(len(sizes)) >= is_continued) & (np.arange(len(sizes)) < len(sizes) - is_open)
    return BlockPlan(
        starts=np.array([start for start, _ in flat], np.int64),
        lengths=np.array([count for _, count in flat], np.int32),
        first_piece=np.cumsum([0, *map(len, pieces)]).astype(np.int32),
        documents=int(is_short.sum()),
        cropped=int(is_short.sum() - is_short[places].sum()),
        dropped=int(bounds[-1] - bounds[0]) - (read - repeated),
        repeated=repeated,
    )


def _best_fit(sizes: list[int], length: int, windows: int) -> tuple[list[list[int]], list[int]]:
    """Puts each piece, longest first, into the fullest window with enough room.

    Returns (numbers of the pieces in each window, numbers of the pieces that fit nowhere).
    """
    bins: list[list[int]] = [[] for _ in range(windows)]
    # Sorted by room. Each entry is room * windows + the window's number.
    rooms = [length * windows + number for number in range(windows)]
    left = []
    for piece, size in enumerate(sizes):
        place = bisect.bisect_left(rooms, size * windows)
        if place == len(rooms):
            left.append(piece)
            continue
        room, number = divmod(rooms.pop(place), windows)
        bins[number].append(piece)
        if room > size:
            bisect.insort(rooms, (room - size) * windows + number)
    return bins, left


def _fill(pieces: list[list[tuple[int, int]]], gaps: list[int], fillers: list[tuple[int, int, bool]]) -> int:
    """Fills the windows' gaps, largest first. Returns the number of repeated tokens.

    fillers: (first token, tokens, True if its first use repeats nothing).
    """
    turns = itertools.chain(fillers, itertools.cycle([(start, size, False) for start, size, _ in fillers]))
    repeated = 0
    for number in sorted(range(len(gaps)), key=lambda number: -gaps[number]):
        gap = gaps[number]
        while gap:
            start, size, is_new = next(turns)
            taken = min(gap, size)
            pieces[number].append((start, taken))
            repeated += 0 if is_new else taken
            gap -= taken
    return repeated
