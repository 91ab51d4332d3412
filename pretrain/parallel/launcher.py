"""Reads the launcher's environment: which strategy it asks for, and which of its settings contradict the recipe.

`accelerate launch --config_file F` passes F on as environment variables, typos included; so they are read and checked
here before anything starts.
"""

import json
import os
from pathlib import Path

from pretrain.config import RunConfig
from pretrain.files import ROOT
from pretrain.parallel.launcher_files import command_problems, conflict, deepspeed_problems
from pretrain.parallel.sizes import environment_flag, processes_launched, requested_sizes

PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
"""{the recipe's precision: accelerate's}."""

FLAGS = {
    "DEEPSPEED": "ACCELERATE_USE_DEEPSPEED",
    "FSDP": "ACCELERATE_USE_FSDP",
    "MEGATRON_LM": "ACCELERATE_USE_MEGATRON_LM",
}
"""{distributed_type in an accelerate config: the variable that the launcher sets for it}; MULTI_GPU has none."""
TP_SIZE = "PARALLELISM_CONFIG_TP_SIZE"
CP_SIZE = "PARALLELISM_CONFIG_CP_SIZE"
PP_DEGREE = "MEGATRON_LM_PP_DEGREE"
EP_SIZE = "MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE"
DIVISIONS = ("cp", "tp", "dp_replicate")
"""Sizes in parallelism_config. The first that is not 1 is looked up below; strategies reject each other's sizes."""
LAUNCHES: dict[tuple[str, str | None], str] = {
    ("MULTI_GPU", None): "ddp",
    ("MULTI_GPU", "tp"): "tp",
    ("FSDP", None): "fsdp2",
    ("FSDP", "dp_replicate"): "hsdp",
    ("FSDP", "tp"): "fsdp_tp",
    ("FSDP", "cp"): "cp",
    ("FSDP", "mesh"): "mesh",
    ("MULTI_GPU", "mesh"): "mesh",
    # The launcher passes on sizes of pipelines and experts only in Megatron-LM's section; Megatron-LM itself does not
    # run.
    ("MEGATRON_LM", "pp"): "pp",
    ("MEGATRON_LM", "ep"): "ep",
}
"""{(distributed_type, the size that the file gives): strategy}. ddp with one process is `single`; DeepSpeed's stage,
in a separate JSON, is part of its strategy's name."""

OF_SEVERAL_PROCESSES = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_"),
    *("ACCELERATE_", "FSDP_"),
)
"""Prefixes of the variables that tell a process that it is one of several."""


def launched_strategy() -> str:
    """Names the strategy that the launcher asks for; a name that is not in STRATEGIES if that is not supported."""
    kinds = [kind for kind, variable in FLAGS.items() if environment_flag(variable)] or ["MULTI_GPU"]
    size = launched_division(kinds[0])
    if kinds == ["DEEPSPEED"] and size is None:
        return f"zero{deepspeed_file().get('zero_optimization', {}).get('stage', 0)}"
    if kinds == ["FSDP"] and os.environ.get("FSDP_VERSION", "1") != "2":
        return "fsdp1"
    if kinds == ["MULTI_GPU"] and size is None and processes_launched() == 1:
        return "single"
    unknown = f"{' and '.join(kinds)} with {size}_size" if size else " and ".join(kinds)
    return LAUNCHES.get((kinds[0], size), unknown) if len(kinds) == 1 else unknown


