"""Tests for data order: complete epochs, source weights, random access, and independence of the number of ranks."""

import json
import sys
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch

from pretrain.config import Data, WindowSpec
from pretrain.data.batches import PATTERN_LENGTH, Batches, interleave
from pretrain.data.sampling import Permutation
from pretrain.errors import InputError
from pretrain.model.attention import model_inputs
from pretrain.optim.batch_ramp import batch_ramp
from pretrain.registry import SAMPLERS
from support.numbered_shards import write_shards

LENGTH = 16


def batches_of(*sources, steps=100, sequences=4, seed=1, sampling="epochs", stages=None, skipped=(), ramp_from=1.0):
    data = {"sequence_length": LENGTH, "sampling": sampling}
    data |= {"stages": stages} if stages else {"train": list(sources)}
    ramp = batch_ramp(sequences, total_steps=steps, ramp_from=ramp_from, ramp_over=0.5 if ramp_from < 1 else 0.0)
    return Batches(Data(**data), seed=seed, ramp=ramp, skipped=skipped)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 65, 1000, 4097])
def test_a_permutation_visits_everything_once(size):
    assert sorted(Permutation(size, key=7)(np.arange(size))) == list(range(size))


def test_permutations_depend_on_the_key_and_are_uncorrelated():
    positions = np.arange(10_000)
    first, second = Permutation(10_000, 1)(positions), Permutation(10_000, 2)(positions)
    assert (first == second).mean() < 0.01
    # In a random order, the correlation of 10,000 pairs has a standard error of 0.01.
    assert abs(np.corrcoef(positions, first)[0, 1]) < 0.05
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.05


def test_every_window_once_per_epoch_in_a_new_order(tmp_path):
    folder = write_shards(tmp_path / "a", 20 * LENGTH + 5, files=3)
    batches = batches_of({"shards": folder}, steps=15)
    starts = [start for _, start in batches.locate(0, 60)]
    epochs = [starts[0:20], starts[20:40], starts[40:60]]
    for epoch in epochs:
        assert sorted(epoch) == [window * LENGTH for window in range(20)]
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_sequence_is_contiguous_text_plus_the_next_token(tmp_path):
    batches = batches_of({"shards": write_shards(tmp_path / "a", 500, files=4)})
    ids = batches.read(3, 0, 0, ranks=1, sequences=4)
    assert ids.shape == (4, LENGTH + 1) and ids.dtype == np.uint16
    assert (np.diff(ids.astype(int), axis=1) == 1).all(), "sequences must continue across shard files"
    inputs = model_inputs(
        ids, WindowSpec(LENGTH, False), end_of_document_id=0, device=torch.device("cpu"), attention="groundwork_sdpa"
    )
    assert (inputs["targets_BT"] == inputs["input_ids_BT"] + 1).all()


