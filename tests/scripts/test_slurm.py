"""The batch scripts, with stand-ins for SLURM's own commands."""

import os
import signal
import subprocess
import time

import pytest

from support.project import ROOT

SRUN = """#!/bin/bash
[ -n "$SIGNALS" ] && kill -USR1 $PPID
echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT $*" > "$LOG/srun.log"
trap 'echo saved > "$LOG/saved"; exit 1' TERM
[ -n "$WAITS" ] && { touch "$LOG/runs"; while :; do sleep 0.05; done; }
exit 3
"""
SCONTROL = """#!/bin/bash
[ "$1" = show ] && echo localhost || echo "$*" >> "$LOG/scontrol.log"
"""
SOON = 120
"""Seconds that no machine, however busy, needs for what takes one or two."""


@pytest.fixture
def slurm(tmp_path):
    """An environment in which srun and scontrol write down what they were asked for."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "2", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "localhost"}
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(tmp_path), "WAITS": "", "SIGNALS": ""}
    return {**os.environ, **job, **own}


@pytest.mark.parametrize("script", ["one_node", "many_nodes"])
def test_the_time_limit_saves_and_requeues(slurm, tmp_path, script):
    command = ["bash", f"slurm/{script}.sbatch", "fsdp2", "recipes/demo.yaml", "--seed", "3"]
    process = subprocess.Popen(command, cwd=ROOT, env={**slurm, "WAITS": "yes"})
    try:
        deadline = time.monotonic() + SOON
        while not (tmp_path / "runs").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGUSR1)
        process.wait(timeout=SOON)
    finally:
        process.kill()
    assert (tmp_path / "saved").exists(), "training is told to save"
    assert (tmp_path / "scontrol.log").read_text() == "requeue 7\n"
    told = (tmp_path / "srun.log").read_text()
    assert told.startswith("270 ") and "--seed 3" in told and "train.py --config" in told
    assert "--max_restarts 9" in told
    assert f"--signal=B:USR1@{300}" in (ROOT / f"slurm/{script}.sbatch").read_text(), "before the 270 s of torchrun"


@pytest.mark.parametrize("script", ["one_node", "many_nodes"])
def test_a_time_limit_in_the_first_moment_requeues(slurm, tmp_path, script):
    """Before the script has noted its launcher, or the launcher its own handler."""
    command = ["bash", f"slurm/{script}.sbatch", "ddp", "recipes/demo.yaml"]
    result = subprocess.run(command, cwd=ROOT, env={**slurm, "SIGNALS": "yes", "WAITS": "yes"}, timeout=SOON)
    assert result.returncode != 0 and (tmp_path / "scontrol.log").read_text() == "requeue 7\n"


@pytest.mark.parametrize("script", ["one_node", "many_nodes"])
def test_an_end_of_its_own_is_not_requeued(slurm, tmp_path, script):
    result = subprocess.run(["bash", f"slurm/{script}.sbatch", "ddp", "recipes/demo.yaml"], cwd=ROOT, env=slurm)
    assert result.returncode == 3 and not (tmp_path / "scontrol.log").exists()


@pytest.mark.parametrize("script", ["one_node", "many_nodes", "prepare"])
def test_without_arguments_a_script_explains_itself(slurm, script):
    found = subprocess.run(["bash", f"slurm/{script}.sbatch"], cwd=ROOT, env=slurm, capture_output=True, text=True)
    assert found.returncode == 2 and found.stderr.startswith("usage: sbatch ")
    if script != "prepare":
        for part in (" fsdp2 ", " recipes/demo.yaml ", "--partition P --account A --gpus-per-node 4", "Modules"):
            assert part in found.stderr
