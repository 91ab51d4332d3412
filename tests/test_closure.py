"""Tests that the trainer imports none of the tools and loads little code."""

import ast
import io
import json
import shutil
import tokenize

import pytest

from support.loaded_by_training import PREFIX
from support.project import ROOT, events, launch, losses, run_script

IN_COPY = ROOT / "tests/support/in_copy.py"
MOST_MODULES = 77
MOST_TOKENS = 100_000
"""Maximum number of project modules, and of code tokens in them, that a two-step run may load."""
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)


def tokens_of_code(source: str) -> int:
    """Returns the number of tokens in a module, without comments, docstrings and whitespace tokens."""
    count, before, open_f_strings = 0, tokenize.ENCODING, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        # Since Python 3.12, an f-string has several tokens. Here, it counts as one, as in Python 3.11.
        if tokenize.tok_name[token.type] == "FSTRING_END":
            open_f_strings -= 1
            continue
        is_docstring = token.type == tokenize.STRING and before in (tokenize.NEWLINE, *NO_CODE[3:])
        is_code = token.type not in (*NO_CODE, tokenize.ENDMARKER) and not is_docstring
        count += is_code and not open_f_strings
        open_f_strings += tokenize.tok_name[token.type] == "FSTRING_START"
        before = before if token.type in (tokenize.COMMENT, tokenize.NL) else token.type
    return count


def test_code_is_counted_without_comments_and_docstrings():
    assert tokens_of_code('"""Doc."""\n# Comment.\nx = "a"  # more\n"""Of x."""\n') == 3
    assert tokens_of_code('def f():\n    """Doc."""\n    return 1\n') == 7
    assert tokens_of_code("""x = f"{a:{b}} {f'{c}'}" + d\n""") == 5


def imports_of(source: str) -> set[str]:
    """Returns the names of all imported modules and members, including imports inside functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_the_trainer_imports_no_tool_not_even_in_a_function():
    wrong = []
    for path in (ROOT / "pretrain").rglob("*.py"):
        found = imports_of(path.read_text())
        wrong += [f"{path.stem} imports {name}" for name in found if name.startswith("pretrain_tools")]
    assert wrong == []
    assert "pretrain_tools.publishing.publish" in imports_of((ROOT / "publish.py").read_text()), (
        "imports inside functions must be found"
    )


@pytest.fixture
def trainer_alone(tmp_path):
    """A copy of the project without its tools."""
    copy = tmp_path / "alone"
    shutil.copytree(ROOT / "pretrain", copy / "pretrain", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train.py", "accelerate_configs", "ds_configs", "model_configs"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile)(ROOT / name, copy / name)
    return copy


def test_a_run_without_the_tools_resumes_mirrors_exports_and_loads_little(trainer_alone, recipe, tmp_path):
    told = run_script(IN_COPY, "tests/support/loaded_by_training.py", "--config", recipe, "--budget.steps", "2").stdout
    (line,) = [line for line in told.splitlines() if line.startswith(PREFIX)]
    files = json.loads(line.removeprefix(PREFIX))
    tokens = sum(tokens_of_code((ROOT / file).read_text()) for file in files)
    print(f"{len(files)} modules, {tokens:,} tokens of code")
    assert len(files) <= MOST_MODULES and tokens <= MOST_TOKENS
    assert [file for file in files if file.startswith("pretrain_tools")] == []

    script = (IN_COPY, trainer_alone / "train.py", "--config", recipe, "--checkpoint.mirror", tmp_path / "mirror")
    done = launch("fsdp2", 2, *script, cwd=trainer_alone)
    assert [event["step"] for event in events(tmp_path / "run", "resume")] == [2]
    assert len(losses(tmp_path / "run")) == 12 and (tmp_path / "run/final/model.safetensors").exists()
    told = done.stdout + done.stderr
    assert "the model card could not be written" in told and "No module named" in told
    assert list((tmp_path / "mirror").rglob("step-00000012*"))
