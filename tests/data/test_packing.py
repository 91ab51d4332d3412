"""Tests for best-fit packing: whole documents, dropped token counts, and random access with any number of ranks."""

import weakref

import numpy as np
import pytest

from pretrain.config import Data
from pretrain.data import packing
from pretrain.data.batches import Batches
from pretrain.data.packing import Packing, pack
from pretrain.data.shards import open_shards
from pretrain.optim.batch_ramp import batch_ramp
from support.numbered_shards import write_shards

LENGTH = 32
END = 0


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(packing, "BLOCK_WINDOWS", 16)
    monkeypatch.setattr(packing, "POOL_BLOCKS", 3)


def documents_in(folder, sizes, *, ends=True):
    """Writes shards with documents of these sizes, including the end-of-document ID; other IDs are positions."""
    folder = write_shards(folder, int(sum(sizes)), files=3, vocabulary=2**16)
    ids = 1 + np.arange(sum(sizes), dtype="<u2")
    if ends:
        ids[np.cumsum(sizes) - 1] = END
    for path in sorted(folder.glob("train-*.bin")):
        count = path.stat().st_size // 2
        ids[:count].tofile(path)
        ids = ids[count:]
    return folder


def drawn(seed, *, most, count):
    return np.random.default_rng(seed).integers(1, most, count)


