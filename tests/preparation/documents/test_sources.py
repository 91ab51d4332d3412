import csv
import glob
import gzip
import io
import json
import os
import random
import re
import tarfile

import pytest
import zstandard

from pretrain.errors import InputError
from pretrain_tools.preparation.documents import formats
from pretrain_tools.preparation.documents.formats import Reading
from pretrain_tools.preparation.documents.sources import BEGINNING, Files, find_sources
from support.prepared import make_parts_small

TEXTS = ["One day, a girl.\nShe sang.", 'zwei, "drei"\tvier', "\u0000 NUL, \u2028, é, 漢字, 👍", "  spaces  ", "last"]


def records_of_parts(patterns, reading=None, start=BEGINNING, **options):
    reading = reading or Reading()
    return [
        record
        for part in Files(find_sources([str(p) for p in patterns], **options)).parts(reading, start)
        for _, record in part.records(reading)
    ]


def texts_of(*args, **options):
    records = records_of_parts(*args, **options)
    assert [record.problem for record in records] == [None] * len(records)
    return [record.text.decode() for record in records if record.not_read is None]


def jsonl(texts=TEXTS, field="text"):
    return "".join(json.dumps({"id": n, field: text}) + "\n" for n, text in enumerate(texts)).encode()


def write_jsonl(path):
    path.write_bytes(jsonl())


def write_json(path):
    path.write_text(json.dumps([{"text": text} for text in TEXTS], indent=1))


def write_csv(path):
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([["id", "text"], *([n, text] for n, text in enumerate(TEXTS))])


def write_tsv(path):
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter="\t").writerows([["text", "n"], *([text, 1] for text in TEXTS)])


def write_parquet(path):
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"id": range(5), "text": TEXTS}), path, row_group_size=2)


def write_arrow_file(path):
    import pyarrow as pa

    table = pa.table({"text": pa.array(TEXTS, pa.large_string())})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def write_arrow_stream(path):
    import pyarrow as pa

    table = pa.table({"text": pa.array(TEXTS).dictionary_encode()})
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


def write_hdf5(path):
    import h5py

    # HDF5's variable-length strings end at a NUL byte.
    with h5py.File(path, "w") as file:
        file["text"] = [text.replace("\0", "0") for text in TEXTS]


def write_tar(path):
    with tarfile.open(path, "w") as archive:
        for number, text in enumerate(TEXTS):
            members = {f"a/{number:03d}.json": json.dumps({"text": "only if there is no txt"}).encode()}
            if number % 2:
                members = {f"a/{number:03d}.json": json.dumps({"text": text}).encode()}
            else:
                members[f"a/{number:03d}.txt"] = text.encode()
            members[f"a/{number:03d}.jpg"] = b"\xff\xd8"
            for name, content in members.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))


WRITERS = {
    "docs.jsonl": write_jsonl,
    "docs.json": write_json,
    "docs.csv": write_csv,
    "docs.tsv": write_tsv,
    "docs.parquet": write_parquet,
    "docs.arrow": write_arrow_file,
    "stream.arrow": write_arrow_stream,
    "docs.h5": write_hdf5,
    "docs.tar": write_tar,
}


@pytest.mark.parametrize("large", [False, True], ids=["whole", "in parts"])
@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_documents_plain_gz_and_zst(tmp_path, monkeypatch, name, large):
    if large:
        make_parts_small(monkeypatch, 8)
    path = tmp_path / name
    WRITERS[name](path)
    content = path.read_bytes()
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content[:50]) + gzip.compress(content[50:]))
    compress = zstandard.ZstdCompressor().compress
    (tmp_path / f"{name}.zst").write_bytes(compress(content[:50]) + compress(content[50:]))
    expected = [text.replace("\0", "0") for text in TEXTS] if name == "docs.h5" else TEXTS
    for suffix in ("", ".gz", ".zst"):
        assert texts_of([tmp_path / f"{name}{suffix}"]) == expected


