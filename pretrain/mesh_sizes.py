"""Reads the sizes of the parallel dimensions from the launcher.

    pp x dp_replicate x dp_shard x cp x tp = processes; for experts, ep subdivides dp_shard x cp x tp

Sizes can be set as parallelism_config_X_size in the accelerate config or on the command line, or as environment
variables PARALLELISM_CONFIG_X_SIZE. accelerate's launcher sets these variables for all sizes except pp and ep. If
the variables for pp and ep aren't set, we read these sizes from the accelerate config. `pretrain.launch` supports all
sizes.
"""

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import yaml

from pretrain.errors import InputError


class Row(NamedTuple):
    """A row in DIMENSIONS."""

    kind: str
    """Module and class that implement the dimension; see pretrain/parallel/dimension.py."""
    reads: bool = False
    """True if the dimension's ranks read different sequences."""
    is_inner: bool = False
    """True if it subdivides other dimensions, as ep subdivides dp_shard, cp and tp."""


DIMENSIONS: dict[str, Row] = {
    "pp": Row("pretrain.parallel.pipeline:Pipeline"),
    "dp_replicate": Row("pretrain.parallel.dimension:Replicas", reads=True),
    "dp_shard": Row("pretrain.parallel.dimension:Dimension", reads=True),
    "cp": Row("pretrain.parallel.context_parallel:ContextParallel"),
    "tp": Row("pretrain.parallel.tensor_parallel:TensorParallel"),
    "ep": Row("pretrain.parallel.expert_parallel:ExpertParallel", is_inner=True),
}
"""The dimensions, outermost first. tp is innermost because consecutive ranks have the fastest links."""
LAUNCHERS = ("accelerate.commands.launch", "pretrain.launch")
"""Modules that launch processes."""
DROPPED = ("pp", "ep")
"""Dimensions that accelerate's launcher doesn't support."""
THE_REST = ("0", "all", "none", "null", "")
"""Values that mean all remaining processes."""


class Sizes(SimpleNamespace):
    """Number of ranks along each dimension, 1 by default. Arguments can be positional or named."""

    def __init__(self, *sizes: int, **named: int):
        super().__init__(**dict.fromkeys(DIMENSIONS, 1) | dict(zip(DIMENSIONS, sizes, strict=False)) | named)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    @property
    def world(self) -> int:
        return math.prod(getattr(self, name) for name, row in DIMENSIONS.items() if not row.is_inner)

    @property
    def fsdp(self) -> int:
        """Number of ranks that shard the dense parameters.

        This includes cp ranks, which are data parallel with respect to parameters.
        """
        return self.dp_shard * self.cp

    @property
    def batch(self) -> int:
        """Number of ranks that read different sequences."""
        return math.prod(getattr(self, name) for name, row in DIMENSIONS.items() if row.reads)

    @property
    def efsdp(self) -> int:
        """Number of ranks that shard the same experts."""
        return self.fsdp * self.tp // self.ep

    def named(self) -> dict[str, int]:
        """Returns {dimension: size} for sizes above 1, for the run's record."""
        return {name: size for name in DIMENSIONS if (size := getattr(self, name)) > 1}


def setting(dimension: str) -> str:
    """Returns a size's key in the accelerate config."""
    return f"parallelism_config_{dimension}_size"


def variable(dimension: str) -> str:
    """Returns the name of a size's environment variable."""
    return f"PARALLELISM_CONFIG_{dimension.upper()}_SIZE"


def environment_flag(name: str, default: str = "false") -> bool:
    return os.environ.get(name, default).lower() in ("1", "true", "yes")


