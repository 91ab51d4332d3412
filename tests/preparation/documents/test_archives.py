"""Tests for tar archives: no data is lost silently, and every member is either read as a document or counted."""

import gzip
import io
import json
import os
import re
import tarfile

import pytest
import zstandard

from pretrain_tools.preparation.documents.formats import Reading
from pretrain_tools.preparation.documents.sources import Files, find_sources

TEXTS = [f"{n} " + "a text of some length, " * 30 for n in range(10)]
BLOCK = 512


def tar_of(members, **options):
    """Returns (archive, offset of each header) for {name: content or TarInfo}."""
    file, starts = io.BytesIO(), []
    with tarfile.open(fileobj=file, mode="w", **options) as archive:
        for name, content in members.items():
            starts.append(file.tell())
            entry = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            if not isinstance(content, tarfile.TarInfo):
                entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content) if isinstance(content, bytes) else None)
    return file.getvalue(), starts


def records_of(path, reading=None):
    reading = reading or Reading()
    return [record for part in Files(find_sources([str(path)])).parts(reading) for _, record in part.records(reading)]


def read(path, reading=None):
    """Returns (texts, problems, suffixes of unread members)."""
    found = records_of(path, reading)
    texts = [record.text.decode() for record in found if record.text is not None]
    others = {record.not_read for record in found if record.not_read}
    return texts, [record.problem for record in found if record.problem], sorted(others)


def flipped(content, place):
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


ARCHIVE, STARTS = tar_of({f"{n}.txt": text.encode() for n, text in enumerate(TEXTS)})
DAMAGED = {
    "cut at a member's end": (ARCHIVE[: STARTS[5]], 5, "the two zero blocks at the end are missing"),
    "cut within a header": (ARCHIVE[: STARTS[5] + 100], 5, "no valid header at byte"),
    "cut within a member": (ARCHIVE[: STARTS[5] - 800], 4, "unexpected end of data"),
    "cut after the last member": (ARCHIVE[: STARTS[9] + 2 * BLOCK + BLOCK], 10, "the two zero blocks at the end"),
    "a bit of a header": (flipped(ARCHIVE, STARTS[5] + 3), 5, "no valid header at byte .*: bad checksum"),
    "a bit of a size": (flipped(ARCHIVE, STARTS[5] + 130), 5, "no valid header at byte .*: bad checksum"),
    "a zeroed header": (
        ARCHIVE[: STARTS[5]] + bytes(BLOCK) + ARCHIVE[STARTS[5] + BLOCK :], 5, "no valid header at byte"
    ),
    "garbage after the end": (ARCHIVE + b"garbage" * 100, 10, "no valid header after the end of the archive"),
}  # fmt: skip


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress], ids=["plain", "gz", "zst"])
@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_archive_keeps_earlier_members_and_is_named(tmp_path, damage, compress):
    content, whole, problem = DAMAGED[damage]
    path = tmp_path / {bytes: "a.tar", gzip.compress: "a.tar.gz", zstandard.compress: "a.tar.zst"}[compress]
    path.write_bytes(compress(content))
    texts, problems, _ = read(path)
    assert texts == TEXTS[:whole]
    (told,) = problems
    assert re.search(problem, told) and "the rest of the file was not read" in told


def test_every_flipped_bit_of_a_header_is_detected(tmp_path):
    for place in range(STARTS[3], STARTS[3] + BLOCK, 7):
        (tmp_path / "a.tar").write_bytes(flipped(ARCHIVE, place))
        texts, problems, _ = read(tmp_path / "a.tar")
        assert (texts, len(problems)) == (TEXTS[:3], 1), place


@pytest.mark.parametrize("padding", [BLOCK, 2 * BLOCK, 100 * BLOCK])
def test_concatenated_archives_and_trailing_zeros_are_valid(tmp_path, padding):
    members = ARCHIVE.rstrip(b"\0")
    members += bytes(-len(members) % BLOCK)
    (tmp_path / "a.tar").write_bytes(ARCHIVE + ARCHIVE + members + bytes(padding))
    assert read(tmp_path / "a.tar") == (TEXTS * 3, [], [])
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(ARCHIVE) + gzip.compress(ARCHIVE))
    assert read(tmp_path / "a.tar.gz") == (TEXTS * 2, [], [])
    (tmp_path / "a.tar").write_bytes(bytes(padding))
    assert read(tmp_path / "a.tar") == ([], [], [])


