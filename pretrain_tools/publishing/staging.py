"""Finds a run's publishable models, and stages the files to upload in a folder."""

import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pretrain.errors import InputError, Problems
from pretrain.files import CARD_FILE, PICTURE_FILE, PROVENANCE_FILE, SEAL_FILE, SIGNATURE_FILE, remove
from pretrain.runs.hub import revision_of
from pretrain.runs.run_folder import checkpoint_damage, checkpoint_folders, read_config, read_state, setting
from pretrain_tools.publishing.card import write_card
from pretrain_tools.publishing.facts import Publication, read_facts
from pretrain_tools.publishing.materials import MATERIALS_FILE, write_materials
from pretrain_tools.publishing.provenance import write_provenance
from pretrain_tools.publishing.training_content import TRAINING_CONTENT_FILE, training_content
from pretrain_tools.runs.addresses import best_step
from pretrain_tools.runs.history import last_good_end

WRITTEN_ANEW = (
    CARD_FILE, PICTURE_FILE, TRAINING_CONTENT_FILE, MATERIALS_FILE, SEAL_FILE, PROVENANCE_FILE, SIGNATURE_FILE,
)  # fmt: skip
STAYS_HERE = re.compile(r"(optimizer|average|loss_terms).*\.safetensors(\.index\.json)?|trainer_state\.json")
WEIGHTS = re.compile(r"model.*\.safetensors(\.index\.json)?")
SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIAL", re.IGNORECASE)
SHORTEST_SECRET = 12


@dataclass(frozen=True)
class Model:
    """A model to publish."""

    folder: Path
    """final/ or a checkpoint folder."""
    step: int
    tokens: int | None
    revision: str
    """Branch in the repository."""

    @property
    def is_final(self) -> bool:
        return self.revision == "main"


def find_publishable(run: Path, *, steps: list[int | str], milestones: bool, final: bool) -> list[Model]:
    """Finds the requested models, oldest first. The default is final/.

    Raises InputError listing all missing or damaged models.

    Args:
        steps: checkpoint steps; "best" means the checkpoint with the lowest validation loss.
    """
    problems = Problems()
    checkpoints = checkpoint_folders(run)
    there = ", ".join(map(str, checkpoints)) or "none"
    wanted = set()
    for given in dict.fromkeys(steps):
        step = best_step(checkpoints) if given == "best" else given
        if step in checkpoints:
            wanted.add(step)
        else:
            problems.append(
                f"--checkpoint {given}: must be the step of a checkpoint of {run}, or best if the run has validation "
                f"losses; available steps: {there}"
            )
    if milestones:
        every = setting(read_config(run), "checkpoint.keep_every")
        kept = [step for step in checkpoints if every and step % every == 0]
        if not kept and not (every and final):
            problems.append(
                f"--milestones: {run} has no checkpoint kept by checkpoint.keep_every ({every}); use --checkpoint STEP"
            )
        wanted.update(kept)
    found = [checkpoint_model(checkpoints[step], step) for step in sorted(wanted)]
    if final or not (steps or milestones):
        if (run / "final" / "config.json").is_file():
            end = last_good_end(run)
            # The `end` event may be missing from the log.
            step = end["step"] if end.get("step") is not None else max(checkpoints, default=0)
            found.append(Model(run / "final", step, end.get("tokens"), revision="main"))
        else:
            remedy = f"use --checkpoint {max(checkpoints)}" if checkpoints else "finish training first"
            problems.append(f"--run {run}: contains no final/, so training hasn't finished; {remedy}")
    for model in found:
        problems += [f"{model.folder} is damaged: {problem}" for problem in checkpoint_damage(model.folder)]
    problems.stop_if_any()
    return found


def checkpoint_model(folder: Path, step: int) -> Model:
    """Returns the model in a checkpoint."""
    return Model(folder, step, setting(read_state(folder), "state.tokens"), revision_of(step))


