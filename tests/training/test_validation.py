"""Tests for the loss per position, where each token must count only in its own range, and for refused sources."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pretrain.config import Data, WindowSpec
from pretrain.data.batches import read_windows, windows_of
from pretrain.errors import InputError
from pretrain.training.metrics import finite
from pretrain.training.validation import by_position, open_validation, position_ranges, positions_of, sums_by_range
from support.numbered_shards import write_shards


@pytest.mark.parametrize(
    ("length", "names"),
    [
        (64, ["0-63"]),
        (128, ["0-127"]),
        (129, ["0-127", "128-128"]),
        (1000, ["0-127", "128-255", "256-511", "512-999"]),
    ],
)
def test_ranges_double_up_to_the_length(length, names):
    ranges = position_ranges(length)
    assert [f"{r.start}-{r.stop - 1}" for r in ranges] == names
    assert [position for r in ranges for position in r] == list(range(length))


@pytest.mark.parametrize("restarts", [False, True])
def test_every_token_counts_in_one_range(restarts):
    rows, length = 3, 300
    losses = torch.rand(rows * length, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(length).repeat(rows, 1)
    if restarts:  # a second document with 100 tokens
        positions[:, 200:] -= 200
    ranges = position_ranges(length)
    batch = {"input_ids_BT": torch.zeros(rows, length)} | ({"position_ids": positions} if restarts else {})
    alone = SimpleNamespace(sequence_parts=1, part=0)
    halves = [positions_of(batch, SimpleNamespace(sequence_parts=2, part=part)) for part in (0, 1)]
    assert (np.hstack([half.reshape(rows, -1) for half in halves]) == positions.numpy()).all()
    sums = sums_by_range(losses, positions_of(batch, alone), ranges)
    found = by_position(ranges, sums.tolist())
    for r in ranges:
        here = torch.tensor([int(p) in r for p in positions.flatten()])
        name = f"{r.start}-{r.stop - 1}"
        assert found["tokens_by_position"].get(name, 0) == here.sum()
        if here.any():
            assert found["loss_by_position"][name] == pytest.approx(losses[here].double().mean().item())
    assert ("256-299" in found["loss_by_position"]) == (not restarts), "with two documents, neither is that long"


def test_a_nan_loss_becomes_null_in_the_log():
    assert finite(by_position([range(2)], [float("nan"), 2.0]))["loss_by_position"] == {"0-1": None}


def test_both_splits_of_a_folder_in_the_current_folder_are_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(write_shards(tmp_path / "a", 900, validation=300).parent)
    sources = [{"shards": "a"}, {"shards": "a", "split": "train"}]
    readers = open_validation(Data(train=[{"shards": "a"}], validation=sources, sequence_length=16))
    assert {name: reader.split for name, reader in readers.items()} == {"a": "validation", "a (2)": "train"}


def test_a_source_with_another_tokenizer_is_refused(tmp_path):
    train = write_shards(tmp_path / "a", 900, validation=900)
    other = write_shards(tmp_path / "b", 900, validation=900, tokenizer="u")
    sources = [{"shards": train}, {"shards": other}]
    with pytest.raises(InputError, match=r"validation: \S+b was prepared with a different tokenizer \(u\)") as caught:
        open_validation(Data(train=[{"shards": train}], validation=sources, sequence_length=16))
    assert len(caught.value.problems) == 1


def test_an_id_outside_the_vocabulary_names_its_shards(tmp_path):
    folder = write_shards(tmp_path / "a", 900, validation=900, vocabulary=500)
    np.full(900, 500, "<u2").tofile(folder / "validation-00000.bin")
    (reader,) = open_validation(Data(train=[{"shards": folder}], sequence_length=16)).values()
    window = WindowSpec(16, True)
    with pytest.raises(InputError, match=r"a: split validation contains token ID 500 \(between tokens 0 and 17\)"):
        read_windows(reader, windows_of(reader, window, 4), window, rows=4)
