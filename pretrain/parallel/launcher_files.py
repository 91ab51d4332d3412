"""Checks accelerate configs and DeepSpeed JSONs for unknown keys and for settings that belong in the recipe.

accelerate silently drops unknown keys in sections such as fsdp_config, and DeepSpeed ignores unknown top-level keys.
Recipe settings aren't allowed in these files, so that each setting is defined in only one place.
"""

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

from pretrain.config import RunConfig
from pretrain.errors import did_you_mean
from pretrain.files import or_shipped
from pretrain.mesh_sizes import DIMENSIONS, launcher_config, processes_launched, read_launcher_file, setting

FROM_RECIPE = {
    "train_batch_size": "batch.tokens_per_step",
    "train_micro_batch_size_per_gpu": "batch.sequences_per_micro_batch",
    "gradient_accumulation_steps": "batch.tokens_per_step",
    "gradient_clipping": "optim.max_grad_norm",
    "bf16": "precision",
    "fp16": "precision",
    "amp": "precision",
    "torch_autocast": "precision",
    "data_types": "precision",
    "communication_data_type": "precision",
    "optimizer": "optim.name",
    "scheduler": "optim.schedule",
    "activation_checkpointing": "activation_checkpointing",
    "compile": "compile",
}
"""{top-level key in a DeepSpeed JSON: equivalent recipe setting}"""

ALLOWED_IN_DEEPSPEED_JSON = (
    *("zero_optimization", "aio", "zero_force_ds_cpu_optimizer", "zero_allow_untested_optimizer", "comms_logger"),
    *("flops_profiler", "wall_clock_breakdown", "memory_breakdown", "steps_per_print", "nebula", "timers"),
)
RUN_HERE = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED")
"""Supported values of distributed_type."""
AIO_KEYS = ("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds")


def conflict(file: str, key: str, value: Any, config: RunConfig, setting: str) -> str:
    """Returns the error message for a key that conflicts with the recipe setting at the dotted path `setting`."""
    in_recipe = attrgetter(setting)(config)
    where = "the accelerate config" if file == "launcher" else file
    return f"{file}: {key}: {value} conflicts with the recipe's {setting}: {in_recipe}; remove it from {where}"


def command_problems(strategy: str) -> list[str]:
    """Compares the launched processes with the launcher's options and config, and returns error messages.

    Only for processes whose launcher's command line is known.
    """
    options, path = launcher_config()
    processes = processes_launched()
    wanted = options.num_processes or read_launcher_file(path).get("num_processes")
    problems = []
    if wanted not in (None, processes):
        # On CPUs, accelerate needs mpirun to start several processes.
        problems.append(
            f"launcher: num_processes: {wanted} was requested, but {processes} was started; remove --cpu from the "
            "command line and use_cpu from the accelerate config, or use accelerate_configs/ddp.yaml, which also "
            "works without a GPU"
        )
    if path is not None:
        problems += launcher_file_problems(path, strategy)
    return problems


def launcher_file_problems(path: Path, strategy: str) -> list[str]:
    """Returns error messages for settings that accelerate ignores: unknown keys and unsupported strategies."""
    from accelerate.commands.launch import launch_command_parser

    settings = read_launcher_file(path)
    # argparse has no public equivalent of _actions. accelerate's parser doesn't have the pp and ep sizes.
    known = {action.dest for action in launch_command_parser()._actions} | set(map(setting, DIMENSIONS))
    problems = []
    asked = settings.get("distributed_type", "NO")
    if asked not in RUN_HERE:
        # accelerate would fall back to DDP or a single process.
        problems.append(
            f"{path.name}: distributed_type: {asked} is not supported; "
            f"use {', '.join(RUN_HERE[:-1])} or {RUN_HERE[-1]}"
        )
    if asked in ("FSDP", "DEEPSPEED") and strategy in ("single", "ddp"):
        problems.append(
            f"{path.name}: distributed_type: {asked} was requested, but {strategy} was started; remove --cpu or "
            "--multi_gpu from the command line and use_cpu from the file"
        )
    for section, prefix in (("fsdp_config", "fsdp_"), ("deepspeed_config", ""), ("parallelism_config", "")):
        for key in settings.get(section) or {}:
            if prefix + key.removeprefix(prefix) not in known:
                names = {name for name in known if name.startswith(prefix)} if prefix else known
                problems.append(
                    f"{path.name}: {section}.{key} is unknown and would be ignored{did_you_mean(key, names)}"
                )
    return problems


