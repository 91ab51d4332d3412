"""Tests for documents and prepared folders at URLs, with a local server and fsspec's in-memory file system."""

import gzip
import http.server
import io
import json
import re
import shutil
import threading
from collections import Counter
from pathlib import Path

import fsspec
import pytest

from pretrain import urls
from pretrain.errors import InputError
from pretrain_tools.preparation.documents.sources import find_sources
from support.prepared import WRITERS, content_of, make_parts_small, texts, write_jsonl


@pytest.fixture
def memory():
    """An empty in-memory file system from fsspec."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


class Server(http.server.SimpleHTTPRequestHandler):
    """Server without range support. If `breaks_off` is set, it truncates the first response for each file."""

    breaks_off = False
    asked: Counter

    def do_GET(self):
        path = Path(self.translate_path(self.path))
        self.asked[path.name] += 1
        if not self.breaks_off or not path.is_file() or self.asked[path.name] > 1:
            super().do_GET()
            return
        content = path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        self.close_connection = True

    def log_message(self, *arguments):
        """Suppresses the log."""


@pytest.fixture
def served(tmp_path):
    """(folder, its URL, handler class)"""
    folder = tmp_path / "served"
    folder.mkdir()
    handler = type("Handler", (Server,), {"asked": Counter()})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *given: handler(*given, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()


def write_documents(folder):
    folder.mkdir(exist_ok=True)
    for number, (suffix, write) in enumerate(WRITERS.items()):
        (folder / f"{number}.{suffix}").write_bytes(write(texts(60)[number * 20 : number * 20 + 20]))
    (folder / "3.jsonl.gz").write_bytes(gzip.compress(b"".join(map(as_line, texts(20)))))


def as_line(text):
    return json.dumps({"text": text}).encode() + b"\n"


def ids_and_documents(folder):
    return {name: content for name, content in content_of(folder).items() if not name.endswith("manifest.json")}


@pytest.mark.parametrize("workers", [1, 2])
def test_documents_in_memory_are_prepared_as_those_in_files(tmp_path, run, memory, monkeypatch, workers):
    make_parts_small(monkeypatch, 500)
    write_documents(tmp_path / "docs")
    memory.put(str(tmp_path / "docs"), "/bucket/docs", recursive=True)
    run("--input", tmp_path / "docs/*", "--output", tmp_path / "files")
    run("--input", "memory://bucket/docs/*", "--output", tmp_path / "urls", "--workers", workers)
    assert content_of(tmp_path / "urls") == content_of(tmp_path / "files")


def test_interrupted_downloads_are_completed(tmp_path, run, served, monkeypatch):
    monkeypatch.setattr(urls.time, "sleep", lambda seconds: None)
    folder, url, handler = served
    write_documents(folder)
    handler.breaks_off = True
    names = sorted(path.name for path in folder.iterdir())
    run("--input", *(f"{url}/{name}" for name in names), "--output", tmp_path / "urls", "--workers", 1)
    assert handler.asked["3.jsonl.gz"] > 1, "the server must have cut off a response"
    run("--input", folder / "*", "--output", tmp_path / "files")
    assert ids_and_documents(tmp_path / "urls") == ids_and_documents(tmp_path / "files")
    # A pattern lists the folder, and the server's date reveals a change.
    (folder / "4.jsonl").write_bytes(as_line("one"))
    assert [source.name for source in find_sources([f"{url}/*.jsonl"])] == ["4.jsonl"]
    with pytest.raises(InputError, match=r"source 3\.jsonl\.gz has changed"):
        (folder / "3.jsonl.gz").write_bytes(gzip.compress(as_line("another")))
        run("--input", *(f"{url}/{name}" for name in names), "--output", tmp_path / "urls")


@pytest.mark.parametrize("can_seek", [True, False])
def test_a_read_is_retried_until_the_file_can_be_opened_again(memory, monkeypatch, can_seek):
    monkeypatch.setattr(urls.time, "sleep", lambda seconds: None)
    content = bytes(range(100))
    memory.pipe_file("/x/a.bin", content)
    answers = iter([OSError("busy"), *([] if can_seek else [io.BytesIO(content[:30])]), io.BytesIO(content)])
    with urls.open_file("memory://x/a.bin") as file:
        file._can_seek = can_seek
        assert file.read(40) == content[:40]

        def answer():
            given = next(answers)
            if isinstance(given, OSError):
                raise given
            return given

        monkeypatch.setattr(file, "_opened", answer)
        file._file = io.BytesIO()
        file._file.close()  # so that the next read fails
        assert file.read(60) == content[40:]


def test_secrets_of_a_url_are_shown_nowhere(tmp_path, run, served):
    folder, url, _ = served
    write_jsonl(folder / "a.jsonl", texts(5), [b"bad"])
    secret = url.replace("//", "//user:canary@") + "/a.jsonl?signature=canary"
    told = run("--input", secret, "--output", tmp_path / "out", "--on_error", "skip", "--validation_fraction", 0)
    assert "a.jsonl, line 6" in told and "canary" not in told
    assert not [name for name, content in content_of(tmp_path / "out").items() if b"canary" in content]
    with pytest.raises(InputError) as refused:
        run("--input", secret, "--output", tmp_path / "stopped")
    assert f"{url}/a.jsonl, line 6" in str(refused.value) and "canary" not in str(refused.value)


def test_unreachable_inputs_are_named(tmp_path, run, memory, served):
    _, url, _ = served
    write_jsonl(tmp_path / "a.jsonl", texts(3))
    cases = {
        "memory://nothing/*.jsonl": r"--input memory://nothing/\*\.jsonl: no such file",
        f"{url}/none.jsonl": r"--input http://127.*none\.jsonl: no such file",
        "http://127.0.0.1:9/a.jsonl": r"127\.0\.0\.1:9/a\.jsonl: cannot be reached: .*; run the same command again",
        "nosuch://a/b.jsonl": r"nosuch://a/b\.jsonl: cannot be reached: ValueError: Protocol not known",
    }
    for given, message in cases.items():
        with pytest.raises(InputError, match=message):
            run("--input", given, "--output", tmp_path / "out")
    memory.pipe_file("/x/a.jsonl", as_line("one"))
    with pytest.raises(InputError, match=r"URLs and local paths cannot be mixed"):
        run("--input", tmp_path / "a.jsonl", "memory://x/a.jsonl", "--output", tmp_path / "out")
    with pytest.raises(InputError, match=r"--output http://127.*: cannot be written"):
        run("--input", tmp_path / "a.jsonl", "--output", f"{url}/out", "--staging", tmp_path / "staging")
    assert not (tmp_path / "out").exists()


def test_a_server_that_refuses_is_not_a_missing_file_and_its_answers_hide_secrets(tmp_path, run, served, monkeypatch):
    monkeypatch.setattr(urls.time, "sleep", lambda seconds: None)
    folder, url, handler = served
    write_jsonl(folder / "a.jsonl", texts(3))
    monkeypatch.setattr(handler, "do_GET", lambda self: self.send_error(503), raising=False)
    with pytest.raises(urls.UnreachableError) as broken:
        run("--input", f"{url}/a.jsonl?signature=canary", "--output", tmp_path / "out")
    assert "503" in str(broken.value) and f"{url}/a.jsonl" in str(broken.value) and "canary" not in str(broken.value)
    monkeypatch.setattr(handler, "do_HEAD", handler.do_GET, raising=False)
    with pytest.raises(InputError) as refused:
        run("--input", f"{url}/a.jsonl?signature=canary", f"{url}/b.jsonl", "--output", tmp_path / "out")
    said = str(refused.value).splitlines()
    assert [name in line and "503" in line for name, line in zip(("a.jsonl", "b.jsonl"), said, strict=True)] == [1, 1]
    assert "canary" not in str(refused.value)


def test_a_stream_of_unknown_length_is_not_seekable(tmp_path, run, served, monkeypatch):
    folder, url, handler = served
    write_documents(folder)

    def send(self):
        self.send_response(200)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(Path(self.translate_path(self.path)).read_bytes())

    monkeypatch.setattr(handler, "do_GET", send, raising=False)
    monkeypatch.setattr(handler, "do_HEAD", send, raising=False)
    names = sorted(path.name for path in folder.iterdir())
    run("--input", *(f"{url}/{name}" for name in names), "--output", tmp_path / "urls", "--workers", 1)
    run("--input", folder / "*", "--output", tmp_path / "files")
    assert ids_and_documents(tmp_path / "urls") == ids_and_documents(tmp_path / "files")


def of_memory(memory, root):
    return {name.removeprefix(f"{root}/"): memory.cat_file(name) for name in memory.find(root)}


def test_an_output_url_gets_the_bytes_of_a_folder_and_is_recognised(tmp_path, run, memory):
    write_jsonl(tmp_path / "a.jsonl", texts(100))
    given = ("--input", tmp_path / "a.jsonl", "--validation_fraction", 0.2, "--shard_tokens", 1000)
    run(*given, "--output", tmp_path / "folder")
    there = ("--output", "memory://bucket/tokens", "--staging", tmp_path / "staging")
    told = run(*given, *there)
    assert of_memory(memory, "/bucket/tokens") == content_of(tmp_path / "folder")
    assert re.search(r"memory://bucket/tokens: \d+ files copied", told)
    assert "already complete" in run(*given, *there)
    # A machine without a local copy also recognizes the folder, and uploads nothing.
    shutil.rmtree(tmp_path / "staging")
    told = run(*given, *there)
    assert "already complete" in told and "0 files copied" in told
    with pytest.raises(InputError, match=r"options\.validation_fraction was 0\.2 but is now 0\.01"):
        run("--input", tmp_path / "a.jsonl", *there)


def test_unfinished_work_is_not_uploaded_over_an_output_that_another_machine_has_finished(tmp_path, run, memory):
    write_jsonl(tmp_path / "a.jsonl", texts(100))
    arguments = ("--input", tmp_path / "a.jsonl", "--output", "memory://bucket/tokens", "--staging")
    run(*arguments, tmp_path / "staging")
    whole = of_memory(memory, "/bucket/tokens")
    unfinished = shutil.copytree(tmp_path / "staging", tmp_path / "other") / "memory/bucket/tokens"
    (unfinished / ".unfinished").mkdir()
    (unfinished / "manifest.json").unlink()
    (unfinished / "train-00000.bin").write_bytes(b"12")
    assert "0 files copied" in run(*arguments, tmp_path / "other")
    assert of_memory(memory, "/bucket/tokens") == whole


def test_uploading_to_an_output_url_resumes_after_a_failure(tmp_path, run, memory, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", texts(100))
    given = ("--input", tmp_path / "a.jsonl", "--shard_tokens", 1000)
    there = ("--output", "memory://bucket/tokens", "--staging", tmp_path / "staging")
    put, arrived = type(memory).put_file, []

    def put_some(self, local, remote, **more):
        if len(arrived) == 4:
            raise ConnectionError("the network is down")
        arrived.append(remote)
        put(self, local, remote, **more)

    with (
        monkeypatch.context() as failing,
        pytest.raises(InputError, match=r"network is down; the complete output is in .*Run"),
    ):
        failing.setattr(type(memory), "put_file", put_some)
        run(*given, *there)
    assert not memory.exists("/bucket/tokens/manifest.json")
    told = run(*given, *there)
    run(*given, "--output", tmp_path / "folder")
    whole = content_of(tmp_path / "folder")
    assert of_memory(memory, "/bucket/tokens") == whole and f"{len(whole) - 4} files copied" in told


def test_an_output_url_that_holds_something_else_is_left_alone(tmp_path, run, memory):
    write_jsonl(tmp_path / "a.jsonl", texts(3))
    memory.pipe_file("/bucket/mine/thesis.txt", b"years")
    with pytest.raises(InputError, match=r"memory://bucket/mine: already contains other files \(thesis\.txt\)"):
        run("--input", tmp_path / "a.jsonl", "--output", "memory://bucket/mine", "--staging", tmp_path / "staging")
    assert of_memory(memory, "/bucket") == {"mine/thesis.txt": b"years"} and not (tmp_path / "staging").exists()
