"""Packs whole documents into windows, for `data.sampling: best_fit`.

A source is divided into blocks of about BLOCK_WINDOWS windows. Best-fit decreasing packs a block's documents into a
fixed number of windows (Johnson 1973, "Near-optimal bin packing algorithms"; for training, Ding et al. 2024, arXiv
2404.10830). Since this number is known in advance, a block is planned only when one of its windows is needed. The gap
at the end of a window is filled with the beginning of a document, which is either cropped because it doesn't fit
elsewhere, or repeated.

Documents longer than a window are split into whole windows, and the remainder is packed like a document.

Each epoch visits the blocks in a keyed order and shuffles the windows of POOL_BLOCKS blocks at a time. This way, all
windows of a block are used while its plan is in memory, and its tokens are fetched from an object store only once.
"""

import bisect
import functools
import itertools
import weakref
from dataclasses import dataclass

import numpy as np

from pretrain.data.sampling import Permutation, Stream
from pretrain.data.shards import ShardReader

# Never change these: they determine the data order.
BLOCK_WINDOWS = 256
POOL_BLOCKS = 64

PLANS_KEPT = 2 * POOL_BLOCKS
MEASURED_BLOCKS = 8
"""Number of blocks that `Packing.dropped_share` samples."""


def block_count(windows: int) -> int:
    """Returns the number of blocks for this many windows per epoch."""
    return max(1, round(windows / BLOCK_WINDOWS))


def best_fit(draws: np.ndarray, stream: Stream) -> np.ndarray:
    """Visits every window once per epoch, pool by pool. Returns each window's index times the window length."""
    epoch, place = np.divmod(draws, stream.windows)
    window = np.empty_like(draws)
    for turn in np.unique(epoch).tolist():
        here = epoch == turn
        window[here] = _in_order(place[here], stream, turn)
    return window * stream.length


def _in_order(place: np.ndarray, stream: Stream, epoch: int) -> np.ndarray:
    """Returns the indices of the windows at these positions of an epoch."""
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
    # Counted back from the end of the block, because the end is known in both orders.
    return (order[number] + 1) * stream.windows // blocks - (ends[number] - mixed)


