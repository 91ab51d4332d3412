"""What the launcher asks for: which strategy, and whether its settings contradict the recipe.

`accelerate launch --config_file F` passes F on to the processes as environment variables, typos included; so they are
read and checked here before anything starts.
"""

import json
import os
from pathlib import Path

from pretrain.config import RunConfig
from pretrain.files import ROOT
from pretrain.parallel.launcher_files import command_problems, conflict, deepspeed_problems

PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
"""Our names to accelerate's."""

OF_SEVERAL_PROCESSES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
OF_SEVERAL_PROCESSES += ("ACCELERATE_", "FSDP_")
"""Beginnings of the names by which a process knows that it is one of several."""


def environment_alone() -> dict[str, str]:
    """The environment for a process that this one starts and that does not take part in the training."""
    return {name: value for name, value in os.environ.items() if not name.startswith(OF_SEVERAL_PROCESSES)}


def python_path() -> str:
    """PYTHONPATH for a process that runs a module of this package, wherever it starts."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def environment_flag(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("1", "true", "yes")


def processes_launched() -> int:
    """How many processes the launcher started, over all machines."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def replicas_requested() -> int:
    """Over how many groups of processes a sharded model is replicated; 1 unless the launcher's file is for HSDP."""
    if not environment_flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return 1
    return int(os.environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"))


def deepspeed_file() -> dict:
    """What the DeepSpeed JSON says that the launcher's file names; {} where it cannot be read."""
    try:
        return json.loads(Path(os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"]).read_text(encoding="utf-8"))
    except (KeyError, OSError, ValueError):
        return {}


def parallel_size(variable: str) -> int:
    """Processes that share one model, as the launcher says in this variable; all of them for null and all.

    Raises ValueError for anything but these and a number that is at least 1.
    """
    text = os.environ.get(variable, "None")
    size = processes_launched() if text in ("None", "all") else int(text)
    if size < 1:
        raise ValueError(f"{variable} is {size}")
    return size


def launcher_problems(config: RunConfig, precision: str, strategy: str) -> list[str]:
    """Settings of the launcher that contradict the recipe, or that this project does not run."""
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
    """What is wrong with HSDP's numbers of groups and of processes in each, as the launcher passes them on."""
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
