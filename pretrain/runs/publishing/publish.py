"""Which models of a run are to be published, and what exactly goes up: a folder with all of it and nothing else."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pretrain.errors import InputError
from pretrain.files import SEAL_FILE, commit, damage, remove
from pretrain.runs.history import current_events, read_metrics
from pretrain.runs.publishing.card import CARD_FILE, PICTURE_FILE, Publication, write_card
from pretrain.runs.run_folder import best_step, checkpoint_folders, read_config, read_json, read_state
from pretrain.units import count_text

STAGING = "publish"
"""Folder of a run where models wait to go up, and where the log of publishing during training is."""
EVALUATIONS = "evaluations"
"""Folder of a run with the logs and the results of what is evaluated beside the training."""
STAYS_HERE = re.compile(r"optimizer.*\.safetensors(\.index\.json)?|trainer_state\.json")
WEIGHTS = re.compile(r"model.*\.safetensors")
SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIAL", re.IGNORECASE)
SHORTEST_SECRET = 12


class PublishError(Exception):
    """The disk, the network or the Hub failed; the run is as it was, and the same command goes on."""


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turns a full or unwritable disk into PublishFailed."""
    try:
        yield
    except OSError as error:
        raise PublishError(
            f"{folder} is not writable, but models are staged there for upload ({error}); free space, or publish "
            "a copy of the run from another disk"
        ) from error


@dataclass(frozen=True)
class Model:
    """One model of a run, as it is to be published."""

    folder: Path
    """final/ or a checkpoint."""
    step: int
    tokens: int | None
    revision: str
    """Branch of the repository."""
    tag: str | None = None
    """A second name of the revision: tokens-10B."""
    with_optimizer: bool = False
    """Whether a checkpoint goes up whole, as it is on disk, so that others can train it further."""

    @property
    def is_final(self) -> bool:
        return self.revision == "main"


def evaluation_log(run: Path, checkpoint: str) -> Path:
    """What the evaluation of a checkpoint says; held open by it (processes.py) as long as it lasts."""
    return run / EVALUATIONS / f"{checkpoint}.log"


def find_publishable(
    run: Path, *, steps: list[int | str], milestones: bool, final: bool, with_optimizer: bool = False
) -> list[Model]:
    """The models asked for, oldest first, each found intact; final/ where none is named.

    steps: of checkpoints; "best" is the one with the lowest validation loss.
    Raises InputError with everything that is not there or damaged.
    """
    problems: list[str] = []
    found: list[Model] = []
    checkpoints = checkpoint_folders(run)
    wanted = set(steps)
    if "best" in wanted:
        best = best_step(checkpoints)
        wanted = wanted - {"best"} | ({best} - {None})
        if best is None:
            problems.append(f"--checkpoint best: no checkpoint of {run} has a validation loss; give a step")
    if milestones:
        every = (read_config(run).get("checkpoint") or {}).get("milestones_every")
        kept = [step for step in checkpoints if every and step % every == 0]
        if not every:
            problems.append(
                f"--milestones: the recipe of {run} keeps none (checkpoint.milestones_every); give --checkpoint STEP"
            )
        elif not kept and not final:
            problems.append(f"--milestones: {run} has no checkpoint at a multiple of {every:,} steps yet")
        wanted |= set(kept)
    for step in sorted(wanted):
        if step not in checkpoints:
            there = ", ".join(map(str, checkpoints)) or "none"
            problems.append(f"--checkpoint {step}: {run} has no checkpoint of this step; steps there: {there}")
        else:
            found.append(replace(checkpoint_model(checkpoints[step], step), with_optimizer=with_optimizer))
    if with_optimizer and not (steps or milestones):
        problems.append("--with_optimizer: final/ has none; give --checkpoint STEP or --milestones")
    if final or not (steps or milestones):
        if (run / "final" / "config.json").is_file():
            found.append(final_model(run))
        else:
            there = f"--checkpoint {max(checkpoints)}" if checkpoints else "its training first"
            problems.append(f"--run {run}: has no final/, so training has not finished; give {there}")
    for model in found:
        problems += [f"{model.folder} is damaged: {problem}" for problem in damage(model.folder)]
    if problems:
        raise InputError(*problems)
    return found


