"""Tests for starts on an empty or outdated disk, or with a mirror that is unreachable, damaged or from another run."""

import json
import shutil
from pathlib import Path

import pytest

import support.faulty_mirror  # noqa: F401  registers faulty://
from pretrain.checkpoint import mirror_fetch, mirror_store
from pretrain.checkpoint.checkpoints import Checkpoints
from pretrain.checkpoint.mirror_fetch import LostMirrorError, fetch_earlier, on_mirror
from pretrain.checkpoint.mirror_store import MirrorError
from pretrain.checkpoint.run_state import record_rollbacks
from pretrain.config import Checkpoint
from pretrain.errors import InputError
from pretrain.files import commit, damage, remove, write_durably
from pretrain.parallel.ranks import Ranks
from pretrain.runs.run_folder import checkpoint_folders, latest_step
from support.mirrors import ROLLBACK, copier_of, copy_all, lose, steps_there, write_checkpoint, write_run
from support.project import run_script


@pytest.fixture
def lost(tmp_path):
    """Returns (folder, mirror, settings) of a run whose disk was lost. The mirror has two checkpoints."""
    run, mirror = write_run(tmp_path / "run", (4, 8)), tmp_path / "mirror"
    copier = copier_of(run, mirror, keep_every=4)
    copy_all(copier)
    copy_all(copier)
    assert steps_there(mirror) == [4, 8]
    lose(run)
    return run, mirror, Checkpoint(mirror=str(mirror), mirror_wait_seconds=1)


def fetch_from_mirror(run, settings, ranks):
    """Fetches the run as at startup, and then exits."""
    with on_mirror(run, settings, ranks):
        pass


def claim_of(run):
    return json.loads((run / "mirror/claim.json").read_text())


def test_an_empty_disk_gets_the_newest_checkpoint_and_the_log(lost):
    run, mirror, settings = lost
    fetch_from_mirror(run, settings, Ranks())
    assert list(checkpoint_folders(run)) == [8] and latest_step(run) == 8
    assert damage(run / "checkpoints/step-00000008") == []
    for name in ("metrics.jsonl", "config.yaml"):
        assert (run / name).read_bytes() == (mirror / "run" / name).read_bytes()
    assert claim_of(run)["fetched"]["step"] == 8
    fetch_earlier(run, settings, Ranks(), 7, lambda: None)
    assert list(checkpoint_folders(run)) == [4, 8] and latest_step(run) == 8


def test_a_damaged_local_checkpoint_is_fetched_again(lost, tmp_path):
    """An older local checkpoint is used only if the mirror has no valid copy, or only one from before a rollback."""
    run, mirror, settings = lost
    fetch_from_mirror(run, settings, Ranks())
    fetch_earlier(run, settings, Ranks(), 7, lambda: None)

    def newest(said):
        harmed = run / "checkpoints/step-00000008/model.safetensors"
        harmed.write_bytes(b"x" + harmed.read_bytes()[1:])
        return Checkpoints(run, Ranks(), settings).newest_valid(said.append).name

    said = []
    assert newest(said) == "step-00000008" and damage(run / "checkpoints/step-00000008") == []
    assert said[0].endswith("renamed to damaged-step-00000008")
    assert said[1] == "checkpoint step-00000008 was fetched again from the mirror"
    record_rollbacks(run, [ROLLBACK])
    assert newest([]) == "step-00000004", "the mirror's checkpoint is from before the rollback"
    write_checkpoint(run, 8, rollbacks=1)
    mirror.rename(tmp_path / "out of reach")
    assert newest([]) == "step-00000004"


def test_a_damaged_copy_is_skipped_and_replaced(lost):
    run, mirror, settings = lost
    path = mirror / "run/checkpoints/step-00000008/model.safetensors"
    path.write_bytes(b"x" + path.read_bytes()[1:])
    fetch_from_mirror(run, settings, Ranks())
    assert list(checkpoint_folders(run)) == [4] and steps_there(mirror) == [4]
    assert "model.safetensors has the wrong sha256" in claim_of(run)["damaged"]["checkpoints/step-00000008"]
    write_checkpoint(run, 8)
    copy_all(copier_of(run, mirror))
    assert damage(mirror / "run/checkpoints/step-00000008") == [] and steps_there(mirror) == [4, 8]


