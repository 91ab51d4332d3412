"""Divides runs over processes under each strategy, by its launcher file or as they were launched."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from pretrain.errors import InputError
from pretrain.files import ROOT
from pretrain.mesh_sizes import launched_sizes, processes_launched, setting, variable
from pretrain.parallel.launcher import deepspeed_file
from pretrain.parallel.registry import STRATEGIES
from pretrain.parallel.strategy import Strategy

DIMENSION_OF = {"hsdp": "dp_replicate", "tp": "tp", "fsdp_tp": "tp", "cp": "cp", "pp": "pp", "ep": "ep"}
"""{strategy: the dimension whose size its launcher file gives}"""
SHARDS_STATES = (
    *("fsdp2", "hsdp", "cp", "fsdp_tp", "ep", "mesh"),
    *("zero1", "zero2", "zero3", "zero3_offload", "zero3_offload_nvme"),
)
"""Strategies whose remaining processes hold a shard each; those of the others hold a copy each."""


@dataclass(frozen=True)
class Layout:
    """The processes of a run along each dimension of parallelism; their product without ep is `ranks`."""

    name: str
    """File in accelerate_configs/."""
    ranks: int
    machines: int = 1
    replicas: int = 1
    """Copies of everything that the other dimensions divide."""
    shards: int = 1
    """Processes that divide states and take micro-batches of their own."""
    tp: int = 1
    """Processes that divide heads and feed-forward width."""
    cp: int = 1
    """Processes that divide each sequence, and the states."""
    pp: int = 1
    """Stages of layers."""
    ep: int = 1
    """Processes, of those that divide states, sequences or heads, that divide the experts."""
    problem: str | None = None
    """The reason why so many processes cannot run it."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that the launcher would set, as far as the strategy's `problems` read them."""
    options: str = ""
    """Options for the launcher, where the file itself says something else."""
    zero: dict[str, Any] = field(default_factory=dict)
    """zero_optimization of the DeepSpeed JSON."""

    @property
    def sharing_states(self) -> int:
        """Processes that divide weights, gradients and optimizer state between them."""
        return self.shards * self.cp

    @property
    def micro_batches(self) -> int:
        """Micro-batches that all processes take together in a micro-step."""
        return max(1, self.ranks // (self.tp * self.cp))


def planned_strategies() -> list[str]:
    """Lists the strategies among which a plan chooses: those whose sizes follow from the number of processes."""
    return [name for name in STRATEGIES if name != "mesh"]


def layout(name: str, ranks: int, machines: int = 1, size: int | None = None) -> Layout:
    """Returns how the launcher file of this name divides a run; where nothing is divided, every process has a copy.

    Args:
        size: of the dimension that the file gives; None: as it is planned for these machines.
    """
    zero = shipped_deepspeed(name)["zero_optimization"] if name.startswith("zero") else {}
    problem = None
    if (name == "single") != (ranks == 1) and not zero.get("offload_optimizer"):
        problem = "runs on one GPU" if name == "single" else "needs more than one GPU"
    others = "shards" if name in SHARDS_STATES else "replicas"
    if name not in DIMENSION_OF:
        return Layout(name, ranks, machines, problem=problem, zero=zero, **{others: ranks})
    if size is None:
        size = _planned_size(name, ranks, machines)
    in_file = 2 if name in ("hsdp", "fsdp_tp") else ranks
    dimension = DIMENSION_OF[name]
    sizes = {
        "replicas" if name == "hsdp" else dimension: size,
        others: ranks if name == "ep" else max(1, ranks // size),
    }
    environment = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", variable(dimension): str(size)}
    environment["ACCELERATE_USE_FSDP"] = "false" if name in ("tp", "pp") else "true"
    return Layout(
        name,
        ranks,
        machines,
        **sizes,
        environment=environment,
        options=_options(dimension, size) if size != in_file else "",
        problem=_size_problem(name, ranks, size) or problem,
    )


def _options(dimension: str, size: int) -> str:
    """Returns the option for a size other than the file's."""
    return f" --{setting(dimension)} {size}"


def _planned_size(name: str, ranks: int, machines: int) -> int:
    """Chooses the size of a strategy's dimension for these machines."""
    match name:
        case "hsdp":  # a copy for each machine, or two on one machine
            return machines if machines > 1 else min(2, ranks)
        case "fsdp_tp":
            return 2
        case "pp":
            return ranks
    return ranks // machines  # tp, cp and ep communicate in every layer: within a machine


def _size_problem(name: str, ranks: int, size: int) -> str | None:
    """Says why so many processes cannot be divided by this size; None if they can."""
    if name == "hsdp" and 1 < ranks < 2 * size:
        return "needs at least two GPUs in each of its groups; use ddp"
    if name == "fsdp_tp" and (ranks < 4 or ranks % 2):
        return "needs at least four GPUs, and an even number"
    if name == "cp" and ranks > 1 and size < 2:
        return "needs several GPUs in each machine"
    return None


def layouts(name: str, ranks: int, machines: int = 1) -> list[Layout]:
    """Returns every way in which this file can divide a run by the launcher's options, the fastest first.

    Under cp these are the numbers of processes that share a sequence: the fewer, the less is exchanged, and the more
    is held.
    """
    whole = layout(name, ranks, machines)
    if name != "cp" or whole.problem:
        return [whole]
    sizes = [n for n in range(2, whole.cp) if whole.cp % n == 0]
    return [*(layout(name, ranks, machines, size) for size in sizes), whole]


def launched_layout(name: str) -> Layout:
    """Returns how the processes that were launched divide a run, by the launcher's environment."""
    ranks = processes_launched()
    launched = layout(name, ranks)
    if not launched.zero:
        try:
            sizes = launched_sizes()
        except InputError:  # the strategy's own check reports it
            return launched
        return Layout(
            name,
            ranks,
            replicas=sizes.dp_replicate,
            shards=sizes.dp_shard,
            tp=sizes.tp,
            cp=sizes.cp,
            pp=sizes.pp,
            ep=sizes.ep,
        )
    if zero := deepspeed_file().get("zero_optimization") if launched.zero else None:
        return replace(launched, zero={key: value for key, value in zero.items() if value != "auto"})
    return launched


def running_layout(strategy: Strategy) -> Layout:
    """Returns how a strategy that runs divides the run; of DeepSpeed's settings as accelerate has filled them in."""
    launched = launched_layout(strategy.name)
    if not launched.zero:
        return launched
    return replace(launched, zero=strategy.accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"])


def shipped_deepspeed(name: str) -> dict[str, Any]:
    """Reads the DeepSpeed JSON that a file in accelerate_configs/ names."""
    launcher = yaml.safe_load((ROOT / f"accelerate_configs/{name}.yaml").read_text(encoding="utf-8"))
    return json.loads((ROOT / launcher["deepspeed_config"]["deepspeed_config_file"]).read_text(encoding="utf-8"))
