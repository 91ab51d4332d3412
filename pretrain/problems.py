"""What is wrong with a user's input: said all at once, in full, and with the remedy."""

import difflib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from pretrain.exit_codes import EXIT_BAD_INPUT

Value = TypeVar("Value")


class InputError(Exception):
    """Input that cannot be used. Holds every problem found, one line each.

    A problem names what was given, what is allowed and what to do. A script shows them with `run_script` and exits
    with status 2; no traceback reaches the user.
    """

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class Problems(list[str]):
    """What is wrong with an input, over checks that do not depend on each other, so that all of it is said at once."""

    def attempt(self, check: Callable[..., Value], *given: Any, **named: Any) -> Value | None:
        """What the check returns; None where it raises an InputError, whose problems are then among these."""
        try:
            return check(*given, **named)
        except InputError as error:
            self += error.problems
            return None

    def stop_if_any(self) -> None:
        """Raises InputError with all of them."""
        if self:
            raise InputError(*self)


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """'; did you mean X?' for the nearest allowed name, or the list of all when nothing is near."""
    names = sorted({str(name) for name in allowed})
    near = difflib.get_close_matches(given, names, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; allowed: {', '.join(names)}" if names else ""


def is_first_on_machine() -> bool:
    """Whether this process speaks for its machine: every rank reads the same input, one reports on it."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def or_exit(function: Callable[[], Value]) -> Value:
    """What the function returns; an InputError instead ends the process with status 2, its problems on stderr.

    So does a file that this user may not open, wherever it is met.
    """
    try:
        return function()
    except InputError as error:
        if is_first_on_machine():
            print("\n".join(error.problems), file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    except PermissionError as error:
        if error.filename is None:  # not about a file
            raise
        print(f"{error.filename}: {error.strerror}; give this user access, or name another", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)


def run_script(main: Callable[[], int | None]) -> None:
    """Runs a script's main function and turns its outcome into an exit status; an InputError becomes status 2."""
    sys.exit(or_exit(main) or 0)
