"""Tests for checkpoint retention, damage detection, tensors split across files, and atomic commits."""

import errno
import json
import os
import shutil
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from pretrain import config
from pretrain.checkpoint.checkpoints import (
    Checkpoints,
    NoValidCheckpointError,
    load_saved,
    require_space,
    steps_to_keep,
)
from pretrain.checkpoint.tensor_files import SavedTensors, plan_files, write_group
from pretrain.errors import or_exit
from pretrain.files import FORMAT, commit, damage, write_durably
from pretrain.parallel.ranks import Ranks
from pretrain.parallel.tensor_group import TensorGroup
from pretrain.registry import import_file
from pretrain.runs.run_folder import latest_step
from support.save_and_die import describe, ranks_of, save, tensors_of

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.ones(3), "b.weight": torch.zeros(4, 4)}


@pytest.fixture
def checkpoint(tmp_path):
    """Commits a folder with a model, an optimizer and a trainer state."""
    unfinished = tmp_path / ".saving-step-00000004"
    unfinished.mkdir()
    files = write_group(unfinished, "model", TensorGroup.of(TENSORS), 0, 1)
    moments = {f"{name}.exp_avg": tensor + 1 for name, tensor in TENSORS.items()}
    files |= write_group(unfinished, "optimizer", TensorGroup.of(moments), 0, 1)
    (unfinished / "trainer_state.json").write_text("{}")
    commit(unfinished, tmp_path / "step-00000004", files)
    return tmp_path / "step-00000004"


def test_a_committed_checkpoint_is_complete(checkpoint):
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
        (flip_a_bit, "does not match its sha256"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes instead of"),
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), "does not match its sha256"),
    ],
)
def test_damage_is_detected_and_named(checkpoint, name, harm, message):
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


def test_imports_from_a_checkpoint_do_not_damage_it(checkpoint, monkeypatch):
    (checkpoint / "__pycache__").mkdir()
    (checkpoint / "__pycache__/mine.cpython-313.pyc").touch()
    assert damage(checkpoint) == []
    (checkpoint / "parts").mkdir()
    (checkpoint / "parts/mine.py").touch()
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    import_file(checkpoint / "parts/mine.py", "imported_from_a_checkpoint")
    assert not (checkpoint / "parts/__pycache__").exists() and not sys.dont_write_bytecode


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
    assert kept(keep_last=1, keep_every=200) == {600, 200, 400}


def test_large_groups_are_split_by_tensor_with_an_index(tmp_path, monkeypatch):
    group = TensorGroup.of(TENSORS)
    assert plan_files(group, "model") == {"model.safetensors": list(TENSORS)}
    monkeypatch.setattr("pretrain.checkpoint.tensor_files.MAX_FILE_BYTES", 64)
    plan = plan_files(group, "model")
    assert plan == {
        "model-00001-of-00002.safetensors": ["a.weight", "a.bias"],
        "model-00002-of-00002.safetensors": ["b.weight"],
    }
    shares = [write_group(tmp_path, "model", group, rank, 2) for rank in range(2)]
    assert [list(share) for share in shares] == [[name] for name in plan], "each rank must write its own file"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["b.weight"] == "model-00002-of-00002.safetensors"
    assert len(SavedTensors(tmp_path, "model")) == 3


def test_a_file_that_cannot_be_written_does_not_leave_the_other_ranks_alone(tmp_path, monkeypatch):
    """The other ranks would wait in the collective that gathers the next tensor."""
    gathered = []
    group = TensorGroup.of(TENSORS)
    group = replace(group, gather=lambda name: gathered.append(name) or TENSORS[name])
    monkeypatch.setattr("pretrain.checkpoint.tensor_files.MAX_FILE_BYTES", 24)
    first, *others = plan_files(group, "model")
    (tmp_path / first).mkdir()
    with pytest.raises((OSError, SafetensorError)):
        write_group(tmp_path, "model", group, 0, 1)
    assert sorted(gathered) == sorted(TENSORS) and len(others) == 2


def test_loading_a_large_checkpoint_in_a_rollback_is_no_hang(checkpoint):
    (checkpoint / "trainer_state.json").write_text("{}")
    beats = []
    saved = load_saved(checkpoint, lambda: beats.append(1))
    assert beats == [] and [saved.model[name].shape for name in TENSORS] and len(beats) == len(TENSORS)


def test_saving_the_same_step_again_replaces_it(checkpoint):
    unfinished = checkpoint.with_name(".saving-again")
    unfinished.mkdir()
    files = write_group(unfinished, "model", TensorGroup.of({"a.weight": torch.zeros(2)}), 0, 1)
    leftover = checkpoint.with_name(f".removing-{checkpoint.name}")  # from a replacement that was killed
    leftover.mkdir()
    (leftover / "model.safetensors").touch()
    commit(unfinished, checkpoint, files)
    assert damage(checkpoint) == [] and set(SavedTensors(checkpoint, "model")) == {"a.weight"}
    assert [path.name for path in checkpoint.parent.iterdir()] == [checkpoint.name]