def deepspeed_problems(path: str | None, in_launcher: dict[str, Any], config: RunConfig) -> list[str]:
    """Returns error messages for the launcher's DeepSpeed settings, including those that belong in the recipe.

    Args:
        path: DeepSpeed JSON named in the accelerate config, if any.
        in_launcher: stage and offload settings in the accelerate config itself, used only without a JSON.
        config: the recipe.
    """
    if path is None and not in_launcher:
        return [
            "launcher: deepspeed_config has neither a deepspeed_config_file nor a zero_stage; set "
            "deepspeed_config_file to a JSON file such as those in ds_configs, or use accelerate_configs/zero1.yaml, "
            "zero2.yaml or zero3.yaml"
        ]
    if path is None:
        zero = in_launcher["zero_optimization"]
        if "nvme" in [section["device"] for section in zero.values() if isinstance(section, dict)]:
            return [
                "launcher: deepspeed_config offloads to nvme, but accelerate does not forward the NVMe path; use "
                "accelerate_configs/zero3_offload_nvme.yaml, and set the path in ds_configs/zero3_offload_nvme.json"
            ]
        return zero_problems("launcher", zero)
    try:
        settings = json.loads(or_shipped(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [
            f"deepspeed_config_file: {path} cannot be read from {Path.cwd()} ({error}); paths in the accelerate "
            "config are relative to the folder you launch from"
        ]
    name = Path(path).name
    problems = []
    for key, value in settings.items():
        if key in FROM_RECIPE:
            in_section = value.get("enabled") if isinstance(value, dict) and key in ("bf16", "fp16") else value
            if in_section != "auto":
                problems.append(conflict(name, key, json.dumps(value), config, FROM_RECIPE[key]))
        elif key not in ALLOWED_IN_DEEPSPEED_JSON:
            problems.append(f"{name}: {key} is not a supported key{did_you_mean(key, ALLOWED_IN_DEEPSPEED_JSON)}")
    problems += [
        f"{name}: aio.{key} is unknown{did_you_mean(key, AIO_KEYS)}"
        for key in settings.get("aio", {})
        if key not in AIO_KEYS
    ]
    return problems + zero_problems(name, settings.get("zero_optimization"))


def zero_problems(name: str, settings: Any) -> list[str]:
    """Returns error messages for unknown keys and unsupported values in a zero_optimization section."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    stage = settings.get("stage") if isinstance(settings, dict) else None
    if stage not in (1, 2, 3):
        return [f"{name}: zero_optimization.stage must be 1, 2 or 3, got {json.dumps(stage)}"]
    sections = {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    }
    problems = []
    for section, model in sections.items():
        values = settings.get(section.partition(".")[2]) or {} if "." in section else settings
        known = {alias for field, info in model.model_fields.items() for alias in (field, info.alias) if alias}
        problems += [
            f"{name}: {section}.{key} is unknown{did_you_mean(key, known)}" for key in values if key not in known
        ]
    optimizer = settings.get("offload_optimizer") or {}
    if optimizer.get("device") == "nvme" and not optimizer.get("nvme_path"):
        problems.append(
            f"{name}: zero_optimization.offload_optimizer.nvme_path is missing; set it to a folder on a local disk"
        )
    if (settings.get("offload_param") or {}).get("device") == "nvme":
        problems.append(
            f"{name}: zero_optimization.offload_param.device: nvme is not supported; use cpu (only the "
            "optimizer state, which is six times as large as the weights, can be on nvme)"
        )
    return problems
