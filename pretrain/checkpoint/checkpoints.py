"""Saves, verifies and prunes checkpoints. The format is the same for every strategy and number of ranks.

    checkpoints/step-00000500/
      config.json, tokenizer files, model*.safetensors    the model, for from_pretrained
      optimizer*.safetensors                              unsharded optimizer state, as '<parameter>.<key>'
      average*.safetensors                                averaged weights, if any
      loss_terms.safetensors                              loss-term parameters, if any
      trainer_state.json                                  step, token count, skipped data, data and model identity
      MANIFEST.json                                       size and sha256 of every file, written last

Training waits only while tensors are copied to CPU memory. A thread then writes, syncs and hashes the files in a
hidden folder, which it renames when it is complete. Hashes are verified before resuming, and damaged checkpoints are
renamed to damaged-step-00000500.
"""

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from pretrain import config
from pretrain.checkpoint.run_state import RunStoppedError
from pretrain.checkpoint.tensor_files import HostMemory, SavedTensors, bytes_of, plan_files, shares, tensor_index
from pretrain.errors import EXIT_NO_VALID_CHECKPOINT
from pretrain.files import REMOVED, Beat, commit, delete, remove, seal, write_durably
from pretrain.parallel.ranks import Ranks
from pretrain.parallel.tensor_group import TensorGroup
from pretrain.runs.event_log import read_metrics
from pretrain.runs.run_folder import (
    METRICS_FILE,
    checkpoint_damage,
    checkpoint_folders,
    checkpoint_name,
    latest_step,
    read_state,
    steps_to_keep,
    validation_loss_of,
)
from pretrain.terminal import say
from pretrain.units import bytes_text

SAVED = ("model", "optimizer", "average", "loss_terms")
"""File name prefixes of the tensor files."""
UNFINISHED = ".saving-"
DAMAGED = "damaged-"
SLOWEST_SAVE_SECONDS = 3600.0
"""Maximum duration of a save. After that, the watchdog treats it as a hang."""


class NoValidCheckpointError(RunStoppedError):
    """Raised if there is no intact checkpoint to resume from."""

    exit_code = EXIT_NO_VALID_CHECKPOINT


class SaveError(RunStoppedError):
    """Raised on every rank if a save fails."""


@dataclass
class Save:
    """A save, in progress or completed."""

    step: int
    folder: Path
    files: dict[str, dict[str, torch.Tensor]]
    """{file: {name: tensor in CPU memory}} for this rank to write."""
    indices: dict[str, dict]
    """{index file: contents}."""
    contents: dict[str, Any]
    """Contents of trainer_state.json."""
    describe: Callable[[Path], None]
    started: float = field(default_factory=time.perf_counter)
    stall_seconds: float = 0.0
    """Seconds that training waited."""
    seconds: float = 0.0
    """Total duration in seconds."""
    bytes: int = 0
    problem: str | None = None
    """Error message (the same on all ranks). None if the save succeeded."""
    thread: threading.Thread | None = None