@pytest.mark.parametrize(("ranks", "sequences"), [(1, 12), (2, 6), (2, 3), (4, 3), (3, 1)])
def test_the_samples_of_a_step_do_not_depend_on_ranks_or_micro_batches(tmp_path, ranks, sequences):
    batches = batches_of({"shards": write_shards(tmp_path / "a", 3000)}, sequences=12)
    reads = [
        batches.read(5, micro_step, rank, ranks=ranks, sequences=sequences)
        for micro_step in range(12 // (ranks * sequences))
        for rank in range(ranks)
    ]
    whole = batches.read(5, 0, 0, ranks=1, sequences=12)
    assert (np.concatenate(reads) == whole).all()


def test_weights_are_respected_at_every_length(tmp_path):
    sources = [
        {"shards": write_shards(tmp_path / n, 900), "weight": w} for n, w in (("a", 0.7), ("b", 0.2), ("c", 0.1))
    ]
    located = [source for source, _ in batches_of(*sources, steps=5000).locate(0, 20_000)]
    for length in (10, 100, 1000, 20_000):
        counts = Counter(located[:length])
        for number, weight in enumerate((0.7, 0.2, 0.1)):
            assert abs(counts[number] - weight * length) <= 2


def test_interleaving_keeps_rare_sources():
    pattern = interleave(np.array([1e6, 1.0, 0.0]))
    assert len(pattern) == PATTERN_LENGTH
    assert Counter(pattern.tolist()) == {0: PATTERN_LENGTH - 1, 1: 1}


def test_after_max_epochs_only_other_sources_are_read(tmp_path):
    small = {"shards": write_shards(tmp_path / "small", 10 * LENGTH + 1), "max_epochs": 2}
    large = {"shards": write_shards(tmp_path / "large", 4000)}
    located = batches_of(small, large, steps=100).locate(0, 400)
    visits = Counter(start for source, start in located if source == 0)
    assert visits == dict.fromkeys(range(0, 10 * LENGTH, LENGTH), 2)
    assert {source for source, _ in located[100:]} == {1}


def test_data_that_runs_out_is_rejected_with_numbers(tmp_path):
    source = {"shards": write_shards(tmp_path / "a", 10 * LENGTH + 1), "max_epochs": 2}
    with pytest.raises(InputError, match=r"used up .* after 320 of 6,400 tokens; raise max_epochs"):
        batches_of(source, steps=100)


def test_a_huge_max_epochs_is_no_limit(tmp_path):
    source = {"shards": write_shards(tmp_path / "a", 900)}
    located = [batches_of(source | limit).locate(0, 400) for limit in ({}, {"max_epochs": 1e30})]
    assert located[0] == located[1]


def test_a_curriculum_changes_the_mixture_at_the_boundary(tmp_path):
    easy, hard = write_shards(tmp_path / "easy", 900), write_shards(tmp_path / "hard", 900)
    stages = [{"until": "25%", "train": [{"shards": easy}]}, {"train": [{"shards": hard}]}]
    located = [source for source, _ in batches_of(stages=stages, steps=100).locate(0, 400)]
    assert located == [0] * 100 + [1] * 300


def test_random_windows_start_anywhere(tmp_path):
    batches = batches_of({"shards": write_shards(tmp_path / "a", 1000)}, sampling="random_windows", steps=500)
    starts = np.array([start for _, start in batches.locate(0, 2000)])
    assert starts.min() >= 0 and starts.max() + LENGTH + 1 <= 1000
    assert len(set(starts % LENGTH)) == LENGTH
    assert abs(starts.mean() - 492) < 5 * 284 / 2000**0.5, (
        "the starts must be uniform over [0, 984): five standard errors"
    )


@pytest.mark.parametrize("sampler", [lambda draws: draws * 1000, lambda draws: draws / 1, lambda draws: 0])
def test_a_sampler_with_invalid_indices_is_rejected(tmp_path, monkeypatch, sampler):
    monkeypatch.setitem(SAMPLERS, "mine", lambda draws, stream: sampler(draws))
    batches = batches_of({"shards": write_shards(tmp_path / "a", 1000)}, sampling="mine", steps=500)
    with pytest.raises(InputError, match=r"data.sampling: mine returned .* one integer per window, from 0 to 983"):
        batches.locate(0, 4)


def test_skipped_samples_do_not_change_the_order(tmp_path):
    folder = write_shards(tmp_path / "a", 3000)
    whole = batches_of({"shards": folder}).locate(0, 100)
    skipping = batches_of({"shards": folder}, skipped=[(10, 5), (40, 20)]).locate(0, 75)
    assert skipping == whole[:10] + whole[15:40] + whole[60:]


def test_another_seed_is_another_order(tmp_path):
    folder = write_shards(tmp_path / "a", 3000)
    assert batches_of({"shards": folder}, seed=1).locate(0, 50) != batches_of({"shards": folder}, seed=2).locate(0, 50)


def test_a_ramp_reads_every_sample_once(tmp_path):
    batches = batches_of({"shards": write_shards(tmp_path / "a", 3000)}, sequences=8, ramp_from=0.5, steps=20)
    reads = [batches.read(s, 0, 0, ranks=1, sequences=batches.ramp.sequences_at(s)) for s in range(20)]
    assert {len(ids) for ids in reads} == {4, 8}
    assert [int(row[0]) for ids in reads for row in ids] == [
        start for _, start in batches.locate(0, batches.ramp.total_sequences)
    ]


def test_any_step_costs_as_much_as_the_first(tmp_path):
    """Counts function calls and bytes, which don't depend on machine load. Replaying steps would increase one of
    them."""
    batches = batches_of({"shards": write_shards(tmp_path / "a", 3000)}, steps=10**9, sequences=512)

    def cost(step) -> tuple[int, int]:
        """Returns (number of function calls, peak bytes) for a step's first micro-batch."""
        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += event.endswith("call")

        tracemalloc.start()
        sys.setprofile(count)
        try:
            batches.read(step, 0, 0, ranks=64, sequences=8)
        finally:
            sys.setprofile(None)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        return calls, peak

    cost(0)
    near = cost(3)
    assert near[0] > 100 and near[1] > 8 * LENGTH, "the counters must measure the work"
    for step in range(10**8, 10**9, 10**8):
        assert all(far < 2 * of_near for far, of_near in zip(cost(step), near, strict=True)), step


def test_many_sources_that_are_used_up_take_little_memory(tmp_path):
    windows = [20 + number for number in range(30)]
    sources = [
        {"shards": write_shards(tmp_path / str(count), count * LENGTH + 1), "max_epochs": 1} for count in windows
    ]
    tracemalloc.start()
    try:
        batches = batches_of(*sources, steps=sum(windows) // 4)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(batches.segments) > 20
    assert peak < 2e7, "memory must not grow with the square of the number of sources"
    drawn = Counter(source for source, _ in batches.locate(0, sum(windows) // 4 * 4))
    assert all(count - 4 <= drawn[number] <= count for number, count in enumerate(windows))


def test_all_invalid_sources_are_named(tmp_path):
    short, other = write_shards(tmp_path / "short", LENGTH), write_shards(tmp_path / "other", 900, tokenizer="u")
    with pytest.raises(InputError) as caught:
        batches_of({"shards": tmp_path / "none"}, {"shards": tmp_path / "gone"})
    assert len(caught.value.problems) == 2
    with pytest.raises(InputError, match=r"one sequence needs 16 \+ 1"):
        batches_of({"shards": short})
    with pytest.raises(InputError, match="different tokenizers"):
        batches_of({"shards": other}, {"shards": write_shards(tmp_path / "a", 900)})
    with pytest.raises(InputError, match=r"different tokens: \S+a with ID 0, \S+b with ID 9"):
        batches_of({"shards": tmp_path / "a"}, {"shards": write_shards(tmp_path / "b", 900, end=9)})
    with pytest.raises(InputError, match="a: is 2 times in the same mixture"):
        batches_of({"shards": tmp_path / "a"}, {"shards": tmp_path / "a", "weight": 3})


def test_an_id_outside_the_vocabulary_names_its_shards(tmp_path):
    folder = write_shards(tmp_path / "a", 900, vocabulary=50_000)
    manifest = json.loads((folder / "manifest.json").read_text()) | {"vocabulary_size": 500}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    batches = batches_of({"shards": folder})
    with pytest.raises(InputError, match=r"a: training tokens .* contain ID \d+, but the vocabulary size is 500"):
        for step in range(10):
            batches.read(step, 0, 0, ranks=1, sequences=4)


def test_a_mixture_of_two_dtypes_keeps_large_ids(tmp_path):
    narrow, wide = (write_shards(tmp_path / name, 900, vocabulary=100_000) for name in ("narrow", "wide"))
    manifest = json.loads((wide / "manifest.json").read_text()) | {"dtype": "uint32"}
    (wide / "manifest.json").write_text(json.dumps(manifest))
    np.full(900, 70_000, "<u4").tofile(wide / "train-00000.bin")
    ids = batches_of({"shards": narrow}, {"shards": wide}).read(0, 0, 0, ranks=1, sequences=4)
    assert {int(row[0]) for row in ids if row[0] == row[1]} == {70_000}


def two_lengths(folder, until="50%"):
    return [
        {"until": until, "train": [{"shards": folder}]},
        {"train": [{"shards": folder}], "sequence_length": 4 * LENGTH},
    ]


def windows_of_steps(batches, steps, *, ranks=1, sequences=1):
    """Returns (first token, length) of each sequence in these steps, in training order, as read by the ranks."""
    found = []
    for step in steps:
        span = batches.data.windows[batches.stage_at(step)].sequence_length // LENGTH
        micro_steps = batches.ramp.sequences_at(step) // (span * sequences * ranks)
        for micro_step in range(micro_steps):
            for rank in range(ranks):
                ids = batches.read(step, micro_step, rank, ranks=ranks, sequences=sequences)
                found += [(int(row[0]), len(row) - 1) for row in ids]
    return found


def test_a_stage_with_longer_sequences_has_its_own_epoch(tmp_path):
    folder = write_shards(tmp_path / "a", 40 * LENGTH + 1)
    batches = batches_of(stages=two_lengths(folder), steps=10, sequences=8)
    first, second = windows_of_steps(batches, range(5)), windows_of_steps(batches, range(5, 10))
    assert sorted(first) == [(LENGTH * n, LENGTH) for n in range(40)], "the first stage is an epoch of short sequences"
    assert sorted(second) == [(4 * LENGTH * n, 4 * LENGTH) for n in range(10)], (
        "the second stage is an epoch of long sequences"
    )
    plain = batches_of({"shards": folder}, steps=10, sequences=8)
    assert first == windows_of_steps(plain, range(5)), "later stages must not change the order of the first stage"
    shared = windows_of_steps(batches, range(10), ranks=2)
    assert [window[0] for window in shared] == [window[0] for window in first + second], (
        "the order must not depend on the number of ranks"
    )
    assert batches.epochs_at(10) == {str(folder): 2.0}


def test_an_id_outside_the_vocabulary_is_found_in_longer_sequences(tmp_path):
    folder = write_shards(tmp_path / "a", 40 * LENGTH + 1)
    batches = batches_of(stages=two_lengths(folder), steps=2, sequences=40)
    batches.vocabulary_size = 36 * LENGTH + 1  # only the last of the ten long windows contains larger IDs
    with pytest.raises(InputError, match=f"training tokens {36 * LENGTH} to {40 * LENGTH + 1} contain ID"):
        batches.read(1, 0, 0, ranks=1, sequences=10)


@pytest.mark.parametrize("ramp_from", [1.0, 0.5])
@pytest.mark.parametrize("skipped", [[], [(8, 8)], [(36, 8)], [(44, 8), (56, 16)]])
def test_stages_with_another_length_start_with_a_step(tmp_path, ramp_from, skipped):
    """No sequence may be repeated or cross the boundary, even with a batch ramp."""
    folder = write_shards(tmp_path / "a", 400 * LENGTH + 1)
    batches = batches_of(
        stages=two_lengths(folder, "45%"), steps=12, sequences=8, skipped=skipped, ramp_from=ramp_from
    )
    found = windows_of_steps(batches, range(12))
    assert len(set(found)) == len(found)
    lengths = [length for _, length in found]
    assert lengths == sorted(lengths) and set(lengths) == {LENGTH, 4 * LENGTH}
    assert sum(lengths) == batches.ramp.total_sequences * LENGTH
    begin = batches.first_steps[1]
    assert batches.begins_segment(begin) and not batches.begins_segment(begin + 1)


def test_an_extended_run_keeps_earlier_stage_boundaries(tmp_path):
    folder = write_shards(tmp_path / "a", 2000 * LENGTH + 1)
    short = batches_of(stages=two_lengths(folder), steps=20, sequences=8)
    longer = batches_of(stages=two_lengths(folder), steps=40, sequences=8)
    assert (short.first_steps, longer.first_steps) == ([0, 10], [0, 20])
    passed = longer.passing(short.stage_starts, longer.first_sample(15))
    assert passed.first_steps == [0, 10]
    assert windows_of_steps(passed, range(20)) == windows_of_steps(short, range(20))
    still_to_come = longer.passing(short.stage_starts, longer.first_sample(10))
    assert still_to_come.first_steps == [0, 20], "no step of the second stage was taken, so its start may move"
    late = longer.passing([0], longer.first_sample(25))
    assert late.first_steps == [0, 25], "a stage whose start has passed must start now"


def test_max_epochs_includes_all_sequence_lengths(tmp_path):
    folder = write_shards(tmp_path / "a", 40 * LENGTH + 1)
    stages = two_lengths(folder)
    stages[1]["train"][0]["max_epochs"] = 1.5
    assert batches_of(stages=stages, steps=7, sequences=8).epochs_at(7) == {str(folder): pytest.approx(1.4)}
    with pytest.raises(InputError, match="used up"):
        batches_of(stages=stages, steps=10, sequences=8)


@pytest.mark.parametrize("until", ["0.1%", "99.9%"])
def test_a_stage_without_samples_is_rejected(tmp_path, until):
    easy, hard = (write_shards(tmp_path / name, 900) for name in ("easy", "hard"))
    stages = [{"until": until, "train": [{"shards": easy}]}, {"train": [{"shards": hard}]}]
    with pytest.raises(InputError, match=r"data.stages\[1\]: begins at sample .*, so one of them has no samples"):
        batches_of(stages=stages, steps=10)


def test_invalid_stages_are_rejected(tmp_path):
    folder, short = write_shards(tmp_path / "a", 4000), write_shards(tmp_path / "b", 3 * LENGTH)
    with pytest.raises(
        InputError, match=r"data.stages\[1\]: begins after 99 of 100 samples, but none of the run's 10"
    ):
        batches_of(stages=two_lengths(folder, "99%"), steps=10, sequences=10)
    with pytest.raises(InputError, match=r"48 training tokens, but one sequence needs 64 \+ 1; .* its stage's"):
        batches_of(stages=two_lengths(short))
    uneven = [{"until": 0.5, "train": [{"shards": folder}]}, {"train": [{"shards": folder}], "sequence_length": 40}]
    with pytest.raises(ValueError, match=r"must be a multiple of sequence_length, 16 \(got \[16, 40\]\)"):
        batches_of(stages=uneven)
