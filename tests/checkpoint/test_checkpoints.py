"""Checkpoints: what stays, what is found damaged, tensors spread over files, and a commit that is all or none."""

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pretrain import config
from pretrain.checkpoint.checkpoints import Checkpoints, load_saved, require_space, steps_to_keep
from pretrain.checkpoint.tensor_files import SavedTensors, plan_files, write_group
from pretrain.files import FORMAT, commit, damage, write_durably
from pretrain.parallel.tensor_group import TensorGroup
from support.save_and_die import ranks_of

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.ones(3), "b.weight": torch.zeros(4, 4)}


@pytest.fixture
def checkpoint(tmp_path):
    """A committed folder with a model, an optimizer and a trainer state."""
    unfinished = tmp_path / ".saving-step-00000004"
    unfinished.mkdir()
    files = write_group(unfinished, "model", TensorGroup.of(TENSORS), 0, 1)
    moments = {f"{name}.exp_avg": tensor + 1 for name, tensor in TENSORS.items()}
    files |= write_group(unfinished, "optimizer", TensorGroup.of(moments), 0, 1)
    (unfinished / "trainer_state.json").write_text("{}")
    commit(unfinished, tmp_path / "step-00000004", files)
    return tmp_path / "step-00000004"


def test_a_committed_checkpoint_is_whole(checkpoint):
    assert damage(checkpoint) == []
    assert not list(checkpoint.parent.glob(".*"))
    saved = SavedTensors(checkpoint, "model")
    assert set(saved) == set(TENSORS)
    assert all(torch.equal(saved[name], tensor) for name, tensor in TENSORS.items())
    manifest = json.loads((checkpoint / "MANIFEST.json").read_text())
    assert set(manifest["files"]) == {"model.safetensors", "optimizer.safetensors", "trainer_state.json"}


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "trainer_state.json"])
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (flip_a_bit, "does not have the sha256 that was written"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes instead of"),
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), "does not have the sha256 that was written"),
    ],
)
def test_damage_is_found_and_named(checkpoint, name, harm, message):
    harm(checkpoint / name)
    (problem,) = damage(checkpoint)
    assert problem.startswith(name) and message in problem


def test_foreign_and_unfinished_folders_are_damaged(checkpoint):
    (checkpoint / "extra.bin").write_bytes(b"x")
    assert damage(checkpoint) == ["extra.bin is not in the manifest"]
    (checkpoint / "MANIFEST.json").write_text("{")
    assert "cannot be read" in damage(checkpoint)[0]
    (checkpoint / "MANIFEST.json").write_text(json.dumps({**FORMAT, "version": 2, "files": {}}))
    assert "version 1" in damage(checkpoint)[0]
    (checkpoint / "MANIFEST.json").unlink()
    assert damage(checkpoint) == ["MANIFEST.json is missing"]


def test_each_rank_checks_its_share(checkpoint):
    flip_a_bit(checkpoint / "optimizer.safetensors")
    found = [damage(checkpoint, rank, 3) for rank in range(3)]
    assert sorted(map(len, found)) == [0, 0, 1]


def test_retention_keeps_the_newest_the_best_and_milestones():
    losses = {100: 3.0, 200: 2.0, 300: 2.5, 400: None, 500: 2.6, 600: 2.7}

    def kept(**settings) -> set[int]:
        return steps_to_keep(config.Checkpoint(**settings), losses)

    assert kept(keep_last=2) == {500, 600}
    assert kept(keep_last=1, keep_best=2) == {600, 200, 300}
    assert kept(keep_last=1, milestones_every=200) == {600, 200, 400}