def test_small_files_are_replaced_not_overwritten(tmp_path):
    path = tmp_path / "LATEST"
    write_durably(path, "one")
    inode = os.stat(path).st_ino
    write_durably(path, "two")
    assert path.read_text() == "two" and os.stat(path).st_ino != inode


def test_a_small_file_on_a_full_disk_is_named_and_removed(tmp_path, capsys):
    (tmp_path / ".LATEST.new").symlink_to("/dev/full")
    with pytest.raises(SystemExit) as ended:
        or_exit(lambda: write_durably(tmp_path / "LATEST", "one"))
    assert ended.value.code == 2 and list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == f"{tmp_path}/LATEST: No space left on device; free up disk space\n"


def test_a_full_disk_is_detected_before_the_save(tmp_path):
    with pytest.raises(OSError, match=r"a checkpoint needs 1,000,000.0 TB, but .* has .*B free"):
        require_space(tmp_path, 10**18)


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
def test_a_background_save_keeps_the_tensors_from_its_start(tmp_path, monkeypatch, device):
    """Tensors changed by later steps must not affect a pending save; the next save reuses its memory."""
    may_write, places = threading.Event(), []

    def write_late(tensors, path, **named):
        may_write.wait(10)
        places.append({name: tensor.data_ptr() for name, tensor in tensors.items()})
        save_file(tensors, path, **named)

    monkeypatch.setattr("pretrain.checkpoint.checkpoints.save_file", write_late)
    checkpoints = Checkpoints(tmp_path, ranks_of(), config.Checkpoint(async_save=True))
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


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc to see which pages were read")
def test_a_rank_reads_its_part_of_a_saved_tensor(tmp_path):
    """Files are memory-mapped, so one of eight ranks reads 4 of 32 MB, plus readahead."""
    save_file({"a": torch.ones(2**13, 2**10)}, tmp_path / "model.safetensors")
    whole = SavedTensors(tmp_path, "model")["a"]

    def megabytes_read() -> float:
        _, _, mapping = Path("/proc/self/smaps").read_text().partition(str(tmp_path))
        return int(mapping.partition("Rss:")[2].split()[0]) / 1024

    assert whole[2**12 : 2**12 + 2**10].sum() == 2**20 and 4 <= megabytes_read() < 16
    assert whole.sum() == 2**23 and megabytes_read() >= 32


@pytest.fixture
def run(tmp_path):
    """Returns a run with checkpoints of steps 1 and 2."""
    for step in (1, 2):
        save(tmp_path / "run", ranks_of(), step)
    return tmp_path / "run"


def newest(run):
    """Returns the checkpoint selected at startup, and the messages."""
    said = []
    checkpoints = Checkpoints(run, ranks_of(), config.Checkpoint(keep_last=1))
    return checkpoints.newest_valid(said.append), said


OTHER_NAMES = (
    "step-00000002.bak",
    "step-00000002 (copy)",
    "step-2",
    "step-000000002",
    "step-old",
    "step-0000000²",
    "2",
)


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_an_entry_of_another_name_is_left_alone(run, name):
    shutil.copytree(run / "checkpoints/step-00000002", run / "checkpoints" / name)
    assert newest(run) == (run / "checkpoints/step-00000002", [])
    checkpoints = Checkpoints(run, ranks_of(), config.Checkpoint(keep_last=1))
    for step in (3, 4):
        checkpoints.save(step, {"state": {"step": step}}, tensors_of(step), describe)
    checkpoints.wait()
    assert [save.problem for save in (checkpoints.finished(), checkpoints.finished())] == [None, None]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == sorted(["LATEST", "step-00000004", name])
    checkpoints.discard_after(1)
    assert (run / "checkpoints" / name / "model.safetensors").exists()


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_link_or_file_in_place_of_a_checkpoint_is_handled(run, tmp_path, is_folder):
    """A link or a file must be renamed or removed, but a link's target must be kept."""
    place = run / "checkpoints/step-00000001"
    place.rename(tmp_path / "elsewhere")
    if is_folder:
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.write_text("a file")
    checkpoints = Checkpoints(run, ranks_of(), config.Checkpoint(keep_last=1))
    checkpoints.save(3, {"state": {"step": 3}}, tensors_of(3), describe)
    checkpoints.wait()
    assert checkpoints.finished().problem is None
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["LATEST", "step-00000003"]
    assert (tmp_path / "elsewhere/model.safetensors").exists()


