"""Tests for the files that train.py --text selects from folders, patterns and names, and for the messages about other
files."""

import gzip
import os
from pathlib import Path

import pytest

from pretrain.errors import InputError
from pretrain_tools.planning.text_files import MOST_EXCLUDED, find_text_files
from pretrain_tools.preparation.documents.sources import find_sources

TEXT = "A line of text, na\u00efve and plain.\n" * 40
LATIN = TEXT.encode("latin1")


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A typical folder of mixed files."""
    files = {
        "a.txt": TEXT.encode(), "B.TXT": TEXT.encode(), "c.md": TEXT.encode(), "sub dir/d[1].txt": TEXT.encode(),
        "e.txt.GZ": gzip.compress(TEXT.encode()), "old/it's.txt": LATIN, "late.txt": TEXT.encode() * 200 + LATIN,
        "cut.txt": TEXT.encode() + b"\xc3", "windows.txt": TEXT.encode("utf-16"), "paper.txt": b"%PDF-1.4\n\xe2\xe3",
        "image.txt": b"\xff\x01\x02" * 99, "nul.txt": b"a\0b", "f.pdf": b"%PDF-1.4\n\xe2", "g.PDF": b"%PDF-1.4\n\xe2",
        "Makefile": b"all:\n", "data.json": b'{"a": 1}', ".hidden.txt": LATIN, "damaged.txt.gz": b"no gzip",
    }  # fmt: skip
    for name, content in files.items():
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mine"


def names(files):
    return [source.name for source in files.sources]


def refusal(*given, exclude=()):
    with pytest.raises(InputError) as caught:
        find_text_files(given, exclude)
    return caught.value.problems


TAKEN = ["B.TXT", "a.txt", "c.md", "e.txt.GZ", "sub dir/d[1].txt"]


@pytest.mark.parametrize("word", ["mine", "mine/", "./mine", "mine/**/*"])
def test_a_folder_is_searched_for_text_in_any_case(mine, word):
    files = find_text_files([word])
    assert names(files) == TAKEN
    assert files.left_out.startswith("12 of 17 files were skipped: ")
    for said in ("2 of unknown format .pdf: ", "1 of unknown format without a suffix: "):
        assert said in files.left_out
    for said in ("1 ignored, because data files next to text must be named explicitly: ", "1 damaged gz data"):
        assert said in files.left_out
    assert "\n" not in files.left_out and len(files.left_out) < 700
    by_prepare_data = find_sources(files.inputs, files.exclude)
    assert by_prepare_data == files.sources, "prepare_data.py must read the same files"


def test_a_file_that_is_named_is_text_or_refused(mine):
    place = 200 * len(TEXT.encode()) + LATIN.index(b"\xef") + 1
    assert f"late.txt: is not UTF-8 text (byte {place:,} is 0xef)" in refusal("mine/late.txt")[0]
    assert f"byte {len(TEXT.encode()) + 1:,} is 0xc3" in refusal("mine/cut.txt")[0]
    assert "convert it: iconv -f cp1252 -t utf-8 mine/cut.txt > NEW.txt" in refusal("mine/cut.txt")[0]
    for binary in ("mine/windows.txt", "mine/nul.txt"):
        assert "is not text (it contains NUL bytes)" in refusal(binary)[0]
    assert "unknown format .pdf; if it is text, rename it" in refusal("mine/f.pdf")[0]
    assert len(refusal("mine/f.pdf", "mine/nul.txt", "mine/a.txt")) == 2, "all problems at once"
    (one,) = refusal("mine/a.txt", "mine/f.pdf", "mine/g.PDF", "mine/nul.txt", "mine/late.txt")
    assert "4 of 5 files are not usable text: 2 of unknown format .pdf: " in one and "pass the folder" in one
    assert names(find_text_files(["mine/sub dir/d[1].txt"])) == ["d[1].txt"], (
        "the name of an existing file must not be used as a pattern"
    )


def test_a_pattern_selects_matching_files(mine):
    files = find_text_files(["mine/*.txt"], ["mine/[!aBc]*"])
    assert names(files) == ["a.txt"] and files.left_out.startswith("1 of 2 files were skipped: 1 not UTF-8 text: ")
    assert names(find_text_files(["mine/*.txt", "mine/*.md"], ["mine/[!aBc]*"])) == ["a.txt", "c.md"]


def test_data_is_taken_where_there_is_no_text_or_where_it_is_named(mine):
    assert names(find_text_files(["mine/*.json", "mine/a.txt"])) == ["a.txt", "data.json"]
    for path in mine.rglob("*"):
        if path.is_file() and path.suffix != ".json":
            path.unlink()
    assert names(find_text_files(["mine"])) == ["data.json"]


def test_what_is_excluded_is_not_counted_and_must_exist(mine):
    files = find_text_files(["mine"], ["mine/old/", "mine/*.pdf", "mine/sub dir"])
    assert "sub dir/d[1].txt" not in names(files) and files.left_out.startswith("10 of 14 files were skipped")
    assert refusal("mine", exclude=["*.nix", "mine/old"]) == ["--exclude '*.nix': matches none of the files"]
    assert refusal("mine/sub dir", exclude=["*.txt"]) == [
        "--text mine/sub dir: contains no readable text: --exclude matches all of its files"
    ]


def test_input_without_text_is_rejected(mine):
    (mine / "empty").mkdir()
    assert refusal("mine/empty", "mine/*.pdf", "none") == [
        "--text mine/empty: the folder contains no files",
        "--text none: no such file; quote patterns, and use ** to search subfolders",
        "--text mine/*.pdf: contains no readable text: 1 of 1 files were skipped: "
        "1 of unknown format .pdf: mine/f.pdf",
    ]
    (problem,) = refusal(".")
    assert "contains the folders that this command writes" in problem
    assert refusal("..")[0].startswith("--text ..: contains")


def test_file_names_that_are_not_utf8(mine):
    path = os.fsencode(mine) + b"/caf\xe9.txt"
    Path(os.fsdecode(path)).write_bytes(LATIN)
    files = find_text_files(["mine"])
    assert names(files) == TAKEN
    files.left_out.encode()


def test_too_many_files_for_a_command_line_are_rejected(mine, monkeypatch):
    monkeypatch.setattr("pretrain_tools.planning.text_files.MOST_EXCLUDED", 3)
    assert "files were skipped" in refusal("mine")[0] and "exclude their folders" in refusal("mine")[0]
    assert MOST_EXCLUDED < 10_000