def test_only_damaged_copies_do_not_start_from_scratch(lost):
    run, mirror, settings = lost
    for path in mirror.glob("run/checkpoints/*/model.safetensors"):
        path.unlink()
    for _ in range(2):
        with pytest.raises(LostMirrorError, match="none of the checkpoints in") as stop:
            fetch_from_mirror(run, settings, Ranks())
        assert stop.value.exit_code == 17


def test_an_empty_disk_does_not_start_without_its_mirror(tmp_path, monkeypatch):
    """The run would train from scratch and then overwrite the mirror."""
    settings = Checkpoint(mirror="ftp://127.0.0.1:1/runs", mirror_wait_seconds=0.3)
    with pytest.raises(MirrorError, match="cannot be reached"):
        fetch_from_mirror(tmp_path / "run", settings, Ranks())
    monkeypatch.setattr(mirror_fetch, "LOOK_SECONDS_WITHOUT_NEED", 0.3)
    run = write_run(tmp_path / "run")
    fetch_from_mirror(run, settings, Ranks())
    assert "could not be reached" in claim_of(run)["problem"], "a run with its own checkpoints must start"


def test_an_outdated_disk_catches_up(lost):
    """A machine that was replaced may return with its old folder."""
    run, _, settings = lost
    write_run(run, (4,))
    fetch_from_mirror(run, settings, Ranks())
    assert list(checkpoint_folders(run)) == [4, 8] and latest_step(run) == 8


def test_a_lost_log_is_fetched(lost):
    """Otherwise, the run would start a new log and overwrite the mirror's."""
    run, mirror, settings = lost
    write_run(run, (4, 8))
    (run / "metrics.jsonl").unlink()
    fetch_from_mirror(run, settings, Ranks())
    assert (run / "metrics.jsonl").read_bytes() == (mirror / "run/metrics.jsonl").read_bytes()
    assert list(checkpoint_folders(run)) == [4, 8] and claim_of(run)["fetched"] is None


def test_a_rollback_missing_on_the_mirror_takes_precedence(lost):
    run, mirror, settings = lost
    write_run(run, (4,))
    record_rollbacks(run, [ROLLBACK])
    fetch_from_mirror(run, settings, Ranks())
    assert list(checkpoint_folders(run)) == [4]
    copier = copier_of(run, mirror)
    copy_all(copier)
    assert steps_there(mirror) == [4], "step 8 is from before the rollback"


def test_another_run_with_the_same_name_is_rejected(lost):
    run, _, settings = lost
    write_run(run, (2,), start_id="two")
    with pytest.raises(InputError, match="a different run"):
        fetch_from_mirror(run, settings, Ranks())


def test_an_object_store_works_as_a_mirror(tmp_path):
    """fsspec's memory store has objects but no folders, like cloud stores."""
    run, settings = write_run(tmp_path / "run", (4, 8)), Checkpoint(mirror="memory://bucket/runs")
    copier = copier_of(run, settings.mirror, keep_last=1)
    copy_all(copier)
    log = (run / "metrics.jsonl").read_bytes()
    assert copier.store.steps() == ([8], [])
    lose(run)
    fetch_from_mirror(run, settings, Ranks())
    assert damage(run / "checkpoints/step-00000008") == [] and (run / "metrics.jsonl").read_bytes() == log
    write_checkpoint(run, 12)
    copier = copier_of(run, settings.mirror, keep_last=1)
    copy_all(copier)
    assert copier.store.steps() == ([12], [])


def test_a_manifest_with_paths_outside_its_folder_is_damaged(lost):
    run, mirror, settings = lost
    for path in mirror.glob("run/checkpoints/*/MANIFEST.json"):
        manifest = json.loads(path.read_text())
        manifest["files"] = {f"../../../{name}": entry for name, entry in manifest["files"].items()}
        path.write_text(json.dumps(manifest))
    with pytest.raises(LostMirrorError, match="outside the folder"):
        fetch_from_mirror(run, settings, Ranks())


def test_an_empty_mirror_is_a_fresh_start(tmp_path):
    fetch_from_mirror(tmp_path / "run", Checkpoint(mirror=str(tmp_path / "mirror")), Ranks())
    assert checkpoint_folders(tmp_path / "run") == {} and claim_of(tmp_path / "run")["fetched"] is None


