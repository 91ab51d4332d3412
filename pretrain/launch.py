"""`accelerate launch` for people and schedulers: Ctrl-C waits for the run, and the exit status is the run's own.

    python -m pretrain.launch --config_file accelerate_configs/ddp.yaml --num_processes 2 train.py --config RECIPE

Takes what `accelerate launch` takes. That one ends on Ctrl-C with a traceback, with one process even before the run
has saved, and returns 1 whatever the processes return.
"""

import logging
import os
import signal
import subprocess
import sys

from pretrain.errors import CRASHED, EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_PREEMPTED

SHUTDOWN_SECONDS = 300
"""How long torchrun waits for its processes after a signal, unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT says otherwise; its
own 30 s are too short for the checkpoint of a large model."""


def launch(arguments: list[str]) -> int:
    """Runs `accelerate launch` with these arguments; returns the exit status of the script it started."""
    import torch.distributed.run  # noqa: F401  loads all of torchrun, with its loggers
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):  # each has a level; the ranks speak for themselves
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        launch_command(launch_command_parser().parse_args(arguments))
    except subprocess.CalledProcessError as ended:  # one process
        return status_of(ended.returncode)
    except ChildFailedError as failed:
        return status_of(failed.get_first_failure()[1].exitcode)
    except SignalException as asked:
        wait_for_the_rest(asked.sigval)
        return EXIT_INTERRUPTED if asked.sigval == signal.SIGINT else EXIT_PREEMPTED
    except ValueError as error:  # accelerate's own checks of its arguments and files
        print(error, file=sys.stderr)
        return EXIT_BAD_INPUT
    return 0


def status_of(code: int) -> int:
    """A process's return code as an exit status; of one that a signal killed, that of a crash."""
    if code < 0:
        print(f"the run was killed by {signal.Signals(-code).name}", file=sys.stderr)
        return CRASHED
    return code


def wait_for_the_rest(number: int) -> None:
    """A second signal has ended torchrun's wait: hands it on, and returns once all processes have ended."""
    import psutil

    left = psutil.Process().children()
    pass_on(number)
    psutil.wait_procs(left)


def pass_on(number: int) -> None:
    """Hands a signal to the processes that this one has started."""
    import psutil

    for process in psutil.Process().children():
        process.send_signal(number)


def hear_signals() -> None:
    """For one process, which accelerate only waits for; torchrun takes SIGINT, SIGTERM and SIGHUP over for several.

    Ctrl-C reaches that one process from the terminal itself. SIG_IGN would not do: processes inherit it.
    """
    signal.signal(signal.SIGINT, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup means it
            signal.signal(number, lambda number, _: pass_on(number))


if __name__ == "__main__":
    hear_signals()
    sys.exit(launch(sys.argv[1:]))