def checkpoint_model(folder: Path, step: int) -> Model:
    tokens = ((read_state(folder) or {}).get("state") or {}).get("tokens")
    tag = f"tokens-{count_text(tokens)}" if tokens else None
    return Model(folder, step, tokens, revision=revision_of(step), tag=tag)


def revision_of(step: int) -> str:
    """The branch of a checkpoint."""
    return f"step-{step}"


def final_model(run: Path) -> Model:
    """final/, with the step of the run's last good end; of its newest checkpoint while that is not logged."""
    ends = [
        event for event in current_events(read_metrics(run)) if event.get("event") == "end" and event.get("code") == 0
    ]
    step = ends[-1].get("step") if ends else None
    if step is None:
        step = max(checkpoint_folders(run), default=0)
    return Model(run / "final", step, ends[-1].get("tokens") if ends else None, revision="main")


def stage(run: Path, model: Model, publication: Publication, target: Path) -> Path:
    """Writes into `target` exactly what goes up; whole or not at all. Returns it.

    A checkpoint's fp32 weights are rounded to the export dtype, and its optimizer and trainer state stay here, unless
    it goes up with them: then it is whole, and sealed with its card, so that a run continues from what is downloaded.
    Raises InputError if a secret of this process's environment stands in a file.
    """
    dtype = "fp32" if model.with_optimizer else publication.dtype or "bf16"
    publication = replace(publication, revision=model.revision, dtype=dtype)
    unfinished = target.with_name(f".staging-{target.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for path in sorted(model.folder.iterdir()):
        if not path.is_file() or path.name in (CARD_FILE, PICTURE_FILE, SEAL_FILE):
            continue
        if STAYS_HERE.fullmatch(path.name) and not model.with_optimizer:
            continue
        if model.is_final or model.with_optimizer:
            link_or_copy(path, unfinished / path.name)
        elif WEIGHTS.fullmatch(path.name):
            round_weights(path, unfinished / path.name, dtype)
        else:
            shutil.copyfile(path, unfinished / path.name)
    if not model.is_final and not model.with_optimizer:
        note_dtype(unfinished, dtype)
    write_card(run, unfinished, publication, step=model.step)
    if problems := secret_problems(unfinished):
        shutil.rmtree(unfinished)
        raise InputError(*problems)
    if model.with_optimizer:
        commit(unfinished, target, read_json(model.folder / SEAL_FILE)["files"])
        return target
    if target.exists():
        remove(target)
    unfinished.rename(target)
    return target


def link_or_copy(source: Path, target: Path) -> None:
    """A second name for the same bytes; a copy where the two are on different file systems."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def round_weights(source: Path, target: Path, dtype: str) -> None:
    """Copies a safetensors file, its floating-point tensors rounded as final/ has them."""
    from safetensors.torch import load_file, save_file

    from pretrain.hardware import DTYPES

    tensors = {
        name: tensor.to(DTYPES[dtype]) if tensor.is_floating_point() else tensor
        for name, tensor in load_file(source).items()
    }
    save_file(tensors, target, metadata={"format": "pt"})


def note_dtype(folder: Path, dtype: str) -> None:
    """Brings config.json and the index in line with weights that are now in `dtype`."""
    from pretrain.hardware import DTYPES

    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["dtype"] = str(DTYPES[dtype]).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    index_path = folder / "model.safetensors.index.json"
    if index_path.is_file():
        index = json.loads(index_path.read_text(encoding="utf-8"))
        index["metadata"]["total_size"] = sum(tensor_bytes_of(p) for p in folder.glob("model*.safetensors"))
        index_path.write_text(json.dumps(index, indent=1), encoding="utf-8")


def tensor_bytes_of(path: Path) -> int:
    """Bytes of the tensors of a safetensors file: all of it but its header, whose length stands in front."""
    with open(path, "rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return path.stat().st_size - 8 - header


def secret_problems(folder: Path) -> list[str]:
    """Files in which the value of a secret environment variable stands; the value itself is not shown."""
    secrets = {
        name: value.encode()
        for name, value in os.environ.items()
        if SECRET_NAMES.search(name) and len(value) >= SHORTEST_SECRET
    }
    return [
        f"{path.name} holds the value of {name}, a secret: remove it from the recipe and publish again"
        for path in sorted(folder.iterdir())
        if path.suffix not in (".safetensors", ".png")
        for name, value in secrets.items()
        if value in path.read_bytes()
    ]