@functools.lru_cache(maxsize=256)
def _order_of_blocks(windows: int, key: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (block indices in an epoch's order, cumulative number of windows)."""
    blocks = block_count(windows)
    order = Permutation(blocks, key)(np.arange(blocks))
    return order, np.cumsum((order + 1) * windows // blocks - order * windows // blocks)


@dataclass(frozen=True)
class BlockPlan:
    """A block's windows, as contiguous pieces of the source."""

    starts: np.ndarray
    """(pieces,) int64 first token of each piece."""
    lengths: np.ndarray
    """(pieces,) int32 number of tokens in each piece."""
    first_piece: np.ndarray
    """(windows + 1,) int32 index of each window's first piece."""
    dropped: int
    """Number of tokens that aren't read."""


class Packing:
    """A source's windows of one length, packed with best fit.

    windows: number of windows, from `WindowSpec.count_in`.
    """

    def __init__(self, reader: ShardReader, length: int, windows: int):
        self.reader = reader
        self.length = length
        self.windows = windows
        self.blocks = block_count(windows)
        self._end_id = reader.manifest.end_of_document_id
        # The cache doesn't own this object, so that the plans are freed with it, even after gc.freeze.
        planned = functools.partial(Packing._planned, weakref.proxy(self))
        self._plan = functools.lru_cache(maxsize=PLANS_KEPT)(planned)
        """Returns a block's plan."""

    def read(self, window: int, out: np.ndarray) -> None:
        """Copies a window into `out`, (length + 1,). out[0] is the token before the window's first piece."""
        pieces = self.pieces(window)
        first, _ = pieces[0]
        if first:
            self.reader.read(first - 1, out[:1])
        else:
            out[0] = self._end_id
        filled = 1
        for start, count in pieces:
            self.reader.read(start, out[filled : filled + count])
            filled += count

    def pieces(self, window: int) -> list[tuple[int, int]]:
        """Returns (first token in the source, number of tokens) for each piece of a window."""
        block = self._block_of(window)
        plan = self._plan(block)
        place = window - self._first_window(block)
        pieces = slice(plan.first_piece[place], plan.first_piece[place + 1])
        return list(zip(plan.starts[pieces].tolist(), plan.lengths[pieces].tolist(), strict=True))

    def expect(self, window: int) -> None:
        """Starts prefetching all tokens of the window's block, which are needed to plan the block."""
        first, end = self._span(self._block_of(window))
        self.reader.expect(first, end - first)

    @property
    def pool_bytes(self) -> int:
        """Size of a pool's token IDs in bytes, including prefetched blocks of the next pool."""
        blocks = min(self.blocks, POOL_BLOCKS * 5 // 4)
        return blocks * (BLOCK_WINDOWS + 2) * self.length * self.reader.manifest.bytes_per_id

    def dropped_share(self) -> float:
        """Estimates the fraction of dropped tokens from a few blocks."""
        measured = sorted({number * self.blocks // MEASURED_BLOCKS for number in range(MEASURED_BLOCKS)})
        for block in measured:
            self.expect(self._first_window(block))
        plans = [self._plan(block) for block in measured]
        return sum(plan.dropped for plan in plans) / sum(int(plan.lengths.sum()) for plan in plans)

    def _first_window(self, block: int) -> int:
        return block * self.windows // self.blocks

    def _block_of(self, window: int) -> int:
        return ((window + 1) * self.blocks - 1) // self.windows

    def _span(self, block: int) -> tuple[int, int]:
        """Returns the range of tokens to read for a block, including up to one window before it."""
        first = max(0, self._first_window(block) - 1) * self.length
        is_last = block == self.blocks - 1
        return first, self.reader.tokens if is_last else self._first_window(block + 1) * self.length

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
        return pack(bounds, self.length, windows, is_open=is_open)

    def _edge(self, ends: np.ndarray, nominal: int) -> int:
        """Returns a block boundary: the last document end less than a window before `nominal`, otherwise `nominal`."""
        last = np.searchsorted(ends, nominal, side="right") - 1
        return int(ends[last]) if last >= 0 and ends[last] > nominal - self.length else nominal


def pack(bounds: np.ndarray, length: int, windows: int, *, is_open: bool = False) -> BlockPlan:
    """Plans a block's windows.

    Args:
        bounds: (documents + 1,) first token of each document, and the end of the last one.
        length: window length in tokens.
        windows: number of windows to fill.
        is_open: True if the last document continues in the next block. Its remainder may only fill a gap: since it
            doesn't end with an end-of-document ID, no document may follow it in a window.
    """
    sizes = np.diff(bounds)
    whole = sizes // length
    # Windows within long documents.
    number = np.repeat(np.arange(len(sizes)), whole)
    turn = np.arange(len(number)) - np.repeat(np.cumsum(whole) - whole, whole)
    full = (bounds[number] + turn * length)[:windows].tolist()
    rest = sizes % length
    rests = list(zip((bounds[1:] - rest).tolist(), rest.tolist(), strict=True))
    packed = np.flatnonzero(rest)
    if is_open and rest[-1]:
        packed = packed[:-1]
    packed = packed[np.argsort(-rest[packed], kind="stable")]
    bins, left = _best_fit(rest[packed].tolist(), length, windows - len(full))
    pieces = [[(start, length)] for start in full]
    pieces += [sorted(rests[packed[n]] for n in members) for members in bins]
    gaps = [length - sum(count for _, count in window) for window in pieces]
    # First the pieces that don't fit anywhere, then the longest of the others, which are repeated.
    unplaced = packed[left].tolist()
    if is_open and rest[-1] >= max(gaps):
        unplaced.insert(0, len(rest) - 1)
    fillers = [(*rests[n], True) for n in unplaced]
    fillers += [(*rests[n], False) for n in packed.tolist()]
    fillers += [(start, length, False) for start in full[:1]]
    repeated = _fill(pieces, gaps, fillers)
    flat = list(itertools.chain.from_iterable(pieces))
    read = sum(count for _, count in flat)
    return BlockPlan(
        starts=np.array([start for start, _ in flat], np.int64),
        lengths=np.array([count for _, count in flat], np.int32),
        first_piece=np.cumsum([0, *map(len, pieces)]).astype(np.int32),
        dropped=int(bounds[-1] - bounds[0]) - (read - repeated),
    )


def _best_fit(sizes: list[int], length: int, windows: int) -> tuple[list[list[int]], list[int]]:
    """Puts each piece into the fullest window with enough space. `sizes` must be in descending order.

    Returns (indices of the pieces in each window, indices of the pieces that don't fit anywhere).
    """
    bins: list[list[int]] = [[] for _ in range(windows)]
    # Sorted by free space. Each entry is (free tokens) * windows + (window index).
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

    fillers: (first token, number of tokens, True if it isn't in a window yet).
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