def launched_division(kind: str) -> str | None:
    """Returns the size that an accelerate config of this distributed_type gives; None if it gives none."""
    if kind == "MEGATRON_LM":
        return "ep" if EP_SIZE in os.environ else "pp"
    if not environment_flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return None
    requested = {name for name, text in requested_sizes().items() if name != "dp_shard" or text.isdecimal()}
    if requested & {"pp", "ep"} or len(requested - {"dp_shard"}) > 1:
        return "mesh"
    given = [name for name in DIVISIONS if os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1") != "1"]
    if kind == "MULTI_GPU" and not given:
        return "tp"  # one process, which TensorParallel reports as a problem
    return given[0] if given else None


def environment_alone() -> dict[str, str]:
    """Returns the environment for a child process that does not take part in the training."""
    return {name: value for name, value in os.environ.items() if not name.startswith(OF_SEVERAL_PROCESSES)}


def python_path() -> str:
    """Returns the PYTHONPATH for a process that runs a module of this project, wherever it starts."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def replicas_requested() -> int:
    """Returns the number of replicas of a sharded model; 1 unless the config is for HSDP."""
    if not environment_flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return 1
    return int(os.environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"))


def deepspeed_file() -> dict:
    """Reads the DeepSpeed JSON that the accelerate config names; {} if it cannot be read."""
    try:
        return json.loads(Path(os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"]).read_text(encoding="utf-8"))
    except (KeyError, OSError, ValueError):
        return {}


def parallel_size(variable: str) -> int:
    """Returns how many processes share one model or sequence, from this variable of the launcher; null: all of them.

    Raises ValueError for anything but a word for all or a number of at least 1.
    """
    text = os.environ.get(variable, "None")
    if text in ("None", "all") or (text == "0" and variable == CP_SIZE):  # accelerate crashes on null for cp_size
        return processes_launched()
    size = int(text)
    if size < 1:
        raise ValueError(f"{variable} is {size}")
    return size


def sharing_problems(variable: str, word_for_all: str, shared: str = "a model") -> list[str]:
    """Lists the problems of the number of processes that share something, with what works.

    Args:
        variable: the launcher's variable; in lower case it is the setting in the accelerate config.
        word_for_all: the setting's value that means all processes.
    """
    launched = processes_launched()
    works = [str(size) for size in range(2, launched + 1) if launched % size == 0]
    remedy = "another strategy, or --num_processes 2"
    if works:
        remedy = f"{word_for_all} (all processes) or {', '.join(works)}"
    try:
        size = parallel_size(variable)
    except ValueError as error:
        return [f"launcher: {variable.lower()}: {error}; use {remedy}"]
    if size < 2 or launched % size:
        return [f"launcher: {variable.lower()}: {size} of {launched} processes cannot share {shared}; use {remedy}"]
    return []


def uncombined_sizes(variable: str, others: tuple[str, ...]) -> list[str]:
    """Lists a problem for each of these other sizes in parallelism_config that the accelerate config sets as well."""
    settings = {name: os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1") for name in others}
    return [
        f"launcher: parallelism_config_{name}_size: {size} is not combined with {variable.lower()}; use 1, or another "
        "strategy"
        for name, size in settings.items()
        if size != "1"
    ]


def launcher_problems(config: RunConfig, precision: str, strategy: str) -> list[str]:
    """Lists launcher settings that contradict the recipe, or that this project does not run."""
    problems = []
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched not in ("no", PRECISIONS[precision]):
        problems.append(
            f"launcher: mixed_precision: {launched} contradicts the recipe's precision: {precision}; "
            "remove mixed_precision from the launcher's file, or set precision in the recipe"
        )
    set_by_recipe = {
        "gradient_accumulation_steps": ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "batch.tokens_per_step"),
        "gradient_clipping": ("ACCELERATE_GRADIENT_CLIPPING", "optim.max_grad_norm"),
        "dynamo_backend": ("ACCELERATE_DYNAMO_BACKEND", "compile"),
        "fsdp_activation_checkpointing": ("FSDP_ACTIVATION_CHECKPOINTING", "activation_checkpointing"),
    }
    for name, (variable, setting) in set_by_recipe.items():
        value = os.environ.get(variable, "none")
        if value.lower() not in ("none", "no", "false", "auto", "1" if name == "gradient_accumulation_steps" else ""):
            problems.append(conflict("launcher", name, value, config, setting))
    if environment_flag("ACCELERATE_USE_DEEPSPEED"):
        problems += deepspeed_problems(os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"), config)
    elif environment_flag("ACCELERATE_USE_FSDP"):
        problems += replica_problems(processes_launched())
    return problems + command_problems(strategy, processes_launched())


def replica_problems(processes: int) -> list[str]:
    """Lists the problems of HSDP's numbers of groups and of ranks in each, as the launcher passes them on."""
    replicas = replicas_requested()
    shards = os.environ.get("PARALLELISM_CONFIG_DP_SHARD_SIZE", "None") if replicas > 1 else "None"
    if processes % replicas:
        return [
            f"launcher: dp_replicate_size: {replicas} does not divide {processes} processes; use "
            f"{' or '.join(str(n) for n in range(1, processes + 1) if processes % n == 0)}, or other --num_processes"
        ]
    if shards != "None" and int(shards) * replicas != processes:
        return [
            f"launcher: dp_replicate_size {replicas} x dp_shard_size {shards} is not {processes} processes; use "
            f"dp_shard_size: null, which is {processes // replicas} here, or --num_processes {int(shards) * replicas}"
        ]
    return []
