"""Every strategy by name, and the choice of the one that the launcher asks for."""

import os

from pretrain.config import Data, RunConfig
from pretrain.data.shards import rely_on_first
from pretrain.errors import InputError
from pretrain.parallel.context_parallel import ContextParallel
from pretrain.parallel.expert_parallel import ExpertParallel
from pretrain.parallel.fully_sharded import FullySharded
from pretrain.parallel.launcher import launcher_problems, processes_launched
from pretrain.parallel.pipeline import PipelineParallel
from pretrain.parallel.rendezvous import told_by_first
from pretrain.parallel.strategy import Strategy, resolve_precision
from pretrain.parallel.tensor_parallel import ShardedTensorParallel, TensorParallel
from pretrain.parallel.zero import Zero

STRATEGIES: dict[str, type[Strategy]] = {
    "single": Strategy,
    "ddp": Strategy,
    "fsdp2": FullySharded,
    "zero1": Zero,
    "zero2": Zero,
    "zero3": Zero,
    "hsdp": FullySharded,
    "tp": TensorParallel,
    "fsdp_tp": ShardedTensorParallel,
    "pp": PipelineParallel,
    "cp": ContextParallel,
    "ep": ExpertParallel,
    "zero3_offload": Zero,
    "zero3_offload_nvme": Zero,
}
"""{file in accelerate_configs/: class}, simplest first, which is the order in which a plan lists them."""


def requested_strategy() -> tuple[str, type[Strategy]]:
    """(name, class) that the launcher's environment asks for; the name is not in STRATEGIES where it does not run."""
    # The last that recognises the environment: the first ones are content with any.
    claims = [(name, strategy) for strategy in dict.fromkeys(STRATEGIES.values()) if (name := strategy.requested())]
    return claims[-1]


def micro_batches_launched() -> int:
    """How many micro-batches the processes that were launched take together in a micro-step."""
    name, strategy = requested_strategy()
    return strategy.micro_batches(strategy.launched_layout(name))


def make_strategy(config: RunConfig) -> Strategy:
    """The strategy that the launcher asks for, ready to prepare a model. Raises InputError as `strategy_class`."""
    strategy = strategy_class(config)(resolve_precision(config.precision), config)
    if config.data.dispatch_batches:
        strategy.dispatch_batches()
    return strategy


def share_shards(data: Data) -> None:
    """With data.dispatch_batches the first process says what is in the shards, before anything else opens them."""
    rely_on_first({})
    if data.dispatch_batches and processes_launched() > 1:
        from pretrain.data.dispatch import describe_shards, found_shards

        description = told_by_first(lambda: describe_shards(data))
        if os.environ["RANK"] != "0":
            rely_on_first(found_shards(description))


def strategy_class(config: RunConfig) -> type[Strategy]:
    """The class of the strategy that the launcher asks for.

    Raises InputError with everything in the launcher's settings that contradicts the recipe or cannot run.
    """
    name, strategy = requested_strategy()
    problems = launcher_problems(config, resolve_precision(config.precision), name)
    if name in STRATEGIES:
        problems += strategy.problems(config, name)
    elif not problems:
        problems.append(
            f"launcher: {name} is not among the strategies that run: {', '.join(STRATEGIES)}; take a file of "
            "accelerate_configs, or set fsdp_version: 2 in your own"
        )
    if problems:
        raise InputError(*problems)
    return strategy


def evaluation_strategy() -> Strategy:
    """The strategy for scripts that train nothing: whole models on every process. Raises InputError for any other."""
    name, strategy = requested_strategy()
    if strategy is not Strategy:
        raise InputError(
            f"launcher: {name} is for training; use accelerate_configs/single.yaml or ddp.yaml here: a "
            "checkpoint of any strategy can be read under them"
        )
    return Strategy("fp32")
