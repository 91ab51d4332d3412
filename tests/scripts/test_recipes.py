"""Tests that every shipped recipe passes --check with stand-in shards, and that its plan is up to date."""

import itertools
import os
import re
import shlex

import pytest
import torch

import plan
from pretrain.gpus import GIB
from pretrain.hardware import missing_bf16
from pretrain.model.build import check_vocabulary
from pretrain.model.model_config import load_model_config, load_recipe_model_config
from pretrain.recipe import pair_up, read_command_line, read_run_config
from pretrain.training.run_plan import derive, sequences_of
from pretrain.training.validation import open_validation
from pretrain.units import bytes_text
from pretrain_tools.planning import memory, report
from pretrain_tools.planning.activations import Activations, Line
from support.pages import PAGES, commands_in
from support.project import ROOT, run_script

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
WANTED = {"demo", "llama_125m", "llama_1b", "qwen3_0.6b", "deepone_162m", "gpt2_124m", "tiny_curriculum"}
WANTED |= {"big_batch_adamw", "smollm_corpus", "continue_pretraining", "pile_406m", "any_text"}


TOKENIZERS = {
    "gpt2": 50_257,
    "HuggingFaceTB/cosmo2-tokenizer": 49_152,
    "HuggingFaceTB/SmolLM2-135M": 49_152,
    "Qwen/Qwen3-0.6B-Base": 151_669,
}
"""{Hub tokenizer used in recipes: number of token IDs}"""


def stand_ins(name, shards, folder) -> list[tuple[str, str]]:
    """Returns overrides that replace the recipe's shards with small ones, without epoch limits.

    Recipes that continue training a Hub model use a local config with the same shape.
    """
    data = read_run_config(ROOT / f"recipes/{name}.yaml").data
    overrides = []
    for number, stage in enumerate(data.mixtures):
        prefix = f"data.stages.{number}.train" if data.stages else "data.train"
        for place, source in enumerate(stage.train):
            stand_in = folder / source.shards
            stand_in.parent.mkdir(parents=True, exist_ok=True)
            if not stand_in.exists():
                stand_in.symlink_to(shards)
            overrides.append((f"{prefix}.{place}.shards", str(stand_in)))
            if source.max_epochs:
                overrides.append((f"{prefix}.{place}.max_epochs", "null"))
    if name == "continue_pretraining":
        overrides += [("model", "model_configs/smollm_135m.json"), ("init", "scratch")]
    return overrides


def test_the_recipes_that_are_documented_exist():
    assert set(RECIPES) >= WANTED


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_passes_the_check(name, shards, tmp_path, monkeypatch):
    """Runs --check on a CPU, so attention and precision are those for a CPU."""
    monkeypatch.chdir(ROOT)
    config = read_run_config(f"recipes/{name}.yaml", stand_ins(name, shards, tmp_path))
    run = derive(config, ranks=1)
    open_validation(config.data)
    assert run.total_steps > 0 and run.micro_steps(0) >= 1


def test_the_check_itself_says_that_a_recipe_can_run(shards, tmp_path):
    overrides = [word for key, value in stand_ins("smollm_corpus", shards, tmp_path) for word in (f"--{key}", value)]
    result = run_script("train.py", "--config", "recipes/smollm_corpus.yaml", "--check", *overrides)
    assert "this run can start" in result.stdout


LAUNCH = re.compile(r"(?:num_processes|nproc_per_node) (\d+) .*\btrain\.py (--config (\S+).*)")
SHARING = re.compile(r"(tp|cp|mesh)\.yaml")
"""Accelerate configs whose processes share sequences."""


