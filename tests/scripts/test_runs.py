"""Tests for runs.py: the status of runs in every state, comparisons, tables, and a step's data."""

import json
import os
import re
import shutil
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

import runs
from pretrain.checkpoint.run_state import record_rollbacks
from pretrain.data.tokenizer import load_decoder
from pretrain.errors import InputError
from pretrain.processes import folder_lock
from pretrain_tools.preparation.verification import verify_shards
from pretrain_tools.runs import step_documents
from pretrain_tools.runs.comparison import (
    comparison_text,
    flatten_settings,
    recorded_settings,
    results_of,
    setting_differences,
    summary_text,
)
from pretrain_tools.runs.history import read_history
from pretrain_tools.runs.plots import plot_runs
from pretrain_tools.runs.status import (
    _seconds_left,
    is_training,
    list_text,
    read_status,
    sparkline,
    state_text,
    status_text,
)
from pretrain_tools.runs.step_documents import documents_text, open_step, read_sequences
from support.project import run_script
from support.run_logs import end_line, finished_run, start_line, train_line, validation_line, write_run

COMMANDS = ("list", "status", "plot", "compare", "summary", "documents", "save", "stop", "abort", "anneal")
DEAD = {"pid": 2**22 + 1, "host": socket.gethostname()}


def refused(*arguments) -> str:
    """Returns runs.py's error message on stderr. The status must be 2, without a traceback."""
    result = run_script("runs.py", *arguments, check=False)
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    return result.stderr


def test_a_run_whose_process_holds_the_lock_is_running(tmp_path):
    run = write_run(tmp_path / "run", [start_line(), *(train_line(step) for step in range(1, 26))])
    with folder_lock(run / ".lock"):
        status = read_status(run)
    assert status.state == "running" and f"process {os.getpid()} on" in status.where
    assert status.step == 25 and status.progress == 0.25
    assert status.seconds_left == pytest.approx(75, rel=0.01)  # one line per second


@pytest.mark.parametrize(
    ("lines", "state", "reason"),
    [
        ([train_line(4), end_line(4)], "finished", "done"),
        ([train_line(4), end_line(4, 75, "preempted")], "stopped", "preempted"),
        ([train_line(4), end_line(4, 16, "diverged"), {"event": "evaluation", "step": 4}], "stopped", "diverged"),
        ([train_line(4)], "crashed", None),
        ([train_line(4), end_line(4, 75, "preempted"), start_line(4)], "crashed", None),
        ([train_line(4), end_line(4, 75, "preempted"), start_line(4), train_line(5)], "crashed", None),
    ],
)
def test_a_run_without_a_process_is_finished_stopped_or_crashed(tmp_path, lines, state, reason):
    run = write_run(tmp_path / "run", [start_line(), *lines])
    (run / ".lock").write_text(json.dumps(DEAD))
    status = read_status(run)
    assert (status.state, status.reason) == (state, reason) and status.seconds_left is None


def test_a_stale_lock_does_not_mean_running_even_if_its_pid_is_reused(tmp_path):
    run = write_run(tmp_path / "run", [start_line(), train_line(1)])
    (run / ".lock").write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    assert is_training(run) is False
    (run / ".lock").write_text("{broken")
    assert is_training(run) is None


def test_a_reason_is_shortened_to_its_first_words(tmp_path):
    for reason, text in (
        ("stopped, saved at step 4; the same", "stopped"),
        ("preempted, saved", "stopped: preempted"),
    ):
        run = write_run(tmp_path / "run", [start_line(), train_line(4), end_line(4, 130, reason)])
        assert state_text(read_status(run)) == text


def test_a_requested_end_is_the_new_total(tmp_path):
    anneal = {"event": "control", "step": 4, "command": "anneal", "total_steps": 6}
    assert read_status(write_run(tmp_path / "run", [start_line(), train_line(4), anneal])).total_steps == 6


def test_reading_a_lock_never_acquires_it(tmp_path):
    run = write_run(tmp_path / "run", [start_line(), train_line(1)])
    with folder_lock(run / ".lock"):
        for _ in range(50):
            assert is_training(run)
    with folder_lock(run / ".lock"):  # the lock can still be acquired
        assert is_training(run)