class Checkpoints:
    """Saves and finds a run's checkpoints. All methods except `finished` are collective."""

    def __init__(self, run: Path, ranks: Ranks, settings: config.Checkpoint):
        self.run = run
        self.folder = run / "checkpoints"
        self.ranks = ranks
        self.settings = settings
        self.last_step: int | None = None
        """Step of the latest checkpoint that was saved or loaded."""
        self.begun_step: int | None = None
        """Step of the save in progress, or `last_step`. The same on all ranks."""
        self.beat: Beat = lambda: None
        """Called regularly during long work."""
        self._in_flight: Save | None = None
        self._done: list[Save] = []
        self._memory: dict[str, HostMemory] = {}
        """{file: buffer for its tensors}, reused for every save."""
        with ranks.together(SaveError):
            if ranks.is_main:
                self.folder.mkdir(parents=True, exist_ok=True)
                for pattern in (f"{UNFINISHED}*", f"{REMOVED}*", ".*.new"):
                    for leftover in self.folder.glob(pattern):
                        with suppress(OSError):  # NFS keeps a removed file while an evaluation has it open
                            delete(leftover)

    def save(
        self,
        step: int,
        contents: dict[str, Any],
        groups: Mapping[str, TensorGroup],
        describe: Callable[[Path], None],
    ) -> None:
        """Copies the tensors to CPU memory and starts a thread that writes the checkpoint.

        Waits for an earlier save first. Call `finished` to get the result.

        Args:
            contents: contents of trainer_state.json.
            groups: {"model": ..., "optimizer": ..., "average": ...}.
            describe: writes the config and tokenizer files to a folder. Called on the main rank.
        """
        contents = contents | {"tensors": {prefix: len(group.shapes) for prefix, group in groups.items()}}
        save = Save(step, self.folder / checkpoint_name(step), {}, {}, contents, describe)
        self.wait()
        self.begun_step = step
        unfinished = self.folder / f"{UNFINISHED}{save.folder.name}"
        try:
            with self.ranks.together(SaveError):
                if self.ranks.is_main:
                    require_space(self.folder, sum(bytes_of(group) for group in groups.values()))
                    shutil.rmtree(unfinished, ignore_errors=True)
                    unfinished.mkdir()
        except SaveError as error:
            save.problem = str(error)
            self._done.append(save)
            return
        for prefix, group in groups.items():
            save.files |= self._staged(prefix, group)
            save.indices |= tensor_index(group, prefix)
        save.thread = threading.Thread(target=self._write, args=(save, unfinished), name="checkpoint", daemon=True)
        self._in_flight = save
        save.thread.start()
        if not self.settings.async_save:
            self._wait_for(save)
        save.stall_seconds = time.perf_counter() - save.started

    def finished(self) -> Save | None:
        """Returns a completed save (succeeded or failed) or None. Returns each save once. Not a collective call."""
        if self._in_flight is not None and not self._in_flight.thread.is_alive():
            self.wait()
        return self._done.pop(0) if self._done else None

    def wait(self) -> None:
        """Waits for the save in progress, if any."""
        if (save := self._in_flight) is None:
            return
        self._wait_for(save)
        self._in_flight = None
        self._done.append(save)
        if save.problem is None:
            self.last_step = save.step

    def _wait_for(self, save: Save) -> None:
        """Waits for a save. Calls `beat` for up to SLOWEST_SAVE_SECONDS, so that the watchdog sees no hang."""
        while save.thread.is_alive():
            save.thread.join(timeout=1.0)
            if time.perf_counter() - save.started < SLOWEST_SAVE_SECONDS:
                self.beat()

    def _staged(self, prefix: str, group: TensorGroup) -> dict[str, dict[str, torch.Tensor]]:
        """Copies this rank's share of the tensors to CPU buffers.

        Buffers are reused, because allocating them takes longer than copying.
        """
        staged: dict[str, dict[str, torch.Tensor]] = {}
        plan = plan_files(group, prefix)
        on_gpu = False
        for file, name, tensor in shares(prefix, group, self.ranks.rank, self.ranks.count, self.beat):
            if not self.settings.async_save:
                staged.setdefault(file, {})[name] = tensor.to("cpu").contiguous()
                continue
            on_gpu = on_gpu or tensor.is_cuda
            if file not in staged:
                layout = {each: (group.shapes[each], group.dtypes[each]) for each in plan[file]}
                if file not in self._memory or self._memory[file].layout != layout:
                    self._memory.pop(file, None)  # frees it before the next allocation
                    self._memory[file] = HostMemory(layout)
            # Copy on the training stream, so that gathered tensors aren't overwritten too early.
            staged.setdefault(file, {})[name] = self._memory[file].hold(name, tensor)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return staged

    def _write(self, save: Save, unfinished: Path) -> None:
        """Writes this rank's files, waits for the other ranks, and commits. Runs in the background thread."""
        save.problem = "not finished"
        try:
            save.problem = self._written(save, unfinished)
        except Exception as error:
            save.problem = f"{type(error).__name__}: {error}"
        save.files = {}
        save.seconds = time.perf_counter() - save.started

    def _written(self, save: Save, unfinished: Path) -> str | None:
        """Returns an error message (the same on all ranks) or None. Raises an error if other ranks are unreachable."""
        problem = None
        written = {}
        try:
            for file, tensors in save.files.items():
                save_file(tensors, unfinished / file, metadata={"format": "pt"})
                written[file] = seal(unfinished / file)
        except Exception as error:  # the other ranks are waiting
            problem = f"{type(error).__name__}: {error}"
        answers = self.ranks.gather((problem, written), in_background=True)
        problems = [problem for problem, _ in answers if problem]
        if not problems and self.ranks.is_main:
            try:
                self._commit(save, unfinished, {n: entry for _, share in answers for n, entry in share.items()})
            except Exception as error:  # the other ranks are waiting
                problems = [f"{type(error).__name__}: {error}"]
        # All ranks wait for the commit.
        problems = self.ranks.gather(problems, in_background=True)[0]
        if problems and self.ranks.is_main:
            shutil.rmtree(unfinished, ignore_errors=True)
        save.bytes = sum(entry["bytes"] for _, share in answers for entry in share.values())
        return "; ".join(problems) or None

    def _commit(self, save: Save, unfinished: Path, files: Mapping[str, dict]) -> None:
        for name, index in save.indices.items():
            (unfinished / name).write_text(json.dumps(index, indent=1))
        save.describe(unfinished)
        (unfinished / "trainer_state.json").write_text(json.dumps(save.contents, indent=1))
        commit(unfinished, save.folder, files)
        # After the rename, so that LATEST never refers to an incomplete checkpoint.
        write_durably(self.folder / "LATEST", save.folder.name)
        try:
            self._prune()
        except Exception as error:  # retried after the next save
            say(f"checkpoints: could not remove an old checkpoint ({error})", sys.stderr)

    def valid(self, folder: Path) -> Path:
        """Verifies a checkpoint, which may be from any run. Raises NoValidCheckpointError if it is damaged."""
        if problems := self._damage(folder):
            raise NoValidCheckpointError(f"{folder} cannot be used: {'; '.join(problems)}")
        return folder

    def newest_valid(self, log: Callable[[str], None], at_most: int | None = None) -> Path | None:
        """Returns the newest intact checkpoint at or before step `at_most`, or None.

        Damaged checkpoints are renamed, and fetched again if the run has a mirror. Raises NoValidCheckpointError if
        the run has saved checkpoints but none is intact.
        """
        self.wait()
        # On a network disk, other ranks may see an outdated list.
        present = self.ranks.gather(list(checkpoint_folders(self.run)))[0]
        if present and at_most is None:
            self._repair_latest(present[-1])
        for step in reversed(present):
            folder = self.folder / checkpoint_name(step)
            if at_most is not None and step > at_most:
                continue
            if problems := self._damage(folder):
                aside = folder.with_name(f"{DAMAGED}{folder.name}")
                log(f"checkpoint {folder.name} cannot be used: {'; '.join(problems)}; renamed to {aside.name}")
                with self.ranks.together(SaveError):
                    if self.ranks.is_main:
                        delete(aside)
                        folder.rename(aside)
                if not self._fetched_again(step) or self._damage(folder):
                    continue
                log(f"checkpoint {folder.name} was fetched again from the mirror")
            self.last_step = step
            self.begun_step = step
            return folder
        if at_most is None and (lost := self.ranks.gather(self._lost())[0]):
            raise NoValidCheckpointError(
                f"none of the checkpoints in {self.folder} is intact ({lost}); restore one from a backup under its "
                f"original name, such as {checkpoint_name(500)}; to start over, choose another --output, or remove "
                f"{self.run}"
            )
        return None

    def _damage(self, folder: Path) -> list[str]:
        """Lists problems with a checkpoint's files. Each rank verifies a share of them."""
        share = checkpoint_damage(folder, self.ranks.rank, self.ranks.count, self.beat, resumes=True)
        return [problem for found in self.ranks.gather(share) for problem in found]

    def _fetched_again(self, step: int) -> bool:
        if self.settings.mirror is None:
            return False
        from pretrain.checkpoint.mirror_fetch import fetch_again

        return fetch_again(self.run, self.settings, self.ranks, step, self.beat)

    def _repair_latest(self, newest: int) -> None:
        """Points LATEST to the newest checkpoint, even a damaged one, if LATEST is missing or unreadable.

        If LATEST referred to an older checkpoint, later ones would be deleted from the mirror.
        """
        with self.ranks.together(SaveError):
            if self.ranks.is_main and latest_step(self.run) is None:
                write_durably(self.folder / "LATEST", checkpoint_name(newest))

    def _lost(self) -> str:
        """Describes which checkpoints are damaged or missing. Returns '' if none are."""
        if damaged := len(list(self.folder.glob(f"{DAMAGED}*"))):
            return f"{damaged} damaged"
        if (self.folder / "LATEST").exists():
            step = latest_step(self.run)
            return (
                "LATEST is unreadable"
                if step is None
                else f"LATEST points to {checkpoint_name(step)}, which is missing"
            )
        saved = [event.get("step") for event in read_metrics(self.run) if event["event"] == "checkpoint"]
        saved = [step for step in saved if isinstance(step, int) and step > 0]
        return f"{METRICS_FILE} lists step {saved[-1]:,} as saved, but it is missing" if saved else ""

    def discard_after(self, step: int) -> None:
        """Removes checkpoints after `step`, for a rollback to `step`."""
        self.wait()
        with self.ranks.together(SaveError):
            if self.ranks.is_main:
                # First, so that the mirror thread stops copying the removed checkpoints.
                write_durably(self.folder / "LATEST", checkpoint_name(step))
                for later, folder in checkpoint_folders(self.run).items():
                    if later > step:
                        remove(folder)

    def _prune(self) -> None:
        folders = checkpoint_folders(self.run)
        losses = {step: validation_loss_of(read_state(folder)) for step, folder in folders.items()}
        for step in set(losses) - steps_to_keep(self.settings, losses):
            remove(folders[step])


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raises OSError if the disk doesn't have enough space for a checkpoint."""
    free = shutil.disk_usage(folder).free
    if free < 1.05 * needed_bytes:
        raise OSError(f"a checkpoint needs {bytes_text(needed_bytes)}, but {folder} has {bytes_text(free)} free")


@dataclass(frozen=True)
class SavedRun:
    """Contents of a checkpoint. Tensors are loaded on access."""

    model: SavedTensors
    optimizer: SavedTensors
    average: SavedTensors
    """Averaged weights, if any. They include averaged loss-term parameters."""
    loss_terms: SavedTensors
    """Loss-term parameters."""
    contents: dict[str, Any]
    """Contents of trainer_state.json: state, identity, strategy, guard, validation_loss."""


def load_saved(folder: Path, beat: Beat = lambda: None) -> SavedRun:
    """Opens a checkpoint. Raises NoValidCheckpointError if it is unreadable.

    beat: called for every tensor that is loaded.
    """
    try:
        contents = json.loads((folder / "trainer_state.json").read_bytes())
        tensors = {prefix: SavedTensors(folder, prefix, beat) for prefix in SAVED}
        return SavedRun(**tensors, contents=contents)
    except (OSError, ValueError, SafetensorError) as error:
        raise NoValidCheckpointError(f"{folder}: {error}") from error