def test_a_recipes_batch_divides_among_the_processes_of_every_command(monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = [command.text for page in PAGES for command in commands_in(page.name, page.read_text())]
    launches = [LAUNCH.search(text) for text in commands if not SHARING.search(text)]
    shipped = [found for found in launches if found and (ROOT / found[3]).exists()]
    assert {"recipes/demo.yaml", "recipes/llama_125m.yaml", "recipes/llama_1b.yaml"} <= {found[3] for found in shipped}
    for processes, arguments, _ in (found.groups() for found in shipped):
        sequences_of(read_command_line(shlex.split(arguments), "").config, int(processes))


def preparations_in(text: str) -> dict[str, tuple[str, int]]:
    """Returns {shard folder: (tokenizer, number of IDs)} for the prepare_data.py commands in a recipe's comments or a
    page."""
    lines = text.replace("\\\n#", " ").replace("\\\n", " ").splitlines()
    commands = [shlex.split(line.strip("# ")) for line in lines if "python prepare_data.py" in line]
    options = [dict(itertools.pairwise(words)) for words in commands]
    sizes = TOKENIZERS | {o["--output"]: int(o["--train_tokenizer"]) for o in options if "--train_tokenizer" in o}
    return {o["--output"]: (o["--tokenizer"], sizes[o["--tokenizer"]]) for o in options if "--tokenizer" in o}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_how_its_data_is_prepared_and_the_vocabulary_fits(name):
    """Each shard folder is created by a command in the comments, with a tokenizer that is trained there or on
    the Hub."""
    text = (ROOT / f"recipes/{name}.yaml").read_text()
    commands = (ROOT / "Makefile").read_text().replace("$(BIN)/", "") if "`make demo`" in text else text
    prepared = preparations_in(commands)
    overrides = [("model", "model_configs/smollm_135m.json")] if name == "continue_pretraining" else []
    config = read_run_config(ROOT / f"recipes/{name}.yaml", overrides)
    folders = {str(source.shards) for stage in config.data.mixtures for source in stage.train}
    assert folders <= prepared.keys()
    (vocabulary,) = {prepared[folder] for folder in folders}
    source = config.model.model_copy(update={"config": str(ROOT / config.model.config)})
    assert check_vocabulary(load_recipe_model_config(source, vocabulary[1]), vocabulary[1]) == []


def test_folders_of_the_same_name_have_the_same_tokenizer():
    tokenizers: dict[str, set] = {}
    for name in RECIPES:
        for folder, tokenizer in preparations_in((ROOT / f"recipes/{name}.yaml").read_text()).items():
            tokenizers.setdefault(folder, set()).add(tokenizer)
    assert {folder: each for folder, each in tokenizers.items() if len(each) > 1} == {}


def test_the_readmes_shards_are_those_of_its_recipe():
    prepared = preparations_in((ROOT / "README.md").read_text())
    (source,) = read_run_config(ROOT / "recipes/llama_125m.yaml").data.train
    assert prepared[str(source.shards)] == ("tokenizers/fineweb_edu", 32_000)


HEADER = re.compile(r"^# Plan \(from plan\.py (?P<command>.*)\):\n(?P<work># .*)\n# (?P<strategy>\w+)", re.MULTILINE)
"""The comment printed by `plan.py --comment`, with wrapped lines joined."""
ALL = os.environ.get("PLANS") == "all"
TRACED = {"llama_125m", "long_context_demo", "moe_5m"}
"""Recipes whose memory plan is always tested. The others need PLANS=all, because a trace takes seconds."""
USES_AUTOCAST = {"single": True, "ddp": True, "fsdp2": False, "hsdp": False}
"""{strategy: True if the forward pass uses fp32 weights under autocast, False if it uses bf16 weights}"""


def plan_as_user(command, folder, monkeypatch, capsys) -> str:
    """Returns the output of `python plan.py COMMAND --comment` without prepared data."""
    for name in ("recipes", "model_configs"):
        (folder / name).symlink_to(ROOT / name)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["plan.py", *shlex.split(command), "--comment"])
    plan.main()
    return capsys.readouterr().out.strip()


