"""Ctrl-C at a terminal: whoever launched, the prompt comes back last, after the last words of the run."""

import re
import signal
import sys

import pytest

from pretrain import launch
from pretrain.launch import status_of, supervise
from support.project import events, free_port, run_script
from support.terminals import CONTROL_C, InTerminal

LONG = ("--budget.steps", "1000000", "--checkpoint.every_steps", "1000000", "--validation.every_steps", "1000000")
LONG += ("--logging.every_steps", "1000000")


def launched(strategy, processes, recipe):
    file = f"accelerate_configs/{strategy}.yaml"
    port = ("--main_process_port", free_port())
    return ["-m", "pretrain.launch", "--config_file", file, "--num_processes", processes, *port, "train.py", recipe]


@pytest.mark.parametrize(("strategy", "processes"), [(None, 1), ("single", 1), ("ddp", 2)])
def test_control_c_ends_with_the_last_words_of_the_run(strategy, processes, recipe, tmp_path):
    command = launched(strategy, processes, recipe) if strategy else ["train.py", recipe]
    with InTerminal(*command, *LONG) as typed:
        typed.read_until("tok/s")  # in the live line: no step is logged
        typed.press(CONTROL_C)
        assert typed.finish() == 130, typed.output
    (end,) = events(tmp_path / "run", "end")
    assert end["code"] == 130 and events(tmp_path / "run", "checkpoint")[-1]["step"] == end["step"]
    assert "Traceback" not in typed.output and not re.search(r"[IWE]\d{4} ", typed.output), "torchrun's own words"
    last = " ".join(line.strip() for line in typed.screen[-4:])
    assert f"saved at step {end['step']:,}; run the same command to resume" in last, typed.output


@pytest.mark.parametrize(("strategy", "processes"), [("single", 1), ("ddp", 2)])
def test_the_exit_status_is_that_of_the_run(strategy, processes, recipe):
    ended = run_script(*launched(strategy, processes, recipe), "--batch.tokens_per_step", "250", check=False)
    assert ended.returncode == 2, "and not 1"
    assert "batch.tokens_per_step" in ended.stderr and "Traceback" not in ended.stdout + ended.stderr


def test_a_process_that_was_killed_has_crashed(capsys):
    assert [status_of(code) for code in (0, 16, -9)] == [0, 16, 1]
    assert "SIGKILL" in capsys.readouterr().err


def test_a_supervised_run_is_started_again_as_long_as_it_crashes(tmp_path, monkeypatch, capsys):
    """A crash and a death are; a preemption, bad input, divergence and an end are not."""
    monkeypatch.setattr(launch, "SHORTEST_PAUSE_SECONDS", 0.01)
    lives = tmp_path / "lives"
    run = f"import os, sys; open({str(lives)!r}, 'a').write('.'); n = len(open({str(lives)!r}).read())\n"
    run += "os.kill(os.getpid(), 9) if n == 2 else sys.exit([1, None, 1][n - 1] if n < 4 else int(sys.argv[1]))"
    for code in (0, 2, 16, 18, 75):
        lives.unlink(missing_ok=True)
        assert supervise([sys.executable, "-S", "-c", run, str(code)]) == code
        assert len(lives.read_text()) == 4
    assert capsys.readouterr().err.count("the run crashed") == 5 * 3
    monkeypatch.setattr(launch, "HEARD", [signal.SIGTERM])
    lives.unlink()
    assert supervise([sys.executable, "-S", "-c", run, "0"]) == 1 and len(lives.read_text()) == 1, "told to end"
