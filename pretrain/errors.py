"""Input errors, and the scripts' exit statuses (explained in docs/failures.md)."""

import difflib
import errno
import os
import select
import stat
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
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
"""Exit status of a run stopped by a signal or an unreachable server. The same command resumes it."""
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141
"""Exit status 128 + SIGPIPE, the shell's status for a program killed by a closed pipe."""

SECONDS_TO_REPORT = 10.0
"""How long the other processes on a machine wait for the first one to report an error."""

_Value = TypeVar("Value")

OWN_FOLDERS: set[Path] = set()
"""Folders with user code. Errors in these files are reported with file and line."""

UNUSABLE_PATHS = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "grant this user access, or use another path"),
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ELOOP: "symbolic links form a loop",
    errno.ENOTDIR: "part of the path is a file",
    errno.EISDIR: "use a file instead",
    errno.EROFS: "use a writable location",
    errno.ENOSPC: "free up disk space",
    errno.EDQUOT: "free up disk space",
}
"""{errno: remedy} for OSErrors that are reported as input errors."""


class InputError(Exception):
    """Raised for invalid input, with one line per problem: the given value, the allowed values and the fix.

    `run_script` prints the lines without a traceback and exits with status 2.
    """

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class UnreachableError(OSError):
    """Raised if a remote file can't be read at the moment.

    `run_script` prints it without a traceback and exits with status 75.
    """

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class Problems(list[str]):
    """Collects the problems found by independent checks, so that they can be reported together."""

    def attempt(self, check: Callable[..., _Value], *given: Any, **named: Any) -> _Value | None:
        """Returns the check's result. If the check raises InputError, collects its problems and returns None."""
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
    """Returns '; did you mean X?' with the closest allowed name, or a list of all names if none is close."""
    names = sorted({str(name) for name in allowed})
    near = difflib.get_close_matches(given, names, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; allowed: {', '.join(names)}" if names else ""


def is_first_on_machine() -> bool:
    """Returns True if this process is the one that reports errors on its machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def or_exit(function: Callable[[], _Value]) -> _Value:
    """Returns the function's result. On an InputError, prints the problems to stderr and exits with status 2.

    Also exits with status 2 on an OSError in UNUSABLE_PATHS, and with status 75 on an UnreachableError.
    """
    try:
        return function()
    except (InputError, UnreachableError) as error:
        if not is_first_on_machine():
            # The launcher ends all processes when one exits, so let the first process report the error.
            time.sleep(SECONDS_TO_REPORT)
        if isinstance(error, UnreachableError):
            print_problems([str(error)])
            end_now(EXIT_PREEMPTED)  # threads waiting for the server would delay a normal exit
        print_problems(shortened(problem, 5000) for problem in error.problems)
    except OSError as error:
        if error.filename is None or error.errno not in UNUSABLE_PATHS:
            raise
        print_problems([f"{shortened(error.filename)}: {error.strerror}; {UNUSABLE_PATHS[error.errno]}"])
    leave(EXIT_BAD_INPUT)


def print_problems(problems: Iterable[str]) -> None:
    """Prints the problems to stderr, one line each, in red on a terminal."""
    for problem in problems:
        print(colored(problem, "red", sys.stderr), file=sys.stderr)


def run_script(main: Callable[[], int | None]) -> None:
    """Runs a script's main function and exits with its status, or with the status of its error (see `or_exit`).

    An error in user code counts as an input error (see `errors_in_own_code`).
    If a reader such as `| head` closes stdout early, exits with EXIT_CLOSED_PIPE and without a traceback.
    """
    try:
        code = or_exit(errors_in_own_code()(main)) or EXIT_DONE
        sys.stdout.flush()
    except BrokenPipeError:
        if not stdout_is_broken():  # the pipe is a library's socket
            raise
        code = EXIT_CLOSED_PIPE
    leave(code)


def stdout_is_broken() -> bool:
    """Returns True if the reader of stdout's pipe is gone."""
    watched = select.poll()
    watched.register(sys.stdout.fileno(), select.POLLERR)
    return bool(watched.poll(0))


def leave(code: int) -> NoReturn:
    """Exits the script. Skips Python's cleanup if a torch process group exists."""
    LIVE_LINE.clear()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        # gloo's threads may crash during interpreter shutdown.
        end_now(code)
    flush_output()
    sys.exit(code)


def end_now(code: int) -> NoReturn:
    """Exits this process immediately, without cleanup."""
    LIVE_LINE.clear()
    flush_output()
    os._exit(code)


def flush_output() -> None:
    """Flushes stdout and stderr. Discards the output if its reader is gone."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:  # Python flushes again at exit, which would print an error and change the exit status
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def shortened(value: Any, most: int = 200) -> str:
    """Converts a value to text, truncated to `most` characters."""
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def one_line(error: BaseException) -> str:
    """Returns the error's class and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def error_in_file(error: BaseException, path: Path) -> str:
    """Formats an error raised while loading `path`, as in 'mine.py, line 12: NameError: ...'."""
    place = place_of(error) or str(path)
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{place}: {type(error).__name__}: {shortened(' '.join(message.split()), 300)}"


@contextmanager
def errors_in_own_code() -> Iterator[None]:
    """Converts an error raised by user code to an InputError with the file, the line and its code.

    Leaves a RuntimeError or OSError unchanged. The machine may have caused it, so a restart may help.
    """
    try:
        yield
    except (InputError, RuntimeError, OSError):
        raise
    except Exception as error:
        if frames := own_frames(error):
            raise InputError(f"{error_in_file(error, Path())}, in: {frames[-1].line}") from error
        raise


def place_of(error: BaseException) -> str:
    """Returns 'mine.py, line 12' for the error's last frame in user code, or "" if there is none."""
    if isinstance(error, SyntaxError) and error.filename and is_own(error.filename):
        return f"{error.filename}, line {error.lineno}"
    frames = own_frames(error)
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Returns the error's frames in user code."""
    return [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)]


def is_own(file: str) -> bool:
    """Returns True if a file is in one of OWN_FOLDERS. The script itself may be there, too, but isn't user code."""
    path = Path(file)
    return path.parent in OWN_FOLDERS and path.name != "__init__.py" and path != Path(sys.argv[0]).absolute()


SMALL_FILE_BYTES = 1 << 20
"""Maximum size of a recipe or other small text file."""


def read_small_file(path: str | os.PathLike, most_bytes: int = SMALL_FILE_BYTES) -> str:
    """Reads a small text file. For anything else, raises an InputError whose message omits the file name."""
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise InputError("is a folder; use a file instead")
        if not stat.S_ISREG(status.st_mode):
            raise InputError("is not a regular file; use a text file")
        if status.st_size > most_bytes:
            raise InputError(f"is too large: {status.st_size:,} bytes, but the limit is {most_bytes:,}")
        with open(path, encoding="utf-8") as file:
            return file.read(most_bytes)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}") from None
