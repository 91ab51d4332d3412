"""Tests that every command in README.md and docs/ works, in reading order.

Commands run in a shell in a clone, with smaller budgets (support/clone.py). Commands that take too long or need other
machines are only parsed by their script, and their files must exist. All others are listed with a reason.
"""

import json
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml
import zstandard
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

import plan
import publish
import runs
from pretrain import registry
from pretrain.mesh_sizes import take_own_options
from pretrain.recipe import named_recipe, pair_up, read_command_line, read_run_config
from pretrain_tools.planning.own_text import read_own_text
from pretrain_tools.preparation.arguments import parse_arguments
from support.clone import copy_clone, make_clone, type_in
from support.pages import PAGES, VARIABLES, Command, commands_in, registrations
from support.prepared import PROSE, as_parquet
from support.project import ROOT
from support.quick_traces import use_quick_traces
from support.run_folders import write_tokenizer

NOT_RUN = {
    r"^git clone ": "this is the clone",
    r"^(make install && )?(\.|source) \.venv/bin/activate": "the shell of a clone has its environment",
    r"^make (test|bench)$": "minutes to hours",
    r"^(nvidia-smi|sudo apt install .*|make install)$": "the machine's own",
    r"^make gpu ": "needs a GPU: tests/scripts/test_gpu_check.py",
    r"^(MAX_JOBS=\d+ )?pip install ": "the environment of the tests stays as it is",
    r"^export ": "of the command below it",
    r"^ATEN_CPU_CAPABILITY=avx2 .* make demo": "the demo again, on another processor",
    r"^ray start": "an optional package",
    r"^hf (download|upload)": "needs the Hub",
    r"s3://BUCKET": "needs a store: tests/scripts/test_s3.py",
    r"^llama-completion ": "llama.cpp's own: tests/publishing/test_gguf.py",
    r"^(docker (build|run --init)|sky jobs|kubectl apply|hf jobs|sbatch) ": "needs other machines: test_clusters.py",
}
"""{pattern: reason}. Make targets and files in these commands must exist."""
ONLY_READ = {
    r"(fsdp2|hsdp|pp|tp|ep|cp)\.yaml": "trains in tests/parallel",
    r"-m pretrain\.launch": "tests/test_launch.py",
    r"^torchrun ": "as accelerate launch",
    r"single\.yaml": "the same as python train.py",
    r"launch .*(recipes/llama_1b\.yaml|--tasks base)": "days on many GPUs",
    r"plan\.py .*(llama_7b|llama_13b|moe_7b|1b_32k|--gpus 64)": "seconds each: tests/scripts/test_plan.py",
    r"evaluate\.py .*--sequence_length 1024": "longer than the clone's: tests/training/test_stages.py",
    r"evaluate\.py .*--tasks (small|core)": "needs the Hub, and DCLM's bundle: tests/evaluation/test_core.py",
    r"train\.py .*--smoke": "300 steps: tests/planning/test_smoke.py",
    r"runs\.py merge": "more checkpoints than the demo keeps: tests/runs/test_merge.py",
    r"runs\.py parity": "trains under every strategy: tests/runs/test_parity.py",
    r"runs\.py (sweep|mixture)": "trains many runs: tests/experiments",
    r"runs\.py ladder": "needs runs of several sizes: tests/experiments/test_ladder.py",
    r"--trust_remote_code --model\.vocab_size": "the reader's own model: tests/model/test_own_code.py",
    r"examples/\w+\.py": "a larger run, other data: tests/examples",
    r"prepare_data\.py .*--extensions": "tests/test_extending.py",
    r"--branch_from": "needs thousands of steps: tests/training/test_elastic_budget.py",
    r"^CUDA_VISIBLE_DEVICES=": "GPUs: every process of the tests would import anew",
    r"--model EleutherAI/": "needs the Hub",
    r"publish\.py .*--(verify|sign) ": "needs what was published, and a key: tests/publishing",
    r"--decontaminate hellaswag": "needs the Hub: tests/preparation/cleaning/test_decontamination.py",
    r"^python bench/": "minutes to hours: tests/scripts/test_bench.py",
    r"--ray_address": "an optional package",
    r"(\$files|^groundwork-)": "the installed commands: tests/test_pip.py",
}
"""{pattern: reason}"""
PLANNED: set[str] = set()
"""plan.py commands that have already run. They aren't run again, because their output can't change."""
RUN = r"^(python|accelerate launch|torchrun|make demo$|groundwork-)"
"""Commands that may run. Any other command must be listed above, or the test fails."""
REFUSED = {
    r"runs\.py (save|stop|abort|anneal) ": "not active",  # tests/runs/test_control.py tests live runs
}
"""{pattern: expected message}, with exit status 2"""
STAND_INS = ("runs/x", "runs/a", "runs/b", "runs/trunk", "data/docs", "data/fineweb_edu", "recipes/x.yaml",
             "recipes/mine.yaml", "recipes/NAME.yaml", "model_configs/mine.json")  # fmt: skip
