"""The launcher files must contain only known keys, and settings that conflict with the recipe must be rejected."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser

from pretrain.config import RunConfig
from pretrain.errors import InputError
from pretrain.parallel import launcher_files
from pretrain.parallel.launcher import ToolError, launched_strategy, launcher_problems, run_tool
from pretrain.parallel.launcher_files import command_problems, deepspeed_problems, launcher_file_problems
from pretrain.parallel.registry import STRATEGIES, micro_batches_launched, strategy_class, strategy_named
from pretrain_tools.planning.layouts import launched_layout
from support.accelerate_config import DEEPSPEED, FSDP2, TWO_GPUS, accelerate_config
from support.launcher_environment import launcher_environment
from support.project import ROOT, free_port, launch, losses, run_script

LAUNCHER_FILES = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
DEEPSPEED_FILES = sorted((ROOT / "ds_configs").glob("*.json"))
NAMES = [path.stem for path in LAUNCHER_FILES]


@pytest.fixture
def config() -> RunConfig:
    return RunConfig(
        model="model_configs/llama_30m.json",
        output="run",
        precision="fp32",
        data={"train": [{"shards": "data"}]},
        batch={"tokens_per_step": 4096, "sequences_per_micro_batch": 1},
        optim={"learning_rate": 1e-3},
    )


@pytest.fixture
def environment(monkeypatch):
    """Sets the environment variables that accelerate sets for a launcher file."""

    def set_up(path: Path, processes: int = 2) -> None:
        for name, value in launcher_environment(path, processes).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("WORLD_SIZE", str(processes))

    return set_up


def changed(path: Path, folder: Path, section: str | None, **values) -> Path:
    settings = yaml.safe_load(path.read_text())
    (settings.setdefault(section, {}) if section else settings).update(values)
    (folder / path.name).write_text(yaml.safe_dump(settings))
    return folder / path.name


@pytest.mark.parametrize("path", LAUNCHER_FILES, ids=NAMES)
def test_shipped_files_select_a_supported_strategy_and_conflict_with_no_recipe(path, config, environment):
    environment(path)
    expected = {"single": "ddp", "zero3_offload": "zero3", "zero3_offload_nvme": "zero3", "mesh": "fsdp2"}.get(
        path.stem, path.stem
    )
    assert launched_strategy() == expected and expected in STRATEGIES
    assert launcher_problems(config, "fp32", expected) == []
    assert launcher_file_problems(path, expected) == []


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "cp", "zero3"])
def test_the_environment_for_torchrun_selects_the_same_strategy_as_the_file(name, config, monkeypatch):
    page = (ROOT / "docs/gpu_setup.md").read_text()
    said = re.search(rf"^\| {name} \| (?:`(.*)`)? \|$", page.partition("## torchrun")[2], re.MULTILINE)[1] or ""
    variables = dict(word.split("=") for word in said.split())
    shipped = launcher_environment(ROOT / f"accelerate_configs/{name}.yaml", 2)
    assert {key: shipped[key].lower() for key in variables} == {key: text.lower() for key, text in variables.items()}
    for key, text in {**variables, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, text)
    assert launched_strategy() == name and strategy_class(config) is strategy_named(name)


@pytest.mark.parametrize(
    ("flags", "sizes", "name"),
    [
        (["FSDP", "DEEPSPEED"], {}, "DEEPSPEED and FSDP"),
        (["DEEPSPEED"], {"TP": "2"}, "DEEPSPEED with parallelism_config_tp_size"),
        ([], {"TP": "1"}, "ddp"),
    ],
)
def test_unsupported_launches_are_named_and_rejected(config, monkeypatch, flags, sizes, name):
    for flag in flags:
        monkeypatch.setenv(f"ACCELERATE_USE_{flag}", "true")
    for dimension, size in sizes.items():
        monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{dimension}_SIZE", size)
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert launched_strategy() == name
    with pytest.raises(InputError, match=r"no size above 1|not a supported strategy|deepspeed"):
        strategy_class(config)


@pytest.mark.parametrize(
    ("file", "settings", "micro_batches"),
    [
        ("tp", {"parallelism_config_tp_size": 2}, 2),
        ("fsdp_tp", {"parallelism_config_tp_size": 4}, 1),
        ("cp", {}, 1),
        ("cp", {"parallelism_config_cp_size": 2}, 2),
        ("hsdp", {}, 4),
        ("pp", {}, 4),
    ],
)
def test_a_micro_step_is_split_according_to_the_launched_sizes(environment, tmp_path, file, settings, micro_batches):
    environment(changed(ROOT / f"accelerate_configs/{file}.yaml", tmp_path, "parallelism_config", **settings), 4)
    assert micro_batches_launched() == micro_batches == launched_layout(file).micro_batches


@pytest.mark.parametrize("path", LAUNCHER_FILES, ids=NAMES)
def test_every_line_of_a_shipped_file_is_commented_and_known(path):
    text = path.read_text()
    assert text.startswith("#") and f"accelerate_configs/{path.stem}.yaml" in text
    settings = yaml.safe_load(text)
    known = {action.dest for action in launch_command_parser()._actions}
    known |= {"compute_environment", "distributed_type", "fsdp_config", "deepspeed_config", "parallelism_config"}
    assert not settings.keys() - known
    assert "mixed_precision" not in settings and "use_cpu" not in settings, (
        "the recipe sets the precision, and use_cpu starts only one process"
    )


@pytest.mark.parametrize("path", DEEPSPEED_FILES, ids=lambda path: path.stem)
def test_deepspeed_files_contain_only_sharding_offload_and_communication(path, config):
    assert deepspeed_problems(str(path), {}, config) == []
    assert json.loads(path.read_text()).keys() <= {"zero_optimization", "aio", "zero_force_ds_cpu_optimizer"}


def test_unknown_keys_are_reported_with_the_nearest_known_key(tmp_path):
    fsdp2 = ROOT / "accelerate_configs/fsdp2.yaml"
    (problem,) = launcher_file_problems(
        changed(fsdp2, tmp_path, "fsdp_config", fsdp_reshard_after_forwrd=False), "fsdp2"
    )
    assert "fsdp_config.fsdp_reshard_after_forwrd is unknown and would be ignored" in problem
    assert "did you mean fsdp_reshard_after_forward?" in problem
    (problem,) = launcher_file_problems(changed(fsdp2, tmp_path, "parallelism_config", dp_replicate=2), "fsdp2")
    assert "parallelism_config.dp_replicate is unknown" in problem


def test_all_problems_of_a_deepspeed_file_are_reported_at_once(tmp_path, config):
    path = tmp_path / "zero.json"
    settings = {
        "zero_optimization": {
            "stage": 3,
            "overlap_com": True,
            "offload_optimizer": {"device": "nvme"},
            "offload_param": {"device": "nvme", "pin": True},
        },
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "train_batch_size": "auto",
        "zero_optimisation": {},
        "aio": {"queue_dept": 8},
    }
    path.write_text(json.dumps(settings))
    problems = "\n".join(deepspeed_problems(str(path), {}, config))
    for message in (
        "gradient_clipping: 0.5 conflicts with the recipe's optim.max_grad_norm: 1.0; remove it from zero.json",
        'bf16: {"enabled": true} conflicts with the recipe\'s precision: fp32',
        "zero_optimisation is not a supported key; did you mean zero_optimization?",
        "zero_optimization.overlap_com is unknown; did you mean overlap_comm?",
        "zero_optimization.offload_param.pin is unknown",
        "aio.queue_dept is unknown; did you mean queue_depth?",
        "offload_optimizer.nvme_path is missing; set it to a folder on a local disk",
        "offload_param.device: nvme is not supported; use cpu",
    ):
        assert message in problems
    assert "train_batch_size" not in problems, "auto means the recipe's value"


def test_unusable_deepspeed_files_are_reported(tmp_path, config):
    assert "cannot be read from" in deepspeed_problems("no/such.json", {}, config)[0]
    assert "neither a deepspeed_config_file nor a zero_stage" in deepspeed_problems(None, {}, config)[0]
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 0}}')
    assert "stage must be 1, 2 or 3, got 0" in deepspeed_problems(str(tmp_path / "zero.json"), {}, config)[0]


@pytest.mark.parametrize(
    ("name", "section", "setting", "message"),
    [
        ("ddp", None, {"mixed_precision": "bf16"}, "bf16 conflicts with the recipe's precision: fp32"),
        ("zero2", "deepspeed_config", {"gradient_accumulation_steps": 4}, "recipe's batch.tokens_per_step: 4096"),
        ("zero2", "deepspeed_config", {"gradient_clipping": 0.3}, "recipe's optim.max_grad_norm: 1.0"),
        ("fsdp2", "fsdp_config", {"fsdp_activation_checkpointing": True}, "recipe's activation_checkpointing: none"),
        ("ddp", "dynamo_config", {"dynamo_backend": "INDUCTOR"}, "recipe's compile: auto"),
    ],
)
def test_settings_that_conflict_with_the_recipe_are_reported(
    config, environment, tmp_path, name, section, setting, message
):
    environment(changed(ROOT / f"accelerate_configs/{name}.yaml", tmp_path, section, **setting))
    assert [problem for problem in launcher_problems(config, "fp32", name) if message in problem]


def test_the_recipe_s_clipping_may_be_written_as_an_integer(config, environment, tmp_path):
    environment(changed(ROOT / "accelerate_configs/zero2.yaml", tmp_path, "deepspeed_config", gradient_clipping=1))
    assert "gradient_clipping" not in " ".join(launcher_problems(config, "fp32", "zero2"))


TP = {"use the parallelism config": "yes", "tensor parallelism size": "2", "How many GPU": "2"}
CPU_OFFLOAD = {"ZeRO optimization": "3", "offload optimizer": "cpu", "offload param": "cpu"}


@pytest.mark.parametrize(
    ("answers", "strategy"),
    [
        ({}, "ddp"),
        ({"mixed precision": "bf16"}, "ddp"),
        (FSDP2, "fsdp2"),
        (FSDP2 | TP, "fsdp_tp"),
        (DEEPSPEED, "zero2"),
        (DEEPSPEED | {"ZeRO optimization": "1"}, "zero1"),
        (DEEPSPEED | CPU_OFFLOAD | {"gradient clipping\\?": "yes"}, "zero3"),
        (DEEPSPEED | {"specify a json": "yes", "path to the json": "ds_configs/zero3.json"}, "zero3"),
    ],
    ids=["ddp", "ddp bf16", "fsdp2", "fsdp_tp", "zero2", "zero1", "zero3 offload", "zero3 json"],
)
def test_files_made_by_accelerate_config_run(config, environment, tmp_path, monkeypatch, answers, strategy):
    path = accelerate_config(tmp_path / "mine.yaml", TWO_GPUS | answers, monkeypatch)
    environment(path)
    assert launched_strategy() == strategy
    assert launcher_problems(config, "bf16", strategy) == []
    assert launcher_file_problems(path, strategy) == []


def test_files_made_by_accelerate_config_train_the_same(tmp_path, shards, monkeypatch):
    """ZeRO-2 without a JSON file must have the same losses as FSDP2."""
    recipe = tmp_path / "recipe.yaml"
    values = {
        "model": {"config": "model_configs/llama_demo.json", "vocab_size": "auto", "num_hidden_layers": 1},
        "output": str(tmp_path / "zero2"),
        "precision": "fp32",
        "data": {"train": [{"shards": str(shards)}], "validation": [], "sequence_length": 64},
        "batch": {"tokens_per_step": 256, "sequences_per_micro_batch": 1},
        "optim": {"learning_rate": 0.003, "warmup_steps": 0},
        "budget": {"steps": 2},
        "compile": "none",
        "checkpoint": {"save_final": False},
        "logging": {"every_steps": 1},
    }
    recipe.write_text(yaml.safe_dump(values))
    for name, answers in {"zero2": DEEPSPEED, "fsdp2": FSDP2}.items():
        path = accelerate_config(tmp_path / f"{name}.yaml", TWO_GPUS | answers, monkeypatch)
        launch(path, 2, "train.py", "--config", recipe, "--output", tmp_path / name)
        assert json.loads((tmp_path / name / "strategy.json").read_text())["strategy"] == name
    assert losses(tmp_path / "zero2") == pytest.approx(losses(tmp_path / "fsdp2"), abs=1e-6)


def test_zero_without_a_json_uses_the_files_settings(environment, tmp_path, monkeypatch):
    environment(accelerate_config(tmp_path / "mine.yaml", TWO_GPUS | DEEPSPEED | CPU_OFFLOAD, monkeypatch))
    cpu = {"device": "cpu"}
    zero = {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}
    assert launched_layout("zero3").zero == zero


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"torch dynamo": "yes"}, "dynamo_backend: INDUCTOR conflicts with the recipe's compile: auto"),
        ({"Megatron": "yes"}, "distributed_type: MEGATRON_LM is not supported; use NO, MULTI_CPU, MULTI_GPU, FSDP or"),
        (DEEPSPEED | {"ZeRO optimization": "0"}, "launcher: zero_optimization.stage must be 1, 2 or 3, got 0"),
        (DEEPSPEED | {"offload optimizer": "nvme"}, "accelerate does not forward the NVMe path"),
        (DEEPSPEED | {"gradient accumulation steps": "4"}, "the recipe's batch.tokens_per_step"),
        (FSDP2 | {"activation checkpointing": "yes"}, "the recipe's activation_checkpointing: none"),
    ],
)
def test_unsupported_files_made_by_accelerate_config_are_reported(
    config, environment, tmp_path, monkeypatch, answers, message
):
    path = accelerate_config(tmp_path / "mine.yaml", TWO_GPUS | answers, monkeypatch)
    environment(path)
    strategy = launched_strategy()
    problems = launcher_problems(config, "bf16", strategy) + launcher_file_problems(path, strategy)
    assert [problem for problem in problems if message in problem], problems


def test_fsdp_version_1_is_rejected(config, environment, tmp_path, monkeypatch):
    environment(accelerate_config(tmp_path / "mine.yaml", TWO_GPUS | FSDP2 | {"FSDP version": "1"}, monkeypatch))
    with pytest.raises(InputError, match="set fsdp_version: 2 in your own"):
        strategy_class(config)


def test_several_processes_on_cpus_are_refused_if_accelerate_starts_one(tmp_path, monkeypatch):
    answers = {"type of machine": "multi-CPU", "How many processes": "2"}
    path = accelerate_config(tmp_path / "mine.yaml", answers, monkeypatch)
    monkeypatch.setattr(
        "pretrain.mesh_sizes.launcher_command", lambda: (["--config_file", str(path), "train.py"], ROOT)
    )
    (problem,) = command_problems("single")
    assert problem.startswith("launcher: num_processes: 2 was requested, but 1 was started; remove --cpu")
    words = ["--config_file", str(path), "--num_processes", "1", "train.py"]
    monkeypatch.setattr("pretrain.mesh_sizes.launcher_command", lambda: (words, ROOT))
    assert command_problems("single") == []
    monkeypatch.setattr("pretrain.mesh_sizes.launcher_command", lambda: (["train.py"], ROOT))
    assert command_problems("single") == [], "there is no default config file"
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(path))
    assert command_problems("single") == [problem]


def test_a_deepspeed_file_for_the_trainer_leaves_precision_to_the_recipe(tmp_path, config):
    path = tmp_path / "trainer.json"
    half = {"enabled": "auto"}
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "bf16": half, "fp16": {**half, "loss_scale": 0}}))
    assert deepspeed_problems(str(path), {}, config) == []


def test_a_file_for_another_strategy_is_reported():
    (problem,) = launcher_file_problems(ROOT / "accelerate_configs/zero3.yaml", "single")
    assert "distributed_type: DEEPSPEED was requested, but single was started; remove --cpu" in problem


def test_the_launchers_command_line_is_compared_with_the_launch(monkeypatch):
    """Options must be read in both spellings, but only if they come before the script name."""
    words = ["--config_file", "a.yaml", "--num_processes=4", "train.py", "--num_processes", "2"]
    monkeypatch.setattr("pretrain.mesh_sizes.launcher_command", lambda: (words, Path("nowhere")))
    monkeypatch.setattr(launcher_files, "launcher_file_problems", lambda path, strategy: [f"{path} for {strategy}"])
    assert command_problems("ddp")[0].startswith("launcher: num_processes: 4 was requested, but 1 was started;")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert command_problems("ddp") == ["nowhere/a.yaml for ddp"]


def test_the_launcher_itself_is_checked(tmp_path, shards):
    """Real launches must detect that --cpu starts only one process, and must report problems in the launcher file and
    the recipe together."""
    recipe = tmp_path / "recipe.yaml"
    values = {
        "model": "model_configs/llama_30m.json",
        "output": str(tmp_path / "run"),
        "precision": "fp32",
        "data": {"train": [{"shards": str(shards)}], "sequence_length": 64},
        "batch": {"tokens_per_step": 256, "sequences_per_micro_batch": 1},
        "optim": {"learning_rate": 0.003},
        "compile": "full",
    }
    recipe.write_text(yaml.safe_dump(values))
    launcher = ["-m", "accelerate.commands.launch", "--config_file"]
    command = ["--main_process_port", free_port(), "train.py", "--config", recipe]
    two = ["--num_processes", "2", "--cpu"]
    refused = run_script(*launcher, "accelerate_configs/ddp.yaml", *two, *command, check=False, fresh=True)
    assert "num_processes: 2 was requested, but 1 was started" in refused.stderr

    path = changed(ROOT / "accelerate_configs/fsdp2.yaml", tmp_path, "fsdp_config", fsdp_offload_param=True)
    refused = run_script(*launcher, path, "--num_processes", "1", *command, check=False, fresh=True)
    assert refused.returncode != 0 and not (tmp_path / "run").exists()
    assert "fsdp_config.fsdp_offload_param is unknown" in refused.stderr
    assert "did you mean fsdp_offload_params?" in refused.stderr
    assert "compile: full is not supported with fsdp2; use auto or none or regional" in refused.stderr


SLURM_COMMANDS = {
    "scontrol": "echo node0; echo node1",
    "srun": '[ "${1#--kill}" != "$1" ] && shift; SLURM_NODEID=1 exec "$@"',
    "python": 'echo "$@"',
}


@pytest.mark.parametrize("name", ["one_node", "many_nodes"])
def test_slurm_scripts_pass_on_their_arguments(name, tmp_path):
    """The unmodified scripts must pass on their arguments. Python and the Slurm commands are stubs."""
    for command, text in SLURM_COMMANDS.items():
        (tmp_path / command).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / command).chmod(0o755)
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_NODELIST": "node[0-1]"}
    said = subprocess.run(
        ["bash", f"slurm/{name}.sbatch", "hsdp", "recipes/llama_125m.yaml", "--seed", "3"],
        cwd=ROOT,
        env={**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": "python"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    arguments = launch_command_parser().parse_args(said[2:])
    assert said[:2] == ["-m", "pretrain.launch"] and arguments.config_file == "accelerate_configs/hsdp.yaml"
    assert [arguments.training_script, *arguments.training_script_args] == [
        *("train.py", "--config", "recipes/llama_125m.yaml", "--seed", "3"),
    ]
    if name == "one_node":
        assert (arguments.num_processes, arguments.main_process_port) == (8, 20007)
    else:
        assert (arguments.num_processes, arguments.num_machines, arguments.machine_rank) == (16, 2, 1)
        assert (arguments.main_process_ip, arguments.main_process_port) == ("node0", 20007)


def test_the_shipped_deepspeed_files_are_found_from_any_folder(config, environment, tmp_path, monkeypatch):
    environment(ROOT / "accelerate_configs/zero3.yaml")
    monkeypatch.chdir(tmp_path)
    assert launched_strategy() == "zero3" and launcher_problems(config, "fp32", "zero3") == []


def test_a_tool_ignores_modules_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "pretrain_tools.py").write_text("raise SystemExit('not the tools')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ToolError, match=r"No module named pretrain_tools\.unknown"):
        run_tool("unknown")


def test_a_tool_may_print_invalid_text(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nprintf 'one \\377 byte\\n' >&2; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(ToolError, match="one \ufffd byte"):
        run_tool("evaluation.answers")
