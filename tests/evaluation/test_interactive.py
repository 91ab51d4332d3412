"""Tests for interactive sessions with a model, from input to output."""

import json
import os
import pty
import signal
import subprocess

import pytest
from transformers import AutoTokenizer

from evaluate import read_arguments
from pretrain.errors import InputError
from pretrain.model.build import build_model
from pretrain.model.model_config import load_model_config
from support.project import run_script, start_script
from support.tiny_models import TINY_LLAMA


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer):
    """A model folder with random weights and a tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    config = folder.with_suffix(".json")
    config.write_text(json.dumps(TINY_LLAMA | {"max_position_embeddings": 512}))
    built = build_model(load_model_config(str(config)), seed=1)
    built.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


def session(model, *lines, arguments=()):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    given = "\n".join(lines) + "\n"
    with start_script("evaluate.py", "--model", model, "--interactive", *arguments, **pipes) as process:
        process.stdin.reconfigure(errors="surrogateescape")
        output, errors = process.communicate(given, timeout=300)
    assert process.returncode == 0, errors
    return output, errors


def test_greedy_text_equals_a_prompt_sample_and_more_continues_it(model):
    greedy = ("--temperature", "0", "--max_new_tokens", "8")
    said, errors = session(model, "def f", ":more", ":quit", "never read", arguments=greedy)
    assert "Traceback" not in errors and "never read" not in said
    texts = {}
    for tokens in (8, 16):
        arguments = ("--prompt", "def f", "--temperature", "0", "--max_new_tokens", tokens)
        texts[tokens] = (
            run_script("evaluate.py", "--model", model, *arguments).stdout.split("---")[-2].split("\n", 1)[1]
        )
    assert said.count(texts[8].rstrip()) == 2, "the text must appear for the prompt and :more"
    assert texts[16].rstrip() in said


def test_the_session_continues_after_wrong_lines(model):
    output, errors = session(model, ":more", ":mor", "\udcff", "def", arguments=("--max_new_tokens", "4"))
    assert "Traceback" not in errors and "the input must be UTF-8" in errors
    assert ":more: unknown, or there is no text yet" in errors and ":mor: unknown" in errors
    assert "def" in output


def test_a_text_that_is_too_long_is_cut_with_a_note(model):
    arguments = ("--max_new_tokens", "500")
    _, errors = session(model, "def", "def " * 40, arguments=arguments)
    (note,) = [line for line in errors.splitlines() if line.startswith("using only")]
    assert note.startswith("using only the last 12 of ") and "512 positions, and --max_new_tokens is 500" in note


def test_closed_standard_input_is_refused(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InputError, match="--interactive: standard input is closed; use a terminal"):
        read_arguments(["--model", "x", "--interactive"])


def test_ctrl_c_stops_generation_and_ctrl_d_the_session(model):
    terminal, end = pty.openpty()
    process = start_script(
        "evaluate.py", "--model", model, "--interactive", "--max_new_tokens", 450,
        stdin=end, stdout=end, stderr=end, env={"TERM": "dumb"},
    )  # fmt: skip
    os.close(end)
    said = b""

    def read_until(text: bytes) -> None:
        nonlocal said
        while text not in said:
            said += os.read(terminal, 4096)
        said = said.partition(text)[2]

    try:
        read_until(b"> ")
        os.write(terminal, b"def f(\n")
        read_until(b"def f(")  # the echoed input, then the generated text
        read_until(b"def f(")
        process.send_signal(signal.SIGINT)
        read_until(b"> ")
        os.write(terminal, b"\x04")
        assert process.wait(100) == 0
    finally:
        process.kill()
        os.close(terminal)
    assert b"Traceback" not in said
