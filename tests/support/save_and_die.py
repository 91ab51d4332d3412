"""Repeatedly saves a checkpoint and prunes an old one, and kills a rank at a different moment each time.

    python tests/support/save_and_die.py FOLDER EVERY

The process is killed just before a file or folder is opened, renamed, created or removed, before and after each fsync,
and in the middle of writing tensors. The script kills a single rank, then each of two ranks, at moments 1, 1 + EVERY,
... until a save completes. After each kill, the next start must load the previous or the new checkpoint. Prints a JSON
list with [ranks, victim, moments, problems] for each case.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import safetensors.torch
import torch
import torch.distributed as dist

import pretrain.checkpoint.checkpoints
from pretrain.checkpoint import tensor_files
from pretrain.checkpoint.checkpoints import Checkpoints, load_saved
from pretrain.config import Checkpoint
from pretrain.files import damage
from pretrain.parallel.ranks import Ranks
from pretrain.parallel.strategy import Strategy
from pretrain.parallel.tensor_group import TensorGroup
from pretrain.runs.run_folder import step_of

OLD, NEW = 3, 4
WATCHED = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")


def ranks_of(rank: int = 0, count: int = 1, meeting_point: Path | None = None) -> Ranks:
    """Creates ranks without a launcher."""
    if count == 1:
        return Ranks()
    store = dist.FileStore(str(meeting_point), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    return Ranks(rank, count, dist.new_group(backend="gloo"), dist.new_group(backend="gloo"))


def strategy_of(rank: int = 0, count: int = 1, meeting_point: Path | None = None) -> Strategy:
    """Creates a strategy without a model."""
    strategy = Strategy.__new__(Strategy)
    strategy.ranks, strategy.device = ranks_of(rank, count, meeting_point), torch.device("cpu")
    return strategy


def tensors_of(step: int) -> dict:
    """Returns groups of ten small tensors filled with the step number."""
    names = [f"layers.{number}.weight" for number in range(10)]
    model = {name: torch.full((8,), float(step)) for name in names}
    return {
        "model": TensorGroup.of(model),
        "optimizer": TensorGroup.of({f"{name}.exp_avg": -model[name] for name in names}),
    }


def describe(folder: Path) -> None:
    """Writes a stand-in for the other files in an HF model folder."""
    (folder / "config.json").write_text('{"model_type": "llama"}')


def save(run: Path, ranks: Ranks, step: int) -> None:
    checkpoints = Checkpoints(run, ranks, Checkpoint(keep_last=2))
    checkpoints.save(step, {"state": {"step": step}}, tensors_of(step), describe)
    checkpoints.wait()


class Executioner:
    """Counts file operations in a folder, and kills this process at a given count."""

    def __init__(self, folder: Path, moment: int):
        self.folder, self.moment, self.count = str(folder), moment, 0
        self.lock = threading.Lock()
        fsync = os.fsync

        def fsync_between_two_moments(descriptor):
            self.moment_passes()
            fsync(descriptor)
            self.moment_passes()

        def save_file_in_two_parts(tensors, path, metadata):
            content = safetensors.torch.save(tensors, metadata)
            path.write_bytes(content[: len(content) // 2])
            self.moment_passes()
            path.write_bytes(content)

        os.fsync, pretrain.checkpoint.checkpoints.save_file = fsync_between_two_moments, save_file_in_two_parts
        sys.addaudithook(self.see)

    def see(self, event: str, arguments: tuple) -> None:
        if event in WATCHED and str(arguments[0]).startswith(self.folder):
            self.moment_passes()

    def moment_passes(self) -> None:
        with self.lock:
            self.count += 1
        if self.count == self.moment:
            os.kill(os.getpid(), signal.SIGKILL)


def save_in_processes(run: Path, ranks: int, victim: int, moment: int) -> bool:
    """Saves step NEW in forked processes and kills one at this moment. Returns False if the save finished first."""
    meeting_point = run.with_name("meeting_point")
    meeting_point.unlink(missing_ok=True)
    children = []
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            mine = ranks_of(rank, ranks, meeting_point)
            if rank == victim:
                Executioner(run, moment)
            try:
                save(run, mine, NEW)
            except RuntimeError:
                os._exit(1)  # the other rank was killed
            os._exit(0)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children][victim] == -signal.SIGKILL


def problems_of(run: Path) -> list[str]:
    """Returns problems with the checkpoints after the kill or with the next start."""
    folder = run / "checkpoints"
    problems = [f"{path.name}: {found}" for path in folder.glob("step-*") if (found := damage(path))]
    log: list[str] = []
    checkpoints = Checkpoints(run, ranks_of(), Checkpoint(keep_last=2))
    chosen = checkpoints.newest_valid(log.append)
    step = step_of(chosen) if chosen else None
    problems += log
    if step not in (OLD, NEW):
        return [*problems, f"the next start loaded {chosen}"]
    saved = load_saved(chosen)
    whole = [
        saved.model[name].eq(step).all() and saved.optimizer[f"{name}.exp_avg"].eq(-step).all() for name in saved.model
    ]
    problems += [] if len(whole) == 10 and all(whole) else [f"{chosen.name} doesn't contain the saved tensors"]
    leftover = [path.name for path in folder.iterdir() if path.name != "LATEST" and not path.name.startswith("step-")]
    problems += [f"leftover: {leftover}"] if leftover else []
    save(run, ranks_of(), 5)
    after = sorted(step_of(path) for path in folder.glob("step-*"))
    return problems if after == [step, 5] else [*problems, f"the next save left {after}"]


def kill_at_every_moment(base: Path, ranks: int, victim: int, every: int) -> tuple[int, int, int, list[str]]:
    """Kills the victim at every `every`-th moment. Returns (ranks, victim, number of moments, problems)."""
    moments, problems, moment = 0, [], 1
    while True:
        run = Path(tempfile.mkdtemp(dir=base)) / "run"
        shutil.copytree(base / "before", run)
        died = save_in_processes(run, ranks, victim, moment)
        problems += [f"moment {moment}: {problem}" for problem in problems_of(run)]
        shutil.rmtree(run.parent)
        if not died:
            return ranks, victim, moments, problems
        moments, moment = moments + 1, moment + every


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, every = Path(sys.argv[1]), int(sys.argv[2])
    tensor_files.MAX_FILE_BYTES = 64  # two tensors per file
    for step in range(1, NEW):
        save(folder / "before", ranks_of(), step)
    print(json.dumps([kill_at_every_moment(folder, *who, every) for who in ((1, 0), (2, 0), (2, 1))]))
