"""Tests that kills, signals, locks and changed inputs neither corrupt the output nor lose finished work."""

import gzip
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pretrain.data.tokenizer import load_tokenizer
from pretrain.errors import InputError
from pretrain.processes import folder_lock, process_state
from pretrain_tools.preparation import workers
from pretrain_tools.preparation.documents.sources import Files, find_sources
from pretrain_tools.preparation.encoded_part import Tally
from pretrain_tools.preparation.plan import PreparationOptions, PreparationRequest
from pretrain_tools.preparation.prepare import prepare
from pretrain_tools.preparation.verification import verify_shards
from support.prepared import KILLED, content_of, make_parts_small, texts, write_jsonl
from support.project import ROOT


def prepare_files(tmp_path, tokenizer, **options):
    """Prepares tmp_path/*.jsonl in this process, writing to tmp_path/out."""
    return prepare(request_for(tmp_path, tokenizer, **options))


def request_for(tmp_path, tokenizer, **options):
    documents = Files(find_sources([f"{tmp_path}/*.jsonl"]))
    return PreparationRequest(documents, PreparationOptions(**options), load_tokenizer(tokenizer), tmp_path / "out")


def test_a_cluster_without_a_cpu_core_is_rejected(monkeypatch):
    cluster = SimpleNamespace(cluster_resources=lambda: {"CPU": 0.5})
    monkeypatch.setattr(workers, "_started", lambda address, count: cluster)
    with pytest.raises(InputError, match="has less than one CPU core"):
        list(workers.performed_on_ray(len, ["a"], None, "ray://head"))


def test_a_second_process_is_rejected_with_the_name_of_the_first(tmp_path, tokenizer):
    write_jsonl(tmp_path / "a.jsonl", texts(9))
    state = tmp_path / "out" / ".unfinished"
    state.mkdir(parents=True)
    with (
        folder_lock(state / "lock"),
        pytest.raises(InputError, match=rf"in use by process {os.getpid()} on {socket.gethostname()}"),
    ):
        prepare_files(tmp_path, tokenizer)
    (state / "lock").write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    with pytest.raises(InputError, match=r"still locked by process 1 on elsewhere; .* remove .*lock and run again"):
        prepare_files(tmp_path, tokenizer)
    (state / "lock").write_text(json.dumps({"pid": 1, "host": socket.gethostname()}))
    prepare_files(tmp_path, tokenizer)
    assert not state.exists()


def test_leftovers_of_a_kill_in_a_finished_folder_are_removed(tmp_path, tokenizer):
    write_jsonl(tmp_path / "a.jsonl", texts(9))
    prepare_files(tmp_path, tokenizer)
    before = content_of(tmp_path / "out")
    (tmp_path / "out" / ".unfinished").mkdir()
    (tmp_path / "out" / ".unfinished" / "lock").write_text("")
    assert prepare_files(tmp_path, tokenizer).already_done
    assert content_of(tmp_path / "out") == before


def test_input_that_changes_while_it_is_read_is_noticed(tmp_path, tokenizer):
    write_jsonl(tmp_path / "a.jsonl", texts(9))
    request = request_for(tmp_path, tokenizer)

    def change(tally):
        write_jsonl(tmp_path / "a.jsonl", texts(10))

    with pytest.raises(InputError, match=r"the input changed while it was being read: source a\.jsonl has changed"):
        prepare(request, report=change)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_records_before_a_bad_one_are_kept_and_skip_continues(tmp_path, tokenizer, monkeypatch, capsys):
    make_parts_small(monkeypatch, 500)
    # The partition with the bad record also has a duplicate, which must not be counted twice.
    write_jsonl(tmp_path / "a.jsonl", [*texts(50), "copy", "copy"], [b"bad"])
    with pytest.raises(InputError, match=r"a\.jsonl, line 53: invalid JSON"):
        prepare_files(tmp_path, tokenizer, deduplicate=True)
    assert (tmp_path / "out" / ".unfinished" / "progress.json").exists()
    outcome = prepare_files(tmp_path, tokenizer, deduplicate=True, on_error="skip")
    assert "resuming after" in capsys.readouterr().err
    skipped = Tally.recorded(tmp_path / "out")
    documents = sum(shard.documents for shard in outcome.manifest.shards)
    assert (skipped.bad_records, documents, skipped.duplicate_documents) == (1, 51, 1)
    continued = content_of(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "first")
    prepare_files(tmp_path, tokenizer, deduplicate=True, on_error="skip")
    assert content_of(tmp_path / "out") == continued


def wait_until_gone(pids, seconds=120):
    deadline = time.monotonic() + seconds
    # A zombie process, as in a container without an init process, counts as dead.
    while alive := [pid for pid in pids if process_state(pid) not in (None, "Z", "X")]:
        assert time.monotonic() < deadline, f"workers outlived their parent: {alive}"
        time.sleep(0.05)


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_any_write_it_continues_to_the_same_bytes(tmp_path, tokenizer, workers, run_killed):
    write_jsonl(tmp_path / "a.jsonl", texts(100))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    arguments = ("--input", f"{tmp_path}/*.jsonl*", "--tokenizer", tokenizer, "--shard_tokens", 3000)
    assert run_killed(0, *arguments, "--workers", 1, "--output", tmp_path / "whole").returncode == 0
    broken = (*arguments, "--output", tmp_path / "broken", "--workers", workers)
    for at in (1, 3, 8, 9, 10, 11, 12):
        killed = run_killed(at, *broken)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert not (tmp_path / "broken" / "manifest.json").exists()
    pids = [int(pid) for pid in killed.stdout.split()]
    assert len(pids) == (0 if workers == 1 else workers)
    ended = run_killed(0, *broken)
    assert ended.returncode == 0, ended.stderr
    assert "resuming after" in ended.stderr
    assert content_of(tmp_path / "broken") == content_of(tmp_path / "whole")
    wait_until_gone(pids)


