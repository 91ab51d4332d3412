"""What ends a script with status 2 and without a traceback."""

import os

import pytest

from pretrain.problems import InputError, or_exit


def status_of(error: Exception) -> int:
    def fail():
        raise error

    with pytest.raises(SystemExit) as ended:
        or_exit(fail)
    return ended.value.code


def test_every_problem_is_told(capsys):
    assert status_of(InputError("a: is bad; mend it", "b: is worse; remove it")) == 2
    assert capsys.readouterr().err == "a: is bad; mend it\nb: is worse; remove it\n"


def test_a_file_that_this_user_may_not_open_is_named(capsys):
    assert status_of(PermissionError(13, "Permission denied", "data/docs/train-00000.bin")) == 2
    assert capsys.readouterr().err.startswith("data/docs/train-00000.bin: Permission denied; give this user access")


def test_an_operation_that_is_not_permitted_is_no_input_error():
    with pytest.raises(PermissionError):
        or_exit(lambda: (_ for _ in ()).throw(PermissionError(1, os.strerror(1))))


def test_the_value_is_passed_on():
    assert or_exit(lambda: 3) == 3
