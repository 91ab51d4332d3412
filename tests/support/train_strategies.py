"""Trains several runs with different strategies in the same processes, because starting processes is slow.

    accelerate launch ... tests/support/train_strategies.py RECIPE RUNS.json

RUNS.json is a list of runs, each with a `strategy`, the `arguments` for train.py and optionally:

    nan_at_call         model call, counted from 0, whose loss becomes NaN on the last rank
    environment         variables that launcher options would set
    start_from          checkpoint to copy to the run folder first
    nan_norm_in_step    step, counted from 1, that reports a NaN gradient norm the first time
    profile             number of steps to profile
    exits_with          expected exit status; default: 0
    muon_bucket         bucket size for Muon, in elements per process. Muon then multiplies in fp32, and muon.json
                        lists the collectives of its last update
    fp16_scale          train in fp16 on the CPU, with this initial scale for the gradient scaler
    emulates_fp8        train in fp8 on the CPU, with rounding by torchao as on a GPU
    plain_files         make DeepSpeed swap with plain reads and writes instead of libaio
    working_folders     working folder of each rank, to simulate separate machines
    aot_eager           only trace compiled code, and run it operation by operation
    hash_weights        write a hash of the initial weights to initial_weights.sha256 in the run folder
    kill_in_step        [step, seconds]: kill the launcher and all its processes with SIGKILL this many seconds after
                        the start of the step, counted from 1

After every load, the model and optimizer tensors are compared with the checkpoint bit by bit. In every run folder, the
script writes these files:

    dropout.json        dropout seeds of each rank in the last 4 micro-steps
    reductions.json     number of gradient reductions by the first rank's pipeline stages
    replicas.json       differences between weight replicas at the end, before and after the last rank changes a weight
"""

import functools
import hashlib
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from accelerate.state import AcceleratorState
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.pipelining import PipelineStage
from torch.utils._python_dispatch import TorchDispatchMode

import pretrain.parallel.strategy
import pretrain.parallel.zero
import train
from pretrain.checkpoint import export
from pretrain.model import fp8
from pretrain.optim import matrix_exchange, muon
from pretrain.parallel import mesh, registry
from pretrain.parallel.ranks import Ranks
from pretrain.parallel.replicas import replica_differences
from pretrain.parallel.strategy import Strategy
from pretrain.recipe import read_command_line
from pretrain.training import run_plan, run_records
from support.launcher_environment import LAUNCHER_VARIABLES, launcher_environment
from support.plain_file_io import use_plain_files
from support.project import ROOT
from support.warm_python import starter


def compare(strategy, groups, saved) -> None:
    """Checks that the tensors in these groups equal the saved tensors."""
    names = set().union(*(group.shapes for group in groups))
    assert names == set(saved), f"{strategy.name}: {names ^ set(saved)}"
    for group in groups:
        for name in group.shapes:
            running = group.fetch(name)
            assert running.dtype == saved[name].dtype and torch.equal(running, saved[name]), (strategy.name, name)


def check_load(load):
    """Wraps Strategy.load to check the loaded tensors."""

    def checked(strategy, model, optimizer):
        load(strategy, model, optimizer)
        if type(strategy).load is not checked:
            return  # called from a subclass
        compare(strategy, (strategy.model_tensors(), strategy.term_tensors()), model)
        compare(strategy, (strategy.optimizer_tensors(),), optimizer)

    return checked


def check_load_average(load_average):
    """Wraps Strategy.load_average to check the loaded tensors."""

    def checked(strategy, saved):
        load_average(strategy, saved)
        compare(strategy, (strategy.model_tensors(averaged=True), strategy.term_tensors(averaged=True)), saved)
        print(f"{strategy.name}: average loaded")

    return checked


def watch_prepare(prepare, run: dict):
    """Wraps Strategy.prepare to remember the strategy, spoil a call and hash the initial weights."""

    def watched(strategy, model, *arguments):
        run["trained_by"] = strategy
        if run.get("nan_at_call") is not None and strategy.ranks.rank == strategy.ranks.count - 1:
            model.register_forward_hook(spoil_call(run["nan_at_call"]))
        model = prepare(strategy, model, *arguments)
        if "hash_weights" not in run:
            return model
        group, digest = strategy.model_tensors(), hashlib.sha256()
        for name in sorted(group.shapes):
            digest.update(name.encode() + group.fetch(name).contiguous().view(torch.uint8).numpy().tobytes())
        if strategy.ranks.is_main:
            strategy.config.output.mkdir(parents=True, exist_ok=True)
            (strategy.config.output / "initial_weights.sha256").write_text(digest.hexdigest())
        return model

    return watched


def spoil_call(number: int):
    """Returns a forward hook that makes the loss of one training call NaN."""
    calls = itertools.count()

    def hook(module, inputs, outputs):
        loss, cross_entropy = outputs
        return (loss * float("nan") if module.training and next(calls) == number else loss), cross_entropy

    return hook


