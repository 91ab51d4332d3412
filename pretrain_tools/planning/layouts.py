"""Lists process layouts: all possible meshes, the accelerate configs' layouts, and the current launch's."""

import itertools
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import yaml
from accelerate.utils import patch_environment

from pretrain.files import ROOT
from pretrain.mesh_sizes import DROPPED, Sizes, environment_flag, launched_sizes, processes_launched, setting, variable
from pretrain.parallel.launcher import LAUNCHES, deepspeed_file

DIMENSION_OF = {"hsdp": "dp_replicate", "tp": "tp", "fsdp_tp": "tp", "cp": "cp", "pp": "pp", "ep": "ep"}
"""{strategy: mesh dimension set in its accelerate config}."""
MESHES = ("fsdp2", *DIMENSION_OF, "mesh")
"""Strategies with a mesh."""
GIVEN_BY_FILE = {"hsdp": 2, "fsdp_tp": 2}
"""{strategy: size in its accelerate config, unless it is the number of processes}."""


@dataclass(frozen=True)
class Layout:
    """A layout of processes: the size of each mesh dimension. The product of all sizes except ep is `ranks`."""

    name: str
    """Name of the file in accelerate_configs/."""
    ranks: int
    machines: int = 1
    replicas: int = 1
    """Number of replicas of the weights and states."""
    shards: int = 1
    """Number of processes that shard states and train on different micro-batches."""
    tp: int = 1
    """Number of processes that split heads and feed-forward width."""
    cp: int = 1
    """Number of processes that split each sequence and shard states."""
    pp: int = 1
    """Number of processes in a pipeline."""
    ep: int = 1
    """Number of processes that split the experts, out of dp_shard x cp x tp."""
    problem: str | None = None
    """Reason why this number of processes isn't supported."""
    zero: dict[str, Any] = field(default_factory=dict)
    """The zero_optimization section of the DeepSpeed JSON."""
    offloads: bool = False
    """True if a mesh's sharded weights, gradients and optimizer state are in CPU memory (`fsdp_offload_params`)."""

    @classmethod
    def of(cls, sizes: Sizes, machines: int = 1, name: str | None = None) -> "Layout":
        """Creates a mesh layout, named after its accelerate config (`mesh` if there is none)."""
        for kind, implied in (("MULTI_GPU", "dp_replicate"), ("FSDP", "dp_shard")):
            given = tuple(dimension for dimension in sizes.named() if dimension != implied)
            known = LAUNCHES.get((kind, given))
            name = name or (known if known in MESHES else None)
        return cls(
            name or "mesh",
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
        """Number of processes that shard weights, gradients and optimizer state."""
        return self.shards * self.cp

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per micro-step, across all processes."""
        return max(1, self.ranks // (self.tp * self.cp))

    @property
    def product(self) -> str:
        """The mesh sizes as text, such as `pp2 dp_shard4`."""
        return " ".join(f"{name}{size}" for name, size in self.sizes.named().items())

    @property
    def is_planned(self) -> bool:
        """True if `layouts` returns this layout for its accelerate config."""
        return self.name != "mesh" and any(
            self.sizes == known.sizes for known in layouts(self.name, self.ranks, self.machines)
        )

    @property
    def is_mesh(self) -> bool:
        return self.name in MESHES

    @property
    def given(self) -> dict[str, int]:
        """{dimension: size} for sizes that differ from the accelerate config."""
        if self.name == "mesh":
            return {name: size for name, size in self.sizes.named().items() if name != "dp_shard"}
        dimension = DIMENSION_OF.get(self.name)
        if dimension is None:
            return {}
        size = getattr(self.sizes, dimension)
        return {} if size == GIVEN_BY_FILE.get(self.name, self.ranks) else {dimension: size}

    @property
    def options(self) -> str:
        """Launcher options that override the accelerate config."""
        return "".join(f" --{setting(name)} {size}" for name, size in self.given.items())

    @property
    def launcher(self) -> str:
        """The launch command. accelerate has no options for pp and ep."""
        return "python -m pretrain.launch" if self.given.keys() & set(DROPPED) else "accelerate launch"

    def launched(self) -> AbstractContextManager[None]:
        """Returns a context manager that sets the launcher's environment variables, which strategies read."""
        variables = {}
        if self.is_mesh:
            variables = {variable(dimension): str(size) for dimension, size in vars(self.sizes).items()}
            variables |= {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "FSDP_VERSION": "2"}
            variables["ACCELERATE_USE_FSDP"] = str(self.name not in ("tp", "pp")).lower()
        return patch_environment(WORLD_SIZE=self.ranks, **variables)

    @cached_property
    def groups(self) -> dict[str, tuple[int, int]]:
        """{dimension: (group size, distance between consecutive ranks of a group)}.

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


def products(ranks: int, machines: int = 1) -> Iterator[Layout]:
    """Yields every possible mesh with this many processes, except ddp."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for pp, replicas, cp, tp, shards in itertools.product(divisors, repeat=5):
        if pp * replicas * cp * tp * shards == ranks > replicas:
            for ep in divisors:
                if shards * cp * tp % ep == 0:
                    yield Layout.of(Sizes(pp, replicas, shards, cp, tp, ep), machines)


def layout(name: str, ranks: int, machines: int = 1, size: int | None = None) -> Layout:
    """Returns the layout of an accelerate config.

    Args:
        size: size of the config's mesh dimension; None to choose it for these machines.
    """
    zero = shipped_deepspeed(name)["zero_optimization"] if name.startswith("zero") else {}
    problem = None
    if (name == "single") != (ranks == 1) and not zero.get("offload_optimizer"):
        problem = "supports only one GPU" if name == "single" else "needs more than one GPU"
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
    found = Layout.of(sizes, machines)
    if problem is None and (found.name, found.ranks) != (name, ranks):
        problem = "needs more GPUs per machine, or an even number of them"
    return replace(found, name=name, ranks=ranks, problem=problem)


def _planned_size(name: str, ranks: int, machines: int) -> int:
    """Chooses the size of a strategy's mesh dimension for these machines."""
    match name:
        case "hsdp":  # one replica per machine, or two on one machine
            return machines if machines > 1 else min(2, ranks)
        case "fsdp_tp":
            return 2
        case "pp":
            return ranks
    return ranks // machines  # tp, cp and ep communicate in every layer, so they stay within a machine


def layouts(name: str, ranks: int, machines: int = 1) -> list[Layout]:
    """Returns all layouts that an accelerate config and its launcher options allow, fastest first.

    For cp, the layouts differ in the number of processes per sequence. Fewer processes exchange less data but need
    more memory.
    """
    whole = layout(name, ranks, machines)
    if name != "cp" or whole.problem:
        return [whole]
    return [layout(name, ranks, machines, size) for size in range(2, whole.cp + 1) if whole.cp % size == 0]


def launched_layout(name: str) -> Layout:
    """Returns the current launch's layout, based on the launcher's environment variables."""
    if not name.startswith("zero"):
        return replace(Layout.of(launched_sizes(), name=name), offloads=environment_flag("FSDP_OFFLOAD_PARAMS"))
    launched = layout(name, processes_launched())
    given = deepspeed_file().get("zero_optimization") or launched.zero
    return replace(launched, zero={key: value for key, value in given.items() if value != "auto"})


def shipped_deepspeed(name: str) -> dict[str, Any]:
    """Reads the DeepSpeed JSON of an accelerate config."""
    launcher = yaml.safe_load((ROOT / f"accelerate_configs/{name}.yaml").read_text(encoding="utf-8"))
    return json.loads((ROOT / launcher["deepspeed_config"]["deepspeed_config_file"]).read_text(encoding="utf-8"))