@pytest.mark.skipif(os.environ.get("FAULTS") != "all", reason="minutes; in make test-faults")
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_random_writes_it_continues_to_the_same_bytes(tmp_path, tokenizer, seed, run_killed):
    rng = random.Random(seed)
    write_jsonl(tmp_path / "a.jsonl", texts(100 + seed))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    arguments = ("--input", f"{tmp_path}/*.jsonl*", "--tokenizer", tokenizer, "--shard_tokens", 3000)
    assert run_killed(0, *arguments, "--workers", 1, "--output", tmp_path / "whole").returncode == 0
    kills = 0
    while ended := run_killed(
        rng.randint(1, 12), *arguments, "--output", tmp_path / "broken", "--workers", 1 + seed % 2
    ):
        if ended.returncode == 0:
            break
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        kills += 1
    assert kills > 2 and content_of(tmp_path / "broken") == content_of(tmp_path / "whole")


# Runs prepare_data.py with a file size limit, to simulate a full disk.
FULL = (
    """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
"""
    + KILLED
)


def test_a_full_disk_is_reported_and_finished_work_is_kept(tmp_path, tokenizer, run_killed):
    write_jsonl(tmp_path / "a.jsonl", texts(200))
    arguments = ("--input", tmp_path / "a.jsonl", "--tokenizer", tokenizer)
    limit = (tokenizer / "tokenizer.json").stat().st_size + 1000
    output = ("--output", tmp_path / "out")
    command = [sys.executable, "-c", FULL, str(limit), "0", *map(str, (*arguments, *output))]
    full = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert full.returncode == 2 and "Traceback" not in full.stderr, full.stderr
    assert "File too large" in full.stderr and "free up space or fix permissions, then run" in full.stderr
    ended = run_killed(0, *arguments, *output)
    assert ended.returncode == 0 and "resuming after" in ended.stderr, ended.stderr
    assert run_killed(0, *arguments, "--output", tmp_path / "whole").returncode == 0
    assert content_of(tmp_path / "out") == content_of(tmp_path / "whole")


def test_a_signal_stops_between_parts_with_a_hint_to_run_again(tmp_path, tokenizer, run_killed):
    write_jsonl(tmp_path / "a.jsonl", texts(400))
    arguments = ("--input", tmp_path / "a.jsonl", "--tokenizer", tokenizer, "--output", tmp_path / "out")
    code = KILLED.replace("os.kill(os.getpid(), signal.SIGKILL)", "os.kill(os.getpid(), signal.SIGTERM)")
    command = [sys.executable, "-c", code, "9", *map(str, arguments)]
    stopped = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (stopped.returncode, "run the same command again to resume" in stopped.stderr) == (75, True)
    assert run_killed(0, *arguments).returncode == 0
    assert verify_shards(tmp_path / "out") == []


def test_changed_sources_and_options_of_an_unfinished_folder_are_rejected(tmp_path, tokenizer, run_killed):
    write_jsonl(tmp_path / "a.jsonl", texts(100))
    arguments = ("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out")
    assert run_killed(8, *arguments, "--tokenizer", tokenizer).returncode == -signal.SIGKILL
    with pytest.raises(InputError, match=r"was started .*: options\.validation_fraction was 0\.01 but is now 0\.5"):
        prepare_files(tmp_path, tokenizer, validation_fraction=0.5)
    write_jsonl(tmp_path / "a.jsonl", texts(101))
    with pytest.raises(InputError, match=r"source a.jsonl has changed"):
        prepare_files(tmp_path, tokenizer)


def test_the_order_of_the_sources_matters_only_until_the_folder_is_complete(tmp_path, tokenizer, monkeypatch):
    """It depends on how the paths are written: './b.jsonl' comes before 'a.jsonl'."""
    make_parts_small(monkeypatch, 500)
    write_jsonl(tmp_path / "a.jsonl", texts(50))
    write_jsonl(tmp_path / "b.jsonl", texts(50), [b"bad"])
    with pytest.raises(InputError, match=r"b\.jsonl, line 51: invalid JSON"):
        prepare_files(tmp_path, tokenizer)
    request = request_for(tmp_path, tokenizer, on_error="skip")
    turned = replace(request, documents=Files(request.documents.sources[::-1]))
    with pytest.raises(InputError, match=r"was started .*: the order of the sources has changed"):
        prepare(turned)
    prepare(request)
    assert prepare(turned).already_done


def test_extensions_with_the_same_name_are_all_recorded(tmp_path):
    files = [tmp_path / folder / "mine.py" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text("one = 1")
    options = PreparationOptions(extensions=tuple(map(str, files)))
    before = options.as_plan()["extensions"]
    files[0].write_text("one = 2")
    assert options.as_plan()["extensions"] != before
