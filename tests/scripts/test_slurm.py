"""Tests for the batch scripts: on a real SLURM cluster with three simulated nodes, and faster with mock commands."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed.elastic.multiprocessing.api import PContext
from torch.distributed.launcher.api import LaunchConfig

from pretrain.launch import wait_for_checkpoints
from support.project import ROOT, events, losses
from support.slurm_cluster import INSTALL, missing, running_cluster, wait_for

SCRIPTS = ("one_node", "many_nodes")
SOON = 300
"""Timeout in seconds for work that usually takes twenty, with a margin for busy machines."""
LIMITS = 2
LONG = ("--budget.steps", "100000", "--checkpoint.every_steps", "100000", "--validation.every_steps", "100000")
SLOW_TRAIN = f"""
import runpy
import time

import torch

backward = torch.Tensor.backward
torch.Tensor.backward = lambda *given, **named: (time.sleep(0.1), backward(*given, **named))
runpy.run_path("{ROOT}/train.py", run_name="__main__")
"""
"""A train.py that leaves CPU time for other tests while its jobs wait for SLURM."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if missing():
        pytest.skip(f"no {', '.join(missing())} found, so the real SLURM isn't tested; install as root: {INSTALL}")
    with running_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def repository(tmp_path):
    """A copy of the repository with SLOW_TRAIN as train.py."""
    (tmp_path / "repository").mkdir()
    for path in ROOT.iterdir():
        (tmp_path / "repository" / path.name).symlink_to(path)
    (tmp_path / "repository/train.py").unlink()
    (tmp_path / "repository/train.py").write_text(SLOW_TRAIN)
    return tmp_path / "repository"


def submit(cluster, repository, script, recipe, run, *settings) -> str:
    """Submits a two-process job that gets a signal two minutes before the time limit. Returns its ID."""
    gpus = 2 if script == "one_node" else 1
    options = (f"--gpus-per-node={gpus}", "--cpus-per-task=1", "--time=60", "--signal=B:USR1@120")
    job = cluster.ask(
        "sbatch", "--parsable", f"--chdir={repository}", f"--output={run}.out", *options, f"slurm/{script}.sbatch",
        "ddp", recipe, "--output", run, *settings, PYTHON=sys.executable, HF_HUB_OFFLINE="1",
    )  # fmt: skip
    return job.strip()


def test_repeated_time_limits_lose_no_step(cluster, repository, recipe, tmp_path):
    """SLURM checks time limits only twice a minute, so after the first one, the test sends the signals itself."""

    def through_time_limits(script):
        run = tmp_path / script
        job = submit(cluster, repository, script, recipe, run, *LONG)

        def has_trained_on():
            with contextlib.suppress(FileNotFoundError):
                starts = [end["step"] for end in events(run, "end")]
                return len(events(run, "start")) > len(starts) and max(losses(run), default=0) > max(starts, default=0)

        for limit in range(LIMITS):
            wait_for(has_trained_on, cluster, SOON)
            if limit == 0:
                hours, minutes, _ = cluster.job(job)["RunTime"].split(":")
                cluster.ask("scontrol", "update", f"JobId={job}", f"TimeLimit={60 * int(hours) + int(minutes) + 2}")
            else:
                cluster.ask("scancel", "--batch", "--signal=USR1", job)
            wait_for(lambda limit=limit: cluster.job(job)["Restarts"] == str(limit + 1), cluster, SOON)
            cluster.ask("scontrol", "update", f"JobId={job}", "TimeLimit=60")
        wait_for(has_trained_on, cluster, SOON)
        cluster.ask("scancel", job)
        wait_for(lambda: cluster.job(job)["JobState"] == "CANCELLED", cluster, SOON)
        assert cluster.job(job)["Restarts"] == str(LIMITS), "a canceled job must not be requeued"
        output = run.with_suffix(".out").read_text()
        assert "Traceback" not in output, output
        ends, resumes = events(run, "end"), events(run, "resume")
        assert [end["code"] for end in ends] == [75] * (LIMITS + 1), output
        assert [resume["step"] for resume in resumes] == [end["step"] for end in ends[:-1]], output
        assert events(run, "checkpoint")[-1]["step"] == ends[-1]["step"] > ends[-2]["step"]

    with ThreadPoolExecutor() as both:
        list(both.map(through_time_limits, SCRIPTS))


