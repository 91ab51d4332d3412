"""Defines the paths in a run's folder, and reads its small files as a crash may have left them."""

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.errors import InputError, shortened
from pretrain.files import damage
from pretrain.old_names import with_current_names

if TYPE_CHECKING:
    from pretrain.config import Checkpoint

METRICS_FILE = "metrics.jsonl"
LOCK_FILE = ".lock"
"""Lock file held by the process that trains the run."""
MIRROR_FOLDER = "mirror"
MIRROR_STATUS = "mirror/status.json"
"""Status file of the thread that copies the run to its mirror."""
EVALUATIONS = "evaluations"
"""Folder with the logs and results of evaluations during training."""
PROFILE_FOLDER = "profile"
"""Report in a profile's folder; written last."""
LONGEST_NAME = 255
LONGEST_PATH = 3500
"""Maximum bytes of a run's path: Linux allows 4,096, minus our longest path below a run's folder."""


def heartbeat_path(run: Path, rank: int = 0) -> Path:
    """Returns the path of the file that a rank writes every few seconds while it trains."""
    return run / "heartbeats" / f"rank-{rank:05d}.json"


def read_json(path: Path) -> dict:
    """Returns the object in a small JSON file; empty if the file is missing or damaged."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def read_config(run: Path) -> dict[str, Any]:
    """Reads config.yaml as plain values under the names of today; {} if unreadable."""
    import yaml

    from pretrain.recipe import Loader

    try:
        values = yaml.load((run / "config.yaml").read_text(encoding="utf-8"), Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return with_current_names(values)[0] if isinstance(values, dict) else {}


def setting(config: Mapping[str, Any], name: str) -> Any:
    """Returns a value of config.yaml by its dotted name; None if there is none."""
    value: Any = config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def checkpoint_folders(run: Path) -> dict[int, Path]:
    """Returns {step: folder} of a run's checkpoints, oldest first, in whatever state."""
    found = {step_named(path.name): path for path in (run / "checkpoints").glob("step-*")}
    return {step: found[step] for step in sorted(found.keys() - {None})}


def trunk_checkpoint(text: str) -> Path:
    """Returns the folder of a run's checkpoint, RUN@STEP, unopened; raises InputError if there is none."""
    run, at, step = text.rpartition("@")
    folders = checkpoint_folders(Path(run)) if at else {}
    if not step.isdecimal() or int(step) not in folders:
        available = ", ".join(map(str, folders)) or "none"
        raise InputError(f"branch_from: {text}: give RUN@STEP, a checkpoint of another run; steps there: {available}")
    return folders[int(step)]


def latest_step(run: Path) -> int | None:
    """Returns the step in checkpoints/LATEST: the newest one written, or the target of a rollback."""
    try:
        return step_named((run / "checkpoints" / "LATEST").read_text().strip())
    except (OSError, UnicodeDecodeError):
        return None


def checkpoint_name(step: int) -> str:
    """Formats 500 as step-00000500."""
    return f"step-{step:08d}"


def step_named(name: str) -> int | None:
    """Parses step-00000500 as 500; None for names that `checkpoint_name` does not give, such as step-00000500.bak."""
    digits = re.fullmatch(r"step-([0-9]{8,})", name)
    step = int(digits[1]) if digits else None
    return step if step is not None and checkpoint_name(step) == name else None


def step_of(checkpoint: Path) -> int:
    """Returns the step of a folder whose name `step_named` accepts."""
    return int(checkpoint.name.removeprefix("step-"))


def read_state(checkpoint: Path) -> dict:
    """Reads a checkpoint's trainer_state.json; empty if it cannot be read."""
    return read_json(checkpoint / "trainer_state.json")


def validation_loss_of(state: Mapping[str, Any]) -> float | None:
    """Returns the validation loss in a trainer_state.json, the mean over the sources; None if none was measured."""
    loss = state.get("validation_loss")
    return loss if isinstance(loss, int | float) and math.isfinite(loss) else None


def checkpoint_damage(
    folder: Path, rank: int = 0, ranks: int = 1, beat: Callable[[], None] = lambda: None, *, resumes: bool = False
) -> list[str]:
    """Lists what `damage` finds; a checkpoint in a run's folder must also be of the step in its name.

    resumes: training continues from it; else only its model is read.
    """
    problems = damage(folder, rank, ranks, beat)
    step = step_named(folder.name) if folder.parent.name == "checkpoints" else None
    if problems or rank or step is None:
        return problems
    return contradictions(folder, step) if resumes else wrong_step(folder, step)


def wrong_step(folder: Path, step: int) -> list[str]:
    """Lists why an undamaged folder is not of this step."""
    state = read_state(folder).get("state")
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        return ["trainer_state.json does not say of which step it is"]
    found = state["step"]
    named = f"trainer_state.json is of step {found:,}; to use it, name it {checkpoint_name(found)}"
    return [] if found == step else [named]


def contradictions(folder: Path, step: int) -> list[str]:
    """Lists why training cannot continue at this step from an undamaged folder: another step, or missing tensors."""
    if problems := wrong_step(folder, step):
        return problems
    contents = read_state(folder)
    state = contents["state"]
    # For checkpoints from before `tensors` was recorded: an optimizer has no state until its first update.
    updated = step > (state.get("skipped_steps") or 0)
    tensors = contents.get("tensors", {"model": 1, "optimizer": updated, "average": bool(state.get("average"))})
    missing = [name for name, count in tensors.items() if count and not any(folder.glob(f"{name}*.safetensors"))]
    return [f"the tensors of its {name} are missing" for name in missing]


def steps_to_keep(settings: "Checkpoint", losses: Mapping[int, float | None]) -> set[int]:
    """Returns the steps whose checkpoints are kept: the newest, the best, the milestones.

    The same rules hold in a run's folder and on its mirror.

    Args:
        losses: {step: validation loss or None} of the existing checkpoints.
    """
    newest = sorted(losses)[-settings.keep_last :]
    measured = sorted((loss, step) for step, loss in losses.items() if loss is not None)
    best = [step for _, step in measured[: settings.keep_best]]
    milestones = [step for step in losses if settings.keep_every and step % settings.keep_every == 0]
    return {*newest, *best, *milestones}


def best_step(checkpoints: Mapping[int, Path]) -> int | None:
    """Returns the step with the lowest validation loss, the mean over the sources; None if none was measured."""
    losses = {step: validation_loss_of(read_state(folder)) for step, folder in checkpoints.items()}
    return min((step for step, loss in losses.items() if loss is not None), key=losses.get, default=None)


def output_problem(run: Path) -> str | None:
    """Returns why no run can be written there, without trying; None if there is no sign of a problem."""
    longest = max((len(os.fsencode(part)) for part in run.parts), default=0)
    if longest > LONGEST_NAME or len(os.fsencode(run.absolute())) > LONGEST_PATH:
        shown = shortened(run, 60)
        return (
            f"output: {shown}: a name has at most {LONGEST_NAME} bytes and a path {LONGEST_PATH}; choose a shorter one"
        )
    if "\0" in str(run):
        return f"output: {str(run)!r}: a name cannot contain a NUL character"
    for place in (run, *run.parents):
        if os.path.isdir(place):
            may_write = os.access(place, os.W_OK | os.X_OK)
            return None if may_write else f"output: {run}: {place} is not writable; choose another path"
        if os.path.lexists(place):
            return f"output: {run}: {place} is {'a' if place == run else 'no folder but a'} file; choose another name"
    return None