@pytest.mark.parametrize("name", ["docs.jsonl", "docs.jsonl.gz", "docs.csv", "docs.parquet", "docs.tar"])
def test_reading_continues_from_any_part(tmp_path, monkeypatch, name):
    make_parts_small(monkeypatch, 8)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / name.removesuffix(".gz")
        WRITERS[path.name](path)
        if name.endswith(".gz"):
            path.with_name(name).write_bytes(gzip.compress(path.read_bytes()))
    sources = find_sources([str(tmp_path / "*" / name)])
    parts = list(Files(sources).parts(Reading()))
    assert len(parts) > 4
    for number, part in enumerate(parts):
        rest = [record for later in parts[number + 1 :] for _, record in later.records(Reading())]
        again = [
            record for later in Files(sources).parts(Reading(), part.after) for _, record in later.records(Reading())
        ]
        assert again == rest


def test_parts_account_for_all_input_bytes(tmp_path, monkeypatch):
    make_parts_small(monkeypatch, 8)
    for name in ("docs.jsonl", "docs.csv", "docs.json", "docs.tar", "docs.arrow"):
        WRITERS[name](tmp_path / name)
    sources = find_sources([str(tmp_path / "*")])
    assert sum(part.input_bytes for part in Files(sources).parts(Reading())) == sum(s.bytes for s in sources)


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ("file", ["one\r\ntwo\n\n \n\nthree\rthree\n"]),
        ("line", ["one", "two", "", " ", "", "three\rthree"]),
        ("paragraph", ["one\r\ntwo", "three\rthree"]),
    ],
)
def test_plain_text_as_files_lines_or_paragraphs(tmp_path, documents, expected):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n\n \n\nthree\rthree\n")
    assert texts_of([tmp_path / "a.txt"], Reading(documents=documents)) == expected


def test_crlf_and_byte_order_mark_in_json_lines(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + jsonl().replace(b"\n", b"\r\n") + b"\r\n  \n")
    assert texts_of([tmp_path / "a.jsonl"]) == TEXTS


def test_json_lines_under_the_name_of_json(tmp_path):
    (tmp_path / "a.json").write_bytes(jsonl())
    assert texts_of([tmp_path / "a.json"]) == TEXTS
    (tmp_path / "a.json").write_bytes(b'{"text":\n"one"}\n' + jsonl())
    (record,) = records_of_parts([tmp_path / "a.json"])
    assert "invalid JSON" in record.problem and "use --input_format jsonl" in record.problem


def test_nested_fields(tmp_path):
    import h5py
    import pyarrow as pa
    from pyarrow import parquet

    (tmp_path / "a.jsonl").write_text(json.dumps({"a": {"b": "x"}}) + "\n" + json.dumps({"a.b": "y", "a": 1}) + "\n")
    parquet.write_table(pa.table({"a": [{"b": "x", "c": 1}, {"b": "y", "c": 2}]}), tmp_path / "a.parquet")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["a/b"] = ["x", "y"]
    for name in ("a.jsonl", "a.parquet", "a.h5"):
        assert texts_of([tmp_path / name], Reading(text_field="a.b")) == ["x", "y"]


BAD_LINES = [
    (b'{"text": "cut', r"invalid JSON \(Unterminated string .* column 10\)"),
    (b'{"id": 1}', r"no field 'text' \(fields: id\)"),
    (b'{"text": null}', "field 'text' must be text, got null"),
    (b'{"text": ["a"]}', "field 'text' must be text, got a list"),
    (b'["a"]', "must be an object with the field 'text', got a list"),
    (b'{"text": "\xff"}', r"not UTF-8 \(0xff at byte 11\)"),
    (b'{"text": "\xed\xa0\x80"}', "not UTF-8"),
    (b'{"text": "\\ud800"}', "lone surrogate"),
    (b"[" * 100_000, "invalid JSON"),
    (b'{"text": ' + b"9" * 10_000 + b"}", "invalid JSON"),
]