def test_a_renamed_checkpoint_is_not_the_one_of_its_name(run):
    (run / "checkpoints/step-00000002").rename(run / "checkpoints/step-00000010")
    chosen, (said,) = newest(run)
    assert chosen.name == "step-00000001"
    assert "step-00000010 cannot be used: trainer_state.json is from step 2; to use it, rename the folder" in said
    assert (run / "checkpoints/damaged-step-00000010").is_dir()
    with pytest.raises(NoValidCheckpointError, match="is from step 1"):
        (run / "checkpoints/step-00000001").rename(run / "checkpoints/step-00000020")
        Checkpoints(run, ranks_of(), config.Checkpoint()).valid(run / "checkpoints/step-00000020")


def seal_again(folder):
    """Writes a new manifest for the current files."""
    (folder / "MANIFEST.json").unlink()
    again = folder.rename(folder.with_name(".saving-again"))
    commit(again, folder, {})


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("tensors", ["model", "optimizer"])
def test_a_manifest_without_the_tensors_of_a_group_is_damage(run, tensors, recorded):
    """Checkpoints from earlier versions don't record which groups they contain."""
    folder = run / "checkpoints/step-00000002"
    (folder / f"{tensors}.safetensors").unlink()
    if not recorded:
        (folder / "trainer_state.json").write_text('{"state": {"step": 2}}')
    seal_again(folder)
    chosen, (said,) = newest(run)
    assert chosen.name == "step-00000001" and f"its {tensors} tensors are missing" in said


@pytest.mark.parametrize("state", ["", "[]", "{}", '{"state": []}', '{"state": {"step": "2"}}'])
def test_a_state_without_a_step_is_damage(run, state):
    (run / "checkpoints/step-00000002/trainer_state.json").write_text(state)
    seal_again(run / "checkpoints/step-00000002")
    chosen, (said,) = newest(run)
    assert chosen.name == "step-00000001" and "contains no step" in said


def test_an_optimizer_without_state_is_not_damage(run):
    """A run may stop before its first update, or skip all updates."""
    groups = tensors_of(3) | {"optimizer": TensorGroup.of({})}
    checkpoints = Checkpoints(run, ranks_of(), config.Checkpoint())
    checkpoints.save(3, {"state": {"step": 3}}, groups, describe)
    checkpoints.wait()
    assert newest(run) == (run / "checkpoints/step-00000003", [])
    folder = run / "checkpoints/step-00000003"
    (folder / "trainer_state.json").write_text(
        '{"state": {"step": 3, "skipped_steps": 3}}'
    )  # as in an earlier version
    seal_again(folder)
    assert newest(run) == (run / "checkpoints/step-00000003", [])


@pytest.mark.parametrize("latest", [b"\xff\xfe\x00", b"", b"step-"])
def test_latest_is_repaired_and_garbage_does_not_start_from_scratch(run, latest):
    (run / "checkpoints/LATEST").write_bytes(latest)
    (run / "checkpoints/step-00000002/model.safetensors").write_bytes(b"")
    assert newest(run)[0].name == "step-00000001"
    assert latest_step(run) == 2, "a mirror deletes checkpoints after LATEST, and may have step 2 intact"
    shutil.rmtree(run / "checkpoints/damaged-step-00000002")
    (run / "checkpoints/LATEST").write_bytes(latest)
    for folder in (run / "checkpoints").glob("step-*"):
        shutil.rmtree(folder)
    with pytest.raises(NoValidCheckpointError, match="LATEST is unreadable") as stop:
        newest(run)
    assert stop.value.exit_code == 17


def test_a_removed_file_that_nfs_keeps_does_not_prevent_the_start(tmp_path, monkeypatch):
    leftover = tmp_path / "checkpoints/.removing-step-00000005"
    leftover.mkdir(parents=True)

    def busy(path):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    monkeypatch.setattr("pretrain.checkpoint.checkpoints.delete", busy)
    assert Checkpoints(tmp_path, Ranks(), config.Checkpoint()).newest_valid(print) is None


def test_a_log_of_checkpoints_that_are_gone_is_no_fresh_start(tmp_path):
    """A run that ended before its first checkpoint starts again, but missing checkpoints must be an error."""

    def log(*events):
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.writelines(json.dumps(event) + "\n" for event in events)

    assert newest(tmp_path) == (None, [])
    log({"event": "start", "step": 0}, {"event": "train", "step": 1}, {"event": "checkpoint"}, {"event": "end"})
    log({"event": "checkpoint", "step": 0})  # stopped before its first step
    assert newest(tmp_path) == (None, [])
    log({"event": "checkpoint", "step": 4, "path": "step-00000004"})
    with pytest.raises(NoValidCheckpointError, match=r"metrics.jsonl lists step 4 as saved, but it is missing.*rem"):
        newest(tmp_path)
