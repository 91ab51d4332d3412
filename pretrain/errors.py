"""Input errors, reported all at once with the remedy, and the exit statuses of scripts.

docs/failures.md explains what each exit status means for the caller of a script.
"""

import difflib
import errno
import os
import select
import stat
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

from pretrain.terminal import LIVE_LINE, colored

EXIT_DONE = 0
CRASHED = 1
"""Exit status of a crash."""
EXIT_BAD_INPUT = 2
EXIT_NUMERIC = 16
EXIT_NO_VALID_CHECKPOINT = 17
EXIT_CRASH_LOOP = 18
EXIT_PREEMPTED = 75
"""Exit status of a run that was told to end, or lost a server; the same command resumes it."""
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141
"""Exit status 128 + SIGPIPE, as shells report a program that wrote to a closed pipe."""

SECONDS_TO_REPORT = 10.0
"""Time in which the first process of a machine reports an error, before the others report it too."""

_Value = TypeVar("Value")

UNUSABLE_PATHS = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "give this user access, or name another"),
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ELOOP: "symbolic links form a loop",
    errno.ENOTDIR: "part of the path is a file",
    errno.EISDIR: "name a file",
    errno.EROFS: "choose a writable location",
}
"""{errno: remedy} for paths that the system rejects: an input error, wherever it is raised."""


class InputError(Exception):
    """Input that cannot be used, with every problem found, one line each: what was given, what is allowed, what to do.

    `run_script` prints them and exits with status 2; no traceback reaches the user.
    """

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class UnreachableError(OSError):
    """Raised if a remote file cannot be read now, which says nothing about its content.

    `run_script` prints it and exits with status 75; no traceback reaches the user.
    """

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class Problems(list[str]):
    """List that collects the problems of independent checks, so that all are reported at once."""

    def attempt(self, check: Callable[..., _Value], *given: Any, **named: Any) -> _Value | None:
        """Returns the check's result; None if it raises an InputError, whose problems are added, each once."""
        try:
            return check(*given, **named)
        except InputError as error:
            self += [problem for problem in error.problems if problem not in self]
            return None

    def stop_if_any(self) -> None:
        """Raises InputError with all problems."""
        if self:
            raise InputError(*self)


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """Returns '; did you mean X?' for the nearest allowed name, or the list of all if nothing is near."""
    names = sorted({str(name) for name in allowed})
    near = difflib.get_close_matches(given, names, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; allowed: {', '.join(names)}" if names else ""


def is_first_on_machine() -> bool:
    """Tells if this process reports errors for its machine: every rank reads the same input, one rank reports."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def or_exit(function: Callable[[], _Value]) -> _Value:
    """Returns what the function returns; an InputError ends the process with status 2, its problems on stderr.

    A path that the system rejects, such as a file that this user may not open, has the same effect. An
    UnreachableError ends it with status 75.
    """
    try:
        return function()
    except (InputError, UnreachableError) as error:
        if not is_first_on_machine():
            # The launcher ends all processes when one ends: the first would be ended before it has said why.
            time.sleep(SECONDS_TO_REPORT)
        if isinstance(error, UnreachableError):
            print_problems([str(error)])
            end_now(EXIT_PREEMPTED)  # threads that still wait for the server would delay a normal exit
        print_problems(shortened(problem, 5000) for problem in error.problems)
    except OSError as error:
        if error.filename is None or error.errno not in UNUSABLE_PATHS:
            raise
        print_problems([f"{shortened(error.filename)}: {error.strerror}; {UNUSABLE_PATHS[error.errno]}"])
    leave(EXIT_BAD_INPUT)


def print_problems(problems: Iterable[str]) -> None:
    """Prints the problems to stderr, one line each, red on a terminal."""
    for problem in problems:
        print(colored(problem, "red", sys.stderr), file=sys.stderr)


def run_script(main: Callable[[], int | None]) -> None:
    """Runs a script's main function and turns its outcome into an exit status; an InputError becomes status 2.

    A reader that closes the pipe early, such as `| head`, ends the script with the status of SIGPIPE and no traceback.
    """
    try:
        code = or_exit(main) or EXIT_DONE
        sys.stdout.flush()
    except BrokenPipeError:
        if not stdout_is_broken():  # the pipe is a library's socket
            raise
        # Python flushes stdout again at exit, which would print a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_CLOSED_PIPE
    leave(code)


def stdout_is_broken() -> bool:
    """Tells if nobody reads the pipe on stdout any more."""
    watched = select.poll()
    watched.register(sys.stdout.fileno(), select.POLLERR)
    return bool(watched.poll(0))


def leave(code: int) -> NoReturn:
    """Ends the script; a process of a group ends immediately."""
    LIVE_LINE.clear()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        # gloo's threads, destroyed with the interpreter, may abort a process whose work is finished.
        end_now(code)
    sys.exit(code)


def end_now(code: int) -> NoReturn:
    """Ends this process immediately; others that wait for it find it dead."""
    LIVE_LINE.clear()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def shortened(value: Any, most: int = 200) -> str:
    """Returns an input value as text, truncated if it is long."""
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def one_line(error: BaseException) -> str:
    """Returns the error's class and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def read_small_file(path: str | os.PathLike, most_bytes: int = 1 << 20) -> str:
    """Reads a file written by people. Raises InputError, without the file's name, for anything else."""
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise InputError("is a folder; give the file")
        if not stat.S_ISREG(status.st_mode):
            raise InputError("is not a regular file; give a text file")
        if status.st_size > most_bytes:
            raise InputError(f"has {status.st_size:,} bytes, more than the {most_bytes:,} that such a file can have")
        with open(path, encoding="utf-8") as file:
            return file.read(most_bytes)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}") from None
