"""Divides runs among processes: all possible meshes, the accelerate configs' meshes, and the current launch's."""

import itertools
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import yaml
from accelerate.utils import patch_environment

from pretrain.errors import InputError
from pretrain.files import ROOT
from pretrain.mesh_sizes import DIMENSIONS, DROPPED, Sizes, launched_sizes, processes_launched, setting, variable
from pretrain.parallel.launcher import LAUNCHES, deepspeed_file
from pretrain.parallel.registry import STRATEGIES
from pretrain.parallel.strategy import Strategy

DIMENSION_OF = {"hsdp": "dp_replicate", "tp": "tp", "fsdp_tp": "tp", "cp": "cp", "pp": "pp", "ep": "ep"}
"""{strategy: dimension whose size is in its accelerate config}."""
MESHES = ("fsdp2", *DIMENSION_OF, "mesh")
"""Strategies with a mesh."""
GIVEN_BY_FILE = {"hsdp": 2, "fsdp_tp": 2}
"""{strategy: size in its file, unless all processes are used}."""


@dataclass(frozen=True)
class Layout:
    """Number of processes along each dimension of parallelism. Their product, without ep, is `ranks`."""

    name: str
    """Name of the file in accelerate_configs/."""
    ranks: int
    machines: int = 1
    replicas: int = 1
    """Number of replicas of the states that the other dimensions divide."""
    shards: int = 1
    """Processes that shard states and have separate micro-batches."""
    tp: int = 1
    """Processes that split heads and feed-forward width."""
    cp: int = 1
    """Processes that split each sequence and shard states."""
    pp: int = 1
    """Pipeline stages."""
    ep: int = 1
    """Processes that split the experts; a subset of dp_shard, cp and tp."""
    problem: str | None = None
    """Reason why this number of processes is impossible."""
    zero: dict[str, Any] = field(default_factory=dict)
    """zero_optimization in the DeepSpeed JSON."""

    @classmethod
    def of(cls, sizes: Sizes, machines: int = 1, name: str | None = None) -> "Layout":
        """Returns a mesh with the name of its accelerate config, or `mesh` if there is no such file."""
        kinds = [("FSDP", "dp_shard")]
        if sizes.dp_shard == sizes.ep == 1:
            kinds.insert(0, ("MULTI_GPU", "dp_replicate"))
        launches = [(kind, tuple(each for each in sizes.named() if each != implied)) for kind, implied in kinds]
        name = name or next((known for each in launches if (known := LAUNCHES.get(each)) in MESHES), "mesh")
        return cls(
            name,
            sizes.world,
            machines,
            replicas=sizes.dp_replicate,
            shards=sizes.dp_shard,
            tp=sizes.tp,
            cp=sizes.cp,
            pp=sizes.pp,
            ep=sizes.ep,
        )

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.pp, self.replicas, self.shards, self.cp, self.tp, self.ep)

    @property
    def sharing_states(self) -> int:
        """Processes that shard weights, gradients and optimizer state."""
        return self.shards * self.cp

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches that all processes together compute in a micro-step."""
        return max(1, self.ranks // (self.tp * self.cp))

    @property
    def product(self) -> str:
        """The sizes, such as `pp2 dp_shard4`."""
        return " ".join(f"{name}{size}" for name, size in self.sizes.named().items())

    @property
    def is_planned(self) -> bool:
        """True for an accelerate config with a size from `layouts`."""
        return self.name != "mesh" and any(
            self.sizes == known.sizes for known in layouts(self.name, self.ranks, self.machines)
        )

    @property
    def is_mesh(self) -> bool:
        return self.name in MESHES

    @property
    def given(self) -> dict[str, int]:
        """{dimension: size} for sizes that differ from the file's and need options."""
        if self.name == "mesh":
            return {name: size for name, size in self.sizes.named().items() if name != "dp_shard"}
        dimension = DIMENSION_OF.get(self.name)
        size = getattr(self.sizes, dimension) if dimension else None
        return {dimension: size} if dimension and size != GIVEN_BY_FILE.get(self.name, self.ranks) else {}

    @property
    def options(self) -> str:
        """Launcher options that override the file."""
        return "".join(f" --{setting(name)} {size}" for name, size in self.given.items())

    @property
    def launcher(self) -> str:
        """The launcher for these options. accelerate has no options for pp and ep."""
        return "python -m pretrain.launch" if self.given.keys() & set(DROPPED) else "accelerate launch"

    def launched(self) -> AbstractContextManager[None]:
        """Sets the launcher's environment variables, which strategies read, while the context is open."""
        variables = {}
        if self.is_mesh:
            variables = {variable(dimension): str(getattr(self.sizes, dimension)) for dimension in DIMENSIONS}
            variables |= {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "FSDP_VERSION": "2"}
            variables["ACCELERATE_USE_FSDP"] = str(self.name not in ("tp", "pp")).lower()
        return patch_environment(WORLD_SIZE=self.ranks, **variables)

    @cached_property
    def groups(self) -> dict[str, tuple[int, int]]:
        """{dimension: (processes, distance between two neighboring ranks)} for each group of processes.

        `fsdp` shards everything except experts, and `efsdp` shards experts. See pretrain/parallel/mesh.py.
        """
        sizes = self.sizes
        inner = sizes.fsdp * sizes.tp
        return {
            "tp": (sizes.tp, 1),
            "ep": (sizes.ep, 1),
            "cp": (sizes.cp, sizes.tp),
            "fsdp": (sizes.fsdp, sizes.tp),
            "efsdp": (sizes.efsdp, sizes.ep),
            "dp_replicate": (sizes.dp_replicate, inner),
            "pp": (sizes.pp, inner * sizes.dp_replicate),
            "all": (self.ranks, 1),
        }


