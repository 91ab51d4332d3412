"""Tests for output to terminals and files."""

import io
import sys

import pytest

from pretrain import terminal
from pretrain.terminal import LiveLine, colored, printable, width_of, wrapped
from support.project import run_script
from support.terminals import lines_that_remain, watched


def test_colors_are_used_only_in_terminals_that_want_them(monkeypatch):
    screen = watched(monkeypatch, 100)
    assert colored("bad", "red", screen) == "\x1b[31mbad\x1b[0m"
    assert colored("bad", "red", io.StringIO()) == "bad", "files must not be colored"
    monkeypatch.setenv("NO_COLOR", "1")
    assert colored("bad", "red", screen) == "bad"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert colored("bad", "red", screen) == "bad"


def test_only_a_terminal_has_a_width(monkeypatch):
    screen = watched(monkeypatch, 100)
    assert width_of(screen) == 100 and width_of(io.StringIO()) is None
    monkeypatch.delenv("COLUMNS")
    assert width_of(screen) == 80, "the default width must be 80"


def test_long_lines_are_wrapped():
    line = "tokens per step  256 = 1 sequences x 64 tokens"
    assert wrapped(line, 36).splitlines() == ["tokens per step  256 = 1 sequences x", "  64 tokens"]
    assert wrapped(line, None) == wrapped(line, 46) == line
    assert wrapped("warning: the peak is high", 18).splitlines() == ["warning: the peak", "  is high"]


def test_text_of_a_model_does_not_steer_the_terminal():
    assert printable("a\x1b[2J\tb\nc\r\x07é") == "a\\x1b[2J\tb\nc\\r\\x07é"


def test_messages_are_printed_above_the_live_line(monkeypatch):
    screen = watched(monkeypatch, 100)
    line = LiveLine()
    line.show("step 1")
    line.show("step 2" + "." * 200)
    cut = f"step 2{'.' * 93}"
    line.print_above("a log line", sys.stdout)
    assert screen.getvalue() == f"\r\x1b[Kstep 1\r\r\x1b[K{cut}\r\r\x1b[Ka log line\n\r\x1b[K{cut}\r"
    line.clear()
    line.print_above("done", sys.stdout)
    assert screen.getvalue().endswith("\r\r\x1b[Kdone\n"), "the progress line must not be drawn again"


def test_another_librarys_print_begins_its_line_and_no_stream_is_replaced(monkeypatch):
    screen = watched(monkeypatch, 100)
    line = LiveLine()
    line.show("step 1")
    print("a warning of some library")
    line.show("step 2")
    assert sys.stdout is sys.stderr is screen
    assert lines_that_remain(screen.getvalue())[0] == "a warning of some library"


def test_a_file_has_no_live_line(capsys):
    LiveLine().show("step 1")
    terminal.say_stage("Loading")
    assert capsys.readouterr().err == "Loading ...\n"


def test_the_other_processes_are_silent(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    terminal.say_stage("Loading")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.py", "recipes/demo.yaml", "--data.train.0.shards", "/no/such"],
        ["evaluate.py", "--model", "/no/such", "--prompt", ""],
        ["plan.py", "--config", "/no/such", "--gpus", "1", "--model", "/no/such"],
    ],
)
def test_scripts_print_a_line_before_importing_torch(arguments, tmp_path):
    """In this test, importing torch fails."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    if arguments[0] == "plan.py":
        arguments = ["plan.py", "--config", "recipes/demo.yaml"]
    found = run_script(*arguments, check=False, fresh=True, PYTHONPATH=str(tmp_path))
    assert found.stderr == "Loading ...\ninterrupted\n" and found.returncode == -2, "Ctrl-C must not cause a traceback"
