"""A SLURM of three machines on this one, of each with two GPUs that do not exist: real daemons in a temporary folder.

No systemd, no cgroups, no account database, ports of its own. Needs the packages of Debian and Ubuntu below.
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
"""Their names are their addresses: launchers look for the first of a job."""
SOON = 60
"""Seconds that no machine, however busy, needs for what takes one."""


def missing() -> list[str]:
    """What a cluster needs and this machine lacks."""
    return [name for name in DAEMONS if not shutil.which(name, path=search_path())]


def search_path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin"


class SlurmCluster:
    """SLURM's commands against a cluster that `running_cluster` has started in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": f"{folder}/slurm.conf", "PATH": search_path()}

    def ask(self, *command, check=True, **environment) -> str:
        """What one of SLURM's commands prints, stderr last."""
        done = subprocess.run(
            [*map(str, command)], env={**self.environment, **environment}, capture_output=True, text=True, timeout=SOON
        )
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def job(self, number: str) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        fields = self.ask("scontrol", "show", "job", number).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)


@contextlib.contextmanager
def running_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Starts the daemons in an empty folder; nothing of them is left at the end, however it comes."""
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
                # Killed with this process, in whichever way that ends.
                alike = ("setpriv", "--pdeathsig", "KILL", *command)
                daemons.append(subprocess.Popen(alike, env=cluster.environment, stdout=log, stderr=log))
            wait_for(lambda: (folder / "munge.socket").exists(), cluster)
        wait_for(lambda: cluster.ask("sinfo", "-h", "-N", "-o", "%T", check=False).split().count("idle") == 3, cluster)
        yield cluster
    finally:
        stop(cluster, daemons)


def settings(folder: Path, user: str) -> list[str]:
    """slurm.conf without its machines. A requeued job waits as long as a credential lives, here five seconds."""
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
    """Until the condition holds; fails with the daemons' last lines."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(log.read_text()[-2000:] for log in sorted(cluster.folder.glob("*.log")))
            raise AssertionError(f"not within {seconds:g} s:\n{logs}")
        time.sleep(0.1)


def stop(cluster: SlurmCluster, daemons: list[subprocess.Popen]) -> None:
    """Kills the daemons and everything that they have started."""
    for daemon in reversed(daemons):
        daemon.kill()
        daemon.wait()
    while left := [process for process in psutil.process_iter() if belongs(process, cluster.folder)]:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=SOON)


def belongs(process: psutil.Process, folder: Path) -> bool:
    """Whether the cluster has started it: a step's daemon listens in the folder, its processes have its variable."""
    with contextlib.suppress(psutil.Error):
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        if process.name() == "slurmstepd":
            return any(str(folder) in str(socket.laddr) for socket in process.net_connections("unix"))
        return process.environ().get("SLURM_CONF") == f"{folder}/slurm.conf"
    return False