"""The reader's own files in the docs. The tests replace them with copies of the demo's files."""
DEMOS = {
    "runs": "runs/demo", "data": "data/demo", "recipes": "recipes/demo.yaml",
    "model_configs": "model_configs/llama_demo.json",
}  # fmt: skip
UNTRACKED = {"runs", "data", "tokenizers", "wandb", "tests"}
WORDS = {"RANK": "0", "ADDRESS": "127.0.0.1"}


def lend_inputs(clone, commands: str, text_files) -> None:
    """Writes the reader's text files, and local folders named like Hub datasets and tokenizers, which take
    precedence."""

    def lines_of(texts: list[str]) -> bytes:
        return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)

    texts = [path.read_text() for path in sorted(text_files.iterdir())]
    paragraphs = [part for text in texts for part in text.split("\n\n")]
    lines = lines_of(paragraphs)
    for name in set(re.findall(r"--dataset ([\w./-]+)", commands)):
        (clone / name).mkdir(parents=True)
        (clone / name / "0.jsonl").write_bytes(lines)
    for name in set(re.findall(r"--tokenizer (?!tokenizers/)([\w./-]+)", commands)):
        write_tokenizer(clone / name)
    for name in set(re.findall(r"--extensions (\w+\.py)", commands)):
        (clone / name).write_text("\n\n".join(registrations()))
    for name, function in set(re.findall(r"--filter (\w+\.py):(\w+)", commands)):
        (clone / name).write_text(f"def {function}(text):\n    return True\n")
    for name in set(re.findall(r"'(\w+)/\*\.jsonl'", commands)):
        (clone / name).mkdir(parents=True, exist_ok=True)
        (clone / name / "0.jsonl").write_bytes(lines * (1 + 60 // len(paragraphs)))
    endings = set(re.findall(r"--(?:input|text) '?(\w+)/[*/]+\.([\w.]+)", commands))
    for name, ending in endings | {(name, "txt") for name in re.findall(r"--text (\w+) ", commands)}:
        (clone / name / "deeper").mkdir(parents=True, exist_ok=True)
        for number, text in enumerate(texts):
            content = text.encode()
            if ending != "txt":
                is_parquet = ending == "parquet"
                content = as_parquet([text, PROSE]) if is_parquet else zstandard.compress(lines_of(text.split("\n\n")))
            for folder in (clone / name, clone / name / "deeper"):
                (folder / f"{number}.{ending}").write_bytes(content)


def write_tasks(clone) -> None:
    """Writes the task in docs/evaluate.md, also under the names of some harness tasks."""
    text = "\n".join(page.read_text() for page in PAGES)
    task = yaml.safe_load(re.search(r"```yaml\n(task: my_quiz\n.*?)```", text, re.DOTALL)[1])
    rows = [{"question": str(number), "choices": ["one", "two"], "answer": 0} for number in range(4)]
    (clone / "quiz.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for folder, name in (("my_tasks", "my_quiz"), ("stand_in_tasks", "hellaswag"), ("stand_in_tasks", "arc_easy")):
        (clone / folder).mkdir(exist_ok=True)
        (clone / folder / f"{name}.yaml").write_text(yaml.safe_dump({**task, "task": name}))


@pytest.fixture(scope="module")
def demo(tmp_path_factory, text_files):
    """A clone after `make demo`, with only the reader's text files added."""
    clone = make_clone(tmp_path_factory.mktemp("clone") / "groundwork")
    clone.joinpath("text").symlink_to(text_files)
    result = type_in(clone, "make demo")
    assert result.returncode == 0, result.stdout + result.stderr
    write_tasks(clone)
    return clone


def lend_stand_ins(clone, commands: str) -> None:
    """Creates the reader's files that the commands use but don't create."""
    for name in STAND_INS:
        named = name if name != "data/fineweb_edu" else "recipes/llama_125m.yaml"
        source = clone / DEMOS[name.split("/")[0]]
        target = clone / name
        made = rf"--output {name}\b|--text '?{Path(name).stem}\b"
        if re.search(rf"{named}\b", commands) and not re.search(made, commands):
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)


def read(words: list[str]) -> None:
    """Parses a command with its script, without reading data. Raises or exits if it is rejected."""
    script = words[0]
    arguments = words[1:]
    problems = []
    if script == "train.py" and "--text" in arguments:
        read_own_text(arguments)
    elif script == "train.py":
        read_command_line(arguments, "")
    elif script == "prepare_data.py":
        parse_arguments("", arguments)
    elif script == "evaluate.py":
        runpy.run_path(str(ROOT / script))["read_arguments"](arguments)  # `evaluate` is also a library's name
    elif script == "publish.py":
        problems = publish.read_arguments(arguments)[1]
    elif script == "plan.py":
        own, rest = plan.parse_arguments("", named_recipe(arguments))
        problems = plan.option_problems(own)
        if own.config is not None:
            read_run_config(own.config, pair_up(rest))
    elif script == "runs.py":
        own, rest = runs.parser().parse_known_args(arguments)
        if own.subcommand in runs.TRAINING:
            read_run_config(own.recipe, pair_up(rest))
        else:
            problems = rest
    else:
        assert (ROOT / script).is_file()
    assert problems == []


def read_command(words: list[str]) -> None:
    """Parses a command, including its launcher. All files in it must exist."""
    words = [WORDS.get(word, word).replace("$files/", "") for word in words]
    if installed := re.match(r"groundwork-(.*)", words[0]):
        words[:1] = ["python", f"{installed[1].replace('-', '_')}.py"]
    if words[:2] == ["accelerate", "launch"] or words[:3] == ["python", "-m", "pretrain.launch"]:
        words = [word for word in words if word != "--supervise"]
        given = words[2:] if words[0] == "accelerate" else take_own_options(words[3:])[1]
        own = launch_command_parser().parse_args(given)
        words = [own.training_script, *own.training_script_args]
        assert (ROOT / own.config_file).is_file()
        assert own.num_processes or own.config_file.endswith("single.yaml"), "accelerate requires --num_processes"
    elif words[0] == "torchrun":
        own = get_args_parser().parse_args(words[1:])
        words = [own.training_script, *own.training_script_args]
    else:
        words = words[1:]
    read(words)


def matches(patterns, command: str) -> bool:
    return any(re.search(pattern, command) for pattern in patterns)


def check(command: Command, clone) -> str | None:
    """Runs or parses a command. Returns the problem, if any."""
    if matches(NOT_RUN, command.text):
        target = re.match(r"make (\S+)", command.text)
        known = target is None or re.search(rf"^{target[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        files = re.findall(r"\b[\w/-]+\.(?:txt|yaml|json)\b", re.sub(r"\w+://\S+", "", command.text))
        return None if known and all((ROOT / file).exists() for file in files) else "no such target or file"
    if not re.search(RUN, re.sub(VARIABLES, "", command.text)):
        return "is neither run nor read, and not listed in NOT_RUN with the reason"
    if matches(ONLY_READ, command.text):
        try:
            read_command(shlex.split(re.sub(VARIABLES, "", command.text)))
        except (Exception, SystemExit) as error:
            return f"{type(error).__name__}: {error}"
        return None
    if command.text in PLANNED:
        return None
    PLANNED.update([command.text] if "plan.py" in command.text else [])
    if command.text.startswith("python plan.py --config") and command.page != "README.md":
        return plan_here(shlex.split(command.text)[1:])
    result = type_in(clone, command.text)
    said = result.stdout + result.stderr
    for answer in [answer for pattern, answer in REFUSED.items() if re.search(pattern, command.text)]:
        return None if result.returncode == 2 and answer in said else said
    return f"exit status {result.returncode}\n{said}" if result.returncode else None


def plan_here(words: list[str]) -> str | None:
    """Runs a plan.py command in this process, with a formula instead of traces, which take seconds each. Returns the
    problem, if any."""
    with pytest.MonkeyPatch.context() as patch:
        use_quick_traces(patch)
        patch.setattr(sys, "argv", words)
        try:
            plan.main()
        except (Exception, SystemExit) as error:
            return f"{type(error).__name__}: {error}"
    return None


@pytest.fixture
def extensions_are_forgotten():
    """Unregisters a page's extensions, so that other tests don't find them."""
    yield
    for table in [value for value in vars(registry).values() if isinstance(value, registry.Table)]:
        for name, entry in list(table.data.items()):
            if getattr(entry, "__module__", "").startswith("groundwork_extension_"):
                del table.data[name]
    for name in [name for name in sys.modules if name.startswith("groundwork_extension_")]:
        del sys.modules[name]


@pytest.mark.usefixtures("extensions_are_forgotten")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_work_in_their_order(page, demo, text_files, tmp_path, monkeypatch):
    commands = commands_in(page.name, page.read_text())
    clone = copy_clone(demo, tmp_path / "groundwork")
    whole = "\n".join(command.text for command in commands)
    lend_inputs(clone, whole, text_files)
    lend_stand_ins(clone, whole)
    monkeypatch.chdir(clone)
    wrong = [f"{command}\n{problem}" for command in commands if (problem := check(command, clone))]
    assert not wrong, "\n\n".join(wrong)


NEEDS_ENVIRONMENT = r"^(python|pip|accelerate|torchrun|deepspeed|make .*PYTHON=python\b)"
"""Commands that use the Python of the active environment."""
TRAINS = r"\b(?:train\.py|runs\.py parity) --config (recipes/\w+\.yaml)"


def outside_the_environment(commands: list[Command]) -> list[Command]:
    """Returns the commands that use another Python than `make install`, because .venv isn't active yet."""
    installed = active = False
    found = []
    for command in commands:
        installed |= bool(re.match(r"make (install|demo|test)\b", command.text))
        active |= bool(re.search(r"(^|&& )(\.|source) \.venv/bin/activate", command.text))
        if installed and not active and re.search(NEEDS_ENVIRONMENT, re.sub(VARIABLES, "", command.text)):
            found.append(command)
    return found


def without_data(commands: list[Command]) -> list[tuple[Command, str]]:
    """Returns (command, data folder) for commands that train a recipe before any command prepares its data."""
    prepared, found = set(), []
    for command in commands:
        prepared |= {"data/demo"} if command.text.startswith("make demo") else set()
        if "prepare_data.py" in command.text:
            prepared |= set(re.findall(r"--output (\S+)", command.text))
        for recipe in re.findall(TRAINS, command.text):
            needed = re.findall(r"\bdata/\w+", str(yaml.safe_load((ROOT / recipe).read_text())["data"]))
            assert needed, recipe
            found += [(command, folder) for folder in needed if folder not in prepared]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_after_installing_the_commands_use_the_environment(page):
    assert not outside_the_environment(commands_in(page.name, page.read_text()))


@pytest.mark.parametrize("name", ["README.md", "docs/gpu.md"])
def test_a_page_that_starts_from_nothing_prepares_the_data_that_it_trains_on(name):
    assert not without_data(commands_in(name, (ROOT / name).read_text()))


def test_a_missing_environment_and_missing_data_are_detected():
    text = "    make install\n    make gpu PYTHON=python\n    X=1 torchrun train.py --config recipes/llama_125m.yaml\n"
    commands = commands_in("page.md", text)
    assert outside_the_environment(commands) == commands[1:]
    assert without_data(commands) == [(commands[2], "data/fineweb_edu")]
    prepare = "    . .venv/bin/activate\n    python prepare_data.py --dataset x --output data/fineweb_edu\n"
    commands = commands_in("page.md", text.replace("install\n", f"install\n{prepare}"))
    assert outside_the_environment(commands) == without_data(commands) == []


def test_commands_are_separated_from_their_output():
    text = "# Page\n\n    python a.py \\\n        --b 1   # why\n    step 0 · loss 7\n\npython c.py\n\n"
    text += "```yaml\npython: 1\n```\n## Next\n```bash\n# first\nX=1 anything at all\n```\n"
    text += "```\ngit clone URL\nCloning\n```\n"
    found = [(command.line, command.section, command.text) for command in commands_in("page.md", text)]
    assert found == [
        (3, "Page", "python a.py --b 1"), (15, "Next", "X=1 anything at all"), (18, "Next", "git clone URL"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("docker run groundwork", "neither run nor read"),
        ("make coffee", "neither run nor read"),
        ("pip install -r requirements-none.txt", "no such target or file"),
        ("torchrun --nproc_per_node 8 train.py --config recipes/none.yaml", "none"),
        ("accelerate launch --config_file accelerate_configs/fsdp2.yaml train.py --config recipes/none.yaml", "none"),
        (
            "accelerate launch --config_file accelerate_configs/fsdp3.yaml train.py --config fsdp2.yaml",
            "AssertionError",
        ),
        ("python runs.py parity --config recipes/demo.yaml --stops 10", "--stops: unknown"),
        ("python train.py --config recipes/demo.yaml --smoke --optim.learning_rat 1", "learning_rate"),
        ("python plan.py --config recipes/demo.yaml --gpu cpu --gpus 0", "--gpus"),
    ],
)
def test_a_broken_command_is_detected(text, problem, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert problem in check(Command("page.md", 1, "Page", text), ROOT)


def test_a_rejected_run_is_detected(demo):
    """The demo's accepted commands left their output files."""
    wrong = check(Command("page.md", 1, "Page", "python evaluate.py --model runs/demo --data data/none"), demo)
    assert "exit status 2" in wrong and "data/none" in wrong
    assert (demo / "runs/demo/final/model.safetensors").exists() and (demo / "runs/demo/evaluation.json").exists()


def headings(page) -> dict[str, str]:
    """Returns {anchor: heading} for a page, with anchors as on GitHub."""
    found = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"): heading for heading in found}


def test_pages_and_sections_that_messages_name_exist():
    """Checks code, recipes, scripts and other pages."""
    files = [path for ending in ("py", "yaml", "sbatch", "md", "ipynb") for path in ROOT.glob(f"[!.]*/**/*.{ending}")]
    named = set()
    for path in [*ROOT.glob("*.*"), ROOT / "Makefile", *files]:
        text = path.read_text() if path.is_file() and path.parts[len(ROOT.parts)] not in UNTRACKED else ""
        named |= set(re.findall(r"\b(docs/\w+\.(?:md|ipynb))(?:, section \"([^\"]+)\")?", text))
    assert ("docs/failures.md", "Out of memory") in named
    for page, section in named - {("docs/x.md", "")}:
        assert (ROOT / page).is_file(), page
        assert not section or section in headings(ROOT / page).values(), f"{page}, section {section}"