def packing_of(folder, length=LENGTH):
    reader = open_shards(folder, "train")
    return Packing(reader, length, (reader.tokens - 1) // length)


SIZES = {
    "short": drawn(0, most=12, count=3000),
    "up to a window": drawn(1, most=LENGTH + 1, count=1200),
    "over half a window": LENGTH // 2 + drawn(2, most=LENGTH // 2, count=800),
    "exactly a window": np.full(700, LENGTH),
    "longer": drawn(3, most=6 * LENGTH, count=250),
    "longer than a block": np.array([3, 20 * LENGTH * 16 + 5, 7, 9, 40 * LENGTH + 11, 31]),
    "one": np.array([2 * LENGTH + 9]),
}


@pytest.mark.parametrize("name", SIZES)
def test_windows_have_whole_documents_and_every_token_is_counted(tmp_path, name):
    sizes = SIZES[name]
    found = packing_of(documents_in(tmp_path / "a", sizes))
    ends = np.cumsum(sizes)
    reads = np.zeros(ends[-1], np.int64)
    out = np.empty(LENGTH + 1, np.uint16)
    expected = 1 + np.arange(ends[-1])
    expected[ends - 1] = END
    for window in range(found.windows):
        found.read(window, out)
        pieces = found.pieces(window)
        first = pieces[0][0]
        assert out[0] == (expected[first - 1] if first else END)
        assert out[1:].tolist() == np.concatenate([expected[start : start + n] for start, n in pieces]).tolist()
        for start, count in pieces:
            reads[start : start + count] += 1
            document = np.searchsorted(ends, start, side="right")
            assert start + count <= ends[document], "a piece must be within one document"
        # Otherwise, the next piece would continue the text of another document.
        assert all(start + count in ends for start, count in pieces[:-1])
    plans = [found._plan(block) for block in range(found.blocks)]
    assert sum(plan.dropped for plan in plans) == (reads == 0).sum()
    if name in ("short", "exactly a window"):
        assert sum(plan.dropped for plan in plans) < 0.02 * ends[-1]


def test_long_documents_are_split_and_their_remainders_packed():
    # 70 is split into two full sequences and 6 tokens, which share a sequence with 26. 20 and 12 also share one.
    bounds = np.cumsum([0, 70, 26, 20, 12, 32])
    plan = pack(bounds, LENGTH, 5)
    windows = [
        list(zip(plan.starts[a:b].tolist(), plan.lengths[a:b].tolist(), strict=True))
        for a, b in zip(plan.first_piece[:-1], plan.first_piece[1:], strict=True)
    ]
    assert sorted(windows) == [[(0, 32)], [(32, 32)], [(64, 6), (70, 26)], [(96, 20), (116, 12)], [(128, 32)]]
    assert plan.dropped == 0


def test_a_document_that_does_not_fit_is_cropped_into_the_largest_gap():
    plan = pack(np.cumsum([0, 20, 20, 20]), LENGTH, 2)
    assert plan.lengths.tolist() == [20, 12, 20, 12] and plan.starts[[0, 1, 2]].tolist() == [0, 40, 20]
    # 12 tokens of the third document are read and 8 dropped. The other gap repeats 12 tokens of the first document.
    assert plan.dropped == 8


def batches_of(sources, *, stages=None, steps=60, ramp_from=1.0, seed=1):
    data = {"sequence_length": LENGTH, "sampling": "best_fit"} | ({"stages": stages} if stages else {"train": sources})
    ramp = batch_ramp(16, total_steps=steps, ramp_from=ramp_from, ramp_over=0.5 if ramp_from < 1 else 0.0)
    return Batches(Data(**data), seed=seed, ramp=ramp)


def test_every_window_is_read_once_per_epoch_pool_by_pool(tmp_path):
    folder = {"shards": documents_in(tmp_path / "a", SIZES["up to a window"])}
    batches = batches_of([folder], steps=100)
    windows = (sum(SIZES["up to a window"]) - 1) // LENGTH
    numbers = np.array([start // LENGTH for _, start in batches.locate(0, 2 * windows)])
    first, second = numbers[:windows], numbers[windows:]
    assert sorted(first) == sorted(second) == list(range(windows)) and (first != second).any()
    blocks = [batches.packings[0, LENGTH]._block_of(int(number)) for number in first]
    # The 40 blocks form 13 pools, and each block is in only one of them.
    assert max(np.ptp(np.flatnonzero(np.array(blocks) == block)) for block in set(blocks)) < 5 * 16
    assert numbers.tolist() != [start // LENGTH for _, start in batches_of([folder], seed=2).locate(0, 2 * windows)]


MIXTURES = {
    "one source": {},
    "a ramp": {"ramp_from": 0.25},
    "a mixture": {"weights": [3, 1]},
    "a curriculum of lengths": {"stages": [(0.4, LENGTH), (None, 4 * LENGTH)]},
}


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_is_the_same_on_any_number_of_ranks_and_after_a_resume(tmp_path, name, ranks):
    settings = dict(MIXTURES[name])
    folders = [documents_in(tmp_path / letter, SIZES[of]) for letter, of in (("a", "longer"), ("b", "short"))]
    weights = settings.pop("weights", [1])
    sources = [{"shards": str(folder), "weight": w} for folder, w in zip(folders, weights, strict=False)]
    if "stages" in settings:
        settings["stages"] = [
            {"train": sources, "sequence_length": length} | ({"until": until} if until else {})
            for until, length in settings["stages"]
        ]
    whole = batches_of(sources, **settings)
    read = {}
    for step in range(60):
        span = whole.span_at(whole.first_sample(step))
        read[step] = whole.read(step, 0, 0, ranks=1, sequences=whole.ramp.sequences_at(step) // span)
    resumed = batches_of(sources, **settings)
    for step in [41, 42, 3, 59, 0]:
        rows = whole.ramp.sequences_at(step) // whole.span_at(whole.first_sample(step)) // ranks
        parts = [resumed.read(step, 0, rank, ranks=ranks, sequences=rows) for rank in range(ranks)]
        assert (np.concatenate(parts) == read[step]).all(), step


def test_plans_in_memory_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "PLANS_KEPT", 4)
    found = packing_of(documents_in(tmp_path / "a", SIZES["short"]))
    kept = [found.pieces(window) for window in range(found.windows)]
    assert found._plan.cache_info().currsize == 4 < found.blocks
    assert [found.pieces(window) for window in range(found.windows)] == kept
    alive = weakref.ref(found)
    del found
    assert alive() is None  # without a garbage collection


def test_shards_without_document_ends_have_consecutive_windows(tmp_path):
    found = packing_of(documents_in(tmp_path / "a", [5000], ends=False))
    assert [found.pieces(window) for window in range(found.windows)] == [
        [(window * LENGTH, LENGTH)] for window in range(found.windows)
    ]
    assert found.dropped_share() <= LENGTH / 5000
