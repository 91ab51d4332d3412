"""Divides runs over processes under each strategy, by its launcher file or as they were launched."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from pretrain.files import ROOT
from pretrain.parallel.launcher import (
    CP_SIZE,
    TP_SIZE,
    deepspeed_file,
    parallel_size,
    processes_launched,
    replicas_requested,
)
from pretrain.parallel.registry import strategy_named
from pretrain.parallel.strategy import Strategy


@dataclass(frozen=True)
class Layout:
    """The way in which a launcher file divides a run over processes."""

    name: str
    """File in accelerate_configs/."""
    ranks: int
    machines: int = 1
    groups: int = 1
    """Groups of processes that hold one model together, for hsdp, tp, pp and ep: each holds a copy."""
    parts: int = 1
    """Parts of a sequence, each on a process of its own, for cp."""
    problem: str | None = None
    """The reason why so many processes cannot run it."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that the launcher would set, as far as the strategy's `problems` read them."""
    options: str = ""
    """Options for the launcher, where the file itself says something else."""
    zero: dict[str, Any] = field(default_factory=dict)
    """zero_optimization of the DeepSpeed JSON."""

    @property
    def per_group(self) -> int:
        return self.ranks // self.groups

    @property
    def micro_batches(self) -> int:
        """Micro-batches that all processes take together in a micro-step."""
        if self.name in ("tp", "fsdp_tp"):
            return self.groups
        return max(1, self.ranks // self.parts)

    @property
    def ring(self) -> float:
        """Part of its bytes that each process sends when all gather something, in a ring; a sum takes two."""
        return (self.ranks - 1) / self.ranks


def layout(name: str, ranks: int, machines: int = 1) -> Layout:
    """Returns how the launcher file of this name, as it is shipped, divides a run; a plain copy each by default."""
    problem = None
    if (name == "single") != (ranks == 1):
        problem = "runs on one GPU" if name == "single" else "needs more than one GPU"
    plain = Layout(name, ranks, machines, problem=problem)
    match name:
        case "hsdp":
            return _hybrid(plain)
        case "cp":
            return _of_sequences(plain)
        case "tp" | "ep":  # within a machine: they communicate in every layer
            return _of_models(plain, machines)
        case "pp":
            return _of_models(plain, 1)
        case "fsdp_tp":
            return _of_pairs(plain)
    if name.startswith("zero"):
        zero = shipped_deepspeed(name)["zero_optimization"]
        return replace(plain, zero=zero, problem=None if zero.get("offload_optimizer") else problem)
    return plain


def layouts(name: str, ranks: int, machines: int = 1) -> list[Layout]:
    """Returns every way in which this file can divide a run by the launcher's options, the fastest first.

    Under cp these are the numbers of processes that share a sequence: the fewer, the less is exchanged, and the more
    is held.
    """
    whole = layout(name, ranks, machines)
    if name != "cp" or whole.problem:
        return [whole]
    sizes = [n for n in range(2, whole.parts) if whole.parts % n == 0]
    return [*(_in_parts(whole, n, is_option=True) for n in sizes), whole]


def launched_layout(name: str) -> Layout:
    """Returns how the processes that were launched divide a run, by the launcher's environment."""
    shipped = layout(name, processes_launched())
    if name == "cp":
        return replace(shipped, parts=parallel_size(CP_SIZE))
    if name == "hsdp":
        return replace(shipped, groups=replicas_requested())
    if name in ("tp", "fsdp_tp", "pp", "ep"):
        return replace(shipped, groups=max(1, shipped.ranks // parallel_size(strategy_named(name).size_variable)))
    if zero := deepspeed_file().get("zero_optimization") if shipped.zero else None:
        return replace(shipped, zero={key: value for key, value in zero.items() if value != "auto"})
    return shipped


def running_layout(strategy: Strategy) -> Layout:
    """Returns how a strategy that runs divides the run; of DeepSpeed's settings as accelerate has filled them in."""
    launched = launched_layout(strategy.name)
    if not launched.zero:
        return launched
    return replace(launched, zero=strategy.accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"])


def _hybrid(plain: Layout) -> Layout:
    """hsdp: a group for each machine, or two on one machine."""
    groups = plain.machines if plain.machines > 1 else min(2, plain.ranks)
    options = f" --parallelism_config_dp_replicate_size {groups}" if groups != 2 else ""  # 2 is what the file says
    problem = "needs at least two GPUs in each of its groups; use ddp" if plain.ranks < 2 * groups else None
    return replace(plain, groups=groups, options=options, problem=plain.problem or problem)


def _of_sequences(plain: Layout) -> Layout:
    """cp: the processes of a machine share their sequences, for they exchange in every layer."""
    parts = plain.ranks // plain.machines
    problem = "needs several GPUs in each machine" if plain.ranks > 1 and parts < 2 else None
    shared = _in_parts(plain, parts, is_option=plain.machines > 1)
    return replace(shared, problem=plain.problem or problem)


def _in_parts(plain: Layout, parts: int, *, is_option: bool) -> Layout:
    options = f" --{CP_SIZE.lower()} {parts}" if is_option else ""
    return replace(plain, parts=parts, environment={CP_SIZE: str(parts)}, options=options)


def _of_models(plain: Layout, groups: int) -> Layout:
    """tp, pp and ep: so many groups of processes, each of which shares one model."""
    variable = strategy_named(plain.name).size_variable
    size = plain.ranks // groups
    options = f" --{variable.lower()} {size}" if groups > 1 else ""
    return replace(plain, groups=groups, environment={variable: str(size)}, options=options)


def _of_pairs(plain: Layout) -> Layout:
    """fsdp_tp: in pairs, as the file says."""
    problem = "needs at least four GPUs, and an even number" if plain.ranks < 4 or plain.ranks % 2 else None
    environment = {TP_SIZE: "2"}
    return replace(plain, groups=max(1, plain.ranks // 2), environment=environment, problem=problem)


def shipped_deepspeed(name: str) -> dict[str, Any]:
    """Reads the DeepSpeed JSON that a file in accelerate_configs/ names."""
    launcher = yaml.safe_load((ROOT / f"accelerate_configs/{name}.yaml").read_text(encoding="utf-8"))
    return json.loads((ROOT / launcher["deepspeed_config"]["deepspeed_config_file"]).read_text(encoding="utf-8"))
