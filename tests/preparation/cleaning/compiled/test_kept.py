"""What is compiled is kept on disk for the sources that it was made of."""

import os
import time
from pathlib import Path

import numpy as np

from pretrain_tools.preparation.cleaning.compiled import item_index, kept, words
from pretrain_tools.preparation.cleaning.compiled.kept import CACHE_FOLDER, UNUSED_SECONDS, open_folder, sources_digest


def test_machine_code_is_kept_for_the_sources_of_all_modules(tmp_path):
    """numba compares the source of a function's own module: of another's it would go on with what it had inlined."""
    assert CACHE_FOLDER.name == sources_digest(Path(kept.__file__).parent)
    for function in (words._divide, item_index._find):
        assert CACHE_FOLDER in Path(function.stats.cache_path).parents
    (tmp_path / "a.py").write_text("A = 1\n")
    (tmp_path / "b.py").write_text("B = 1\n")
    before = sources_digest(tmp_path)
    (tmp_path / "b.py").write_text("B = 2\n")
    assert sources_digest(tmp_path) != before


def test_a_new_folder_takes_the_place_of_those_that_nobody_opens(tmp_path):
    old, recent, foreign, ours = (tmp_path / name for name in ("0" * 16, "1" * 16, "numba", "2" * 16))
    for folder in (old, recent, foreign):
        folder.mkdir()
        (folder / "code.nbc").write_bytes(b"code")
    long_ago = time.time() - UNUSED_SECONDS - 60
    for folder in (old, foreign):
        os.utime(folder, (long_ago, long_ago))
    assert open_folder([tmp_path], ours.name) == (ours, True)
    assert sorted(tmp_path.iterdir()) == [recent, ours, foreign]
    os.utime(ours, (long_ago, long_ago))
    assert open_folder([tmp_path], ours.name) == (ours, False)
    assert open_folder([tmp_path], "3" * 16)[1] and ours.is_dir()  # just opened


def test_a_folder_that_cannot_be_written_is_passed_over_for_one_of_the_same_sources(tmp_path):
    (tmp_path / "package").write_text("no folder")
    folder = tmp_path / "user" / ("0" * 16)
    assert open_folder([tmp_path / "package", tmp_path / "user"], folder.name) == (folder, True)
    assert open_folder([tmp_path / "package"], folder.name) == (None, True)


def test_a_table_is_read_and_where_it_is_damaged_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "CACHE_FOLDER", tmp_path)
    made = []

    def table():
        made.append(1)
        return np.arange(3)

    for _ in range(2):
        assert kept.kept_array(table)().tolist() == [0, 1, 2]
    assert len(made) == 1
    (path,) = tmp_path.iterdir()
    path.write_bytes(b"")
    assert kept.kept_array(table)().tolist() == [0, 1, 2] and len(made) == 2
