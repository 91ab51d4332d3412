"""Trains several runs under several strategies in one set of processes, whose start costs more than a tiny run does.

    accelerate launch ... tests/train_strategies.py RECIPE RUNS.json

RUNS.json is a list of runs, each with its `strategy` and the `arguments` of train.py, and if need be

    nan_at_call   the call of the model, counted from 0, whose loss becomes NaN on the last rank
    start_from    a checkpoint to copy into the run's folder first

After every load the tensors in the running model and optimizer are compared with those in the checkpoint, bit by bit,
and the folder of every run gets a hash of the weights it started from.
"""

import hashlib
import itertools
import json
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from accelerate.state import AcceleratorState
from launcher_environment import LAUNCHER_VARIABLES, launcher_environment

import train
from pretrain.recipe import pair_up, read_run_config
from pretrain.strategy import Strategy


def check_load(load):
    """Wraps Strategy.load: what was put in must come out again."""

    def checked(strategy, model, optimizer):
        load(strategy, model, optimizer)
        for group, saved in ((strategy.model_tensors(), model), (strategy.optimizer_tensors(), optimizer)):
            assert set(group.shapes) == set(saved), f"{strategy.name}: {set(group.shapes) ^ set(saved)}"
            for name in group.shapes:
                running = group.fetch(name)
                assert running.dtype == saved[name].dtype and torch.equal(running, saved[name]), (strategy.name, name)

    return checked


def record_initial_weights(prepare, run: dict):
    """Wraps Strategy.prepare: writes a hash of the weights that a run starts from into its folder."""

    def recorded(strategy, model, *arguments):
        if run.get("nan_at_call") is not None and strategy.rank == strategy.ranks - 1:
            model.register_forward_hook(spoil_call(run["nan_at_call"]))
        model = prepare(strategy, model, *arguments)
        group, digest = strategy.model_tensors(), hashlib.sha256()
        for name in sorted(group.shapes):
            digest.update(name.encode() + group.fetch(name).contiguous().view(torch.uint8).numpy().tobytes())
        if strategy.is_main:
            strategy.config.output.mkdir(parents=True, exist_ok=True)
            (strategy.config.output / "initial_weights.sha256").write_text(digest.hexdigest())
        return model

    return recorded


def spoil_call(number: int):
    """A forward hook that turns the loss of one training call into NaN, whose backward pass spoils every gradient."""
    calls = itertools.count()

    def hook(module, inputs, outputs):
        loss, cross_entropy = outputs
        return (loss * float("nan") if module.training and next(calls) == number else loss), cross_entropy

    return hook


def copy_checkpoint(source: str, run: Path) -> None:
    if os.environ.get("RANK", "0") == "0":
        (run / "checkpoints").mkdir(parents=True)
        shutil.copytree(source, run / "checkpoints" / Path(source).name)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def all_strategies(base: type = Strategy) -> list[type]:
    return [base, *(found for child in base.__subclasses__() for found in all_strategies(child))]


if __name__ == "__main__":
    import pretrain.fully_sharded
    import pretrain.zero  # noqa: F401  (their classes must be known)

    run: dict = {}
    for strategy_class in all_strategies():
        if "load" in vars(strategy_class):
            strategy_class.load = check_load(strategy_class.load)
        if "prepare" in vars(strategy_class):
            strategy_class.prepare = record_initial_weights(strategy_class.prepare, run)
    Strategy.exit = lambda strategy, code: strategy.barrier()  # the processes outlive a run
    for description in json.loads(Path(sys.argv[2]).read_text()):
        run.clear()
        run.update(description)
        for name in [name for name in os.environ if name.startswith(LAUNCHER_VARIABLES)]:
            del os.environ[name]
        file = Path(__file__).parents[1] / f"accelerate_configs/{run['strategy']}.yaml"
        os.environ.update(launcher_environment(file, int(os.environ.get("WORLD_SIZE", "1"))))
        pairs = pair_up(run["arguments"])
        config = read_run_config(sys.argv[1], pairs)
        if "start_from" in run:
            copy_checkpoint(run["start_from"], config.output)
        print(f"=== {run}", flush=True)
        train.main(config, frozenset(key for key, _ in pairs))
        AcceleratorState._reset_state(True)  # the next run has another strategy
    sys.stdout.flush()
    os._exit(0)