class CountedCollectives(TorchDispatchMode):
    """Records collectives, and fails if an operation would wait for the device."""

    def __init__(self):
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func), "an update must not wait for the device"
        if func.namespace == "c10d":
            self.calls.append(func._opname)
        return func(*args, **(kwargs or {}))


def count_exchanges(replace_whole_matrices, run: dict):
    """Wraps Muon's matrix exchange to record its collectives."""

    def counted(*arguments):
        if "muon_bucket" not in run:
            return replace_whole_matrices(*arguments)
        with CountedCollectives() as counted:
            replace_whole_matrices(*arguments)
        run["exchanges"] = counted.calls

    return counted


def kill_in_step(set_learning_rate, run: dict):
    """Wraps Strategy.set_learning_rate, the first call in every step, so that the last rank can kill the launch."""

    def wrapped(strategy, learning_rate):
        set_learning_rate(strategy, learning_rate)
        run["steps_begun"] = run.get("steps_begun", 0) + 1
        step, seconds = run.get("kill_in_step", (0, 0))
        if step and run["steps_begun"] == 1:
            run["pids"] = strategy.ranks.gather(os.getpid())
        if step and strategy.ranks.rank == strategy.ranks.count - 1:
            if step == run["steps_begun"]:
                while not (strategy.config.output / "checkpoints/LATEST").exists():
                    time.sleep(0.01)  # with a slow disk, there might be no checkpoint yet
                threading.Thread(target=kill_launch, args=(run["pids"], seconds)).start()
            elif step < run["steps_begun"]:
                threading.Event().wait()  # otherwise the run could finish before the kill

    return wrapped


def kill_launch(ranks: list[int], seconds: float) -> None:
    """Kills the launcher, the other ranks and finally this one with SIGKILL."""
    time.sleep(seconds)
    for pid in (starter(), *sorted(ranks, key=lambda pid: pid == os.getpid())):
        os.kill(pid, signal.SIGKILL)


def record_replicas(strategy, code: int, run: dict) -> None:
    """Replaces Ranks.exit, and compares the weight replicas before and after changing a weight on the last rank."""
    assert code == run.get("exits_with", 0), f"{strategy.config.output} exited with status {code}"
    groups = strategy.replicas()
    found = [replica_differences(groups, strategy.device)]
    if groups and strategy.ranks.rank == strategy.ranks.count - 1:
        last = list(groups[-1][1].values())[-1]
        last.detach().view(-1)[-1] += 1
    found.append(replica_differences(groups, strategy.device))
    seeds = strategy.ranks.gather(run.get("dropout_seeds"))
    if strategy.ranks.is_main:
        (strategy.config.output / "dropout.json").write_text(json.dumps(seeds))
        (strategy.config.output / "replicas.json").write_text(json.dumps(found))
        (strategy.config.output / "reductions.json").write_text(json.dumps(run.get("reductions")))
        (strategy.config.output / "muon.json").write_text(json.dumps(run.get("exchanges")))
    strategy.ranks.barrier()


def count_reductions(perform_reduce_grad, run: dict):
    """Wraps torch's PipelineStage.perform_reduce_grad to count its calls."""

    def counted(stage, *arguments):
        run["reductions"] = run.get("reductions", 0) + 1
        perform_reduce_grad(stage, *arguments)

    return counted


def spoil_norm(after_step, run: dict):
    """Wraps the loop's after_step to report a NaN gradient norm once."""

    def spoiled(trained, loss, grad_norm, skipped, settle):
        if trained.state.step == run.get("nan_norm_in_step"):
            run.pop("nan_norm_in_step")
            grad_norm = torch.full_like(torch.as_tensor(grad_norm), float("nan"))
        return after_step(trained, loss, grad_norm, skipped, settle=settle)

    return spoiled


def scale_gradients(make_accelerator, run: dict):
    """Wraps Strategy.make_accelerator to scale gradients as accelerate does for fp16 on a GPU."""

    def wrapped(strategy):
        accelerator = make_accelerator(strategy)
        if "fp16_scale" in run:
            accelerator.native_amp = True
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=run["fp16_scale"], growth_interval=3)
        return accelerator

    return wrapped


def record_dropout(seed_dropout, run: dict):
    """Wraps the loop's seed_dropout to record the seeds."""

    def recorded(seed, device):
        run["dropout_seeds"] = [*run.get("dropout_seeds", []), seed][-4:]
        seed_dropout(seed, device)

    return recorded


def copy_checkpoint(source: str, run: Path) -> None:
    if os.environ.get("RANK", "0") == "0":
        (run / "checkpoints").mkdir(parents=True)
        shutil.copytree(source, run / "checkpoints" / Path(source).name)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def shared_by_runs(new_group):
    """Wraps torch's new_group to reuse groups with the same ranks."""
    groups = {}

    def shared(ranks=None, timeout=None, backend=None, **options):
        key = (tuple(ranks or ()), timeout, backend)
        if key not in groups:
            groups[key] = new_group(ranks, timeout, backend, **options)
        return groups[key]

    return shared


