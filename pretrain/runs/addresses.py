"""Finds the checkpoint that a branch starts from."""

from pathlib import Path

from pretrain.errors import InputError
from pretrain.runs.run_folder import checkpoint_folders


def trunk_checkpoint(text: str) -> Path:
    """Returns the folder of a run's checkpoint, RUN@STEP; raises InputError if there is none. Does not look inside."""
    run, at, step = text.rpartition("@")
    folders = checkpoint_folders(Path(run)) if at else {}
    if not step.isdecimal() or int(step) not in folders:
        available = ", ".join(map(str, folders)) or "none"
        raise InputError(f"branch_from: {text}: give RUN@STEP, a checkpoint of another run; steps there: {available}")
    return folders[int(step)]
