"""Run folders with sealed checkpoints of a few bytes, and what lies on their mirror."""

import json
import shutil
from pathlib import Path

from pretrain import config
from pretrain.checkpoint.mirror_copy import MirrorCopier
from pretrain.checkpoint.mirror_store import connect
from pretrain.files import commit, write_durably

ROLLBACK = {"to_step": 4, "first_step": 6, "last_step": 7, "samples": [40, 16], "learning_rate_factor": 1.0}


def write_checkpoint(run: Path, step: int, loss: float | None = None, rollbacks: int = 0, content: str = "") -> Path:
    """A whole checkpoint, which LATEST names."""
    folder, unfinished = run / f"checkpoints/step-{step:08d}", run / "checkpoints/.saving-x"
    unfinished.mkdir(parents=True)
    state = {"state": {"step": step, "rollbacks": [ROLLBACK] * rollbacks}, "validation_loss": loss}
    (unfinished / "trainer_state.json").write_text(json.dumps(state))
    for name in ("model", "optimizer"):
        (unfinished / f"{name}.safetensors").write_bytes((content or f"{name} of {step} ").encode() * 1000)
    commit(unfinished, folder, {})
    write_durably(run / "checkpoints/LATEST", folder.name)
    return folder


def write_run(run: Path, steps=(4,), start_id: str = "one", **checkpoint) -> Path:
    """A run with checkpoints of these steps."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text("seed: 1\n")
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"event": "start", "step": 0, "start_id": start_id}) + "\n")
        file.writelines(json.dumps({"event": "train", "step": step}) + "\n" for step in steps)
    for step in steps:
        write_checkpoint(run, step, **checkpoint)
    return run


def copier_of(run: Path, mirror, **settings) -> MirrorCopier:
    """As a start of the run would make it."""
    settings = config.Checkpoint(mirror=str(mirror), **settings)
    return MirrorCopier(run, connect(settings, run), settings)


def copy_all(copier: MirrorCopier) -> None:
    """Until the mirror lacks nothing; fails if something is refused."""
    for _ in range(20):
        if copier.attempt(everything=True):
            break
    assert copier.status["problem"] is None, copier.status


def steps_there(mirror: Path) -> list[int]:
    """The steps that are whole on a mirror that is a folder."""
    return sorted(int(path.parent.name[5:]) for path in mirror.glob("*/checkpoints/step-*/MANIFEST.json"))


def lose(run: Path) -> None:
    """The disk is gone."""
    shutil.rmtree(run)