def stage(run: Path, model: Model, publication: Publication, target: Path, signer: Any = None) -> Path:
    """Writes the files to publish to the folder `target`, atomically. Returns the folder.

    Converts a checkpoint's fp32 weights to the export dtype, names them as in final/, and omits optimizer and trainer
    state. Raises InputError if a file contains the value of a secret environment variable.

    signer: signs the folder, see `load_key`.
    """
    dtype = publication.dtype or "bf16"
    publication = replace(publication, revision=model.revision, dtype=dtype)
    # This folder is renamed at the end, so that a crash can't leave an incomplete `target`.
    unfinished = target.with_name(f".staging-{target.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        copy_model(model, unfinished, dtype, trusted=publication.trust_remote_code)
        # Read the staged config.json, which has the export dtype.
        facts = read_facts(run, model.step, unfinished, publication)
        # Each file contains hashes of the files before it, so the order matters.
        write_card(facts, unfinished)
        (unfinished / TRAINING_CONTENT_FILE).write_text(training_content(facts), encoding="utf-8")
        write_materials(facts, unfinished)
        write_provenance(facts, unfinished, signed=signer is not None)
        # Check before renaming, because a folder with a secret must not look finished.
        if problems := secret_problems(unfinished):
            raise InputError(*problems)
    except InputError:
        shutil.rmtree(unfinished)
        raise
    if signer is not None:
        signer.sign(unfinished, unfinished / SIGNATURE_FILE)
    if target.exists():
        remove(target)
    unfinished.rename(target)
    return target


def copy_model(model: Model, target: Path, dtype: str, *, trusted: bool = False) -> None:
    """Copies a model's files. Converts a checkpoint's weights to `dtype`."""
    for path in sorted(model.folder.iterdir()):
        if STAYS_HERE.fullmatch(path.name) or not path.is_file() or path.name in WRITTEN_ANEW:
            continue
        if model.is_final:
            link_or_copy(path, target / path.name)
        elif not WEIGHTS.fullmatch(path.name):
            shutil.copyfile(path, target / path.name)  # not hard-linked, because config.json is rewritten
    if not model.is_final:
        write_rounded(model.folder, target, dtype, trusted=trusted)


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-links a file, or copies it if `target` is on another file system. Follows symbolic links."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def write_rounded(source: Path, target: Path, dtype: str, *, trusted: bool) -> None:
    """Writes a checkpoint's weights in `dtype`, named as in final/, and sets the dtype in config.json.

    trusted: run the model's own code to find its buffers.
    """
    import torch

    from pretrain.checkpoint.tensor_files import SavedTensors, write_group
    from pretrain.hardware import DTYPES
    from pretrain.model.published_names import PublishedNames
    from pretrain.parallel.tensor_group import TensorGroup
    from pretrain_tools.runs.merge import config_of, note_dtype

    published = PublishedNames(config_of(source, trusted))
    saved = SavedTensors(source, "model")
    group = TensorGroup(saved.shapes(), dict.fromkeys(saved, torch.float32), saved.__getitem__)
    # Buffers stay in fp32, because a rounded router bias would select different experts.
    buffers = {name for name, _ in published.meta_model.named_buffers()}
    dtypes = dict.fromkeys(saved.keys() - buffers, DTYPES[dtype])
    write_group(target, "model", group, 0, 1, dtypes, published=published)
    note_dtype(target, DTYPES[dtype])


def secret_problems(folder: Path) -> list[str]:
    """Lists files that contain the value of a secret environment variable. The messages don't contain the value."""
    secrets = {
        name: value.encode()
        for name, value in os.environ.items()
        if SECRET_NAMES.search(name) and len(value) >= SHORTEST_SECRET
    }
    return [
        f"{path.name} contains the value of the secret {name}; remove it from the recipe and publish again"
        for path in sorted(folder.iterdir())
        # Weights and images are too large to search.
        if path.suffix not in (".safetensors", ".png")
        for name, value in secrets.items()
        if value in path.read_bytes()
    ]
