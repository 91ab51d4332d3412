"""Tests for train.py --text: training on a text file with one command, rejected input, interruptions and resuming."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from pretrain.data.shards import read_manifest
from pretrain.errors import InputError
from pretrain.recipe import parse_yaml, read_run_config
from pretrain_tools.planning.own_text import (
    Machine,
    Prepared,
    SizedRecipe,
    find_text,
    preparation_commands,
    read_own_text,
    run_name_of,
    with_own_text,
)
from pretrain_tools.planning.sizing import choose_sizing
from pretrain_tools.planning.text_files import TextFiles
from pretrain_tools.planning.texts import MADE_BY
from pretrain_tools.preparation.documents.sources import InputFile
from support.project import ROOT, events, losses, run_script, start_script

MINUTES = "0.05"


@pytest.fixture(scope="module")
def text() -> str:
    """60 KB of source code."""
    return "".join(Path(ROOT, "pretrain", name).read_text() for name in ("config.py", "recipe.py", "hardware.py"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text):
    """(folder, printed output) for a run on a single file."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "novel.txt").write_text(text)
    result = run_script(ROOT / "train.py", "--text", "novel.txt", "--minutes", MINUTES, cwd=folder)
    return folder, result.stdout


def refused(folder, *arguments):
    with contextlib.chdir(folder), pytest.raises(InputError) as caught:
        with_own_text(["--text", *arguments])
    return "\n".join(caught.value.problems)


def test_one_command_trains_on_a_text(trained, text):
    folder, printed = trained
    written = {str(path.relative_to(folder)) for path in folder.glob("*/*")}
    assert written == {
        "tokenizers/novel", "data/novel", "model_configs/novel.json", "recipes/novel.yaml", "runs/novel",
    }  # fmt: skip
    manifest = read_manifest(folder / "data/novel")
    assert manifest.totals("validation")[1] == 1, "the document's tail must be the validation text"
    validated = events(folder / "runs/novel", "validation")
    assert validated[-1]["loss"] < validated[0]["loss"] - 0.5, "the validation loss must fall"
    assert (folder / "runs/novel/final/config.json").exists()
    for name in ("text", "vocabulary", "model", "tokens", "steps", "written"):
        assert f"\n{name:<11} " in f"\n{printed}", name


def test_it_prints_the_everyday_commands_and_they_are_those_that_ran(trained):
    folder, printed = trained
    shown = printed.partition("To run these steps by hand")[2].splitlines()
    commands = [line.strip() for line in shown if line.startswith("  python ")]
    assert [command.split()[1] for command in commands] == [
        "prepare_data.py", "prepare_data.py", "train.py", "runs.py", "evaluate.py",
    ]  # fmt: skip
    for command in commands[:3]:
        script, *arguments = command.replace("'", "").split()[1:]
        again = run_script(ROOT / script, *arguments, cwd=folder).stdout
        assert "already complete" in again, command


