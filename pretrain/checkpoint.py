"""Checkpoints: one format for every strategy and number of ranks, each one a HF model folder, none with a pickle.

    checkpoints/step-00000500/
      config.json, tokenizer files, model*.safetensors    a model that from_pretrained loads
      optimizer*.safetensors                              optimizer state as '<parameter>.<state>', whole tensors
      trainer_state.json                                  step, tokens, best losses, what the data and the model were
      MANIFEST.json                                       size and sha256 of every file, written last

A save writes to a hidden folder, syncs every file, writes the manifest, renames, syncs the parent, and then prunes:
at every instant the newest folder with a valid manifest is a whole checkpoint. Resume checks hashes before it reads.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pretrain.strategy import Strategy, TensorGroup

FORMAT = {"format": "groundwork-checkpoint", "version": 1}
MAX_FILE_BYTES = 4 * 1024**3
UNFINISHED, REMOVED = ".saving-", ".removing-"
EXIT_NO_VALID_CHECKPOINT = 17


class NoValidCheckpoint(Exception):
    """There are checkpoints, and none can be trusted: starting from scratch would hide the loss."""


class SaveFailed(Exception):
    """The save was given up on every rank; what was there before is untouched."""


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay."""

    keep_last: int
    keep_best: int
    milestones_every: int | None

    def keeps(self, losses: Mapping[int, float | None]) -> set[int]:
        """The steps to keep, of {step: validation loss or None}."""
        newest = sorted(losses)[-self.keep_last :]
        measured = sorted((loss, step) for step, loss in losses.items() if loss is not None)
        best = [step for _, step in measured[: self.keep_best]]
        milestones = [step for step in losses if self.milestones_every and step % self.milestones_every == 0]
        return {*newest, *best, *milestones}


