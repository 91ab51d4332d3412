"""Lists all strategies by name, and builds the launched one."""

import os
from pkgutil import resolve_name

from pretrain.config import Data, RunConfig
from pretrain.errors import InputError
from pretrain.hardware import avoid_faulty_cudnn, compute_deterministically
from pretrain.mesh_sizes import launched_sizes, processes_launched, requested_sizes
from pretrain.parallel.launcher import launched_strategy, launcher_problems
from pretrain.parallel.rendezvous import text_of_first
from pretrain.parallel.strategy import Strategy, resolve_precision

PLAIN = "pretrain.parallel.strategy:Strategy"
MESH = "pretrain.parallel.mesh:MeshStrategy"
ZERO = "pretrain.parallel.zero:Zero"
STRATEGIES: dict[str, str] = {
    **dict.fromkeys(("single", "ddp"), PLAIN),
    "fsdp2": MESH,
    **dict.fromkeys(("zero1", "zero2", "zero3"), ZERO),
    **dict.fromkeys(("hsdp", "tp", "fsdp_tp", "pp", "cp", "ep", "mesh"), MESH),
    **dict.fromkeys(("zero3_offload", "zero3_offload_nvme"), ZERO),
}
"""{accelerate config: module and class}, simplest first, which is also the order in plans."""


def strategy_named(name: str) -> type[Strategy]:
    """Imports the class of a strategy in STRATEGIES."""
    return resolve_name(STRATEGIES[name])


def micro_batches_launched() -> int:
    """Returns the number of micro-batches per micro-step, across all processes."""
    try:
        sizes = launched_sizes()
    except InputError:  # reported by the strategy's own check
        return processes_launched()
    return sizes.batch * sizes.pp


def parts_of_micro_batch(config: RunConfig) -> int:
    """Returns a number that must divide batch.sequences_per_micro_batch with the launched strategy."""
    if "pp" not in requested_sizes():
        return 1
    from pretrain.parallel.pipeline import STAGE_LAYOUTS

    return STAGE_LAYOUTS[config.pipeline.schedule].stages_per_rank * config.pipeline.microbatches_per_stage


def make_strategy(config: RunConfig) -> Strategy:
    """Builds the launched strategy. Raises the same errors as `strategy_class`."""
    if config.deterministic:
        compute_deterministically()
    avoid_faulty_cudnn(window.sequence_length for window in config.data.windows)
    strategy = strategy_class(config)(resolve_precision(config.precision), config)
    if config.data.dispatch_batches:
        strategy.dispatch_batches()
    return strategy


def share_shards(data: Data) -> None:
    """Sends the first rank's shard description to all ranks if the recipe sets `dispatch_batches`.

    Must be called before any process opens the shards.
    """
    if data.dispatch_batches and processes_launched() > 1:
        from pretrain.data.dispatch import describe_shards, rely_on_description

        description = text_of_first("shards", lambda: describe_shards(data))
        if os.environ["RANK"] != "0":
            rely_on_description(data, description)


def strategy_class(config: RunConfig) -> type[Strategy]:
    """Returns the launched strategy's class.

    Raises InputError with all launcher settings that contradict the recipe or aren't supported.
    """
    name = launched_strategy()
    problems = launcher_problems(config, resolve_precision(config.precision), name)
    if name in STRATEGIES:
        problems += strategy_named(name).problems(config, name)
    elif not problems:
        problems.append(
            f"launcher: {name} is not a supported strategy ({', '.join(STRATEGIES)}); use one of the files in "
            "accelerate_configs, or set fsdp_version: 2 in your own config"
        )
    if problems:
        raise InputError(*problems)
    return strategy_named(name)