def trace_only(strategies, monkeypatch) -> None:
    """Traces only these strategies' forward passes. Other strategies' activations count as zero."""
    consider, trace, considered = report.consider, memory.trace_activations, []

    def consider_now(name, *rest):
        considered[:] = [name]
        return consider(name, *rest)

    def trace_or_formula(model_config, call):
        (name,) = considered
        is_used = call.weights == torch.float32 and not call.autocast
        is_used |= USES_AUTOCAST.get(name, call.autocast) == call.autocast
        return trace(model_config, call) if name in strategies and is_used else Activations(*[Line([0.0, 0.0])] * 8)

    monkeypatch.setattr(report, "consider", consider_now)
    monkeypatch.setattr(memory, "trace_activations", trace_or_formula)


@pytest.mark.parametrize("name", RECIPES)
def test_the_plan_in_a_recipe_is_what_plan_py_prints(name, tmp_path, monkeypatch, capsys):
    """The plan in each recipe is up to date. Update it with `python plan.py ... --comment`. Times on a CPU aren't
    compared."""
    text = (ROOT / f"recipes/{name}.yaml").read_text()
    header = HEADER.search(text.replace("\n#   ", " "))
    assert header, "no plan: python plan.py --config recipes/NAME.yaml --gpus N --gpu KIND --comment"
    command = header["command"]
    assert f"--config recipes/{name}.yaml" in command
    if "--gpu cpu" in command:
        if "--precision bf16" in command and (missing := missing_bf16("cpu")):
            pytest.skip(missing)
        trace_only([], monkeypatch)
        printed = plan_as_user(command, tmp_path, monkeypatch, capsys)
        assert printed.splitlines()[1] == header["work"]
        assert printed.rpartition("; ")[2] == f"{text.partition(' of disk')[0].rpartition('; ')[2]} of disk"
        return
    is_traced = name in TRACED or ALL
    trace_only([header["strategy"]] * is_traced, monkeypatch)
    printed, shown = plan_as_user(command, tmp_path, monkeypatch, capsys), text
    if not is_traced:
        printed, shown = (re.sub(r"[\d.]+ GB per GPU, ", "", each) for each in (printed, text))
    assert printed in shown


PLANS = {
    "| `llama_125m`, 2.5B tokens | 1 |": "--config recipes/llama_125m.yaml",
    "| `llama_1b`, 22B tokens | 8 |": "--config recipes/llama_1b.yaml",
    "| `big_batch_adamw` with `llama_7b.json`, 135B tokens | 32 |": "--config recipes/big_batch_adamw.yaml --model "
    "model_configs/llama_7b.json",
    "| `big_batch_adamw` with `llama_13b.json`, 260B tokens | 64 |": "--config recipes/big_batch_adamw.yaml --model "
    "model_configs/llama_13b.json",
}
"""{first columns of a plan's row in docs/memory.md: plan.py arguments}"""
SHORT_PLANS = list(PLANS) if ALL else list(PLANS)[:1]
PAGE = (ROOT / "docs/memory.md").read_text()


def plan_on_page(command, strategies, monkeypatch) -> report.Plan:
    """Returns the plan from `python plan.py COMMAND --gpu h100`, tracing only these strategies' memory."""
    monkeypatch.chdir(ROOT)
    trace_only(strategies, monkeypatch)
    options, rest = plan.parse_arguments("", [*shlex.split(command), "--gpu", "h100"])
    overrides = pair_up(rest)
    hardware = plan.hardware_of(options, plan.gpu_of(options))
    return report.build_plan(read_run_config(options.config, overrides), options.config, overrides, hardware)


def test_every_plan_of_the_page_is_known():
    assert re.findall(r"^(\| `\w+`.*? tokens \| \d+ \|)", PAGE, re.MULTILINE) == list(PLANS)


