"""Tests for text built from several fields, and for selecting documents by field and length."""

import csv
import io
import json
import tarfile

import h5py
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from pretrain.data.shards import read_manifest
from pretrain.errors import InputError
from pretrain_tools.preparation.documents.records import Reading, template_problem
from pretrain_tools.preparation.documents.sources import find_sources, records_of
from support.prepared import stream_of, write_jsonl

ROWS = [
    {"title": "One", "text": "first é", "language": "en", "score": 3},
    {"title": "Zwei", "text": "zweiter", "language": "de", "score": 4},
    {"title": None, "text": "third {braces}", "language": "en", "score": 5},
]


def write_csv(path):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)


def write_hdf5(path):
    with h5py.File(path, "w") as file:
        for name in ROWS[0]:
            kind = None if name == "score" else h5py.string_dtype()
            file.create_dataset(name, data=[row[name] if row[name] is not None else "" for row in ROWS], dtype=kind)


def write_tar(path):
    with tarfile.open(path, "w") as archive:
        for number, row in enumerate(ROWS):
            members = {"txt": row["text"].encode(), "json": json.dumps({**row, "text": None}).encode()}
            for extension, content in members.items():
                information = tarfile.TarInfo(f"{number:03d}.{extension}")
                information.size = len(content)
                archive.addfile(information, io.BytesIO(content))


WRITERS = {
    "a.jsonl": lambda path: path.write_text("".join(json.dumps(row) + "\n" for row in ROWS)),
    "a.json": lambda path: path.write_text(json.dumps(ROWS)),
    "a.csv": write_csv,
    "a.parquet": lambda path: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path),
    "a.arrow": lambda path: pyarrow.feather.write_feather(pyarrow.Table.from_pylist(ROWS), path),
}


def texts(path, **options):
    (source,) = find_sources([str(path)])
    return [record.text for record in records_of(source, Reading(**options))]


@pytest.mark.parametrize("name", WRITERS)
def test_templates_and_filters_in_every_format_that_has_fields(tmp_path, name):
    WRITERS[name](tmp_path / name)
    assert texts(tmp_path / name, template="# {title} ({score})\n{text}") == [
        "# One (3)\nfirst é".encode(),
        b"# Zwei (4)\nzweiter",
        b"#  (5)\nthird {braces}",
    ]
    assert texts(tmp_path / name, only=(("language", ("en", "fr")),)) == ["first é".encode(), None, b"third {braces}"]
    assert texts(tmp_path / name, only=(("score", ("4",)), ("language", ("de",)))) == [None, b"zweiter", None]


def test_templates_of_hdf5_datasets_of_strings(tmp_path):
    write_hdf5(tmp_path / "a.h5")
    assert texts(tmp_path / "a.h5", template="{title}: {text}")[:2] == ["One: first é".encode(), b"Zwei: zweiter"]


def test_fields_of_tar_samples_come_from_their_json(tmp_path):
    write_tar(tmp_path / "a.tar")
    assert texts(tmp_path / "a.tar", only=(("language", ("de",)),)) == [None, b"zweiter", None]
    assert texts(tmp_path / "a.tar", template="{title}: {text}")[0] == "One: first é".encode()


def test_nested_fields_in_templates_and_filters(tmp_path):
    rows = [{"meta": {"title": "T", "language": "en"}, "body": {"text": "x"}}]
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        options = {"template": "{meta.title}\n{body.text}", "only": (("meta.language", ("en",)),)}
        assert texts(tmp_path / name, **options) == [b"T\nx"]


def test_missing_and_unprintable_fields_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"text": "x"}\n{"text": "x", "title": ["a"]}\n{"text": "x", "title": "\\ud800"}\n'
    )
    (source,) = find_sources([str(tmp_path / "a.jsonl")])
    problems = [record.problem for record in records_of(source, Reading(template="{title} {text}"))]
    assert problems[0] == "no field 'title' (fields: text)"
    assert problems[1] == "field 'title' must be text or a number, got a list"
    assert problems[2].startswith("not valid Unicode (lone surrogate")
    problems = [record.problem for record in records_of(source, Reading(only=(("title", ("a",)),)))]
    assert problems == ["no field 'title' (fields: text)", None, None]


def test_plain_text_has_no_fields(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (source,) = find_sources([str(tmp_path / "a.txt")])
    (record,) = records_of(source, Reading(template="{title}"))
    assert record.problem.startswith("plain text has no fields for --template, --only, --url_field")


def test_invalid_templates_are_rejected():
    assert template_problem("{title}\n{meta.text} {{as it is}}") is None
    for template, problem in {
        "no field": "must contain a field",
        "{}": "a field must be a name in braces",
        "{a!r}": "must not contain ! or :",
        "{a:>3}": "must not contain ! or :",
        "{a": "use {{ and }}",
    }.items():
        assert problem in template_problem(template)


def test_length_limits_count_characters(tmp_path, run):
    write_jsonl(tmp_path / "a.jsonl", ["é" * 4, "é" * 5, "é" * 9, "é" * 10, ""])
    printed = run(
        "--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--validation_fraction", 0,
        "--min_characters", 5, "--max_characters", 9,
    )  # fmt: skip
    assert "2; skipped 1 empty, 0 bad, 2 filtered" in printed
    assert read_manifest(tmp_path / "out").totals("train")[1:] == (2, 28)


def test_all_problems_with_selections_are_reported_together(tmp_path, run):
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(InputError) as caught:
        run(
            "--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--template", "{a", "--only", "language",
            "--min_characters", 9, "--max_characters", 3,
        )  # fmt: skip
    told = "\n".join(caught.value.problems)
    assert "--template {a: expected '}'" in told
    assert "--only language: must be FIELD=VALUE" in told
    assert "--min_characters 9 is greater than --max_characters 3" in told


def test_line_ends_in_a_template_from_the_shell(tmp_path, run, tokenizer):
    (tmp_path / "a.jsonl").write_text(json.dumps({"title": "T", "text": "body"}))
    arguments = ("--validation_fraction", 0, "--output")
    run("--input", tmp_path / "a.jsonl", "--template", r"{title}\n\n{text}", *arguments, tmp_path / "made")
    write_jsonl(tmp_path / "b.jsonl", ["T\n\nbody"])
    run("--input", tmp_path / "b.jsonl", *arguments, tmp_path / "given")
    assert (stream_of(tmp_path / "made", "train") == stream_of(tmp_path / "given", "train")).all()
