"""Tests for saves that fail, or are killed, delayed or damaged later: a complete checkpoint always exists."""

import json
import os
import pickle
import shutil
import tempfile
import time
from pathlib import Path

import pytest
import torch

from pretrain.checkpoint.checkpoints import Checkpoints, NoValidCheckpointError, load_saved
from pretrain.config import Checkpoint
from pretrain.files import damage, seal
from support.faults import EVERYTHING, end_of, kill_everything, launch_with_faults, tell, wait_until
from support.project import events, losses, run_script
from support.save_and_die import ranks_of, save, tensors_of

FILES = ["model.safetensors", "optimizer.safetensors", "trainer_state.json", "MANIFEST.json"]
"""The files read on resume. Checkpoints also contain the model's config.json."""


@pytest.fixture
def in_memory():
    """An in-memory folder, where fsync is free. These tests only depend on the order of operations."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Path(folder)


def test_a_process_killed_at_any_moment_of_a_save_and_a_prune(in_memory):
    """A complete checkpoint survives a kill at any moment. FAULTS=all tests all of the more than 200 moments."""
    every = 1 if EVERYTHING else 11
    run = run_script("tests/support/save_and_die.py", in_memory, every, timeout=550)
    results = json.loads(run.stdout.splitlines()[-1])
    assert [problems for _, _, _, problems in results] == [[], [], []]
    moments = sum(moments for _, _, moments, _ in results)
    assert moments >= 200 // every
    tell("7, 8", f"SIGKILL at {moments} moments of a save and a prune, 1 and 2 ranks", "0 torn, 0 without a whole one")


@pytest.fixture
def run(tmp_path) -> Path:
    """A run folder with checkpoints at steps 1 and 2."""
    for step in (1, 2):
        save(tmp_path / "run", ranks_of(), step)
    return tmp_path / "run"


def chosen(run: Path) -> tuple[Path | None, list[str]]:
    """Returns the checkpoint that a resumed run would load, and the log messages."""
    log: list[str] = []
    return Checkpoints(run, ranks_of(), Checkpoint()).newest_valid(log.append), log


def flip(path: Path, byte: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def zero_a_page(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[:4096] = bytes(min(4096, len(content)))
    path.write_bytes(content)


HARMS = {
    "flip in the header": lambda path: flip(path, 12, 3),
    "flip in the middle": lambda path: flip(path, path.stat().st_size // 2),
    "flip at the end": lambda path: flip(path, -1, 7),
    "zero a page": zero_a_page,
    "truncate": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "delete": Path.unlink,
    "a folder in its place": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("harm", HARMS)
def test_harm_to_a_file_is_found_before_use_and_named(run, tmp_path, harm):
    for file in (*FILES, "config.json"):
        spoilt = shutil.copytree(run, tmp_path / file)
        HARMS[harm](spoilt / "checkpoints/step-00000002" / file)
        folder, log = chosen(spoilt)
        assert folder.name == "step-00000001"
        assert len(log) == 1 and "renamed to damaged-step-00000002" in log[0]
        # A flipped bit in a hash in the manifest looks like a damaged file.
        assert file in log[0] or (file == "MANIFEST.json" and "flip" in harm)
    tell("10, 11", f"{harm}, in each of {len(FILES) + 1} files", "found before use, named; the one before is taken")


def test_every_bit_of_a_manifest_counts(run):
    """A flipped bit can also change keys and types, or produce invalid file names."""
    folder = run / "checkpoints/step-00000002"
    manifest = folder / "MANIFEST.json"
    size = manifest.stat().st_size
    step = 1 if EVERYTHING else 9
    for byte in range(0, size, step):
        for bit in range(8):
            flip(manifest, byte, bit)
            assert damage(folder), (byte, bit)
            flip(manifest, byte, bit)
    assert damage(folder) == []
    tell("10", f"every bit of {len(range(0, size, step))} bytes of a manifest, one at a time", "all found")


def test_bits_of_the_tensors(run):
    folder, flips = run / "checkpoints/step-00000002", 0
    for file in FILES[:3]:
        for byte in range(0, (folder / file).stat().st_size, 1 if EVERYTHING else 41):
            flip(folder / file, byte, byte % 8)
            assert damage(folder) == [f"{file} does not match its sha256"]
            flip(folder / file, byte, byte % 8)
            flips += 1
    tell("10", f"one bit of each of {flips} bytes of the other files", "all found, the file named")


def test_added_files_and_an_emptied_folder(run):
    folder = run / "checkpoints/step-00000002"
    (folder / "added.bin").write_bytes(b"x")
    assert "added.bin is not in the manifest" in chosen(run)[1][0]
    shutil.rmtree(run / "checkpoints/step-00000001")
    (run / "checkpoints/step-00000001").mkdir()
    with pytest.raises(NoValidCheckpointError, match="2 damaged"):
        chosen(run)


def test_lost_checkpoints_are_no_fresh_start(run):
    for folder in (run / "checkpoints").glob("step-*"):
        shutil.rmtree(folder)
    with pytest.raises(NoValidCheckpointError, match="LATEST points to step-00000002, which is missing"):
        chosen(run)
    assert chosen(run.with_name("another run")) == (None, [])


class Malicious:
    """An object that creates a file when unpickled."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return Path.touch, (self.canary,)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_pickle_in_place_of_a_file_is_not_executed(run, tmp_path, sealed):
    """A pickle isn't executed, even if its hash is in the manifest."""
    for file in FILES:
        assert_a_pickle_is_refused(shutil.copytree(run, tmp_path / file), file, sealed, tmp_path / "canary")
    tell("23", f"a pickle as each of {len(FILES)} files{', with its hash' if sealed else ''}", "not executed")