@pytest.mark.parametrize(("line", "problem"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_named_and_the_others_are_kept(tmp_path, line, problem):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n\n' + line + b'\n{"text": "two"}')
    first, bad, last = records_of_parts([tmp_path / "a.jsonl"])
    assert (first.text, bad.place, bad.text, last.place, last.text) == (b"one", 3, None, 4, b"two")
    assert re.search(problem, bad.problem)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_truncated_file_keeps_its_whole_lines_and_is_named(tmp_path, name):
    rng = random.Random(0)
    texts = [rng.randbytes(200).hex() for _ in range(3000)]
    compress = gzip.compress if name.endswith("gz") else zstandard.ZstdCompressor().compress
    content = compress(jsonl(texts))
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    *good, last = records_of_parts([tmp_path / name])
    assert 500 < len(good) < 2500
    assert [record.text.decode() for record in good] == texts[: len(good)]
    assert last.place == len(good) + 1
    assert "data is truncated; the rest of the file was not read" in last.problem


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl.gz", b"plain text", "damaged gz data"),
        ("a.jsonl.zst", b"plain text", "damaged zst data"),
        ("a.jsonl.gz", b"", "expected gz data, got an empty file"),
        ("a.parquet", b"PAR1 cut", "cannot be read as parquet"),
        ("a.arrow", b"ARROW1 cut", "cannot be read as arrow IPC"),
        ("a.h5", b"\x89HDF cut", "cannot be read as HDF5"),
        ("a.tar", b"no archive at all" * 99, "damaged tar archive"),
        ("a.json", b'[{"text": "a"}, {"text', "invalid JSON"),
        ("a.json", b'{"text": "a\xff"}', "not UTF-8"),
        ("a.csv", b"id,body\n1,x\n", r"no columns are named 'text' \(columns: id, body\)"),
        ("a.csv", b'text\n"never closed\n', "malformed row"),
        ("a.txt", b"caf\xe9", r"not UTF-8 \(0xe9 at byte 4\)$"),
        ("a.txt", "text".encode("utf-16"), "not UTF-8 .* but UTF-16; convert it with iconv"),
        ("a.csv", "text\nrow\n".encode("utf-16"), "the header is not UTF-8 .* but UTF-16"),
    ],
)
def test_files_whose_content_does_not_match_their_name(tmp_path, name, content, problem):
    (tmp_path / name).write_bytes(content)
    last = records_of_parts([tmp_path / name])[-1]
    assert last.text is None
    assert re.search(problem, last.problem)


def test_a_parquet_file_without_the_column_and_with_nulls(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"text": ["a", None]}), tmp_path / "a.parquet")
    assert records_of_parts([tmp_path / "a.parquet"])[1].problem == "field 'text' must be text, got null"
    (last,) = records_of_parts([tmp_path / "a.parquet"], Reading(text_field="body"))
    assert "no column 'body' (columns: text); the rest of the file was not read (2 records)" in last.problem


def lost_records(path, **reading):
    """Returns the number of records lost in the unreadable rest of a file."""
    return sum(r.problem_records for r in records_of_parts([path], Reading(**reading)) if r.problem is not None)


@pytest.mark.parametrize("name", ["docs.csv", "docs.parquet", "docs.arrow", "stream.arrow", "docs.h5"])
def test_a_file_without_the_column_counts_as_all_its_records(tmp_path, monkeypatch, name):
    WRITERS[name](tmp_path / name)
    assert lost_records(tmp_path / name, text_field="body") == len(TEXTS)
    make_parts_small(monkeypatch, 8)
    assert lost_records(tmp_path / name, text_field="body") == len(TEXTS)


