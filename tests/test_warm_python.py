"""Tests that a script forked from a warm interpreter behaves like a newly started one."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from support.warm_python import WarmPopen, can_be_forked, starter

WHAT_IT_SEES = """
import os, sys
print(sys.argv, __name__, os.getcwd(), os.environ.get("MINE"), os.environ.get("OTHERS"), sys.stdin.read())
print("error", file=sys.stderr)
print(os.getsid(0) == os.getpid())
sys.exit(7)
"""


def environment(**more) -> dict[str, str]:
    """Returns the current environment, because imports in other tests set variables."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", **more}


def outcome(start, arguments, **settings):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with start([sys.executable, *arguments], **pipes, **{"env": environment(), **settings}) as process:
        output, errors = process.communicate(timeout=100)
    return process.returncode, output, errors


@pytest.mark.parametrize("form", ["-c", "file", "-m"])
def test_arguments_environment_files_session_and_status(form, tmp_path):
    (tmp_path / "program.py").write_text(WHAT_IT_SEES)
    command = {"-c": ["-c", WHAT_IT_SEES], "file": [tmp_path / "program.py"], "-m": ["-m", "program"]}[form]
    (tmp_path / "input").write_text("given")
    own = {name: value for name, value in environment(MINE="1").items() if name != "OTHERS"}

    def run(start):
        with open(tmp_path / "input") as given:
            return outcome(
                start, [*map(str, command), "a b"], cwd=tmp_path, env=own, stdin=given, start_new_session=True
            )

    assert run(WarmPopen) == run(subprocess.Popen)


@pytest.mark.parametrize("end", ["raise SystemExit('in words')", "1 / 0", "import os; os.kill(os.getpid(), 9)"])
def test_processes_end_with_the_same_status(end):
    warm, cold = (outcome(start, ["-c", end]) for start in (WarmPopen, subprocess.Popen))
    assert warm[0] == cold[0] != 0
    assert warm[2].splitlines()[-1:] == cold[2].splitlines()[-1:]


@pytest.mark.parametrize("end", ["", "sys.exit()", "sys.exit(-1)", "sys.exit(True)"])
def test_threads_exit_functions_and_output_come_before_the_end(end):
    program = (
        "import atexit, sys, threading, time\n"
        "atexit.register(print, 'exit function')\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\n"
        f"print('main')\n{end}\n"
    )
    warm, cold = (outcome(start, ["-c", program]) for start in (WarmPopen, subprocess.Popen))
    assert warm == cold and warm[1] == "main\nthread\nexit function\n"


def test_it_is_forked_receives_signals_and_forks_its_children():
    program = (
        "import signal, subprocess, sys\n"
        "assert 'deepspeed' in sys.modules\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(subprocess.call([sys.executable, '-c', CHILD])))\n"
        "print('ready', flush=True)\n"
        "signal.pause()"
    ).replace("CHILD", repr("import sys; sys.exit(3 if 'deepspeed' in sys.modules else 4)"))
    with WarmPopen([sys.executable, "-c", program], env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n" and process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 3


def test_it_can_be_signaled_until_it_is_waited_for():
    """A process that has exited can still be signaled until it is waited for. torchrun does this with its process
    group."""
    deadline = time.monotonic() + 100
    with WarmPopen([sys.executable, "-c", ""], env=environment(), start_new_session=True) as process:
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(100) == 0
    while psutil.pid_exists(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_variables_read_on_import_need_a_new_interpreter():
    command = [sys.executable, "-c", ""]
    assert can_be_forked(command, environment())
    assert not can_be_forked(command, environment(OMP_NUM_THREADS="7"))
    assert not can_be_forked(["bash", "-c", ""], environment())
    assert starter() == os.getppid()