def all_strategies(base: type = Strategy) -> list[type]:
    return [base, *(found for child in base.__subclasses__() for found in all_strategies(child))]


if __name__ == "__main__":
    run: dict = {}
    # With more threads, a step takes seconds if other tests use the same cores.
    pretrain.parallel.strategy.use_all_cores = lambda: torch.set_num_threads(1)
    # Writing a model card takes as long as a tiny run. Other tests cover it.
    export.export_card = lambda *_: None
    # These depend only on the machine and on files that don't change.
    run_records.commit = functools.cache(run_records.commit)
    run_records.emulation_of_bf16 = functools.cache(run_records.emulation_of_bf16)
    run_records.package_versions = functools.cache(run_records.package_versions)
    launched = functools.cache(launcher_environment)
    for name in registry.STRATEGIES:
        registry.strategy_named(name)  # imports the class, so that all_strategies finds it
    for strategy_class in all_strategies():
        if "load" in vars(strategy_class):
            strategy_class.load = check_load(strategy_class.load)
        if "load_average" in vars(strategy_class):
            strategy_class.load_average = check_load_average(strategy_class.load_average)
        if "prepare" in vars(strategy_class):
            strategy_class.prepare = watch_prepare(strategy_class.prepare, run)
    Strategy.set_learning_rate = kill_in_step(Strategy.set_learning_rate, run)
    PipelineStage.perform_reduce_grad = count_reductions(PipelineStage.perform_reduce_grad, run)
    Strategy.make_accelerator = scale_gradients(Strategy.make_accelerator, run)
    train.seed_dropout = record_dropout(train.seed_dropout, run)
    train.after_step = spoil_norm(train.after_step, run)
    resolve_precision = registry.resolve_precision
    compile_function = torch.compile
    # Each group has threads that wake up 100 times per second, so groups are shared between runs.
    Ranks.of_launch = functools.cache(Ranks.of_launch)
    device_mesh.new_group = distributed_c10d.new_group = shared_by_runs(distributed_c10d.new_group)
    Ranks.exit = lambda ranks, code: record_replicas(run.pop("trained_by"), code, run)  # more runs may follow
    # These modules have their own references to use_fp8.
    fp8.use_fp8 = mesh.use_fp8 = pretrain.parallel.zero.use_fp8 = functools.partial(fp8.use_fp8, emulate=True)
    bucket, missing_bf16 = matrix_exchange.BUCKET_ELEMENTS, muon.missing_bf16
    muon.replace_whole_matrices = count_exchanges(muon.replace_whole_matrices, run)
    for description in json.loads(Path(sys.argv[2]).read_text()):
        run.clear()
        run.update(description)
        matrix_exchange.BUCKET_ELEMENTS = run.get("muon_bucket", bucket)
        muon.missing_bf16 = (lambda device_type: "asked for") if "muon_bucket" in run else missing_bf16
        for name in [name for name in os.environ if name.startswith(LAUNCHER_VARIABLES)]:
            del os.environ[name]
        without_gpu = "fp16_scale" in run or "emulates_fp8" in run
        resolve = (lambda requested: requested) if without_gpu else resolve_precision
        for module in (registry, pretrain.parallel.strategy, pretrain.parallel.zero, run_plan):
            module.resolve_precision = resolve
        torch.compile = functools.partial(compile_function, **({"backend": "aot_eager"} if "aot_eager" in run else {}))
        torch._dynamo.utils.counters.clear()
        if run.get("plain_files"):
            use_plain_files()
        os.chdir(run.get("working_folders", [ROOT] * 99)[int(os.environ.get("RANK", "0"))])
        file = ROOT / f"accelerate_configs/{run['strategy']}.yaml"
        os.environ.update(launched(file, int(os.environ.get("WORLD_SIZE", "1"))))
        os.environ.update(run.get("environment", {}))
        profile = ["--profile", str(run["profile"])] if "profile" in run else []
        command_line = read_command_line(["--config", sys.argv[1], *run["arguments"], *profile], "")
        if "start_from" in run:
            copy_checkpoint(run["start_from"], command_line.config.output)
        print(f"=== {run}", flush=True)
        train.start(command_line)
        assert "aot_eager" not in run or torch._dynamo.utils.counters["stats"]["unique_graphs"], "nothing was compiled"
        breaks = torch._dynamo.utils.counters["graph_break"]
        assert "emulates_fp8" not in run or not breaks, f"graph breaks: {dict(breaks)}"
        AcceleratorState._reset_state(True)  # the next run uses another strategy
    sys.stdout.flush()
    os._exit(0)