def planned_strategies() -> list[str]:
    """Lists the strategies in every plan. Their sizes follow from the number of processes."""
    return [name for name in STRATEGIES if name != "mesh"]


def products(ranks: int, machines: int = 1) -> Iterator[Layout]:
    """Yields every possible mesh of this many processes, except ddp."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for pp, replicas, cp, tp in itertools.product(divisors, repeat=4):
        rest, unequal = divmod(ranks, pp * replicas * cp * tp)
        if unequal or not rest or replicas == ranks:
            continue
        for ep in divisors:
            if rest * cp * tp % ep == 0:
                yield Layout.of(Sizes(pp, replicas, rest, cp, tp, ep), machines)


def layout(name: str, ranks: int, machines: int = 1, size: int | None = None) -> Layout:
    """Returns an accelerate config's layout. Without a mesh, every process has a replica.

    Args:
        size: size of the file's dimension. None plans it for these machines.
    """
    zero = shipped_deepspeed(name)["zero_optimization"] if name.startswith("zero") else {}
    problem = None
    if (name == "single") != (ranks == 1) and not zero.get("offload_optimizer"):
        problem = "runs on one GPU" if name == "single" else "needs more than one GPU"
    if name in ("fsdp2", "mesh"):
        return replace(Layout.of(Sizes(dp_shard=ranks), machines, name), problem=problem)
    if name not in DIMENSION_OF:
        others = "shards" if zero else "replicas"
        return Layout(name, ranks, machines, problem=problem, zero=zero, **{others: ranks})
    size = size or _planned_size(name, ranks, machines)
    left = max(1, ranks // size)
    match name:
        case "ep":
            sizes = Sizes(dp_shard=ranks, ep=size)
        case "tp" | "pp":
            sizes = Sizes(dp_replicate=left, **{name: size})
        case _:
            sizes = Sizes(dp_shard=left, **{DIMENSION_OF[name]: size})
    found = Layout.of(sizes, machines, name)
    return replace(found, ranks=ranks, problem=_size_problem(name, ranks, size) or problem)


def _planned_size(name: str, ranks: int, machines: int) -> int:
    """Chooses the size of a strategy's dimension for these machines."""
    match name:
        case "hsdp":  # one replica per machine, or two on one machine
            return machines if machines > 1 else min(2, ranks)
        case "fsdp_tp":
            return 2
        case "pp":
            return ranks
    return ranks // machines  # tp, cp and ep communicate in every layer, so they stay within a machine


def _size_problem(name: str, ranks: int, size: int) -> str | None:
    """Explains why this many processes can't be divided by this size; None if they can."""
    if name == "hsdp" and 1 < ranks < 2 * size:
        return "needs at least two GPUs in each of its groups; use ddp"
    if name == "fsdp_tp" and (ranks < 4 or ranks % 2):
        return "needs at least four GPUs, and an even number"
    if name == "cp" and ranks > 1 and size < 2:
        return "needs several GPUs in each machine"
    return None


def layouts(name: str, ranks: int, machines: int = 1) -> list[Layout]:
    """Returns all layouts that this file with launcher options allows, fastest first.

    For cp, they differ in the number of processes per sequence. Fewer processes exchange less data and use more
    memory.
    """
    whole = layout(name, ranks, machines)
    if name != "cp" or whole.problem:
        return [whole]
    sizes = [n for n in range(2, whole.cp) if whole.cp % n == 0]
    return [*(layout(name, ranks, machines, size) for size in sizes), whole]


def launched_layout(name: str) -> Layout:
    """Returns the current launch's layout, from the launcher's environment."""
    ranks = processes_launched()
    launched = layout(name, ranks)
    if not launched.zero:
        try:
            sizes = launched_sizes()
        except InputError:  # the strategy's own check reports it
            return launched
        return Layout.of(sizes, name=name)
    if zero := deepspeed_file().get("zero_optimization"):
        return replace(launched, zero={key: value for key, value in zero.items() if value != "auto"})
    return launched


def running_layout(strategy: Strategy) -> Layout:
    """Returns a running strategy's layout, with DeepSpeed's settings as filled in by accelerate."""
    launched = launched_layout(strategy.name)
    if not launched.zero:
        return launched
    return replace(launched, zero=strategy.accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"])


def shipped_deepspeed(name: str) -> dict[str, Any]:
    """Reads the DeepSpeed JSON named in a file of accelerate_configs/."""
    launcher = yaml.safe_load((ROOT / f"accelerate_configs/{name}.yaml").read_text(encoding="utf-8"))
    return json.loads((ROOT / launcher["deepspeed_config"]["deepspeed_config_file"]).read_text(encoding="utf-8"))
