"""Tests for cluster configs: valid keys, and commands that the scripts accept."""

import os
import re
import shlex
import shutil
import subprocess

import jsonschema
import pytest
import yaml
from accelerate.commands.launch import launch_command_parser

from pretrain import errors
from pretrain.recipe import read_command_line
from pretrain.training.run_plan import sequences_of
from support.cluster_schemas import JOBSET, SKYPILOT
from support.pages import commands_in
from support.project import ROOT, run_script

PAGE = ROOT / "docs/spot.md"
COMMANDS = [c.text for c in commands_in(PAGE.name, PAGE.read_text()) if c.section == "Supported platforms"]
ENDS = {errors.EXIT_BAD_INPUT, errors.EXIT_NUMERIC, errors.EXIT_NO_VALID_CHECKPOINT, errors.EXIT_CRASH_LOOP}
"""Exit statuses after which a restart would fail again."""


def document(name: str) -> dict:
    return yaml.safe_load((ROOT / name).read_text())


def read_launch(script: str, **variables) -> tuple:
    """Returns (launcher arguments, recipe) of the only pretrain.launch call in a shell script, or raises its error."""
    text = script.replace("\\\n", " ")
    line = next(line for line in text.splitlines() if "pretrain.launch" in line)
    shell = {**os.environ, **variables}
    words = subprocess.run(
        ["bash", "-euc", f"exec() {{ printf '%s\\n' \"$@\"; }}; exec {line.strip().removeprefix('exec ')}"],
        env=shell, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    words = words[words.index("pretrain.launch") + 1 :]
    words = words[words[0] == "--supervise" :]
    own = launch_command_parser().parse_args(words)
    assert (ROOT / own.config_file).is_file() and own.training_script == "train.py"
    return own, read_command_line(own.training_script_args, "").config


def test_skypilot_restarts_only_resumable_runs():
    task = document("clusters/skypilot.yaml")
    jsonschema.validate(task, SKYPILOT)
    recovery = task["resources"]["job_recovery"]
    assert task["resources"]["use_spot"] and recovery["max_restarts_on_errors"] == 0
    assert set(recovery["recover_on_exit_codes"]) == {errors.CRASHED, errors.EXIT_PREEMPTED}
    machine = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    own, recipe = read_launch(task["run"], **machine, SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2", **task["envs"])
    assert (own.num_processes, own.machine_rank, own.main_process_ip) == (16, 1, "10.0.0.1")
    assert recipe.checkpoint.mirror == task["envs"]["MIRROR"]
    sequences_of(recipe, int(task["resources"]["accelerators"].partition(":")[2]) * task["num_nodes"])
    assert subprocess.run(["bash", "-n", "-c", task["setup"]]).returncode == 0


@pytest.mark.parametrize(("file", "machines"), [("kubernetes", 1), ("kubernetes_infiniband", 2)])
def test_kubernetes_starts_all_machines_again_or_none(file, machines):
    jobset = document(f"clusters/{file}.yaml")
    jsonschema.validate(jobset, JOBSET)
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert spec["parallelism"] == spec["completions"] == int(variables["MACHINES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(variables["GPUS"])
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["containerName"] == container["name"]
    assert set(rule["onExitCodes"]["values"]) == ENDS | {errors.EXIT_INTERRUPTED}
    assert pod["restartPolicy"] == "Never", "podFailurePolicy requires restartPolicy Never"
    (policy,) = jobset["spec"]["failurePolicy"]["rules"]
    assert policy["action"] == "FailJobSet" and policy["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert {v["name"] for v in pod["volumes"]} == {m["name"] for m in container["volumeMounts"]}
    own, recipe = read_launch(container["args"][0], JOB_COMPLETION_INDEX="0", **variables)
    name = jobset["metadata"]["name"]
    assert own.main_process_ip == f"{name}-{job['name']}-0-0.{name}", "the main process must be the first pod"
    assert (own.num_machines, own.num_processes) == (machines, 8 * machines)
    sequences_of(recipe, own.num_processes)
    assert recipe.checkpoint.mirror == variables["MIRROR"]
    assert pod["terminationGracePeriodSeconds"] >= recipe.checkpoint.mirror_wait_seconds


def test_kubernetes_with_infiniband_has_its_devices_and_may_lock_memory():
    """The file differs from clusters/kubernetes.yaml only in the fields that NCCL needs for InfiniBand."""
    jobset, plain = (document(f"clusters/{name}.yaml") for name in ("kubernetes_infiniband", "kubernetes"))
    (job,), (plain_job,) = jobset["spec"]["replicatedJobs"], plain["spec"]["replicatedJobs"]
    spec, plain_spec = (each["template"]["spec"] for each in (job, plain_job))
    pod, plain_pod = (each["template"]["spec"] for each in (spec, plain_spec))
    (container,), (plain_container,) = pod["containers"], plain_pod["containers"]
    assert container["resources"]["limits"].pop("rdma/hca") == 1
    assert container.pop("securityContext") == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert container["env"].pop(0) == {"name": "MACHINES", "value": "2"} and plain_container["env"].pop(0)
    assert spec.pop("parallelism") == spec.pop("completions") == 2
    del plain_spec["parallelism"], plain_spec["completions"]
    (runs,), (plain_runs,) = ([v for v in each["volumes"] if v["name"] == "runs"] for each in (pod, plain_pod))
    assert runs.pop("persistentVolumeClaim") and plain_runs.pop("emptyDir") == {}
    assert jobset == plain


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("securityContext", {"capabilities": {"add": ["CAP_IPC_LOCK"]}}),
        ("securityContext", {"capabilities": ["IPC_LOCK"]}),
        ("securityContext", {"add": ["IPC_LOCK"]}),
        ("resources", {"limits": {"hca": 1}}),
    ],
)
def test_a_wrong_permission_or_device_is_detected(section, values):
    jobset = document("clusters/kubernetes_infiniband.yaml")
    (job,) = jobset["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    container[section] = values
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(jobset, JOBSET)


@pytest.mark.parametrize(("path", "key"), [("skypilot", "use_spots"), ("kubernetes", "failurePolicies")])
def test_a_misspelled_key_is_detected(path, key):
    values = document(f"clusters/{path}.yaml")
    (values["resources"] if path == "skypilot" else values["spec"])[key] = True
    with pytest.raises(jsonschema.ValidationError, match=key):
        jsonschema.validate(values, SKYPILOT if path == "skypilot" else JOBSET)


@pytest.mark.parametrize("command", [c for c in COMMANDS if "pretrain.launch" in c], ids=lambda c: c.split()[0])
def test_commands_that_launch_are_accepted(command):
    launcher, recipe = read_launch("python " + command[command.index("-m pretrain.launch") :])
    assert launcher.num_processes >= 1 and recipe.checkpoint.every_steps, (
        "a command that restarts needs regular checkpoints"
    )


def test_hugging_face_takes_its_command():
    (command,) = [command for command in COMMANDS if command.startswith("hf jobs run")]
    words = shlex.split(command.replace("hf jobs run", "jobs run --dry-run --namespace me"))
    code = "import sys; from huggingface_hub.cli.hf import main; sys.argv[0] = 'hf'; main()"
    shown = run_script("-c", code, *words, HF_TOKEN="hf_x", timeout=120, fresh=True)
    assert "Job not submitted" in shown.stdout + shown.stderr and "hf_x" not in shown.stdout


def test_each_platform_has_one_command():
    firsts = [re.match(r"\S+ \S+ \S+", command)[0] for command in COMMANDS]
    assert firsts == [
        "python -m pretrain.launch", "sbatch slurm/one_node.sbatch ddp", "docker build --tag", "docker run --init",
        "sky jobs launch", "kubectl apply -f", "hf jobs run",
    ]  # fmt: skip
    files = re.findall(
        r"`((?:slurm|clusters)/\w+\.\w+|Dockerfile)`", PAGE.read_text().partition("## Supported platforms")[2]
    )
    assert {path.name for path in (ROOT / "clusters").iterdir()} <= {file.rpartition("/")[2] for file in files}
    assert all((ROOT / file).is_file() for file in files)


def instructions() -> list[tuple[str, str]]:
    """Returns the Dockerfile's (instruction, arguments) pairs, with continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def test_the_dockerfile_is_well_formed():
    """The Dockerfile uses only known instructions, valid shell code, existing files and declared arguments. The test
    doesn't need Docker."""
    known = {"ARG", "FROM", "RUN", "COPY", "WORKDIR", "ENV", "CMD"}
    stages, declared, device = [], set(), None
    for word, text in instructions():
        assert word in known, word
        if word == "FROM":
            base, _, stage = text.partition(" AS ")
            assert ":" in base or base == "${DEVICE}", "each base image must have a version"
            stages.append(stage)
            declared = set()
        elif word == "ARG":
            name, _, value = text.partition("=")
            declared.add(name)
            device = value if name == "DEVICE" and not stages else device
        elif word == "RUN":
            assert subprocess.run(["bash", "-n", "-c", text]).returncode == 0, text
            assert set(re.findall(r"\$\{?([A-Z]+)", text)) <= declared, text
        elif word == "COPY":
            assert all((ROOT / source).exists() for source in text.split()[:-1])
    assert stages == ["cpu", "cuda", ""] and device in stages
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {"data", "runs", "tokenizers", "sweeps", ".venv"} <= set(ignored)
    assert set(re.findall(r"^/(\w+)/$", (ROOT / ".gitignore").read_text(), re.MULTILINE)) <= set(ignored)
    assert re.search(r"^torch==[\d.]+$", (ROOT / "requirements.txt").read_text(), re.MULTILINE), (
        "the pinned version must match the Dockerfile's grep pattern"
    )


def has_docker() -> bool:
    """Returns True if Docker is installed and its daemon answers."""
    return (
        shutil.which("docker") is not None and subprocess.run(["docker", "info"], capture_output=True).returncode == 0
    )


@pytest.mark.skipif(os.environ.get("IMAGES") != "all", reason="needs the network and minutes: IMAGES=all")
@pytest.mark.skipif(not has_docker(), reason="needs Docker")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_image_builds_and_its_scripts_answer(device):
    tag = f"groundwork-test:{device}"
    subprocess.run(["docker", "build", "--tag", tag, "--build-arg", f"DEVICE={device}", "."], cwd=ROOT, check=True)
    shown = subprocess.run(["docker", "run", "--rm", tag], capture_output=True, text=True, check=True).stdout
    assert "--config" in shown
    code = "import torch, transformers, accelerate, deepspeed, s3fs"
    subprocess.run(["docker", "run", "--rm", tag, "python", "-c", code], check=True)
