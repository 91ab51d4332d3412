"""Defines the paths in a run folder, and reads its small files (even after a crash)."""

import errno
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.errors import InputError, shortened
from pretrain.files import Beat, damage
from pretrain.old_names import with_current_names

if TYPE_CHECKING:
    from pretrain.config import Checkpoint

METRICS_FILE = "metrics.jsonl"
LOCK_FILE = ".lock"
"""Lock file held by the training process."""
MIRROR_FOLDER = "mirror"
MIRROR_STATUS = "mirror/status.json"
"""Status file written by the mirror's copying thread."""
EVALUATIONS = "evaluations"
"""Folder with the logs and results of evaluations during training."""
PROFILE_FOLDER = "profile"
"""Subfolder of a run with its profile. The report is written last."""


def heartbeat_path(run: Path, rank: int = 0) -> Path:
    """Returns the path of a rank's heartbeat file, which the rank writes every few seconds during training."""
    return run / "heartbeats" / f"rank-{rank:05d}.json"


def read_json(path: Path) -> dict:
    """Reads a small JSON file. Returns {} if it is missing, damaged or not an object."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def read_config(run: Path) -> dict[str, Any]:
    """Reads config.yaml without validation, and updates old setting names. Returns {} if it is unreadable."""
    from pretrain.recipe import parse_yaml

    try:
        values = parse_yaml((run / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return with_current_names(values)[0] if isinstance(values, dict) else {}


def setting(config: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a setting in config.yaml, given its dotted name, or None."""
    value: Any = config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def checkpoint_folders(run: Path) -> dict[int, Path]:
    """Returns {step: folder} of a run's checkpoints, oldest first, without checking them."""
    found = {step_named(path.name): path for path in (run / "checkpoints").glob("step-*")}
    return {step: found[step] for step in sorted(found.keys() - {None})}


def trunk_checkpoint(text: str) -> Path:
    """Returns the folder of the checkpoint RUN@STEP without reading it. Raises InputError if it doesn't exist."""
    run, at, step = text.rpartition("@")
    folders = checkpoint_folders(Path(run)) if at else {}
    if not step.isdecimal() or int(step) not in folders:
        available = ", ".join(map(str, folders)) or "none"
        raise InputError(
            f"branch_from: {text}: must be RUN@STEP, a checkpoint from another run; available steps: {available}"
        )
    return folders[int(step)]


def latest_step(run: Path) -> int | None:
    """Returns the step in checkpoints/LATEST, the newest checkpoint or the target of a rollback."""
    try:
        return step_named((run / "checkpoints" / "LATEST").read_text().strip())
    except (OSError, UnicodeDecodeError):
        return None


def checkpoint_name(step: int) -> str:
    """Formats 500 as step-00000500."""
    return f"step-{step:08d}"


def step_named(name: str) -> int | None:
    """Parses step-00000500 as 500. Returns None for other names, such as step-00000500.bak."""
    digits = re.fullmatch(r"step-([0-9]{8,})", name)
    step = int(digits[1]) if digits else None
    return step if step is not None and checkpoint_name(step) == name else None


def step_of(checkpoint: Path) -> int:
    """Returns a checkpoint folder's step. The name must be one that `step_named` accepts."""
    return int(checkpoint.name.removeprefix("step-"))


def read_state(checkpoint: Path) -> dict:
    """Reads a checkpoint's trainer_state.json. Returns {} if it is unreadable."""
    return read_json(checkpoint / "trainer_state.json")


def validation_loss_of(state: Mapping[str, Any]) -> float | None:
    """Returns the validation loss (averaged over sources) in a trainer_state.json, or None."""
    loss = state.get("validation_loss")
    return loss if isinstance(loss, int | float) and math.isfinite(loss) else None


def checkpoint_damage(
    folder: Path, rank: int = 0, ranks: int = 1, beat: Beat = lambda: None, *, resumes: bool = False
) -> list[str]:
    """Lists problems with a checkpoint, including a step that doesn't match its name.

    resumes: True if training continues from the checkpoint, False if only its model is read.
    """
    problems = damage(folder, rank, ranks, beat)
    step = step_named(folder.name) if folder.parent.name == "checkpoints" else None
    if problems or rank or step is None:
        return problems
    return contradictions(folder, step, resumes=resumes)


def contradictions(folder: Path, step: int, *, resumes: bool = True) -> list[str]:
    """Lists reasons not to use an undamaged checkpoint: another step than its name's, or missing tensors."""
    contents = read_state(folder)
    state = contents.get("state")
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        return ["trainer_state.json contains no step"]
    found = state["step"]
    if found != step:
        return [f"trainer_state.json is from step {found:,}; to use it, rename the folder to {checkpoint_name(found)}"]
    if not resumes:
        return []
    # Old checkpoints don't record `tensors`. An optimizer has no state until its first update.
    updated = step > (state.get("skipped_steps") or 0)
    tensors = contents.get("tensors", {"model": 1, "optimizer": updated, "average": bool(state.get("average"))})
    missing = [name for name, count in tensors.items() if count and not any(folder.glob(f"{name}*.safetensors"))]
    return [f"its {name} tensors are missing" for name in missing]


def steps_to_keep(settings: "Checkpoint", losses: Mapping[int, float | None]) -> set[int]:
    """Returns the steps of the checkpoints to keep in a run folder or on its mirror.

    Args:
        losses: {step: validation loss or None} of the existing checkpoints.
    """
    newest = sorted(losses)[-settings.keep_last :]
    measured = sorted((loss, step) for step, loss in losses.items() if loss is not None)
    best = [step for _, step in measured[: settings.keep_best]]
    milestones = [step for step in losses if settings.keep_every and step % settings.keep_every == 0]
    return {*newest, *best, *milestones}


def output_problem(run: Path) -> str | None:
    """Returns why a run can't be written to this folder, or None. Doesn't write anything."""
    if "\0" in str(run):
        return f"output: {str(run)!r}: a name cannot contain a NUL character"
    try:
        os.lstat(run)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return f"output: {shortened(run, 60)}: is too long; use at most 255 bytes per name and 4,095 in total"
    for place in (run, *run.parents):
        if os.path.isdir(place):
            may_write = os.access(place, os.W_OK | os.X_OK)
            return None if may_write else f"output: {run}: {place} is not writable; use another path"
        if os.path.islink(place) and not os.path.exists(place):
            target = os.path.realpath(place)
            return f"output: {run}: {place} is a link to {target}, which does not exist; mount or create it first"
        if os.path.lexists(place):
            return f"output: {run}: {place} is {'a' if place == run else 'not a folder but a'} file; use another name"
    return None
