"""Finds the model folder for an address: a run, one of its steps, a Hugging Face model folder, or a Hub ID.

runs/x            the run's final/, or its newest valid checkpoint
runs/x@500        the run's checkpoint at step 500
runs/x@best       the run's checkpoint with the lowest validation loss
runs/x@all        all valid checkpoints of the run, oldest first, plus final/ if no checkpoint has its step
some/folder       a folder that from_pretrained can load
owner/name@rev    a Hub model at a branch, tag or commit
"""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import InputError, did_you_mean, is_first_on_machine, one_line
from pretrain.files import SEAL_FILE
from pretrain.runs.run_folder import (
    METRICS_FILE,
    checkpoint_damage,
    checkpoint_folders,
    read_state,
    validation_loss_of,
)
from pretrain_tools.runs.history import last_good_end, refuse_url

HUB_ID = re.compile(r"\w[\w.-]*(?:/[\w.-]+)?(?:@[\w./-]+)?")
# Files needed for evaluation. Excludes pickled weights.
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]


@dataclass(frozen=True)
class ModelAddress:
    """A model's location, and its origin if known."""

    name: str
    """Display name: the address, plus the checkpoint if the address doesn't include it."""
    folder: Path
    """Local Hugging Face model folder."""
    run: Path | None = None
    """Run that trained the model."""
    step: int | None = None
    tokens: int | None = None
    """Number of training tokens seen."""
    revision: str | None = None
    """Commit hash of a Hub model."""
    weights: str = "raw"
    """raw, or average for a checkpoint's averaged weights."""


def find_models(text: str, flag: str = "--model") -> list[ModelAddress]:
    """Resolves an address to a model, or to several models for RUN@all.

    Raises InputError if the model doesn't exist. The message begins with `flag` and suggests alternatives.
    """
    folder = Path(text).expanduser()
    base, _, selector = text.rpartition("@")
    run = Path(base).expanduser()
    try:
        # Check for a folder first, because its name may contain @.
        if folder.is_dir():
            return [_in_folder(text, folder)]
        if base and run.is_dir():
            return _in_run(text, run, selector)
        refuse_url(text)
    except InputError as error:
        raise InputError(*(f"{flag} {problem}" for problem in error.problems)) from None
    parent = Path(base or text).parent
    # A path in an existing folder can't be meant as a Hub ID.
    if not HUB_ID.fullmatch(text) or (parent != Path() and parent.is_dir()):
        siblings = [str(path) for path in parent.glob("*") if path.is_dir()]
        raise InputError(
            f"{flag} {text}: neither a local folder nor a Hub ID (owner/name or owner/name@revision)"
            f"{did_you_mean(base or text, siblings)}"
        )
    # The snapshot folder is named after the commit.
    snapshot = download(flag, text, HUB_FILES)
    return [ModelAddress(text, snapshot, revision=snapshot.name)]


def _in_folder(text: str, folder: Path) -> ModelAddress:
    if (folder / "config.json").is_file():
        return _undamaged(text, folder)
    final = folder / "final"
    if (final / "config.json").is_file():
        return _undamaged(f"{text.rstrip('/')}/final", final)
    if not checkpoint_folders(folder):
        is_run = (folder / METRICS_FILE).is_file()
        advice = "wait for its first checkpoint, or save one with runs.py save RUN" if is_run else "use another folder"
        raise InputError(
            f"{text}: neither a model folder (no config.json) nor a run with final/ or checkpoints/; {advice}"
        )
    for address in newest_models(folder):
        return address
    raise InputError(f"{text}: {folder} has no intact checkpoint; resume training, or restore a checkpoint")


def newest_models(run: Path) -> Iterator[ModelAddress]:
    """Yields a run's intact checkpoints, newest first, and prints a warning for each damaged one."""
    for step, folder in reversed(checkpoint_folders(run).items()):
        if not (problems := checkpoint_damage(folder)):
            yield _describe(f"{run}@{step}", folder)
        elif is_first_on_machine():
            print(f"warning: {folder} cannot be used: {'; '.join(problems)}", file=sys.stderr)


def _in_run(text: str, run: Path, selector: str) -> list[ModelAddress]:
    checkpoints = checkpoint_folders(run)
    if selector == "all":
        return _all_of(text, run)
    step = best_step(checkpoints) if selector == "best" else int(selector) if selector.isdecimal() else None
    if step not in checkpoints:
        available = ", ".join(map(str, checkpoints)) or "none"
        raise InputError(
            f"{text}: the part after @ must be the step of a checkpoint, best (if the run has validation losses) or "
            f"all, got {selector!r}; available steps: {available}"
        )
    return [_undamaged(f"{run}@{step}", checkpoints[step])]


def _all_of(text: str, run: Path) -> list[ModelAddress]:
    found = [*newest_models(run)][::-1]
    if (run / "final" / "config.json").is_file():
        final = _undamaged(f"{run}/final", run / "final")
        if final.step not in [address.step for address in found]:
            found.append(final)
    if not found:
        raise InputError(f"{text}: {run} has no intact checkpoint")
    return found


def _undamaged(name: str, folder: Path) -> ModelAddress:
    """Returns a model folder's address. Raises InputError if its files don't match its manifest."""
    if (folder / SEAL_FILE).is_file() and (problems := checkpoint_damage(folder)):
        raise InputError(f"{name}: {folder} is damaged: {'; '.join(problems)}; use another checkpoint")
    return _describe(name, folder)


def _describe(name: str, folder: Path) -> ModelAddress:
    """Returns a model folder's address, including run, step and tokens if it belongs to a run."""
    # The folder may be a symbolic link to a checkpoint.
    real = folder.resolve()
    is_final = real.name == "final"
    run = real.parent if is_final else real.parent.parent
    if not (is_final or real.parent.name in ("checkpoints", "evaluations")) or not (run / "config.yaml").is_file():
        return ModelAddress(name, folder)
    given = folder.parent if is_final else folder.parent.parent
    run = given if given.resolve() == run else run  # keep a relative path
    seen = last_good_end(run) if is_final else read_state(folder).get("state", {})
    return ModelAddress(name, folder, run, seen.get("step"), seen.get("tokens"))


def download(flag: str, text: str, files: list[str] | None = None) -> Path:
    """Downloads OWNER/NAME or OWNER/NAME@REVISION from the Hub and returns the folder.

    files: file name patterns to download; None for all. Raises InputError with `flag` in the message.
    """
    from huggingface_hub import snapshot_download

    repository, _, revision = text.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=files))
    except (OSError, ValueError) as error:  # huggingface_hub's errors are subclasses of these
        raise InputError(
            f"{flag} {text}: not a local folder, and the Hub download failed ({one_line(error)}); use a local folder, "
            "or a Hub ID that this machine can access"
        ) from error


def best_step(checkpoints: Mapping[int, Path]) -> int | None:
    """Returns the step with the lowest validation loss (averaged over sources), or None without validation."""
    losses = {step: validation_loss_of(read_state(folder)) for step, folder in checkpoints.items()}
    return min((step for step, loss in losses.items() if loss is not None), key=losses.get, default=None)
