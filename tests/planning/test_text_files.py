"""Tests for the files that train.py --text selects from folders, patterns and names, and for the messages about other
files."""

import gzip
import os
from pathlib import Path

import pytest

from pretrain.errors import InputError
from pretrain_tools.planning.text_files import find_text_files
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
UNUSABLE = ["old", "late.txt", "cut.txt", "windows.txt", "paper.txt", "image.txt", "nul.txt", "damaged.txt.gz"]
UNUSABLE = [f"mine/{name}" for name in UNUSABLE]


@pytest.mark.parametrize("word", ["mine", "mine/", "./mine"])
def test_a_folder_is_searched_for_text_in_any_case(mine, word):
    prefix = "./" if word.startswith(".") else ""
    files = find_text_files([word], [f"{prefix}{path}" for path in UNUSABLE])
    assert names(files) == TAKEN
    said = "skipped 4 files in other formats: "
    assert files.left_out == f"{said}{prefix}mine/Makefile, {prefix}mine/data.json, {prefix}mine/f.pdf, 1 more"
    by_prepare_data = find_sources(files.inputs, files.exclude)
    assert by_prepare_data == files.sources, "prepare_data.py must read the same files"


def test_files_that_are_not_text_are_refused(mine):
    for name, said in (
        ("late.txt", "1 of 1 files aren't UTF-8 text: mine/late.txt (0xef can't be decoded); convert them, for "
         "example with iconv -f cp1252 -t utf-8 mine/late.txt > NEW.txt, or skip them with --exclude"),
        ("cut.txt", "0xc3 can't be decoded"), ("windows.txt", "NUL bytes"), ("nul.txt", "NUL bytes"),
        ("damaged.txt.gz", "damaged gz data"),
    ):  # fmt: skip
        (problem,) = refusal(f"mine/{name}")
        assert said in problem
    assert "unknown format .pdf" in refusal("mine/f.pdf")[0]
    assert len(refusal("mine/f.pdf", "mine/g.PDF", "mine/a.txt")) == 2, "all problems at once"
    (problem,) = refusal("mine")
    assert "8 of 13 files aren't UTF-8 text: mine/cut.txt, mine/damaged.txt.gz, mine/image.txt, 5 more" in problem
    assert names(find_text_files(["mine/sub dir/d[1].txt"])) == ["d[1].txt"], (
        "the name of an existing file must not be used as a pattern"
    )


def test_a_pattern_selects_matching_files(mine):
    assert names(find_text_files(["mine/*.txt"], ["mine/[!aBc]*", "mine/cut.txt"])) == ["a.txt"]
    assert names(find_text_files(["mine/a*.txt", "mine/*.md"])) == ["a.txt", "c.md"]


def test_data_is_taken_where_there_is_no_text_or_where_it_is_named(mine):
    assert names(find_text_files(["mine/*.json", "mine/a.txt"])) == ["a.txt", "data.json"]
    for path in mine.rglob("*"):
        if path.is_file() and path.suffix != ".json":
            path.unlink()
    assert names(find_text_files(["mine"])) == ["data.json"]


def test_what_is_excluded_must_exist(mine):
    files = find_text_files(["mine"], [*UNUSABLE, "mine/*.pdf", "mine/sub dir"])
    assert "sub dir/d[1].txt" not in names(files) and files.left_out.startswith("skipped 3 files in other formats")
    assert "--exclude '*.nix': matches none of the files" in refusal("mine", exclude=["*.nix", *UNUSABLE])
    assert "excludes all 1 input files" in refusal("mine/sub dir", exclude=["*.txt"])[0]


def test_input_without_text_is_rejected(mine):
    (mine / "empty").mkdir()
    said = refusal("mine/empty", "mine/*.pdf", "none")
    assert said[0] == "--text mine/empty: the folder contains no files"
    assert "--text none: no such file; quote patterns, and use ** to search subfolders" in said
    assert any("mine/f.pdf: unknown format .pdf" in problem for problem in said)
    (problem,) = refusal(".")
    assert "contains the folders that this command writes" in problem
    assert refusal("..")[0].startswith("--text ..: contains")


def test_file_names_that_are_not_utf8(mine):
    path = os.fsencode(mine) + b"/caf\xe9.bin"
    Path(os.fsdecode(path)).write_bytes(LATIN)
    files = find_text_files(["mine"], UNUSABLE)
    assert names(files) == TAKEN
    files.left_out.encode()