def test_large_groups_are_split_by_tensor_with_an_index(tmp_path, monkeypatch):
    group = TensorGroup.of(TENSORS)
    assert plan_files(group, "model") == {"model.safetensors": list(TENSORS)}
    plan = plan_files(group, "model", max_file_bytes=40)
    assert plan == {
        "model-00001-of-00002.safetensors": ["a.weight", "a.bias"],
        "model-00002-of-00002.safetensors": ["b.weight"],
    }
    monkeypatch.setattr("pretrain.checkpoint.tensor_files.plan_files", lambda group, prefix: plan)
    shares = [write_group(tmp_path, "model", group, rank, 2) for rank in range(2)]
    assert [list(share) for share in shares] == [[name] for name in plan], "each rank wrote its own file"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["b.weight"] == "model-00002-of-00002.safetensors"
    assert len(SavedTensors(tmp_path, "model")) == 3


def test_saving_the_same_step_again_replaces_it_whole(checkpoint):
    unfinished = checkpoint.with_name(".saving-again")
    unfinished.mkdir()
    files = write_group(unfinished, "model", TensorGroup.of({"a.weight": torch.zeros(2)}), 0, 1)
    commit(unfinished, checkpoint, files)
    assert damage(checkpoint) == [] and set(SavedTensors(checkpoint, "model")) == {"a.weight"}
    assert [path.name for path in checkpoint.parent.iterdir()] == [checkpoint.name]


def test_small_files_are_replaced_not_overwritten(tmp_path):
    path = tmp_path / "LATEST"
    write_durably(path, "one")
    inode = os.stat(path).st_ino
    write_durably(path, "two")
    assert path.read_text() == "two" and os.stat(path).st_ino != inode


def test_a_full_disk_is_noticed_before_the_save(tmp_path):
    with pytest.raises(OSError, match=r"a checkpoint needs .* GB, and .* has .* GB free"):
        require_space(tmp_path, 10**18)


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
def test_a_save_in_the_background_keeps_what_was_there_when_it_began(tmp_path, monkeypatch, device):
    """The next steps change the tensors before anything is written; the next save goes through the same memory."""
    may_write, places = threading.Event(), []

    def write_late(tensors, path, **named):
        may_write.wait(10)
        places.append({name: tensor.data_ptr() for name, tensor in tensors.items()})
        save_file(tensors, path, **named)

    monkeypatch.setattr("pretrain.checkpoint.checkpoints.save_file", write_late)
    checkpoints = Checkpoints(tmp_path, ranks_of(), config.Checkpoint(in_background=True))
    transposed = torch.arange(6.0, device=device).view(2, 3).t()
    tensors = {"a.weight": transposed, "a.bias": torch.ones(3, device=device)}
    for step in (1, 2):
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        groups = {
            "model": TensorGroup.of(tensors),
            "optimizer": TensorGroup.of({"a.bias.step": torch.tensor(float(step))}),
        }
        checkpoints.save(step, {}, groups, lambda folder: None)
        for tensor in tensors.values():
            tensor.add_(1)
        may_write.set()
        checkpoints.wait()
        may_write.clear()
        assert checkpoints.finished().problem is None
        saved = load_saved(tmp_path / f"checkpoints/step-{step:08d}")
        assert all(torch.equal(saved.model[name], tensor.cpu()) for name, tensor in before.items())
        assert saved.optimizer["a.bias.step"] == step
    assert len(places) == 4 and places[:2] == places[2:]


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no way to see which pages of a file were read")
def test_a_rank_reads_its_part_of_a_saved_tensor(tmp_path):
    """Files are mapped, not read: of 32 MB a rank of eight touches 4, and with that what the system reads ahead."""
    save_file({"a": torch.ones(2**13, 2**10)}, tmp_path / "model.safetensors")
    whole = SavedTensors(tmp_path, "model")["a"]

    def megabytes_read() -> float:
        _, _, mapping = Path("/proc/self/smaps").read_text().partition(str(tmp_path))
        return int(mapping.partition("Rss:")[2].split()[0]) / 1024

    assert whole[2**12 : 2**12 + 2**10].sum() == 2**20 and 4 <= megabytes_read() < 16
    assert whole.sum() == 2**23 and megabytes_read() >= 32