def test_a_run_on_another_machine_is_alive_while_its_heartbeat_is_fresh(tmp_path):
    run = write_run(tmp_path / "run", [start_line(), train_line(1)])
    (run / ".lock").write_text(json.dumps({"pid": 7, "host": "elsewhere"}))
    beat = run / "heartbeats" / "rank-00000.json"
    beat.parent.mkdir()
    beat.write_text(json.dumps({"pid": 7, "host": "elsewhere", "time": time.time(), "silent_seconds": 300.0}))
    status = read_status(run)
    assert status.state == "running" and status.where == "process 7 on elsewhere"
    assert "no progress for 5 min 00 s (a long step or a hang)" in status_text(run)
    beat.write_text("{}")
    os.utime(beat, (time.time() - 600,) * 2)
    assert read_status(run).state == "crashed"


def test_the_total_comes_from_the_newest_start(tmp_path):
    raised = [start_line(0, 100), train_line(100), start_line(100, 20_000)]
    run = write_run(tmp_path / "run", [*raised, *(train_line(step) for step in range(101, 3000))])
    assert read_status(run).total_steps == 20_000


def test_a_run_that_just_started_has_no_numbers_yet(tmp_path):
    run = write_run(tmp_path / "run", [start_line()])
    status = read_status(run)
    assert (status.step, status.train) == (0, {})
    assert "0.0% · step 0 of 100 · - tokens" in status_text(run)
    assert " - " in list_text(run)


def test_the_time_left_excludes_compilation():
    def line(step, time):
        return train_line(step, time=time)

    stage = {"event": "stage", "step": 20, "stage": 2}
    begun = [start_line(time=0), line(10, 600), line(20, 610)]
    assert _seconds_left(begun, 20, 100) == 80, "the first 600 s must not count, because they were compilation"
    assert _seconds_left([*begun, stage, line(30, 1210)], 30, 100) is None
    assert _seconds_left([*begun, stage, line(30, 1210), line(40, 1230)], 40, 100) == 60 * 2


def test_the_status_page_shows_the_essentials(tmp_path):
    lines = [start_line(), *(train_line(step) for step in range(1, 51)), validation_line(50, 4.0, "web")]
    run = write_run(tmp_path / "run", [*lines, {"event": "warning", "step": 50, "message": "a\nslow disk"}])
    with folder_lock(run / ".lock"):
        text = run_script("runs.py", "status", run).stdout
    for part in ("running, process", "50.0% · step 50 of 100", "50 s at the current pace", "loss            4.5000"):
        assert part in text, text
    assert "validation web  loss 4.0000 at step 50" in text and "warning     step 50 · message a slow disk" in text


def test_the_list_shows_no_control_characters(tmp_path):
    finished_run(tmp_path / "done\x1b[2J")
    text = run_script("runs.py", "list", tmp_path).stdout
    assert "\x1b" not in text and "done" in text and "100/100" in text