def test_members_are_read_by_their_suffix_or_counted(tmp_path):
    lines = b'{"text": "line one"}\n{"text": "line two"}\n'
    link, device = tarfile.TarInfo("link.txt"), tarfile.TarInfo("fifo.txt")
    link.type, link.linkname, device.type = tarfile.LNKTYPE, "docs/a.TXT", tarfile.FIFOTYPE
    inner, _ = tar_of({"inner.txt": b"inner"})
    members = {
        "docs/a.TXT": b"upper case",
        "docs/b.md": b"markdown",
        "docs/v1.2.notes.txt": b"dots",
        "docs/c.jsonl": lines,
        "docs/d.JSONL.gz": gzip.compress(lines),
        "docs/e.tsv": b"id\ttext\n1\trow\n",
        "docs/f.json": b'[{"text": "first"}, {"text": "second"}]',
        "g.tar": inner,
        "h.html": b"<p>",
        "i.zip": b"PK",
        "._a.txt": b"\0\x05\x16\x07",
        "Makefile": b"all:",
        "link.txt": link,
        "fifo.txt": device,
    }
    (tmp_path / "a.tar").write_bytes(tar_of(members)[0])
    texts, problems, others = read(tmp_path / "a.tar")
    lines = ["line one", "line two"]
    assert texts == ["upper case", "markdown", "dots", *lines, *lines, "row", "first", "second", "inner"]
    assert problems == []
    assert others == [".html", ".zip", "hidden files", "links", "special files", "without a suffix"]


def test_all_texts_of_a_sample_are_read_with_the_fields_of_its_json(tmp_path):
    about = json.dumps({"title": "T", "text": "not this"}).encode()
    members = {"1.json": about, "1.txt": b"one", "1.md": b"two", "1.more.json": b"{}", "1.jpg": b"\xff", "2.txt": b"3"}
    (tmp_path / "a.tar").write_bytes(tar_of(members)[0])
    assert read(tmp_path / "a.tar") == (["one", "two", "3"], [], [".jpg", ".json next to a text"])
    texts, problems, _ = read(tmp_path / "a.tar", Reading(template="{title}: {text}"))
    assert texts == ["T: one", "T: two"] and "no field 'title' (fields: text)" in problems[0]


def test_a_bad_member_is_named_and_the_others_are_kept(tmp_path):
    members = {
        "a.txt": b"\xff",
        "b.jsonl": b'bad\n{"text": "b"}\n',
        "c.json": b'{"text',
        "d.jsonl.gz": b"no",
        "e.txt": b"e",
    }
    (tmp_path / "a.tar").write_bytes(tar_of(members)[0])
    texts, problems, _ = read(tmp_path / "a.tar")
    assert texts == ["b", "e"]
    expected = ["member a.txt: not UTF-8", "member b.jsonl, 1: invalid JSON", "member c.json: invalid JSON"]
    for told, start in zip(problems, [*expected, "member d.jsonl.gz: damaged gz data"], strict=True):
        assert told.startswith(start)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_odd_names(tmp_path, form):
    names = ["x" * 300 + "/" + "y" * 200 + ".txt", "é漢\n字.txt", "caf\udce9.txt", "bad\udce9.jsonl"]
    contents = [b"long", b"odd", b"latin", b"bad\n"]
    members = dict(zip(names, contents, strict=True))
    (tmp_path / "a.tar").write_bytes(tar_of(members, format=form, errors="surrogateescape")[0])
    texts, problems, _ = read(tmp_path / "a.tar")
    assert texts == ["long", "odd", "latin"]
    assert problems[0].isprintable() and problems[0].startswith("member bad\\")


def test_sparse_members(tmp_path):
    with (tmp_path / "sparse.txt").open("wb") as file:
        file.write(b"begin")
        file.seek(1 << 20)
        file.write(b"end")
    command = f"tar --sparse -C {tmp_path} -cf {tmp_path}/a.tar sparse.txt"
    if os.system(command):
        pytest.skip("no GNU tar")
    (text,), problems, _ = read(tmp_path / "a.tar")
    assert text == "begin" + "\0" * ((1 << 20) - 5) + "end" and problems == []
    assert (tmp_path / "a.tar").stat().st_size < 1 << 19
