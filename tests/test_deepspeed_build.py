"""Tests for DeepSpeed's build lock: a killed build doesn't block the next run, and a running build isn't disturbed."""

import os
import shutil
import sys
from pathlib import Path

from torch.utils.file_baton import FileBaton

from pretrain.deepspeed_build import CACHE, prepare_extensions_folder


def test_an_unheld_lock_is_removed_and_a_held_one_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in ("killed", "building"):
        (tmp_path / name).mkdir()
    (tmp_path / "killed/lock").touch()
    baton = FileBaton(str(tmp_path / "building/lock"))
    assert baton.try_acquire()
    try:
        assert prepare_extensions_folder() == tmp_path
        assert not (tmp_path / "killed/lock").exists()
        assert (tmp_path / "building/lock").exists()
    finally:
        baton.release()
    assert FileBaton(str(tmp_path / "killed/lock")).try_acquire(), "the next build must be able to start"


def test_the_folder_is_the_projects_own(monkeypatch, tmp_path):
    monkeypatch.setattr("pretrain.deepspeed_build.CACHE", tmp_path / CACHE.name)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    folder = prepare_extensions_folder()
    assert folder.is_relative_to(tmp_path) and os.environ["TORCH_EXTENSIONS_DIR"] == str(folder)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")


def test_ninja_is_found_in_an_environment_that_is_not_activated(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    prepare_extensions_folder()
    assert Path(shutil.which("ninja")).parent == Path(sys.executable).parent