def test_a_time_limit_before_the_first_process_requeues(cluster, repository, recipe, tmp_path):
    """SLURM only signals existing processes."""
    job = submit(cluster, repository, "one_node", recipe, tmp_path / "run", *LONG)
    wait_for(lambda: f"{job}.0" in cluster.ask("squeue", "-h", "--steps", "-o", "%i"), cluster)
    cluster.ask("scancel", "--batch", "--signal=USR1", job)
    wait_for(lambda: cluster.job(job)["Restarts"] == "1", cluster, SOON)
    cluster.ask("scancel", job)
    assert not (tmp_path / "run").exists() or not losses(tmp_path / "run")


def test_bad_input_ends_a_job_with_its_problems(cluster, recipe, tmp_path):
    job = submit(cluster, ROOT, "one_node", recipe, tmp_path / "run", "--batch.tokens_per_step", "250")
    wait_for(lambda: cluster.job(job)["JobState"] == "FAILED", cluster, SOON)
    said = (tmp_path / "run.out").read_text()
    assert cluster.job(job)["ExitCode"] == "2:0" and said.count("batch.tokens_per_step: 250 is not") == 1, said


def test_the_cluster_rejects_a_job_without_enough_gpus(cluster):
    asked = cluster.ask("sbatch", "--test-only", "slurm/one_node.sbatch", "ddp", "recipes/demo.yaml", check=False)
    assert "Requested node configuration is not available" in asked, (
        "the test cluster must reject a job with eight GPUs"
    )


@pytest.mark.parametrize("reads_the_variable", [True, False])
def test_torchrun_waits_for_the_checkpoint_on_every_torch(monkeypatch, reads_the_variable):
    """torchrun waits 270 s for checkpoints, even on torch 2.11, which ignores the variable set by slurm/job.sh."""
    if not reads_the_variable:
        monkeypatch.delitem(LaunchConfig.__dataclass_fields__, "shutdown_timeout")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "270")
    monkeypatch.setattr(PContext.close, "__defaults__", (None, 30))
    wait_for_checkpoints()
    assert PContext.close.__defaults__ == (None, 30 if reads_the_variable else 270)
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    wait_for_checkpoints()
    assert os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "300"


SRUN = """#!/bin/bash
# Its task, which saves at SIGTERM; srun itself does not pass that on, but kills.
echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT $SRUN_CPUS_PER_TASK $*" > "$LOG/srun.log"
[ -n "$STATUS" ] && exit "$STATUS"
bash -c 'trap "echo saved > $LOG/saved; exit 75" TERM; echo $$ > "$LOG/task"; while :; do sleep 0.05; done' &
task=$!
trap 'kill -KILL $task; exit 137' TERM
wait $task
"""
SCONTROL = """#!/bin/bash
case $1 in
    show) echo localhost ;;
    listpids) echo "PID JOBID STEPID"; [ -f "$LOG/task" ] && echo "$(cat "$LOG/task") $2 0" ;;
    *) echo "$*" >> "$LOG/scontrol.log" ;;
esac
"""
SCANCEL = """#!/bin/bash
echo "$*" >> "$LOG/scancel.log"
kill -TERM "$(cat "$LOG/task")"
"""