class SavedTensors(Mapping[str, torch.Tensor]):
    """The tensors of `<prefix>*.safetensors` in a folder, by name, read one at a time when asked for."""

    def __init__(self, folder: Path, prefix: str):
        self._file_of: dict[str, Path] = {}
        for path in sorted(folder.glob(f"{prefix}*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self._file_of |= dict.fromkeys(file.keys(), path)

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self._file_of[name], framework="pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


class Checkpoints:
    """The checkpoints of one run. Every method that is not marked otherwise is called by all ranks together."""

    def __init__(self, run: Path, strategy: Strategy, retention: Retention):
        self.folder = run / "checkpoints"
        self.strategy, self.retention = strategy, retention
        if strategy.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            for litter in [*self.folder.glob(f"{UNFINISHED}*"), *self.folder.glob(f"{REMOVED}*")]:
                shutil.rmtree(litter)
        strategy.barrier()

    def save(
        self, step: int, state: dict, groups: Mapping[str, TensorGroup], describe: Callable[[Path], None]
    ) -> Path:
        """Writes and commits the checkpoint of `step`, then prunes; returns its folder.

        Args:
            state: what goes into trainer_state.json.
            groups: {"model": ..., "optimizer": ...}; each rank writes its share of the files.
            describe: writes the rest of a HF model folder (config, tokenizer) into the folder given; main rank only.

        Raises SaveFailed on every rank if any rank could not write.
        """
        final = self.folder / f"step-{step:08d}"
        unfinished = self.folder / f"{UNFINISHED}{final.name}"
        with self.strategy.together(SaveFailed):
            if self.strategy.is_main:
                require_space(self.folder, sum(bytes_of(group) for group in groups.values()))
                unfinished.mkdir()
        written: dict[str, dict] = {}
        with self.strategy.together(SaveFailed, on_failure=lambda: shutil.rmtree(unfinished, ignore_errors=True)):
            for prefix, group in groups.items():
                written |= write_group(unfinished, prefix, group, self.strategy.rank, self.strategy.ranks)
        files = {name: entry for share in self.strategy.gather(written) for name, entry in share.items()}
        with self.strategy.together(SaveFailed, on_failure=lambda: shutil.rmtree(unfinished, ignore_errors=True)):
            if self.strategy.is_main:
                describe(unfinished)
                (unfinished / "trainer_state.json").write_text(json.dumps(state, indent=1))
                commit(unfinished, final, files)
                write_durably(self.folder / "LATEST", final.name)
                self._prune()
        return final

    def newest_valid(self, log: Callable[[str], None]) -> Path | None:
        """The newest checkpoint whose files are all as they were written; None if there never was one.

        What is wrong with those passed over goes to `log`. Raises NoValidCheckpoint if there are only damaged ones.
        """
        folders = sorted(self.folder.glob("step-*"), reverse=True)
        for folder in folders:
            share = damage(folder, self.strategy.rank, self.strategy.ranks)
            problems = [problem for found in self.strategy.gather(share) for problem in found]
            if not problems:
                return folder
            log(f"checkpoint {folder.name} cannot be used: {'; '.join(problems)}")
        if folders:
            raise NoValidCheckpoint(
                f"none of the {len(folders)} checkpoints in {self.folder} is intact; restore one from a copy, "
                "or start again with another --output"
            )
        return None

    def _prune(self) -> None:
        losses = {}
        for folder in self.folder.glob("step-*"):
            state = read_state(folder) or {}
            losses[int(folder.name.removeprefix("step-"))] = state.get("validation_loss")
        for step in set(losses) - self.retention.keeps(losses):
            # Renamed first: a folder that is being removed must never pass for a checkpoint.
            doomed = self.folder / f"{REMOVED}step-{step:08d}"
            (self.folder / f"step-{step:08d}").rename(doomed)
            shutil.rmtree(doomed)


def read_state(folder: Path) -> dict | None:
    """A checkpoint's trainer_state.json; None if it cannot be read."""
    try:
        return json.loads((folder / "trainer_state.json").read_text())
    except (OSError, ValueError):
        return None


def plan_files(group: TensorGroup, prefix: str, max_file_bytes: int = MAX_FILE_BYTES) -> dict[str, list[str]]:
    """{file name: names of its tensors}: HF's naming, one file where everything fits."""
    bundles: list[list[str]] = [[]]
    room = max_file_bytes
    for name, shape in group.shapes.items():
        size = tensor_bytes(shape, group.dtypes[name])
        if bundles[-1] and size > room:
            bundles.append([])
            room = max_file_bytes
        bundles[-1].append(name)
        room -= size
    if len(bundles) == 1:
        return {f"{prefix}.safetensors": bundles[0]}
    return {f"{prefix}-{i:05d}-of-{len(bundles):05d}.safetensors": names for i, names in enumerate(bundles, start=1)}


def write_group(
    folder: Path, prefix: str, group: TensorGroup, rank: int, ranks: int, dtype: torch.dtype | None = None
) -> dict[str, dict]:
    """Writes this rank's share of the files; returns {file: {bytes, sha256}} of what it wrote.

    All ranks walk through all tensors in the same order, since fetching one may need everybody; rank i keeps those of
    every i-th file. dtype: cast floating-point tensors on the way.
    """
    files = plan_files(group, prefix)
    written = {}
    # The optimizer starts with the last rank, so that with several ranks the two large files have different writers.
    first = 0 if prefix == "model" else ranks - 1
    for number, (file, names) in enumerate(files.items()):
        mine = (first + number) % ranks == rank
        tensors = {name: tensor for name in names if (tensor := group.fetch(name, mine)) is not None}
        if mine:
            if dtype is not None:
                tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
            save_file({n: t.contiguous() for n, t in tensors.items()}, folder / file, metadata={"format": "pt"})
            written[file] = seal(folder / file)
    if len(files) > 1 and rank == 0:
        index = {
            "metadata": {"total_size": bytes_of(group, dtype)},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        (folder / f"{prefix}.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return written


def commit(unfinished: Path, final: Path, files: Mapping[str, dict]) -> None:
    """Seals what is not sealed yet, writes the manifest, and makes the folder appear under its name at once."""
    for path in sorted(unfinished.rglob("*")):
        name = str(path.relative_to(unfinished))
        if path.is_file() and name not in files:
            files = {**files, name: seal(path)}
    manifest = {**FORMAT, "files": dict(sorted(files.items()))}
    write_durably(unfinished / "MANIFEST.json", json.dumps(manifest, indent=1))
    for folder in [*(path for path in unfinished.rglob("*") if path.is_dir()), unfinished]:
        sync_folder(folder)
    if final.exists():
        doomed = final.with_name(f"{REMOVED}{final.name}")
        final.rename(doomed)
        unfinished.rename(final)
        shutil.rmtree(doomed)
    else:
        unfinished.rename(final)
    sync_folder(final.parent)


def seal(path: Path) -> dict:
    """Forces a file to disk; returns its size and sha256."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def write_durably(path: Path, text: str) -> None:
    """Replaces a small file so that a crash leaves either the old or the new one."""
    fresh = path.with_name(f".{path.name}.new")
    with open(fresh, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damage(folder: Path, rank: int = 0, ranks: int = 1) -> list[str]:
    """What is wrong with a checkpoint, as far as this rank's share of its files shows; [] is a good checkpoint."""
    try:
        manifest = json.loads((folder / "MANIFEST.json").read_text())
        expected = manifest["files"]
    except FileNotFoundError:
        return ["MANIFEST.json is missing"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"MANIFEST.json cannot be read ({error})"]
    if {key: manifest.get(key) for key in FORMAT} != FORMAT:
        return [f"MANIFEST.json is not of {FORMAT['format']} version {FORMAT['version']}"]
    present = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {"MANIFEST.json"}
    problems = [f"{name} is not in the manifest" for name in sorted(present - set(expected))] if rank == 0 else []
    for name, entry in sorted(expected.items())[rank::ranks]:
        if name not in present:
            problems.append(f"{name} is missing")
        elif (size := (folder / name).stat().st_size) != entry["bytes"]:
            problems.append(f"{name} has {size:,} bytes instead of {entry['bytes']:,}")
        elif seal(folder / name)["sha256"] != entry["sha256"]:
            problems.append(f"{name} does not have the sha256 that was written")
    return problems


def tensor_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def bytes_of(group: TensorGroup, dtype: torch.dtype | None = None) -> int:
    """Bytes of a group's tensors on disk."""
    return sum(tensor_bytes(shape, dtype or group.dtypes[name]) for name, shape in group.shapes.items())


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raises OSError if the disk has no room for a checkpoint: better before than in the middle of it."""
    free = shutil.disk_usage(folder).free
    if free < 1.05 * needed_bytes:
        raise OSError(f"a checkpoint needs {needed_bytes / 1e9:.2f} GB, and {folder} has {free / 1e9:.2f} GB free")


def load_saved(folder: Path) -> tuple[SavedTensors, SavedTensors, dict]:
    """(model tensors, optimizer tensors, trainer state) of a checkpoint that was found valid."""
    try:
        return SavedTensors(folder, "model"), SavedTensors(folder, "optimizer"), read_state(folder)
    except SafetensorError as error:
        raise NoValidCheckpoint(f"{folder}: {error}") from error
