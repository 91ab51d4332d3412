"""Wraps `accelerate launch` so that runs save before they exit on Ctrl-C, and returns the run's exit status.

    python -m pretrain.launch --config_file accelerate_configs/ddp.yaml --num_processes 2 train.py --config RECIPE
    python -m pretrain.launch --supervise --config_file ...     # restarts the run after crashes

--supervise must come first. All options of `accelerate launch` work as usual. You can also pass
--parallelism_config_pp_size and --parallelism_config_ep_size.

Plain `accelerate launch` exits with a traceback on Ctrl-C (with one process, even before the run has saved),
always returns 1 on failure, and restarts processes up to --max_restarts times even if they exited on purpose.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil

from pretrain.errors import CRASHED, EXIT_BAD_INPUT, EXIT_PREEMPTED
from pretrain.mesh_sizes import take_own_options, variable
from pretrain.processes import status_after

SHUTDOWN_SECONDS = 300
"""How long torchrun waits for its processes after a signal, unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT is set.

The default of 30 s is too short for saving a large model.
"""
SHORTEST_PAUSE_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 300.0
"""Maximum pause before a restart. The pause doubles after every short run."""
LONG_LIFE_SECONDS = 600.0
"""Runtime after which the pause is reset."""


def launch(arguments: list[str]) -> int:
    """Runs `accelerate launch` with these arguments and returns the script's exit status."""
    import torch.distributed.launcher.api
    import torch.distributed.run  # loads all of torchrun, including its loggers
    import yaml
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    wait_for_checkpoints()
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):  # each has its own level; ranks report their own errors
            logging.getLogger(name).setLevel(logging.CRITICAL)
    torch.distributed.launcher.api.LocalElasticAgent = patient_agent()
    sizes, arguments = take_own_options(arguments)
    os.environ.update({variable(name): size for name, size in sizes.items()})
    parsed = launch_command_parser().parse_args(arguments)
    parsed.signals_to_handle = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"  # torchrun's default doesn't include SIGUSR1
    try:
        launch_command(parsed)
    except subprocess.CalledProcessError as ended:  # with one process
        return status_of(ended.returncode)
    except ChildFailedError as failed:
        return status_of(failed.get_first_failure()[1].exitcode)
    except SignalException as asked:
        wait_for_the_rest(asked.sigval)
        return status_after(asked.sigval)
    except (ValueError, FileNotFoundError, yaml.YAMLError) as error:  # in accelerate's arguments and files
        print(error, file=sys.stderr)
        return EXIT_BAD_INPUT
    except ConnectionError as error:  # the port is in use, perhaps by an earlier launch that is still ending
        print(error, file=sys.stderr)
        return CRASHED
    return 0


def wait_for_checkpoints() -> None:
    """Makes torchrun wait SHUTDOWN_SECONDS for its processes after a signal."""
    from torch.distributed.elastic.multiprocessing.api import PContext
    from torch.distributed.launcher.api import LaunchConfig

    seconds = os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    if "shutdown_timeout" not in LaunchConfig.__dataclass_fields__:  # torch 2.11 doesn't read the variable
        PContext.close.__defaults__ = (None, int(seconds))


def patient_agent() -> type:
    """Returns torchrun's agent class, modified not to restart processes that exited on purpose."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class Agent(LocalElasticAgent):
        # torchrun restarts after any exit status, has no public hook before a restart, and reads max_restarts only
        # once.
        def _monitor_workers(self, worker_group):
            result = super()._monitor_workers(worker_group)
            if result.is_failed():
                # If one process exits, torchrun terminates the others, which also count as failures.
                codes = {end.exitcode for end in result.failures.values()} - {-signal.SIGTERM}
                if codes and CRASHED not in codes and min(codes) > 0:  # negative if killed by a signal
                    self._remaining_restarts = 0
            return result

    return Agent


def status_of(code: int) -> int:
    """Returns a process's exit status, or CRASHED if it was killed by a signal."""
    if code < 0:
        print(f"the run was killed by {signal.Signals(-code).name}", file=sys.stderr)
        return CRASHED
    return code


def wait_for_the_rest(number: int) -> None:
    """Forwards a second signal, which makes torchrun stop waiting, and waits until all processes have exited."""
    left = psutil.Process().children()
    pass_on(number)
    psutil.wait_procs(left)


def pass_on(number: int) -> None:
    """Forwards a signal to the child processes."""
    for process in psutil.Process().children():
        process.send_signal(number)


def supervise(command: list[str]) -> int:
    """Runs a command, restarts it if it crashes or exits with EXIT_PREEMPTED, and returns its exit status.

    Doesn't restart it after a signal, or after failures that would repeat, such as bad input, divergence or a crash
    loop.
    """
    pause = SHORTEST_PAUSE_SECONDS
    while True:
        started = time.monotonic()
        process = subprocess.Popen(command)
        left: list[psutil.Process] = []
        while (code := ended(process)) is None:
            with suppress(psutil.NoSuchProcess):
                left = psutil.Process(process.pid).children(recursive=True) or left
        if code < 0:  # the remaining processes save, and hold the run's lock until they exit
            psutil.wait_procs(left, timeout=SHUTDOWN_SECONDS)
        if (code not in (CRASHED, EXIT_PREEMPTED) and code >= 0) or HEARD:
            return status_of(code)
        if time.monotonic() - started > LONG_LIFE_SECONDS:
            pause = SHORTEST_PAUSE_SECONDS
        what = "is not finished" if code == EXIT_PREEMPTED else "crashed"
        print(f"the run {what} (exit status {code}); restarting in {pause:g} s", file=sys.stderr, flush=True)
        deadline = time.monotonic() + pause
        while time.monotonic() < deadline and not HEARD:
            time.sleep(0.1)
        if HEARD:
            return EXIT_PREEMPTED
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def ended(process: subprocess.Popen) -> int | None:
    """Returns the exit status, or None if the process is still running after one second."""
    try:
        return process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        return None


HEARD: list[int] = []
"""Signals received so far. Any of them ends the run."""


def hear_signals(*, alone_ends: bool) -> None:
    """Records and forwards signals. With `alone_ends`, a process without child processes exits immediately.

    With a single process, accelerate doesn't handle signals. With several, torchrun's handlers replace this one.
    Ctrl-C isn't forwarded, because the terminal sends it to all processes. SIG_IGN wouldn't work, because child
    processes inherit it.
    """

    def hear(number, _):
        HEARD.append(number)
        if number != signal.SIGINT:
            pass_on(number)
        if alone_ends and not psutil.Process().children():
            sys.exit(status_after(number))

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:  # respects nohup
            signal.signal(number, hear)


if __name__ == "__main__":
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(__doc__, flush=True)
    supervised = sys.argv[1:2] == ["--supervise"]
    hear_signals(alone_ends=not supervised)
    if supervised:
        sys.exit(supervise([sys.executable, "-m", "pretrain.launch", *sys.argv[2:]]))
    sys.exit(launch(sys.argv[1:]))