def processes_launched() -> int:
    """Returns the number of launched processes on all machines."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def processes_here() -> int:
    """Returns the number of launched processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def take_own_options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Splits a launcher's arguments into {dimension: size}, for sizes that accelerate doesn't support, and the rest.

    Stops at the first .py file or --module, because all later arguments belong to the script.
    """
    found: dict[str, str] = {}
    rest: list[str] = []
    following = iter(words)
    for word in following:
        option, has_value, value = word.partition("=")
        if option.endswith(".py") or option in ("-m", "--module"):
            return found, [*rest, word, *following]
        dimension = next((name for name in DROPPED if option == f"--{setting(name)}"), None)
        if dimension is None:
            rest.append(word)
        else:
            found[dimension] = value if has_value else next(following, "")
    return found, rest


def launcher_command() -> tuple[list[str], Path] | None:
    """Returns the arguments and working directory of the launcher that started this process, or None.

    The launcher doesn't forward its command line or the config's path, so we read them from the parent process.
    """
    import psutil

    for parent in psutil.Process().parents()[:3]:
        try:
            words = parent.cmdline()
            folder = Path(parent.cwd())
        except psutil.Error:
            continue
        for module in LAUNCHERS:
            if module in words:
                return take_own_options(words[words.index(module) + 1 :])[1], folder
        if "launch" in words and any(Path(word).name == "accelerate" for word in words):
            return words[words.index("launch") + 1 :], folder
    return None


def launcher_config() -> tuple[Any, Path | None]:
    """Returns the launcher's parsed options and the path of its accelerate config, or None for each if unknown."""
    command = launcher_command()
    if command is None:
        return None, None
    words, folder = command
    from accelerate.commands.config import config_args
    from accelerate.commands.launch import launch_command_parser

    options = launch_command_parser().parse_args(words)
    default = None if options.cpu else config_args.default_config_file  # accelerate makes the same choice
    name = options.config_file or default
    return options, None if name is None else folder / name


def read_launcher_file(path: Path | None) -> dict[str, Any]:
    """Reads an accelerate config. Returns {} on errors, which accelerate has already reported."""
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8")) if path else {}
    except (OSError, yaml.YAMLError):
        return {}
    return settings if isinstance(settings, dict) else {}


def requested_sizes() -> dict[str, str]:
    """Returns {dimension: size as text} from the launcher, without sizes of 1."""
    if not environment_flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return {}
    found = {name: os.environ[variable(name)] for name in DIMENSIONS if variable(name) in os.environ}
    if not found.keys() >= set(DROPPED):
        _, path = launcher_config()
        section = read_launcher_file(path).get("parallelism_config") or {}
        found = {name: str(section[setting(name)]) for name in DROPPED if setting(name) in section} | found
    return {name: found[name].lower() for name in DIMENSIONS if found.get(name, "1") != "1"}


def launched_sizes() -> Sizes:
    """Returns the size of every dimension. Raises InputError, with suggestions, if a size is invalid.

    The remaining processes shard the model with `distributed_type: FSDP`, or replicate it with `MULTI_GPU`.
    """
    processes = processes_launched()
    asked = requested_sizes()
    given = {name: text for name, text in asked.items() if text not in THE_REST}
    rest = [name for name in asked if name not in given and name != "ep"]
    if len(rest) > 1 and "dp_shard" in rest:  # accelerate writes null for an unset dp_shard
        rest.remove("dp_shard")
    problems = [
        f"launcher: {setting(name)}: {text} is not a valid size; use {allowed(processes)}"
        for name, text in given.items()
        if not text.isdecimal() or int(text) == 0
    ]
    if len(rest) > 1:
        problems.append(f"launcher: {' and '.join(map(setting, rest))} are both 0, but only one size can be 0")
    if problems:
        raise InputError(*problems)
    numbers = {name: int(text) for name, text in given.items() if name != "ep"}
    named = " x ".join(f"{setting(name)} {number}" for name, number in numbers.items())
    product = math.prod(numbers.values())
    default = "dp_shard" if environment_flag("ACCELERATE_USE_FSDP") else "dp_replicate"
    numbers.setdefault(rest[0] if rest else default, processes // product)
    if math.prod(numbers.values()) != processes:
        raise InputError(
            f"launcher: {named} does not fit the number of processes ({processes}); use {allowed(processes)}, or "
            f"--num_processes {product}"
        )
    if rest and rest[0] not in ("dp_shard", "dp_replicate") and numbers[rest[0]] == 1:
        raise InputError(
            f"launcher: {setting(rest[0])}: no processes are left for it (out of {processes}); use another "
            "strategy, or --num_processes 2"
        )
    sizes = Sizes(**numbers)
    if "ep" in asked:
        exchange = sizes.fsdp * sizes.tp
        experts = int(given.get("ep", exchange))
        if experts < 2 or exchange % experts:
            raise InputError(
                f"launcher: {setting('ep')}: {experts} does not divide dp_shard x cp x tp = {exchange}; "
                f"use {allowed(exchange)}"
            )
        sizes = Sizes(**numbers, ep=experts)
    return sizes


def allowed(processes: int) -> str:
    """Describes the sizes that work with this number of processes."""
    works = [str(size) for size in range(2, processes + 1) if processes % size == 0]
    return f"0 (all remaining) or {', '.join(works)}" if works else "another strategy, or --num_processes 2"
