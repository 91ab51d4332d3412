"""Ray, on this machine: the bytes that one process makes."""

import sys

import pytest

from pretrain.errors import InputError
from support.prepared import content_of, make_parts_small, texts, write_jsonl


@pytest.fixture
def small_parts(monkeypatch):
    make_parts_small(monkeypatch, 1000)


def write_inputs(tmp_path):
    """Files of several sizes, with copies across them, bad lines and empty documents."""
    documents = texts(150)
    write_jsonl(tmp_path / "a.jsonl", documents[:90], [b"bad", b'{"text": ""}'])
    write_jsonl(tmp_path / "b.jsonl", documents[40:100], [b"worse"])
    write_jsonl(tmp_path / "c.jsonl", ["", *documents[90:120]])
    write_jsonl(tmp_path / "d.jsonl", [*documents[100:], documents[0]])
    return (
        "--input",
        f"{tmp_path}/*.jsonl",
        "--on_error",
        "skip",
        "--validation_fraction",
        0.2,
        "--shard_tokens",
        2000,
    )


def test_ray_is_asked_for_by_name_when_it_is_not_there(tmp_path, run, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", texts(3))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"Ray is not installed; pip install"):
        run("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--engine", "ray")
    with pytest.raises(InputError, match=r"--engine quick: must be auto, fast or reference; and ray"):
        run("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--engine", "ray,quick")


def test_ray_gives_the_bytes_of_one_machine(tmp_path, run, small_parts):
    (tmp_path / "items.txt").write_text("\n".join(text for text in texts(30) if len(text) > 100))
    # Of several parts in the cluster's processes, too, which do not know of small ones; the long lines are left out.
    lines = [document for text in texts(90) for document in (text, "long " * 24_000)]
    for name in ("e.jsonl", "f.jsonl"):
        write_jsonl(tmp_path / name, lines)
    arguments = (*write_inputs(tmp_path), "--decontaminate", tmp_path / "items.txt", "--max_characters", 5000)
    arguments = (*arguments, "--near_duplicates", "0.8", "--write_text")
    run(*arguments, "--output", tmp_path / "whole")
    run(*arguments, "--output", tmp_path / "ray", "--engine", "ray", "--workers", 2)
    assert content_of(tmp_path / "ray") == content_of(tmp_path / "whole")
    assert '"items.txt": {' in (tmp_path / "ray/manifest.json").read_text(), "the actors must have found some"
