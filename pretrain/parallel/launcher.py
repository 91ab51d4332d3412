"""Reads the strategy and its settings from the launcher's environment variables, and checks them against the recipe.

`accelerate launch --config_file F` converts settings to environment variables without rejecting typos, so we check
them before anything starts.
"""

import json
import os
import subprocess
import sys
from typing import Any

from pretrain.config import RunConfig
from pretrain.files import ROOT, or_shipped
from pretrain.mesh_sizes import (
    DIMENSIONS,
    DROPPED,
    environment_flag,
    launcher_command,
    launcher_config,
    processes_launched,
    read_launcher_file,
    requested_sizes,
    setting,
    variable,
)

PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
"""{recipe precision: accelerate's mixed_precision}"""

FLAGS = {"DEEPSPEED": "ACCELERATE_USE_DEEPSPEED", "FSDP": "ACCELERATE_USE_FSDP"}
"""{distributed_type in an accelerate config: environment variable set by the launcher}. MULTI_GPU sets none."""
LAUNCHES: dict[tuple[str, tuple[str, ...]], str] = {
    ("MULTI_GPU", ()): "ddp",
    ("MULTI_GPU", ("tp",)): "tp",
    ("MULTI_GPU", ("pp",)): "pp",
    ("FSDP", ()): "fsdp2",
    ("FSDP", ("dp_replicate",)): "hsdp",
    ("FSDP", ("tp",)): "fsdp_tp",
    ("FSDP", ("cp",)): "cp",
    ("FSDP", ("ep",)): "ep",
}
"""{(distributed_type, sizes set by the launcher): strategy}.

All other combinations run as `mesh`. ddp with a single process is called `single`. DeepSpeed strategies are named
after the stage in the DeepSpeed JSON.
"""

OF_SEVERAL_PROCESSES = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_"),
    *("ACCELERATE_", "FSDP_"),
)
"""Prefixes of the environment variables that launchers set for distributed processes."""


def launched_strategy() -> str:
    """Returns the name of the launched strategy. Unsupported strategies get a name that is not in STRATEGIES."""
    kinds = [kind for kind, variable in FLAGS.items() if environment_flag(variable)] or ["MULTI_GPU"]
    # All remaining processes go to dp_shard (or dp_replicate without FSDP).
    sizes = tuple(name for name in requested_sizes() if name != "dp_shard")
    if kinds == ["DEEPSPEED"] and not sizes:
        return f"zero{deepspeed_file().get('zero_optimization', {}).get('stage', 0)}"
    if kinds == ["FSDP"] and os.environ.get("FSDP_VERSION", "1") != "2":
        return "fsdp1"
    if kinds == ["MULTI_GPU"] and not sizes and processes_launched() == 1:
        return "single"
    if len(kinds) > 1 or kinds == ["DEEPSPEED"]:
        return " and ".join(kinds) + (f" with {' and '.join(map(setting, sizes))}" if sizes else "")
    return LAUNCHES.get((kinds[0], sizes), "mesh")


def environment_alone() -> dict[str, str]:
    """Returns the environment for a child process that isn't part of the distributed run."""
    return {name: value for name, value in os.environ.items() if not name.startswith(OF_SEVERAL_PROCESSES)}


def python_path() -> str:
    """Returns a PYTHONPATH that lets a process run this project's modules from any folder."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


class ToolError(Exception):
    """Raised if a module of pretrain_tools fails or doesn't exist."""