def test_damage_in_a_parquet_file_counts_as_the_remaining_rows(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    texts = [random.Random(n).randbytes(100).hex() for n in range(60)]
    options = {"compression": "none", "use_dictionary": False, "row_group_size": 20}
    parquet.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", **options)
    content = (tmp_path / "a.parquet").read_bytes()
    place = content.index(texts[20].encode())
    (tmp_path / "a.parquet").write_bytes(content[: place - 30] + b"\xff" * 26 + content[place - 4 :])
    assert [r.text for r in records_of_parts([tmp_path / "a.parquet"])][:20] == [text.encode() for text in texts[:20]]
    assert lost_records(tmp_path / "a.parquet") == 40


def test_token_ids_in_hdf5_are_not_text(tmp_path):
    import h5py

    with h5py.File(tmp_path / "pile.h5", "w") as file:
        file["tokens"] = [[1, 2], [3, 4]]
    (record,) = records_of_parts([tmp_path / "pile.h5"], Reading(text_field="tokens"))
    assert "must contain one-dimensional strings, got int64 of shape (2, 2); to train on token IDs" in record.problem
    (record,) = records_of_parts([tmp_path / "pile.h5"])
    assert "no dataset 'text' (at the top level: tokens)" in record.problem


def test_bad_rows_of_csv(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'id,text\n1,"a\nb"\n2\n3,\xff\n4,"x"y\n5,d\n')
    records = records_of_parts([tmp_path / "a.csv"])
    assert [record.text for record in records] == [b"a\nb", None, None, None, b"d"]
    assert [record.place for record in records] == [3, 4, 5, 6, 7]
    assert "row has 1 columns, but the header has 2" in records[1].problem
    assert "not UTF-8" in records[2].problem
    assert "malformed row" in records[3].problem
    (tmp_path / "quoted.csv").write_bytes(b'\xef\xbb\xbf"text","id"\r\n"a","1"\r\n')
    assert texts_of([tmp_path / "quoted.csv"]) == ["a"], "a byte-order mark must not hide the header's quotes"
    (tmp_path / "b.csv").write_bytes(b"id,id,text,text\n1,2,a,b\n3,4,c,d\n")
    (record,) = records_of_parts([tmp_path / "b.csv"])
    assert "2 columns are named 'text'" in record.problem and record.problem_records == 2


def test_documents_beyond_the_limit_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "MAXIMUM_DOCUMENT_BYTES", 1000)
    monkeypatch.setattr("pretrain_tools.preparation.documents.records.MAXIMUM_DOCUMENT_BYTES", 1000)
    monkeypatch.setattr(formats, "PART_BYTES", 500)
    (tmp_path / "a.jsonl").write_bytes(jsonl(["a", "b" * 1100, "c"]))
    first, bad, last = records_of_parts([tmp_path / "a.jsonl"])
    assert (first.text, bad.place, last.text) == (b"a", 2, b"c")
    assert "line is 1,121 bytes, but the maximum is 1,000" in bad.problem
    (tmp_path / "b.txt").write_bytes(b"x" * 5000)
    (record,) = records_of_parts([tmp_path / "b.txt"])
    assert "larger than 1,000 bytes; use --documents line or paragraph" in record.problem


