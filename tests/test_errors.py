"""Tests for errors that end a script with status 2 and no traceback."""

import errno
import os
import subprocess
import sys

import pytest

from pretrain.errors import InputError, or_exit
from support.project import ROOT, run_script


def status_of(error: Exception) -> int:
    def fail():
        raise error

    with pytest.raises(SystemExit) as ended:
        or_exit(fail)
    return ended.value.code


def test_every_problem_is_printed(capsys):
    assert status_of(InputError("a: is bad; fix it", "b: is worse; remove it")) == 2
    assert capsys.readouterr().err == "a: is bad; fix it\nb: is worse; remove it\n"


def test_a_file_that_this_user_may_not_open_is_named(capsys):
    assert status_of(PermissionError(13, "Permission denied", "data/docs/train-00000.bin")) == 2
    assert capsys.readouterr().err.startswith("data/docs/train-00000.bin: Permission denied; grant this user access")


def test_a_forbidden_operation_is_not_an_input_error():
    with pytest.raises(PermissionError):
        or_exit(lambda: (_ for _ in ()).throw(PermissionError(1, os.strerror(1))))


def test_the_value_is_passed_on():
    assert or_exit(lambda: 3) == 3


def test_a_path_rejected_by_the_os_is_shortened(capsys):
    assert status_of(OSError(errno.ENAMETOOLONG, "File name too long", "x" * 5000)) == 2
    error = capsys.readouterr().err
    assert "File name too long; use a shorter name" in error and len(error) < 400


def test_distributed_processes_exit_without_interpreter_cleanup(tmp_path):
    """Distributed processes exit without the interpreter's cleanup, during which gloo's threads sometimes abort."""
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, sys\n"
        "atexit.register(lambda: print('the interpreter ends'))\n"
        "from pretrain.errors import InputError, run_script\n"
        "def main():\n"
        "    if 'group' in sys.argv:\n"
        "        from torch.distributed import init_process_group\n"
        f"        init_process_group('gloo', init_method='file://{tmp_path}/meet', rank=0, world_size=1)\n"
        "    print('done')\n"
        "    if 'error' in sys.argv:\n"
        "        raise InputError('bad')\n"
        "run_script(main)\n"
    )
    for words, code, lines in (
        (["alone"], 0, ["done", "the interpreter ends"]),
        (["group"], 0, ["done"]),
        (["group", "error"], 2, ["done"]),
    ):
        ended = run_script(script, *words, check=False, PYTHONPATH=str(ROOT))
        assert (ended.returncode, ended.stdout.splitlines()) == (code, lines), ended.stderr
        (tmp_path / "meet").unlink(missing_ok=True)


def test_a_closed_pipe_ends_a_script_quietly(tmp_path):
    """An example is `runs.py documents RUN --step 1 | head`. Output may be flushed line by line or only at the end."""
    for flush in (True, False):
        script = tmp_path / "script.py"
        script.write_text(
            "from pretrain.errors import run_script\n"
            f"run_script(lambda: [print('x' * 99, flush={flush}) for _ in range(9999)] and 0)\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen([sys.executable, script], env=environment, stdout=-1, stderr=-1, text=True) as process:
            process.stdout.readline()
            process.stdout.close()
            assert (process.stderr.read(), process.wait()) == ("", 141)


@pytest.mark.parametrize("script", ["train.py", "runs.py"])
def test_a_python_without_the_packages_gets_a_hint(script):
    """Python's -S hides the installed packages."""
    result = subprocess.run([sys.executable, "-S", script, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert "activate the environment with `. .venv/bin/activate`" in result.stderr
    assert "Traceback" not in result.stderr


def test_local_rank_0_reports_errors_first(monkeypatch, capsys):
    """The launcher then terminates the other ranks, which wait before they report errors."""
    waited = []
    monkeypatch.setattr("pretrain.errors.time.sleep", waited.append)
    for rank, seconds in (("0", []), ("1", [10.0])):
        waited.clear()
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert status_of(InputError("a: is bad; fix it")) == 2
        assert capsys.readouterr().err == "a: is bad; fix it\n" and waited == seconds
