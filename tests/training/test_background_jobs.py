"""Tests for evaluations in separate processes, text samples with sharded models, and mirror copies during training."""

import json
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest

from pretrain.checkpoint import mirror_copy
from pretrain.config import Benchmarks, Checkpoint
from pretrain.files import remove
from pretrain.processes import hold_while_open
from pretrain.runs.hub import evaluation_log
from pretrain.training import background_jobs
from pretrain.training.background_jobs import Evaluations, MirrorCopies
from pretrain.training.metrics import Metrics
from support.mirrors import steps_there, write_checkpoint, write_run
from support.project import events, launch, run_script

SOON = 60


@pytest.fixture
def task(tmp_path):
    """Writes a multiple-choice task with two choices per document."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    lines = [{"start": f"def f{i}(", "choices": ["self):", "zzz"], "answer": 0} for i in range(6)]
    (folder / "documents.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "task.yaml").write_text(
        "task: beside\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{validation: '{folder}/documents.jsonl'}}}}\n"
        "validation_split: validation\ndoc_to_text: '{{start}}'\noutput_type: multiple_choice\n"
        "doc_to_target: answer\ndoc_to_choice: '{{choices}}'\nmetric_list: [{metric: acc}]\n"
    )
    return folder


def test_evaluations_and_samples_during_a_sharded_run(recipe, task, tmp_path):
    out = launch(
        "fsdp2", 2, "train.py", "--config", recipe, "--benchmarks.every_steps", "6", "--benchmarks.tasks", "[beside]",
        "--benchmarks.include_path", task, "--samples.every_steps", "6", "--samples.max_new_tokens", "5",
        "--samples.prompts", "['def ']",
    ).stdout  # fmt: skip
    run = tmp_path / "run"
    deadline = time.monotonic() + 300
    while len(events(run, "evaluation")) < 2 or list((run / "evaluations").glob("step-*/")):
        assert time.monotonic() < deadline, "the evaluations continue after the run and must finish in time"
        time.sleep(0.2)
    assert {event["step"] for event in events(run, "evaluation")} == {6, 12}
    assert all(0 <= event["acc"] <= 1 and event["task"] == "beside" for event in events(run, "evaluation"))
    assert not list((run / "evaluations").glob("step-*/")), "linked models must be removed"
    samples = events(run, "sample")
    assert [event["step"] for event in samples] == [6, 12]
    assert all(event["text"].startswith("def ") and event["text"] != "def " for event in samples)
    assert "step 12 · sample:\n  def " in out


def test_removed_results_of_an_evaluation_do_not_end_the_run(tmp_path):
    evaluations = Evaluations(tmp_path, Metrics(tmp_path, is_main=True))
    evaluations._running[tmp_path / "step-00000006"] = SimpleNamespace(poll=lambda: 0, returncode=0)
    evaluations.fetch()
    assert evaluations.names == []


def test_scores_of_a_finished_evaluation_are_printed(tmp_path, capsys):
    evaluations = Evaluations(tmp_path, Metrics(tmp_path, is_main=True))
    folder = tmp_path / "step-00000006"
    model = {"step": 6, "sources": {}, "tasks": {"one": {"acc": 0.5}, "two": {"bits_per_byte": 1.25}}}
    folder.with_suffix(".json").write_text(json.dumps({"models": [model]}))
    evaluations._running[folder] = SimpleNamespace(poll=lambda: 0, returncode=0)
    evaluations.fetch()
    evaluations.fetch()
    assert capsys.readouterr().out == "step 6 · one · acc 0.5000\nstep 6 · two · bits_per_byte 1.2500\n"


def test_stopped_evaluations_are_named(tmp_path, capsys):
    evaluations = Evaluations(tmp_path, Metrics(tmp_path, is_main=True))
    done = tmp_path / "step-00000006"
    model = {"step": 6, "sources": {}, "tasks": {"one": {"acc": 0.5}}}
    done.with_suffix(".json").write_text(json.dumps({"models": [model]}))
    evaluations._running[done] = SimpleNamespace(poll=lambda: 0, returncode=0)
    evaluations._running[tmp_path / "step-00000008"] = subprocess.Popen(["sleep", "600"], start_new_session=True)
    evaluations.stop()
    assert evaluations.names == [] and "step 6 · one · acc 0.5000\n" in capsys.readouterr().out
    (warning,) = events(tmp_path, "warning")
    assert warning["message"] == "the evaluation of step-00000008 was stopped before it had results"


def test_an_evaluation_from_before_a_rollback_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(background_jobs, "evaluation_command", lambda folder, settings: ["sleep", "60"])
    evaluations = Evaluations(tmp_path, Metrics(tmp_path, is_main=True))
    checkpoint = tmp_path / "checkpoints/step-00000008"
    checkpoint.mkdir(parents=True)
    first = evaluations.start(checkpoint, Benchmarks())
    with open(evaluation_log(tmp_path, checkpoint.name), "rb") as log:
        hold_while_open(log)  # as the first one does until it is dead
        second = evaluations.start(checkpoint, Benchmarks())
    evaluations.stop()
    assert second is not None and second is not first


def test_a_failing_evaluation_does_not_affect_the_run(recipe, task, tmp_path):
    (task / "documents.jsonl").unlink()
    run_script(
        "train.py", "--config", recipe, "--benchmarks.every_steps", "6", "--benchmarks.tasks", "beside",
        "--benchmarks.include_path", task, "--benchmarks.where", "blocking", "--validation.every_steps", "100",
        "--budget.steps", "10",
    )  # fmt: skip
    run = tmp_path / "run"
    assert events(run, "end")[0]["code"] == 0
    (log,) = [
        line for line in (run / "train.log").read_text().splitlines() if "step 7/10" in line or "failed" in line
    ][:1]
    assert "the evaluation of step-00000006 failed with exit code 2" in log, (
        "training must wait for the evaluation before the next step"
    )
    assert "--tasks beside: its data" in (run / "evaluations/step-00000006.log").read_text()
    assert not list((run / "evaluations").glob("step-*/")), "linked models must also be removed after a failure"


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """Yields (run, mirror copies); the copier thread does nothing until the test ends."""
    run = write_run(tmp_path / "run", (4, 8))
    lets_go = threading.Event()
    monkeypatch.setattr(mirror_copy.MirrorCopier, "keep_copying", lambda self: lets_go.wait(SOON))
    metrics = Metrics(run, is_main=True)
    settings = Checkpoint(mirror=str(tmp_path / "mirror"), mirror_wait_seconds=0.1)
    yield run, MirrorCopies(run, settings, metrics)
    lets_go.set()
    metrics.end(0, "done")


def test_mirror_failures_are_logged_once(copies, tmp_path, monkeypatch):
    run, copies = copies
    copier = copies._copier

    def look():
        copies.look()
        return [event["message"] for event in events(run, "warning")]

    def fails(*, everything):
        raise OSError("No space left")

    with monkeypatch.context() as patched:
        patched.setattr(copier, "pass_once", fails)
        copier.attempt(everything=True)
        (said,) = look()
        assert f"{tmp_path}/mirror/run failed to store step 8: OSError: No space left" in said
        assert "Nothing has been copied" in said
        copier.attempt(everything=True)
        assert len(look()) == 1
    copier.attempt(everything=True)
    assert len(look()) == 1
    assert [(event["step"], event["latest_step"]) for event in events(run, "mirror")] == [(8, 8)]
    with monkeypatch.context() as patched:
        patched.setattr(copier, "pass_once", fails)
        copier.attempt(everything=True)
    assert len(look()) == 2, "a failure after a recovery is reported again"
    for step in (12, 16, 20):
        write_checkpoint(run, step)
        copier._next()
        remove(run / f"checkpoints/step-{step:08d}")
    (*_, said) = look()
    assert "cannot keep up with the checkpoints: it skipped step 12" in said and len(look()) == 3
    write_checkpoint(run, 24)
    copier.beaten -= 2 * background_jobs.STALLED_SECONDS
    (*_, said) = look()
    assert "has not responded for 1 h 00 min. The last copy is step 8" in said and len(look()) == 4
    copier.beaten = time.monotonic()
    copier.damaged.update({"run.json": "is cut", "model.json": "is empty"})
    (*_, said) = look()
    assert "damaged on the mirror: run.json (is cut); model.json (is empty); files with a local copy" in said
    del copier.damaged["run.json"]
    count = len(look())
    copies.settle(lambda: None)
    (still, said) = [event["message"] for event in events(run, "warning")][count:]
    assert "still damaged on the mirror" in still and "model.json (is empty)" in still and "run.json" not in still
    assert "now replaced or removed: run.json" in (run / "train.log").read_text()
    assert "could not copy step 24 to the mirror within 0.1 s" in said and str(run) in said
    started = time.monotonic()
    copies.close()
    assert time.monotonic() - started < SOON / 2, "close() must not wait for an unfinished copy"


def test_lines_written_after_the_last_wait_are_also_copied(tmp_path):
    """The log's last line, which records the end of the run, must also be copied."""
    run, mirror = write_run(tmp_path / "run", (4,)), tmp_path / "mirror"
    metrics = Metrics(run, is_main=True)
    copies = MirrorCopies(run, Checkpoint(mirror=str(mirror)), metrics)
    copies.settle(lambda: None)
    metrics.end(0, "done")
    copies.close()
    assert steps_there(mirror) == [4] and events(run, "warning") == []
    assert (mirror / "run/metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()


def test_a_manual_copy_prunes_nothing(tmp_path):
    run, mirror = write_run(tmp_path / "run", (1, 2, 3, 4, 5)), tmp_path / "mirror"
    for _ in range(2):
        run_script("-m", "pretrain.checkpoint.mirror_copy", run, "--mirror", mirror)
        assert steps_there(mirror)[-1] == 5
    write_checkpoint(run, 6)
    run_script("-m", "pretrain.checkpoint.mirror_copy", run, "--mirror", mirror)
    assert steps_there(mirror)[-2:] == [5, 6]