def test_files_are_found_once_in_order_with_names_below_their_common_folder(tmp_path):
    for name in ("b/2.txt", "b/c/1.py", "a/3.txt.zst", "a/skip.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    patterns = [f"{tmp_path}/**/*.txt*", f"{tmp_path}/**/*.py", f"{tmp_path}/b/2.txt"]
    sources = find_sources(patterns, exclude=["*/skip*"])
    assert [source.name for source in sources] == ["a/3.txt.zst", "b/2.txt", "b/c/1.py"]
    assert [source.compression for source in sources] == ["zst", None, None]


def test_circular_links_give_each_file_once_and_quickly(tmp_path):
    for name in ("data/deep/b.txt", "data/a.txt", "elsewhere/c.txt", "elsewhere/.hidden/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    for name in ("0", "1", "deep/2", "deep/3"):  # 4^40 paths
        (tmp_path / "data" / name).symlink_to(tmp_path / "data", target_is_directory=True)
    (tmp_path / "data/0.txt").symlink_to("a.txt")
    (tmp_path / "data/to").symlink_to("../elsewhere", target_is_directory=True)
    (tmp_path / "data/broken.txt").symlink_to("nowhere")
    found = find_sources([f"{tmp_path}/data/**/*.txt"])
    assert [source.name for source in found] == ["a.txt", "deep/b.txt", "to/c.txt"]
    assert [s.name for s in find_sources([f"{tmp_path}/data/**/deep/*.txt", f"{tmp_path}/da*/**"])] == [
        source.name for source in found
    ]
    (only,) = find_sources([f"{tmp_path}/data/0.txt"])
    assert only.path == f"{tmp_path}/data/0.txt", "a file that is named explicitly must be found under that name"
    for name in ("a[1].txt", "a1.txt"):
        (tmp_path / name).write_bytes(b"x")
    assert [source.name for source in find_sources([f"{tmp_path}/a[1].txt"])] == ["a[1].txt"]


def test_patterns_find_what_glob_finds(tmp_path, monkeypatch):
    for name in ("a.txt", "b/a.txt", "b/c/a.txt", "b/[x]/a.txt", ".b/a.txt", "b/.a.txt", "b**/a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    for pattern in ("**/*.txt", "**", "*/**/a.txt", "b/**/c/**", "b**/*.txt", "./**/a.txt", "**/**/[[]x]/*", ".b/**"):
        expected = {os.path.normpath(p) for p in glob.glob(pattern, recursive=True) if os.path.isfile(p)}
        assert {os.path.normpath(source.path) for source in find_sources([pattern])} == expected, pattern


@pytest.mark.parametrize("name", WRITERS)
def test_a_name_that_is_not_utf8_is_read_and_recorded_by_its_bytes(tmp_path, name):
    path = tmp_path / f"caf\udce9-{name}"
    try:
        WRITERS[name](tmp_path / name)
        (tmp_path / name).rename(path)
    except OSError:
        pytest.skip("this file system supports only UTF-8 names")
    (source,) = find_sources([f"{tmp_path}/*"])
    assert source.name == f"caf\\xe9-{name}" and source.place(1).isprintable()
    assert len([r for r in records_of_parts([path]) if r.text]) == len(TEXTS)


def test_all_problems_with_the_input_are_reported_together(tmp_path):
    (tmp_path / "a.doc").write_bytes(b"x")
    (tmp_path / "noname").write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe.txt")
    patterns = [
        f"{tmp_path}/*.jsonl",
        str(tmp_path),
        f"{tmp_path}/a.doc",
        f"{tmp_path}/noname",
        f"{tmp_path}/pipe.txt",
    ]
    with pytest.raises(InputError) as caught:
        find_sources(patterns)
    missing, folder, pipe, unknown, nameless = caught.value.problems
    assert "pipe.txt: is a pipe or a device; save its content to a file" in pipe
    assert "no such file; quote patterns" in missing
    assert "is a folder; specify its files, such as" in folder
    assert "unknown format .doc; use .jsonl" in unknown
    assert "unknown format (no suffix)" in nameless
    with pytest.raises(InputError, match="--input_format jsnol: no such format; did you mean jsonl"):
        find_sources([f"{tmp_path}/a.doc"], format_name="jsnol")
    with pytest.raises(InputError, match="excludes all 2 input files"):
        find_sources([f"{tmp_path}/*"], exclude=["*"])
    assert texts_of([tmp_path / "a.doc"], format_name="txt") == ["x"]


@pytest.mark.parametrize(
    ("names", "suffix"),
    [
        ([], ".jsonl"),
        (["a.py", "b/c.py", "d.txt"], ".py"),
        (["a.jsonl.zst", "b.docx", "c.docx"], ".jsonl.zst"),
        (["A.TGZ"], ".TGZ"),
    ],
)
def test_a_folder_is_refused_with_a_pattern_for_its_files(tmp_path, names, suffix):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    said = f"is a folder; specify its files, such as '{tmp_path}/**/*{suffix}'"
    with pytest.raises(InputError, match=re.escape(said)):
        find_sources([str(tmp_path)])
