"""Runs train.py with injected faults.

    FAULTS_TO_INJECT=JSON accelerate launch ... tests/support/train_with_faults.py --config RECIPE ...

JSON contains a list of `faults` and the `folder` for notes: a file with the time of each injected fault, and a log of
each rank's reads. Optional keys are `architecture` (a module with a local architecture) and `constants`
({module.NAME: value} to override in the product). A fault has these keys:

    where     read, disk (the actual read, possibly in a thread), forward, backward, validation, sample, check (of the
              export), write (of a checkpoint's tensors), mkdir or fsync
    rank      default: the last
    step      counted from 1, optionally with `micro_step`, also from 1. Or use `nth`: the n-th time that this process
              reaches `where`, counted from 1. Default: any time
    what      nan, spike, change (a parameter), sleep (`seconds`; default: forever), error, memory, an errno name such
              as ENOSPC, or a signal name. Signals are sent to the process, or to its launcher with `to: launcher`
    always    inject the fault every time; default: once, even after restarts
"""

import errno
import importlib
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil
import torch

import pretrain.checkpoint.checkpoints
import pretrain.training.ending
import pretrain.training.samples
from pretrain.data.batches import Batches
from pretrain.model.loss import LanguageModelLoss
from pretrain.model.own_code import register
from pretrain.parallel.strategy import Strategy
from pretrain.training.prefetch import ReadAhead
from support.warm_python import starter

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
SETTINGS = json.loads(os.environ["FAULTS_TO_INJECT"])
FOLDER = Path(SETTINGS["folder"])


def age() -> float:
    """Returns the seconds since this process started. psutil's create_time can be off by a second."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class Faults:
    """Faults to inject in this process."""

    def __init__(self):
        self.step, self.micro_step, self.visits = 0, 0, {}
        self.module: LanguageModelLoss | None = None
        self.log = open(FOLDER / f"rank-{RANK}.jsonl", "a", buffering=1)  # noqa: SIM115
        self.note(event="start", pid=os.getpid(), time=psutil.Process().create_time(), began=time.time() - age())

    def note(self, **values) -> None:
        self.log.write(json.dumps(values) + "\n")

    def at(self, where: str) -> float:
        """Injects the faults for the current step at `where`. Returns a factor for the loss, normally 1."""
        self.visits[where] = self.visits.get(where, 0) + 1
        factor = 1.0
        for number, fault in enumerate(SETTINGS["faults"]):
            struck = FOLDER / f"fault-{number}"
            here = fault["where"] == where and fault.get("rank", RANKS - 1) == RANK
            place = {"nth": self.visits[where], "step": self.step, "micro_step": self.micro_step}
            now = all(fault.get(key, value) == value for key, value in place.items())
            if here and now and (fault.get("always") or not struck.exists()):
                struck.write_text(str(time.time()))
                factor *= self.strike(fault)
        return factor

    def strike(self, fault: dict) -> float:
        what = fault["what"]
        if what in ("nan", "spike"):
            return float("nan") if what == "nan" else fault.get("factor", 20.0)
        if what.startswith("SIG"):
            os.kill(starter() if fault.get("to") == "launcher" else os.getpid(), getattr(signal, what))
        elif what == "sleep":
            time.sleep(fault.get("seconds", 1e6))
        elif what == "change":
            next(self.module.parameters()).data.view(-1)[0] += 1.0
        elif what == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        elif what == "error":
            raise RuntimeError("injected")
        else:
            number = getattr(errno, what)
            raise OSError(number, os.strerror(number))
        return 1.0


def strike_around_a_step(faults: Faults) -> None:
    """Patches batch reading, the forward pass and the backward pass."""
    read, forward, backward = ReadAhead.micro_batch, LanguageModelLoss.forward, Strategy.backward
    read_disk = Batches.read

    def read_with_faults(read_ahead, run, step, micro_step):
        if faults.step == 0:
            faults.note(event="first read", time=time.time())
        faults.step, faults.micro_step = step + 1, micro_step + 1
        faults.at("read")
        batch = read(read_ahead, run, step, micro_step)
        strategy = read_ahead.strategy
        sequences = run.stage(0).sequences_per_micro_batch * strategy.micro_batches_per_call
        number = micro_step * strategy.data_ranks + strategy.data_rank
        first = run.batches.ramp.sequences_before(step) + number * sequences
        faults.note(event="read", step=step + 1, windows=run.batches.locate(first, sequences))
        return batch

    def forward_with_faults(module, *inputs, **named):
        faults.module = module
        factor = faults.at("forward" if module.training else "validation")
        loss, cross_entropy = forward(module, *inputs, **named)
        return (loss, cross_entropy) if factor == 1.0 else (loss * factor, cross_entropy * factor)

    def backward_with_faults(strategy, loss):
        faults.at("backward")
        return backward(strategy, loss)

    def read_disk_with_faults(batches, *where, **named):
        faults.at("disk")
        return read_disk(batches, *where, **named)

    Batches.read = read_disk_with_faults
    ReadAhead.micro_batch, LanguageModelLoss.forward = read_with_faults, forward_with_faults
    Strategy.backward = backward_with_faults


def strike_between_steps(faults: Faults) -> None:
    """Patches the main rank's work between steps, which the other ranks wait for."""
    generate_text = pretrain.training.samples.generate_text
    verify_export = pretrain.training.ending.verify_export

    def generate_text_with_faults(*arguments):
        faults.at("sample")
        return generate_text(*arguments)

    def verify_export_with_faults(*arguments, **named):
        faults.at("check")
        return verify_export(*arguments, **named)

    pretrain.training.samples.generate_text = generate_text_with_faults
    pretrain.training.ending.verify_export = verify_export_with_faults


def strike_in_a_save(faults: Faults) -> None:
    """Patches the functions that write checkpoints."""
    save_file, fsync, mkdir = pretrain.checkpoint.checkpoints.save_file, os.fsync, Path.mkdir

    def save_file_with_faults(tensors, path, **named):
        faults.at("write")
        return save_file(tensors, path, **named)

    def fsync_with_faults(descriptor):
        faults.at("fsync")
        return fsync(descriptor)

    def mkdir_with_faults(path, *arguments, **named):
        if path.name.startswith(".saving-"):
            faults.at("mkdir")
        return mkdir(path, *arguments, **named)

    pretrain.checkpoint.checkpoints.save_file, os.fsync, Path.mkdir = (
        save_file_with_faults,
        fsync_with_faults,
        mkdir_with_faults,
    )


if __name__ == "__main__":
    everything = Faults()
    if any("faulty://" in argument for argument in sys.argv):
        import support.faulty_mirror  # noqa: F401  registers faulty://
    for name, value in SETTINGS.get("constants", {}).items():
        module, _, constant = name.rpartition(".")
        assert hasattr(importlib.import_module(module), constant)
        setattr(importlib.import_module(module), constant, value)
    if "architecture" in SETTINGS:
        register(importlib.import_module(SETTINGS["architecture"]))
    strike_around_a_step(everything)
    strike_between_steps(everything)
    strike_in_a_save(everything)
    sys.argv[0] = str(Path(__file__).parents[2] / "train.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
