"""Tests for copies to a run's mirror: contents, order, and retries if the mirror fails."""

import json
import os
from contextlib import ExitStack

import pytest

import support.faulty_mirror  # noqa: F401  registers faulty://
from pretrain.checkpoint import mirror_lease
from pretrain.checkpoint.mirror_copy import MirrorCopier
from pretrain.checkpoint.mirror_fetch import look
from pretrain.checkpoint.mirror_store import mirror_problems
from pretrain.checkpoint.run_state import record_rollbacks
from pretrain.config import Checkpoint
from pretrain.files import commit, damage, remove, write_durably
from pretrain_tools.runs.status import mirror_text
from support.mirrors import ROLLBACK, copier_of, copy_all, lose, steps_there, write_checkpoint, write_run


def test_the_newest_is_copied_first_and_pruning_matches_the_run(tmp_path):
    run, mirror = write_run(tmp_path / "run", (4,)), tmp_path / "mirror"
    copier = copier_of(run, mirror, keep_last=2, keep_every=5)
    copy_all(copier)
    for step in (5, 8, 9, 10):
        write_checkpoint(run, step)
        copier.attempt(everything=False)
    assert copier.status["copied_step"] == 10
    copy_all(copier)
    assert steps_there(mirror) == [5, 9, 10], (
        "the mirror must keep the last two checkpoints and the milestones, like the run folder"
    )
    for step in (5, 9, 10):
        assert damage(mirror / f"run/checkpoints/step-{step:08d}") == []
    assert (mirror / "run/metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    assert not (run / "mirror/copying").exists()


def test_pruned_checkpoints_are_skipped_and_milestones_follow(tmp_path):
    """A slow mirror must get the newest checkpoint first and milestones later, but no pruned checkpoints."""
    run, mirror = write_run(tmp_path / "run", (4,)), tmp_path / "mirror"
    copier = copier_of(run, mirror, keep_last=1, keep_every=5)
    copy_all(copier)
    for step in (5, 7, 9):
        write_checkpoint(run, step)
    copier._next()
    remove(run / "checkpoints/step-00000007")
    order = []
    put = copier.store.put
    copier.store.put = lambda folder, name, *rest: order.append(name) or put(folder, name, *rest)
    copy_all(copier)
    assert order == ["checkpoints/step-00000009", "checkpoints/step-00000005"]
    assert copier.status["dropped"] == 1


def test_checkpoints_from_before_the_start_may_be_pruned_without_a_warning(tmp_path):
    run, mirror = write_run(tmp_path / "run", (4, 8)), tmp_path / "mirror"
    copier = copier_of(run, mirror, keep_last=2)
    copy_all(copier)  # a new mirror gets only the newest checkpoint
    write_checkpoint(run, 12)
    remove(run / "checkpoints/step-00000004")
    copy_all(copier)
    assert steps_there(mirror) == [8, 12]
    assert copier.status["dropped"] == 0 and [notice["event"] for notice in copier.notices] == ["mirror", "mirror"]


def test_a_rollback_reaches_the_mirror_before_its_record_does(tmp_path):
    """Otherwise, a run resumed from the mirror would continue after data that it should skip."""
    run, mirror = write_run(tmp_path / "run", (4, 8)), tmp_path / "mirror"
    copier = copier_of(run, mirror)
    copy_all(copier)
    write_durably(run / "checkpoints/LATEST", "step-00000004")
    remove(run / "checkpoints/step-00000008")
    record_rollbacks(run, [ROLLBACK])
    write, seen = copier.store.write, []

    def note(name, content):
        seen.append((name, steps_there(mirror)))
        write(name, content)

    copier.store.write = note
    copy_all(copier)
    assert ("rollbacks.json", [4]) in seen and steps_there(mirror) == [4]
    assert all(steps for _, steps in seen), "the mirror must never be empty"


def test_a_rollback_aborts_a_copy(tmp_path):
    run, mirror = write_run(tmp_path / "run", (4, 8)), tmp_path / "mirror"
    copier = copier_of(run, mirror)
    put_file = copier.store.system.put_file

    def roll_back(*arguments, **named):
        write_durably(run / "checkpoints/LATEST", "step-00000004")
        return put_file(*arguments, **named)

    copier.store.system.put_file = roll_back
    try:
        copier.attempt(everything=False)
        assert steps_there(mirror) == []
    finally:
        del copier.store.system.put_file
    remove(run / "checkpoints/step-00000008")
    copy_all(copier)
    assert steps_there(mirror) == [4]


@pytest.mark.parametrize(
    ("faults", "said"), [({"errno": "ENOSPC"}, "No space left"), ({"garbles": True}, "has the wrong sha256 after")]
)
def test_a_failing_mirror_is_retried(tmp_path, faults, said):
    run, mirror = write_run(tmp_path / "run", (4,)), tmp_path / "mirror"
    (tmp_path / "mirror.faults").write_text(json.dumps(faults))
    copier = copier_of(run, f"faulty://{mirror}")
    pauses = []
    for _ in range(3):
        assert not copier.attempt(everything=False)
        pauses.append(copier.pause_seconds)
    assert said in copier.status["problem"] and copier.status["failures"] == 3
    assert pauses == [1.0, 2.0, 4.0] and steps_there(mirror) == []
    copier.beat(now=True)
    assert said in mirror_text(run) and "first failed" in mirror_text(run)
    (tmp_path / "mirror.faults").unlink()
    write_checkpoint(run, 8)
    remove(run / "checkpoints/step-00000004")
    copy_all(copier)
    assert copier.status["failures"] == 0
    assert os.listdir(mirror / "run/checkpoints") == ["step-00000008"], "a failed copy of a pruned checkpoint must go"
    copier.beat(now=True)
    assert mirror_text(run).startswith("step 8, the newest checkpoint")


def test_two_starts_do_not_both_write(tmp_path, monkeypatch):
    """The first start is on a machine that was wrongly considered dead."""
    run, mirror = write_run(tmp_path / "run", (4,)), tmp_path / "mirror"
    settings = Checkpoint(mirror=str(mirror))
    look(run, settings, ExitStack())
    copier = copier_of(run, mirror)
    copy_all(copier)
    monkeypatch.setattr(mirror_lease, "SILENT_SECONDS", 0.1)  # the first start seems dead
    elsewhere = tmp_path / "elsewhere/run"
    look(elsewhere, settings, ExitStack())
    write_checkpoint(run, 8)
    assert copier.attempt(everything=False) and copier.status["is_over"]
    assert "another process" in copier.status["problem"] and steps_there(mirror) == [4]


def test_an_emptied_mirror_is_filled_again(tmp_path):
    run, mirror = write_run(tmp_path / "run", (4,)), tmp_path / "mirror"
    copier = copier_of(run, mirror)
    copy_all(copier)
    lose(mirror)
    write_checkpoint(run, 8)
    assert not copier.attempt(everything=False) and "was emptied" in copier.status["problem"]
    copy_all(copier)
    assert steps_there(mirror) == [8] and (mirror / "run/config.yaml").exists()


def test_an_extended_run_has_no_complete_final_model_on_the_mirror(tmp_path):
    """Training renames final/ when it rewinds. Without the local folder, every copy used to fail."""
    run, mirror = write_run(tmp_path / "run", (4,)), tmp_path / "mirror"
    (run / ".saving-final").mkdir()
    (run / ".saving-final/model.safetensors").write_bytes(b"model")
    commit(run / ".saving-final", run / "final", {})
    copy_all(copier_of(run, mirror))
    assert damage(mirror / "run/final") == []
    (run / "final").rename(run / "final-step-00000004")
    copier = copier_of(run, mirror)
    copy_all(copier)
    assert not (mirror / "run/final/MANIFEST.json").exists() and not copier.notices
    (run / "final-step-00000004").rename(run / "final")
    copy_all(copier)
    assert damage(mirror / "run/final") == []


def test_another_mirror_can_be_claimed(tmp_path):
    """The copy may be started manually, or the recipe may have been changed."""
    run = write_run(tmp_path / "run", (4,))
    for name in ("one", "two"):
        copy_all(copier_of(run, tmp_path / name))
        assert steps_there(tmp_path / name) == [4]
    assert not copier_of(run, "/proc/nowhere").attempt(everything=True)


def test_the_mirror_of_another_run_is_not_changed(tmp_path):
    mirror = tmp_path / "mirror"
    copy_all(copier_of(write_run(tmp_path / "a/run", (4,)), mirror))
    copier = copier_of(write_run(tmp_path / "b/run", (8,), start_id="two"), mirror)
    assert copier.attempt(everything=False) and "a different run" in copier.status["problem"]
    assert steps_there(mirror) == [4]


def test_invalid_mirrors_are_rejected(tmp_path):
    def problem(mirror):
        (found,) = mirror_problems(tmp_path / "runs/x", Checkpoint(mirror=mirror))
        return found

    assert "install gcsfs" in problem("gs://bucket/runs")
    assert "Protocol not known: nowhere" in problem("nowhere://bucket")
    assert "secrets" in problem("s3://key:word@bucket/runs") and "word" not in problem("s3://key:word@bucket/runs")
    assert "in" in problem(str(tmp_path / "runs")) and problem(str(tmp_path / "runs/x/copy")) and problem(" ")
    for mirror in ("hf://buckets/me/runs", "/other/disk", "relative", "memory://x"):
        assert mirror_problems(tmp_path / "runs/x", Checkpoint(mirror=mirror)) == []


def test_partial_copies_are_removed(tmp_path):
    """The run doesn't reach the step of the partial copy again."""
    run, mirror = write_run(tmp_path / "run", (4,)), tmp_path / "mirror"
    part = mirror / "run/checkpoints/step-00000099"
    part.mkdir(parents=True)
    (part / "model.safetensors").write_bytes(b"half")
    copier: MirrorCopier = copier_of(run, mirror)
    copy_all(copier)
    assert steps_there(mirror) == [4] and not part.exists()


@pytest.mark.parametrize("content", [b"", b'{"run": "o', b"\xff", b"[]", b'{"run": 1, "start": 2}', None])
def test_a_damaged_mirror_identity_is_rewritten(tmp_path, content):
    """The log also identifies the run; a mirror with neither must not be used."""
    run, mirror = write_run(tmp_path / "run", (4,)), tmp_path / "mirror"
    copier = copier_of(run, mirror)
    copy_all(copier)
    identity = mirror / "run/run.json"
    identity.unlink() if content is None else identity.write_bytes(content)
    write_checkpoint(run, 8)
    assert not copier.attempt(everything=True)
    assert "run.json" in copier.status["problem"] and "writing it again" in copier.status["problem"]
    copy_all(copier)
    assert steps_there(mirror) == [4, 8] and json.loads(identity.read_text())["run"] == "one"
    for path in (identity, mirror / "run/metrics.jsonl"):
        path.write_bytes(content or b"")
    write_checkpoint(run, 12)
    assert not copier.attempt(everything=True)
    assert copier.attempt(everything=True) and copier.status["is_over"]
    assert "so the mirror's run ID is unknown" in copier.status["problem"] and steps_there(mirror) == [4, 8]


def test_a_damaged_copy_does_not_replace_an_intact_one(tmp_path):
    """The run folder no longer has this checkpoint, so the damaged copy is only removed by pruning."""
    run, mirror = write_run(tmp_path / "run", (4, 8)), tmp_path / "mirror"
    copy_all(copier_of(run, mirror, keep_every=4))
    copy_all(copier_of(run, mirror, keep_every=4))
    remove(run / "checkpoints/step-00000004")
    (mirror / "run/checkpoints/step-00000004/model.safetensors").write_bytes(b"")
    copier = copier_of(run, mirror, keep_last=2)
    copy_all(copier)
    assert list(copier.status["damaged"]) == ["checkpoints/step-00000004"]
    assert copier_of(run, mirror).damaged == copier.damaged, "a restarted copier must remember the damage"
    write_checkpoint(run, 12)
    copy_all(copier)
    assert steps_there(mirror) == [8, 12] and copier.status["damaged"] == {}


def test_a_clock_set_back_skips_no_checkpoint(tmp_path):
    """LATEST may have an unchanged modification time, and a copy's duration must not be negative."""
    run, mirror = write_run(tmp_path / "run", (4,)), tmp_path / "mirror"
    copier = copier_of(run, mirror)
    copy_all(copier)
    written = (run / "checkpoints/LATEST").stat()
    write_checkpoint(run, 8)
    os.utime(run / "checkpoints/LATEST", ns=(written.st_atime_ns, written.st_mtime_ns))
    copy_all(copier)
    assert steps_there(mirror) == [4, 8] and copier.notices[-1]["seconds"] >= 0
