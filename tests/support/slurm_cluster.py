"""Local SLURM cluster with real daemons and three simulated machines, each with two fake GPUs.

It runs in a temporary folder, without systemd, cgroups or an account database. Requires the packages in INSTALL.
"""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from support.project import free_port

DAEMONS = ("munged", "slurmctld", "slurmd")
INSTALL = "apt-get install --no-install-recommends slurm-wlm munge"
MACHINES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
"""Machine names, which are also their addresses, because launchers look up a job's first machine."""
SOON = 60
"""Timeout in seconds for operations that usually take one second."""


def missing() -> list[str]:
    """Returns the required programs that aren't installed."""
    return [name for name in DAEMONS if not shutil.which(name, path=search_path())]


def search_path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin"


class SlurmCluster:
    """A cluster started by `running_cluster` in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": f"{folder}/slurm.conf", "PATH": search_path()}

    def ask(self, *command, check=True, **environment) -> str:
        """Runs a SLURM command and returns its stdout and stderr."""
        done = subprocess.run(
            [*map(str, command)], env={**self.environment, **environment}, capture_output=True, text=True, timeout=SOON
        )
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def job(self, number: str) -> dict[str, str]:
        """Returns the fields of `scontrol show job`."""
        fields = self.ask("scontrol", "show", "job", number).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)


@contextlib.contextmanager
def running_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Starts the daemons in an empty folder, and kills all their processes at the end."""
    cluster = SlurmCluster(folder)
    for name in ("state", *MACHINES):
        (folder / name).mkdir()
    (folder / "cgroup.conf").touch()
    (folder / "munge.key").touch(mode=0o600)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "gres.conf").write_text("AutoDetect=off\nName=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    machines = (f"NodeName={name} NodeAddr={name} Port={free_port()} CPUs=4 Gres=gpu:2" for name in MACHINES)
    lines = [*settings(folder, getpass.getuser()), *machines, "PartitionName=all Nodes=ALL Default=YES"]
    (folder / "slurm.conf").write_text("\n".join(lines))
    munge = ("socket", "key-file", "pid-file", "log-file", "seed-file")
    commands = [
        ("munged", "--foreground", "--force", *(f"--{name}={folder}/munge.{name.split('-')[0]}" for name in munge)),
        ("slurmctld", "-D"),
        *(("slurmd", "-D", "-N", name) for name in MACHINES),
    ]
    daemons = []
    try:
        for number, command in enumerate(commands):
            with open(folder / f"daemon-{number}.log", "w") as log:
                # Ensures that the daemon ends with this process.
                alike = ("setpriv", "--pdeathsig", "KILL", *command)
                daemons.append(subprocess.Popen(alike, env=cluster.environment, stdout=log, stderr=log))
            wait_for(lambda: (folder / "munge.socket").exists(), cluster)
        wait_for(lambda: cluster.ask("sinfo", "-h", "-N", "-o", "%T", check=False).split().count("idle") == 3, cluster)
        yield cluster
    finally:
        stop(cluster, daemons)


def settings(folder: Path, user: str) -> list[str]:
    """Returns slurm.conf without the machines. Requeued jobs wait for cred_expire, which is set to five seconds."""
    return [
        "ClusterName=test", f"SlurmctldHost={socket.gethostname().split('.')[0]}(127.0.0.1)",
        f"SlurmUser={user}", f"SlurmdUser={user}", f"SlurmctldPort={free_port()}",
        "AuthType=auth/munge", "CredType=cred/munge", f"AuthInfo=socket={folder}/munge.socket,cred_expire=5",
        f"StateSaveLocation={folder}/state", f"SlurmdSpoolDir={folder}/%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid", f"SlurmdPidFile={folder}/slurmd-%n.pid",
        "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "JobAcctGatherType=jobacct_gather/none",
        "SwitchType=switch/none", "MpiDefault=none", "MailProg=/bin/true", "ReturnToService=2",
        "SelectType=select/cons_tres", "SelectTypeParameters=CR_CPU", "GresTypes=gpu",
        "SchedulerParameters=sched_interval=2,bf_interval=2", "SlurmdParameters=config_overrides",
    ]  # fmt: skip


def wait_for(condition, cluster: SlurmCluster, seconds: float = SOON) -> None:
    """Waits until the condition holds. On a timeout, fails with the daemons' last log lines."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(log.read_text()[-2000:] for log in sorted(cluster.folder.glob("*.log")))
            raise AssertionError(f"timed out after {seconds:g} s:\n{logs}")
        time.sleep(0.1)


def stop(cluster: SlurmCluster, daemons: list[subprocess.Popen]) -> None:
    """Kills the daemons and all processes that they started."""
    for daemon in reversed(daemons):
        daemon.kill()
        daemon.wait()
    while left := [process for process in psutil.process_iter() if belongs(process, cluster.folder)]:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=SOON)


def belongs(process: psutil.Process, folder: Path) -> bool:
    """Returns True if the cluster started the process."""
    with contextlib.suppress(psutil.Error):
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        if process.name() == "slurmstepd":
            return any(str(folder) in str(socket.laddr) for socket in process.net_connections("unix"))
        return process.environ().get("SLURM_CONF") == f"{folder}/slurm.conf"
    return False