def test_a_mirror_that_lost_its_checkpoints_does_not_start_from_scratch(lost):
    """The run may start from scratch only if no checkpoint was ever copied completely."""
    run, mirror, settings = lost
    for path in mirror.glob("run/checkpoints/*/MANIFEST.json"):
        path.unlink()
    fetch_from_mirror(run, settings, Ranks())
    assert claim_of(run)["fetched"] is None
    lose(run)
    with open(mirror / "run/metrics.jsonl", "a") as log:
        log.write('{"event": "mirror", "step": 8}\n')
    with pytest.raises(LostMirrorError, match=r"lists step 8, but no checkpoint there has a MANIFEST.json") as stop:
        fetch_from_mirror(run, settings, Ranks())
    assert stop.value.exit_code == 17


@pytest.mark.parametrize("is_finished", [False, True])
def test_an_unwritable_mirror_does_not_stop_a_run(lost, tmp_path, is_finished):
    """The run must start if its folder has checkpoints or they can be fetched."""
    run, mirror, _ = lost
    settings = Checkpoint(mirror=f"faulty://{mirror}", mirror_wait_seconds=1)
    (tmp_path / "mirror.faults").write_text('{"errno": "EROFS"}')
    if is_finished:
        write_run(run, (4, 8, 12))
    fetch_from_mirror(run, settings, Ranks())
    assert latest_step(run) == (12 if is_finished else 8)
    assert "reached or written to at startup (OSError: [Errno 30] Read-only" in claim_of(run)["problem"]
    copier = copier_of(run, settings.mirror)
    assert not copier.attempt(everything=True) and not copier.status["is_over"]
    (tmp_path / "mirror.faults").unlink()
    copy_all(copier)
    assert steps_there(mirror)[-1] == latest_step(run)


def test_a_renamed_checkpoint_on_a_mirror_is_damaged(lost):
    run, mirror, settings = lost
    (mirror / "run/checkpoints/step-00000008").rename(mirror / "run/checkpoints/step-00000020")
    (mirror / "run/checkpoints/step-00000030.bak").mkdir()
    (mirror / "run/checkpoints/step-00000030.bak/MANIFEST.json").write_text("{}")
    fetch_from_mirror(run, settings, Ranks())
    assert latest_step(run) == 4
    assert claim_of(run)["damaged"] == {
        "checkpoints/step-00000020": "trainer_state.json is from step 8; to use it, rename the folder to step-00000008"
    }