@pytest.fixture
def slurm(tmp_path):
    """Environment with mock srun, scontrol and scancel commands that log their arguments."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "2", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "localhost"}
    job |= {"SLURM_CPUS_PER_TASK": "64", "SLURMD_NODENAME": "localhost"}
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(tmp_path), "STATUS": "", "PYTHON": sys.executable}
    return {**os.environ, **job, **own}


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_time_limit_saves_and_requeues(slurm, tmp_path, script):
    command = ["bash", f"slurm/{script}.sbatch", "fsdp2", "recipes/demo.yaml", "--seed", "3"]
    process = subprocess.Popen(command, cwd=ROOT, env=slurm)
    try:
        deadline = time.monotonic() + SOON
        while not (tmp_path / "srun.log").exists():  # the task may not have started
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        for _ in range(2):
            process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=SOON) == 75
    finally:
        process.kill()
    assert (tmp_path / "saved").exists(), "training must get the signal to save"
    assert (tmp_path / "scontrol.log").read_text() == "requeue 7\n"
    assert (tmp_path / "scancel.log").read_text() == "--signal=TERM 7\n", (
        "the signal must be sent only once, because a second one skips the save"
    )
    told = (tmp_path / "srun.log").read_text()
    assert told.startswith("270 64 ") and "--seed 3" in told and "train.py --config" in told
    assert "--max_restarts 9" in told and "-m pretrain.launch" in told
    assert f"--signal=B:USR1@{300}" in (ROOT / f"slurm/{script}.sbatch").read_text(), (
        "the signal must come earlier than torchrun's 270 s"
    )


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("status", [0, 1, 2, 18, 75, 130])
def test_a_run_that_was_told_to_end_is_requeued_and_others_are_not(slurm, tmp_path, script, status):
    command = ["bash", f"slurm/{script}.sbatch", "ddp", "recipes/demo.yaml"]
    result = subprocess.run(command, cwd=ROOT, env={**slurm, "STATUS": str(status)})
    assert result.returncode == status and (tmp_path / "scontrol.log").exists() == (status == 75)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_task_of_a_job_array_requeues_only_itself(slurm, tmp_path, script):
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "STATUS": "75"}
    subprocess.run(["bash", f"slurm/{script}.sbatch", "ddp", "recipes/demo.yaml"], cwd=ROOT, env={**slurm, **array})
    assert (tmp_path / "scontrol.log").read_text() == "requeue 7_3\n"


def test_without_arguments_the_slices_of_prepared_data_are_explained(slurm):
    found = subprocess.run(["bash", "slurm/prepare.sbatch"], cwd=ROOT, env=slurm, capture_output=True, text=True)
    assert found.returncode == 2 and found.stderr.startswith("usage: sbatch ")


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_cannot_run_is_explained_and_nothing_is_started(slurm, tmp_path, script):
    def refusal(*arguments, cwd=ROOT, **environment) -> str:
        command = ["bash", ROOT / f"slurm/{script}.sbatch", *arguments]
        found = subprocess.run(command, cwd=cwd, env={**slurm, **environment}, capture_output=True, text=True)
        assert found.returncode == 2 and not (tmp_path / "srun.log").exists() and not found.stdout
        return found.stderr

    said = refusal()
    assert said.startswith(f"usage: sbatch slurm/{script}.sbatch STRATEGY RECIPE") and "missing" in said
    for part in (" fsdp2 ", " recipes/demo.yaml ", "--partition P --account A --gpus-per-node 4", "Load modules"):
        assert part in said
    assert f"sbatch --test-only slurm/{script}.sbatch" in said
    said = refusal("fsdp", "recipes/mine.yaml")
    assert "there is no accelerate_configs/fsdp.yaml" in said and "RECIPE recipes/mine.yaml: no such file" in said
    assert "submit the script with sbatch" in refusal("ddp", "recipes/demo.yaml", SLURM_JOB_ID="")
    assert "--gpus-per-node N" in refusal("ddp", "recipes/demo.yaml", SLURM_GPUS_ON_NODE="")
    assert "submit from the repository" in refusal("ddp", "recipes/demo.yaml", cwd=tmp_path)
    for name in ("slurm", "recipes", "accelerate_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    assert "run make install, or name the Python" in refusal("ddp", "recipes/demo.yaml", cwd=tmp_path, PYTHON="")