def test_a_sample_at_the_end_continues_held_out_text(trained, text):
    folder, _ = trained
    samples = events(folder / "runs/novel", "sample")
    assert samples[-1]["step"] == events(folder / "runs/novel", "end")[-1]["step"]
    prompt = samples[-1]["prompt"]
    assert prompt and prompt in text[-len(text) // 5 :]
    assert prompt not in text[: len(text) // 2] or len(prompt) < 20
    assert samples[-1]["text"].startswith(prompt) and len(samples[-1]["text"]) > len(prompt)


def test_the_recipe_is_commented_and_reads_back(trained, monkeypatch):
    folder, _ = trained
    monkeypatch.chdir(folder)
    lines = Path("recipes/novel.yaml").read_text().splitlines()
    assert lines[0] == f"{MADE_BY}python train.py --text novel.txt --minutes {MINUTES} --output runs/novel"
    assert sum(line.startswith("#") for line in lines) >= 6
    config = read_run_config("recipes/novel.yaml")
    assert config.budget.minutes == float(MINUTES)
    assert config.validation.every_steps == config.samples.every_steps <= config.budget.steps / 4
    validated = 5 * config.validation.sequences * config.data.sequence_length
    assert (
        config.validation.sequences == 4 or validated / 3 <= 0.05 * config.budget.steps * config.batch.tokens_per_step
    )
    model = json.loads(Path("model_configs/novel.json").read_text())
    assert model["vocab_size"] % 64 == 0 and model["vocab_size"] >= read_manifest("data/novel").vocabulary_size


def test_a_prompt_of_any_characters_is_read_back_unchanged():
    text = "👍 'a' \"b\" \\n \x7f\x85\u2028\ufeff #{x}" + " word" * 40
    machine = Machine("cpu", "2 CPU threads", "fp32", peak_flops=1e11, memory_bytes=8 << 30, minutes=1.0)
    prepared = Prepared(1024, training_tokens=10**6, validation_tokens=10**4, prompt=text)
    sizing = choose_sizing(machine.flops, prepared.training_tokens, prepared.vocabulary)
    recipe = SizedRecipe(Path("runs/x"), Path("model_configs/x.json"), Path("data/x"), machine, prepared, sizing)
    assert parse_yaml(recipe.text("# header"))["samples"]["prompts"] == [text]


def test_the_same_command_finds_everything_done(trained, monkeypatch, capsys):
    folder, _ = trained
    monkeypatch.chdir(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.bin")}
    assert with_own_text(["--text", "novel.txt", "--minutes", MINUTES]) == ["--config", "recipes/novel.yaml"]
    assert "recipes/novel.yaml: already created by this command; continuing with it" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.bin")} == before


def test_another_command_of_the_same_name_is_refused(trained):
    folder, _ = trained
    told = refused(folder, "novel.txt", "--minutes", "3")
    assert (
        "recipes/novel.yaml: was made by a different command: python train.py --text novel.txt --minutes 0.05" in told
    )
    assert "--output runs/NAME" in told and "--budget.steps" in told
    (folder / "more.txt").write_text("more text\n" * 3000)
    assert "was made by a different command" in refused(
        folder, "*.txt", "--minutes", MINUTES, "--output", "runs/novel"
    )


def test_a_changed_text_is_refused(tmp_path, trained):
    folder, _ = trained
    copied = tmp_path / "copy"
    subprocess.run(["cp", "-r", folder, copied], check=True)
    with (copied / "novel.txt").open("a") as file:
        file.write("One line more.\n")
    told = refused(copied, "novel.txt", "--minutes", MINUTES)
    assert "data/novel: the text has changed since preparation: source novel.txt has changed" in told
    assert "--output runs/NAME" in told and "python train.py --config recipes/novel.yaml" in told


@pytest.mark.parametrize(
    "place", ["recipes/novel.yaml", "model_configs/novel.json", "runs/novel/notes", "data/novel/notes"]
)
def test_existing_files_are_not_overwritten(tmp_path, text, place):
    (tmp_path / "novel.txt").write_text(text)
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_text("mine: 1\n")
    told = refused(tmp_path, "novel.txt", "--minutes", MINUTES)
    assert place.removesuffix("/notes") in told and "--output" in told
    assert (tmp_path / place).read_text() == "mine: 1\n"
    assert not (tmp_path / "recipes/novel.yaml").exists() or place == "recipes/novel.yaml"


def test_interrupted_anywhere_the_same_command_continues(tmp_path, text):
    """The same command continues after an interruption, both after tokenizer training and during model training."""
    (tmp_path / "novel.txt").write_text(text)
    command = ("--text", "novel.txt", "--minutes", "0.1")
    asked = read_own_text(command)
    with contextlib.chdir(tmp_path):
        tokenizer, _ = preparation_commands(asked, find_text(asked), vocabulary=600, fraction=0.1)
    run_script(ROOT / tokenizer[0], *tokenizer[1:], cwd=tmp_path)
    with start_script(
        ROOT / "train.py", *command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        printed = ""
        for line in process.stdout:
            if line.startswith("step ") and "\nstep " not in printed:  # a busy machine soon runs out of time
                process.send_signal(signal.SIGINT)
            printed += line
        assert process.wait(300) == 130, printed
    assert "vocabulary  600 IDs" in printed, "the interrupted command's vocabulary size must be kept"
    assert "tokenizers/novel: already complete" in printed
    recipe = (tmp_path / "recipes/novel.yaml").read_text()
    result = run_script(ROOT / "train.py", *command, cwd=tmp_path)
    assert (tmp_path / "recipes/novel.yaml").read_text() == recipe
    assert "continuing with it" in result.stdout and (tmp_path / "runs/novel/final").is_dir()
    config_steps = events(tmp_path / "runs/novel", "end")[-1]["step"]
    assert max(losses(tmp_path / "runs/novel")) == config_steps
    assert len(events(tmp_path / "runs/novel", "resume")) == 1


def test_settings_by_their_path_and_the_check_go_with_it(tmp_path, text):
    (tmp_path / "novel.txt").write_text(text)
    result = run_script(
        ROOT / "train.py", "--text", "novel.txt", "--minutes", MINUTES, "--output", "runs/other", "--check",
        "--optim.learning_rate", "4e-3", cwd=tmp_path,
    )  # fmt: skip
    assert "this run can start" in result.stdout and "0.004 at the peak" in result.stdout
    assert (tmp_path / "recipes/other.yaml").exists() and not (tmp_path / "runs").exists()


def test_text_that_cannot_be_trained_on_is_refused_with_figures(tmp_path):
    (tmp_path / "small.txt").write_text("Too small.\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 5000)
    (tmp_path / "image.txt").write_bytes(b"\0\1\2" * 9000)
    (tmp_path / "book.log").write_text("text " * 9000)
    told = refused(tmp_path, "small.txt", "--minutes", MINUTES)
    assert "--text small.txt: got only 11 bytes in 1 file; use at least 20,000 bytes" in told
    assert "--text none*.txt: no such file" in refused(tmp_path, "none*.txt")
    told = refused(tmp_path, "latin.txt", "image.txt")
    assert "2 of 2 files aren't UTF-8 text: image.txt, latin.txt (it contains NUL bytes)" in told and "iconv" in told
    told = refused(tmp_path, "book.log")
    assert "unknown format .log" in told and "rename" in told and "input" not in told
    assert "--minutes 0: must be more than 0 and less" in refused(tmp_path, "small.txt", "--minutes", "0")
    assert "--output a b: the run name may contain only letters, digits" in refused(
        tmp_path, "small.txt", "--output", "a b"
    )
    told = refused(tmp_path, "small.txt", "--optim.lerning_rate", "1e-3", "--seed", "x")
    assert "got only" in told and "did you mean learning_rate?" in told and "--seed" in told, "all problems at once"
    assert "omit --config recipes/demo.yaml" in refused(tmp_path, "a.txt", "--config", "recipes/demo.yaml")
    assert [path.suffix for path in tmp_path.iterdir() if path.is_dir()] == [], "no folder may be created"


def test_a_folder_is_taken_and_the_same_command_finds_it_unchanged(tmp_path, text, monkeypatch, capsys):
    """A folder is accepted, and the printed preparation commands read the same files."""
    mine = tmp_path / "mine"
    (mine / "in here").mkdir(parents=True)
    (mine / "in here" / "A.TXT").write_text(text)
    (mine / "b.md").write_text(text[::-1])
    (mine / "c.pdf").write_bytes(b"%PDF-1.4 \xe2")
    (mine / "draft.txt").write_text("not this\n" * 4000)
    (mine / "it's.bin").write_bytes(b"caf\xe9 " * 99)
    command = ("--text", "mine", "--exclude", "mine/draft*", "--minutes", MINUTES, "--check")
    result = run_script(ROOT / "train.py", *command, cwd=tmp_path)
    assert "\ntext        2 files, " in f"\n{result.stdout}"
    skipped = "skipped 2 files in other formats: mine/c.pdf, " + shlex.quote("mine/it's.bin")
    assert skipped in result.stdout
    sources = json.loads((tmp_path / "data/mine/manifest.json").read_text())["sources"]
    assert [source["path"] for source in sources] == ["b.md", "in here/A.TXT"]
    monkeypatch.chdir(tmp_path)
    assert with_own_text(list(command))[-1] == "--check"
    again = capsys.readouterr().out
    assert "already created by this command" in again and skipped in again
    (mine / "new.rst").write_text(text)
    told = refused(tmp_path, "mine", "--exclude", "mine/draft*", "--minutes", MINUTES)
    assert "source new.rst was added" in told
    assert "was made by a different command" in refused(tmp_path, "mine", "--minutes", MINUTES)


def test_several_processes_need_prepared_data(trained, monkeypatch):
    folder, _ = trained
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WORLD_SIZE", "2")
    command = ["--text", "novel.txt", "--minutes", MINUTES, "--seed", "1"]
    assert with_own_text(command) == ["--config", "recipes/novel.yaml", "--seed", "1"]
    with pytest.raises(
        InputError, match=r"but several were launched; first run python train.py --text novel.txt .* --check"
    ):
        with_own_text([*command, "--output", "runs/unprepared"])


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("mine/*.txt", "mine"), ("books/alice.txt", "alice"), ("my novel.txt.gz", "my_novel"),
        ("~/texts/**/*.md", "texts"), ("s3://bucket/poems/*.txt", "poems"), ("mine/", "mine"),
    ],
)  # fmt: skip
def test_the_name_is_that_of_the_text(pattern, name):
    assert run_name_of(pattern) == name


def test_an_unreadable_command_line_exits_with_an_example(capsys):
    with pytest.raises(SystemExit) as exited:
        read_own_text(["--text", "small.txt", "--minutes", "ten"])
    told = capsys.readouterr().err
    assert exited.value.code == 2 and "--minutes: invalid float value: 'ten'" in told and "--text 'mine/*.txt'" in told


def test_a_name_that_is_not_utf8_is_escaped_in_the_recorded_command():
    name = os.fsdecode(b"caf\xe9.txt")
    asked = read_own_text(["--text", name])
    assert asked.command == r"python train.py --text 'caf\xe9.txt' --minutes 10 --output runs/caf"
    assert preparation_commands(asked, TextFiles([], [name], [], ""), 600, 0.1)[0][2] == name


def test_large_files_are_split_by_their_size_after_decompression():
    asked = read_own_text(["--text", "a.txt.gz"])
    for megabytes, is_split in ((50, False), (100, True)):
        source = InputFile("a.txt.gz", "a.txt.gz", "txt", "gz", megabytes * 10**6)
        commands = preparation_commands(asked, TextFiles([source], ["a.txt.gz"], [], ""), 600, 0.1)
        assert [("paragraph" in command) for command in commands] == [is_split, is_split]


def test_other_command_lines_pass_unchanged():
    for arguments in ([], ["--help", "--text", "a"], ["--config", "a.yaml", "--texture", "b"]):
        assert with_own_text(arguments) == arguments
    assert read_own_text(["--text", "a.txt", "b.txt", "--minutes=2"]).patterns == ["a.txt", "b.txt"]


def test_an_interrupted_preparation_ends_the_command(tmp_path, text):
    (tmp_path / "novel.txt").write_text(text * 40)
    with start_script(
        ROOT / "train.py", "--text", "novel.txt", "--minutes", MINUTES, cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    ) as process:  # fmt: skip
        printed = ""
        for line in process.stdout:
            printed += line
            if line.startswith("$ python prepare_data.py"):
                os.killpg(process.pid, signal.SIGINT)
        assert process.wait(300) == 130, printed
    assert "run the same command again to continue" in printed
    assert not (tmp_path / "recipes").exists()


def test_ctrl_c_between_the_commands_ends_without_a_traceback(tmp_path, text, monkeypatch, capsys):
    def interrupted(minutes: float) -> None:
        raise KeyboardInterrupt

    (tmp_path / "novel.txt").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pretrain_tools.planning.own_text.Machine.measured", interrupted)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as exited:
        with_own_text(["--text", "novel.txt"])
    assert exited.value.args == (130,)
    assert capsys.readouterr().err == "stopped; run the same command again to continue\n"
