"""Trains several runs under several strategies in one set of processes, whose start costs more than a tiny run does.

    accelerate launch ... tests/train_strategies.py RECIPE '[["fsdp2", "--output", "a"], ["zero1", "--output", "b"]]'

After every load the tensors in the running model and optimizer are compared with those in the checkpoint, bit by bit.
"""

import hashlib
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch
import train
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from pretrain.recipe import pair_up, read_run_config
from pretrain.strategy import Strategy

LAUNCHER_VARIABLES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")


def launcher_environment(strategy: str) -> None:
    """Sets what `accelerate launch` would set for this strategy's file."""
    for name in [name for name in os.environ if name.startswith(LAUNCHER_VARIABLES)]:
        del os.environ[name]
    file = str(ROOT / f"accelerate_configs/{strategy}.yaml")
    processes = os.environ.get("WORLD_SIZE", "1")
    arguments = launch_command_parser().parse_args(["--config_file", file, "--num_processes", processes, "x.py"])
    arguments, defaults, _ = _validate_launch_command(arguments)
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        _, environment = prepare_deepspeed_cmd_env(arguments)
    else:
        environment = prepare_multi_gpu_env(arguments)
    os.environ.update({k: v for k, v in environment.items() if k.startswith(LAUNCHER_VARIABLES)})


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


def record_initial_weights(prepare):
    """Wraps Strategy.prepare: writes a hash of the weights that a run starts from into its folder."""

    def recorded(strategy, *arguments):
        model = prepare(strategy, *arguments)
        group, digest = strategy.model_tensors(), hashlib.sha256()
        for name in sorted(group.shapes):
            digest.update(name.encode() + group.fetch(name).contiguous().view(torch.uint8).numpy().tobytes())
        if strategy.is_main:
            strategy.config.output.mkdir(parents=True, exist_ok=True)
            (strategy.config.output / "initial_weights.sha256").write_text(digest.hexdigest())
        return model

    return recorded


def all_strategies(base: type = Strategy) -> list[type]:
    return [base, *(found for child in base.__subclasses__() for found in all_strategies(child))]


if __name__ == "__main__":
    import pretrain.fully_sharded
    import pretrain.zero  # noqa: F401  (their classes must be known)

    for strategy_class in all_strategies():
        if "load" in vars(strategy_class):
            strategy_class.load = check_load(strategy_class.load)
        if "prepare" in vars(strategy_class):
            strategy_class.prepare = record_initial_weights(strategy_class.prepare)
    Strategy.exit = lambda strategy, code: strategy.barrier()  # the processes outlive a run
    for strategy, *arguments in json.loads(sys.argv[2]):
        launcher_environment(strategy)
        pairs = pair_up(arguments)
        config = read_run_config(sys.argv[1], pairs)
        print(f"=== {strategy} {' '.join(arguments)}", flush=True)
        train.main(config, frozenset(key for key, _ in pairs))
        AcceleratorState._reset_state(True)  # the next run has another strategy
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(0)