def test_the_list_has_a_line_for_every_run(tmp_path):
    finished_run(tmp_path / "done")
    write_run(tmp_path / "sweep" / "cut", [start_line(), train_line(7), end_line(7, 75, "preempted")])
    lines = run_script("runs.py", "list", tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["run", f"{tmp_path}/done", f"{tmp_path}/sweep/cut"]
    assert "finished" in lines[1] and "4.0000" in lines[1] and "3.5000" in lines[1] and "100%" in lines[1]
    assert "stopped: preempted" in lines[2]
    assert run_script("runs.py", "status", tmp_path).stdout.splitlines()[1].startswith(f"{tmp_path}/done")


def test_long_runs_are_listed_quickly(tmp_path):
    lines = [start_line(), *(train_line(step) for step in range(1, 20_000)), validation_line(19_999, 3.0)]
    run = write_run(tmp_path / "run", lines)
    size = (run / "metrics.jsonl").stat().st_size

    def seconds(read) -> float:
        start = time.perf_counter()
        read()
        return time.perf_counter() - start

    listed = min(seconds(lambda: read_status(run)) for _ in range(20))
    # Reading the end takes 10 ms; reading the whole file takes 0.2 s.
    assert size > 4_000_000 and listed < min(seconds(lambda: read_history(run)) for _ in range(3)) / 5


def test_a_comparison_shows_differing_settings_and_results(tmp_path):
    runs = [finished_run(tmp_path / "low"), finished_run(tmp_path / "high", learning_rate=2e-3)]
    text = comparison_text(runs)
    settings, results = text.split("results")
    assert "optim.learning_rate" in settings and "0.002" in settings and "seed" not in settings
    assert "3.5000, 1.7500 bits/byte" in results and "0.2500 ± 0.0100" in results and "best validation demo" in results
    assert run_script("runs.py", "compare", *runs).stdout.strip() == text.strip()


def test_differences_between_settings():
    assert flatten_settings({"a": {"b": 1, "c": []}, "d": [{"e": 2}], "f": [1, 2]}) == {
        "a.b": 1, "a.c": [], "d.0.e": 2, "f": [1, 2]
    }  # fmt: skip
    assert setting_differences([{"a": 1, "b": 2}, {"a": 1, "c": 3}]) == {"b": [2, None], "c": [None, 3]}


def test_damaged_records_of_a_run_are_skipped(tmp_path):
    run = finished_run(tmp_path / "run")
    (run / "config.yaml").write_text("a: [")
    (run / "model.json").write_text("{")
    (run / "environment.json").unlink()
    assert recorded_settings(run) == {"strategy.strategy": "ddp", "strategy.ranks": 2, "strategy.precision": "bf16"}
    summary = run_script("runs.py", "summary", run).stdout
    assert summary.splitlines()[2].split() == ["parameters", "1,000"]


def test_the_summary_is_one_page(tmp_path):
    text = run_script("runs.py", "summary", finished_run(tmp_path / "run")).stdout
    rows = dict(re.split("  +", line, maxsplit=1) for line in text.splitlines()[2:])
    assert rows["parameters"] == "1,000" and rows["strategy.strategy"] == "ddp" and rows["strategy.ranks"] == "2"
    assert rows["batch.tokens_per_step"] == "2048" and "data/demo" in rows.values()
    assert "arc_easy · acc" in text and len(text.splitlines()) < 60


def test_energy_counts_repeated_steps(tmp_path):
    lines = [start_line(energy="measured by RAPL"), train_line(1, joules=900.0), train_line(2, joules=900.0)]
    lines += [start_line(step=1, energy="measured by RAPL"), train_line(2, joules=1800.0)]
    run = write_run(tmp_path / "run", [*lines, end_line(2) | {"joules": 0.0}])
    results = results_of(read_history(run), read_status(run))
    assert results["energy"] == "0.001 kWh, measured by RAPL", (
        "a run without a carbon intensity must show only the energy"
    )


def test_results_of_a_run_that_lost_its_numbers(tmp_path):
    run = write_run(tmp_path / "run", [start_line(), {"event": "train", "step": 1, "loss": None}])
    results = results_of(read_history(run), read_status(run))
    assert results["step"] == "1" and not any("loss" in name for name in results)


def test_plot_writes_a_picture(tmp_path):
    runs = [finished_run(tmp_path / "a"), finished_run(tmp_path / "b")]
    assert run_script("runs.py", "plot", runs[0]).stdout == f"{runs[0]}/plot.png\n"
    plot_runs(runs, None)
    plot_runs(runs, tmp_path / "mine")
    assert {path.name for path in tmp_path.glob("*.*")} == {"plot.png", "mine.png"}
    with pytest.raises(InputError, match=r"--output \.: is a folder; use a path such as plot\.png"):
        plot_runs(runs, Path())


def trained(tmp_path, shards, **more):
    """Writes a run folder with 20 steps of 4 sequences of 64 tokens from real shards."""
    ramp = {"sequences_per_level": [4], "first_steps": [0]}
    run = write_run(tmp_path / "run", [start_line(0, 20, **ramp), *(train_line(step) for step in range(1, 21))])
    data = {"train": [{"shards": str(shards), "weight": 1.0}], "sequence_length": 64}
    (run / "config.yaml").write_text(yaml.safe_dump({"seed": 3, "data": data, **more}))
    return run


def test_the_documents_of_a_step_match_the_training_loop(tmp_path, shards, monkeypatch):
    run = trained(tmp_path, shards)
    batches, first_sample, count = open_step(run, 7)
    assert (first_sample, count) == (24, 4)
    read = batches.read(6, 0, 0, ranks=1, sequences=4)  # the seventh step has index 6
    stream = np.fromfile(shards / "train-00000.bin", dtype=batches.dtype)
    for row in range(4):
        (sequence,) = read_sequences(batches, first_sample + row)
        assert (sequence.ids == read[row][:-1]).all()
        assert (stream[sequence.offset :][:65] == read[row]).all()
    decoder = load_decoder(shards / "tokenizer")
    monkeypatch.setattr(step_documents, "SHOWN_CHARACTERS", 10_000)
    text = documents_text(run, 7, limit=2)
    (first,) = read_sequences(batches, first_sample)
    for line in decoder.decode(first.documents[0].ids.tolist(), skip_special_tokens=False).splitlines():
        assert f"    | {line}" in text
    assert f"train-00000.bin · tokens {first.offset:,} to {first.offset + 63:,}" in text
    assert "2 more sequences; use --limit 4" in text
    assert re.search(r"^    from \w+\.py, line 1$", text, re.MULTILINE)


def test_the_origin_of_a_document_contains_its_text(tmp_path, shards, text_files):
    batches, *_ = open_step(trained(tmp_path, shards), 1)
    decoder = load_decoder(shards / "tokenizer")
    for sample in range(0, 80, 7):
        (sequence,) = read_sequences(batches, sample)
        for document in sequence.documents:
            source = (text_files / document.origin.split(",")[0]).read_text(encoding="utf-8")
            # A window may split a character.
            assert decoder.decode(document.ids.tolist(), skip_special_tokens=False).strip("\ufffd") in source


def test_shards_from_earlier_versions_have_no_origins(tmp_path, shards):
    folder = tmp_path / "old"
    shutil.copytree(shards, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    for shard in manifest["shards"]:
        for name in shard.pop("beside"):
            (folder / name).unlink()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert verify_shards(folder) == []
    text = documents_text(trained(tmp_path, folder), 7, limit=2)
    assert "  document of " in text and "    from " not in text


@pytest.mark.parametrize("is_saved", [True, False])
def test_skipped_samples_shift_the_data_of_later_steps(tmp_path, shards, is_saved):
    run = trained(tmp_path, shards)
    plain = [read_sequences(open_step(run, 5)[0], 16 + n)[0].offset for n in range(4)]
    rollbacks = [{"samples": [8, 4]}, {"samples": None}]
    if not is_saved:  # there has been no checkpoint since the rollback
        record_rollbacks(run, [{**entry, "learning_rate_factor": 1.0} for entry in rollbacks])
    saved = run / "checkpoints" / "step-00000020" / "trainer_state.json"
    saved.parent.mkdir(parents=True)
    saved.write_text(json.dumps({"state": {"rollbacks": rollbacks if is_saved else []}}))
    assert [read_sequences(open_step(run, 4)[0], 12 + n)[0].offset for n in range(4)] == plain


def test_a_budget_that_was_raised_later_does_not_move_earlier_steps(tmp_path, shards):
    run = trained(tmp_path, shards)
    stages = [{"until": 0.5, "train": [{"shards": str(shards)}]}, {"train": [{"shards": str(shards), "weight": 2.0}]}]
    data = {"stages": stages, "sequence_length": 64}
    (run / "config.yaml").write_text(yaml.safe_dump({"seed": 3, "data": data}))
    before = open_step(run, 15)[0].segments
    with open(run / "metrics.jsonl", "a") as file:
        raised = start_line(20, 40, sequences_per_level=[4], first_steps=[0])
        file.write("".join(json.dumps(line) + "\n" for line in (raised, train_line(21))))
    assert [s.first_sample for s in open_step(run, 15)[0].segments] == [s.first_sample for s in before] == [0, 40]
    assert [s.first_sample for s in open_step(run, 21)[0].segments] == [0, 80]


def test_a_branch_that_only_decays_has_documents(tmp_path, shards):
    run = trained(tmp_path, shards)
    first_sample, count = open_step(run, 17)[1:]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    branch = {"event": "branch", "step": 16, "run": "runs/trunk"}
    write_run(tmp_path / "branch", [{**lines[0], "step": 16, "total_steps": 19}, branch, *map(train_line, (17, 18))])
    shutil.copyfile(run / "config.yaml", tmp_path / "branch/config.yaml")
    saved = tmp_path / "branch/checkpoints/step-00000018/trainer_state.json"
    saved.parent.mkdir(parents=True)
    saved.write_text(json.dumps({"state": {"anneal_from": 16}}))
    assert open_step(tmp_path / "branch", 17)[1:] == (first_sample, count) == (64, 4)
    with pytest.raises(InputError, match=r"is a branch of runs/trunk, .*; use runs/trunk, or a step from 17 to 18"):
        open_step(tmp_path / "branch", 16)


def test_changed_or_missing_shards_and_steps_outside_the_run_are_rejected(tmp_path, shards):
    run = trained(tmp_path, shards)
    with pytest.raises(InputError, match=r"--step 21: .* has only reached step 20; use a step from 1 to 20"):
        documents_text(run, 21, limit=1)
    saved = run / "checkpoints" / "step-00000020" / "trainer_state.json"
    saved.parent.mkdir(parents=True)
    identity = {"data.train": [{"until": None, "train": [[str(shards), "0123456789abcdef", 1.0, None]]}]}
    saved.write_text(json.dumps({"state": {}, "identity": identity}))
    with pytest.raises(InputError, match="their hash was 0123456789abcdef, but is now"):
        documents_text(run, 3, limit=1)
    (run / "config.yaml").write_text("seed: 3\n")
    with pytest.raises(InputError, match="missing or invalid data settings"):
        documents_text(run, 3, limit=1)
    gone = trained(tmp_path, tmp_path / "gone")
    saved.unlink()
    with pytest.raises(InputError, match="no such folder of prepared shards"):
        documents_text(gone, 3, limit=1)


def test_bad_input_gets_a_clear_answer(tmp_path, monkeypatch, capsys):
    def message(*arguments) -> str:
        monkeypatch.setattr("sys.argv", ["runs.py", *map(str, arguments)])
        with pytest.raises((InputError, SystemExit)) as caught:
            runs.main()
        assert caught.type is InputError or caught.value.code == 2
        return f"{caught.value}{capsys.readouterr().err}"

    run = finished_run(tmp_path / "runs" / "llama")
    nothing = write_run(tmp_path / "nothing", [start_line()])
    cases = {
        ("list", tmp_path / "nowhere"): "contains no runs; start one with train.py",
        ("status", tmp_path / "runs" / "lama"): f"did you mean {run}?",
        ("summary", tmp_path): f"it has no metrics.jsonl; runs in this folder: {nothing}, {run}",
        ("plot", run, tmp_path / "nowhere", tmp_path / "neither"): "neither: no such run",
        ("plot", nothing): "no steps logged yet",
        ("plot", run, "--output", nothing / "metrics.jsonl" / "x.png"): "--output: ",
        ("plot", run, "--output", "s3://b/x.png"): "--output s3://b/x.png: must be a local path",
        ("documents", nothing, "--step", "1"): f"--step 1: {nothing} has not logged a step yet",
        ("compare", run): "needs at least two runs; for a single run, use summary",
        ("documents", run, "--step", "0"): "must be greater than 0, got 0",
        ("documents", run, "--step", "x"): "invalid natural value",
        ("abort", tmp_path / "runs"): f"has no metrics.jsonl; runs in this folder: {run}",
    }
    for arguments, text in cases.items():
        assert text in message(*arguments), arguments
    (tmp_path / "empty").mkdir()
    assert "contains no runs; start one with train.py" in refused("list", tmp_path / "empty")
    assert "must be greater than 0, got 0" in refused("documents", run, "--step", "0")


def test_a_loss_that_is_not_finite_is_not_hidden_by_older_ones(tmp_path):
    """Both train.py's null and another program's NaN count as not finite."""
    for name, value in (("null", None), ("nan", float("nan"))):
        lines = [train_line(step, loss=4.0) for step in range(1, 6)]
        lines += [{**train_line(step), "loss": value} for step in range(6, 9)]
        lines += [validation_line(5, 4.0), {**validation_line(8, 4.0), "loss": value, "bits_per_byte": value}]
        run = write_run(tmp_path / name, [start_line(), *lines])
        assert re.search(r"loss +-  ▁{5}  last 5 lines", status_text(run))
        assert re.search(r"validation demo +loss - at step 8", status_text(run))
        assert "4.0000" not in list_text(run)
        results = results_of(read_history(run), read_status(run))
        assert results["training loss, last 10 lines"] == "4.0000 (3 not finite)"
        assert results["validation demo"] == "not finite" and results["best validation demo"] == "4.0000 at step 5"


def test_a_damaged_recipe_and_a_folder_named_as_a_log_are_no_obstacles(tmp_path, capsys):
    run = finished_run(tmp_path / "runs" / "llama")
    (tmp_path / "runs/odd/metrics.jsonl").mkdir(parents=True)
    assert "llama" in list_text(tmp_path / "runs")
    (run / "config.yaml").write_text("a: [1\n: x")
    summary_text(run)
    assert f"warning: {run}/config.yaml: is missing or unreadable" in capsys.readouterr().err


def test_help_of_every_command_is_quick():
    """--help takes 0.07 s because it imports only the standard library. numpy would take 0.1 s, and torch 1.5 s."""
    code = """import runs, sys
for command in sys.argv[1:]:
    try:
        runs.parser().parse_args([command, "--help"])
    except SystemExit:
        print(*sys.modules, sep="\\n")"""
    printed = run_script("-c", code, *COMMANDS, fresh=True).stdout
    assert all(f"usage: -c {command} " in printed for command in COMMANDS)
    loaded = {name.partition(".")[0] for name in printed.split()}
    assert "pretrain" in loaded and not loaded & {"numpy", "torch", "yaml", "pydantic", "matplotlib", "transformers"}


def test_sparklines_follow_the_values():
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁" and sparkline([1.0]) == "▁"
    assert len(sparkline([float(n) for n in range(1000)])) == 40