@pytest.mark.parametrize("begin", SHORT_PLANS)
def test_a_plan_on_the_page_is_what_plan_py_says(begin, monkeypatch):
    (row,) = [line for line in PAGE.splitlines() if line.startswith(begin)]
    gpus = begin.split()[-2]
    found = plan_on_page(f"{PLANS[begin]} --gpus {gpus}", [row.removeprefix(begin).split()[0].strip(",")], monkeypatch)
    chosen = found.recommended
    changed = chosen.micro_batch != found.config.batch.sequences_per_micro_batch
    strategy = chosen.name + f", {chosen.micro_batch} sequences" * changed
    assert row == (
        f"{begin} {strategy} | {chosen.planned_memory.total / GIB:.1f} | {found.hours:.1f} at {found.mfu:.0%} | "
        f"{found.gpu_hours:,.0f} | ${found.cost:,.0f} | {bytes_text(found.storage.total)} |"
    )
    tokens = float(re.search(r"([\d.]+)B tokens", begin)[1])
    assert found.work.tokens == pytest.approx(tokens * 1e9, rel=0.01)


@pytest.mark.skipif(not ALL, reason="plans two 7B models: PLANS=all")
def test_the_moe_figures_on_the_page_match_plan_py(monkeypatch):
    command = "--config recipes/llama_1b.yaml --model model_configs/olmoe_7b.json --gpus 8"
    found = plan_on_page(command, ["fsdp2", "ep"], monkeypatch)
    fsdp2, ep = ({each.name: each for each in reversed(found.candidates)}[name] for name in ("fsdp2", "ep"))
    speed = {each.name: round(found.work.tokens_per_step / each.step_seconds, -3) for each in (fsdp2, ep)}
    said = (
        f"{speed['fsdp2']:,.0f} tokens/s from fsdp2 in {fsdp2.memory.total / GIB:.0f} GB and {speed['ep']:,.0f} from "
        f"ep in {ep.memory.total / GIB:.0f} GB"
    )
    assert said in (ROOT / "docs/experts.md").read_text().replace("\n", " ") and ep.fits and fsdp2.fits


@pytest.mark.skipif(not ALL, reason="traces sequences of 128k tokens: PLANS=all")
def test_the_long_context_figures_on_the_page_match_plan_py(monkeypatch):
    page = (ROOT / "docs/long_context.md").read_text()
    command = re.search(r"python plan.py (.*) --gpu h100 (.* 128k .*)", page)
    found = {}
    for setting in ("none", "full"):
        arguments = f"{command[1]} {command[2]} --activation_checkpointing {setting}"
        candidates = plan_on_page(arguments, ["fsdp2", "cp"], monkeypatch).candidates
        for each in (each for each in reversed(candidates) if each.memory):
            speed = 1024 * 1024 / each.step_seconds
            found[each.name, setting] = f"{each.memory.total / GIB:.3g} GB", f"{round(speed, -2):,.0f} tokens/s"
    (cp, cp_speed), (fsdp2, _), (full, full_speed) = (
        found["cp", "none"],
        found["fsdp2", "none"],
        found["fsdp2", "full"],
    )
    assert (
        f"predicts {cp} per GPU and {cp_speed}. FSDP2 would need {fsdp2}. With activation checkpointing, FSDP2 would "
        f"need {full} and reach {full_speed}"
    ) in page.replace("\n", " ")


def test_the_smollm_corpus_has_natural_weights():
    """The datasets have 220B, 28B and 4B tokens."""
    sources = read_run_config(ROOT / "recipes/smollm_corpus.yaml").data.train
    tokens = {"fineweb_edu_dedup": 220, "cosmopedia_v2": 28, "python_edu": 4}
    assert {source.shards.name: round(source.weight * 252) for source in sources} == tokens


def test_the_pile_recipe_is_the_gpt2_recipe_at_406m():
    config = read_run_config(ROOT / "recipes/pile_406m.yaml")
    model = load_model_config(str(ROOT / config.model.config))
    assert (model.hidden_size, model.num_attention_heads, model.num_hidden_layers) == (1024, 16, 24)
    assert (config.data.sampling, config.data.sequence_length) == ("random_windows", 1024)