def run_tool(module: str, *words: str, given: str = "", seconds: float = 300.0) -> str:
    """Runs a module of pretrain_tools on the CPU in its own process, because the trainer imports no tool.

    Returns its output. Raises ToolError with the last line of its error.

    given: text for its standard input.
    """
    # Without -P, modules in the current folder would come first.
    command = [sys.executable, "-P", "-m", f"pretrain_tools.{module}", *words]
    environment = environment_alone() | {"PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            command, input=given, env=environment, timeout=seconds, capture_output=True, text=True, errors="replace"
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolError(f"{type(error).__name__}: {error}") from error
    if done.returncode:
        raise ToolError((done.stderr.splitlines() or [f"exit status {done.returncode}"])[-1])
    return done.stdout


def deepspeed_file() -> dict:
    """Returns the accelerate config's DeepSpeed JSON, or {} if it can't be read.

    If `accelerate config` wrote the stage and offload settings to its own file instead, returns only these settings.
    """
    if path := os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        try:
            return json.loads(or_shipped(path).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
    stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "")
    if not stage.isdecimal():
        return {}
    zero: dict[str, Any] = {"stage": int(stage)}
    for section in ("offload_optimizer", "offload_param"):
        device = os.environ.get(f"ACCELERATE_DEEPSPEED_{section.upper()}_DEVICE", "none")
        if device != "none":
            zero[section] = {"device": device}
    return {"zero_optimization": zero}


def launcher_problems(config: RunConfig, precision: str, strategy: str) -> list[str]:
    """Returns error messages for launcher settings that contradict the recipe or aren't supported."""
    problems = []
    config = config.model_copy(update={"precision": precision})  # instead of auto
    set_by_recipe = {
        "mixed_precision": ("ACCELERATE_MIXED_PRECISION", "precision", PRECISIONS[precision]),
        # 1 is the default of `accelerate config`.
        "gradient_accumulation_steps": ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "batch.tokens_per_step", "1"),
        "gradient_clipping": (
            "ACCELERATE_GRADIENT_CLIPPING",
            "optim.max_grad_norm",
            f"{config.optim.max_grad_norm:.12g}",
        ),
        "dynamo_backend": ("ACCELERATE_DYNAMO_BACKEND", "compile", "no"),
        "fsdp_activation_checkpointing": (
            "FSDP_ACTIVATION_CHECKPOINTING",
            "activation_checkpointing",
            "true" if config.activation_checkpointing == "full" else "false",
        ),
    }
    for name, (in_environment, path, same) in set_by_recipe.items():
        value = os.environ.get(in_environment, "none")
        if value.lower().removesuffix(".0") not in ("none", "no", "false", "auto", same):
            from pretrain.parallel.launcher_files import conflict

            problems.append(conflict("launcher", name, value, config, path))
    if environment_flag("ACCELERATE_USE_DEEPSPEED"):
        from pretrain.parallel.launcher_files import deepspeed_problems

        path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
        problems += deepspeed_problems(path, deepspeed_file(), config)
    if environment_flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
        problems += parallelism_problems()
    else:
        problems += ignored_sizes()
    if launcher_command() is not None:
        from pretrain.parallel.launcher_files import command_problems

        problems += command_problems(strategy)
    return problems


def parallelism_problems() -> list[str]:
    """Returns error messages for parallelism_config as a whole. `launched_sizes` checks the individual sizes."""
    problems = []
    # Only accelerate's launcher sets this variable. The launcher drops the pp and ep sizes, so we need its command
    # line to find them in the config file.
    came_through_launcher = "PARALLELISM_CONFIG_CP_BACKEND" in os.environ
    missing = [variable(name) for name in DROPPED if variable(name) not in os.environ]
    if came_through_launcher and missing and launcher_command() is None:
        problems.append(
            f"launcher: cannot read {' and '.join(map(setting, DROPPED))}, because the launcher's command line is "
            f"not accessible; set {' and '.join(missing)} in the environment (to 1 if unused)"
        )
    sequence = os.environ.get("PARALLELISM_CONFIG_SP_SIZE", "1")
    if sequence not in ("1", "None"):
        problems.append(f"launcher: parallelism_config_sp_size: {sequence} is not supported; use {setting('cp')}")
    if not environment_flag("ACCELERATE_USE_FSDP") and not requested_sizes():
        # If a pp or ep size was lost, this would silently start DDP.
        names = ", ".join(map(setting, DIMENSIONS))
        problems.append(
            f"launcher: parallelism_config sets no size above 1; set one of {names} in the accelerate config, "
            "or an environment variable such as PARALLELISM_CONFIG_PP_SIZE=2"
        )
    return problems


def ignored_sizes() -> list[str]:
    """Returns an error message if sizes are set although parallelism_config is off, so that they have no effect.

    accelerate turns it on only if the config has such a section, and not with --multi_gpu or --use_fsdp.
    """
    options, path = launcher_config()
    section = read_launcher_file(path).get("parallelism_config") or {}

    def is_set(name: str) -> bool:
        given = (
            os.environ.get(variable(name), 1),
            getattr(options, setting(name), 1),
            section.get(setting(name), 1),
        )
        unset = ("1", "None") if name == "dp_shard" else ("1",)  # accelerate writes null for an unset dp_shard
        return any(str(size) not in unset for size in given)

    if not (names := [setting(name) for name in DIMENSIONS if is_set(name)]):
        return []
    return [
        f"launcher: {' and '.join(names)} would be ignored; use an accelerate config with a parallelism_config "
        "section, such as accelerate_configs/mesh.yaml, and leave out --multi_gpu and --use_fsdp (with torchrun, set "
        "ACCELERATE_USE_PARALLELISM_CONFIG=true)"
    ]