HARMS = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:3]),
    "garbage": lambda path: path.write_bytes(b"\xff\xfe\x00{" * 9),
    "list": lambda path: path.write_bytes(b'["a list"]'),
    "missing": Path.unlink,
}
SMALL_FILES = (
    "run.json", "metrics.jsonl", "config.yaml", "model.json", "rollbacks.json", "evaluations/step-00000008.json",
    "final/MANIFEST.json", "final/config.json", "checkpoints/step-00000004/MANIFEST.json",
    "checkpoints/step-00000004/trainer_state.json", "checkpoints/step-00000008/MANIFEST.json",
    "checkpoints/step-00000008/trainer_state.json",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Writes a finished run and its mirror, with every kind of small file."""
    base = tmp_path_factory.mktemp("whole")
    run = write_run(base / "run", (4, 8), rollbacks=1)
    for name in ("model.json", "evaluations/step-00000008.json"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(json.dumps({"of": name, "padding": "x" * 50}))
    record_rollbacks(run, [ROLLBACK])
    (run / ".final").mkdir()
    (run / ".final/config.json").write_text('{"model_type": "llama", "vocab_size": 512}')
    commit(run / ".final", run / "final", {})
    copier = copier_of(run, base / "mirror", keep_every=4)
    copy_all(copier)
    copy_all(copier)
    shutil.rmtree(run / "mirror")
    return base


def harmed(whole, tmp_path, monkeypatch, file, harm):
    """Returns (run folder, mirror, settings) with one of the mirror's files damaged."""
    monkeypatch.setattr(mirror_store, "SECONDS_BETWEEN_TRIES", 0.0)
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "mirror/run" / file
    assert path.exists()
    HARMS[harm](path)
    settings = Checkpoint(mirror=str(tmp_path / "mirror"), mirror_wait_seconds=1, keep_every=4)
    return tmp_path / "run", tmp_path / "mirror", settings


def same_files(run, mirror):
    """Returns the files that differ between the run and its mirror."""
    names = [str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()]
    names = [name for name in names if not name.startswith("mirror/") and not name.endswith("LATEST")]
    there = {name: mirror / "run" / name for name in names}
    return [n for n, path in there.items() if not path.exists() or path.read_bytes() != (run / n).read_bytes()]


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("file", SMALL_FILES)
def test_a_lost_disk_recovers_despite_a_damaged_small_file(whole, tmp_path, monkeypatch, file, harm):
    """The newest intact checkpoint must be found, and the damaged file reported and replaced by the next copy."""
    run, mirror, settings = harmed(whole, tmp_path, monkeypatch, file, harm)
    lose(run)
    fetch_from_mirror(run, settings, Ranks())
    newest = 4 if "step-00000008/" in file else 8
    assert latest_step(run) == newest and damage(checkpoint_folders(run)[newest]) == []
    claim = claim_of(run)
    of_a_folder = str(Path(file).parent) if file.startswith(("final", "checkpoints")) else file
    in_a_manifest = file.endswith(("/config.json", "/trainer_state.json"))
    seen = "step-00000004" not in file and (harm != "missing" or file == "run.json" or in_a_manifest)
    assert list(claim["damaged"]) == [of_a_folder] * seen
    kept = [name for name in SMALL_FILES[1:6] if (run / name).exists()]
    assert set(SMALL_FILES[1:6]) - set(kept) <= {file}
    assert all((run / name).read_bytes() == (whole / "run" / name).read_bytes() for name in kept)
    assert file not in kept
    write_run(run, (12,))  # training continues
    copier = copier_of(run, mirror, keep_every=4)
    copy_all(copier)
    assert same_files(run, mirror) == []
    left = {name for name in copier.status["damaged"] if not (run / name).exists()}
    assert set(copier.status["damaged"]) == left, "files in the run folder must be replaced on the mirror"
    assert left <= {of_a_folder} and json.loads((mirror / "run/run.json").read_text())["start"] == claim["start"]


@pytest.mark.parametrize("is_behind", [False, True], ids=["level", "behind"])
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("file", SMALL_FILES)
def test_a_damaged_small_file_is_restored_from_the_run_folder(whole, tmp_path, monkeypatch, file, harm, is_behind):
    """The run folder contains everything that is on the mirror, or everything except the newest checkpoint."""
    run, mirror, settings = harmed(whole, tmp_path, monkeypatch, file, harm)
    if is_behind:
        remove(run / "checkpoints/step-00000008")
        write_durably(run / "checkpoints/LATEST", "step-00000004")
    fetch_from_mirror(run, settings, Ranks())
    found = 4 if is_behind and "step-00000008/" in file else 8
    assert latest_step(run) == found and claim_of(run)["problem"] is None
    copier = copier_of(run, mirror, keep_every=4)
    copy_all(copier)
    if found == 4:
        write_checkpoint(run, 8, rollbacks=1)
        copy_all(copier)
    assert same_files(run, mirror) == [] and copier.status["damaged"] == {}
    assert damage(mirror / "run/checkpoints/step-00000004") == [] and steps_there(mirror) == [4, 8]
    assert json.loads((mirror / "run/run.json").read_text())["run"] == "one"


def test_the_scripts_have_no_traceback_for_a_missing_run_or_a_damaged_mirror(lost, tmp_path):
    _, mirror, _ = lost
    module = "pretrain.checkpoint.mirror_{}".format
    copied = run_script("-m", module("copy"), tmp_path / "none", "--mirror", mirror, check=False)
    for manifest in mirror.rglob("MANIFEST.json"):
        manifest.write_text("{}")
    fetched = run_script("-m", module("fetch"), f"file://{mirror}/run", tmp_path / "copy", check=False)
    for done, said in ((copied, "none: no such folder"), (fetched, "none of the checkpoints in")):
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "copy").exists(), "a retry must not find the folder"
