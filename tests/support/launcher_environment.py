"""Environment variables that `accelerate launch` sets for an accelerate config."""

from pathlib import Path

import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from pretrain.mesh_sizes import DROPPED, setting, variable

LAUNCHER_VARIABLES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")


def launcher_environment(file: Path, processes: int) -> dict[str, str]:
    """Returns the variables that the launcher sets for this file and number of processes."""
    words = ["--config_file", str(file), "--num_processes", str(processes), "--main_process_port", "0", "train.py"]
    arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        _, environment = prepare_deepspeed_cmd_env(arguments)
    else:
        environment = prepare_multi_gpu_env(arguments)
    variables = {name: value for name, value in environment.items() if name.startswith(LAUNCHER_VARIABLES)}
    # The launcher doesn't set these. Processes read them from the config file.
    sizes = yaml.safe_load(file.read_text()).get("parallelism_config", {})
    return variables | {variable(name): str(sizes.get(setting(name), 1)) for name in DROPPED}