def assert_a_pickle_is_refused(run, file, sealed, canary):
    folder = run / "checkpoints/step-00000002"
    if sealed:
        torch.save(Malicious(canary), folder / file)
    else:
        (folder / file).write_bytes(pickle.dumps(Malicious(canary)))
    if sealed and file != "MANIFEST.json":
        manifest = json.loads((folder / "MANIFEST.json").read_text())
        manifest["files"][file] = seal(folder / file)
        (folder / "MANIFEST.json").write_text(json.dumps(manifest))
        if file == "trainer_state.json":  # the step is unknown without it
            assert chosen(run)[0].name == "step-00000001"
            assert not canary.exists()
            return
        assert chosen(run)[0] == folder
        with pytest.raises(NoValidCheckpointError):
            load_saved(folder)
    else:
        assert chosen(run)[0].name == "step-00000001"
    assert not canary.exists()


def test_everything_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """A power failure, unlike SIGKILL, loses unsynced data."""
    log, fsync, rename = [], os.fsync, Path.rename

    def logged_fsync(file):
        log.append(Path(os.readlink(f"/proc/self/fd/{file}")))
        fsync(file)

    def logged_rename(path, to):
        log.append((path, to))
        return rename(path, to)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(Path, "rename", logged_rename)
    save(tmp_path, ranks_of(), 1)
    unfinished, final = tmp_path / "checkpoints/.saving-step-00000001", tmp_path / "checkpoints/step-00000001"
    published = log.index((unfinished, final))
    synced = {entry for entry in log[:published] if isinstance(entry, Path)}
    synced |= {entry[1] for entry in log[:published] if isinstance(entry, tuple) and entry[0] in synced}
    assert {unfinished / path.name for path in final.iterdir()} | {unfinished} <= synced
    assert log[published + 1] == final.parent, "the parent folder must be synced right after the rename"
    latest = next(entry for entry in log if isinstance(entry, tuple) and entry[1].name == "LATEST")
    assert log.index(latest) > published


@pytest.mark.parametrize("error", [MemoryError("no"), ValueError("what"), OSError(28, "No space left on device")])
def test_a_writer_that_fails_in_any_way_is_a_failed_save(run, monkeypatch, error):
    def refuse(*arguments, **named):
        raise error

    monkeypatch.setattr("pretrain.checkpoint.checkpoints.save_file", refuse)
    checkpoints = Checkpoints(run, ranks_of(), Checkpoint())
    checkpoints.newest_valid(print)
    checkpoints.save(3, {}, tensors_of(3), lambda folder: None)
    checkpoints.wait()
    assert type(error).__name__ in checkpoints.finished().problem and checkpoints.last_step == 2
    assert not list((run / "checkpoints").glob(".*"))


def arguments(recipe, run, steps=20):
    return ["--config", recipe, "--output", run, "--budget.steps", steps, "--validation.every_steps", 50]


def test_a_disk_that_refuses_costs_a_checkpoint_and_no_step(recipe, tmp_path):
    """Disk-full and read-only errors cost a checkpoint but no training step, and later checkpoints are saved."""
    faults = [
        {"where": "write", "nth": 1, "what": "ENOSPC", "rank": 1},
        {"where": "write", "nth": 2, "what": "EROFS", "rank": 0},
        {"where": "mkdir", "nth": 3, "what": "ENOSPC", "rank": 0},
    ]
    run = launch_with_faults(tmp_path / "notes", "ddp", 2, *arguments(recipe, tmp_path / "run"), faults=faults)
    assert run.code == 0, run.output
    warnings = {event["step"]: event["message"] for event in events(tmp_path / "run", "warning")}
    assert {4, 8, 12} <= set(warnings)
    assert "No space left on device" in warnings[4] and "Read-only file system" in warnings[8]
    assert all("earlier checkpoints are unaffected" in warnings[step] for step in (4, 8, 12))
    assert [event["step"] for event in events(tmp_path / "run", "checkpoint")] == [16, 20]
    assert sorted(losses(tmp_path / "run")) == list(range(1, 21)), "no step may be lost"
    assert not list((tmp_path / "run/checkpoints").glob(".*"))
    tell("13, 14", "ENOSPC on one rank, EROFS on the other, ENOSPC for the folder", "3 warnings, no step lost")


def test_a_rank_that_writes_late_and_a_kill_meanwhile(recipe, tmp_path):
    """LATEST still points to the old checkpoint while one rank is still writing. With FAULTS=all, the run resumes from
    it."""
    run, notes = tmp_path / "run", tmp_path / "notes"

    def kill_while_it_is_late(process):
        wait_until((notes / "fault-0").exists, process)
        time.sleep(1)
        assert (run / "checkpoints/LATEST").read_text() == "step-00000004"
        kill_everything(process, notes)

    late = [{"where": "write", "nth": 2, "what": "sleep", "seconds": 600, "rank": 1}]
    more = arguments(recipe, run, steps=100_000)
    launch_with_faults(notes, "ddp", 2, *more, faults=late, meanwhile=kill_while_it_is_late)
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == [".saving-step-00000008", "LATEST", "step-00000004"]
    tell("9", "a rank writes minutes late, SIGKILL to all after 1 s", "LATEST is the old one")
    if not EVERYTHING:
        return
    stop = [{"where": "read", "step": 9, "what": "SIGTERM", "to": "launcher", "rank": 0}]
    again = launch_with_faults(notes.with_name("again"), "ddp", 2, *more, faults=stop)
    assert events(run, "resume")[0]["step"] == 4 and end_of(run)["code"] == 75, again.output
    assert not list((run / "checkpoints").glob(".*"))
