"""Run folders with tiny sealed checkpoints, and their mirrors."""

import json
import shutil
from pathlib import Path

from pretrain import config
from pretrain.checkpoint.mirror_copy import MirrorCopier
from pretrain.checkpoint.mirror_store import connect
from pretrain.files import commit, write_durably

ROLLBACK = {"to_step": 4, "first_step": 6, "last_step": 7, "samples": [40, 16], "learning_rate_factor": 1.0}


def write_checkpoint(run: Path, step: int, loss: float | None = None, rollbacks: int = 0, content: str = "") -> Path:
    """Writes a complete checkpoint and updates LATEST."""
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
    """Writes a run folder with checkpoints at these steps."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text("seed: 1\n")
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"event": "start", "step": 0, "start_id": start_id}) + "\n")
        file.writelines(json.dumps({"event": "train", "step": step}) + "\n" for step in steps)
    for step in steps:
        write_checkpoint(run, step, **checkpoint)
    return run


def copier_of(run: Path, mirror, **settings) -> MirrorCopier:
    """Creates the run's copier as train.py does."""
    settings = config.Checkpoint(mirror=str(mirror), **settings)
    return MirrorCopier(run, connect(settings, run), settings)


def copy_all(copier: MirrorCopier) -> None:
    """Copies until the mirror is complete. Fails if there is a problem."""
    for _ in range(20):
        if copier.attempt(everything=True):
            break
    assert copier.status["problem"] is None, copier.status


def steps_there(mirror: Path) -> list[int]:
    """Returns the steps with complete checkpoints in a mirror folder."""
    return sorted(int(path.parent.name[5:]) for path in mirror.glob("*/checkpoints/step-*/MANIFEST.json"))


def lose(run: Path) -> None:
    """Deletes the run to simulate a lost disk."""
    shutil.rmtree(run)
